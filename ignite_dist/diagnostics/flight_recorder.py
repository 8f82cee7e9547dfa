"""The collectives that a rank has called: kept to tell where it is, and compared with those of the others.

Calls are kept only while somebody watches (:mod:`ignite_dist.diagnostics.watchdog`).
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ignite_dist.call_sites import site_of_place, users_frame
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.values.ranks import describe_ranks, key_of_ranks, ranges

__all__ = [
    "END_OF_CONTEXT",
    "Call",
    "Comparison",
    "Log",
    "Recorder",
    "table",
]

_NUM_KEPT = 20  # calls of each rank

# Descriptions are cut to this, so that those of one call travel in one header.
_MAX_VALUE = 120

END_OF_CONTEXT = "the end of the context"
"""What a rank calls that ends its context: it is compared like a collective."""


class Call(NamedTuple):
    """One call of a collective by one rank.

    Attributes:
        number: how many calls in its group this is, from 1.
        operation: the public function: ``"all_reduce"``.
        op: ``"SUM"``; where a broadcast comes from; else empty.
        layout: of what was sent: ``(dtype, shape)`` of a tensor, those of the leaves of a tree, or words.
        group: the global ranks; empty for all.
        place: path and line of the caller outside of this package; None if there is none.
        key: what tells the group from others of the same ranks, the same on all of them; empty for all.
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
        """``"folder/file.py:12"``, the same on machines where the code is in different places."""
        return "?" if self.place is None else site_of_place(*self.place)

    @property
    def value(self) -> str:
        """What was sent, in words that are the same on ranks whose values go together."""
        return _describe(self.layout)

    def row(self) -> tuple[str, ...]:
        """The cells of :func:`table`."""
        return str(self.number), self.operation, self.op, self.value, self.site

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.op, self.value)))
        group = f" of the group {list(self.group)}" if self.group else ""
        return f"{self.operation}({what}), call {self.number}{group}, at {self.site}"


@dataclass(frozen=True)
class Comparison:
    """What the ranks compare before each collective.

    Attributes:
        call_sites: whether the callers' lines count. They tell apart calls that look alike; scripts that make
            one collective from two lines (``if rank == 0: ... else: ...``) have to do without.
    """

    call_sites: bool = True


@dataclass
class Log:
    """What is known of one rank.

    Attributes:
        home: the thread that has made its first call.
        thread: the one that has made its last.
        comparison: what it compares with the others before each call; None if it does not.
        error: what it tells the others of in its last call.
        num_calls: how many it has made.
        calls: the last of them.
        by_group: how many it has made in each group, by :attr:`Call.key`.
    """

    home: int
    thread: int
    comparison: Comparison | None = None
    error: str = ""
    num_calls: int = 0
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    by_group: dict[str, int] = field(default_factory=dict)


class Watchdog(Protocol):
    """What a recorder needs of :class:`ignite_dist.diagnostics.watchdog.Watchdog`, above it."""

    def explain(self, error: RuntimeError, call: Call, ranks: Sequence[int]) -> None:
        """Raise what is behind ``error`` of ``call``, if it is known that ranks are missing."""

    def meet_at_end(self, rank: int) -> None:
        """Return when all ranks have come to the end of the context, or cannot; ``rank`` has.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not made.
        """

    def stop(self) -> None:
        """End the thread."""


