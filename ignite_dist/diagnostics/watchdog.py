"""The watchdog: a thread of each process that finds hangs.

The thread measures how long the ranks of its process wait in one collective. After the threshold, the
thread asks the watchdogs of all other processes where their ranks are, and logs the answers once.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.distributed import DistError, Store

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.transport import Wait
from ignite_dist.comp_models.work import Completed, place_of
from ignite_dist.context.live import (
    abort,
    before_end_hooks,
    begin_hooks,
    current_model,
    end_hooks,
    failure_hooks,
)
from ignite_dist.diagnostics import flight_recorder
from ignite_dist.diagnostics.announcing import (
    announce,
    finish_timeline,
    get_or_create_recorder,
    recorder_of,
)
from ignite_dist.diagnostics.context_end import Endings
from ignite_dist.diagnostics.ended_processes import add_process
from ignite_dist.diagnostics.flight_recorder import END_OF_CONTEXT, Recorder
from ignite_dist.diagnostics.hang_reports import (
    explanation,
    innermost_frames,
    report_of,
    threads_of,
    waiting_frame,
    waiting_frames,
    waiting_parts,
)
from ignite_dist.diagnostics.out_of_band import (
    OutOfBandStore,
    collect_reports,
    missing_ranks_error,
    oob_store_of,
    oob_stores_lock,
)
from ignite_dist.diagnostics.thread_stacks import Line, stacks_of_threads
from ignite_dist.environments.rendezvous import connections
from ignite_dist.errors import DistributedError, RankFailedError
from ignite_dist.internals.call_sites import site_of, users_frame
from ignite_dist.internals.ranks import describe_ranks

_logger = logging.getLogger(__name__)

DEFAULT_THRESHOLD = timedelta(seconds=60)
"""How long a collective may wait before the watchdog logs a warning."""
_DEBUG_THRESHOLD = timedelta(seconds=30)  # while compare_calls() is on

# The polling interval grows with the number of ranks, because all ranks share one store.
_POLL_SECONDS = 1.0
_RANKS_PER_SECOND = 1000
# The backends have no exception class for a timeout: "Timed out waiting 5000ms", "Timeout(ms)=5000".
_TIMEOUT = re.compile(r"(?:timed out waiting (?=\d+ms)|timeout\(ms\)=)(\d+)", re.IGNORECASE)
# How long the end of a context waits for the watchdog's thread, which may be answering another rank.
_STOP_SECONDS = 6.0


# --- the thread ----------------------------------------------------------------------------------------


@dataclass
class _ObservedWait:
    """A wait of a thread in one call. A different ``progress`` means a new wait."""

    progress: tuple[Any, ...]
    since: float
    is_reported: bool = False


class _Place(NamedTuple):
    """Where a thread waits: its stack from the waiting function outwards, and the numbers of calls so far."""

    part: tuple[Line, ...]
    num_calls: int
    num_begun: tuple[int, dict[str, int | None]]


class Watchdog:
    """The watchdog of the ranks of this process in one context."""

    def __init__(
        self, model: ComputationModel, recorder: Recorder, oob_store: OutOfBandStore, threshold: timedelta
    ) -> None:
        self.threshold = threshold
        self._model = model
        self._recorder = recorder
        self._oob_store = oob_store
        self._world_size = model.get_world_size()
        self._endings = Endings(model, recorder, oob_store)
        store = oob_store.connection()
        self._num_answered = store.add("asked", 0)
        add_process(store, model.get_rank())  # before the process can end
        self._waits: dict[tuple[int, int], _ObservedWait] = {}  # by rank and thread
        # Where each thread waited at the last look, and since which look; by rank and thread.
        self._seen: dict[tuple[int, int], tuple[_Place, float]] = {}
        self._last_look = -math.inf
        self._has_failed = False
        self._stopped = threading.Event()
        self._is_exiting = False
        self._thread = threading.Thread(target=self._run, name="ignite_dist's watchdog", daemon=True)
        self._thread.start()
        for stopped in [watchdog for watchdog in _running if watchdog._stopped.is_set()]:
            _running.discard(stopped)
        _running.add(self)

    def meet_at_end(self, rank: int) -> None:
        """Report the end of ``rank``. Return when all ranks have ended their contexts, or one rank is lost.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not called.
        """
        self._endings.meet(rank)

    def report_failure(self, rank: int, error: BaseException | None) -> None:
        """Tell the other ranks that ``rank`` ends its context, and ``error`` if it is the rank's own."""
        self._endings.report_failure(rank, error)

    def find_cause(self, error: RuntimeError) -> BaseException | None:
        """An error that names the ranks that have failed, ended or are late; None if none is known."""
        waited = _TIMEOUT.search(str(error))
        return (
            self._endings.find_cause(error) if waited is None else self._timeout_error(error, int(waited[1]))
        )

    def _timeout_error(self, error: RuntimeError, milliseconds: int) -> BaseException | None:
        """The error that says where the late ranks are; None if the store is lost."""
        assert error.__traceback__ is not None
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        own = self._recorder.logs
        if users_frame(frame) is None:  # this package's thread; the user's thread waits for it
            waiting = (waiting_frames(self._threads_of(log)) for log in own.values())
            frame = next((inner for frames in waiting for inner, _ in frames.values()), frame)
        waits_in = waiting_frame(frame)
        members = () if waits_in is None else self._model.transport.find_wait(waits_in).ranks
        others = [rank for rank in members or range(self._world_size) if rank not in own]
        try:
            reports = collect_reports(self._oob_store.connection(), others)
        except DistError:
            return None
        late = [rank for rank in others if rank not in reports or not reports[rank]["waits_in"]]
        waited = f"{describe_ranks(sorted(own))} has waited for {milliseconds / 1000:g} s, its timeout"
        blocks = [report["block"] for rank in late if (report := reports.get(rank)) and report["block"]]
        what = (
            f"is still in {blocks[0]}, for which {waited}, at {place_of(frame)}"
            if blocks
            else f"did not come to {place_of(frame)}, where {waited}"
        )
        what += ". If this may take longer, pass timeout= to initialize, spawn or Parallel"
        missing = _named_ranks(error) or late or _ranks_elsewhere(frame, reports) or others
        late_error = missing_ranks_error(missing, what, reports)
        late_error.__cause__ = error
        return late_error

    def stop_at_exit(self) -> None:
        """Stop the thread because the process exits. The thread first reports the exit to the other ranks."""
        self._is_exiting = True
        self.stop()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        period = max(_POLL_SECONDS, self._world_size / _RANKS_PER_SECOND)
        try:
            store = self._oob_store.connection()
            while not self._stopped.wait(min(period, self.threshold.total_seconds() / 4)):
                self._run_once(store)
            for rank in self._recorder.logs if self._is_exiting else ():
                self._endings.leave(rank)
        except DistError:  # the rank that serves the store is lost
            return

    def _run_once(self, store: Store) -> None:
        """Answer requests and check the waits, once. Logs a failure and continues.

        Raises:
            DistError: the store is lost.
        """
        try:
            self._endings.find_first_rank(store)
            self._answer(store)
            self._check_waits(store)
        except DistError:
            raise
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                _logger.exception(
                    "The watchdog of the ranks %s raised an error. It runs on, and logs no further errors.",
                    sorted(self._recorder.logs),
                )

    def _answer(self, store: Store) -> None:
        """Report where the ranks of this process are, if another rank has asked."""
        num_asked = store.add("asked", 0)
        while self._num_answered < num_asked:
            if store.check([f"reporter/{self._num_answered}"]):
                self._mark_waits_reported()  # the asking rank will log this report's waits
            self._num_answered += 1
            for rank, report in self._reports().items():
                store.set(f"report/{self._num_answered}/{rank}", json.dumps(report))

    def _check_waits(self, store: Store) -> None:
        """Check how long the ranks of this process have waited."""
        now = time.monotonic()
        blocked = self._blocked_threads(now)
        still_there = {(rank, thread) for rank, _, since in blocked for thread in since}
        self._waits = {key: wait for key, wait in self._waits.items() if key in still_there}
        unchanged = []
        for rank, log, since in blocked:
            for thread, (frame, waits_in) in waiting_frames(since).items():
                awaited = self._model.transport.find_wait(waits_in)
                progress = self._progress(log, waits_in, awaited)
                wait = self._waits.get((rank, thread))
                if wait is None or wait.progress != progress:
                    # The thread was at the same place at the look before, perhaps in an earlier call.
                    start = max(since[thread], self._last_look)
                    wait = self._waits[rank, thread] = _ObservedWait(progress, start)
                unchanged.append((rank, log, thread, frame, awaited, wait))
        self._last_look = now
        # This loop runs after all waits are known, because one report covers all waits.
        for rank, log, thread, frame, awaited, wait in unchanged:
            # Other threads may wait for messages that may never arrive, for example for commands.
            if not awaited.is_message or thread in (log.last_thread, log.first_thread):
                self._endings.check_wait(store, rank, thread, wait.since, awaited, partial(place_of, frame))
            if not wait.is_reported and now - wait.since > self._warning_seconds(log):
                self._log_all_ranks(store, rank)

    def _blocked_threads(self, now: float) -> list[tuple[int, flight_recorder.Log, dict[int, float]]]:
        """The ranks with threads that have waited in one place since an earlier look, and since when.

        Reads text, not frames: a thread in a training loop is often on the same line in two looks, and runs.
        """
        stacks, transport = stacks_of_threads(), self._model.transport
        num_begun = transport.num_collectives(), transport.calls_begun()
        before, self._seen = self._seen, {}
        blocked = []
        for rank, log in list(self._recorder.logs.items()):
            waiting = waiting_parts(stacks, threads_of(log, stacks, self._has_one_rank()))
            unmoved = {}
            for thread, part in waiting.items():
                place = _Place(part, log.num_calls, num_begun)
                earlier, since = before.get((rank, thread), (None, now))
                # Where another thread waits too or has made the last call, calls may be that thread's.
                if len(waiting) == 1 and thread == log.last_thread:
                    is_there = earlier == place
                else:
                    is_there = earlier is not None and earlier.part == part
                if is_there:
                    unmoved[thread] = since
                self._seen[rank, thread] = place, unmoved.get(thread, now)
            if unmoved:
                blocked.append((rank, log, unmoved))
        return blocked

    def _progress(self, log: flight_recorder.Log, waits_in: FrameType, awaited: Wait) -> tuple[Any, ...]:
        """A value that changes if the thread waits in another call, but not with other threads' calls."""
        # A new frame may have the address of an old one. Horovod's frames contain a handle, unique to a call.
        handle = waits_in.f_locals.get("handle")
        call = handle if isinstance(handle, int) else id(waits_in)
        begun = self._model.transport.calls_begun() if awaited.is_known else {}
        if awaited.name in begun:
            return begun[awaited.name], call, waits_in.f_lasti
        return log.num_calls, self._model.transport.num_collectives(), call, waits_in.f_lasti

    def _threads_of(self, log: flight_recorder.Log) -> list[int]:
        return threads_of(log, list(sys._current_frames()), self._has_one_rank())

    def _has_one_rank(self) -> bool:
        """True if all threads of this process belong to one rank."""
        return self._model.ranks_in_process() == 1

    def _warning_seconds(self, log: flight_recorder.Log) -> float:
        """Seconds until the warning. Fewer while ``compare_calls()`` is on: the user looks for an error."""
        threshold = self.threshold if log.comparison is None else min(self.threshold, _DEBUG_THRESHOLD)
        return threshold.total_seconds()

    def _log_all_ranks(self, store: Store, rank: int) -> None:
        """Collect the reports of all ranks and log them, unless another rank has begun to do so."""
        number = self._num_answered
        if store.add("asked", 0) != number:  # first answer this request, whose report may contain this wait
            return
        self._mark_waits_reported()
        if store.compare_set(f"reporter/{number}", "", str(rank)) != str(rank).encode():
            return
        reports = collect_reports(store, range(self._world_size), self._reports())
        self._num_answered = max(self._num_answered, number + 1)
        _logger.warning("%s", explanation(reports, self._world_size))

    def _mark_waits_reported(self) -> None:
        for wait in self._waits.values():
            wait.is_reported = True

    def _reports(self) -> dict[int, dict[str, Any]]:
        keeps_calls = self._recorder.keeps_calls
        return {
            rank: {**self._report(rank, log), "keeps": keeps_calls}
            for rank, log in list(self._recorder.logs.items())
        }

    def _report(self, rank: int, log: flight_recorder.Log) -> dict[str, Any]:
        """Report of where a rank is. Shows the thread that waits longest, if a thread waits."""
        waiting = waiting_frames(self._threads_of(log))
        starts = {thread: wait.since for (owner, thread), wait in self._waits.items() if owner == rank}
        now = time.monotonic()
        if waiting:
            thread = min(waiting, key=lambda ident: starts.get(ident, now))
            frame, _ = waiting[thread]
            return report_of(log, frame, is_waiting=True, seconds=now - starts.get(thread, now))
        frames = innermost_frames(self._threads_of(log))
        return report_of(log, next(iter(frames.values()), None), is_waiting=False, seconds=0.0)


