"""Asynchronous collectives, run in one thread per group. See :meth:`Transport.overlaps`.

Ranks match the collectives of a group by their order. So the next blocking collective of a group waits until
the group's thread has completed all pending calls.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.transport import PendingCalls
from ignite_dist.comp_models.work import Completed, Failed, Steps, Work, never_free, waits_for_ranks, work_of
from ignite_dist.diagnostics.hang_reports import waiting_frame
from ignite_dist.errors import CollectiveMismatchError


class PendingCall(Work):
    """A collective that runs in the thread of its group.

    Args:
        work: the collective, which begins in its ``wait()``.
        call: see ``Work.call``.
        queue: the calls of the group.

    Attributes:
        error: what the collective has raised.
    """

    __slots__ = ("_is_done", "_latch", "_queue", "_result", "_work", "call", "error")

    def __init__(self, work: Work, call: str, queue: _Queue) -> None:
        self.call = call
        self._queue = queue
        self._work: Work | None = work
        # An interrupted wait for an event may keep its lock, which is written in Python.
        self._latch, self._is_done = threading.Lock(), False
        self._latch.acquire()
        self._result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the collective. :meth:`wait` raises its exception."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result = work.wait()
        except BaseException as error:  # loading an object may raise anything
            self.error = error
        finally:
            self._is_done = True
            self._latch.release()

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ranks for which the group's thread waits at the moment, in this call or an earlier one."""
        thread = self._queue.thread_id()
        waits_in = None if self._is_done else waiting_frame(sys._current_frames().get(thread))
        work = None if waits_in is None else work_of(waits_in)
        return () if work is None else work.ranks

    @waits_for_ranks
    def wait(self, timeout: object = None) -> object:
        """See ``Work``."""
        self.wait_until_done()
        if self.error is not None:
            raise self.error
        return self._result

    @waits_for_ranks
    def wait_until_done(self) -> None:
        """Return when the collective has completed or failed.

        Raises:
            RuntimeError: this is the thread that runs the collective.
        """
        if not self._is_done and threading.get_ident() == self._queue.thread_id():
            raise RuntimeError(
                "A finalizer or the loading of an object has called a collective in the thread of the "
                "group's asynchronous collectives. Call it later, in a thread of your own."
            )
        thread = threading.get_ident()
        self._queue.waiting_threads.add(thread)
        try:
            while not self._is_done:  # an interrupt may have come between the two calls
                if self._latch.acquire(timeout=_LOOK_SECONDS):
                    self._latch.release()
        finally:
            self._queue.waiting_threads.discard(thread)

    def is_completed(self) -> bool:
        """See ``Work``."""
        return self._is_done


class _OwnGroup(Work):
    """The separate group in which the thread runs the calls.

    Complete when all ranks have made an asynchronous call.

    Attributes:
        context_has_ended: the context has ended, and the other ranks may never come.
    """

    __slots__ = ("_lock", "_make", "_making", "context_has_ended")

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make: Callable[[], Work] | None = make
        self.context_has_ended = False
        self._making: Work | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to make the group, once.

        In a thread, which no interrupt ends: a second exchange would not meet those of the other ranks.
        """
        if self._making is None:
            thread = threading.Thread(target=self._begin, daemon=True)
            thread.start()
            thread.join()

    def _begin(self) -> None:
        with self._lock:
            if self._make is not None:
                try:
                    self._making = self._make()
                except Exception as error:
                    self._making = Failed(error)
                self._make = None  # it keeps the group's handle

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of the exchange."""
        return () if self._making is None else self._making.ranks

    @waits_for_ranks
    def wait(self, timeout: object = None) -> Group:
        """See ``Work``."""
        assert self._making is not None
        pause = _SHORTEST_PAUSE
        while not self._making.is_completed():
            if self.context_has_ended:
                raise RuntimeError("The context has ended before the other ranks have made this call.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        group: Group = self._making.wait()
        self._making = Completed(group)
        return group

    def is_completed(self) -> bool:
        """See ``Work``."""
        return isinstance(self._making, Completed)


class _Queue:
    """The pending calls of one group, and the thread that runs them.

    The thread ends after a second without a call. The user's thread takes no lock that is written in Python:
    see :class:`PendingCall`.

    Attributes:
        group: the group in which the thread runs the calls.
        tokens: of the latest calls.
        waiting_threads: the threads of this rank that wait for one of the calls.
        reference: to the group's handle; None if it has none.
    """

    def __init__(self, make_group: Callable[[], Work]) -> None:
        self.group = _OwnGroup(make_group)
        self.tokens: deque[int] = deque(maxlen=_LATEST_CALLS)
        self.waiting_threads: set[int] = set()
        self.reference: weakref.ref[Any] | None = None
        self._calls: SimpleQueue[PendingCall | None] = SimpleQueue()
        self._latest: weakref.ref[PendingCall] | None = None
        self._turn = threading.Lock()
        self._lock = threading.RLock()  # guards _thread, also from a handler of a signal
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, call: str) -> PendingCall:
        pending = PendingCall(work, call, self)
        with self._lock:
            self._calls.put(pending)
            self._latest = weakref.ref(pending)
            if self._thread is None or not self._thread.is_alive():  # an interrupt may have ended start()
                self._thread = threading.Thread(
                    target=self._run, name="ignite_dist's asynchronous collectives", daemon=True
                )
                self._thread.start()
        return pending

    def _run(self) -> None:
        with self._turn:  # only after such an interrupt there may be two threads
            while (pending := self._next()) is not None:
                pending.run()
                del pending  # its result is the user's

    def _next(self) -> PendingCall | None:
        with suppress(Empty):
            if (pending := self._calls.get(timeout=_IDLE_SECONDS)) is not None:
                return pending
        with self._lock:  # another thread may have submitted a call meanwhile
            while not self._calls.empty():
                if (pending := self._calls.get()) is not None:
                    return pending
            self._thread = None
            return None

    def thread_id(self) -> int:
        """The identity of the thread; 0 if there is none."""
        thread = self._thread
        return (thread and thread.ident) or 0

    def end(self) -> None:
        """Let the thread end, after the pending calls."""
        self.group.context_has_ended = True
        self.reference = None  # its callback refers to this queue
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, for a second at most."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_SECONDS)

    def latest(self) -> PendingCall | None:
        """The call that was submitted last, if it is pending."""
        latest = None if self._latest is None else self._latest()
        return None if latest is None or latest.is_completed() else latest

    def drain(self) -> None:
        """Return when all pending calls are completed."""
        latest = self.latest()
        if latest is not None:
            latest.wait_until_done()


