"""Ctrl-C and SIGTERM while replicas are threads of one process: each replica can save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import ignite_dist as idist
import interrupted_jobs
from ignite_dist.comp_models.xla import _torch_xla, interrupts, replicas
from interrupted_jobs import Job, read_until
from xla_jobs import spawn

pytestmark = pytest.mark.xla

SCRIPT = """
    import os, signal, sys, threading
    import torch
    import ignite_dist as idist

    if __name__ != "__main__" and sys.argv[1] == "handler":  # in the worker's main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))

    def save(folder, what):
        with open(f"{folder}/{idist.get_rank()}", "a") as file:
            file.write(what + "\\n")

    def train(local_rank, how, folder):
        ones = torch.ones(200, 200, device=idist.device())
        idist.all_reduce(ones)
        print(f"buffered by {local_rank} ", end="")
        try:
            os.write(1, f"worker {os.getpid()}\\n".encode())
            if how == "waits" and local_rank == 0:
                idist.all_reduce(ones)
            while how == "executes":
                (ones @ ones).sum().item()
            while True:
                threading.Event().wait(0.01)
        except (KeyboardInterrupt, SystemExit) as error:
            save(folder, repr(error))
            while how == "saves for ever":
                os.write(1, b"saving\\n")
                threading.Event().wait(1)
            raise
        finally:
            save(folder, f"finally {ones.cpu()[0, 0]:g}")

    if __name__ == "__main__":
        idist.spawn("xla-tpu", train, sys.argv[1:], nproc_per_node=2)
"""
SAVED = ["KeyboardInterrupt()", "finally 2"]


def job(folder: Path, how: str, seconds: int = 60) -> AbstractContextManager[Job]:
    environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    return interrupted_jobs.job(SCRIPT, how, folder=folder, seconds=seconds, **environ)


@pytest.mark.parametrize(
    ("how", "receiver"), [("computes", "launcher"), ("waits", "group"), ("executes", "group")]
)
def test_after_an_interrupt_every_replica_saves_once(how: str, receiver: str, tmp_path: Path) -> None:
    with job(tmp_path, how) as found:
        found.signal(receiver, signal.SIGINT)
        code, saved, out = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED, SAVED])
        assert all(f"buffered by {rank}" in out for rank in range(2)), out


def test_a_second_interrupt_ends_the_replicas_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "saves for ever") as found:
        found.signal("group", signal.SIGINT)
        read_until(found, "saving")
        read_until(found, "saving")
        found.signal("group", signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


def test_replicas_that_save_for_too_long_are_ended(tmp_path: Path) -> None:
    with job(tmp_path, "saves for ever", seconds=2) as found:
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


@pytest.mark.parametrize(
    ("how", "expected"), [("waits", []), ("handler", ["SystemExit('asked to end')", SAVED[1]])]
)
def test_sigterm(how: str, expected: list[str], tmp_path: Path) -> None:
    """Without a handler it ends the process. The exception of a handler reaches every replica."""
    with job(tmp_path, how) as found:
        found.launcher.send_signal(signal.SIGTERM)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGTERM, [expected, expected])


# --- collectives -------------------------------------------------------------------------------------


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")


def _interrupt_this_process() -> None:
    """Returns when the exception has been sent to both replicas."""
    num_sent = threading.Semaphore(0)
    original = interrupts.Interrupt.send

    def send(self: interrupts.Interrupt, kind: type[BaseException]) -> None:
        original(self, kind)
        num_sent.release()

    interrupts.Interrupt.send = send  # type: ignore[method-assign]
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2):
        num_sent.acquire()


def _interrupted(call: Callable[[], Any]) -> float:
    """The value on this replica after the interrupted ``call``, and that the next collective works."""
    with pytest.raises(KeyboardInterrupt):
        call()
    return float(idist.all_reduce(1))


def _is_interrupted_before_the_peer_comes(local_rank: int) -> float:
    def compute() -> None:
        while 0 not in replicas.get_meeting()._round.calls:  # until the other one waits
            threading.Event().wait(0.01)
        _interrupt_this_process()
        raise AssertionError("not interrupted")

    return _interrupted(compute if idist.get_rank() == 1 else idist.barrier)


@pytest.mark.usefixtures("two_devices")
def test_a_collective_that_not_all_have_reached_is_given_up() -> None:
    assert spawn(_is_interrupted_before_the_peer_comes) == [2, 2]


def _interrupt_rank_1_when_rank_0_has_begun() -> None:
    """In the next all_reduce, in which rank 0 then waits for rank 1."""
    has_begun = threading.Event()
    meet, begin = replicas.Meeting.meet, _torch_xla.begin_to_compute

    def meet_and_interrupt(self: replicas.Meeting, rank: int, call: str) -> None:
        meet(self, rank, call)
        if rank == 1 and call.startswith("all_reduce"):
            has_begun.wait()
            _interrupt_this_process()

    def begin_and_say_so(result: torch.Tensor) -> None:
        begin(result)
        has_begun.set()

    replicas.Meeting.meet = meet_and_interrupt  # type: ignore[method-assign]
    _torch_xla.begin_to_compute = begin_and_say_so


def _is_interrupted_after_the_peer_has_come(local_rank: int) -> float:
    tensor = torch.ones(2, device=idist.device())
    if idist.get_rank() == 0:
        _interrupt_rank_1_when_rank_0_has_begun()
    idist.barrier()
    return _interrupted(lambda: idist.all_reduce(tensor))


@pytest.mark.usefixtures("two_devices")
def test_a_collective_that_all_have_reached_is_completed() -> None:
    """A replica that left it would block the device of the other one."""
    assert spawn(_is_interrupted_after_the_peer_has_come) == [2, 2]


# --- threads -----------------------------------------------------------------------------------------


def _run(interrupt: interrupts.Interrupt, function: Callable[[], None]) -> None:
    """Run the function in the thread of the interrupt."""
    thread = threading.Thread(target=interrupt.run, args=(function, SimpleQueue()))
    thread.start()
    thread.join()


def test_an_exception_that_is_sent_early_is_raised_in_the_block_and_once() -> None:
    interrupt, seen = interrupts.Interrupt(), []

    def function() -> None:
        seen.append("before")
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            seen.append("not reached")
        interrupt.send(KeyboardInterrupt)
        with interrupts.allowed():
            seen.append("after")

    interrupt.send(KeyboardInterrupt)
    _run(interrupt, function)
    assert seen == ["before", "after"]


def test_an_exception_that_is_sent_late_is_not_raised() -> None:
    interrupt, seen = interrupts.Interrupt(), []

    def function() -> None:
        with interrupts.allowed():
            pass
        interrupt.send(KeyboardInterrupt)
        seen.append("reported")

    _run(interrupt, function)
    assert seen == ["reported"]


def test_delays_can_be_nested() -> None:
    interrupt, seen = interrupts.Interrupt(), []

    def function() -> None:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            with interrupts.delayed():
                with interrupts.delayed():
                    interrupt.send(KeyboardInterrupt)
                seen.append("inner")
            seen.append("not reached")

    _run(interrupt, function)
    assert seen == ["inner"]
