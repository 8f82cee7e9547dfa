from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import BatchNorm1d, Linear, Module, ReLU, Sequential, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    TensorDataset,
)

import ignite_dist as idist
from ignite_dist.comp_models.native.training import _wrap_model
from on_ranks import SIZE, on_ranks, warned

# --- auto_model --------------------------------------------------------------------------------------


def _net() -> Module:
    torch.manual_seed(3)
    return Sequential(Linear(5, 8), ReLU(), Linear(8, 2)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(SIZE, 2, generator=generator, dtype=torch.float64)


def _gradients(_: int = 0) -> list[torch.Tensor]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(TensorDataset(*_data()), batch_size=SIZE, shuffle=False)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(one is not None for one in gradients)
    return [*gradients, *(parameter.detach() for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_and_the_step_equal_those_of_a_single_process(world_size: int) -> None:
    alone = _gradients()
    for found in on_ranks(_gradients, world_size=world_size):
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def _models(_: int) -> dict[str, Any]:
    torch.manual_seed(idist.get_rank())
    frozen = _net().requires_grad_(False)
    model, normal = _net(), Sequential(Linear(5, 8), BatchNorm1d(8))
    wrapped = idist.auto_model(model, find_unused_parameters=True)
    (with_sync_bn, messages) = warned(lambda: idist.auto_model(normal, sync_bn=True))
    with pytest.raises(TypeError, match="find_unused_params"):
        idist.auto_model(_net(), find_unused_params=True)
    return {
        "wrapped": isinstance(wrapped, DistributedDataParallel) and wrapped.module is model,
        "kwargs": wrapped.find_unused_parameters,
        "frozen": idist.auto_model(frozen) is frozen,
        "its weight": frozen[0].weight.tolist(),
        "empty": isinstance(idist.auto_model(ReLU()), ReLU),
        "sync_bn": any(isinstance(part, SyncBatchNorm) for part in with_sync_bn.modules()),
        "messages": messages,
    }


class _Masked(Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(1).expand(4))


def _frozen(_: int) -> tuple[list[Any], list[str]]:
    torch.manual_seed(idist.get_rank())
    model = _Masked().requires_grad_(False)
    _, messages = warned(lambda: idist.auto_model(model))
    return model.weight.tolist(), messages


def test_what_cannot_be_sent_of_a_frozen_model_is_named() -> None:
    (weight, (message,)), (other, _) = on_ranks(_frozen)
    assert weight == other and "leaves mask of this frozen model" in message


def test_a_model_is_wrapped_where_it_has_something_to_train() -> None:
    ranks = on_ranks(_models)
    assert ranks[0].pop("its weight") == ranks[1].pop("its weight")
    for found in ranks:
        messages = found.pop("messages")
        assert found == {"wrapped": True, "kwargs": True, "frozen": True, "empty": True, "sync_bn": False}
        (message,) = messages
        assert "sync_bn" in message
        assert message.startswith("test_auto.py:")


def _drawn(seed: int) -> Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Linear(3, 1)


def _different_starts(_: int) -> list[Any]:
    model = idist.auto_model(_drawn(idist.get_rank()))
    return [parameter.tolist() for parameter in model.parameters()]


def test_every_rank_starts_from_the_parameters_of_rank_zero() -> None:
    assert on_ranks(_different_starts) == [[one.tolist() for one in _drawn(0).parameters()]] * 2


def _named(**tensors: torch.Tensor) -> Module:
    model = Module()
    for name, tensor in tensors.items():
        value = torch.nn.Parameter(tensor) if tensor.requires_grad else None
        model.register_parameter(name, value) if value is not None else model.register_buffer(name, tensor)
    return model


_W = torch.ones(2, 2, requires_grad=True)
# For each difference: the model of rank 0, the model of rank 1, and the end of the error.
DIFFERENT = {
    "dtype": (
        lambda: _named(w=_W.half()),
        lambda: _named(w=_W.bfloat16()),
        "rank 0: parameter 'w', torch.float16 (2, 2); rank 1: parameter 'w', torch.bfloat16 (2, 2)",
    ),
    "dtype of a buffer": (
        lambda: _named(w=_W, b=torch.ones(4)),
        lambda: _named(w=_W, b=torch.ones(4, dtype=torch.int32)),
        "rank 0: buffer 'b', torch.float32 (4,); rank 1: buffer 'b', torch.int32 (4,)",
    ),
    "shape": (
        lambda: _named(w=_W.view(1, 4)),
        lambda: _named(w=_W),
        "rank 0: parameter 'w', torch.float32 (1, 4); rank 1: parameter 'w', torch.float32 (2, 2)",
    ),
    "order": (
        lambda: _named(w=_W, v=_W),
        lambda: _named(v=_W, w=_W),
        "rank 0: parameter 'w', torch.float32 (2, 2); rank 1: parameter 'v', torch.float32 (2, 2)",
    ),
    "number": (
        lambda: _named(w=_W),
        lambda: _named(w=_W, v=_W),
        "rank 0: nothing; rank 1: parameter 'v', torch.float32 (2, 2)",
    ),
    "kind": (
        lambda: _named(w=_W, v=_W),
        lambda: _named(w=_W, v=_W.detach()),
        "rank 0: parameter 'v', torch.float32 (2, 2); rank 1: buffer 'v', torch.float32 (2, 2)",
    ),
    "model that is frozen": (
        lambda: Linear(1, 1),
        lambda: Linear(1, 1).requires_grad_(False),
        "rank 0: parameter 'weight', torch.float32 (1, 1); "
        "rank 1: parameter 'weight', torch.float32 (1, 1), frozen",
    ),
    "frozen model": (
        lambda: Linear(1, 1).requires_grad_(False),
        lambda: Linear(1, 1).double().requires_grad_(False),
        "rank 0: parameter 'weight', torch.float32 (1, 1), frozen; "
        "rank 1: parameter 'weight', torch.float64 (1, 1), frozen",
    ),
}


def _different_models(_: int, strategy: str) -> None:
    for made, made_elsewhere, says in DIFFERENT.values():
        model = (made if idist.get_rank() == 0 else made_elsewhere)()
        values = [value.clone() for value in model.state_dict().values()]
        with pytest.raises(idist.CollectiveMismatchError, match=re.escape(f"difference is: {says}.")):
            idist.auto_model(model, strategy=strategy)
        torch.testing.assert_close([*model.state_dict().values()], values)
        assert idist.all_reduce(1) == idist.get_world_size()


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [
        ("gloo", "ddp"),
        ("gloo", "fsdp"),
        pytest.param("horovod", "ddp", marks=pytest.mark.horovod),
    ],
)
def test_models_that_differ_are_refused_before_any_is_changed(backend: str, strategy: str) -> None:
    idist.spawn(backend, _different_models, (strategy,), nproc_per_node=2)


def _own_buffer(dtype: torch.dtype = torch.float32, size: int = 1, fill: float = 1.0) -> Module:
    return _named(w=torch.ones(2, requires_grad=True), own=torch.full((size,), fill, dtype=dtype))


def _what_may_differ(_: int) -> list[Any]:
    rank = idist.get_rank()
    ignored = _own_buffer(size=1 + rank)
    ignored._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
    found = [ignored, *(_own_buffer(dtype, 1 + rank, rank) for dtype in (torch.float32, torch.int16))]
    idist.auto_model(ignored)
    for model in found[1:]:
        idist.auto_model(model, broadcast_buffers=False)
    frozen = _named(w=torch.ones(1), own=torch.eye(1 + rank).to_sparse())
    with pytest.warns(UserWarning, match="leaves own of this frozen model"):
        idist.auto_model(frozen)
    pairs = [idist.new_group([0, 1]), idist.new_group([2])]  # stages of a pipeline
    stage = Linear(1 + rank // 2, 1)
    if rank < 2:
        idist.auto_model(stage, process_group=pairs[0])
    idist.auto_model(Linear(1, 1 + rank), wrapper=lambda model, **_: Sequential(model))
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stages",))
    alone = DeviceMesh.from_group(dist.new_group([rank], use_local_synchronization=True), "cpu")
    idist.auto_model(Linear(1, 1 + rank), device_mesh=alone)
    idist.auto_model(Linear(1, 1), device_mesh=mesh)
    return [model.own.tolist() for model in found]


def test_what_no_rank_takes_from_another_may_differ() -> None:
    found = on_ranks(_what_may_differ, world_size=3)
    assert found == [[[1.0] * n, [n - 1.0] * n, [n - 1] * n] for n in (1, 2, 3)]


def _tensor_parallel(_: int) -> None:
    mesh = idist.mesh(dp=1, tp=2)
    dtype = torch.float32 if idist.get_rank() == 0 else torch.bfloat16
    model = Sequential(Linear(2, 2), Linear(2, 2, bias=False, dtype=dtype))
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(idist.CollectiveMismatchError, match=r"rank 0: parameter '1.weight', torch.float32"):
        idist.auto_model(model, mesh=mesh)


def test_the_plain_parameters_of_a_tensor_parallel_model_are_compared() -> None:
    on_ranks(_tensor_parallel)


def _other_settings(_: int) -> None:
    settings: list[dict[str, Any]] = [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1},
        {"comm_hook": "fp16"},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "reshard_after_forward": True},
    ]
    for other in settings:
        mine = other if idist.get_rank() else {}
        name, value = [*other.items()][-1]
        with pytest.raises(idist.CollectiveMismatchError, match=re.escape(f"{name}={value!r}")):
            idist.auto_model(Linear(1, 1), **mine)
        assert idist.all_reduce(1) == 2


def test_settings_that_differ_are_refused() -> None:
    on_ranks(_other_settings)


def _on_some_ranks(_: int, kind: str) -> None:
    if idist.get_rank() == 0:
        idist.auto_model(Linear(1, 1).requires_grad_(kind != "frozen"))
    elif kind == "other strategy":
        idist.auto_model(Linear(1, 1), strategy="fsdp")
    else:
        idist.barrier()


@pytest.mark.parametrize("kind", ["trained", "frozen", "other strategy"])
def test_a_model_of_some_ranks_only_is_a_mismatch(kind: str) -> None:
    other = "auto_model at .*strategy='fsdp'" if kind == "other strategy" else "barrier at "
    with pytest.raises(idist.WorkerRaisedError, match=rf"\(rank 0: auto_model at .*; rank 1: {other}"):
        on_ranks(_on_some_ranks, kind)


def test_alone_model_and_optimizer_are_themselves() -> None:
    model = _net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert idist.auto_model(model, sync_bn=True, find_unused_parameters=True) is model
    assert idist.auto_optim(optimizer) is optimizer
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_alone_in_a_context_join_needs_no_wrapper() -> None:
    idist.initialize("gloo")
    try:
        model = idist.auto_model(Linear(2, 1))
        with idist.uneven_inputs(model):
            model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
    finally:
        idist.finalize()


# --- what torch.distributed has around a model ---------------------------------------------------------


def _static(_: int) -> list[float]:
    model = idist.auto_model(Linear(2, 1, bias=False), static_graph=True)
    x = torch.full((1, 2), float(idist.get_rank() + 1))
    with pytest.raises(ValueError, match="static_graph=True"), idist.no_sync(model):
        pass
    model(x).sum().backward()
    with idist.no_sync(model):
        model(x).sum().backward()
    model(x).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def test_a_static_graph_is_learnt_before_gradients_accumulate() -> None:
    first, second = on_ranks(_static)
    assert first == second == [4.5, 4.5]  # 1.5 three times


class OwnWrapper(DistributedDataParallel):
    pass


def _hooked(_: int, comm_hook: Any) -> list[float]:
    model = idist.auto_model(Linear(8, 8, bias=False), comm_hook=comm_hook)
    for _step in range(3):
        model.zero_grad()
        model(torch.full((1, 8), 0.1 * (idist.get_rank() + 1))).sum().backward()
    if comm_hook == "powersgd":  # which averages as usual for its first thousand steps
        assert model._get_ddp_logging_data()["comm_hook"] == "powerSGD_hook"
    gradient = model.module.weight.grad
    return gradient.flatten().tolist()


def _doubling(state, bucket):  # torch refuses an annotation that is not its own class
    state.append(1)
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())  # the sum, not the mean
    return future


