"""Asynchronous calls that do not match: ``wait()`` raises on every rank, over shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
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


def _ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype)


CALLS: dict[str, Callable[..., Any]] = {
    "SUM": lambda **how: idist.all_reduce(_ones(), **how),
    "MAX": lambda **how: idist.all_reduce(_ones(), "MAX", **how),
    "AVERAGE": lambda **how: idist.all_reduce(_ones(), "AVERAGE", **how),
    "int32": lambda **how: idist.all_reduce(_ones(torch.int32), **how),
    "float16": lambda **how: idist.all_reduce(_ones(torch.float16), **how),
    "another shape": lambda **how: idist.all_reduce(_ones().view(2, 2), **how),
    "several pieces": lambda **how: idist.all_reduce(torch.ones(400_000), **how),
    "a number": lambda **how: idist.all_reduce(1, **how),
    "a tree": lambda **how: idist.all_reduce({"a": _ones()}, **how),
    "an object": lambda **how: idist.all_gather({"a": 1}, **how),
    "all_gather": lambda **how: idist.all_gather(_ones(), **how),
    "all_gather of int32": lambda **how: idist.all_gather(_ones(torch.int32), **how),
    "broadcast from 0": lambda **how: idist.broadcast(_ones(), src=0, **how),
    "broadcast from 1": lambda **how: idist.broadcast(_ones(), src=1, **how),
    "reduce_scatter": lambda **how: idist.reduce_scatter(torch.ones(12), **how),
    "all_to_all": lambda **how: idist.all_to_all(torch.ones(12), **how),
    "barrier": lambda **how: idist.barrier(**how),
}


def _silent_pairs(rank: int, size: int) -> list[str]:
    """The pairs that were no error on this rank. The last rank makes the second call of each."""
    silent = []
    for (name, call), (other_name, other_call) in combinations(CALLS.items(), 2):
        work = (other_call if rank == size - 1 else call)(async_op=True)
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


def _silent_where_some_block(rank: int, size: int, names: list[str]) -> list[str]:
    """The calls that were no error on this rank, although not all ranks have made them asynchronously.

    The first rank is asynchronous, or the only one that is not, in turn.
    """
    silent = []
    for number, name in enumerate(names):
        is_async = (rank == 0) == (number % 2 == 0)
        try:
            work = CALLS[name](async_op=is_async)
            if is_async:
                work.wait()
            silent.append(name)
        except idist.CollectiveMismatchError as error:
            assert "async_op=True" in str(error)
        assert idist.all_reduce(1) == size
        assert idist.all_reduce(_ones(), async_op=True).wait().eq(size).all()
    return silent


def test_an_asynchronous_call_and_a_blocking_call_are_an_error() -> None:
    idist.spawn("gloo", _opens_first, (list(CALLS),), nproc_per_node=2)


@pytest.mark.horovod
def test_an_asynchronous_call_and_a_blocking_call_are_an_error_over_horovod() -> None:
    idist.spawn("horovod", _opens_first, (list(CALLS)[::4],), nproc_per_node=2)


def test_one_rank_of_three_is_asynchronous_or_blocks() -> None:
    idist.spawn("gloo", _opens_first, (list(CALLS)[::4],), nproc_per_node=3)


def _opens_first(rank: int, names: list[str]) -> None:
    size = idist.get_world_size()
    idist.barrier()
    assert _silent_where_some_block(rank, size, names) == []


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_calls_of_a_context(size: int) -> None:
    """Nothing was shared before: gloo ended the process."""
    results = idist.spawn("gloo", _first_calls, nproc_per_node=size)
    for text in results:
        for call in ("all_reduce(SUM torch.float32 (4,)) with async_op", "barrier() without async_op"):
            assert call in text


def _first_calls(rank: int) -> str:
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        idist.all_reduce(_ones(), async_op=True).wait() if rank == 0 else idist.barrier()
    assert _silent_where_some_block(rank, idist.get_world_size(), ["SUM", "a number"]) == []
    return str(caught.value)


def _crossed(rank: int) -> int:
    """The asynchronous call is the first on rank 0, the second on rank 1. Returns the number of errors."""
    idist.barrier()
    num_errors, work = 0, idist.all_reduce(_ones(), async_op=True) if rank == 0 else None
    for call in (idist.barrier, lambda: (work or idist.all_reduce(_ones(), async_op=True)).wait()):
        try:
            call()
        except idist.CollectiveMismatchError:
            num_errors += 1
    assert idist.all_reduce(1) == 2
    return num_errors


def test_another_order_of_an_asynchronous_and_a_blocking_call() -> None:
    assert idist.spawn("gloo", _crossed, nproc_per_node=2) == [2, 2]


def _beside_a_backward_pass(rank: int) -> list[float]:
    """On rank 1 the call comes before the gradients are averaged, and on rank 0 after it."""
    model = idist.auto_model(torch.nn.Linear(1, 1))
    output, works = model(torch.ones(2, 1)), []

    def begin(_: torch.Tensor) -> None:
        works.append(idist.all_reduce(torch.ones(()), async_op=True))
        time.sleep(1.5)  # rank 0 looks for the other ranks twice per second

    if rank:
        output.register_hook(begin)
    output.sum().backward()
    if not rank:
        begin(output)
    return [float(work.wait()) for work in works]


def test_a_backward_pass_may_run_meanwhile() -> None:
    assert idist.spawn("gloo", _beside_a_backward_pass, nproc_per_node=2) == [[2.0], [2.0]]


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
