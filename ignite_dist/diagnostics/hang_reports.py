"""The watchdog's reports: where each rank is, and the text for the user."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from ignite_dist.comp_models.work import begun_call, is_marked_as_waiting, marked_as_waiting
from ignite_dist.diagnostics import flight_recorder
from ignite_dist.diagnostics.flight_recorder import table
from ignite_dist.diagnostics.out_of_band import SILENT
from ignite_dist.diagnostics.thread_stacks import MOST_THREADS, Line
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import (
    function_called,
    is_library,
    is_library_path,
    site_of,
    users_frame,
)
from ignite_dist.internals.ranks import describe_ranks


def report_of(
    log: flight_recorder.Log, frame: FrameType | None, *, is_waiting: bool, seconds: float
) -> dict[str, Any]:
    """Report of where a rank is. Contains plain values, because the report is sent as JSON."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "waits_in": (begun_call(frame) or function_called(frame)) if is_waiting else "",
        "seconds": seconds,
        "site": _site(frame),
        "stack": _stack(frame) if frame is not None else "",
        "place": _place(frame, is_waiting) if frame is not None else "",
        "last": str(log.calls[-1]) if log.calls else "",
        "error": log.error,
        "block": log.block,
        "compares": log.comparison is not None,
        "numbers": dict(log.num_by_group),
        "calls": [call.row() for call in list(log.calls)],
    }


def _place(frame: FrameType, is_waiting: bool) -> str:
    """The part of the stack that is the same for all ranks at one place.

    Of a rank that waits that is the user's part: in the package one rank polls while another one sleeps.
    """
    users = users_frame(frame) if is_waiting else None
    return _stack(users or frame)


def _site(frame: FrameType | None) -> str:
    return site_of(users_frame(frame))


def _stack(frame: FrameType) -> str:
    """The stack from the user's outermost frame to ``frame``, without the frames that started the process."""
    frames = [caller for caller, _ in traceback.walk_stack(frame)]
    while len(frames) > 1 and (is_library(frames[-1]) or _starts_a_process(frames[-1])):
        frames.pop()
    summary = traceback.StackSummary.extract((caller, caller.f_lineno) for caller in reversed(frames))
    return "".join(summary.format())


def _starts_a_process(frame: FrameType) -> bool:
    """True if ``frame`` is the ``python -c`` command of multiprocessing."""
    return frame.f_code.co_filename == "<string>" and frame.f_back is None


# A rank waits for other ranks in functions marked by `waits_for_ranks` and in these modules: the collectives
# of torch and Horovod, and DDP, whose backward pass waits inside torch.autograd.
_WAITING_MODULES = frozenset(
    {
        "horovod.torch.mpi_ops",
        "torch.autograd.graph",
        _torch.FUNCTIONAL_COLLECTIVES,
        "torch.distributed.distributed_c10d",
        "torch.nn.parallel.distributed",
    }
)


# Functions in which ranks wait until another rank has run its block.
_WAITS_ON_PURPOSE = frozenset({"one_rank_first", "one_rank_only"})


def threads_of(log: flight_recorder.Log, threads: Iterable[int], is_only_rank: bool) -> list[int]:
    """The rank's threads among ``threads``, without the running one. The thread of the last call comes first.

    Args:
        log: the log of the rank.
        threads: identities of threads.
        is_only_rank: True if all threads of this process belong to the rank.
    """
    idents = (log.last_thread, log.first_thread, *(threads if is_only_rank else ()))
    return [ident for ident in dict.fromkeys(idents) if ident != threading.get_ident()]


def innermost_frames(threads: Iterable[int]) -> dict[int, FrameType]:
    """The innermost frame of each of ``threads``, in their order."""
    frames = sys._current_frames()
    # This function's own frame would make a reference cycle, which keeps the variables of all frames alive.
    frames.pop(threading.get_ident(), None)
    return {thread: frames[thread] for thread in threads if thread in frames}


def waiting_frames(threads: Iterable[int]) -> dict[int, tuple[FrameType, FrameType]]:
    """Like :func:`innermost_frames`, for those of ``threads`` that wait for other ranks.

    Returns:
        By thread: the innermost frame, and the frame in which the thread waits. Both come from one snapshot,
        because the thread may continue at any time.
    """
    frames = innermost_frames(threads)
    pairs = {thread: (frame, waiting_frame(frame)) for thread, frame in frames.items()}
    return {thread: (frame, waits_in) for thread, (frame, waits_in) in pairs.items() if waits_in is not None}


