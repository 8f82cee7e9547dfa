"""Sources of functions that are in no file (cells of a notebook), for the tracebacks of workers."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ignite_dist.values import serialization


@dataclass(frozen=True)
class _CallWithSources:
    payload: bytes
    sources: dict[str, list[str]]  # lines by the file name in the code objects

    def __call__(self, local_rank: int) -> Any:
        for name, lines in self.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        return serialization.decode(self.payload)(local_rank)


def encode_with_sources(call: Callable[..., Any]) -> bytes:
    """``call`` as bytes, pickled by value, with the source lines of its functions that are in no file.

    Raises:
        TypeError: cloudpickle cannot serialise ``call``.
    """
    payload = serialization.encode_by_value(call)
    sources = {
        name: linecache.getlines(name)
        for name in list(linecache.cache)
        if not os.path.exists(name) and name.encode("utf-8", "surrogatepass") in payload
    }
    return serialization.encode(_CallWithSources(payload, sources)) if sources else payload
