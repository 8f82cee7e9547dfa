"""Asynchronous collectives, run in one thread per group. See :meth:`Transport.overlaps`.

Ranks match the collectives of a group by their order. So the next blocking collective of a group waits until
the group's thread has completed all pending calls.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Completed, Steps, Work, waits_for_ranks, work_of
from ignite_dist.diagnostics.hang_reports import waiting_frame


class PendingCall(Work):
    """A collective that runs in the thread of its group.

    Attributes:
        error: what the collective has raised.
    """

    __slots__ = ("_done", "_result", "_thread", "_work", "call", "error")

    def __init__(self, work: Work, call: str) -> None:
        self.call = call
        self._work: Work | None = work
        self._done = threading.Event()
        self._thread = 0
        self._result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the collective. :meth:`wait` raises its exception."""
        self._thread = threading.get_ident()
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result = work.wait()
        except BaseException as error:  # loading an object may raise anything
            self.error = error
        finally:
            self._done.set()

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ranks for which the group's thread waits in this call at the moment."""
        waits_in = waiting_frame(sys._current_frames().get(self._thread))
        work = None if waits_in is None or self.is_completed() else work_of(waits_in)
        return () if work is None else work.ranks

    @waits_for_ranks
    def wait(self, timeout: object = None) -> object:
        """See ``Work``."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._result

    def is_completed(self) -> bool:
        """See ``Work``."""
        return self._done.is_set()


class _Queue:
    """The pending calls of one group. A thread runs them. It ends if none comes for a second.

    Attributes:
        group: the result is the group in which the thread runs the calls.
        tokens: of the latest calls.
    """

    def __init__(self, group: Work) -> None:
        self.group = group
        self.tokens: deque[int] = deque(maxlen=_LATEST_CALLS)
        self._calls: deque[PendingCall] = deque()  # also the one that runs
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def submit(self, work: Work, call: str) -> PendingCall:
        pending = PendingCall(work, call)
        with self._changed:
            self._calls.append(pending)
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():  # an interrupt may have ended start()
                self._thread = threading.Thread(
                    target=self._run, name="ignite_dist's asynchronous collectives", daemon=True
                )
                self._thread.start()
        return pending

    def _run(self) -> None:
        with self._turn:  # only after such an interrupt there may be two threads
            while (pending := self._first()) is not None:
                pending.run()
                del pending  # its result is the user's
                with self._changed:
                    self._calls.popleft()
                    self._changed.notify_all()

    def _first(self) -> PendingCall | None:
        with self._changed:
            if not self._calls and not self._has_ended:
                self._changed.wait(_IDLE_SECONDS)
            if self._calls:
                return self._calls[0]
            self._thread = None
            return None

    def end(self) -> None:
        """Let the thread end, after the pending calls."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @waits_for_ranks
    def drain(self) -> None:
        """Return when all pending calls are completed."""
        with self._changed:
            while self._calls:
                self._changed.wait()


# A new thread would take 0.1 ms.
_IDLE_SECONDS = 1.0
# An interrupt comes at most this many calls of other threads after its own call.
_LATEST_CALLS = 64

queues: PerContext[dict[str, _Queue]] = PerContext()
"""The queues of each context, by :meth:`Transport.group_key`."""


def _queue(model: ComputationModel, group: Group) -> _Queue | None:
    by_group = queues.get(model)
    return None if by_group is None else by_group.get(model.transport.group_key(group))


def submit(model: ComputationModel, group: Group, begin: Callable[[Group], Work], call: str) -> PendingCall:
    """Begin a collective in the thread of ``group``, after the calls submitted before. See ``Work.call``.

    The thread uses a separate group of the same ranks, because other threads of this rank may begin
    collectives of ``group`` meanwhile, for example the backward pass of a ``DistributedDataParallel``.
    """
    by_group = queues.setdefault(model, {})
    key = model.transport.group_key(group)
    queue = by_group.get(key)
    if queue is None:
        queue = by_group[key] = _Queue(model.transport.separate_group(group))

    def run() -> Any:
        own_group = queue.group.wait()
        queue.group = Completed(own_group)
        queue.tokens.append(group.token)
        return begin(own_group.in_call(group.call, group.token)).wait()

    return queue.submit(Steps(run), call)


def end(model: ComputationModel) -> None:
    """End the threads of a context that has ended: they would keep its connections open."""
    for queue in (queues.get(model) or {}).values():
        queue.end()
    queues.pop(model)


def count_interrupted(model: ComputationModel, group: Group) -> None:
    """Count ``group.call`` after the pending calls, unless the interrupt came when it was submitted.

    An interrupt of the first asynchronous call of a group does not count.
    """
    queue = _queue(model, group)
    if queue is None:
        return

    def count() -> None:
        if group.token not in queue.tokens:
            model.transport.count_interrupted(queue.group.wait().in_call(group.call, group.token))

    queue.submit(Steps(count), group.call.text)


def drain(model: ComputationModel, group: Group) -> None:
    """Return when the thread of ``group`` has completed all pending calls."""
    queue = _queue(model, group)
    if queue is not None:
        queue.drain()
