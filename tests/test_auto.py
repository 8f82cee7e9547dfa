from __future__ import annotations

import copy
import dataclasses
import linecache
import random
import sys
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import BatchNorm1d, DataParallel, Linear, Module, ReLU, Sequential, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import ignite_dist as idist
from ignite_dist.comp_models.serial import SerialModel
from ignite_dist.context import live
from ignite_dist.samplers import DistributedProxySampler, EpochSampler

SIZE = 12


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * idist.get_rank(), 4 * idist.get_rank() + 4))


def on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    results: list[Any] = idist.spawn("gloo", function, args, nproc_per_node=world_size)
    return results


def indices(loader: DataLoader[int]) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def warned(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    for one in caught:
        assert "idist." in linecache.getline(one.filename, one.lineno), "it points at the call"
    return result, [f"{one.filename.rpartition('/')[2]}: {one.message}" for one in caught]


# --- auto_dataloader: what is divided ----------------------------------------------------------------


def _divisions(_: int) -> dict[str, Any]:
    def make(**kwargs: Any) -> tuple[int | None, int, list[str]]:
        loader, messages = warned(lambda: idist.auto_dataloader(Numbers(), **kwargs))
        return loader.batch_size, loader.num_workers, messages

    return {
        "even": make(batch_size=6),
        "odd": make(batch_size=5),
        "small": make(batch_size=1),
        "none": make(batch_size=None),
        "default": make(),
        "workers": make(num_workers=4)[1],
        "odd workers": make(num_workers=3)[1],
        "one worker": make(num_workers=1)[1],
        "no workers": make(num_workers=0)[1],
    }


def test_batch_size_and_workers_are_divided_and_a_remainder_is_said_aloud() -> None:
    for found in on_ranks(_divisions):
        assert found["even"] == (3, 0, [])
        assert found["default"] == (1, 0, [])
        assert found["none"] == (None, 0, [])
        size, _, messages = found["odd"]
        assert size == 2
        assert len(messages) == 1
        for text in ("batch_size=5", "world size 2", "batches of 2", "4 samples"):
            assert text in messages[0]
        size, _, messages = found["small"]
        assert size == 1
        assert len(messages) == 1
        for text in ("batch_size=1", "world size 2", "batches of 1", "2 samples"):
            assert text in messages[0]
        assert (found["workers"], found["odd workers"], found["one worker"], found["no workers"]) == (
            2,
            2,
            1,
            0,
        )


def _of_others(rank: int) -> list[str]:
    sampler = DistributedSampler(Numbers(), num_replicas=3, rank=2)  # type: ignore[arg-type]
    return warned(lambda: idist.auto_dataloader(Numbers(), sampler=sampler))[1]


def test_a_sampler_that_was_made_for_other_ranks_is_said_aloud() -> None:
    for rank, (message,) in enumerate(on_ranks(_of_others)):
        assert message.startswith("test_auto.py:")
        assert "rank 2 of 3" in message and f"rank {rank} of 2" in message


def test_the_warning_points_at_the_callers_line() -> None:
    for found in on_ranks(_divisions):
        assert found["odd"][2][0].startswith("test_auto.py:")
        assert found["small"][2][0].startswith("test_auto.py:")


def test_alone_it_is_a_plain_data_loader() -> None:
    loader, messages = warned(
        lambda: idist.auto_dataloader(Numbers(), batch_size=5, num_workers=0, shuffle=False)
    )
    assert type(loader) is DataLoader
    assert (loader.batch_size, loader.pin_memory, messages) == (5, False, [])
    assert indices(loader) == list(range(SIZE))


# --- auto_dataloader: samplers -----------------------------------------------------------------------


def _sampler_kinds(_: int) -> dict[str, Any]:
    rank = idist.get_rank()
    own = DistributedSampler(Numbers(), num_replicas=2, rank=rank, shuffle=False)
    wrong = DistributedSampler(Numbers(), num_replicas=3, rank=2)
    left_out = idist.auto_dataloader(Numbers(), batch_size=4)
    unshuffled = idist.auto_dataloader(Numbers(), batch_size=4, shuffle=False)
    taken = idist.auto_dataloader(Numbers(), batch_size=4, sampler=own)
    shared = idist.auto_dataloader(Numbers(), batch_size=4, sampler=SubsetRandomSampler([1, 3, 5, 7]))
    misfit, complaints = warned(lambda: idist.auto_dataloader(Numbers(), sampler=wrong))
    mine = BatchSampler(SequentialSampler(range(SIZE)), batch_size=5, drop_last=False)
    batched, notes = warned(lambda: idist.auto_dataloader(Numbers(), batch_sampler=mine))
    stream = idist.auto_dataloader(Stream(), batch_size=4)
    with pytest.raises(ValueError, match=r"sampler.*shuffle"):
        idist.auto_dataloader(Numbers(), sampler=own, shuffle=True)
    return {
        "types": [type(one.sampler) for one in (left_out, unshuffled, shared)],
        "taken as it is": taken.sampler is own and misfit.sampler is wrong and batched.batch_sampler is mine,
        "indices": [indices(one) for one in (left_out, unshuffled, taken, shared, batched, stream)],
        "complaints": complaints,
        "notes": notes,
    }


def test_every_kind_of_sampler() -> None:
    first, second = on_ranks(_sampler_kinds)
    for found in (first, second):
        assert found["types"] == [EpochSampler, EpochSampler, DistributedProxySampler]
        assert found["taken as it is"]
    both = list(zip(first["indices"], second["indices"], strict=True))
    left_out, unshuffled, taken, shared, batched, stream = both
    assert sorted(left_out[0] + left_out[1]) == list(range(SIZE))
    assert left_out[0] != sorted(left_out[0]) or left_out[1] != sorted(left_out[1])  # shuffled by default
    assert unshuffled == taken == (list(range(0, SIZE, 2)), list(range(1, SIZE, 2)))
    assert sorted(shared[0] + shared[1]) == [1, 3, 5, 7]
    assert batched == (list(range(SIZE)), list(range(SIZE)))
    assert stream == ([0, 1, 2, 3], [4, 5, 6, 7])
    for rank, found in enumerate((first, second)):
        (complaint,) = found["complaints"]
        for text in ("rank 2 of 3", f"rank {rank} of 2"):
            assert text in complaint
        (note,) = found["notes"]
        assert "batch_sampler" in note


def _global_random_state(_: int) -> bool:
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    loaders = [
        idist.auto_dataloader(Numbers(), batch_size=4, generator=torch.Generator()),
        idist.auto_dataloader(
            Numbers(), batch_size=4, generator=torch.Generator(), sampler=SubsetRandomSampler([1, 2])
        ),
    ]
    for (
        loader
    ) in loaders:  # with a generator of its own, because torch's DataLoader draws a seed for its workers
        indices(loader)
        indices(loader)
    return torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_the_samplers_do_not_touch_the_global_random_state() -> None:
    assert on_ranks(_global_random_state) == [True, True]


# --- auto_dataloader: epochs -------------------------------------------------------------------------


def _epochs(_: int, num_workers: int, persistent: bool, own_sampler: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 2 * num_workers,
        "persistent_workers": persistent,
    }
    if num_workers:  # fork: else every pass of the loader waits for torch to be imported in its workers
        kwargs["multiprocessing_context"] = "fork"
    if own_sampler:
        kwargs["sampler"] = SubsetRandomSampler(range(SIZE))
    loader = idist.auto_dataloader(Numbers(), **kwargs)
    sampler, seen = loader.sampler, [loader.sampler.epoch]
    if idist.get_rank() == 0:
        next(iter(loader))  # a preview: with workers it has emptied the sampler
        for batch in loader:
            assert len(batch) == 2
            break
    seen.append(sampler.epoch)
    passes = [indices(loader)]
    seen.append(sampler.epoch)
    passes.append(indices(loader))
    seen.append(sampler.epoch)
    sampler.set_epoch(0)
    passes += [indices(loader), indices(loader)]
    seen.append(sampler.epoch)
    return {"passes": passes, "epochs": seen}


@pytest.mark.parametrize(
    ("num_workers", "persistent", "own_sampler"),
    [(0, False, False), (2, False, False), (2, True, False), (0, False, True)],
    ids=["no-workers", "workers", "persistent-workers", "own-sampler"],
)
def test_a_pass_over_the_loader_is_an_epoch_and_a_preview_is_not(
    num_workers: int, persistent: bool, own_sampler: bool
) -> None:
    first, second = on_ranks(_epochs, num_workers, persistent, own_sampler)
    for found in (first, second):
        assert found["epochs"] == [0, 0, 1, 2, 0]
        passes = found["passes"]
        assert passes[0] != passes[1]
        assert passes[0] == passes[2] == passes[3]  # epoch 0 again, and it stays
    for one, other in zip(first["passes"], second["passes"], strict=True):
        assert sorted(one + other) == list(range(SIZE))


def _break_after_the_last_batch(_: int) -> int:
    loader = idist.auto_dataloader(Numbers(), batch_size=4)
    for _batch, _step in zip(loader, range(2), strict=False):
        pass
    return int(loader.sampler.epoch)


def test_a_pass_that_was_broken_off_is_no_epoch() -> None:
    assert on_ranks(_break_after_the_last_batch) == [0, 0]


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
        "empty": isinstance(idist.auto_model(ReLU()), ReLU),
        "sync_bn": any(isinstance(part, SyncBatchNorm) for part in with_sync_bn.modules()),
        "messages": messages,
    }


