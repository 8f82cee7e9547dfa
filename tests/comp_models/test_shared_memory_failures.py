"""Failures in groups that share memory: deaths, different calls, interrupts. Nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from spawned import FAILURE_SECONDS, within
from test_leaks import Held
from waiting import when_waiting

NUM_RANKS = 3
SECONDS = 60

CALLS: dict[str, Callable[[], Any]] = {
    "number": lambda: idist.all_reduce(1),
    "all_reduce": lambda: idist.all_reduce(torch.ones(1_500_000)),
    "all_gather": lambda: idist.all_gather(torch.ones(400_000)),
    "broadcast": lambda: idist.broadcast(torch.ones(1_000), src=NUM_RANKS - 1),
    "all_to_all": lambda: idist.all_to_all(torch.ones(NUM_RANKS * 100)),
    "objects": lambda: idist.all_gather({"text": "x" * 20_000}),
    "barrier": idist.barrier,
    "gradients": lambda: _wrapped_model()(torch.ones(1, 1_000)).sum().backward(),
}


@cache
def _wrapped_model() -> Any:
    return idist.auto_model(torch.nn.Linear(1_000, 400))


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """For the temporary files of the ranks. The fork server outlives the test, so it has another folder."""
    tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="shm") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield path


# --- deaths --------------------------------------------------------------------------------------------

# Stops the process, and kills it when it has stopped.
STOP_AND_KILL = """
    kill -STOP $1
    until grep -q '^State:.T' /proc/$1/status; do :; done
    kill -KILL $1
