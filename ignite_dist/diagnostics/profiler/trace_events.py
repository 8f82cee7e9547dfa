"""A Chrome trace of the calls of all ranks.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

A call waits until the last rank of its group has begun the same call. The rest of its time is work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ignite_dist.diagnostics.profiler.timed_calls import TimedCall
from ignite_dist.values.layouts import describe_layout, num_bytes_of

_Event = dict[str, Any]
_Key = tuple[str, int]  # a group, and the number of a call in this group: the same call on all ranks


class Row(NamedTuple):
    """What a rank sends about a :class:`TimedCall`: ``args`` are for the reader of the trace."""

    operation: str
    args: dict[str, Any]
    ranks: Sequence[int]
    key: str
    is_async: bool
    thread: int
    begin: int
    end: int
    wait_begin: int
    wait_end: int


def row_of(call: TimedCall) -> Row:
    """The row of a call."""
    args = {"op": call.op, "value": describe_layout(call.layout), "bytes": num_bytes_of(call.layout)}
    args |= {"ranks": call.ranks, "line": call.site}
    if not call.end:
        args["outcome"] = "not completed"
    times = (call.begin, call.end, call.wait_begin, call.wait_end)
    return Row(call.operation, args, call.ranks, call.key, call.is_async, call.thread, *times)


class RankCalls(NamedTuple):
    """The calls of a rank and the end of its recording, in times of rank 0's clock."""

    rank: int
    host: str
    rows: list[Row]
    end: int

    def by_key(self) -> Iterator[tuple[_Key, Row]]:
        """Each row with its key."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.key] += 1
            yield (row.key, counts[row.key]), row

    def latest_ends(self) -> list[int]:
        """For each row a time before which the call has ended, also if it has raised an exception."""
        found, next_begins = [], dict[int, int]()
        for row in reversed(self.rows):
            found.append(self.end if row.is_async else next_begins.get(row.thread, self.end))
            next_begins[row.thread] = row.begin
        return found[::-1]


def events_of(ranks: Sequence[RankCalls]) -> Iterator[_Event]:
    """The events of the trace. The first call begins at 0."""
    begins: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
    for calls in ranks:
        for key, row in calls.by_key():
            begins[key].append((row.begin, calls.rank))
    for begun in begins.values():
        begun.sort()
    origin = min((row.begin for calls in ranks for row in calls.rows[:1]), default=0)
    for calls in ranks:
        yield from _RankEvents(calls, begins, origin).events()


class _RankEvents:
    """The events of one rank.

    Args:
        calls: the calls of the rank.
        begins: when each rank has begun each call, in order.
        origin: the time that is 0 in the trace.
    """

    def __init__(
        self, calls: RankCalls, begins: Mapping[_Key, Sequence[tuple[int, int]]], origin: int
    ) -> None:
        self._calls = calls
        self._rank = calls.rank
        self._begins = begins
        self._origin = origin
        threads = dict.fromkeys(row.thread for row in calls.rows)
        self._threads = {thread: number for number, thread in enumerate(threads)}

    def events(self) -> Iterator[_Event]:
        name = f"rank {self._rank} ({self._calls.host})"
        yield {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": self._rank, "args": {"sort_index": self._rank}}
        latest_ends = self._calls.latest_ends()
        for (key, row), latest_end in zip(self._calls.by_key(), latest_ends, strict=True):
            end = row.end or latest_end
            if not row.is_async:
                yield from self._slices(row.operation, key, row, row.begin, end)
                continue
            identity = f"{self._rank} {key[0]} {key[1]}"
            for phase, time, args in (("b", row.begin, row.args), ("e", end, {})):
                yield self._event(phase, row, time, row.operation, "async", args, id=identity)
            if row.wait_begin:
                name = f"wait() of {row.operation}"
                yield from self._slices(name, key, row, row.wait_begin, row.wait_end or end)

    def _slices(self, name: str, key: _Key, row: Row, begin: int, end: int) -> Iterator[_Event]:
        """The slice of a call, and in it the slices in which it waits and works."""
        waits_for, waited_until = self._last_rank(key, row, end)
        waiting = max(0, waited_until - begin)
        args = {**row.args, "waiting us": _us(waiting), "working us": _us(end - begin - waiting)}
        if waiting:
            args["waits for"] = waits_for
        yield self._slice(row, begin, end, name, "call", args)
        if waiting:
            yield self._slice(row, begin, waited_until, f"waiting for rank {waits_for}", "waiting", {})
            yield self._slice(row, waited_until, end, "working", "working", {})

    def _last_rank(self, key: _Key, row: Row, end: int) -> tuple[int, int]:
        """The last other rank that began the call before ``end``, and when; ``(-1, 0)`` if unknown.

        A call may not wait for a rank that begins later, for example on the source of a broadcast over gloo.
        """
        begun = self._begins[key]
        if len(begun) == len(row.ranks):  # else a rank has not made the call, or has not kept it
            for begin, rank in reversed(begun[: bisect_right(begun, (end, self._rank))]):
                if rank != self._rank:
                    return rank, begin
        return -1, 0

    def _slice(
        self, row: Row, begin: int, end: int, name: str, category: str, args: Mapping[str, Any]
    ) -> _Event:
        return self._event("X", row, begin, name, category, args, dur=_us(end - begin))

    def _event(
        self,
        phase: str,
        row: Row,
        time: int,
        name: str,
        category: str,
        args: Mapping[str, Any],
        **others: Any,
    ) -> _Event:
        place = {"pid": self._rank, "tid": self._threads[row.thread], "ts": _us(time - self._origin)}
        return {"ph": phase, "name": name, "cat": category, **place, **others, "args": args}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1e3
