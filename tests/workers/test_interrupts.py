"""Ctrl-C and SIGTERM: what workers can still do, and for how long."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import ignite_dist as idist
import interrupted_jobs
from interrupted_jobs import Job, read_until

SCRIPT = """
    import os, signal, sys, threading
    import torch
    import ignite_dist as idist

    def save(folder, what):
        with open(f"{folder}/{idist.get_rank()}", "a") as file:
            file.write(what + "\\n")

    def save_and_exit(folder):
        threading.Event().wait(0.5)  # a checkpoint takes a while
        save(folder, "SIGTERM")
        sys.exit(0)

    def train(local_rank, how, folder):
        if how == "handlers":
            signal.signal(signal.SIGINT, lambda *_: save(folder, "own handler"))
            signal.signal(signal.SIGTERM, lambda *_: save_and_exit(folder))
        if how == "ignores":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        idist.barrier()
        print(f"buffered by {local_rank} ", end="")
        try:
            os.write(1, f"worker {os.getpid()}\\n".encode())
            if how == "waits" and local_rank == 0:
                idist.all_reduce(torch.ones(2))
            while True:
                threading.Event().wait(60)
        except KeyboardInterrupt:
            save(folder, "KeyboardInterrupt")
            while how == "saves for ever":
                os.write(1, b"saving\\n")
                threading.Event().wait(60)
            raise
        finally:
            save(folder, "finally")

    if __name__ == "__main__":
        how, of_launcher, folder = sys.argv[1:]
        if "handler" in of_launcher:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        if "goes on" in of_launcher:
            signal.signal(signal.SIGTERM, lambda *_: None)
        idist.spawn("gloo", train, (how, folder), nproc_per_node=2, join="idle" not in of_launcher)
        if "goes on" in of_launcher:
            sys.exit(4)
        threading.Event().wait()
