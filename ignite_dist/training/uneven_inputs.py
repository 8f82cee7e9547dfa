"""Support ranks that run out of data at different steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.coordination import Caller, check_same
from ignite_dist.context.live import current_model


@contextmanager
def uneven_inputs(
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Context manager: ranks may make different numbers of steps in the block.

    A rank that has left the block contributes zeros to the other ranks' gradient reductions until all ranks
    have left the block. Then every rank takes the parameters of the last rank. As in torch, optimizer
    state (the moments of Adam) is not synchronised. In the block every other collective of this package
    raises, because not all ranks would call it, and so does a second backward pass of a step (over gloo and
    NCCL). In a serial context the block changes nothing. XLA and FSDP2
    raise on entry, because there every rank must take part in every step. If a rank raises in the block, the
    other ranks wait until that rank's process ends, as with torch's ``Join``.

    Args:
        model: the result of :func:`auto_model`.
        optimizer: the result of :func:`auto_optim`.
        divide_by_initial_world_size: divide the sum of the gradients by the world size; False divides by the
            number of ranks that still have data. Horovod supports only True.
        throw_on_early_termination: all ranks raise ``RuntimeError`` as soon as one rank has no data left.
            Horovod supports only False.

    Raises:
        CollectiveMismatchError: the ranks pass different options (Horovod has only the defaults), or some
            make another call; raised on every rank.
        ValueError: the backend does not support the request. Nothing was sent.
        RuntimeError: called inside of another ``uneven_inputs()``.

    Example::

        with idist.uneven_inputs(model, optimizer):
            for batch in loader:  # of a different length on each rank
                train_step(batch)
    """
    live = current_model()
    live.groups.check_not_joining()
    options = {
        "divide_by_initial_world_size": divide_by_initial_world_size,
        "throw_on_early_termination": throw_on_early_termination,
    }
    with live.training.join(model, optimizer, **options) as sources:
        group = live.training.gradient_group(model, [] if optimizer is None else [optimizer])
        texts = [f"{name}={bool(one)}" for name, one in options.items()]
        check_same(live, [(group, texts)], Caller("uneven_inputs"), "the same options on every rank")
        live.groups.is_joining = True
        try:
            yield
        finally:
            live.groups.is_joining = False
    for source in sources:
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], source, live.groups.world)
