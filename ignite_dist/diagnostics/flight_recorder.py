"""The flight recorder: keeps the last collectives of each rank and can compare them across the ranks.

Calls are kept only after ``watch_for_hangs()`` or ``compare_calls()``: see
:mod:`ignite_dist.diagnostics.verification`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ignite_dist.diagnostics.profiler.timed_calls import CallTimes
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.call_sites import site_of_place, users_frame
from ignite_dist.internals.ranks import describe_ranks, key_of_ranks, ranges
from ignite_dist.values.layouts import describe_layout, layout_of

_NUM_KEPT = 20  # calls per rank

END_OF_CONTEXT = "the end of the context"
"""The operation that stands for the end of a context. Ranks compare it like a collective."""


class Call(NamedTuple):
    """One call of a collective by one rank.

    Attributes:
        number: sequence number of the call in its group, from 1.
        operation: name of the public function, for example ``"all_reduce"``.
        op: the reduction, for example ``"SUM"``, or the source of a broadcast; else empty.
        layout: ``(dtype, shape)`` of the tensor, a list of these for a tree, or a description.
        group: the global ranks of the group; empty for the world.
        place: path and line of the user's call; None if unknown.
        key: identifies the group, also among groups of the same ranks. Equal on all ranks; empty for world.
    """

    number: int
    operation: str
    op: str
    layout: Any
    group: tuple[int, ...]
    place: tuple[str, int] | None
    key: str = ""

    @property
    def site(self) -> str:
        """The caller's line, for example ``"folder/file.py:12"``, without the parts of the path above."""
        return "?" if self.place is None else site_of_place(*self.place)

    @property
    def value(self) -> str:
        """Description of the layout. Equal on all ranks if their values match."""
        return describe_layout(self.layout)

    def row(self) -> tuple[str, ...]:
        """The cells of a row of :func:`table`."""
        return str(self.number), self.operation, self.op, self.value, self.site

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.op, self.value)))
        group = f" of the group {list(self.group)}" if self.group else ""
        return f"{self.operation}({what}), call {self.number}{group}, at {self.site}"


@dataclass(frozen=True)
class Comparison:
    """The parts of a call that the ranks compare before each collective.

    Attributes:
        call_sites: True to compare the lines of the calls too. Lines distinguish calls with equal arguments.
            False if ranks call one collective from different lines (``if rank == 0: ... else: ...``).
    """

    call_sites: bool = True


@dataclass
class Log:
    """The recorded calls of one rank.

    Attributes:
        first_thread: identity of the thread that made the rank's first call.
        last_thread: identity of the thread that made the rank's last call.
        comparison: the parts that the rank compares before each call; None if the rank compares nothing.
        error: the exception that the rank is reporting to the other ranks; empty if none.
        block: the code for which the other ranks wait on purpose, while this rank runs it; empty if none.
        num_calls: number of calls that the rank has made.
        calls: the last calls, oldest first.
        num_by_group: number of calls in each group, by :attr:`Call.key`.
    """

    first_thread: int
    last_thread: int
    comparison: Comparison | None = None
    error: str = ""
    block: str = ""
    num_calls: int = 0
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    num_by_group: dict[str, int] = field(default_factory=dict)


class Watchdog(Protocol):
    """The part of :class:`ignite_dist.diagnostics.watchdog.Watchdog` that a recorder calls."""

    def meet_at_end(self, rank: int) -> None:
        """Report the end of ``rank``. Return when all ranks have ended their contexts, or one rank is lost.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not called.
        """

    def report_failure(self, rank: int, error: BaseException | None) -> None:
        """Tell the other ranks that ``rank`` ends its context, and ``error`` if it is the rank's own."""

    def stop(self) -> None:
        """Stop the thread."""


