"""Ctrl-C and SIGTERM: what workers can still do, and for how long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import helpers
import ignite_dist as idist

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


class Job(NamedTuple):
    """A launcher and its workers, which are all at work; and the folder where they save."""

    launcher: subprocess.Popen[str]
    workers: list[int]
    folder: Path

    def end(self) -> tuple[int, list[list[str]], str]:
        """The launcher's exit code, what each rank has saved, and the output, once all have ended."""
        out, err = self.launcher.communicate(timeout=280)
        assert helpers.end_of_processes(self.workers, 0) == []
        assert not re.search(r"TCPStore|Exception raised from|frame #|sendBytes|recvValue", err), err
        assert err.count("Traceback") <= 1, err  # of the launcher
        saved = [path.read_text().splitlines() if path.exists() else [] for path in self._paths()]
        return self.launcher.returncode, saved, out

    def _paths(self) -> list[Path]:
        return [self.folder / str(rank) for rank in range(2)]


@contextmanager
def job(folder: Path, how: str, of_launcher: str = "", seconds: int = 600) -> Iterator[Job]:
    """Its workers are at work. By default only their end, or a second Ctrl-C, ends the grace period."""
    script = helpers.write_script(folder, SCRIPT)
    launcher = subprocess.Popen(
        [sys.executable, str(script), how, of_launcher, str(folder)],
        env=helpers.plain_environ(IGNITE_DIST_GRACE_SECONDS=str(seconds)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    found = Job(launcher, [], folder)
    try:
        while len(found.workers) < 2:
            line = launcher.stdout.readline()  # type: ignore[union-attr]
            assert line, launcher.stderr.read()  # type: ignore[union-attr]
            found.workers.extend(map(int, re.findall(r"worker (\d+)", line)))
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


SAVED = ["KeyboardInterrupt", "finally"]


@pytest.mark.parametrize("how", ["computes", "waits"])
@pytest.mark.parametrize("receiver", ["launcher", "group"])
def test_after_an_interrupt_every_rank_saves_once(how: str, receiver: str, tmp_path: Path) -> None:
    with job(tmp_path, how) as found:
        if receiver == "group":  # as a terminal does
            os.killpg(found.launcher.pid, signal.SIGINT)
        else:
            found.launcher.send_signal(signal.SIGINT)
        code, saved, out = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED, SAVED])
        assert all(f"buffered by {rank}" in out for rank in range(2)), out


def test_an_interrupt_of_one_worker_and_then_of_the_launcher(tmp_path: Path) -> None:
    """The worker that has been interrupted already is not interrupted again while it saves."""
    with job(tmp_path, "saves for ever") as found:
        os.kill(found.workers[0], signal.SIGINT)
        _read_until(found, "saving")
        found.launcher.send_signal(signal.SIGINT)
        _read_until(found, "saving")  # the other one
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


def _read_until(found: Job, text: str) -> None:
    while text not in (line := found.launcher.stdout.readline()):  # type: ignore[union-attr]
        assert line, found.launcher.stderr.read()  # type: ignore[union-attr]


@pytest.mark.parametrize("receiver", ["launcher", "group"])
def test_a_handler_of_the_worker_is_called_once(receiver: str, tmp_path: Path) -> None:
    with job(tmp_path, "handlers", seconds=1) as found:
        (os.killpg if receiver == "group" else os.kill)(found.launcher.pid, signal.SIGINT)
        # After the grace period it gets SIGTERM.
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [["own handler", "SIGTERM", "finally"]] * 2)


def test_a_second_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "saves for ever") as found:
        found.launcher.send_signal(signal.SIGINT)
        _read_until(found, "saving")
        _read_until(found, "saving")
        found.launcher.send_signal(signal.SIGINT)
        code, saved, _ = found.end()
        assert (code, saved) == (-signal.SIGINT, [SAVED[:1], SAVED[:1]])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_workers_that_ignore_signals_are_killed(number: signal.Signals, tmp_path: Path) -> None:
    with job(tmp_path, "ignores", seconds=1) as found:
        found.launcher.send_signal(number)
        code, saved, _ = found.end()
        assert (code, saved) == (-number, [[], []])


@pytest.mark.parametrize(("of_launcher", "expected"), [("", -signal.SIGTERM), ("goes on", 4)])
def test_sigterm_to_the_process_group(of_launcher: str, expected: int, tmp_path: Path) -> None:
    """The fork server, which is in the group too, outlives it: it reports how the workers end."""
    with job(tmp_path, "handlers", of_launcher) as found:
        os.killpg(found.launcher.pid, signal.SIGTERM)
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


@pytest.mark.parametrize("value", ["soon", "-1", "1.5"])
def test_a_grace_period_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_GRACE_SECONDS", value)
    with pytest.raises(idist.EnvironmentVariablesError, match="IGNITE_DIST_GRACE_SECONDS"):
        idist.spawn("gloo", abs)


def test_sigterm_has_its_default_action_after_a_launch() -> None:
    assert idist.spawn("gloo", abs) == [0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