def test_a_model_is_wrapped_where_it_has_something_to_train() -> None:
    for found in on_ranks(_models):
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


def test_alone_model_and_optimizer_are_themselves() -> None:
    model = _net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert idist.auto_model(model, sync_bn=True, find_unused_parameters=True) is model
    assert idist.auto_optim(optimizer) is optimizer
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# --- to_device and unwrap_model ------------------------------------------------------------------------


class Sample(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    more: Any = None


class Movable(UserDict[str, Any]):
    """As a tokenizer's batch: no dict, but with a method to move it."""

    moved_to: Any = None

    def to(self, device: torch.device) -> Movable:
        new = Movable(self)
        new.moved_to = device
        return new


class Elsewhere(SerialModel):
    """A serial context whose device is the meta device, to see what moves."""

    def device(self) -> torch.device:
        return torch.device("meta")


def test_a_batch_of_any_structure_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_model", Elsewhere(len(sys.modules)))
    one = torch.ones(2)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {
        "sample": Sample(one, [one, "text", None]),
        "data": Batch(one, more=Batch(one)),
        "words": Movable(a=1),
        "default": defaultdict(list, a=[one]),
        "type": Movable,
        "deque": deque([one], maxlen=3),
        "shape": one.shape,
        3: {1, 2},
    }
    moved = idist.to_device(batch)
    assert list(moved) == list(batch) and type(moved["sample"]) is Sample
    found = [moved["sample"].x, moved["sample"].y[0], moved["data"].images, moved["data"].more.images]
    assert all(tensor.is_meta for tensor in [*found, moved["default"]["a"][0]])
    assert moved["sample"].y[1:] == ["text", None] and moved[3] == {1, 2} and moved["type"] is Movable
    assert moved["words"].moved_to == torch.device("meta") and batch["words"].moved_to is None
    assert moved["default"].default_factory is list
    assert moved["deque"][0].is_meta and moved["deque"].maxlen == 3 and type(moved["shape"]) is torch.Size
    assert idist.to_device(UserDict(a=one))["a"].is_meta
    assert idist.to_device(packed).data.is_meta and not idist.to_device(packed).batch_sizes.is_meta
    assert not one.is_meta and not batch["data"].images.is_meta  # the batch itself is as it was


def test_what_is_there_already_is_not_copied() -> None:
    one = torch.ones(2)
    assert idist.to_device([one])[0] is one


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 1)