def _named_ranks(error: RuntimeError) -> list[int]:
    """The ranks that an error of shared memory names: it knows who has not come. Empty for other errors."""
    return [int(number) for number in re.findall(r"rank (\d+) \(pid ", str(error))]


def _ranks_elsewhere(frame: FrameType, reports: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The ranks that wait in another line than ``frame``'s, so in another call."""
    own_site = site_of(users_frame(frame))
    return [rank for rank, report in reports.items() if report["site"] != own_site]


# --- starting and ending -----------------------------------------------------------------------------------

_running: WeakSet[Watchdog] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all watchdogs: a thread that uses a store while Python exits may abort the process."""
    for watchdog in list(_running):
        watchdog.stop_at_exit()


def _find_cause(error: RuntimeError) -> BaseException | None:
    """See ``connections.cause_finders``."""
    return next(filter(None, (watchdog.find_cause(error) for watchdog in list(_running))), None)


connections.cause_finders.append(_find_cause)


if hasattr(os, "register_at_fork"):  # a forked child has no watchdog threads
    os.register_at_fork(after_in_child=_running.clear)


def watch_this_rank() -> None:
    """Watch this rank with the default threshold, if the context has a store. Never communicates."""
    model = current_model()
    oob_store = oob_store_of(model)
    if oob_store is not None:
        start(model, DEFAULT_THRESHOLD, oob_store)


def _watch_new_context(model: ComputationModel) -> None:
    """Start the watchdog for this rank of a new context if a process serves the store. Record no calls."""
    oob_store = oob_store_of(model) if model.get_world_size() > 1 else None
    if oob_store is not None and oob_store.is_served:
        start(model, DEFAULT_THRESHOLD, oob_store, keep_calls=False)


begin_hooks.append(_watch_new_context)


def start(
    model: ComputationModel, threshold: timedelta, oob_store: OutOfBandStore | None, keep_calls: bool = True
) -> None:
    """Watch the caller's rank. If ``oob_store`` is None (world_size 1), only keep the rank's calls."""
    with oob_stores_lock:
        recorder = get_or_create_recorder(model, keep_calls)
        recorder.log_of(model.get_rank()).last_thread = threading.get_ident()
        if isinstance(recorder.watchdog, Watchdog):
            recorder.watchdog.threshold = threshold
        elif oob_store is not None:
            recorder.watchdog = Watchdog(model, recorder, oob_store, threshold)


def _meet_at_end(model: ComputationModel) -> None:
    """Wait for the other ranks before the context of the caller's rank ends after success.

    Raises:
        CollectiveMismatchError: another rank calls a different collective; the context unchanged live.
        RankFailedError: a rank waits in a collective that this rank has not called; the context has ended.
    """
    finish_timeline(model, has_failed=False)
    try:
        announce(model, END_OF_CONTEXT, model.groups.world, Completed)
    except RuntimeError as error:
        is_killed = isinstance(error, RankFailedError) and not error.error_type
        if isinstance(error, DistributedError) and not is_killed:
            raise
        # A rank is lost: model.meet_at_end() reports this.
    recorder = recorder_of(model)
    if recorder is None or recorder.watchdog is None or model.finds_early_ends or model.get_world_size() == 1:
        return
    try:
        recorder.watchdog.meet_at_end(model.get_rank())
    except RankFailedError:
        abort()
        raise


def _report_failure(model: ComputationModel) -> None:
    """Tell the other ranks why the context of this rank ends, unless ranks share the process."""
    recorder = recorder_of(model)
    if recorder is not None and recorder.watchdog is not None and model.ranks_in_process() == 1:
        recorder.watchdog.report_failure(model.get_rank(), sys.exc_info()[1])


def _stop(model: ComputationModel) -> None:
    """Record the end of the caller's context. The last rank of this process stops the watchdog."""
    finish_timeline(model, has_failed=True)
    recorder = recorder_of(model)
    if recorder is not None:
        recorder.record_end(model.get_rank(), model.ranks_in_process())


before_end_hooks.append(_meet_at_end)
failure_hooks.append(_report_failure)
end_hooks.append(_stop)
