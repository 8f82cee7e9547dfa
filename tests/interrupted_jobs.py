"""Jobs that are interrupted while all their ranks are at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import helpers

# A process of the job writes its stacks when it receives SIGUSR1.
_STACKS = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)\n"


class Job(NamedTuple):
    """A launcher, the process of each of its two ranks, and the folder where the ranks save.

    The launcher's process forwards signals to the fork that runs the script.
    """

    launcher: subprocess.Popen[str]
    workers: list[int]
    folder: Path

    def signal(self, receiver: str, number: int) -> None:
        """Send a signal to the ``"launcher"``, or as a terminal does to the ``"group"`` of all processes."""
        if receiver == "group":
            os.killpg(os.getpgid(self.workers[0]), number)
        else:
            self.launcher.send_signal(number)

    def end(self) -> tuple[int, list[list[str]], str]:
        """The launcher's exit code, what each rank has saved, and the output, once all have ended."""
        try:
            out, err = self.launcher.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The job has not ended.\n{self._stacks_and_processes()}") from None
        assert helpers.end_of_processes(self.workers, 0) == []
        assert not re.search(r"TCPStore|Exception raised from|frame #|sendBytes|recvValue", err), err
        assert err.count("Traceback") <= 1, err  # of the launcher
        (self.folder / "stderr").write_text(err)
        saved = [path.read_text().splitlines() if path.exists() else [] for path in self._paths()]
        return self.launcher.returncode, saved, out

    def _stacks_and_processes(self) -> str:
        for pid in (self.launcher.pid, *self.workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        try:
            _, stderr = self.launcher.communicate(timeout=10)
        except subprocess.TimeoutExpired as expired:
            stderr = (expired.stderr or b"").decode(errors="replace")
        processes = ["ps", "-eo", "pid,ppid,pgid,stat,wchan:20,etimes,args"]
        return stderr + subprocess.run(processes, capture_output=True, text=True, check=False).stdout

    def _paths(self) -> list[Path]:
        return [self.folder / str(rank) for rank in range(2)]


@contextmanager
def job(text: str, *args: str, folder: Path, seconds: int, **environ: str) -> Iterator[Job]:
    """A script with the given text, arguments and folder, whose ranks are at work.

    Each rank has said ``worker <pid>``, and saves in ``<folder>/<rank>``. The grace period has ``seconds``.
    """
    script = helpers.write_script(folder, _STACKS + textwrap.dedent(text))
    launcher = subprocess.Popen(
        [helpers.python_that_forks(), str(script), *args, str(folder)],
        env=helpers.plain_environ(IGNITE_DIST_GRACE_SECONDS=str(seconds), **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = Job(launcher, [], folder)
    try:
        while len(found.workers) < 2:
            line = launcher.stdout.readline()  # type: ignore[union-attr]
            assert line, launcher.stderr.read()  # type: ignore[union-attr]
            found.workers.extend(map(int, re.findall(r"worker (\d+)", line)))
        yield found
    finally:
        launcher.kill()
        for pid in found.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def read_until(found: Job, text: str) -> None:
    while text not in (line := found.launcher.stdout.readline()):  # type: ignore[union-attr]
        assert line, found.launcher.stderr.read()  # type: ignore[union-attr]
