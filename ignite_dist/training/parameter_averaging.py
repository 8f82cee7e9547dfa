"""Average the parameters of a model over the ranks (local SGD)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from ignite_dist.collectives.arguments import copy_of
from ignite_dist.collectives.buckets import average_tensors, broadcast_tensors
from ignite_dist.collectives.checks import check_dense, check_writable, is_sharded
from ignite_dist.collectives.interrupts import counts_interrupts, one_call
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.arguments import check_module
from ignite_dist.internals.ranks import describe_by_rank
from ignite_dist.training.wrapped_models import unwrap_model


@counts_interrupts
@one_call
def average_parameters(model: Module, group: Any = None) -> None:
    """Replace the parameters of ``model`` by their means over the ranks of a group. Every rank calls this.

    For local SGD: each rank makes several steps with its own gradients, and then the models are averaged.
    Afterwards the models of all ranks are equal. Buffers count too: floating-point and complex ones become
    their means. Parameters and buffers of other dtypes (a count of batches) take the values of the group's
    first rank. The state of the optimizer stays each rank's own.

    Use a module that :func:`auto_model` has not adapted, or steps inside of :func:`no_sync`: otherwise the
    gradients, and so the parameters, are the same on every rank already. The cost is one small gather of
    objects, and one collective per 16 MB.

    Args:
        model: any module with whole parameters, wrapped or not. Change nothing else meanwhile.
        group: as in :func:`all_reduce`. On a rank outside the group nothing changes.

    Raises:
        TypeError: ``model`` is not a module, or a parameter is a ``DTensor`` (FSDP2), is on the meta device,
            or has no dense memory. Nothing was sent.
        ValueError: ``group`` is not a group, or the elements of a parameter share memory. Nothing was sent.
        CollectiveMismatchError: names, shapes or dtypes differ between ranks; raised on every rank. Nothing
            was changed.
        RuntimeError: called inside of :func:`uneven_inputs`.

    Example::

        model = Net().to(idist.device())  # not auto_model
        for number, batch in enumerate(loader):
            step(model, batch)
            if number % 16 == 15:
                idist.average_parameters(model)
    """
    check_module("average_parameters", model)
    live = current_model()
    inner = unwrap_model(model)
    named = dict([*inner.named_parameters(), *inner.named_buffers()])
    for name, tensor in named.items():
        _check(name, tensor)
    members = live.groups.resolve(group)
    layout = zlib.crc32(repr([(name, value.dtype, value.shape) for name, value in named.items()]).encode())
    tensors = list(named.values())
    perform(
        live,
        "average_parameters",
        members,
        lambda members: Steps(lambda: _average(live, tensors, layout, members)),
        outside=None,
        begin_outside=lambda members: Steps(
            lambda: _average(live, list(map(copy_of, tensors)), layout, members)
        ),
    )


def _check(name: str, tensor: Tensor) -> None:
    if is_sharded(tensor):
        raise TypeError(
            f"average_parameters takes a model with whole parameters on each rank, but {name} is a DTensor, "
            "sharded over the ranks. FSDP2 already keeps one model for all ranks: do not average it."
        )
    check_dense("average_parameters", tensor)
    check_writable("average_parameters", tensor)


def _average(live: ComputationModel, tensors: Sequence[Tensor], layout: int, group: Group) -> None:
    own = layout, len(tensors), sum(tensor.numel() for tensor in tensors)
    rows: list[Any] = live.objects.gather(own, group)
    if any(row != rows[0] for row in rows):
        sizes = [f"{num_tensors} tensors with {numel} elements" for _, num_tensors, numel in rows]
        raise CollectiveMismatchError(
            "The ranks called average_parameters with different models. The names, shapes or dtypes of the "
            f"parameters and buffers differ ({describe_by_rank(group.ranks, sizes)})."
        )
    average_tensors(live, [tensor for tensor in tensors if _has_mean(tensor)], group)
    if others := [tensor for tensor in tensors if not _has_mean(tensor)]:
        broadcast_tensors(live, others, group.ranks[0], group)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
