"""Asynchronous collectives (``async_op=True``), which make progress while the caller computes."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ignite_dist.arguments import check_timeout
from ignite_dist.call_sites import site_of, users_frame, warn_user
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Completed, Failed, Steps, Work, waits_for_ranks
from ignite_dist.context.live import before_end_hooks, end_hooks
from ignite_dist.diagnostics import pending_calls
from ignite_dist.diagnostics.timed_calls import TimedCall, TimedStart
from ignite_dist.errors import MissingRanksError

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 50e-6, 5e-3


def begin(model: ComputationModel, operation: str, group: Group, start: Callable[[Group], Work]) -> Work:
    """Begin a collective by ``start(group)`` and return its work for the user.

    A single primitive begins in the caller's thread if the transport's collectives may overlap. Other
    collectives run in the thread of the group. On an accelerator, collectives with several steps complete
    here, because another thread would use another stream. An error comes out of the work's ``wait()``.
    """
    call = f"{operation} begun at {site_of(users_frame(sys._getframe(1)))}"
    timed = start.call if isinstance(start, TimedStart) else None
    transport = model.transport
    if not (transport.is_synchronous or transport.overlap):
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
        "_lock",
        "_pending",
        "_result",
        "_timed",
        "call",
        "needs_all",
        "ranks",
    )

    def __init__(
        self, model: ComputationModel, call: str, inner: Work, timed: TimedCall | None = None
    ) -> None:
        self.call = call
        self._timed = timed
        self._inner: Work | None = inner
        self.ranks, self.needs_all, self._group_name = inner.ranks, inner.needs_all, inner.group_name
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: Exception | None = None
        pending = _pending.setdefault(model, _Pending())
        self._pending: _Pending | None = pending  # None after wait()
        pending.add(self)

    @property
    def group_name(self) -> str:  # noqa: D102
        return self._group_name

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        if timeout is not None:
            self._wait_until_completed(timeout)
        self.finish()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.remove(self)
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self) -> bool:
        """Wait for the collective, and keep its result or its error. True if it has not failed."""
        with self._lock:
            if self._inner is not None:
                try:
                    inner, timed = self._inner, self._timed
                    self._result = inner.wait() if timed is None else timed.wait(inner)
                except Exception as error:
                    self._error = error
                self._inner = None  # not after a KeyboardInterrupt, because the collective still runs
        return self._error is None

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
        inner = self._inner
        return inner is None or inner.is_completed()


class _Pending:
    """The works of a context for which no ``wait()`` was called yet.

    ``add`` releases the two oldest works if they have completed without an error, because a work keeps its
    tensors. ``released`` counts them by description, for the warning.
    """

    def __init__(self) -> None:
        self.works: dict[int, PendingWork] = {}
        self.released: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, work: PendingWork) -> None:
        with self._lock:
            self.works[id(work)] = work
            oldest = list(itertools.islice(self.works.values(), 2))
        for old in oldest:
            if old is not work and old.is_completed() and old.finish():
                with self._lock:
                    if self.works.pop(id(old), None) is not None:
                        self.released[old.call] += 1

    def remove(self, work: PendingWork) -> None:
        with self._lock:
            if self.works.pop(id(work), None) is None and self.released[work.call] > 0:
                self.released[work.call] -= 1


_pending: PerContext[_Pending] = PerContext()


def _wait_for_all(model: ComputationModel) -> None:
    """Wait for the pending works before the context ends, and warn about them."""
    pending = _pending.get(model)
    if pending is None:
        return
    works = list(pending.works.values())
    for call in [*pending.released.elements(), *(work.call for work in works)]:
        warn_user(f"No wait() was called for the {call}: call wait() of the Work.")
    for work in works:
        work.wait()


def _forget_all(model: ComputationModel) -> None:
    """Drop the works and threads of a context that has ended: they would keep its connections open."""
    _pending.pop(model)
    pending_calls.queues.pop(model)


before_end_hooks.insert(0, _wait_for_all)
end_hooks.append(_forget_all)
