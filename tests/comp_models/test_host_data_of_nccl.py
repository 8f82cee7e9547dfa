"""How contexts of NCCL carry CPU tensors, numbers and objects, tested without a GPU.

The transport is told that it has an accelerator. Copies of CPU tensors stand for tensors on the accelerator,
and gloo carries them, so the values are real. The cost of copies to a GPU is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.comp_models.native import model as native
from ignite_dist.comp_models.native.accelerator_transport import AcceleratorTransport
from ignite_dist.comp_models.native.gloo_transport import GlooTransport
from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.comp_models.transport import Group
from ignite_dist.context.live import current_model
from on_ranks import on_ranks

WORLD_SIZE = 3
MINUTES = timedelta(minutes=2)


class Simulated(AcceleratorTransport):
    """Notes which tensors are copied to the accelerator."""

    copied: list[Tensor]

    def __init__(
        self, world: Any, rank: int, backends: Any, device: Any, *others: Any, **options: Any
    ) -> None:
        accelerator = torch.device("cpu", 0)
        super().__init__(world, rank, {"cuda": "nccl"}, lambda: accelerator, *others, **options)
        self.copied = []

    def overlaps(self, group: Group) -> bool:
        return True  # as on an accelerator

    def _on_accelerator(self, tensor: Tensor) -> Tensor:
        self.copied.append(tensor)
        return tensor.clone()


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    """Calls with host data. The first also opens the memory, if the ranks share one."""
    one, rows = torch.tensor([rank + 1.0]), torch.arange(4.0 * WORLD_SIZE) * (rank + 1)
    narrow, many = (torch.full((size,), rank + 0.5, dtype=torch.bfloat16) for size in (5, 100_000))
    return {
        "opening": lambda: idist.all_reduce(1),
        "number": lambda: idist.all_reduce(rank + 1.5),
        "tree": lambda: idist.all_reduce({"loss": rank + 0.25, "count": 2, "t": one}, "MAX"),
        "all_reduce": lambda: idist.all_reduce(one.clone()),
        "narrow floats": lambda: idist.all_reduce(narrow.clone(), "AVERAGE"),
        "ints": lambda: idist.all_reduce(torch.tensor([rank, 7], dtype=torch.int16), "XOR"),
        "bools": lambda: idist.all_reduce(torch.tensor([rank == 1]), "OR"),
        "extremes": lambda: idist.all_reduce(torch.tensor([float(rank), float("nan")]), "MIN"),
        "all_gather": lambda: idist.all_gather(one),
        "complex": lambda: idist.all_gather(torch.tensor([complex(rank, 1)])),
        "ragged": lambda: idist.all_gather_ragged(torch.arange(rank + 1)),
        "objects": lambda: idist.all_gather({"rank": rank, "text": "x" * 3000 * rank}),
        "broadcast": lambda: idist.broadcast(one.clone(), src=1),
        "broadcast of an object": lambda: idist.broadcast({"rank": rank}, src=2),
        "all_to_all": lambda: idist.all_to_all(rows),
        "reduce_scatter": lambda: idist.reduce_scatter(rows),
        "flag": lambda: idist.any_true(rank == 1),
        "gather": lambda: idist.gather(one, dst=1),
        "scatter": lambda: idist.scatter(list(rows.view(WORLD_SIZE, -1)) if rank == 0 else None, src=0),
        "one rank": lambda: idist.one_rank_only(rank=1, broadcast=True)(lambda: rank)(),
        "group": lambda: idist.all_reduce(one.clone(), group=[0, 2]),
        "asynchronous": lambda: idist.all_reduce(one.clone(), async_op=True).wait(),
        "asynchronous narrow floats": lambda: idist.all_reduce(many.clone(), async_op=True).wait(MINUTES),
    }


def _simulate() -> None:
    idist.finalize()
    native._transport_class = lambda backends: Simulated
    idist.initialize("gloo")


def _make_calls(rank: int, is_simulated: bool) -> dict[str, tuple[Any, int]]:
    """The result of each call, and how many tensors it has copied to the accelerator."""
    if is_simulated:
        _simulate()
    copied: list[Tensor] = getattr(current_model().transport, "copied", [])
    results = {}
    for name, call in _calls(rank).items():
        copied.clear()
        results[name] = call(), len(copied)
    return results


def _texts(results: dict[str, tuple[Any, int]]) -> dict[str, str]:
    return {name: repr(result) for name, (result, _) in results.items()}


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_the_results_are_those_of_gloo(shared_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", shared_memory)
    simulated = on_ranks(_make_calls, True, world_size=WORLD_SIZE)
    expected = on_ranks(_make_calls, False, world_size=WORLD_SIZE)
    assert list(map(_texts, simulated)) == list(map(_texts, expected))


def test_on_one_machine_nothing_is_copied_to_the_accelerator() -> None:
    for rank, results in enumerate(on_ranks(_make_calls, True, world_size=WORLD_SIZE)):
        # Memory is opened over the backend. An asynchronous call is the backend's own.
        opens = {"opening"} if rank == 1 else {"opening", "group"}
        begun = {"asynchronous", "asynchronous narrow floats"}
        assert {name for name, (_, count) in results.items() if count} == opens | begun


def test_without_shared_memory_all_of_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")
    for rank, results in enumerate(on_ranks(_make_calls, True, world_size=WORLD_SIZE)):
        outside = {"group"} if rank == 1 else set()
        assert {name for name, (_, count) in results.items() if not count} == outside


def _differs(rank: int) -> tuple[str, float]:
    _simulate()
    try:
        idist.all_reduce(torch.ones(2), "SUM" if rank else "MAX")
    except idist.CollectiveMismatchError as error:
        return str(error), idist.all_reduce(1.5)
    return "", 0.0


def test_calls_that_differ_are_an_error_on_every_rank() -> None:
    for text, total in on_ranks(_differs):
        assert "SUM" in text and "MAX" in text and total == 3.0


@pytest.mark.parametrize(
    ("backends", "transport"),
    [
        ({"cuda": "nccl"}, AcceleratorTransport),
        ({"xpu": "xccl"}, AcceleratorTransport),
        ({"cpu": "gloo", "cuda": "nccl"}, GlooTransport),
        ({"cpu": "mpi"}, NativeTransport),
    ],
    ids=str,
)
def test_the_transport_of_backends(backends: dict[str, str], transport: type) -> None:
    assert native._transport_class(backends) is transport
