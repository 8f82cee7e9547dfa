"""Why nothing goes on: who waits for whom.

A thread of each process looks how long its ranks have been in one collective. When that is too long it asks
the threads of all other processes where theirs are, and says it once.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakSet

from torch.distributed import DistError, Store

from ignite_dist import _torch
from ignite_dist.arguments import check_timeout
from ignite_dist.call_sites import is_library, site_of, users_frame
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.transport import WaitedFor
from ignite_dist.comp_models.work import is_marked_as_waiting
from ignite_dist.context.live import abort, begun, current_model, ended, ending
from ignite_dist.diagnostics import flight_recorder
from ignite_dist.diagnostics.context_end import Endings
from ignite_dist.diagnostics.flight_recorder import (
    END_OF_CONTEXT,
    Call,
    Comparison,
    Recorder,
    announce,
    recorder_of,
    table,
    watch_with_recorder,
)
from ignite_dist.diagnostics.out_of_band import (
    SILENT,
    Side,
    ask,
    exchanged_side,
    missing_ranks,
    side_of,
    sides_lock,
)
from ignite_dist.errors import DistributedError, RankFailedError
from ignite_dist.rendezvous import connections
from ignite_dist.values.ranks import describe_ranks

__all__ = ["debug", "start_here", "watch"]

_logger = logging.getLogger(__name__)

DEFAULT_THRESHOLD = timedelta(seconds=60)
"""How long a collective may wait without a word."""
_WHILE_COMPARING = timedelta(seconds=30)

# How often a rank looks at itself, and whether somebody asks for it. More ranks share one store.
_LOOK_SECONDS = 1.0
_RANKS_PER_SECOND = 1000
# How long the end of a context waits for the thread, which may be in the middle of an answer.
_STOP_SECONDS = 6.0


# --- what users call -----------------------------------------------------------------------------------


def watch(threshold: timedelta = DEFAULT_THRESHOLD) -> None:
    """Say on the standard error, once, where every rank is when a collective has waited for ``threshold``.

    What is printed: the stack that most ranks share, the stacks of the others, and the last 20 collectives of
    each rank. It covers what other libraries call (a ``DistributedDataParallel``, ``torch.distributed``
    itself) as well. Workers of :func:`spawn` are watched from their start, with 60 seconds; call it there to
    change that. So are ranks of gloo and NCCL after :func:`initialize` or in :class:`Parallel` (without a
    ``file://``), but their last collectives are kept only from this call on. Every rank of the world calls
    it. It goes through a store, never through the backend: the one that the context was made with, else one
    that rank 0 serves from this call on.

    A rank whose call needs another which has come to the end of its context, or whose process has ended, gets
    a ``MissingRanksError`` within 10 seconds, whatever the threshold. Where it cannot be told whether that
    one is needed (a gather in which others still take part, the ``wait()`` of an asynchronous call, a
    backward pass on a GPU), what is printed has to do.

    Args:
        threshold: a ``datetime.timedelta``.

    Raises:
        TypeError, ValueError: not a timedelta, or not a positive one. Nothing was sent.
    """
    check_timeout("threshold", threshold)
    model = current_model()
    model.groups.check_not_joining()
    start(model, threshold, side_of(model) or exchanged_side(model))


class debug:  # used as a function, and in a with statement
    """Compare the ranks' calls before each collective: what does not go together is an error with a table.

    Sequence number, operation, op, dtype, shape, group and the caller's line. Where they differ every rank
    raises ``CollectiveMismatchError``, instead of waiting, or of adding up what does not belong together. A
    rank that has skipped a call is named when it makes its next one (the end of the context is one), and if
    it makes none, after 30 seconds: see :func:`watch`, which this turns on as well.

    Every rank of the world calls it; before a context is made it holds for those to come, in workers of
    :func:`spawn` too, and so does ``IGNITE_DIST_DEBUG=1`` in the environment. It costs another small
    collective for each; where nothing is watched, about 0.1 us. As a context manager it is off again
    after the block. Collectives of other libraries (DDP's) are not compared.

    Args:
        verify: whether calls are compared.
        call_sites: whether the lines that they come from count. They alone tell apart calls that look alike.
            A script that makes one collective from two lines (``if rank == 0: ... else: ...``) needs False.

    Example::

        with idist.debug():
            train_one_epoch(model, loader)
    """

    def __init__(self, verify: bool = True, *, call_sites: bool = True) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"debug(verify=...) is True or False, got {verify!r}; it is no decorator.")
        comparison = Comparison(call_sites) if verify else None
        model = current_model()
        model.groups.check_not_joining()
        found = recorder_of(model)
        if found is None or not found.keeps_calls or found.watchdog is None:
            start(model, DEFAULT_THRESHOLD, side_of(model) or exchanged_side(model))
            found = recorder_of(model)
        assert found is not None
        self._log = found.log_of(model.get_rank())
        self._before, self._log.comparison = self._log.comparison, comparison
        self._log.by_group.clear()  # the ranks count from here: before, one may have been refused a call
        self._holds_later = model.backend() is None  # without a context it is for those to come
        if self._holds_later:
            flight_recorder.compare_in_new_contexts(comparison)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.comparison = self._before
        if self._holds_later:
            flight_recorder.compare_in_new_contexts(self._before)
            model = current_model()  # one that was made in the block
            found = recorder_of(model)
            if found is not None:
                found.log_of(model.get_rank()).comparison = self._before


# --- the thread ----------------------------------------------------------------------------------------


@dataclass
class _Wait:
    """A rank's stay in one place: ``progress`` is different for another stay."""

    progress: tuple[Any, ...]
    since: float
    is_told: bool = False


class Watchdog:
    """The thread that looks after the ranks of this process in one context."""

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
        for other in [one for one in _running if one._stopped.is_set()]:  # of a context that has ended
            _running.discard(other)
        _running.add(self)

    def meet_at_end(self, rank: int) -> None:
        """Return when all ranks have come to the end of the context, or cannot; ``rank`` has.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not made.
        """
        self._endings.meet(rank)

    def explained(self, error: RuntimeError) -> BaseException | None:
        """What is behind an error of the backend, if it is that a rank has ended."""
        return self._endings.explained(error)

    def leave(self) -> None:
        """End the thread with the process, and say so to the other ranks."""
        self._leaves = True
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def explain(self, error: RuntimeError, call: Call, ranks: Sequence[int]) -> None:
        """Raise what is behind ``error`` of ``call``, if it is known that ranks have not made it.

        Raises:
            MissingRanksError: some have not.
        """
        # A backend that has lost its patience has no class of its own for that.
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
        except DistError:  # the store is gone, and the rank that serves it
            return

    def _attend(self, store: Store) -> None:
        """Answer and look, once. A failure is said, and is not the end of the watch.

        Raises:
            DistError: the store is gone.
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
                    "The watchdog of the ranks %s has failed; it goes on, and says so only once.",
                    sorted(self._recorder.logs),
                )

    def _answer(self, store: Store) -> None:
        """Say where the ranks of this process are, if somebody asks."""
        num_asked = store.add("asked", 0)
        while self._num_answered < num_asked:
            if store.check([f"told/{self._num_answered}"]):  # it will be printed, with our waits in it
                self._waits_are_told()
            self._num_answered += 1
            for rank, report in self._reports().items():
                store.set(f"report/{self._num_answered}/{rank}", json.dumps(report))

    def _look(self, store: Store) -> None:
        """See how long the ranks of this process have been where they are."""
        now = time.monotonic()
        before, self._waits = self._waits, {}
        stays = []
        for rank, log in list(self._recorder.logs.items()):
            for thread, frame in _innermost_frames(log, self._is_alone(), waits=True).items():
                waits_in = _waits_at(frame)
                assert waits_in is not None
                wanted = self._model.transport.waited_for(waits_in)
                progress = self._progress(log, waits_in, wanted)
                wait = before.get((rank, thread))
                if wait is None or wait.progress != progress:
                    self._waits[rank, thread] = _Wait(progress, now)
                else:
                    self._waits[rank, thread] = wait
                    stays.append((rank, log, thread, frame, wanted, wait))
        # After all waits are known, because one report tells of all of them.
        for rank, log, thread, frame, wanted, wait in stays:
            # A thread that waits for messages all along, for commands say, need not get any.
            if not wanted.is_message or thread in (log.thread, log.home):
                self._endings.look(store, rank, thread, wait.since, wanted, partial(_place, frame))
            if not wait.is_told and now - wait.since > self._patience(log):
                self._tell(store, rank)

    def _progress(self, log: flight_recorder.Log, waits_in: FrameType, wanted: WaitedFor) -> tuple[Any, ...]:
        """What is different when a thread waits in another call, whatever other threads do meanwhile."""
        # Frames that follow one another may have one address; Horovod's have the number of the call.
        handle = waits_in.f_locals.get("handle")
        call = handle if isinstance(handle, int) else id(waits_in)
        begun = self._model.transport.calls_begun() if wanted.is_known else {}
        if wanted.name in begun:
            return begun[wanted.name], call, waits_in.f_lasti
        return log.num_calls, self._model.transport.num_collectives(), call, waits_in.f_lasti

    def _is_alone(self) -> bool:
        """Whether all threads of this process are of one rank."""
        return self._model.ranks_in_process() == 1

    def _patience(self, log: flight_recorder.Log) -> float:
        """Who compares calls looks for what goes wrong, and does not want to wait for it."""
        threshold = self.threshold if log.comparison is None else min(self.threshold, _WHILE_COMPARING)
        return threshold.total_seconds()

    def _tell(self, store: Store, rank: int) -> None:
        """Ask all ranks where they are and print it, if no other rank does just that."""
        number = self._num_answered
        if store.add("asked", 0) != number:  # it may be about this wait: to be answered first
            return
        self._waits_are_told()
        if store.compare_set(f"told/{number}", "", str(rank)) != str(rank).encode():
            return
        own = self._reports()
        reports = ask(store, range(self._world_size), own)
        self._num_answered = max(self._num_answered, number + 1)
        _logger.warning("%s", _explanation(reports, self._world_size))

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
        """Where a rank is: in the thread that waits longest, if any does."""
        waiting = _innermost_frames(log, self._is_alone(), waits=True)
        waits = {thread: wait.since for (one, thread), wait in self._waits.items() if one == rank}
        now = time.monotonic()
        if waiting:
            thread = min(waiting, key=lambda one: waits.get(one, now))  # the first of equals
            return _report(log, waiting[thread], True, now - waits.get(thread, now))
        frames = _innermost_frames(log, self._is_alone(), waits=False)
        return _report(log, next(iter(frames.values()), None), False, 0.0)


def _report(log: flight_recorder.Log, frame: FrameType | None, waits: bool, seconds: float) -> dict[str, Any]:
    """Where a rank is: plain values, because they travel as JSON."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "waits_in": _operation(frame) if waits else "",
        "seconds": seconds,
        "site": _site(frame),
        "stack": _stack(frame) if frame is not None else "",
        "last": str(log.calls[-1]) if log.calls else "",
        "error": log.error,
        "compares": log.comparison is not None,
        "numbers": dict(log.by_group),
        "calls": [call.row() for call in list(log.calls)],
    }


def _place(frame: FrameType | None) -> str:
    """``"all_reduce at folder/file.py:12"``."""
    return f"{_operation(frame)} at {_site(frame)}"


def _site(frame: FrameType | None) -> str:
    return site_of(users_frame(frame))


def _stack(frame: FrameType) -> str:
    """The stack from the outermost frame of the user's own inwards, without what has started the process."""
    frames = [one for one, _ in traceback.walk_stack(frame)]
    while len(frames) > 1 and (is_library(frames[-1]) or _starts_a_process(frames[-1])):
        frames.pop()
    summary = traceback.StackSummary.extract((one, one.f_lineno) for one in reversed(frames))
    return "".join(summary.format())


def _starts_a_process(frame: FrameType) -> bool:
    """Whether it is the ``python -c`` in which multiprocessing runs."""
    return frame.f_code.co_filename == "<string>" and frame.f_back is None


def _operation(frame: FrameType | None) -> str:
    """The outermost library function that the user's code is in: ``"all_reduce"``."""
    name = "?"
    while frame is not None and is_library(frame):
        if frame.f_globals.get("__name__") not in (
            "torch.distributed.c10d_logger",
            "contextlib",
        ):  # around it
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


# Where a rank waits for others beside the functions that are marked: in torch's and Horovod's collectives,
# and in DDP, whose backward pass waits inside of autograd's.
_WAITING_MODULES = frozenset(
    {
        "horovod.torch.mpi_ops",
        "torch.autograd.graph",
        _torch.FUNCTIONAL_COLLECTIVES,
        "torch.distributed.distributed_c10d",
        "torch.nn.parallel.distributed",
    }
)


def _innermost_frames(log: flight_recorder.Log, is_alone: bool, waits: bool) -> dict[int, FrameType]:
    """Of the rank's threads, by their identities: the one that has made its last call first.

    Args:
        log: what is known of the rank.
        is_alone: whether all threads of this process are the rank's.
        waits: give only the threads that wait for other ranks.
    """
    threads = sys._current_frames()
    # This very frame in its own variable is a cycle, and would keep all that the others' frames hold.
    threads.pop(threading.get_ident(), None)
    others = threads if is_alone else ()
    frames = {one: threads[one] for one in (log.thread, log.home, *others) if one in threads}
    return {one: frame for one, frame in frames.items() if _waits_at(frame) is not None} if waits else frames


def _waits_at(frame: FrameType | None) -> FrameType | None:
    """The frame in which a thread with this innermost frame waits for other ranks; None if it does not."""
    while frame is not None and is_library(frame):
        if is_marked_as_waiting(frame) or frame.f_globals.get("__name__") in _WAITING_MODULES:
            return frame
        frame = frame.f_back
    return None


def _explanation(reports: Mapping[int, dict[str, Any]], world_size: int) -> str:
    """What all ranks are doing: those at the same place together, the most of them first."""
    places: dict[str, list[int]] = {}
    for rank, report in reports.items():
        places.setdefault(report["stack"], []).append(rank)
    by_size = sorted(places.items(), key=lambda one: (-len(one[1]), one[1]))
    longest = max(report["seconds"] for report in reports.values())
    parts = [
        f"A collective has waited for {longest:.0f} s, and goes on waiting. Where the {world_size} ranks are:"
    ]
    for stack, ranks in by_size:
        first = reports[ranks[0]]
        waits = f"waits in {first['waits_in']}" if first["waits_in"] else "is not in a collective"
        verb = waits if len(ranks) == 1 else waits.replace("waits", "wait").replace("is not", "are not")
        processes = ", ".join(f"pid {reports[rank]['pid']} on {reports[rank]['host']}" for rank in ranks[:4])
        error = f", after {first['error']}" if first["error"] else ""
        parts.append(f"{describe_ranks(ranks).capitalize()} {verb}{error} ({processes}):\n{stack.rstrip()}")
    silent = sorted(set(range(world_size)) - set(reports))
    if silent:
        parts.append(f"{describe_ranks(silent).capitalize()} {SILENT}")
    comparing = [rank for rank, report in reports.items() if report["compares"]]
    if not comparing:
        parts.append("idist.debug(), or IGNITE_DIST_DEBUG=1, compares the calls of all ranks.")
    elif len(comparing) < len(reports):
        parts.append(f"debug() is on on {describe_ranks(comparing)} alone; it has to be on on every rank.")
    parts += [_history(reports)]
    return "\n\n".join(parts)


def _history(reports: Mapping[int, dict[str, Any]]) -> str:
    """The last calls of each rank; ranks with the same history share one table."""
    histories: dict[str, list[int]] = {}
    for rank, report in reports.items():
        histories.setdefault(json.dumps(report["calls"]), []).append(rank)
    parts = []
    for text, ranks in histories.items():
        calls = json.loads(text)
        who = describe_ranks(ranks)
        history = f"The last {len(calls)} collectives of {who}, the newest below:\n{table(calls)}"
        parts.append(history if calls else f"No call of idist by {who} yet.")
    if not all(report["keeps"] for report in reports.values()):
        return "idist.watch() on every rank keeps the last collectives, to show them here."
    return "\n\n".join(parts)


# --- starting and ending -----------------------------------------------------------------------------------

_running: WeakSet[Watchdog] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside a store while Python ends would now and then abort the process."""
    for one in list(_running):
        one.leave()


def _explained(error: RuntimeError) -> BaseException | None:
    """See ``links.explainers``."""
    return next(filter(None, (one.explained(error) for one in list(_running))), None)


connections.explainers.append(_explained)


if hasattr(os, "register_at_fork"):  # a forked child has no thread to wait for
    os.register_at_fork(after_in_child=_running.clear)


def start_here() -> None:
    """Watch this rank, with the default threshold, if that can be had without asking anybody."""
    model = current_model()
    side = side_of(model)
    if side is not None:
        start(model, DEFAULT_THRESHOLD, side)


def _watch_ends(model: ComputationModel) -> None:
    """Watch this rank of a context that was just made, if its store can be asked. Its calls are not kept."""
    side = side_of(model) if model.get_world_size() > 1 else None
    if side is not None and side.is_served:
        start(model, DEFAULT_THRESHOLD, side, keep_calls=False)


begun.append(_watch_ends)


def start(model: ComputationModel, threshold: timedelta, side: Side | None, keep_calls: bool = True) -> None:
    """Watch the caller's rank; without a side (a world of one) only its calls are kept."""
    with sides_lock:
        found = watch_with_recorder(model, keep_calls)
        found.log_of(model.get_rank()).thread = threading.get_ident()
        if isinstance(found.watchdog, Watchdog):
            found.watchdog.threshold = threshold
        elif side is not None:
            found.watchdog = Watchdog(model, found, side, threshold)


def _meet_at_end(model: ComputationModel) -> None:
    """Before the context of the caller's rank ends after success.

    Raises:
        CollectiveMismatchError: the ranks are not in step; the context goes on.
        RankFailedError: another rank waits in a collective that this one has not made; the context has ended.
    """
    try:
        announce(model, END_OF_CONTEXT, model.groups.world)
    except DistributedError:
        raise
    except RuntimeError:
        pass  # a rank is gone: the context's own end meets the same, and says so
    found = recorder_of(model)
    if found is None or found.watchdog is None or model.finds_early_ends or model.get_world_size() == 1:
        return
    try:
        found.watchdog.meet_at_end(model.get_rank())
    except RankFailedError:
        abort()
        raise


def _stop(model: ComputationModel) -> None:
    """The context of the caller's rank ends, or has ended: with the last rank of this process, stop."""
    found = recorder_of(model)
    if found is not None:
        found.leave(model.get_rank(), model.ranks_in_process())


ending.append(_meet_at_end)
ended.append(_stop)
