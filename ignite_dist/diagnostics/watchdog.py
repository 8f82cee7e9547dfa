"""The watchdog: a thread of each process that finds hangs.

The thread measures how long the ranks of its process wait in one collective. After the threshold, the
thread asks the watchdogs of all other processes where their ranks are, and logs the answers once.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch.distributed import DistError, Store

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.transport import WaitedFor
from ignite_dist.context.live import abort, begun, current_model, ended, ending
from ignite_dist.diagnostics import flight_recorder
from ignite_dist.diagnostics.announcing import announce, recorder_of, watch_with_recorder
from ignite_dist.diagnostics.context_end import Endings
from ignite_dist.diagnostics.flight_recorder import END_OF_CONTEXT, Call, Recorder
from ignite_dist.diagnostics.out_of_band import (
    Side,
    ask,
    missing_ranks,
    side_of,
    sides_lock,
)
from ignite_dist.diagnostics.reports import explanation, innermost_frames, place_of, report_of, waiting_frames
from ignite_dist.errors import DistributedError, RankFailedError
from ignite_dist.rendezvous import connections

__all__ = ["DEFAULT_THRESHOLD", "start", "start_here"]

_logger = logging.getLogger(__name__)

DEFAULT_THRESHOLD = timedelta(seconds=60)
"""How long a collective may wait before the watchdog logs a warning."""
_WHILE_COMPARING = timedelta(seconds=30)

# The polling interval grows with the number of ranks, because all ranks share one store.
_LOOK_SECONDS = 1.0
_RANKS_PER_SECOND = 1000
# How long the end of a context waits for the watchdog's thread, which may be answering another rank.
_STOP_SECONDS = 6.0


# --- the thread ----------------------------------------------------------------------------------------


@dataclass
class _Wait:
    """A wait of a thread in one call. A different ``progress`` means a new wait."""

    progress: tuple[Any, ...]
    since: float
    is_told: bool = False


class Watchdog:
    """The watchdog of the ranks of this process in one context."""

    def __init__(self, model: ComputationModel, record: Recorder, side: Side, threshold: timedelta) -> None:
        self.threshold = threshold
        self._model = model
        self._recorder = record
        self._side = side
        self._world_size = model.get_world_size()
        self._endings = Endings(model, record, side)
        self._num_answered = side.connection().add("asked", 0)
        self._waits: dict[tuple[int, int], _Wait] = {}  # by rank and thread
        self._has_failed = False
        self._stopped = threading.Event()
        self._leaves = False
        self._thread = threading.Thread(target=self._run, name="ignite_dist's watchdog", daemon=True)
        self._thread.start()
        for other in [one for one in _running if one._stopped.is_set()]:
            _running.discard(other)
        _running.add(self)

    def meet_at_end(self, rank: int) -> None:
        """Report the end of ``rank``. Return when all ranks have ended their contexts, or one rank is lost.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not called.
        """
        self._endings.meet(rank)

    def explained(self, error: RuntimeError) -> BaseException | None:
        """The error that names the ended rank that caused ``error``; None if no rank has ended."""
        return self._endings.explained(error)

    def leave(self) -> None:
        """Stop the thread because the process exits, and report this to the other ranks."""
        self._leaves = True
        self.stop()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def explain(self, error: RuntimeError, call: Call, ranks: Sequence[int]) -> None:
        """Raise if ``error`` of ``call`` is a timeout and some of ``ranks`` have not made the call.

        Raises:
            MissingRanksError: names the ranks that have not made the call.
        """
        # The backends have no exception class for a timeout.
        if not any(words in str(error).lower() for words in ("timeout", "timed out")):
            return
        others = [rank for rank in ranks if rank not in self._recorder.logs]
        reports = ask(self._side.connection(), others)
        made = {rank: report["numbers"].get(call.key, 0) for rank, report in reports.items()}
        behind = [rank for rank in others if made.get(rank, 0) < call.number]
        if behind:
            raise missing_ranks(behind, f"did not come to {call}", reports) from error

    def _run(self) -> None:
        period = max(_LOOK_SECONDS, self._world_size / _RANKS_PER_SECOND)
        try:
            store = self._side.connection()
            while not self._stopped.wait(min(period, self.threshold.total_seconds() / 4)):
                self._attend(store)
            for rank in self._recorder.logs if self._leaves else ():
                self._endings.leave(rank)
        except DistError:  # the rank that serves the store is lost
            return

    def _attend(self, store: Store) -> None:
        """Answer requests and check the waits, once. Logs a failure and continues.

        Raises:
            DistError: the store is lost.
        """
        try:
            self._answer(store)
            self._look(store)
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
            if store.check([f"told/{self._num_answered}"]):  # the report will include our waits
                self._waits_are_told()
            self._num_answered += 1
            for rank, report in self._reports().items():
                store.set(f"report/{self._num_answered}/{rank}", json.dumps(report))

    def _look(self, store: Store) -> None:
        """Check how long the ranks of this process have waited."""
        now = time.monotonic()
        before, self._waits = self._waits, {}
        stays = []
        for rank, log in list(self._recorder.logs.items()):
            for thread, (frame, waits_in) in waiting_frames(log, self._is_alone()).items():
                wanted = self._model.transport.waited_for(waits_in)
                progress = self._progress(log, waits_in, wanted)
                wait = before.get((rank, thread))
                if wait is None or wait.progress != progress:
                    self._waits[rank, thread] = _Wait(progress, now)
                else:
                    self._waits[rank, thread] = wait
                    stays.append((rank, log, thread, frame, wanted, wait))
        # After all waits are known, because one report covers all of them.
        for rank, log, thread, frame, wanted, wait in stays:
            # Other threads may wait for messages that need not come, for example for commands.
            if not wanted.is_message or thread in (log.thread, log.home):
                self._endings.look(store, rank, thread, wait.since, wanted, partial(place_of, frame))
            if not wait.is_told and now - wait.since > self._patience(log):
                self._tell(store, rank)

    def _progress(self, log: flight_recorder.Log, waits_in: FrameType, wanted: WaitedFor) -> tuple[Any, ...]:
        """A value that changes when the thread waits in another call, but not with other threads' calls."""
        # A new frame may have the address of an old one. Horovod's frames contain a handle, unique to a call.
        handle = waits_in.f_locals.get("handle")
        call = handle if isinstance(handle, int) else id(waits_in)
        begun = self._model.transport.calls_begun() if wanted.is_known else {}
        if wanted.name in begun:
            return begun[wanted.name], call, waits_in.f_lasti
        return log.num_calls, self._model.transport.num_collectives(), call, waits_in.f_lasti

    def _is_alone(self) -> bool:
        """True if all threads of this process belong to one rank."""
        return self._model.ranks_in_process() == 1

    def _patience(self, log: flight_recorder.Log) -> float:
        """Seconds until the warning. Shorter while ``debug()`` is on, because the user looks for an error."""
        threshold = self.threshold if log.comparison is None else min(self.threshold, _WHILE_COMPARING)
        return threshold.total_seconds()

    def _tell(self, store: Store, rank: int) -> None:
        """Ask all ranks where they are and log the answers, unless another rank does this already."""
        number = self._num_answered
        if store.add("asked", 0) != number:  # first answer this request, which may report this wait
            return
        self._waits_are_told()
        if store.compare_set(f"told/{number}", "", str(rank)) != str(rank).encode():
            return
        own = self._reports()
        reports = ask(store, range(self._world_size), own)
        self._num_answered = max(self._num_answered, number + 1)
        _logger.warning("%s", explanation(reports, self._world_size))

    def _waits_are_told(self) -> None:
        for wait in self._waits.values():
            wait.is_told = True

    def _reports(self) -> dict[int, dict[str, Any]]:
        keeps = self._recorder.keeps_calls
        return {
            rank: {**self._report(rank, log), "keeps": keeps}
            for rank, log in list(self._recorder.logs.items())
        }

    def _report(self, rank: int, log: flight_recorder.Log) -> dict[str, Any]:
        """Report of where a rank is. Shows the thread that waits longest, if a thread waits."""
        waiting = waiting_frames(log, self._is_alone())
        waits = {thread: wait.since for (one, thread), wait in self._waits.items() if one == rank}
        now = time.monotonic()
        if waiting:
            thread = min(waiting, key=lambda one: waits.get(one, now))
            frame, _ = waiting[thread]
            return report_of(log, frame, True, now - waits.get(thread, now))
        frames = innermost_frames(log, self._is_alone())
        return report_of(log, next(iter(frames.values()), None), False, 0.0)


