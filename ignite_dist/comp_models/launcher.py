"""The interface of a backend's launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite_dist.arguments import keywords_of

__all__ = ["Launcher"]


class Launcher:
    """Starts workers on this machine. This default is for backends that need their own launcher."""

    @classmethod
    def options(cls) -> set[str]:
        """The keywords of :meth:`start` that users may pass."""
        return keywords_of(cls.start) - {"backend", "nproc_per_node"}

    @classmethod
    def check(cls, *, nproc_per_node: int, **options: Any) -> None:
        """Raise, before anything is started, if :meth:`start` would refuse these arguments.

        Raises:
            ValueError: the arguments are incompatible.
        """

    @classmethod
    def start(cls, entry: Callable[[int], Any], *, backend: str, nproc_per_node: int, **options: Any) -> Any:
        """Start ``nproc_per_node`` workers here, each of which calls ``entry(local_rank)``.

        ``entry`` makes the context in the worker and ends the context; ``entry`` can be pickled. Returns the
        list of results by local rank; with the option ``join=False`` an object that has ``join()``.

        Raises:
            ValueError: this backend starts no workers.
        """
        raise ValueError(f"Backend {backend!r} starts no workers: start the ranks with its own launcher.")
