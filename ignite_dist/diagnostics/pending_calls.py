"""Asynchronous collectives of several steps, run in one thread per group.

Ranks match the collectives of a group by their order. So the next blocking collective of a group waits until
the group's thread has no job left.
"""

from __future__ import annotations

import threading
from collections import deque

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Work, waits_for_ranks

__all__ = ["Job", "drain", "is_busy", "queues", "submit"]


class Job(Work):
    """A collective that runs in the thread of its group."""

    __slots__ = ("_done", "_error", "_result", "_work", "call")

    def __init__(self, work: Work, call: str) -> None:
        self.call = call
        self._work: Work | None = work
        self._done = threading.Event()
        self._result: object = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Run the collective. :meth:`wait` raises its exception."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result = work.wait()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    @waits_for_ranks
    def wait(self, timeout: object = None) -> object:
        """See ``Work``."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """See ``Work``."""
        return self._done.is_set()


class _Queue:
    """The jobs of one group. A thread runs them and ends when no job is left."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, call: str) -> Job:
        job = Job(work, call)
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ignite_dist's asynchronous collectives", daemon=True
                )
                self._thread.start()
        return job

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            job.run()

    def is_busy(self) -> bool:
        return self._thread is not None

    @waits_for_ranks
    def drain(self) -> None:
        """Return when all jobs are done."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()


queues: PerContext[dict[str, _Queue]] = PerContext()
"""The queues of each context, by :meth:`Transport.group_key`."""


def _queue(model: ComputationModel, group: Group) -> _Queue | None:
    found = queues.get(model)
    return None if found is None else found.get(model.transport.group_key(group))


def submit(model: ComputationModel, group: Group, work: Work, call: str) -> Job:
    """Run ``work`` in the thread of ``group``, after the jobs submitted before. See ``Work.call``."""
    found = queues.setdefault(model, {})
    return found.setdefault(model.transport.group_key(group), _Queue()).submit(work, call)


def is_busy(model: ComputationModel, group: Group) -> bool:
    """True if the thread of ``group`` has a job."""
    queue = _queue(model, group)
    return queue is not None and queue.is_busy()


def drain(model: ComputationModel, group: Group) -> None:
    """Return when the thread of ``group`` has no job left."""
    queue = _queue(model, group)
    if queue is not None:
        queue.drain()
