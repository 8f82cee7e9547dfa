"""A raised error keeps nothing: the frames that it has passed, and their open files, go with it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from on_ranks import on_ranks


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


class Owned:
    """Something that a function of the user has: an open file, say."""


def _backward(rank: int) -> None:
    if rank:
        idist.barrier()
    else:
        _backward.model(torch.ones(1, 1)).sum().backward()  # type: ignore[attr-defined]


CALLS: dict[str, Callable[[int], Any]] = {
    "a tensor": lambda rank: idist.all_reduce(torch.ones(2 + rank)),
    "a dict": lambda rank: idist.all_reduce({"ab"[rank]: 1}),
    "another function": lambda rank: idist.all_gather("x") if rank else idist.broadcast("x"),
    "an asynchronous tensor": lambda rank: idist.all_reduce(torch.ones(2 + rank), async_op=True).wait(),
    "an asynchronous dict": lambda rank: idist.all_reduce({"ab"[rank]: 1}, async_op=True).wait(),
    "not asynchronous everywhere": lambda rank: (
        idist.all_reduce(torch.ones(2), async_op=True).wait() if rank else idist.all_reduce(torch.ones(2))
    ),
    "another rank": lambda rank: idist.one_rank_only(rank=rank, broadcast=True)(int)(),
    "no object": lambda rank: idist.all_gather(threading.Lock()),
    "no checkpoint": lambda rank: idist.load_checkpoint("/no/checkpoint.pt", model=torch.nn.Linear(1, 1)),
    "no folder": lambda rank: idist.save_checkpoint(Path("/proc/no/checkpoint.pt"), step=1),
    "no folder, asynchronously": lambda rank: idist.save_checkpoint(
        Path("/proc/no/checkpoint.pt"), asynchronous=True, step=1
    ).wait(),
    "another state": lambda rank: idist.load_model_state(torch.nn.Linear(1, 1), {"a": 1}),
    "another model": lambda rank: idist.auto_model(torch.nn.Linear(1, 1 + rank)),
    "another loader": lambda rank: idist.auto_dataloader(range(4 + rank), batch_size=2),
    "a backward pass": _backward,
}


def _calls(name: str, rank: int, kept: list[weakref.ref[Owned]]) -> None:
    owned = Owned()
    kept.append(weakref.ref(owned))
    CALLS[name](rank)


def _kept(rank: int) -> list[str]:
    """The calls whose error has kept what its caller owned, until the garbage collector came."""
    found = []
    _backward.model = idist.auto_model(torch.nn.Linear(1, 1))  # type: ignore[attr-defined]
    for name in CALLS:
        references: list[weakref.ref[Owned]] = []
        gc.collect()
        gc.disable()
        try:
            _calls(name, rank, references)
            found.append(f"{name}: no error")
        except (RuntimeError, ValueError, TypeError, OSError):
            pass
        idist.all_reduce(1, async_op=True).wait()  # the thread of such calls has left the last one
        if references[0]() is not None:
            found.append(name)
        gc.enable()
    return found


def test_an_error_keeps_nothing_of_its_caller() -> None:
    assert on_ranks(_kept) == [[], []]


def _waits_twice(rank: int) -> list[str]:
    work = idist.all_reduce(torch.ones(2 + rank), async_op=True)
    texts = []
    for _ in range(3):
        with pytest.raises(idist.CollectiveMismatchError) as caught:
            work.wait()
        texts.append(str(caught.value))
    return texts


def test_each_wait_raises_the_error() -> None:
    for texts in on_ranks(_waits_twice):
        assert len({*texts}) == 1 and "different calls" in texts[0]
