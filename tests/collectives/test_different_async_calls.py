"""Asynchronous calls that do not match: ``wait()`` raises on every rank, over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.segment import VARIABLE
from on_ranks import on_ranks


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


def _ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype)


CALLS: dict[str, Callable[[], Any]] = {
    "SUM": lambda: idist.all_reduce(_ones(), async_op=True),
    "MAX": lambda: idist.all_reduce(_ones(), "MAX", async_op=True),
    "AVERAGE": lambda: idist.all_reduce(_ones(), "AVERAGE", async_op=True),
    "int32": lambda: idist.all_reduce(_ones(torch.int32), async_op=True),
    "float16": lambda: idist.all_reduce(_ones(torch.float16), async_op=True),
    "another shape": lambda: idist.all_reduce(_ones().view(2, 2), async_op=True),
    "several pieces": lambda: idist.all_reduce(torch.ones(400_000), async_op=True),
    "a number": lambda: idist.all_reduce(1, async_op=True),
    "a tree": lambda: idist.all_reduce({"a": _ones()}, async_op=True),
    "an object": lambda: idist.all_gather({"a": 1}, async_op=True),
    "all_gather": lambda: idist.all_gather(_ones(), async_op=True),
    "all_gather of int32": lambda: idist.all_gather(_ones(torch.int32), async_op=True),
    "broadcast from 0": lambda: idist.broadcast(_ones(), src=0, async_op=True),
    "broadcast from 1": lambda: idist.broadcast(_ones(), src=1, async_op=True),
    "reduce_scatter": lambda: idist.reduce_scatter(torch.ones(12), async_op=True),
    "all_to_all": lambda: idist.all_to_all(torch.ones(12), async_op=True),
    "barrier": lambda: idist.barrier(async_op=True),
}


def _silent_pairs(rank: int, size: int) -> list[str]:
    """The pairs that were no error on this rank. The last rank makes the second call of each."""
    silent = []
    for (name, call), (other_name, other_call) in combinations(CALLS.items(), 2):
        work = (other_call if rank == size - 1 else call)()
        try:
            work.wait()
            silent.append(f"{name} and {other_name}")
        except idist.CollectiveMismatchError as error:
            assert "different" in str(error)
        assert idist.all_reduce(1) == size
        assert idist.all_reduce(_ones(), async_op=True).wait().eq(size).all()
    return silent


@pytest.mark.parametrize("size", [2, 3])
def test_no_pair_is_silent(size: int) -> None:
    assert on_ranks(_silent_pairs, size, world_size=size) == [[]] * size


@pytest.mark.horovod
def test_no_pair_is_silent_over_horovod() -> None:
    assert idist.spawn("horovod", _silent_pairs, (2,), nproc_per_node=2) == [[]] * 2


def _text(rank: int) -> str:
    work = idist.all_reduce(_ones(), "MAX" if rank else "SUM", async_op=True)
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        work.wait()
    return str(caught.value)


def test_the_error_shows_both_calls_on_both_ranks() -> None:
    for text in on_ranks(_text):
        for call in ("rank 0: all_reduce begun at ", "(SUM torch.float32 (4,))", "(MAX torch.float32 (4,))"):
            assert call in text


def _later_calls(rank: int) -> None:
    """One mismatch among many calls under way: the others get their own results."""
    idist.barrier()
    ops = ["SUM"] * 5 + ["MAX" if rank else "SUM"] + ["SUM"] * 5
    works = [idist.all_reduce(_ones() * k, op, async_op=True) for k, op in enumerate(ops)]
    for k, work in reversed(list(enumerate(works))):
        if k == 5:
            with pytest.raises(idist.CollectiveMismatchError, match="different calls"):
                work.wait()
        else:
            assert work.wait().eq(2 * k).all()


def test_calls_behind_a_mismatch_have_their_results() -> None:
    on_ranks(_later_calls)


def _in_groups(rank: int) -> None:
    """Each group has its own order, also before its first blocking call."""
    groups = [idist.new_group([0, 1]), idist.new_group([1, 2])]
    works = []
    if rank > 0:
        works += [(2, idist.all_reduce(_ones(), group=groups[1], async_op=True)) for _ in range(5)]
    works.append((3, idist.all_reduce(_ones(), async_op=True)))
    if rank < 2:
        works += [(2, idist.all_reduce(_ones(), group=groups[0], async_op=True)) for _ in range(3)]
    for size, work in reversed(works):
        assert work.wait().eq(size).all()


def test_each_group_has_its_own_order() -> None:
    on_ranks(_in_groups, world_size=3)


def _summed(rank: int) -> list[bool]:
    """Sums that a ring would round in another order."""
    rows = torch.stack([torch.randn(100_000, generator=torch.Generator().manual_seed(k)) for k in range(3)])
    blocking = idist.all_reduce(rows[rank].clone())
    works = [idist.all_reduce(rows[rank].clone(), async_op=True) for _ in range(3)]
    return [torch.equal(work.wait(), blocking) for work in works]


def test_the_bits_are_those_of_the_blocking_call() -> None:
    assert on_ranks(_summed, world_size=3) == [[True] * 3] * 3
