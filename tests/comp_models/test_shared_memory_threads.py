"""Threads and forked processes of a rank whose groups share memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_threads_of_a_rank import SECONDS, together

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from ignite_dist.context.live import current_model
from on_ranks import on_ranks
from waiting import RUN, SLEEP, wait_until_at, when_waiting


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


# --- threads -------------------------------------------------------------------------------------------


def _check_round(number: int, group: Any = None) -> None:
    """A few calls, whose results are exact."""
    rank, size = idist.get_rank(), idist.get_world_size()
    values = torch.arange(100) + rank + number
    expected = [size * (place + number) + sum(range(size)) for place in range(100)]
    assert idist.all_reduce(values, group=group).tolist() == expected
    assert idist.all_gather((rank, number), group) == [(other, number) for other in range(size)]
    assert idist.broadcast(torch.full((3,), rank), number % size, group=group).tolist() == [number % size] * 3


def _interrupted_behind_a_thread(_: int, told: Path) -> int:
    """The main thread of rank 0 is interrupted while another thread waits in the memory that it needs."""
    idist.barrier()
    if idist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        assert idist.all_reduce(2) == 4
        with pytest.raises(idist.CollectiveMismatchError):
            idist.barrier()
        return idist.all_reduce(1)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(idist.all_reduce(2)))
    thread.start()
    wait_until_at(SLEEP, thread)
    when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT), RUN)
    with pytest.raises(KeyboardInterrupt):
        idist.barrier()
    told.touch()
    thread.join(SECONDS)
    assert results == [4]
    return idist.all_reduce(1)


def test_an_interrupt_behind_a_thread_in_the_memory_arrives_and_counts(tmp_path: Path) -> None:
    assert on_ranks(_interrupted_behind_a_thread, tmp_path / "told") == [2, 2]


def _in_two_groups(_: int, num: int) -> None:
    groups = [idist.new_group(range(idist.get_world_size())) for _ in range(2)]

    def use(group: Any) -> None:
        for number in range(num):
            _check_round(number, group)

    together(*(lambda group=group: use(group) for group in groups))


@pytest.mark.long
@pytest.mark.stress
def test_two_threads_in_two_groups(repetitions: Callable[[int, int], int]) -> None:
    on_ranks(_in_two_groups, repetitions(300, 20_000))


def _in_one_group(_: int, num: int) -> list[int]:
    """Two threads take turns, in the same order on all ranks; the lock is also that of a careful user."""
    turn, lock, order = 0, threading.Condition(), []

    def use(own: int) -> None:
        nonlocal turn

        def is_own_turn() -> bool:
            return turn % 2 == own

        for _ in range(num):
            with lock:
                assert lock.wait_for(is_own_turn, SECONDS)
                _check_round(turn)
                order.append(own)
                turn += 1
                lock.notify_all()

    together(lambda: use(0), lambda: use(1))
    return order


@pytest.mark.stress
def test_two_threads_that_take_turns_in_one_group(repetitions: Callable[[int, int], int]) -> None:
    num = repetitions(100, 5_000)
    assert on_ranks(_in_one_group, num) == [[0, 1] * num] * 2


def _beside_asynchronous_calls(_: int, num: int) -> None:
    rank, size, pending = idist.get_rank(), idist.get_world_size(), []
    for number in range(num):
        tensor = torch.full((1 + number % 5_000,), rank + number)
        pending.append((number, idist.all_reduce(tensor, async_op=True)))
        pending.append((number, idist.all_reduce(rank + number, async_op=True)))
        _check_round(number)
        while len(pending) > 10 or (number == num - 1 and pending):
            began, work = pending.pop(number % 2 - 1)
            result = work.wait()
            total = size * began + sum(range(size))
            assert (result if isinstance(result, int) else set(result.tolist())) in (total, {total})


@pytest.mark.stress
def test_asynchronous_calls_under_way_beside_others(repetitions: Callable[[int, int], int]) -> None:
    on_ranks(_beside_asynchronous_calls, repetitions(100, 3_000), world_size=3)


# --- forks ---------------------------------------------------------------------------------------------


def _fork(end: Callable[[], Any]) -> int:
    """The exit code of a child that ends with ``end``."""
    pid = os.fork()
    if pid == 0:
        try:
            end()
        except SystemExit as error:  # what sys.exit() does in a child, without the stack of the test
            idist.finalize()
            os._exit(error.code if isinstance(error.code, int) else 1)
        except BaseException:
            os._exit(99)
        os._exit(98)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _forget() -> None:
    """What the end of the context does, and the garbage collector with a group."""
    current_model().transport.forget()
    os._exit(7)


def _forks_that_end(_: int) -> list[int]:
    _check_round(0)
    codes = [
        _fork(lambda: os._exit(5)),
        _fork(lambda: sys.exit(6)),
        _fork(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ]
    for number in range(10):
        _check_round(number)
    return codes


def test_a_forked_child_that_ends_does_not_end_its_parents_waits() -> None:
    assert on_ranks(_forks_that_end) == [[5, 6, -signal.SIGKILL]] * 2


def _fork_while_awaited(_: int, is_waiting: bool) -> int:
    """Rank 1 waits in a call for rank 0, which first forks. Or rank 0 forks while it waits itself."""
    _check_round(0)
    own = idist.new_group([0, 1])
    idist.barrier(own)
    forks, waits = idist.get_rank() == 0, idist.get_rank() == (0 if is_waiting else 1)
    if waits:

        def go_on() -> None:
            if forks:
                assert _fork(_forget) == 7
            idist.barrier(own)

        when_waiting(go_on)
    else:
        idist.barrier(own)
        if forks:
            assert _fork(_forget) == 7
    reduced: int = idist.all_reduce(1)
    return reduced


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_fork_of_a_rank_that_waits_or_is_awaited(is_waiting: bool) -> None:
    assert on_ranks(_fork_while_awaited, is_waiting) == [2, 2]


def _call_in_a_child(_: int) -> list[str]:
    _check_round(0)
    calls: list[Callable[[], Any]] = [
        idist.barrier,
        lambda: idist.all_reduce(1),
        lambda: idist.all_gather(torch.ones(3)),
        lambda: idist.broadcast("text"),
    ]
    found = []
    for call in calls:
        reader, writer = os.pipe()

        def tell(call: Callable[[], Any] = call, writer: int = writer) -> None:
            try:
                call()
                os.write(writer, b"no error")
            except Exception as error:
                os.write(writer, f"{type(error).__name__}: {error}"[:200].encode())
            os._exit(0)

        assert _fork(tell) == 0
        os.close(writer)
        with open(reader, encoding="utf-8") as file:
            found.append(file.read())
    _check_round(1)
    return found


def test_a_collective_in_a_forked_child_raises_at_once() -> None:
    for found in on_ranks(_call_in_a_child):
        for message in found:
            assert message.startswith("RuntimeError: "), message
            assert "fork" in message