def waiting_frame(frame: FrameType | None) -> FrameType | None:
    """The frame in which the thread of ``frame`` waits for other ranks; None if the thread does not wait."""
    while frame is not None and is_library(frame):
        if is_marked_as_waiting(frame) or frame.f_globals.get("__name__") in _WAITING_MODULES:
            return frame
        frame = frame.f_back
    return None


def waiting_parts(stacks: Mapping[int, list[Line]], threads: Iterable[int]) -> dict[int, tuple[Line, ...]]:
    """The stacks of those of ``threads`` that wait for other ranks, from the function that waits outwards.

    Like :func:`waiting_frame`, but from the text of :func:`stacks_of_threads`. A thread of which there is no
    text may wait: its part says only that.
    """
    loaded = (sys.modules.get(name) for name in _WAITING_MODULES)
    paths = {getattr(module, "__file__", None) for module in loaded}
    marked = marked_as_waiting()

    def part_of(thread: int) -> tuple[Line, ...]:
        if thread not in stacks:
            is_known = 0 < len(stacks) < MOST_THREADS  # the thread has ended
            return () if is_known else (Line("?", "?", "?"),)
        for position, (path, _, function) in enumerate(stacks[thread]):
            if not is_library_path(path):
                break
            if path in paths or (path, function) in marked:
                return tuple(stacks[thread][position:])
        return ()

    return {thread: part for thread in threads if (part := part_of(thread))}


def explanation(reports: Mapping[int, dict[str, Any]], world_size: int) -> str:
    """Text that says where each rank is. Ranks at one place share a paragraph, most ranks first.

    One line if the ranks wait on purpose for a rank in its block of ``one_rank_first`` or ``one_rank_only``.
    """
    longest = max(report["seconds"] for report in reports.values())
    others = {report["waits_in"] for report in reports.values() if report["waits_in"]}
    for rank, report in reports.items():
        if report["block"] and not report["waits_in"] and others <= _WAITS_ON_PURPOSE:
            return (
                f"Rank {rank} is in {report['block']}, now at {report['site']}, and the other ranks have "
                f"waited for it for {longest:.0f} s."
            )
    places: dict[tuple[str, str], list[int]] = {}
    for rank, report in reports.items():
        places.setdefault((report["waits_in"], report["place"]), []).append(rank)
    by_size = sorted(places.items(), key=lambda place: (-len(place[1]), place[1]))
    parts = [
        f"A collective has waited for {longest:.0f} s and still waits. Where the {world_size} ranks are:"
    ]
    for _, ranks in by_size:
        first = reports[ranks[0]]
        waits = f"waits in {first['waits_in']}" if first["waits_in"] else "is not in a collective"
        verb = waits if len(ranks) == 1 else waits.replace("waits", "wait").replace("is not", "are not")
        processes = ", ".join(f"pid {reports[rank]['pid']} on {reports[rank]['host']}" for rank in ranks[:4])
        error = f", after {first['error']}" if first["error"] else ""
        parts.append(
            f"{describe_ranks(ranks).capitalize()} {verb}{error} ({processes}):\n{first['stack'].rstrip()}"
        )
    silent = sorted(set(range(world_size)) - set(reports))
    if silent:
        parts.append(f"{describe_ranks(silent).capitalize()} {SILENT}")
    comparing = [rank for rank, report in reports.items() if report["compares"]]
    if not comparing:
        parts.append("idist.compare_calls(), or IGNITE_DIST_DEBUG=1, compares the calls of all ranks.")
    elif len(comparing) < len(reports):
        parts.append(
            f"compare_calls() is on only for {describe_ranks(comparing)}. Turn compare_calls() on for every "
            "rank."
        )
    parts.append(_history(reports))
    return "\n\n".join(parts)


def _history(reports: Mapping[int, dict[str, Any]]) -> str:
    """The last calls of each rank; ranks with the same history share one table."""
    histories: dict[str, list[int]] = {}
    for rank, report in reports.items():
        histories.setdefault(json.dumps(report["calls"]), []).append(rank)
    parts = []
    for text, ranks in histories.items():
        calls = json.loads(text)
        names = describe_ranks(ranks)
        history = f"The last {len(calls)} collectives of {names}, the newest last:\n{table(calls)}"
        parts.append(history if calls else f"No call of idist by {names} yet.")
    if not all(report["keeps"] for report in reports.values()):
        return "Call idist.watch_for_hangs() on every rank to see the last collectives here."
    return "\n\n".join(parts)
