"""Works of ``async_op=True``: what they keep, and how they end with their context."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ignite_dist as idist
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import pending_calls


def leaves_a_work(local_rank: int) -> tuple[list[str], Any]:
    work = idist.all_reduce({"n": local_rank}, async_op=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.finalize()
    assert all(one.filename == __file__ for one in caught), "they point at the call"
    return [str(one.message) for one in caught], work.wait()


def test_the_end_of_the_context_waits_for_a_work_and_warns() -> None:
    for messages, result in idist.spawn("gloo", leaves_a_work, nproc_per_node=2):
        assert len(messages) == 1
        assert (
            "No wait() was called for the all_reduce begun at collectives/test_pending_works" in messages[0]
        )
        assert result == {"n": 1}


def drops_works(local_rank: int) -> tuple[int, list[str], float]:
    """How many tensors of 20 dropped works live after 20 later works; the warnings; a result."""
    kept = idist.all_reduce(torch.ones(1000), async_op=True)
    tensors = [torch.ones(1000) for _ in range(20)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    works = [idist.all_reduce(tensor, async_op=True) for tensor in tensors]
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    del tensors, works
    for _ in range(20):
        idist.all_reduce(torch.ones(1), async_op=True).wait()
    result = kept.wait()[0].item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.finalize()
    return sum(ref() is not None for ref in alive), [str(one.message) for one in caught], result


def test_a_completed_work_that_was_dropped_frees_its_tensor_and_is_warned_of() -> None:
    for alive, messages, result in idist.spawn("gloo", drops_works, nproc_per_node=2):
        assert alive == 0
        assert result == 2
        assert len(messages) == 20 and all("No wait() was called" in one for one in messages)


class Fails:
    """Loading this object raises ValueError."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def ends_in_two_attempts(local_rank: int) -> list[float]:
    tensor = torch.tensor([3.0])
    idist.all_reduce(tensor, "AVERAGE", async_op=True)
    idist.all_gather(Fails(), async_op=True)
    kept = idist.all_reduce(torch.ones(1), async_op=True)
    with pytest.warns(UserWarning, match="No wait"):
        with pytest.raises(ValueError, match="no number"):
            idist.finalize()
        idist.finalize()
    return [tensor.item(), kept.wait().item()]


def test_an_error_of_a_dropped_work_is_raised_once_and_no_work_is_completed_twice() -> None:
    assert idist.spawn("gloo", ends_in_two_attempts, nproc_per_node=2) == [[3.0, 2.0]] * 2


def fails_with_a_work(local_rank: int) -> bool:
    model = weakref.ref(current_model())
    idist.barrier()  # a rank that ends earlier would fail the initialize() of the other
    work = idist.all_reduce(torch.ones(1000), async_op=True)
    try:
        raise ValueError
    except ValueError:
        idist.finalize()
    del work
    deadline = time.monotonic() + 60  # the thread of the work may still look for the cause of its error
    while model() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return model() is None


def test_a_context_that_has_failed_is_not_kept_by_a_work() -> None:
    """Its connections would stay open, and the other ranks would wait."""
    assert idist.spawn("gloo", fails_with_a_work, nproc_per_node=2) == [True, True]


def comes_too_late(local_rank: int, folder: Path) -> bool:
    group = idist.new_group([0, 1], timeout=timedelta(seconds=2))
    if local_rank == 0:
        with pytest.raises(
            RuntimeError,
            match=r"Rank 1 did not come to all_reduce begun at .* has waited for 2 s, its timeout",
        ):
            idist.all_reduce({"n": 1}, group=group, async_op=True).wait()
        (folder / "raised").touch()
    while not (folder / "raised").exists():
        time.sleep(0.01)
    return True


def test_the_timeout_of_a_group_is_that_of_its_asynchronous_collectives(tmp_path: Path) -> None:
    assert idist.spawn("gloo", comes_too_late, (tmp_path,), nproc_per_node=2) == [True, True]


def makes_groups_meanwhile(local_rank: int) -> Any:
    """torch names such a group by the number of groups that this rank has."""
    from torch.distributed import new_group

    works = [idist.all_reduce({"n": number}, async_op=True) for number in range(5)]
    if local_rank == 1:
        works[0].wait()  # on this rank alone the thread has made its group by now
    group = new_group([0, 1], use_local_synchronization=True)
    return idist.all_reduce(1, group=group), [work.wait()["n"] for work in works]


