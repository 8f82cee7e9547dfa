"""The decorator and the shared functions of the cases."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models.training import Training
from ignite_dist.comp_models.work import Completed, Steps
from ignite_dist.context.live import current_model
from ignite_dist.values import safe_objects

SECONDS_PER_CASE = 240

BACKENDS_OF_TORCH = ("gloo", "nccl")

PROPERTY = "conformance"
"""The property of a test's report that has its world, and what the case has returned."""


def on_every_rank(case: Callable[..., Any]) -> Callable[..., Any]:
    """Make a test of ``case``: it runs on every rank of every world. Its parameters are the test's.

    The case returns None, or ``{(operation, dtype): outcome}`` for what it has seen, equal on all ranks.
    """

    def test(world: Any, record_property: Callable[[str, Any], None], **kwargs: Any) -> None:
        backend, _, _ = world.name.rpartition("-")
        seen: dict[str, Any] = {"world": [backend or world.name, world.size], "cells": []}
        record_property(PROPERTY, seen)
        cells = world.run(case, **kwargs)
        assert all(one == cells[0] for one in cells), "ranks saw different things"
        seen["cells"] += [[*key, outcome] for key, outcome in (cells[0] or {}).items()]

    given = ("world", "record_property")
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in given]
    parameters += inspect.signature(case).parameters.values()
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__, test.__module__, test.__doc__ = case.__name__, case.__module__, case.__doc__
    test.__qualname__ = case.__qualname__
    test.on_rank = case  # type: ignore[attr-defined]
    return test


def has_join() -> bool:
    """True if ranks may make different numbers of steps: not every backend has ``uneven_inputs()``."""
    return type(current_model().training).join is not Training.join


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], text: str = "") -> Iterator[Any]:
    """``pytest.raises`` with a text that has to occur in the message."""
    with pytest.raises(kind) as info:
        yield info
    assert text in str(info.value), f"{text!r} not in {info.value!s}"


@contextmanager
def safe_mode(*classes: Any) -> Iterator[None]:
    """``idist.safe_objects(*classes)`` for a block. The package has no such block: its safe mode stays on."""
    with torch.serialization.safe_globals(list(classes)):
        idist.safe_objects(*classes)
        try:
            yield
        finally:
            safe_objects._mode = None
            os.environ.pop("IGNITE_DIST_SAFE_OBJECTS", None)


class count_collectives(AbstractContextManager["count_collectives"]):
    """Counts the collectives of this rank in a block. Wraps the primitives of the live transport.

    XLA's replicas share a model. Each counts its own calls, through the wrappers that the first has made.

    Attributes:
        count: number of collectives.
        dtypes: those of the tensors that were sent.
    """

    _primitives = (
        *("all_reduce", "reduce_exactly", "all_gather", "gather_bytes", "broadcast", "barrier", "all_to_all"),
        *("fill_rows", "reduce_scatter"),
    )
    _lock = threading.RLock()
    _counting: ClassVar[dict[int, count_collectives]] = {}

    def __enter__(self) -> count_collectives:
        self.count, self._depth = 0, 0
        self.dtypes: set[torch.dtype] = set()
        with self._lock:
            self._transport = current_model().transport
            for name in self._primitives if not self._counting else ():
                setattr(self._transport, name, self._counted(getattr(self._transport, name)))
            self._counting[threading.get_ident()] = self
        return self

    @classmethod
    def _counted(cls, primitive: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            own = cls._counting.get(threading.get_ident())
            if own is None:
                return primitive(*args, **kwargs)
            if own._depth == 0:
                own.count += 1
                own.dtypes.update(one.dtype for one in args[:1] if isinstance(one, torch.Tensor))
            own._depth += 1
            try:
                work = primitive(*args, **kwargs)
                return Completed(work.wait()) if isinstance(work, Steps) else work
            finally:
                own._depth -= 1

        return counted

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            del self._counting[threading.get_ident()]
            for name in self._primitives if not self._counting else ():
                delattr(self._transport, name)
