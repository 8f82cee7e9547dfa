"""Python's garbage collector while this package is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in this block, which imports modules.

    A collection looks at every object that imports have made, and they make hardly any garbage. The collector
    is on afterwards if it was on before, also if an imported module has turned it off.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
