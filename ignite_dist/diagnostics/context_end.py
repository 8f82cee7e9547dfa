"""The end of a context: every rank reports its end, and no rank waits forever for a rank that has ended.

A rank that ends its context reports this end in the store, with its number of calls per group. The rank then
waits until all ranks have ended. If a rank waits in a collective that an ended rank never called, the wait
cannot succeed. The watchdog of the waiting rank then fails the collective and reports this to the ended rank.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistError, Store

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.transport import Wait
from ignite_dist.diagnostics.ended_processes import (
    WITH_STORE,
    WITHOUT_REPORT,
    failure_of,
    find_ended,
    first_rank,
    is_first_rank_known,
    mark_consequence,
)
from ignite_dist.diagnostics.flight_recorder import Recorder
from ignite_dist.diagnostics.out_of_band import (
    END_OUTCOME,
    END_REPORT,
    FIRST_FAILURE,
    NUM_ENDED,
    OutOfBandStore,
    collect_reports,
    report_wait,
)
from ignite_dist.environments import spawned
from ignite_dist.errors import DistributedError, MissingRanksError, RankFailedError
from ignite_dist.internals.call_sites import site_of, users_frame
from ignite_dist.internals.processes import Peer
from ignite_dist.internals.ranks import describe_ranks

_logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

# The watchdog fails a wait this long after the wait's start and the other rank's end. By then, all data have
# arrived.
_CONFIRM_SECONDS = 2.0
# The time for point-to-point messages, which may take longer, and for unknown calls.
_LONG_CONFIRM_SECONDS = 4.0

# The polling interval of an ended rank starts short and grows. The limit on the rate protects the store,
# which all ranks share.
_FIRST_POLL_SECONDS, _POLL_SECONDS, _POLLS_PER_SECOND = 0.0005, 0.1, 10_000
# How often an ended rank checks that the other ranks are alive, if the backend cannot detect a lost rank.
_ALIVE_CHECK_SECONDS = 300.0
# A rank that has failed, or whose collective has failed, waits this long for the store.
_STORE_SECONDS = 2.0
# A rank whose collective has failed waits this long for a report, or for the end of another rank's process.
# The system closes the connections of a process shortly before the process has ended.
_REPORT_SECONDS, _FIRST_REPORT_POLL_SECONDS, _REQUESTS_PER_LOOK = 1.0, 0.005, 8


@dataclass
class _Ended:
    """The report of a rank that has ended its context."""

    rank: int
    has_left: bool  # the process has exited without finalize()
    calls: Mapping[str, int | None]
    where: str
    seen: float = field(default_factory=time.monotonic)  # when this process read the report


class _Reports(NamedTuple):
    """What the ranks have written to the store about their ends.

    Attributes:
        explanation: the explanation of a wait that cannot succeed.
        failure: arguments of the first failure's ``RankFailedError``. None if it is this process's own.
        left: how ranks have exited without ``finalize()``, by rank.
    """

    explanation: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None
    left: Mapping[int, str]


class Endings:
    """The ended ranks of one context, as seen by this process."""

    def __init__(self, model: ComputationModel, recorder: Recorder, oob_store: OutOfBandStore) -> None:
        self._model = model
        self._recorder = recorder
        self._oob_store = oob_store
        self._world_size = model.get_world_size()
        self._own_ended: set[int] = set()  # ended ranks of this process
        self._ended: list[_Ended] = []
        self._reading_lock = threading.Lock()
        self._explanation: dict[str, Any] | None = None  # the explanation of a wait that cannot succeed
        self._cpu_times: dict[int, str] = {}
        self._first_rank: Peer | None = None  # if its process is on this machine; it may serve the store
        self._is_first_rank_known = False
        self._is_store_lost = False  # no answer came when a rank had failed

    def find_first_rank(self, store: Store) -> None:
        """Remember the process of rank 0, which cannot be asked for once rank 0 has ended with the store."""
        if not self._is_first_rank_known and is_first_rank_known(store):
            self._first_rank, self._is_first_rank_known = first_rank(store), True

    # --- in a rank that ends its context ---------------------------------------------------------------

    def meet(self, rank: int) -> None:
        """Report the end of ``rank``. Return when all ranks have ended their contexts, or one rank is lost.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not called.
        """
        try:
            store = self._oob_store.connection()
            self._report_end(store, rank, has_left=False)
            explanation = self._wait_for_outcome(store)
        except DistError:  # the rank that serves the store is lost; the backend reports this
            return
        if explanation is not None and self._explanation is None:  # else the failed collective has raised it
            text = explanation["text"]
            reason = f"{text} So rank {rank} has ended its context without the others."
            raise RankFailedError(explanation["rank"], MissingRanksError.__name__, text, reason)

    def leave(self, rank: int) -> None:
        """Report that the process of ``rank`` exits without ``finalize()``."""
        if rank not in self._own_ended:
            with suppress(DistError):
                self._report_end(self._oob_store.connection(), rank, has_left=True)

    def report_failure(self, rank: int, error: BaseException | None) -> None:
        """Report the error because of which ``rank`` ends its context, if no rank has failed before.

        If the error is an interrupt or another rank's, report only that the process of ``rank`` may end.
        """
        from ignite_dist.workers.failures import is_consequence, text_of

        if error is None or isinstance(error, KeyboardInterrupt) or is_consequence(error):
            self._in_time(lambda store: mark_consequence(store, rank))
            return
        failure = {
            "rank": rank,
            "error_type": type(error).__name__,
            "traceback": text_of(error, error.__traceback__),
            "host": socket.gethostname(),
        }
        self._in_time(lambda store: store.compare_set(FIRST_FAILURE, "", json.dumps(failure)))

    def _report_end(self, store: Store, rank: int, has_left: bool) -> None:
        self._own_ended.add(rank)
        position = store.add(NUM_ENDED, 1)
        frame = users_frame(sys._getframe(1))
        # "<string>" is the start code of multiprocessing.
        is_users_frame = frame is not None and not frame.f_code.co_filename.startswith("<")
        place = f" at {site_of(frame)}" if is_users_frame and not has_left else ""
        how = "its process has ended" if has_left else f"it has come to the end of its context{place}"
        report = {
            "rank": rank,
            "has_left": has_left,
            "calls": self._model.transport.calls_begun(),
            "where": f"{how} (pid {os.getpid()} on {socket.gethostname()})",
        }
        store.set(END_REPORT.format(position), json.dumps(report))
        if position == self._world_size:
            store.compare_set(END_OUTCOME, "", "all")

    def _wait_for_outcome(self, store: Store) -> dict[str, Any] | None:
        """Explanation of a wait that cannot succeed; None when all ranks have ended or one rank is lost."""
        if not self._poll_for_outcome(store):
            return None
        text = store.get(END_OUTCOME)
        explanation: dict[str, Any] | None = None if text == b"all" else json.loads(text)
        return explanation

    def _poll_for_outcome(self, store: Store) -> bool:
        """Wait until the store has the outcome. False if a rank is lost."""
        # Polls, because Store.wait() ignores Ctrl-C and logs a warning when it times out.
        started = checked = time.monotonic()
        while not store.check([END_OUTCOME]):
            is_broken = self._model.transport.is_broken()
            if is_broken:
                return store.check([END_OUTCOME])  # ranks may exit after the outcome is set
            now = time.monotonic()
            if is_broken is None and now - checked > _ALIVE_CHECK_SECONDS:
                if not self._are_others_alive(store):
                    return False
                checked = now
            least = max(_FIRST_POLL_SECONDS, self._world_size / _POLLS_PER_SECOND)
            time.sleep(max(least, min(_POLL_SECONDS, (now - started) / 10)))
        return True

    def _are_others_alive(self, store: Store) -> bool:
        self._read(store)
        ended = {report.rank for report in self._ended}
        others = [rank for rank in range(self._world_size) if rank not in ended]
        return len(collect_reports(store, others)) == len(others)

    # --- in the watchdog of a waiting rank ---------------------------------------------------------------

    def check_wait(
        self,
        store: Store,
        rank: int,
        thread: int,
        since: float,
        awaited: Wait,
        describe: Callable[[], str],
    ) -> None:
        """Fail the collective in which a thread of ``rank`` waits, if an ended rank makes success impossible.

        The error needs a proof: an ended rank has not made the call, and the call needs this rank. Without a
        proof, only the watchdog's report of long waits informs the user.

        Args:
            store: the watchdog's connection.
            rank: the waiting rank, a rank of this process.
            thread: the identity of the waiting thread.
            since: when the watchdog first saw this wait, in seconds of ``time.monotonic()``.
            awaited: the collective or message for which the thread waits.
            describe: returns a description of the call, for the error message.
        """
        if self._explanation is not None or rank in self._own_ended:
            return
        self._read(store)
        if not self._ended:
            return
        is_idle = self._is_idle(thread)
        is_sure = awaited.is_known and not awaited.is_message
        confirm_seconds = _CONFIRM_SECONDS if is_sure else _LONG_CONFIRM_SECONDS
        now = time.monotonic()
        confirmed = [report for report in self._ended if now - max(report.seen, since) > confirm_seconds]
        have_all_ended = {report.rank for report in confirmed}.issuperset(set(awaited.ranks) - {rank})
        if awaited.is_known and not (awaited.needs_all or awaited.is_message or have_all_ended):
            return
        missing = [
            report
            for report in confirmed
            if report.rank in awaited.ranks and self._has_missed(report, awaited, is_idle)
        ]
        if missing:
            self._fail_waits(store, rank, missing, describe())

    def _read(self, store: Store) -> None:
        """Read the reports of ranks that have ended since the last call."""
        with self._reading_lock:
            num_ended = store.add(NUM_ENDED, 0)
            while len(self._ended) < num_ended:
                key = END_REPORT.format(len(self._ended) + 1)
                if not store.check([key]):  # the rank has taken its number, but not yet written its report
                    return
                self._ended.append(_Ended(**json.loads(store.get(key))))

    def _has_missed(self, ended: _Ended, awaited: Wait, is_idle: bool) -> bool:
        """True if the rank has ended without making the call that ``awaited`` describes."""
        begun = self._model.transport.calls_begun()
        if not awaited.is_known:
            # In one of the groups, this rank must have begun more calls than the ended rank.
            numbers = [(number, ended.calls.get(name)) for name, number in begun.items()]
            return is_idle and any(num_own and num is not None and num_own > num for num_own, num in numbers)
        if awaited.name not in begun:  # a new group, a message, or gradients of Horovod
            return awaited.name not in ended.calls
        num_own, num = begun[awaited.name], ended.calls.get(awaited.name)
        return num_own is None or num is None or num_own > num  # None: no count, or a destroyed group

    def _is_idle(self, thread: int) -> bool:
        """True if the thread has used no CPU time since the last check, or if this time is unknown."""
        native_ids = [running.native_id for running in threading.enumerate() if running.ident == thread]
        try:
            with open(f"/proc/self/task/{native_ids[0]}/stat", encoding="utf-8") as file:
                used = " ".join(file.read().rpartition(")")[2].split()[11:13])
        except (OSError, IndexError):
            return True
        before, self._cpu_times[thread] = self._cpu_times.get(thread), used
        return before == used

    def _fail_waits(self, store: Store, rank: int, missing: list[_Ended], waiting: str) -> None:
        """Report to the ended ranks, and fail the collectives in which this process waits."""
        where = {report.rank: report.where for report in missing}
        self._explanation = explanation = report_wait(store, where, waiting, rank)
        _logger.error("%s", explanation["text"])
        self._model.transport.end_waits()

    # --- in a rank whose collective has failed -----------------------------------------------------------

    def find_cause(self, error: RuntimeError) -> BaseException | None:
        """An error that names the ended ranks or the rank that failed first; None if none is known."""
        from ignite_dist.workers.failures import is_consequence

        if not is_consequence(error):
            return None
        reports = self._reports_about(error)
        if reports is None:
            return None
        if reports.explanation is not None:
            ranks, where = reports.explanation["ranks"], reports.explanation["where"]
            where = {int(rank): how for rank, how in where.items()}
            # After an early finalize(), this error is the root cause. With a connection error as __cause__,
            # is_consequence() would be True.
            return MissingRanksError(reports.explanation["text"], ranks, where)
        cause: DistributedError | None = None
        if reports.failure is not None:
            cause = RankFailedError(**reports.failure)
        elif reports.left:
            ranks, where = sorted(reports.left), reports.left
            text = f"{describe_ranks(ranks).capitalize()} did not come: {'; '.join(where.values())}."
            cause = MissingRanksError(text, ranks, where)
        if cause is not None:
            cause.__cause__ = error  # another rank may have been lost since
        return cause

    def _reports_about(self, error: RuntimeError) -> _Reports | None:
        """The reports that may say why a collective has failed with ``error``; None if the store is lost."""
        if self._explanation is not None:
            return _Reports(self._explanation, None, {})
        if type(error).__name__ != "HorovodInternalError":
            return self._in_time(self._wait_for_reports) or self._report_of_lost_store()
        reports = self._in_time(self._read_reports)
        return reports and reports._replace(failure=None)  # elastic scripts catch Horovod's error

    def _wait_for_reports(self, store: Store) -> _Reports:
        """The reports as soon as there is one, also about a process that has ended without one."""
        for rank in self._recorder.logs:
            mark_consequence(store, rank)  # the end of this process is none of the causes
        # The launcher of idist.spawn has all reports, and waits for this one.
        deadline = time.monotonic() + (0.0 if spawned.detect(os.environ) else _REPORT_SECONDS)
        period = max(_FIRST_REPORT_POLL_SECONDS, _REQUESTS_PER_LOOK * self._world_size / _POLLS_PER_SECOND)
        while True:
            ended = find_ended(store)
            reports = self._read_reports(store)  # after the look: a rank reports before its process ends
            killed = [peer for peer in ended if peer.rank not in reports.left]
            if killed and not reports.failure:
                failure = json.dumps(failure_of(killed, WITHOUT_REPORT))
                store.compare_set(FIRST_FAILURE, "", failure)  # also for other machines
                reports = self._read_reports(store)
            if any(reports) or killed or time.monotonic() >= deadline:
                return reports
            time.sleep(period)
            period = max(period, min(2 * period, _POLL_SECONDS))

    def _report_of_lost_store(self) -> _Reports | None:
        """The report about rank 0 if its process has ended, and the store with it."""
        first = self._first_rank
        if first is None or not first.has_ended():
            return None
        return _Reports(None, failure_of([first], WITH_STORE), {})

    def _read_reports(self, store: Store) -> _Reports:
        outcome = store.get(END_OUTCOME) if store.check([END_OUTCOME]) else b"all"
        failure = json.loads(store.get(FIRST_FAILURE)) if store.check([FIRST_FAILURE]) else None
        self._read(store)
        return _Reports(
            None if outcome == b"all" else json.loads(outcome),
            None if failure is None or failure["rank"] in self._recorder.logs else failure,
            {report.rank: report.where for report in self._ended if report.has_left},
        )

    def _in_time(self, request: Callable[[Store], _Answer]) -> _Answer | None:
        """The answer to ``request``. None if the store does not answer: its host may be lost."""
        answers: list[_Answer] = []
        if self._is_store_lost:
            return None

        def ask() -> None:
            with suppress(DistError):
                answers.append(request(self._oob_store.connection()))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        self._is_store_lost = not answers
        return answers[0] if answers else None
