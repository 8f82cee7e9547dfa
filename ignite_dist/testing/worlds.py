"""The workers of one world, which run tests until one of them fails."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ignite_dist import launcher
from ignite_dist.testing import rank_session
from ignite_dist.testing.debugging import GRACE_SECONDS, DebuggerLeft, DebuggerWanted, Terminal
from ignite_dist.testing.kept_workers import KeptWorkers
from ignite_dist.testing.rank_session import (
    NotStarted,
    RankDone,
    RankReport,
    RankWarning,
    Running,
    SessionExit,
)
from ignite_dist.testing.settings import Request, SessionSettings, WorldSettings

# For the start of pytest in the workers and the import of the tests.
_START_SECONDS = 120.0
_END_SECONDS = 10.0  # from the end of a worker's connection to the end of its process, at most

# Frames that every worker has, by parts of their paths.
_OUTER_FRAMES = (
    *("/_pytest/", "/pluggy/", "/pytest/", "/multiprocessing/", 'File "<string>"'),
    *("/ignite_dist/testing/", "/ignite_dist/workers/", "/ignite_dist/launcher/restarts.py"),
)
# Threads of only these frames belong to the package.
_IDLE_FRAMES = ("/threading.py", "/selectors.py", "/ignite_dist/diagnostics/watchdog.py")


class Unfinished(NamedTuple):
    """A rank that did not finish a test.

    Attributes:
        text: how it ended, or that it still ran.
        stacks: of its threads; empty if the rank has ended.
        ended: when its process ended; None if it still ran.
    """

    text: str
    stacks: str
    ended: float | None


class Outcome(NamedTuple):
    """What the ranks of a world have reported about a test.

    Attributes:
        reports: for each phase, the report of each rank that has sent one.
        subtests: the reports of subtests, by rank.
        warnings: those of all ranks.
        unfinished: the ranks that did not finish the test.
        exit: why a rank has ended the session, as ``pytest.exit`` and debuggers do; None if none has.
        is_reusable: True if the world can run another test.
    """

    reports: dict[str, dict[int, RankReport]]
    subtests: dict[int, list[RankReport]]
    warnings: list[RankWarning]
    unfinished: dict[int, Unfinished]
    exit: str | None
    is_reusable: bool


class World:
    """Workers of ``idist.spawn``, each with a pytest that runs the tests of this one.

    Raises:
        DistributedError, ValueError, TimeoutError: the workers could not be started.
    """

    def __init__(self, settings: WorldSettings, session: SessionSettings, terminal: Terminal) -> None:
        self.settings = settings
        self._session = session
        self._terminal = terminal
        self._lost: dict[int, float] = {}  # when the rank's connection ended
        self._kept = KeptWorkers(
            lambda address: launcher.spawn(
                settings.backend,
                rank_session.serve,
                (address, session),
                nproc_per_node=settings.world_size,
                join=False,
            ),
            settings.world_size,
        )
        self._connections, self._pids = self._kept.connections, self._kept.pids
        for rank, connection in self._connections.items():
            with suppress(OSError):  # the rank has ended, which run() finds
                terminal.introduce(connection, self._pids[rank])

    def run(self, request: Request, timeout: float) -> Outcome:
        """Run a test on every rank.

        Args:
            request: the test.
            timeout: how long the ranks may take, in seconds.

        Raises:
            RuntimeError: pytest has not started in a worker.
        """
        for connection in self._connections.values():
            with suppress(OSError):  # the rank has ended, which _receive() finds
                connection.send(request)
        progress = _Progress(dict(self._connections), timeout)
        while progress.running and (ready := self._terminal.wait(progress.running, progress.deadline)):
            for rank, connection in list(progress.running.items()):
                if connection not in ready:
                    continue
                message = self._receive(rank)
                if isinstance(message, (DebuggerWanted, DebuggerLeft)):
                    progress.deadline = self._terminal.receive(rank, connection, message, progress.deadline)
                else:
                    progress.receive(rank, message)
        self._terminal.end_of_test()
        outcome, ended = progress.outcome, progress.ended
        if outcome.exit is not None:  # the ranks cannot finish the test
            return outcome._replace(is_reusable=False)
        lost = [rank for rank in self._connections if rank not in ended]
        seconds = time.monotonic() - progress.started
        outcome.unfinished.update({rank: self._describe(rank, seconds) for rank in lost})
        return outcome._replace(is_reusable=not lost and _is_reusable(outcome, ended))

    def _receive(self, rank: int) -> Any:
        """The next message of a rank; None if the rank has ended."""
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            self._lost[rank] = time.monotonic()
            return None

    def _describe(self, rank: int, seconds: float) -> Unfinished:
        exit_code = self._exit_code(rank)
        ended = self._lost.get(rank, time.monotonic())
        if exit_code is not None:
            return Unfinished(f"ended during the test ({_describe_exit(exit_code)})", "", ended)
        if rank in self._lost:
            return Unfinished("ended during the test", "", ended)
        try:
            stacks = self._kept.stacks(rank)
        except ProcessLookupError:
            return Unfinished("ended during the test", "", ended)
        return Unfinished(f"had not finished the test after {seconds:.0f} s", relevant_frames(stacks), None)

    def _exit_code(self, rank: int) -> int | None:
        """The exit code of a worker of this machine; None if it runs, or is not known."""
        processes = getattr(self._kept.workers, "processes", ())
        process = next((process for process in processes if process.pid == self._pids[rank]), None)
        if process is None:
            return None
        process.join(_END_SECONDS if rank in self._lost else 0)
        exit_code: int | None = process.exitcode
        return exit_code

    def close(self) -> None:
        """End the workers."""
        self._kept.close()


class _Progress:
    """What has been received from the ranks during a test.

    Attributes:
        running: the connections of the ranks that have not finished the test.
        ended: the last messages of the others, without those of lost ranks.
        started: when all ranks had collected the test.
        deadline: when the running ranks count as lost.
        outcome: the result so far.
    """

    def __init__(self, running: dict[int, Connection], timeout: float) -> None:
        self.running = running
        self.ended: dict[int, RankDone] = {}
        self.started = time.monotonic()
        self.deadline = self.started + timeout + _START_SECONDS
        self.outcome = Outcome({}, {}, [], {}, None, is_reusable=True)
        self._seconds = timeout  # that the ranks have once all of them have collected the test
        self._collecting = set(running)

    def receive(self, rank: int, message: Any) -> None:
        """Take a message of a rank; None if the rank is lost.

        Raises:
            RuntimeError: pytest has not started in a worker.
        """
        outcome, has_failed = self.outcome, False
        if isinstance(message, RankWarning):
            outcome.warnings.append(message)
        elif isinstance(message, NotStarted):
            raise RuntimeError(message.text)
        elif isinstance(message, Running):
            self._has_collected(rank)
        elif isinstance(message, RankReport):
            has_failed = message.has_failed
            if message.is_of_subtest:
                outcome.subtests.setdefault(rank, []).append(message)
            else:
                outcome.reports.setdefault(message.data["when"], {})[rank] = message
        elif isinstance(message, RankDone):
            self.ended[rank] = message
            del self.running[rank]
        else:
            has_failed = True
            del self.running[rank]
            self._has_collected(rank)
            if isinstance(message, SessionExit):
                self.outcome = outcome._replace(exit=message.text)
        if has_failed:
            self._seconds = min(self._seconds, GRACE_SECONDS)
            if not self._collecting:
                self._limit(self._seconds)

    def _has_collected(self, rank: int) -> None:
        if rank in self._collecting:
            self._collecting.remove(rank)
            if not self._collecting:
                self.started = time.monotonic()
                self._limit(self._seconds)

    def _limit(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)


def _describe_exit(exit_code: int) -> str:
    names = {int(number): number.name for number in signal.Signals}
    return names.get(-exit_code, f"signal {-exit_code}") if exit_code < 0 else f"exit code {exit_code}"


def relevant_frames(stacks: str) -> str:
    """The stacks of the threads that run the test's code or the package's, without the frames around it."""
    shown = []
    for thread in stacks.strip().split("\n\n"):
        heading, *frames = thread.splitlines() or [""]
        frames = [frame for frame in frames if not any(part in frame for part in _OUTER_FRAMES)]
        if not all(any(part in frame for part in _IDLE_FRAMES) for frame in frames):
            shown.append("\n".join([heading, *frames]))
    return "\n".join(shown) or stacks


def _is_reusable(outcome: Outcome, ended: dict[int, RankDone]) -> bool:
    has_failed = any(report.has_failed for reports in outcome.reports.values() for report in reports.values())
    same = len({end.num_collectives for end in ended.values()}) == 1
    return not has_failed and same and all(end.has_context for end in ended.values())
