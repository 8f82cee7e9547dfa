"""Asynchronous collectives (``async_op=True``), which make progress while the caller computes."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ignite_dist.arguments import check_timeout
from ignite_dist.call_sites import site_of, users_frame
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Completed, Steps, Work, waits_for_ranks
from ignite_dist.context.live import ending
from ignite_dist.diagnostics import pending_calls
from ignite_dist.errors import MissingRanksError

__all__ = ["begin"]

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 50e-6, 5e-3


def begin(model: ComputationModel, operation: str, group: Group, start: Callable[[], Work]) -> Work:
    """Begin a collective by ``start()`` and return its work for the user.

    A single primitive begins in the caller's thread if the transport's collectives may overlap. Other
    collectives run in the thread of the group. On an accelerator, collectives with several steps run in the
    caller's thread, because the host hardly waits there.
    """
    transport = model.transport
    if transport.is_synchronous:
        return Completed(start().wait())
    call = f"{operation} begun at {site_of(users_frame(sys._getframe(1)))}"
    work: Work
    if not transport.overlap or pending_calls.is_busy(model, group):
        work = pending_calls.submit(model, group, Steps(lambda: start().wait()), call)
    else:
        work = start()
        work.start()
        if isinstance(work, Steps):
            if model.device().type == "cpu":
                work = pending_calls.submit(model, group, work, call)
            else:
                work = Completed(work.wait())
    return PendingWork(model, call, work)


class PendingWork(Work):
    """The work object that the user gets."""

    __slots__ = ("_error", "_inner", "_lock", "_model", "_result", "call")

    def __init__(self, model: ComputationModel, call: str, inner: Work) -> None:
        self.call = call
        self._inner: Work | None = inner
        self._lock = threading.Lock()
        self._model = model
        self._result: Any = None
        self._error: Exception | None = None
        _pending.setdefault(model, {})[id(self)] = self

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:
        if timeout is not None:
            self._wait_until_completed(timeout)
        with self._lock:
            if self._inner is not None:
                try:
                    self._result = self._inner.wait()
                except Exception as error:
                    self._error = error
                # A KeyboardInterrupt skips these lines: the collective still runs.
                self._inner = None
                _pending.setdefault(self._model, {}).pop(id(self), None)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait_until_completed(self, timeout: timedelta) -> None:
        check_timeout("timeout", timeout)
        deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_POLL_SECONDS
        while not self.is_completed():
            now = time.monotonic()
            if now >= deadline:
                raise MissingRanksError(
                    f"The {self.call} has not completed within {timeout} and still runs: call wait() again."
                )
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def is_completed(self) -> bool:
        inner = self._inner
        return inner is None or inner.is_completed()


_pending: PerContext[dict[int, PendingWork]] = PerContext()


def _wait_for_all(model: ComputationModel) -> None:
    """Wait for the pending works before the context ends, and warn about them."""
    left = list(_pending.setdefault(model, {}).values())
    for work in left:
        warnings.warn(f"No wait() was called for the {work.call}: call wait() of the Work.", stacklevel=5)
    for work in left:
        work.wait()


ending.insert(0, _wait_for_all)
