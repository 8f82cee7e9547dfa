"""Horovod's private names. No other file of the package uses Horovod's private names.

:class:`~ignite_dist.internals.private_names.PrivateName` explains the fields. Only :func:`check` imports
Horovod.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, MutableMapping
from operator import attrgetter
from typing import Any

from ignite_dist.internals.private_names import PrivateName, missing

_LAST = "0.28.1"  # the last release of Horovod; the package is not tested with other releases

_NAMES = (
    (
        "horovod.torch.mpi_ops._handle_map",
        "Each hvd.init() makes a new object. No public function shows that Horovod was shut down and "
        "initialized again.",
        "none: a Horovod context raises AttributeError",
    ),
    (
        "horovod.torch.mpi_ops._basics",
        "Access to Horovod's C library. The library answers without the GIL if Horovod is running. A public "
        "function keeps the GIL while it waits for a lock whose owner may need the GIL. Also, a forked child "
        "removes the shutdown() of this object from the atexit handlers.",
        "none: a Horovod context raises AttributeError",
    ),
    (
        "horovod.torch.mpi_ops._basics._get_process_set_ids_and_ranks",
        "No public function lists the process sets.",
        "none: a new group raises AttributeError",
    ),
    (
        "horovod.torch.mpi_ops._basics._add_process_set_impl",
        "Raises on this rank, without waiting, if the process set cannot be added. hvd.add_process_set() "
        "first waits for all ranks.",
        "none: a new group raises AttributeError",
    ),
    *(
        (
            f"horovod.torch.optimizer.{optimizer}.{name}",
            "Horovod's own optimizer has no public function that stops it from sending gradients.",
            fallback,
        )
        for optimizer in ("_DistributedOptimizer", "_DistributedAdasumOptimizer")
        for name, fallback in (
            ("_allreduce_delay", "accumulation with Horovod's own optimizer raises ValueError"),
            ("_handles", "none: accumulation with Horovod's own optimizer raises AttributeError"),
        )
    ),
)
PRIVATE_NAMES = tuple(PrivateName(*one, since=_LAST) for one in _NAMES)


def check() -> list[PrivateName]:
    """Return the entries of :data:`PRIVATE_NAMES` that the installed Horovod lacks. Imports Horovod."""
    return missing(PRIVATE_NAMES)


init_mark_of: Callable[[Any], object] = attrgetter("_handle_map")
"""Return the object in ``hvd.mpi_ops`` that each ``hvd.init()`` replaces."""


def native_process_set_ranks(mpi_ops: Any) -> Callable[..., int]:
    """Return Horovod's C function that writes the ranks of a process set. A negative result is an error."""
    function: Callable[..., int] = mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks
    return function


def known_process_sets(mpi_ops: Any) -> dict[int, list[int]]:
    """Return the ranks of each process set by its id. Not thread-safe: Horovod takes no lock."""
    known: dict[int, list[int]] = mpi_ops._basics._get_process_set_ids_and_ranks()
    return known


def add_process_set(mpi_ops: Any, ranks: Iterable[int]) -> None:
    """Add a process set without waiting for the other ranks."""
    mpi_ops._basics._add_process_set_impl(ranks)


def stop_waiting_at_exit(mpi_ops: Any) -> None:
    """Remove Horovod's ``shutdown`` from the ``atexit`` handlers."""
    atexit.unregister(mpi_ops._basics.shutdown)


def counts_passes(optimizer: Any) -> bool:
    """True for Horovod's own optimizers, which count backward passes to decide when to send gradients."""
    return hasattr(optimizer, "_allreduce_delay")


def passes_until_sent(optimizer: Any) -> MutableMapping[Any, int]:
    """Number of backward passes left before Horovod's own optimizer sends the gradient, by parameter."""
    left: MutableMapping[Any, int] = optimizer._allreduce_delay
    return left


def recorded_calls(optimizer: Any) -> MutableMapping[Any, tuple[Any, Any]]:
    """Pairs (handle, context) by parameter. The handle is None until the optimizer sends the gradient."""
    recorded: MutableMapping[Any, tuple[Any, Any]] = optimizer._handles
    return recorded
