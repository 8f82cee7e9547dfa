"""All-to-all: every rank sends a part to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import check_divisible, check_length, check_not_async, check_out
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.messages import NOTHING, begin_messages, encode
from ignite_dist.collectives.path import is_member, perform, takes_part
from ignite_dist.collectives.primitives import exchange_tensor
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.transport import Sizes
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.tracing import traced, traced_as

_Object = TypeVar("_Object")


@traced
def _all_to_all_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_to_all(*args, **kwargs)


@overload
def all_to_all(
    x: Tensor,
    group: Any = ...,
    out: Tensor | None = ...,
    *,
    sync_grads: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_to_all(
    x: Sequence[_Object],
    group: Any = ...,
    *,
    sync_grads: bool = ...,
    async_op: Literal[False] = ...,
) -> list[_Object]: ...


@overload
def all_to_all(x: Any, group: Any = ..., out: Tensor | None = ..., *, async_op: Literal[True]) -> Work: ...


@traced_as(_all_to_all_in_a_graph)
@counts_interrupts
def all_to_all(
    x: Any, group: Any = None, out: Tensor | None = None, *, sync_grads: bool = False, async_op: bool = False
) -> Any:
    """Send a part to each rank, and get a part from each rank. Every rank of the group must call this.

    Args:
        x: a tensor of shape ``(group_size * n, *S)``, the same on every rank: rows ``i * n`` to
            ``(i + 1) * n`` go to the ``i``-th rank of the group. Or a list or tuple with one entry per rank:
            tensors of any shapes and dtypes, or picklable objects.
        group: as in :func:`all_reduce`. A rank outside the group gets ``x`` back.
        out: for a tensor: a contiguous tensor with the shape and dtype of ``x``; it is filled and returned.
        sync_grads: True gives the result an autograd graph, as in :func:`all_gather`: each part's gradient
            goes back to the rank that sent the part. A list must then contain floating-point tensors of one
            dtype on all ranks.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the result. Do
            not change the tensors before ``wait()`` has returned. Not allowed with ``sync_grads``.

    Returns:
        For a tensor: the parts that the ranks sent to this rank, in rank order, with the shape of ``x``. For
        a list: a list with the entry of each rank for this rank. Tensors are new, on the CPU if their sender
        has them there, else on :func:`device`. Small entries take one collective, large entries two.

    Raises:
        TypeError: ``x`` is neither a tensor nor a list, or an entry cannot be sent. Nothing was sent.
        ValueError: the length of the list is not the size of the group, the first dimension is not a multiple
            of it, or ``out`` does not fit. Nothing was sent.

    Example::

        idist.all_to_all(torch.arange(2) + 2 * rank)  # tensor([0, 2]) on rank 0, tensor([1, 3]) on rank 1
        idist.all_to_all([f"from {rank} to {other}" for other in range(world_size)])
    """
    model = current_model()
    members = model.groups.resolve(group)
    if sync_grads:
        check_not_async("all_to_all", async_op)
        if out is not None:
            raise ValueError("all_to_all with sync_grads=True returns a new tensor: do not pass out=.")
    if not takes_part(model, members):
        return Completed(x) if async_op else x
    if isinstance(x, Tensor):
        return _exchange_rows(model, x, members, out, sync_grads, async_op)
    if out is not None:
        raise TypeError(f"out= is for tensors only; got a value of type {type(x).__name__}.")
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"all_to_all takes a tensor or a list, got {type(x).__name__}.")
    entries = x if is_member(model, members) else [NOTHING] * len(members.ranks)
    check_length("all_to_all", entries, members)
    if sync_grads:
        return _exchange_with_grad(model, x, members)
    messages = [encode(model, "all_to_all", entry) for entry in entries]
    return perform(
        model,
        "all_to_all",
        members,
        lambda members: begin_messages(model, messages, members),
        outside=x,
        value="a list",
        async_op=async_op,
    )


def _exchange_rows(
    model: ComputationModel, x: Tensor, members: Group, out: Tensor | None, sync_grads: bool, async_op: bool
) -> Any:
    check_dense("all_to_all", x)
    check_divisible("all_to_all", x, members)
    if out is not None:
        check_out(out, x, tuple(x.shape))
    if sync_grads:
        autograd.check_differentiable("all_to_all", model, x, members)

    def begin(members: Group) -> Work:
        if sync_grads:
            return Completed(autograd.exchange_with_grad(model, x, members).view(x.shape))
        work = exchange_tensor(model, x, members, out=out)
        return work if out is not None else work.then(lambda parts: parts.view(x.shape))

    return perform(
        model,
        "all_to_all",
        members,
        begin,
        outside=x,
        value=x,
        op="sync_grads=True" if sync_grads else "",
        begin_outside=lambda members: Completed(None) if sync_grads else exchange_tensor(model, x, members),
        async_op=async_op,
    )


def _exchange_with_grad(model: ComputationModel, tensors: Sequence[Any], members: Group) -> Any:
    """Exchange shapes, then all elements in one collective that autograd knows."""
    for tensor in tensors:
        autograd.check_differentiable("all_to_all", model, tensor, members)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise TypeError("all_to_all with sync_grads=True takes tensors of one dtype on one device.")
    messages = [encode(model, "all_to_all", tuple(tensor.shape)) for tensor in tensors]

    def run(members: Group) -> list[Tensor]:
        shapes = begin_messages(model, messages, members).wait()
        sent = [tensor.numel() for tensor in tensors]
        received = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = autograd.exchange_with_grad(model, flat, members, Sizes(sent, received))
        split = torch.unsafe_split_with_sizes(parts, received)  # torch.split() forbids changes in place
        return [part.view(shape) for part, shape in zip(split, shapes, strict=True)]

    return perform(
        model,
        "all_to_all",
        members,
        lambda members: Steps(lambda: run(members)),
        outside=tensors,
        value="a list",
        op="sync_grads=True",
    )
