"""auto_model, auto_optim and auto_dataloader on the real XLA, with replicas on PJRT's CPU.

Most tests of an optimizer run one function twice: on two replicas with half of the data each, and in this
very process, without a context, with all of the data. Both have to end up with the same numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    Buffer,
    Linear,
    Module,
    Parameter,
    ParameterList,
    ReLU,
    Sequential,
)
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import ignite_dist as idist
from xla_replicas import (
    SECONDS,
    SIZE,
    Replicas,
    backward,
    data,
    different,
    equal_those_of_a_single_process,
    here,
    launch,
    net,
    state,
    stepped,
    values,
)

pytestmark = pytest.mark.xla


# --- where the tests run -----------------------------------------------------------------------------


def spawn(*functions: Callable[[], Any], nproc_per_node: int) -> list[list[Any]]:
    """What the functions returned on each of new replicas."""
    workers = launch(_each, functions, nproc_per_node=nproc_per_node)
    try:
        results: list[list[Any]] | None = workers.join(SECONDS)
        assert results is not None, f"no end within {SECONDS} s"
        return results
    finally:
        workers.terminate()


def _each(_: int, functions: tuple[Callable[[], Any], ...]) -> list[Any]:
    return [function() for function in functions]


# --- auto_model --------------------------------------------------------------------------------------


class Everything(Module):
    """Parameters and buffers of many kinds. Each value is another on each replica, but for the empty one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.doubles = Parameter(randn(3, 5))
        self.flag = Buffer(torch.tensor(rank == 0))  # one byte: what comes after it is at an odd place
        self.floats = Parameter(randn(4, 3).float())
        self.transposed = Parameter(randn(4, 3).float().t())
        self.scalar = Parameter(randn().float())
        self.brain = Parameter(randn(7).bfloat16())
        self.halves = Buffer(randn(3).half(), persistent=False)
        self.complex = Parameter(torch.complex(randn(3), randn(3)).to(torch.complex64))
        self.mask = Buffer(torch.arange(11) % 3 == rank)
        self.octets = Buffer(torch.tensor([255, rank], dtype=torch.uint8), persistent=False)
        self.counter = Buffer(torch.tensor(2**62 + rank))
        self.empty = Parameter(torch.empty(0, 3))
        self.special = Buffer(torch.tensor([-0.0, float("nan"), float("inf"), 1e-40, float(rank)]))
        self.frozen = Parameter(randn(3).float(), requires_grad=False)
        self.norm = BatchNorm1d(4)
        self.norm(randn(8, 4).float() + rank)
        self.brain_norm = BatchNorm1d(3).bfloat16()
        with torch.no_grad():
            self.norm.num_batches_tracked += rank
            for one in (*self.norm.parameters(), *self.brain_norm.parameters(), *self.brain_norm.buffers()):
                one += rank


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _contents(model: Module) -> dict[str, tuple[Any, ...]]:
    copies = here(_tensors(model))
    return {
        name: (one.dtype, tuple(one.shape), one.requires_grad, _bytes(copies[name]))
        for name, one in _tensors(model).items()
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _everything() -> dict[str, Any]:
    model = Everything(idist.get_rank())
    before = _contents(model)
    adapted = idist.auto_model(model, find_unused_parameters=True)
    return {
        "same": adapted is model and model.training,
        "devices": {one.device == idist.device() for one in _tensors(model).values()},
        "before": before,
        "after": _contents(model),
    }


def test_every_replica_has_the_parameters_and_buffers_of_rank_zero_bit_for_bit(replicas: Replicas) -> None:
    first, second = replicas.run(_everything)
    assert {name for name, one in first["before"].items() if one == second["before"][name]} == {"empty"}
    for found in (first, second):
        assert found["same"] and found["devices"] == {True}
        assert found["after"] == first["before"]


def _several_buckets() -> list[bool]:
    """The first parameter alone is more than 16 MB, and the others together are two times that."""
    sizes = [int(megabytes * (1 << 18)) for megabytes in (17, 7, 7, 15.5, 0.5, 1e-5)]
    starts = [torch.arange(size, dtype=torch.float32) + 100 * number for number, size in enumerate(sizes)]
    model = Module()
    model.several = ParameterList(one + idist.get_rank() for one in starts)
    idist.auto_model(model)
    return [torch.equal(one, start) for one, start in zip(values(model), starts, strict=True)]


def test_a_model_of_several_buckets(replicas: Replicas) -> None:
    assert replicas.run(_several_buckets) == [[True] * 6] * 2


def _not_trained() -> dict[str, Any]:
    frozen = Sequential(Linear(5, 8), BatchNorm1d(8)).requires_grad_(False)
    frozen[0].weight.fill_(0.25 + idist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        adapted = idist.auto_model(frozen, sync_bn=True)
    empty = ReLU()
    return {
        "same": adapted is frozen and idist.auto_model(empty) is empty,
        "moved": {one.device == idist.device() for one in _tensors(frozen).values()},
        "values": frozen[0].weight.unique().tolist(),
        "said": [(one.filename.rpartition("/")[2], one.lineno - line, str(one.message)) for one in caught],
    }


def test_a_model_without_anything_to_train_becomes_equal_and_sync_bn_warns(replicas: Replicas) -> None:
    ranks = replicas.run(_not_trained)
    for found in ranks:
        assert found["same"] and found["moved"] == {True} and found["values"] == [0.25]
    said = [one for found in ranks for one in found["said"]]  # warnings are of the process
    assert said
    for filename, lines_off, message in said:
        assert (filename, lines_off) == ("test_xla_training.py", 0)
        assert "sync_bn=True" in message


class Tied(Module):
    """An encoder and a decoder that have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Linear(5, 2, bias=False).double(), Linear(5, 2, bias=False).double()
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x) - self.decoder(x.square())
        return result


def _tied() -> list[Any]:
    model = idist.auto_model(different(Tied()))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    backward(model)
    optimizer.step()
    return [model.decoder.weight is model.encoder.weight, values(model)]


def test_parameters_that_are_tied_stay_tied(replicas: Replicas) -> None:
    """Moving to XLA makes new parameters, one for each place that holds the old one."""
    equal_those_of_a_single_process(replicas, _tied)


# --- one replica, and none any more -------------------------------------------------------------------


def _own_steps(optimizer: Optimizer, model: Module) -> list[Any]:
    """A step with a closure and one without, on the same data wherever this is."""
    device = next(model.parameters()).device
    x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure), closure()]
    optimizer.step()
    return [here(losses), values(model), state(optimizer)]


def _after_the_end() -> list[Any]:
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9))
    backward(model)
    optimizer.step()
    rank = idist.get_rank()
    idist.finalize()
    assert idist.get_world_size() == 1
    return _own_steps(optimizer, model) if rank == 0 else []  # so the first steps alone


def test_after_the_end_of_the_context_a_step_is_each_replicas_own() -> None:
    alone = _after_the_end()
    (first,), (second,) = spawn(_after_the_end, nproc_per_node=2)
    torch.testing.assert_close(first, alone, rtol=1e-12, atol=1e-13)
    assert second == []


def _alone_with_a_loader() -> dict[str, Any]:
    loader_class: type = DataLoader
    if idist.model_name() == "xla-dist":
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        loader_class = MpDeviceLoader
    model = idist.auto_model(net())
    plain = Adam(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(plain)
    samples = TensorDataset(*here(data()))
    loader = idist.auto_dataloader(samples, batch_size=4, shuffle=False)
    assert optimizer is plain
    assert isinstance(loader, loader_class)
    assert (len(loader), loader.batch_size, loader.dataset is samples) == (3, 4, True)
    losses = []
    for how, (x, y) in zip(("plain", "closure", "keyword"), loader, strict=True):
        assert x.device == y.device == idist.device()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(here(stepped(how, optimizer, closure)))
    return {"losses": losses, "values": values(model), "state": state(optimizer)}


def test_one_replica_trains_as_a_process_without_a_context() -> None:
    functions = (_alone_with_a_loader, _after_the_end)
    (found,) = spawn(*functions, nproc_per_node=1)
    torch.testing.assert_close(found, _each(0, functions), rtol=1e-12, atol=1e-13)


# --- one replica is lazy ------------------------------------------------------------------------------


def _counts() -> tuple[int, int]:
    """How many graphs have been executed and compiled."""
    from torch_xla.core import xla_model
    from torch_xla.debug import metrics

    xla_model.wait_device_ops()  # it counts them when they end
    executed = metrics.metric_data("ExecuteTime")
    return (executed[0] if executed else 0), metrics.counter_value("UncachedCompile") or 0


def _since(before: tuple[int, int]) -> tuple[int, int]:
    executed, compiled = _counts()
    return executed - before[0], compiled - before[1]


LAZY_STEPS = 8


def _counted_loop(optimizer_class: type[Optimizer], ours: bool, with_loader: bool) -> dict[str, Any]:
    """How many executions and compilations there have been after each step of a training."""
    import torch_xla

    device = torch_xla.device()
    model: Module = Sequential(Linear(5, 8), ReLU(), Linear(8, 2))
    model = idist.auto_model(model) if ours else model.to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(optimizer) if ours else optimizer
    samples = TensorDataset(torch.randn(LAZY_STEPS * 4, 5), torch.randn(LAZY_STEPS * 4, 2))
    loader = (idist.auto_dataloader if with_loader else DataLoader)(samples, batch_size=4)
    found: dict[str, Any] = {"counts": [], "losses": [], "text": ""}
    before = _counts()
    for x, y in loader:
        if with_loader:  # which has ended the step before
            found["counts"].append(_since(before))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            return loss

        loss = optimizer.step(closure) if with_loader else closure()
        total = loss.detach().clone()
        if ours:
            total = idist.all_reduce({"loss": idist.all_reduce(total), "seen": len(x)})["loss"]
        found["text"] = torch_xla._XLAC._get_xla_tensors_text([total])
        found["losses"].append((loss.detach(), total))
        if not with_loader:
            optimizer.step()
            torch_xla.sync()
            found["counts"].append(_since(before))
    if with_loader:
        found["counts"] = [*found["counts"][1:], _since(before)]
    return {**found, "losses": here(found["losses"])}


def _lazy() -> dict[tuple[str, bool], list[dict[str, Any]]]:
    return {
        (optimizer.__name__, with_loader): [
            _counted_loop(optimizer, ours, with_loader) for ours in (with_loader, True)
        ]
        for optimizer in (SGD, Adam)
        for with_loader in (False, True)
    }


def _counted_calls() -> dict[str, int]:
    """How many executions each call takes."""
    import torch_xla

    tensor = torch.ones(3, device=torch_xla.device())
    calls: dict[str, Callable[[], Any]] = {
        "a number": lambda: idist.all_reduce(3.5),
        "numbers": lambda: idist.all_reduce({"loss": 0.5, "n": [1, 2]}, "MAX"),
        "objects": lambda: idist.all_gather({"rank": 0}),
        "text": lambda: idist.broadcast("text"),
        "ranks": lambda: (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()),
        "device": idist.device,
        "barrier": idist.barrier,
        "all_reduce": lambda: idist.all_reduce(tensor + 1),
        "average": lambda: idist.all_reduce(tensor + 1, "AVERAGE", inplace=False),
        "all_gather": lambda: idist.all_gather(tensor + 1),
        "broadcast": lambda: idist.broadcast(tensor + 1),
    }
    found = {}
    for name, call in calls.items():
        pending = tensor + 5
        before = _counts()
        kept = call()
        found[name] = _since(before)[0]
        del kept, pending
    before = _counts()
    (tensor + 7).cpu()
    return {**found, "cpu()": _since(before)[0]}


def test_a_step_of_one_replica_stays_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # else a world of one reduces nothing
    ((loops, calls),) = spawn(_lazy, _counted_calls, nproc_per_node=1)
    for (_, with_loader), (plain, ours) in loops.items():
        for found in (plain, ours):
            executed, compiled = zip(*found["counts"], strict=True)
            assert list(executed) == list(range(1, LAZY_STEPS + 1))
            assert set(compiled[2:]) == {compiled[1]}
            for loss, total in found["losses"]:
                assert torch.equal(loss, total)
        assert "all_reduce" in ours["text"] or "cross_replica_sum" in ours["text"]
        if not with_loader:
            assert "all_reduce" not in plain["text"] and "cross_replica_sum" not in plain["text"]
    assert calls.pop("cpu()") == 1
    assert set(calls.values()) == {0}, calls