class Recorder:
    """The calls of the ranks of this process in one context.

    Args:
        comparison: what they compare before each call, until they say otherwise.

    Attributes:
        keeps_calls: False if only the threads of the ranks are looked at.
    """

    def __init__(self, comparison: Comparison | None = None) -> None:
        self._comparison = comparison
        self.keeps_calls = True
        self._left: set[int] = set()  # ranks whose contexts have ended
        self.logs: dict[int, Log] = {}
        self.watchdog: Watchdog | None = None
        # Guards the counts of the logs: threads of one rank share one. A signal handler may come in between.
        self._counting = threading.RLock()

    def log_of(self, rank: int) -> Log:
        """What is known of a rank of this process, in whose thread this is called."""
        log = self.logs.get(rank)
        if log is None:  # setdefault: another thread of the rank may be here too
            made = Log(threading.get_ident(), threading.get_ident(), self._comparison)
            log = self.logs.setdefault(rank, made)
        return log

    def leave(self, rank: int, num_ranks: int) -> None:
        """The context of ``rank``, one of ``num_ranks`` of this process, ends; the watch with the last."""
        self._left.add(rank)
        if len(self._left) >= num_ranks:
            self._left.clear()
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
        """Note a call of ``rank`` in the ``group``, which is empty for all ranks; see :class:`Call`."""
        log = self.logs.get(rank) or self.log_of(rank)
        frame = users_frame(sys._getframe(1))
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        layout = (value.dtype, value.shape) if type(value) is Tensor else _layout(value)
        if key is None:
            key = key_of_ranks(group)
        with self._counting:
            log.thread, log.error = threading.get_ident(), ""
            log.num_calls += 1
            number = log.by_group[key] = log.by_group.get(key, 0) + 1
            call = Call(number, operation, op, layout, group, place, key)
            log.calls.append(call)
        return call

    def compares(self, rank: int) -> bool:
        """True if ``rank`` compares its calls with those of the others."""
        return self.keeps_calls and self.log_of(rank).comparison is not None

    def compare(
        self, rank: int, call: Call, ranks: Sequence[int], gather: Callable[[Any], list[Any]]
    ) -> None:
        """Tell the other ranks of the group, by ``gather``, which call comes next.

        Raises:
            CollectiveMismatchError: they are not the same; raised on all of them, with a table.
            MissingRanksError: the backend has lost its patience, and a watchdog knows who has not come.
        """
        comparison = self.logs[rank].comparison
        assert comparison is not None
        sent = (_TAG, *call.row())
        try:
            rows = gather(sent)
        except RuntimeError as error:
            if self.watchdog is not None:
                self.watchdog.explain(error, call, ranks)
            raise
        told = [_fields(row) for row in rows]
        if len({row if comparison.call_sites else row[:-1] for row in told}) > 1:
            raise CollectiveMismatchError(_mismatch(call, ranks, told, comparison))


def _mismatch(
    call: Call, ranks: Sequence[int], told: Sequence[tuple[str, ...]], comparison: Comparison
) -> str:
    """Who is about to make another call than most, and a table of all."""
    kinds = Counter(row if comparison.call_sites else row[:-1] for row in told)
    usual, num_usual = kinds.most_common(1)[0]
    odd = [rank for rank, row in zip(ranks, told, strict=True) if row[: len(usual)] != usual]
    group = f" of the group {list(call.group)}" if call.group else ""
    if num_usual > len(odd):
        made = f"{describe_ranks(odd).capitalize()}{group} made another call than the others."
    else:
        made = f"{describe_ranks(ranks).capitalize()}{group} made different calls."
    hint = ""
    if len({row[:-1] for row in told}) == 1:
        hint = (
            "\nThey differ in nothing but the line that they come from: is one of them a call behind? If the "
            "lines are meant to differ, use idist.debug(verify=True, call_sites=False)."
        )
    return f"{made} The next collective of each:\n\n{table_by_rank(ranks, told)}{hint}"


_TAG = "ignite_dist.call"


def _fields(row: Any) -> tuple[str, ...]:
    """``(number, operation, op, value, site)`` as text, of what a rank has sent."""
    if isinstance(row, tuple) and len(row) == 6 and row[0] == _TAG:
        return row[1:]
    return ("?", "a collective that is not compared (is debug() on there?)", "", "", "?")


def table_by_rank(ranks: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    """The rows of :func:`table` with their ranks before them; ranks with the same one share a line."""
    by_row: dict[tuple[str, ...], list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        by_row.setdefault(tuple(row), []).append(rank)
    return table([(ranges(members), *row) for row, members in by_row.items()], ("rank",))


def table(rows: Sequence[Sequence[str]], before: tuple[str, ...] = ()) -> str:
    """The calls ``(number, operation, op, value, site)``, a line each."""
    lines = [(*before, "call", "operation", "op", "value", "where"), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# --- describing a call ---------------------------------------------------------------------------------


def _layout(value: Tensor | torch.dtype | Sequence[Any] | str) -> Any:
    """What is kept of a value: no tensor, which would live on with it."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if isinstance(value, (str, torch.dtype)):
        return value
    return [(one.dtype, one.shape) if isinstance(one, Tensor) else "number" for one in value]


def _describe(layout: Any) -> str:
    if isinstance(layout, tuple):
        dtype, shape = layout
        return f"{dtype} {tuple(shape)}"
    words = ", ".join(map(_describe, layout)) if isinstance(layout, list) else str(layout)
    if len(words) <= _MAX_VALUE:
        return words
    return f"{words[:_MAX_VALUE]}... ({zlib.crc32(words.encode()):08x})"
