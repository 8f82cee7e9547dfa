"""Functions that the tests of spawned workers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ignite_dist as idist

FAILURE_SECONDS = 30  # a start of Python on a busy machine included


def spawn(function: Callable[..., Any], *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> Any:
    return idist.spawn("gloo", function, args, nproc_per_node=nproc_per_node, **kwargs)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def is_daemon(_: int) -> bool:
    import multiprocessing

    return multiprocessing.current_process().daemon


def who(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    assert idist.all_reduce(1) == idist.get_world_size()
    return {
        "local rank": local_rank,
        "rank": idist.get_rank(),
        "world size": idist.get_world_size(),
        "backend": idist.backend(),
        "args": args,
        "kwargs": kwargs,
    }