"""


def job(folder: Path, how: str, of_launcher: str = "", seconds: int = 600) -> AbstractContextManager[Job]:
    return interrupted_jobs.job(SCRIPT, how, of_launcher, folder=folder, seconds=seconds)


SAVED = ["KeyboardInterrupt", "finally"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["computes", "waits"])
@pytest.mark.parametrize("receiver", ["launcher", "group"])
def test_after_an_interrupt_every_rank_saves_once(how: str, receiver: str, tmp_path: Path) -> None:
    with job(tmp_path, how) as found:
        found.signal(receiver, signal.SIGINT)
        code, saved, out = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED, SAVED])
        assert all(f"buffered by {rank}" in out for rank in range(2)), out


def test_an_interrupt_of_one_worker_and_then_of_the_launcher(tmp_path: Path) -> None:
    """The worker that has been interrupted already is not interrupted again while it saves."""
    with job(tmp_path, "saves for ever") as found:
        os.kill(found.workers[0], signal.SIGINT)
        read_until(found, "saving")
        found.launcher.send_signal(signal.SIGINT)
        read_until(found, "saving")  # the other one
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


@pytest.mark.long
@pytest.mark.parametrize("receiver", ["launcher", "group"])
def test_a_handler_of_the_worker_is_called_once(receiver: str, tmp_path: Path) -> None:
    with job(tmp_path, "handlers", seconds=1) as found:
        found.signal(receiver, signal.SIGINT)
        # After the grace period it gets SIGTERM.
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [["own handler", "SIGTERM", "finally"]] * 2)


def test_a_second_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "saves for ever") as found:
        found.launcher.send_signal(signal.SIGINT)
        read_until(found, "saving")
        read_until(found, "saving")
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_workers_that_ignore_signals_are_killed(number: signal.Signals, tmp_path: Path) -> None:
    with job(tmp_path, "ignores", seconds=1) as found:
        found.launcher.send_signal(number)
        code, saved, _ = found.end()
        assert (code, saved) == (-number, [[], []])
    said = (tmp_path / "stderr").read_text()
    who = "Interrupt: the workers" if number == signal.SIGINT else "SIGTERM: workers that handle SIGTERM"
    assert f"{who} have 1 s to save and to end (IGNITE_DIST_GRACE_SECONDS)" in said
    assert "The workers had not ended, and are ended now: ranks 0, 1\n" in said


@pytest.mark.parametrize(("of_launcher", "expected"), [("", -signal.SIGTERM), ("goes on", 4)])
def test_sigterm_to_the_process_group(of_launcher: str, expected: int, tmp_path: Path) -> None:
    """The fork server, which is in the group too, outlives it: it reports how the workers end."""
    with job(tmp_path, "handlers", of_launcher) as found:
        found.signal("group", signal.SIGTERM)
        code, saved, _ = found.end()
        assert (code, saved) == (expected, [["SIGTERM", "finally"]] * 2)


@pytest.mark.parametrize(("of_launcher", "expected"), [("", -signal.SIGTERM), ("handler", 3)])
def test_sigterm_reaches_the_workers(of_launcher: str, expected: int, tmp_path: Path) -> None:
    with job(tmp_path, "handlers", of_launcher) as found:
        found.launcher.send_signal(signal.SIGTERM)
        code, saved, out = found.end()
        assert (code, saved) == (expected, [["SIGTERM", "finally"]] * 2)
        assert all(f"buffered by {rank}" in out for rank in range(2)), out


def test_sigterm_with_its_default_action(tmp_path: Path) -> None:
    with job(tmp_path, "waits") as found:
        found.launcher.send_signal(signal.SIGTERM)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGTERM, [[], []])


def test_an_interrupt_while_nobody_waits_for_the_workers(tmp_path: Path) -> None:
    with job(tmp_path, "computes", "idle") as found:
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED, SAVED])


# --- errors while they clean up ----------------------------------------------------------------------------

CLEANS_UP = """
    import os, signal, sys, threading
    import torch
    import ignite_dist as idist

    def fail(*_):
        raise OSError("disk full")

    def train(local_rank, how, folder):
        idist.barrier()
        try:
            if how == "handler":
                signal.signal(signal.SIGTERM, fail)
            os.write(1, f"worker {os.getpid()}\\n".encode())
            while True:
                threading.Event().wait(60)
        except KeyboardInterrupt:
            if how == "exits":
                sys.exit(3)
            if how == "exits with a text":
                sys.exit("disk full")
            if how == "goes on":
                raise KeyboardInterrupt from OSError("disk full")
            if how == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            if how == "out of step" and local_rank == 0:
                idist.all_reduce(torch.ones(2))  # as if it had been in this call
            if how == "out of step":
                idist.save_checkpoint(f"{folder}/checkpoint", step=1)
            fail()

    if __name__ == "__main__":
        idist.spawn("gloo", train, sys.argv[1:], nproc_per_node=2)
"""


@pytest.mark.parametrize(
    ("how", "number", "expected"),
    [
        ("raises", signal.SIGINT, "OSError: disk full"),
        ("handler", signal.SIGTERM, "OSError: disk full"),
        ("dies", signal.SIGINT, "was ended by SIGSEGV"),
        ("out of step", signal.SIGINT, "idist.any_interrupted() ends all in the same step"),
        ("exits with a text", signal.SIGINT, "SystemExit: disk full"),
        ("goes on", signal.SIGINT, "OSError: disk full"),
        ("exits", signal.SIGINT, None),
    ],
)
def test_what_goes_wrong_after_a_signal_is_shown(
    how: str, number: signal.Signals, expected: str | None, tmp_path: Path
) -> None:
    with interrupted_jobs.job(CLEANS_UP, how, folder=tmp_path, seconds=60) as found:
        found.launcher.send_signal(number)
        _, err = found.launcher.communicate(timeout=280)
    name = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "SIGTERM"}[number]
    assert found.launcher.returncode == -number
    if expected is None:
        assert "A worker failed" not in err
    else:
        assert f"A worker failed after the {name}. " in err and expected in err, err


@pytest.mark.parametrize("value", ["soon", "-1", "1.5"])
def test_a_grace_period_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_GRACE_SECONDS", value)
    with pytest.raises(idist.EnvironmentVariablesError, match="IGNITE_DIST_GRACE_SECONDS"):
        idist.spawn("gloo", abs)


def test_sigterm_has_its_default_action_after_a_launch() -> None:
    assert idist.spawn("gloo", abs) == [0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