# --- starting and ending -----------------------------------------------------------------------------------

_running: WeakSet[Watchdog] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all watchdogs: a thread that uses a store while Python exits may abort the process."""
    for one in list(_running):
        one.leave()


def _explained(error: RuntimeError) -> BaseException | None:
    """See ``connections.explainers``."""
    return next(filter(None, (one.explained(error) for one in list(_running))), None)


connections.explainers.append(_explained)


if hasattr(os, "register_at_fork"):  # a forked child has no watchdog threads
    os.register_at_fork(after_in_child=_running.clear)


def start_here() -> None:
    """Watch this rank with the default threshold, if the context has a store. Never communicates."""
    model = current_model()
    side = side_of(model)
    if side is not None:
        start(model, DEFAULT_THRESHOLD, side)


def _watch_ends(model: ComputationModel) -> None:
    """Watch this rank of a new context, if a process serves the store. Keeps no calls."""
    side = side_of(model) if model.get_world_size() > 1 else None
    if side is not None and side.is_served:
        start(model, DEFAULT_THRESHOLD, side, keep_calls=False)


begun.append(_watch_ends)


def start(model: ComputationModel, threshold: timedelta, side: Side | None, keep_calls: bool = True) -> None:
    """Watch the caller's rank. Without ``side`` (world_size 1), only keep its calls."""
    with sides_lock:
        found = watch_with_recorder(model, keep_calls)
        found.log_of(model.get_rank()).thread = threading.get_ident()
        if isinstance(found.watchdog, Watchdog):
            found.watchdog.threshold = threshold
        elif side is not None:
            found.watchdog = Watchdog(model, found, side, threshold)


def _meet_at_end(model: ComputationModel) -> None:
    """Wait for the other ranks before the context of the caller's rank ends after success.

    Raises:
        CollectiveMismatchError: another rank calls a different collective; the context stays live.
        RankFailedError: a rank waits in a collective that this rank has not called; the context has ended.
    """
    try:
        announce(model, END_OF_CONTEXT, model.groups.world)
    except DistributedError:
        raise
    except RuntimeError:
        pass  # a rank is lost: model.meet_at_end() reports this
    found = recorder_of(model)
    if found is None or found.watchdog is None or model.finds_early_ends or model.get_world_size() == 1:
        return
    try:
        found.watchdog.meet_at_end(model.get_rank())
    except RankFailedError:
        abort()
        raise


def _stop(model: ComputationModel) -> None:
    """Note the end of the caller's context. The last rank of this process stops the watchdog."""
    found = recorder_of(model)
    if found is not None:
        found.leave(model.get_rank(), model.ranks_in_process())


ending.append(_meet_at_end)
ended.append(_stop)
