"""The interface of a backend's launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ignite_dist.environments import devices
from ignite_dist.internals.arguments import keywords_of


class Launcher:
    """Starts workers on this machine. This default starts none: users start the ranks in another way."""

    restarts_several_nodes: ClassVar[bool] = False
    """True if ``max_restarts`` works with ``nnodes > 1``: all nodes then make the same attempts."""

    @classmethod
    def options(cls) -> set[str]:
        """The keywords of :meth:`start` that users may pass."""
        return keywords_of(cls.start) - {"backend", "nproc_per_node", "attempts"}

    @classmethod
    def check(cls, *, nproc_per_node: int, **options: Any) -> None:
        """Raise, before anything is started, if :meth:`start` would refuse these arguments.

        Raises:
            ValueError: the arguments are incompatible.
        """

    @classmethod
    def auto_nproc_per_node(cls) -> int:
        """Number of workers for ``nproc_per_node="auto"``."""
        return devices.auto_nproc_per_node()

    @classmethod
    def start(cls, entry: Callable[[int], Any], *, backend: str, nproc_per_node: int, **options: Any) -> Any:
        """Start ``nproc_per_node`` workers on this machine. Each worker calls ``entry(local_rank)``.

        ``entry`` makes the worker's context and ends it; ``entry`` can be pickled. Returns the results as a
        list by local rank. With the option ``join=False``, returns an object with the method ``join()``. A
        launcher that connects to other nodes has the keyword ``attempts``, a ``workers.attempts.Attempts``.

        Raises:
            ValueError: this backend starts no workers.
        """
        raise ValueError(f"Backend {backend!r} starts no workers: start the ranks with its own launcher.")