def test_groups_of_torch_are_made_while_a_thread_makes_its_own() -> None:
    expected = (2, [2 * number for number in range(5)])
    assert idist.spawn("gloo", makes_groups_meanwhile, nproc_per_node=2) == [expected, expected]


def _noticed(local_rank: int) -> int:
    """Backward passes that need the old value of a tensor which is being reduced."""
    idist.barrier()
    noticed = 0
    for _ in range(10):
        weight, x = torch.ones(1000, requires_grad=True), torch.ones(1000)
        loss = (weight * x).sum()
        works = [idist.all_reduce(one, async_op=True) for one in (torch.ones(100_000), x)]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            noticed += 1
        for work in works:
            work.wait()
    return noticed


def test_autograd_notices_a_change_that_has_begun() -> None:
    assert idist.spawn("gloo", _noticed, nproc_per_node=2) == [10, 10]


def _kept(local_rank: int) -> list[bool]:
    """Whether the results of calls live after their works."""
    idist.barrier()
    kept = []
    for _ in range(3):
        rows = idist.all_gather(torch.ones(1000), async_op=True).wait()
        alive = weakref.ref(rows)
        del rows
        idist.barrier()
        deadline = time.monotonic() + 20  # the thread of the group has still to forget it
        while alive() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        kept.append(alive() is not None)
    return kept


def test_the_result_of_a_call_is_not_kept() -> None:
    assert idist.spawn("gloo", _kept, nproc_per_node=2) == [[False] * 3] * 2


def _begin_and_wait() -> None:
    idist.barrier(async_op=True).wait()


class _Reduces:
    """An object whose loading calls a collective."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call, ()


def _loads(local_rank: int, call: Callable[[], Any]) -> int:
    idist.barrier()
    with pytest.raises(RuntimeError, match="in the thread of the group's asynchronous collectives"):
        idist.all_gather(_Reduces(call), async_op=True).wait()
    total: int = idist.all_reduce(1)
    return total


@pytest.mark.parametrize("call", [idist.barrier, _begin_and_wait])
def test_a_wait_in_the_thread_of_the_group_is_refused(call: Callable[[], Any]) -> None:
    assert idist.spawn("gloo", _loads, (call,), nproc_per_node=2) == [2, 2]


def _in_inference_mode(local_rank: int) -> list[float]:
    idist.barrier()
    with torch.inference_mode():
        works = [
            idist.all_reduce(torch.ones(4), async_op=True),
            idist.all_gather(torch.ones(4), async_op=True),
            idist.all_reduce(torch.ones(4, dtype=torch.float16), async_op=True),
        ]
        inside = [float(work.wait().sum()) for work in works]
        works = [
            idist.all_reduce(torch.ones(4), async_op=True),
            idist.all_to_all(torch.ones(4), async_op=True),
        ]
    return inside + [float(work.wait().sum()) for work in works]


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_calls_of_inference_mode(shared_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", shared_memory)
    assert idist.spawn("gloo", _in_inference_mode, nproc_per_node=2) == [[8.0, 8.0, 8.0, 8.0, 4.0]] * 2


def _destroyed_groups(local_rank: int) -> list[tuple[int, int]]:
    """Open files and threads, after the first groups and after more of them."""
    pending_calls._IDLE_SECONDS = 3600.0
    idist.barrier()
    found, threads = [], threading.active_count()
    for _ in range(2):
        for _ in range(10):
            group = idist.new_group([0, 1])
            idist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
            del group
        deadline = time.monotonic() + 20  # the threads of the groups end
        while threading.active_count() > threads + 1 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count() - threads))
    return found


def test_a_destroyed_group_leaves_no_thread_and_no_file() -> None:
    for (files, _), (later_files, more_threads) in idist.spawn("gloo", _destroyed_groups, nproc_per_node=2):
        assert later_files <= files + 2 and more_threads <= 1  # of the latest group


class _Moves(Steps):
    """A pending call, whose group's thread waits for other ranks at other times."""

    ranks = (0,)


def test_the_ranks_of_a_work_made_of_another_are_those_of_the_moment() -> None:
    """To find them is a walk through the stack of a running thread, so they are not asked for earlier."""
    moves = _Moves(lambda: 1)
    made = super(Steps, moves).then(str)
    moves.ranks = (1,)
    assert made.ranks == (1,)
    assert made.wait() == "1"
