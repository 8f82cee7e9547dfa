"""Run a function on ranks of gloo, or alone with its warnings."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import ignite_dist as idist

SIZE = 12


def on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    results: list[Any] = idist.spawn("gloo", function, args, nproc_per_node=world_size)
    return results


def warned(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    for one in caught:
        assert "idist." in linecache.getline(one.filename, one.lineno), "it points at the call"
    return result, [f"{one.filename.rpartition('/')[2]}: {one.message}" for one in caught]