"""


def _kill_at(seconds: float, how: str) -> None:
    """Kill this process from another thread, wherever its main thread is by then."""

    def kill() -> None:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.run(["sh", "-c", STOP_AND_KILL, "sh", str(os.getpid())], check=False, timeout=SECONDS)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()


def _leave(how: str) -> None:
    if how == "exception":
        raise LookupError("no data here")
    if how == "os._exit":
        os._exit(3)
    if how == "destroy_process_group":
        dist.destroy_process_group()


def _call_until_one_dies(_: int, how: str, kinds: list[str], victim: int, seed: int) -> None:
    """Calls of ``kinds`` in turn; the victim dies after a random number of them, or at a random time."""
    rank, moment = idist.get_rank(), random.Random(seed).random()
    idist.barrier()
    if rank == victim and how.startswith("SIG"):
        _kill_at(moment / 4, how)
    num_calls = int(moment * 40)
    for number in range(10**9):
        if rank == victim and number == num_calls and not how.startswith("SIG"):
            return _leave(how)
        CALLS[kinds[number % len(kinds)]]()


def _die(how: str, kinds: list[str], victim: int, seed: int) -> idist.RankFailedError:
    with within(FAILURE_SECONDS), pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _call_until_one_dies, (how, kinds, victim, seed), nproc_per_node=NUM_RANKS)
    return caught.value


# Who has failed first, and how. A rank that returns or that has destroyed its groups has not failed.
WAYS = {
    "exception": ("rank 2", "LookupError"),
    "os._exit": ("rank 2", "SystemExit"),
    "return": ("another", "MissingRanksError"),
    "destroy_process_group": (
        "another",
        "DistBackendError|RankFailedError",
    ),  # its process may be there still
    "SIGKILL": ("rank 2", "SIGKILL"),
    "SIGSTOP": ("rank 2", "SIGKILL"),
}


@pytest.mark.long
@pytest.mark.parametrize("how", list(WAYS))
def test_every_way_to_end_while_others_wait(how: str, folder: str) -> None:
    error = _die(how, list(CALLS), victim=2, seed=len(how))
    who, error_type = WAYS[how]
    assert who == ("rank 2" if error.rank == 2 else "another")
    assert re.fullmatch(error_type, error.error_type), error
    assert "rank 2" in str(error).lower() or how == "destroy_process_group"


@pytest.mark.long
@pytest.mark.stress
def test_deaths_in_every_kind_of_call_leave_nothing_behind(
    folder: str, repetitions: Callable[[int, int], int], tally: Callable[[str], None]
) -> None:
    hows, kinds, held = ("SIGKILL", "os._exit", "SIGSTOP"), list(CALLS), None
    for number in range(repetitions(len(CALLS), 200)):
        how, victim = hows[number % len(hows)], number % NUM_RANKS
        error = _die(how, [kinds[number % len(kinds)]], victim, number)
        assert error.rank == victim
        held = held or Held.now()
        tally("deaths of a rank in a group that shares memory")
    assert held is not None
    held.check()


# --- different calls -----------------------------------------------------------------------------------


def _control() -> Any:
    """A group of all ranks that goes over gloo."""
    group = idist.new_group(range(idist.get_world_size()))
    os.environ[VARIABLE] = "0"
    idist.barrier(group)
    del os.environ[VARIABLE]
    return group


PART = 1 << 20  # bytes, or more than a part

# What rank 0 calls, what the others call, and who must raise. The source of a broadcast waits for nobody.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "op": (
        lambda: idist.all_reduce(torch.ones(10)),
        lambda: idist.all_reduce(torch.ones(10), "MAX"),
        "all",
    ),
    "size": (
        lambda: idist.all_reduce(torch.ones(10)),
        lambda: idist.all_reduce(torch.ones(11)),
        "all",
    ),
    "sizes of several parts": (
        lambda: idist.all_reduce(torch.ones(2 * PART // 4)),
        lambda: idist.all_reduce(torch.ones(3 * PART // 4)),
        "all",
    ),
    "sizes of several parts, ints": (
        lambda: idist.all_gather(torch.ones(3 * PART, dtype=torch.uint8)),
        lambda: idist.all_gather(torch.ones(2 * PART, dtype=torch.uint8)),
        "all",
    ),
    "dtype": (
        lambda: idist.all_reduce(torch.ones(10)),
        lambda: idist.all_reduce(torch.ones(10, dtype=torch.int32)),
        "all",
    ),
    "kind": (
        lambda: idist.all_reduce(torch.ones(12)),
        lambda: idist.all_gather(torch.ones(12)),
        "all",
    ),
    "all_to_all": (
        lambda: idist.all_gather(torch.ones(12)),
        lambda: idist.all_to_all(torch.ones(12)),
        "all",
    ),
    "barrier": (idist.barrier, lambda: idist.all_reduce(torch.ones(12)), "all"),
    "object": (lambda: idist.all_gather(torch.ones(12)), lambda: idist.all_gather("text"), "all"),
    "broadcast": (
        lambda: idist.broadcast(torch.ones(10)),
        lambda: idist.all_reduce(torch.ones(10)),
        "all",
    ),
    "broadcast of several parts": (
        lambda: idist.broadcast(torch.ones(4 * PART)),
        lambda: idist.all_reduce(torch.ones(10)),
        "all",
    ),
    "source": (
        lambda: idist.broadcast(torch.ones(10), src=1),
        lambda: idist.broadcast(torch.ones(10), src=0),
        "all",
    ),
}


def _mismatched(_: int) -> dict[str, list[str]]:
    """The messages of the errors on all ranks, by the name of the mismatch."""
    control, rank = _control(), idist.get_rank()
    found = {}
    for name, (first, others, _) in MISMATCHES.items():
        message = ""
        try:
            (first if rank == 0 else others)()
        except idist.CollectiveMismatchError as error:
            message = str(error)
        found[name] = idist.all_gather(message, control)
        values = torch.full((5,), float(rank))
        assert idist.all_reduce(values).tolist() == [sum(range(NUM_RANKS))] * 5, name
        assert idist.all_gather(f"{name} {rank}")[0] == f"{name} 0"
    return found


def test_different_calls_raise_and_the_group_remains_usable() -> None:
    found, *_ = idist.spawn("gloo", _mismatched, nproc_per_node=NUM_RANKS)
    for name, (_, _, who) in MISMATCHES.items():
        raised = [bool(message) for message in found[name]]
        assert raised == [who == "all", True, True], (name, found[name])
        for message in filter(None, found[name]):
            assert "rank 0: " in message and "ranks 1-2: " in message, (name, message)


# --- interrupts ----------------------------------------------------------------------------------------


def _interrupted(_: int) -> tuple[float, float]:
    control = _control()
    idist.barrier()
    if idist.get_rank() == 0:
        when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
        with within(10), pytest.raises(KeyboardInterrupt):
            idist.all_reduce(torch.ones(3))
        idist.barrier(control)
        first = 0.0
    else:
        idist.barrier(control)
        first = idist.all_reduce(torch.ones(3))[0].item()
    return first, idist.all_reduce(torch.full((3,), 5.0))[0].item()


def test_an_interrupt_ends_a_wait_and_the_call_counts() -> None:
    assert idist.spawn("gloo", _interrupted, nproc_per_node=2) == [(0, 10), (2, 10)]


def _interrupted_before(_: int) -> tuple[str, list[int]]:
    """Rank 0 cannot send a second broadcast while rank 1 has not received the first."""
    control = _control()
    idist.barrier()
    if idist.get_rank() == 0:
        for value in (1.0, 2.0):
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                idist.broadcast(torch.full((3,), value))
        idist.barrier(control)
        return "", idist.all_gather(0)
    idist.barrier(control)
    assert idist.broadcast(torch.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        idist.broadcast(torch.zeros(3))
    return str(caught.value), idist.all_gather(1)


def test_an_interrupt_before_a_call_has_sent_anything_raises_on_the_others() -> None:
    (first, gathered), (message, others) = idist.spawn("gloo", _interrupted_before, nproc_per_node=2)
    assert (first, gathered, others) == ("", [0, 1], [0, 1])
    early = "(ended before it sent data: broadcast(from 0 torch.float32 (3,)))"
    assert "rank 0: broadcast at comp_models/test_shared_memory_failures.py:" in message and early in message
    assert "rank 1: broadcast at comp_models/test_shared_memory_failures.py:" in message
    assert "(from 0 torch.float32 (3,))" in message


def _interrupted_often(_: int, num_interrupts: int) -> list[float]:
    """Rank 0 cannot send its all_reduces while rank 1 has not received a broadcast."""
    control, rank = _control(), idist.get_rank()
    for _ in range(2):
        idist.all_reduce(torch.full((3,), 100.0))
    if rank == 0:
        calls = [lambda: idist.broadcast(torch.ones(3))]
        calls += [lambda: idist.all_reduce(torch.full((3,), 2.0))] * num_interrupts
        for call in calls:
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                call()
    idist.barrier(control)
    if rank == 1:
        with suppress(idist.CollectiveMismatchError):  # the ranks compare their last four calls
            assert idist.broadcast(torch.zeros(3)).tolist() == [1, 1, 1]
        for _ in range(num_interrupts):
            with pytest.raises(idist.CollectiveMismatchError):
                idist.all_reduce(torch.full((3,), 3.0))
    return idist.all_reduce(torch.full((3,), 5.0)).tolist()


@pytest.mark.parametrize("num_interrupts", [2, 4, 5, pytest.param(9, marks=pytest.mark.long)])
def test_old_data_is_never_taken_for_that_of_a_call_that_ended_early(num_interrupts: int) -> None:
    found = idist.spawn("gloo", _interrupted_often, (num_interrupts,), nproc_per_node=2)
    assert found == [[10.0] * 3] * 2


def _ended_beside_a_call_that_ended_early(_: int) -> None:
    control, rank = _control(), idist.get_rank()
    idist.barrier()
    if rank == 2:
        idist.barrier(control)
        os._exit(3)
    if rank == 0:
        when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            idist.broadcast(torch.ones(3))
        idist.barrier(control)
        idist.broadcast(torch.ones(3))  # rank 2 never receives the first
    idist.barrier(control)
    for _ in range(2):
        idist.broadcast(torch.ones(3))


def test_a_rank_that_ends_is_the_cause_although_another_call_ended_early() -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _ended_beside_a_call_that_ended_early, nproc_per_node=NUM_RANKS)
    assert caught.value.rank == 2 and "CollectiveMismatchError" not in str(caught.value)


LARGE: dict[str, Callable[[], Any]] = {
    "all_reduce of floats": lambda: idist.all_reduce(torch.ones(PART)),
    "all_reduce of ints": lambda: idist.all_reduce(torch.ones(PART, dtype=torch.int32)),
    "all_gather": lambda: idist.all_gather(torch.ones(PART)),
    "broadcast": lambda: idist.broadcast(torch.ones(PART)),
    "all_reduce of a tree": lambda: idist.all_reduce({"a": torch.ones(400)}),
}


def _interrupted_between(_: int, kind: str) -> tuple[str, list[int], Any]:
    """Rank 0 leaves a call between its steps. Rank 1 makes the call later."""
    control, call, rank, error = _control(), LARGE[kind], idist.get_rank(), ""
    idist.barrier()
    if rank == 1:
        idist.barrier(control)
    else:
        when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        call()
    except (KeyboardInterrupt, idist.CollectiveMismatchError) as raised:
        error = repr(raised)
    if rank == 0:
        idist.barrier(control)
    return error, idist.all_gather(rank), call()


@pytest.mark.parametrize("kind", list(LARGE))
def test_after_an_interrupt_between_the_steps_of_a_call_the_ranks_go_on_in_step(kind: str) -> None:
    (interrupt, *first), (mismatch, *second) = idist.spawn(
        "gloo", _interrupted_between, (kind,), nproc_per_node=2
    )
    assert interrupt == "KeyboardInterrupt()"
    assert mismatch.startswith("CollectiveMismatchError") and "KeyboardInterrupt" in mismatch
    assert first[0] == second[0] == [0, 1]
    for found in (first[1], second[1]):
        result = found["a"] if isinstance(found, dict) else found
        assert result[0] == (1 if kind in ("all_gather", "broadcast") else 2)


def _in_a_handler(_: int) -> tuple[str, list[float], int]:
    control, message = _control(), ""
    idist.barrier()

    def handle(*_: Any) -> None:
        nonlocal message
        with pytest.raises(RuntimeError) as caught:
            idist.all_reduce(1)
        message = str(caught.value)
        idist.barrier(control)  # of another group: allowed

    if idist.get_rank() == 0:
        signal.signal(signal.SIGUSR1, handle)
        when_waiting(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    else:
        idist.barrier(control)
    reduced = idist.all_reduce(torch.ones(2)).tolist()
    return message, reduced, idist.all_reduce(1)


def test_a_call_in_a_signal_handler_in_the_wait_of_its_group_raises() -> None:
    (message, *first), (none, *second) = idist.spawn("gloo", _in_a_handler, nproc_per_node=2)
    assert message.startswith("A signal handler or a finalizer has called a collective")
    assert none == ""
    assert first == second == [[2.0, 2.0], 2]