class Recorder:
    """The flight recorder of one context, for the ranks of this process.

    Args:
        comparison: the initial comparison of each rank.

    Attributes:
        keeps_calls: True if the recorder keeps calls. Else the watchdog or a timeline uses the recorder.
        timelines: the times of calls, by rank; only of ranks that record a timeline.
    """

    def __init__(self, comparison: Comparison | None = None) -> None:
        self._comparison = comparison
        self.keeps_calls = True
        self._ended_ranks: set[int] = set()  # ranks whose contexts have ended
        self.logs: dict[int, Log] = {}
        self.timelines: dict[int, CallTimes] = {}
        self.watchdog: Watchdog | None = None
        # Guards the counts of the logs. Reentrant, because a signal handler may record a call too.
        self._lock = threading.RLock()

    def begin_timeline(self, rank: int, times: CallTimes) -> None:
        """Let ``times`` record the calls of ``rank`` from now on."""
        self.timelines[rank] = times

    def end_timeline(self, rank: int) -> None:
        """Record no more times of ``rank``."""
        del self.timelines[rank]

    def log_of(self, rank: int) -> Log:
        """The log of ``rank``. The first call makes the log, and must be made in a thread of ``rank``."""
        log = self.logs.get(rank)
        if log is None:  # setdefault: another thread of the rank may add the log at the same time
            new_log = Log(threading.get_ident(), threading.get_ident(), self._comparison)
            log = self.logs.setdefault(rank, new_log)
        return log

    def record_end(self, rank: int, num_ranks: int) -> None:
        """Record that the context of ``rank`` ends. The last rank of this process stops the watchdog."""
        self._ended_ranks.add(rank)
        if len(self._ended_ranks) >= num_ranks:
            self._ended_ranks.clear()
            watchdog, self.watchdog = self.watchdog, None
            if watchdog is not None:
                watchdog.stop()

    def record(
        self,
        rank: int,
        operation: str,
        group: tuple[int, ...],
        value: Tensor | torch.dtype | Sequence[Any] | str = "",
        op: str = "",
        key: str | None = None,
    ) -> Call:
        """Record a call of ``rank`` in ``group`` (empty for the world); see :class:`Call`."""
        log = self.logs.get(rank) or self.log_of(rank)
        frame = users_frame(sys._getframe(1))
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        layout = (value.dtype, value.shape) if type(value) is Tensor else layout_of(value)
        if key is None:
            key = key_of_ranks(group)
        with self._lock:
            log.last_thread, log.error = threading.get_ident(), ""
            log.num_calls += 1
            number = log.num_by_group[key] = log.num_by_group.get(key, 0) + 1
            call = Call(number, operation, op, layout, group, place, key)
            log.calls.append(call)
        return call

    def compares(self, rank: int) -> bool:
        """True if ``rank`` compares its calls with the calls of the other ranks."""
        return self.keeps_calls and self.log_of(rank).comparison is not None

    def compare(
        self, rank: int, call: Call, ranks: Sequence[int], gather: Callable[[Any], list[Any]]
    ) -> None:
        """Compare ``call`` with the calls of the group's other ranks. ``gather`` is a collective.

        Raises:
            CollectiveMismatchError: the calls differ; raised on all ranks of the group, with a table.
        """
        comparison = self.logs[rank].comparison
        assert comparison is not None
        message = (_TAG, *call.row())
        messages = gather(message)
        rows = [_fields(message) for message in messages]
        if len({row if comparison.call_sites else row[:-1] for row in rows}) > 1:
            raise CollectiveMismatchError(_mismatch_message(call, ranks, rows, comparison))


def _mismatch_message(
    call: Call, ranks: Sequence[int], rows: Sequence[tuple[str, ...]], comparison: Comparison
) -> str:
    """The error message: the ranks that differ from the majority, and a table of all calls."""
    kinds = Counter(row if comparison.call_sites else row[:-1] for row in rows)
    majority, num_majority = kinds.most_common(1)[0]
    deviating = [rank for rank, row in zip(ranks, rows, strict=True) if row[: len(majority)] != majority]
    group = f" of the group {list(call.group)}" if call.group else ""
    if num_majority > len(deviating):
        summary = f"{describe_ranks(deviating).capitalize()}{group} made a different call from the others."
    else:
        summary = f"{describe_ranks(ranks).capitalize()}{group} made different calls."
    hint = ""
    if len({row[:-1] for row in rows}) == 1:
        hint = (
            "\nThe calls differ only in the line of the caller. A rank may have skipped a call. If the lines "
            "are meant to differ, use idist.compare_calls(verify=True, call_sites=False)."
        )
    return f"{summary} The next collective of each:\n\n{table_by_rank(ranks, rows)}{hint}"


_TAG = "ignite_dist.call"


def _fields(message: Any) -> tuple[str, ...]:
    """``(number, operation, op, value, site)`` from the message of a rank."""
    if isinstance(message, tuple) and len(message) == 6 and message[0] == _TAG:
        return message[1:]
    return ("?", "a collective that is not compared (is compare_calls() on for this rank?)", "", "", "?")


def table_by_rank(ranks: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    """:func:`table` with a column for the ranks. Ranks with equal rows share a line."""
    by_row: dict[tuple[str, ...], list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        by_row.setdefault(tuple(row), []).append(rank)
    return table([(ranges(members), *row) for row, members in by_row.items()], ("rank",))


def table(rows: Sequence[Sequence[str]], before: tuple[str, ...] = ()) -> str:
    """Text with a header, and a line for each call ``(number, operation, op, value, site)``."""
    lines = [(*before, "call", "operation", "op", "value", "where"), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
