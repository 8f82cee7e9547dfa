"""The times of one rank's collectives: when each began and ended, and when the caller waited for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import Tensor

from ignite_dist.comp_models import Group
from ignite_dist.comp_models.work import Work
from ignite_dist.internals.call_sites import site_of_place, users_frame
from ignite_dist.values.layouts import layout_of

now = time.perf_counter_ns  # on Linux and macOS the same clock in all processes of a machine


class TimedCall:
    """The times of one call, in nanoseconds; 0 if not reached.

    Attributes:
        operation: as in the flight recorder's ``Call``.
        op: as in the flight recorder's ``Call``.
        layout: as in the flight recorder's ``Call``.
        ranks: the global ranks of the group.
        key: identifies the group, as in :meth:`Transport.group_key`.
        is_async: True if the call returned a ``Work``.
        thread: identity of the calling thread.
        begin: when the call began.
        end: when the collective completed; if the backend runs a ``Work``, when ``wait()`` had the result.
        wait_begin: when the caller began to wait for the ``Work``.
        wait_end: when this wait ended.
    """

    # Flat, because each further object would make the recording slower.
    __slots__ = (
        *("_code", "_instruction", "begin", "end", "is_async", "key", "layout", "op", "operation", "ranks"),
        *("thread", "wait_begin", "wait_end"),
    )

    def __init__(
        self, operation: str, op: str, layout: Any, ranks: tuple[int, ...], key: str, is_async: bool
    ) -> None:
        self.operation = operation
        self.op = op
        self.layout = layout
        self.ranks = ranks
        self.key = key
        self.is_async = is_async
        self.thread = get_ident()
        frame = users_frame(sys._getframe(4))  # of the caller of perform() or perform_backward()
        # The number of the line takes long to find, so `site` finds it after the recording.
        self._code = frame and frame.f_code
        self._instruction = frame.f_lasti if frame else 0
        self.end = self.wait_begin = self.wait_end = 0
        self.begin = now()

    def note_end(self, result: Any) -> Any:
        """Note that the collective has completed. Returns ``result``."""
        self.end = now()
        return result

    def wait(self, work: Work) -> Any:
        """The result of ``work``, for which the caller waits."""
        self.wait_begin = now()
        try:
            return work.wait()
        finally:
            self.wait_end = now()

    @property
    def site(self) -> str:
        """The caller's line, as in :func:`~ignite_dist.internals.call_sites.site_of`."""
        code, instruction = self._code, self._instruction
        if code is None:
            return "?"
        lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop and line)
        return site_of_place(code.co_filename, next(lines, code.co_firstlineno))


class TimedStart:
    """Begins a collective whose end ``call`` notes. ``call`` itself references no tensors."""

    __slots__ = ("_start", "call")

    def __init__(self, call: TimedCall, start: Callable[[Group], Work]) -> None:
        self.call = call
        self._start = start

    def __call__(self, group: Group) -> Work:  # noqa: D102
        return self._start(group).then(self.call.note_end)


class CallTimes:
    """The timed calls of one rank.

    Args:
        max_calls: the number of calls that are kept; later calls are counted only.
        finish: saves the calls when the context ends; its argument is True after a failure.
    """

    def __init__(self, max_calls: int, finish: Callable[[bool], None]) -> None:
        self.calls: list[TimedCall] = []
        self.num_dropped = 0
        self.finish = finish
        self._max_calls = max_calls

    def timed(
        self,
        operation: str,
        op: str,
        value: Any,
        ranks: tuple[int, ...],
        key: str,
        is_async: bool,
        start: Callable[[Group], Work],
    ) -> Callable[[Group], Work]:
        """Note that a call begins. Returns the function that begins it in place of ``start``."""
        if len(self.calls) >= self._max_calls:
            self.num_dropped += 1
            return start
        layout = (value.dtype, value.shape) if type(value) is Tensor else layout_of(value)
        call = TimedCall(operation, op, layout, ranks, key, is_async)
        self.calls.append(call)
        return TimedStart(call, start)