@pytest.mark.parametrize(
    ("comm_hook", "expected", "is_rounded"),
    [
        (None, 0.15, False),
        ("fp16", 0.15, True),
        ("powersgd", 0.15, False),
        (dist.BuiltinCommHookType.FP16_COMPRESS, 0.15, True),
        (([], _doubling), 0.3, False),
    ],
)
def test_gradients_are_sent_as_the_hook_says(comm_hook: Any, expected: float, is_rounded: bool) -> None:
    for gradient in on_ranks(_hooked, comm_hook):
        assert gradient == pytest.approx([expected] * 64, abs=2e-4)
        assert (gradient != pytest.approx([expected] * 64, abs=1e-6)) is is_rounded


def _hooked_in_pairs(rank: int, comm_hook: Any) -> list[float]:
    pairs = [idist.new_group([0, 1]), idist.new_group([2, 3])]
    mesh = idist.mesh(replicas=2, dp=2)["dp"]
    gradients = []
    for members in ({"process_group": pairs[rank // 2]}, {"mesh": mesh}):
        model = idist.auto_model(Linear(8, 8, bias=False), comm_hook=comm_hook, **members)
        model(torch.full((1, 8), float(rank))).sum().backward()
        gradients += [model.module.weight.grad.mean().item()]
    return gradients


@pytest.mark.parametrize("comm_hook", ["fp16", "powersgd", dist.BuiltinCommHookType.FP16_COMPRESS])
def test_a_hook_reduces_over_the_ranks_of_the_model(comm_hook: Any) -> None:
    found = on_ranks(_hooked_in_pairs, comm_hook, world_size=4)
    assert found == [[0.5, 0.5], [0.5, 0.5], [2.5, 2.5], [2.5, 2.5]]


def _wraps_for_a_gpu(rank: int) -> list[bool]:
    """Wraps for a GPU that is not there: the wrapper touches no device."""
    pair = idist.new_group([0, 1])
    mesh = idist.mesh(replicas=1, dp=2)["dp"]
    given: list[Any] = []

    def wrapper(model: Module, **kwargs: Any) -> Module:
        given.append(kwargs["device_ids"])
        return model

    found = []
    for members, group in (({"process_group": pair}, pair), ({"device_mesh": mesh}, mesh.get_group())):
        net = Sequential(Linear(2, 2), BatchNorm1d(2))
        wrapped: Any = _wrap_model(
            net, torch.device("cuda", 1), "nccl", True, wrapper, None, None, dict(members)
        )
        found += [isinstance(wrapped[1], SyncBatchNorm), wrapped[1].process_group is group]
    return [*found, given == [[1], [1]]]


def test_batch_norm_on_gpus_is_synchronised_over_the_ranks_of_the_model() -> None:
    assert on_ranks(_wraps_for_a_gpu) == [[True] * 5] * 2


def _refused(_: int) -> bool:
    net = Linear(2, 1)
    with pytest.raises(ValueError, match="needs NCCL"):
        idist.auto_model(net, comm_hook="bf16")
    with pytest.raises(TypeError, match="unexpected keyword"):
        idist.auto_model(net, strategy="fsdp", mp_polici=None)
    return idist.auto_model(net) is not net  # nothing has happened to it


def test_a_hook_that_gloo_refuses_raises_before_the_model_is_wrapped() -> None:
    assert all(on_ranks(_refused))


def _wrapped_by_own(_: int) -> tuple[bool, bool, bool, int]:
    net = Sequential(Linear(2, 2), BatchNorm1d(2))
    calls: list[int] = []

    def buffers(state: Any, named: dict[str, torch.Tensor]) -> None:
        calls.append(len(named))
        for buffer in named.values():
            dist.broadcast(buffer, 0)

    model = idist.auto_model(net, wrapper=OwnWrapper, buffer_hook=(None, buffers), static_graph=True)
    model(torch.randn(4, 2)).sum().backward()
    return type(model) is OwnWrapper, model.static_graph, idist.unwrap_model(model) is net, sum(calls)


def test_a_wrapper_and_a_buffer_hook_of_ones_own() -> None:
    assert on_ranks(_wrapped_by_own) == [(True, True, True, 3)] * 2


def _sharded(_: int, mixed: bool) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    def make() -> Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(idist.get_rank())  # rank 0's are taken
            return Sequential(Linear(4, 6), ReLU(), Linear(6, 2))

    def data(number: int, rank: int) -> torch.Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))

    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    model = idist.auto_model(make(), strategy="fsdp", wrap=[Linear], **policy)
    assert idist.unwrap_model(model) is model and isinstance(model[0], FSDPModule)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.1))
    started = idist.model_state(model)

    def step(first: int) -> torch.Tensor:
        optimizer.zero_grad()
        with idist.no_sync(model):
            with idist.no_sync(model):
                pass
            model(data(first, idist.get_rank())).pow(2).mean().backward()
        model(data(first + 1, idist.get_rank())).pow(2).mean().backward()
        norm = idist.clip_grad_norm(model, 0.3)
        optimizer.step()
        return norm

    norms = [step(0).item()]
    weights, moments = idist.model_state(model), idist.optimizer_state(optimizer)
    norms.append(step(2).item())
    after = idist.model_state(model)
    idist.load_model_state(model, weights)
    idist.load_optimizer_state(optimizer, moments)
    norms.append(step(2).item())  # the same once more
    again = idist.model_state(model)
    inputs = data(99, 0)[:, :1].repeat(2, 4)[
        :5
    ]  # an odd number, for two ranks that make as many forward passes
    loader = idist.auto_dataloader(inputs, batch_size=2, exact="padded")
    with torch.no_grad():
        evaluated = idist.gather_in_order(torch.cat([model(batch).float() for batch in loader]), loader)
        assert (
            evaluated.shape == (5, 2) and (evaluated[0] - evaluated[3]).abs().max() < 1e-6
        )  # the same input
    for function in (
        lambda: idist.accumulate_gradients([1], model, 2, strategy=idist.DDPSyncStrategy.FORCED_SYNC),
        lambda: idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC).__enter__(),
        lambda: idist.uneven_inputs(model).__enter__(),
    ):
        with pytest.raises(ValueError, match="FSDP2"):
            function()
    if idist.get_rank() != 0:
        return {"norms": norms}
    alone = make()
    alone.load_state_dict(started)
    adam = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for first in (0, 2):
        adam.zero_grad()
        losses = [alone(data(first + number, rank)).pow(2).mean() for number in (0, 1) for rank in (0, 1)]
        (torch.stack(losses).sum() / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3).item())
        adam.step()
    return {"norms": norms, "after": after, "again": again, "alone": alone.state_dict()}


