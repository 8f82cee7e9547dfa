"""What starts the workers of a backend on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ignite_dist.arguments import keywords_of

if TYPE_CHECKING:
    pass

__all__ = ["Launcher"]


class Launcher:
    """Starts workers on this machine. The default is for backends whose ranks somebody else starts."""

    @classmethod
    def options(cls) -> set[str]:
        """The keywords of :meth:`start` that are the user's to give."""
        return keywords_of(cls.start) - {"backend", "nproc_per_node"}

    @classmethod
    def check(cls, *, nproc_per_node: int, **options: Any) -> None:
        """Refuse, before anything is started, what :meth:`start` would.

        Raises:
            ValueError: the arguments do not go together.
        """

    @classmethod
    def start(cls, entry: Callable[[int], Any], *, backend: str, nproc_per_node: int, **options: Any) -> Any:
        """Start ``nproc_per_node`` workers here, each of which calls ``entry(local_rank)``.

        ``entry`` makes the context in the worker and ends it; it can be pickled. Returns the list of the
        results by local rank, or a handle with ``join()`` where ``join=False`` was asked for.

        Raises:
            ValueError: this backend starts no workers.
        """
        raise ValueError(f"Backend {backend!r} starts no workers: start the ranks with its own launcher.")