_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-4, 5e-3
# A wait that was interrupted between two steps may have kept the latch. Others look after this time.
_LOOK_SECONDS = 1.0
_END_SECONDS = 1.0
# The thread waits this long for the next call. With a new thread for each, a small call took twice the time.
_IDLE_SECONDS = 1.0
# An interrupt comes at most this many calls of other threads after its own call.
_LATEST_CALLS = 64

queues: PerContext[dict[str, _Queue]] = PerContext()
"""The queues of each context, by :meth:`Transport.group_key`."""


def _queue(model: ComputationModel, group: Group) -> _Queue | None:
    by_group = queues.get(model)
    return None if by_group is None else by_group.get(model.transport.group_key(group))


def _get_or_create_queue(model: ComputationModel, group: Group) -> _Queue:
    queue = _queue(model, group)
    if queue is None:
        by_group, key = queues.setdefault(model, {}), model.transport.group_key(group)
        model.transport.pending_calls = partial(_state_of, by_group)
        queue = by_group.setdefault(key, _Queue(partial(model.transport.separate_group, group)))
        with suppress(TypeError):  # no handle, or one that cannot be referenced weakly
            queue.reference = weakref.ref(group.handle, lambda _: _forget(by_group, key))
    queue.group.begin()
    return queue


def _state_of(by_group: dict[str, _Queue], key: str) -> PendingCalls:
    queue = by_group.get(key)
    if queue is None or queue.latest() is None:
        return PendingCalls()
    return PendingCalls(True, bool(queue.waiting_threads))


def _forget(by_group: dict[str, _Queue], key: str) -> None:
    """End the thread of a group that was destroyed."""
    queue = by_group.pop(key, None)
    if queue is not None:
        queue.end()


def submit(model: ComputationModel, group: Group, begin: Callable[[Group], Work], call: str) -> PendingCall:
    """Begin a collective in the thread of ``group``, after the calls submitted before. See ``Work.call``.

    The thread uses a separate group of the same ranks, because other threads of this rank may begin
    collectives of ``group`` meanwhile, for example the backward pass of a ``DistributedDataParallel``.
    """
    queue = _get_or_create_queue(model, group)
    begun: Work | None = None
    is_plain = model.device().type == "cpu" and not torch.is_inference_mode_enabled()
    if queue.group.is_completed() and is_plain:
        own_group = queue.group.wait()
        if model.transport.shares_memory(own_group):
            # wait() sends. The copies are made, and autograd counts the change, when the user calls.
            begun = begin(own_group.in_call(group.call, group.token))

    def run() -> Any:
        try:
            own_group = queue.group.wait()
        except CollectiveMismatchError:  # the other ranks make this group again, with their next calls
            by_group, key = queues.get(model) or {}, model.transport.group_key(group)
            if by_group.get(key) is queue:
                _forget(by_group, key)
            raise
        queue.tokens.append(group.token)
        called = own_group.in_call(group.call, group.token)
        try:
            return (begun or begin(called)).wait()
        except BaseException:
            model.transport.count_interrupted(called)  # does nothing if the call has made a step
            raise

    return queue.submit(Steps(run), call)


def end(model: ComputationModel) -> None:
    """End the threads of a context that has ended: they would keep its connections open."""
    of_context = list((queues.get(model) or {}).values())
    queues.pop(model)
    for queue in of_context:
        queue.end()
    for queue in of_context:
        queue.join()


def leave_to_parent() -> None:
    """In a forked child: forget the queues, whose threads are in the parent."""
    for by_group in queues:
        never_free(by_group.values())
    never_free(queues)
    queues.clear()


def count_interrupted(model: ComputationModel, group: Group) -> None:
    """Count ``group.call`` after the pending calls, unless the interrupt came when it was submitted.

    Without shared memory nothing counts.
    """
    transport = model.transport
    if group.position(model.get_rank()) is None or transport.shares_memory(group) is False:
        return
    if transport.overlaps(group):  # the calls of this group are in no queue
        return
    queue = _get_or_create_queue(model, group)

    def count() -> None:
        if group.token not in queue.tokens:
            transport.count_interrupted(queue.group.wait().in_call(group.call, group.token))

    queue.submit(Steps(count), group.call.text)


def drain(model: ComputationModel, group: Group) -> None:
    """Return when the thread of ``group`` has completed all pending calls."""
    queue = _queue(model, group)
    if queue is not None:
        queue.drain()
