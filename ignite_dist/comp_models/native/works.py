"""Running collectives of process groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from ignite_dist.comp_models.work import Work, waits_for_ranks
from ignite_dist.rendezvous import connections

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 5e-4, 5e-2


class TorchWork(Work):
    """A collective of a process group. ``begin(is_async)`` begins the collective."""

    __slots__ = ("_begin", "_group", "_result", "_work", "needs_all", "ranks")

    def __init__(
        self,
        begin: Callable[[bool], dist.Work | None],
        result: Any,
        group: ProcessGroup,
        ranks: tuple[int, ...],
        needs_all: bool = True,
    ) -> None:
        self._begin: Callable[[bool], dist.Work | None] | None = begin
        self._work: dist.Work | None = None
        self._result = result
        self._group = group
        self.ranks = ranks
        self.needs_all = needs_all

    @property
    def group_name(self) -> str:
        return self._group.group_name

    def start(self) -> None:
        begin, self._begin = self._begin, None
        try:
            if begin is not None:
                self._work = begin(True)
        except RuntimeError as error:
            connections.raise_with_cause(error)

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:
        begin, self._begin = self._begin, None
        try:
            if begin is not None:
                self._work = begin(False)
            if self._work is not None:  # None: the backend has waited already
                self._work.wait()
        except RuntimeError as error:
            connections.raise_with_cause(error)
        return self._result

    def is_completed(self) -> bool:
        return self._begin is None and (self._work is None or self._work.is_completed())


class TorchWorks(TorchWork):
    """Several collectives of a process group that were begun together."""

    __slots__ = ("_works",)

    def __init__(
        self, works: list[dist.Work], result: Any, group: ProcessGroup, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(lambda _: None, result, group, ranks)
        self._works = works

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:
        for work in self._works:
            connections.wait(work)
        return self._result

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Arrival(Work):
    """A roll call of ranks through a store, before they make a group. Unlike torch's wait, it can be ended.

    Args:
        store: a connection that no other thread uses.
        group_name: the name of the new group.
        ranks: the members of the new group.
        has_ended: returns True if this process must not wait any longer.
    """

    __slots__ = ("_group_name", "_has_ended", "_store", "ranks")

    def __init__(
        self, store: Store, group_name: str, ranks: tuple[int, ...], has_ended: Callable[[], bool]
    ) -> None:
        self._store = store
        self._group_name = group_name
        self._has_ended = has_ended
        self.ranks = ranks
        store.add(group_name, 1)

    @property
    def group_name(self) -> str:
        return self._group_name

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> None:
        pause = _SHORTEST_POLL_SECONDS
        while not self.is_completed():
            if self._has_ended():
                connections.raise_with_cause(dist.DistNetworkError("Connection closed by peer."))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def is_completed(self) -> bool:
        return self._store.add(self._group_name, 0) >= len(self.ranks)
