"""Asynchronous collectives (``async_op=True``), which make progress while the caller computes."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ignite_dist.collectives.interrupts import is_interrupt
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import (
    Completed,
    Failed,
    KeptError,
    Steps,
    Work,
    never_free,
    waits_for_ranks,
)
from ignite_dist.context.forks import WorkOfParent
from ignite_dist.context.live import before_end_hooks, end_hooks
from ignite_dist.diagnostics import pending_calls
from ignite_dist.diagnostics.pending_calls import PendingCall
from ignite_dist.diagnostics.profiler.timed_calls import TimedCall, TimedStart
from ignite_dist.errors import MissingRanksError
from ignite_dist.internals.arguments import check_timeout
from ignite_dist.internals.call_sites import site_of, users_frame, warn_user

_YIELD_SECONDS = 20e-6
_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 50e-6, 5e-3


def begin(model: ComputationModel, operation: str, group: Group, start: Callable[[Group], Work]) -> Work:
    """Begin a collective by ``start(group)`` and return its work for the user.

    A single primitive begins in the caller's thread if collectives of the group may overlap. Other
    collectives run in the thread of the group. On an accelerator, collectives with several steps complete
    here, because another thread would use another stream. An error comes out of the work's ``wait()``.
    """
    call = f"{operation} begun at {site_of(users_frame(sys._getframe(1)))}"
    timed = start.call if isinstance(start, TimedStart) else None
    transport = model.transport
    if not (transport.is_synchronous or transport.overlaps(group)):
        return PendingWork(model, call, pending_calls.submit(model, group, start, call), timed)
    try:
        work = start(group)
        work.start()
        if transport.is_synchronous or (isinstance(work, Steps) and model.device().type != "cpu"):
            return Completed(work.wait() if timed is None else timed.wait(work))
        if isinstance(work, Steps):  # nothing has been sent yet
            work = pending_calls.submit(model, group, start, call)
    except RuntimeError as error:
        work = Failed(error)
        if transport.is_synchronous:
            return work
    return PendingWork(model, call, work, timed)


class PendingWork(Work):
    """The work object that the user gets.

    Args:
        model: the model of the context.
        call: the description for the user.
        inner: the collective.
        timed: gets the times of the caller's wait; None if no timeline is recorded.
    """

    __slots__ = (
        "_error",
        "_group_name",
        "_inner",
        "_is_waiting",
        "_lock",
        "_pending",
        "_result",
        "_timed",
        "call",
        "needs_all",
    )

    def __init__(
        self, model: ComputationModel, call: str, inner: Work, timed: TimedCall | None = None
    ) -> None:
        self._pending = _pending.setdefault(model, _Pending())
        self.call = call
        self._timed = timed
        self.needs_all, self._group_name = inner.needs_all, inner.group_name
        self._lock = threading.RLock()  # a signal handler does not wait for its own thread
        self._is_waiting = False  # guarded by _lock
        self._result: Any = None
        self._error: KeptError | None = None
        self._inner: Work | None = inner  # last: __del__ ignores a work that an interrupt left without it
        self._pending.works[id(self)] = weakref.ref(self)
        self._pending.release()

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]  # noqa: D102
        inner = self._inner
        return () if inner is None else inner.ranks

    @property
    def group_name(self) -> str:  # noqa: D102
        return self._group_name

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        if timeout is not None:
            self._wait_until_completed(timeout)
        with self._lock:
            if self._is_waiting:
                raise RuntimeError(
                    f"A signal handler or a finalizer waits for the {self.call}, for which its thread waits "
                    "already. Let the handler set a flag, and wait later."
                )
            inner, timed = self._inner, self._timed
            if inner is not None:
                self._is_waiting = True
                try:
                    self._result = inner.wait() if timed is None else timed.wait(inner)
                except BaseException as error:
                    is_own = isinstance(inner, PendingCall) and error is inner.error
                    if not is_own and is_interrupt(error):
                        raise  # an interrupt of this wait: the collective still runs
                    self._error = KeptError(error)
                    if isinstance(inner, PendingCall):
                        inner.error = None
                finally:
                    self._is_waiting = False
                self._inner = None
                self._pending.works.pop(id(self), None)
            if self._error is not None:
                self._error.throw()
        return self._result

    def has_succeeded(self) -> bool:
        """False if :meth:`wait` raises the error of the collective."""
        try:
            self.wait()
        except BaseException:
            if self._error is None:
                raise
            return False
        return True

    def leave_to_parent(self) -> None:
        """In a forked child: make :meth:`wait` raise."""
        self._lock, self._is_waiting = threading.RLock(), False  # a thread of the parent may hold the old one
        never_free([self._inner])
        self._inner = WorkOfParent()

    def __del__(self) -> None:
        if getattr(self, "_inner", None) is not None:
            self._pending.works.pop(id(self), None)
            self._pending.dropped.append(self)

    def _wait_until_completed(self, timeout: timedelta) -> None:
        check_timeout("timeout", timeout)
        deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_POLL_SECONDS
        while not self.is_completed():
            now = time.monotonic()
            if now >= deadline:
                raise MissingRanksError(
                    f"The {self.call} has not completed within {timeout} and still runs. Call wait() again."
                )
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def is_completed(self) -> bool:  # noqa: D102
        if not self.is_done() and isinstance(self._inner, PendingCall):
            time.sleep(_YIELD_SECONDS)  # the group's thread needs the interpreter
        return self.is_done()

    def is_done(self) -> bool:
        """As :meth:`is_completed`, for a caller that asks once."""
        inner = self._inner
        return inner is None or inner.is_completed()


class _Pending:
    """The works of a context for which no ``wait()`` was called yet.

    Attributes:
        works: those that the user still has, by their ids, the oldest first.
        dropped: those that the user has dropped. Their destructors have put them here.
        released: how many dropped works have completed, by description. Their tensors are free.
    """

    def __init__(self) -> None:
        self.works: dict[int, weakref.ref[PendingWork]] = {}
        self.dropped: deque[PendingWork] = deque()
        self.released: Counter[str] = Counter()
        self._lock = threading.RLock()  # guards released, also from a handler of a signal

    def held(self) -> list[PendingWork]:
        """The works that the user still has, the oldest first."""
        return [work for reference in list(self.works.values()) if (work := reference()) is not None]

    def release(self) -> None:
        """Free two dropped works if they have completed without an error. Else they wait at the end."""
        for _ in range(min(2, len(self.dropped))):
            with suppress(IndexError):  # another thread has taken it
                work = self.dropped.popleft()
                if work.is_done() and work.has_succeeded():
                    with self._lock:
                        self.released[work.call] += 1
                else:
                    self.dropped.append(work)


_pending: PerContext[_Pending] = PerContext()


def _wait_for_all(model: ComputationModel) -> None:
    """Wait for the pending works before the context ends, and warn about them."""
    pending = _pending.get(model)
    if pending is None:
        return
    works = pending.held()
    calls = [*pending.released.elements(), *(work.call for work in [*pending.dropped, *works])]
    for call in calls:
        warn_user(f"No wait() was called for the {call}: call wait() of the Work.")
    while pending.dropped:
        pending.dropped.popleft().wait()  # an error is raised once
    for work in works:
        work.wait()


def _forget_all(model: ComputationModel) -> None:
    """Drop the works and threads of a context that has ended: they would keep its connections open."""
    _pending.pop(model)
    pending_calls.end(model)


def _leave_all_to_parent() -> None:
    """In a forked child: let no call wait for the parent's works. Their threads are in the parent."""
    for pending in _pending:
        for work in [*pending.dropped, *pending.held()]:
            work.leave_to_parent()
    pending_calls.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
before_end_hooks.insert(0, _wait_for_all)
end_hooks.append(_forget_all)
