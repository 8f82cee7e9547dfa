"""What threads of one rank share: the making of groups, the model of the context, errors of one thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ignite_dist as idist
from helpers import run_ranks
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.flight_recorder import Recorder

SECONDS = 100


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What the functions returned, each in a thread of its own; the first error of any of them."""
    executor = ThreadPoolExecutor(len(functions))
    futures = [executor.submit(function) for function in functions]
    done, waiting = wait(futures, SECONDS, FIRST_EXCEPTION)
    for future in done:
        future.result()
    assert not waiting, f"{len(waiting)} threads have not ended"
    return [future.result() for future in futures]


def spawn(backend: str, function: Callable[..., Any], *args: Any, nproc_per_node: int = 3) -> list[Any]:
    results: list[Any] = idist.spawn(backend, function, args, nproc_per_node=nproc_per_node)
    return results


# --- groups that are made at once --------------------------------------------------------------------------


def _used_in_opposite_order(_: int, groups: list[list[int]]) -> list[list[int]]:
    """Every rank begins with another group, and goes on to the next when it is on its way into that one."""
    rank, begun = idist.get_rank(), [threading.Event() for _ in groups]

    def use(number: int, after: int | None) -> int:
        if after is not None:
            begun[after].wait(SECONDS)
        begun[number].set()
        reduced: int = idist.all_reduce(1 if rank in groups[number] else 0, group=groups[number])
        return reduced

    order = list(range(len(groups)))[:: 1 if rank % 2 else -1]
    starts = [(number, order[place - 1] if place else None) for place, number in enumerate(order)]
    for _ in range(3):  # the same again, and with what has been made
        found = together(*(lambda one=one: use(*one) for one in starts))
    return [found[order.index(number)] for number in range(len(groups))]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_the_first_use_of_groups_in_opposite_order(backend: str) -> None:
    """Ranks 0 and 1 are in all of them, and neither waits for the other with what that one needs to come."""
    groups = [[0, 1], [0, 1, 2], [0, 1, 3]]
    found = spawn(backend, _used_in_opposite_order, groups, nproc_per_node=4)
    expected = [[len(group) if rank in group else 0 for group in groups] for rank in range(4)]
    assert found == expected


def _one_list(_: int) -> tuple[int, list[int]]:
    ranks, start = [0, 1], threading.Barrier(4)

    def use() -> tuple[int, int]:
        start.wait(SECONDS)
        group = current_model().groups.resolve(ranks)
        return id(group.handle), id(group)

    handles = {handle for handle, _ in together(*[use] * 4)}
    return len(handles), [idist.all_reduce(1, group=ranks)]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_threads_that_use_one_list_first_make_one_group(backend: str) -> None:
    assert spawn(backend, _one_list) == [(1, [2]), (1, [2]), (1, [1])]


def _interrupted_first_use(_: int) -> int:
    model = current_model()
    with model.groups.once("the group", (0, 1)):
        other: list[int] = together(lambda: idist.all_reduce(1, group=[0, 2]))
        with pytest.raises(RuntimeError, match=r"the group \[0, 1\].*Use the group once before"):
            idist.all_reduce(1, group=[0, 1])
    return other[0] + 10 * int(idist.all_reduce(1, group=[0, 1]))


def test_a_handler_that_needs_the_group_that_it_has_kept_from_being_made() -> None:
    """An error, because it would wait for itself; other groups are not concerned."""
    assert spawn("gloo", _interrupted_first_use) == [22, 21, 12]


def _one_connection() -> int:
    """How many connections to the store five groups take that are made one after the other."""
    dist.init_process_group("gloo")

    def store_connections() -> int:
        port = int(os.environ["MASTER_PORT"])
        return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections())

    before = store_connections()
    for _ in range(5):
        idist.new_group([0, 1])
    return store_connections() - before


def test_groups_that_are_made_one_after_the_other_share_a_connection() -> None:
    assert run_ranks(_one_connection) == [1, 1]


# --- the context -------------------------------------------------------------------------------------------


def _noticed_at_once(_: Any) -> tuple[int, int]:
    found = set()
    for _ in range(20):
        dist.init_process_group("gloo")
        start = threading.Barrier(8)

        def look(start: threading.Barrier = start) -> Any:
            start.wait(SECONDS)
            return current_model()

        found.add(len({id(model) for model in together(*[look] * 8)}))
        dist.destroy_process_group()
    return max(found), len(found)


def test_threads_that_notice_a_context_at_once_have_one_model_of_it() -> None:
    assert run_ranks(_noticed_at_once, None, world_size=1) == [(1, 1)]


def test_threads_of_a_rank_have_one_log() -> None:
    for _ in range(200):
        record, start = Recorder(), threading.Barrier(4)

        def call(record: Recorder = record, start: threading.Barrier = start) -> None:
            start.wait(SECONDS)
            for _ in range(5):
                record.record(0, "barrier", ())

        together(*[call] * 4)
        assert record.logs[0].num_calls == record.logs[0].num_by_group[""] == 20
        assert sorted(one.number for one in record.logs[0].calls) == list(range(1, 21))


# --- errors of one thread ----------------------------------------------------------------------------------


def _one_fails(_: int) -> tuple[str, int]:
    rank = idist.get_rank()
    short = idist.new_group([0, 1], timeout=timedelta(seconds=1))
    fine = idist.new_group([0, 1])
    failed = threading.Event()

    def fail() -> str:
        if rank == 1:
            return "not called"
        try:
            idist.all_reduce(torch.ones(64), group=short)
        except RuntimeError as error:
            return type(error).__name__
        finally:
            failed.set()
        return "no error"

    def go_on() -> int:
        num_after = step = 0
        while num_after < 100:
            step += 1
            tensor = torch.full((64,), float(step % 7))
            tensor[0] = float(failed.is_set())
            reduced = idist.all_reduce(tensor, group=fine).tolist()
            assert reduced[1:] == [2.0 * (step % 7)] * 63
            num_after += reduced[0] > 0  # on both ranks
        return num_after

    return tuple(together(fail, go_on))  # type: ignore[return-value]


def test_a_timeout_in_one_thread_is_not_another_threads() -> None:
    assert spawn("gloo", _one_fails, nproc_per_node=2) == [("MissingRanksError", 100), ("not called", 100)]


def _refused_while_under_way(_: int) -> tuple[str, list[float]]:
    rank, seen = idist.get_rank(), ""
    own = idist.new_group([0, 1])
    idist.barrier()
    if rank == 0:
        results: list[list[float]] = []
        errors: list[str] = []
        one_refused = threading.Event()

        def reduce() -> None:
            try:
                results.append(idist.all_reduce(torch.ones(3)).tolist())
            except RuntimeError as error:
                errors.append(str(error))
                one_refused.set()

        threads = [threading.Thread(target=reduce, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert one_refused.wait(SECONDS)
        idist.barrier(group=own)  # now rank 1 comes
        for thread in threads:
            thread.join(SECONDS)
        (result,), (error,) = results, errors
        seen = "refused" if "group for each thread" in error else error
    else:
        idist.barrier(group=own)
        result = idist.all_reduce(torch.ones(3)).tolist()
    return seen, result


@pytest.mark.horovod
def test_one_group_in_two_threads_is_refused_by_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")  # where the second thread waits for the first
    found = spawn("horovod", _refused_while_under_way, nproc_per_node=2)
    assert found == [("refused", [2.0, 2.0, 2.0]), ("", [2.0, 2.0, 2.0])]
