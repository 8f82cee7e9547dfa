"""Ranks that run out of data at different steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.context.live import current_model

__all__ = ["join"]


@contextmanager
def join(
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Context manager around the steps of ranks that may make different numbers of them.

    A rank that has come to the end of the block takes part in the others' gradient reductions, with zeros,
    until all have come. Then every rank has the same parameters: those of the rank that came last (what an
    optimizer keeps beside them, Adam's moments, is each rank's own from there on, as in torch). In the block
    every other collective of this package raises, because not all ranks would make it. A serial context needs
    none of it; with XLA and with FSDP2 every rank takes part in every step, so they raise on entry.
    For a rank that raises in the block the others wait until it ends, as with torch's ``Join``.

    Args:
        model: what :func:`auto_model` returned.
        optimizer: what :func:`auto_optim` returned.
        divide_by_initial_world_size: the sum of the gradients is divided by the number of all ranks; with
            False by that of the ranks that still have data. Horovod has only True.
        throw_on_early_termination: all ranks raise ``RuntimeError`` as soon as one has no data left. Horovod
            has only False.

    Raises:
        ValueError: the backend does not have it. Nothing was sent.
        RuntimeError: inside of another join().

    Example::

        with idist.join(model, optimizer):
            for batch in loader:  # of another length on each rank
                ...
    """
    live = current_model()
    live.groups.check_not_joining()
    options = {
        "divide_by_initial_world_size": divide_by_initial_world_size,
        "throw_on_early_termination": throw_on_early_termination,
    }
    with live.training.join(model, optimizer, **options) as sources:
        live.groups.is_joining = True
        try:
            yield
        finally:
            live.groups.is_joining = False
    for source in sources:
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], source, live.groups.world)