def _unwrapped(_: int) -> list[bool]:
    net = Net()
    ddp = idist.auto_model(net)
    wrapped = [
        ddp,
        DataParallel(net),
        torch.compile(net),
        torch.compile(ddp),
        DistributedDataParallel(torch.compile(net)),
        torch.compile(DataParallel(torch.compile(net))),
    ]
    return [type(ddp) is DistributedDataParallel, *(idist.unwrap_model(one) is net for one in wrapped)]


def test_the_model_inside_of_its_wrappers_in_any_order() -> None:
    for found in on_ranks(_unwrapped):
        assert all(found)
    net = Net()
    assert idist.unwrap_model(net) is net and idist.unwrap_model(idist.auto_model(net)) is net


# --- shares of a stream ----------------------------------------------------------------------------------


class Counting(IterableDataset[int]):
    def __init__(self, size: int, has_length: bool) -> None:
        self.size = size
        self.has_length = has_length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError("no length")
        return self.size


def _stream(_: int, size: int, num_workers: int) -> list[int]:
    loader = idist.auto_dataloader(
        Counting(size, True), batch_size=2, shard=True, num_workers=num_workers * idist.get_world_size()
    )
    assert loader.num_workers == num_workers
    batches = [batch.tolist() for batch in loader]
    assert len(loader) == len(batches)
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stream_is_shared_out_among_ranks_and_workers(num_workers: int) -> None:
    for size in (0, 1, 11):
        shares = on_ranks(_stream, size, num_workers)
        assert sorted(shares[0] + shares[1]) == list(range(size))
        assert {number % 2 for number in shares[0]} <= {0}


def test_a_stream_without_a_length_has_none() -> None:
    loader = idist.auto_dataloader(Counting(3, False), shard=True)
    assert list(loader) == [0, 1, 2]
    with pytest.raises(TypeError, match="no length"):
        len(loader)


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
            assert all(parameter.grad is None for parameter in model.parameters())
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
        lambda: next(iter(idist.accumulate([1], model, 2))),
        lambda: idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC).__enter__(),
        lambda: idist.join(model).__enter__(),
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