@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp_trains_as_a_single_process(mixed: bool) -> None:
    first, second = on_ranks(_sharded, mixed)
    tolerance = {"rtol": 0.05, "atol": 0.15} if mixed else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(first["again"], first["after"])
    torch.testing.assert_close(first["after"], dict(first["alone"]), **tolerance)
    norms = first["norms"]
    assert norms[1] == pytest.approx(norms[2]) and norms[:3] == pytest.approx(second["norms"])
    assert norms[:2] == pytest.approx(norms[3:], rel=0.1 if mixed else 1e-4)


def _zero(_: int) -> tuple[str, list[float], list[float]]:
    net = Linear(3, 3, bias=False)
    torch.nn.init.ones_(net.weight)
    model = idist.auto_model(net)
    plain = torch.optim.AdamW(
        [{"params": [model.module.weight], "lr": 0.5}], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2
    )
    plain.param_groups[0]["name"] = "weights"
    steps: list[int] = []
    plain.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer = idist.auto_optim(plain, zero=True)
    assert idist.auto_optim(optimizer, zero=True) is optimizer
    group = optimizer.param_groups[0]
    before = idist.optimizer_state(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert group["name"] == "weights" and steps == [1]
    options = [group["lr"], *group["betas"], group["weight_decay"]]
    weight = net.weight[0].tolist()
    idist.load_optimizer_state(optimizer, before)
    assert idist.optimizer_state(optimizer).get("state", {}) == {}  # as before: nothing of the step is left
    return type(optimizer).__name__, options, weight


def test_zero_has_the_optimizer_s_own_groups_and_options() -> None:
    for name, options, weight in on_ranks(_zero):
        assert name == "ZeroRedundancyOptimizer"
        assert options == pytest.approx([0.05, 0.8, 0.9, 0.2])
        assert weight == pytest.approx([1 - 0.5 * 0.2 - 0.5] * 3, abs=1e-4)


def _max_norm(local_rank: int) -> list[str]:
    net = torch.nn.Sequential(torch.nn.Embedding(4, 3, max_norm=1.0), torch.nn.Embedding(4, 3))
    _, messages = warned(lambda: idist.auto_model(net))
    return messages


def test_max_norm_whose_weights_drift_apart_is_said_aloud() -> None:
    for messages in idist.spawn("gloo", _max_norm, nproc_per_node=2):
        assert len(messages) == 1 and "Embedding(max_norm=) '0' changes its weight" in messages[0]
    assert _max_norm(0) == []


def _left_in_the_middle(local_rank: int) -> None:
    model = idist.auto_model(Linear(1, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def loop(is_left: bool, zeroes_first: bool = False) -> list[str]:
        def steps() -> None:
            for x, sync in idist.accumulate_gradients([torch.ones(1, 1)] * 2, model, 2):
                with sync:
                    loss = model(x).sum()
                    if zeroes_first and sync.number == 0:
                        optimizer.zero_grad()
                    loss.backward()
                if is_left:
                    break
                if sync.is_final:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps()
        return [str(one.message) for one in caught]

    assert loop(is_left=False) == []
    assert loop(is_left=True) == [], "zeros are no gradients that were left"
    assert loop(is_left=True, zeroes_first=True) == []
    (message,) = loop(is_left=False)
    assert "counts gradients from before, for example of 'weight'" in message


def test_gradients_left_by_an_earlier_loop_are_said_aloud() -> None:
    on_ranks(_left_in_the_middle)
