"""Running collectives of process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ignite_dist.comp_models.work import Work, waits_for_ranks
from ignite_dist.environments.rendezvous import connections


def awaited_ranks(group: Any, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """``ranks``, but none for a separate group: all of its members have made the call already."""
    return ranks if isinstance(group, ProcessGroup) else ()


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
        self.ranks = awaited_ranks(group, ranks)
        self.needs_all = needs_all

    @property
    def group_name(self) -> str:
        return self._group.group_name if isinstance(self._group, ProcessGroup) else ""

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
        except RuntimeError as error:
            connections.raise_with_cause(error)
        if self._work is not None:  # None: the backend has waited already
            connections.wait(self._work)
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
