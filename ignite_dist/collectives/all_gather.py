"""All-gather of tensors and objects."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import check_not_async, check_out
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.collectives.primitives import gather_rows
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.tracing import traced, traced_as

_Object = TypeVar("_Object")


@traced
def _all_gather_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_gather(*args, **kwargs)


@overload
def all_gather(  # type: ignore[overload-overlap]  # Tensor also matches _Object
    tensor: Tensor,
    group: Any = ...,
    *,
    out: Tensor | None = ...,
    sync_grads: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_gather(tensor: _Object, group: Any = ..., *, async_op: Literal[False] = ...) -> list[_Object]: ...


@overload
def all_gather(
    tensor: Any, group: Any = ..., *, out: Tensor | None = ..., async_op: Literal[True]
) -> Work: ...


@traced_as(_all_gather_in_a_graph)
@counts_interrupts
def all_gather(
    tensor: Any,
    group: Any = None,
    *,
    out: Tensor | None = None,
    sync_grads: bool = False,
    async_op: bool = False,
) -> Any:
    """Gather the values of all ranks on every rank. Every rank of the group must call this function.

    Args:
        tensor: a tensor of the same shape ``(*S)``, dtype and device type on every rank; or a picklable
            object, of any type and size on each rank.
        group: as in :func:`all_reduce`. A rank outside the group gets its own value back.
        out: a contiguous tensor with the shape and dtype of the result; it is filled and returned. In a loop,
            ``out`` avoids the page faults of a new result. It may share memory with ``tensor``.
        sync_grads: True gives the result an autograd graph. The gradient of ``tensor`` is the gradient of the
            sum of all ranks' losses, as a contrastive loss over the whole batch needs it. The backward pass
            is a collective, so every rank of the group must run it. Double backward works. If the
            ranks of a ``DistributedDataParallel`` use different parameters, pass
            ``group=new_group(range(get_world_size()))``: in the default group, the order of this collective
            and DDP's own collectives could differ between ranks.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the result. Not
            allowed with ``sync_grads``.

    Returns:
        For a tensor: ``(*S) -> (group_size * S[0], *S[1:])``, or ``() -> (group_size,)``, in rank order. For
        an object: a list with one entry per rank. A small object takes one collective, a large object two.
        The large tensors and arrays of an object share one block of memory: ``clone()`` one to keep it alone.

    Raises:
        TypeError: the object cannot be pickled, or ``sync_grads`` got no floating-point tensor. Nothing was
            sent.
        ValueError: the group is unknown, ``out`` does not fit, or ``sync_grads`` is combined with ``out``,
            with ``async_op``, or on XLA with a group of only some ranks. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, the type of an object is not registered.

    Example::

        idist.all_gather(torch.tensor([rank]))  # on two ranks: tensor([0, 1]) on both
        idist.all_gather({"rank": rank})  # [{"rank": 0}, {"rank": 1}] on both
    """
    model = current_model()
    if not isinstance(tensor, Tensor):
        return _gather_objects(model, tensor, group, out, sync_grads, async_op)
    check_dense("all_gather", tensor)
    members = model.groups.resolve(group)
    if sync_grads:
        if out is not None:
            raise ValueError("all_gather with sync_grads=True returns a new tensor: do not pass out=.")
        check_not_async("all_gather", async_op)
        autograd.check_differentiable("all_gather", model, tensor, members)
    shape = gathered_shape(tensor, members)
    if out is not None and is_member(model, members):
        check_out(out, tensor, shape)

    def begin(members: Group) -> Work:
        if sync_grads:
            return Completed(autograd.gather_with_grad(model, tensor, members).view(shape))
        rows = gather_rows(model, tensor, members, out=out)
        return rows.then(lambda gathered: gathered.view(shape) if out is None else out)

    return perform(
        model,
        "all_gather",
        members,
        begin,
        outside=tensor,
        value=tensor,
        op="sync_grads=True" if sync_grads else "",
        begin_outside=lambda members: Completed(None) if sync_grads else gather_rows(model, tensor, members),
        async_op=async_op,
    )


def _gather_objects(
    model: ComputationModel, value: Any, group: Any, out: Any, sync_grads: bool, async_op: bool
) -> Any:
    if out is not None:
        raise TypeError(f"out= is for tensors only; got a value of type {type(value).__name__}.")
    members = model.groups.resolve(group)
    if sync_grads:
        autograd.check_differentiable("all_gather", model, value, members)  # raises TypeError
    payload = model.objects.packed(value) if is_member(model, members) else b""
    return perform(
        model,
        "all_gather",
        members,
        lambda members: Steps(lambda: model.objects.gather_packed(payload, members)),
        outside=value,
        value="an object",
        async_op=async_op,
    )


@overload
def all_gather_ragged(
    tensor: Tensor, group: Any = ..., *, async_op: Literal[False] = ...
) -> list[Tensor]: ...


@overload
def all_gather_ragged(tensor: Tensor, group: Any = ..., *, async_op: Literal[True]) -> Work: ...


@counts_interrupts
def all_gather_ragged(tensor: Tensor, group: Any = None, *, async_op: bool = False) -> Any:
    """Gather tensors of different shapes. Every rank of the group must call this function.

    Args:
        tensor: any shape and number of dimensions; the same dtype on every rank.
        group: as in :func:`all_reduce`. A rank outside the group gets ``[tensor]``.
        async_op: as in :func:`all_gather`.

    Returns:
        One tensor per rank, in rank order, on this rank's device. The call makes two collectives: one for the
        shapes and one for the data.

    Raises:
        TypeError: ``tensor`` is not a dense tensor. Nothing was sent.
        CollectiveMismatchError: the dtypes differ. Raised on every rank.
    """
    model = current_model()
    check_dense("all_gather_ragged", tensor)
    members = model.groups.resolve(group)
    return perform(
        model,
        "all_gather_ragged",
        members,
        lambda members: Steps(lambda: _gather_ragged(model, tensor, members)),
        outside=[tensor],
        value=tensor.dtype,
        begin_outside=lambda members: Steps(lambda: _gather_ragged(model, tensor.new_empty(0), members)),
        async_op=async_op,
    )


def _gather_ragged(model: ComputationModel, tensor: Tensor, members: Group) -> list[Tensor]:
    layouts = model.objects.gather((tensor.dtype, tuple(tensor.shape)), members)
    if len({dtype for dtype, _ in layouts}) > 1:
        dtypes = ", ".join(f"rank {r}: {dtype}" for r, (dtype, _) in zip(members.ranks, layouts, strict=True))
        raise CollectiveMismatchError(f"all_gather_ragged needs the same dtype on every rank, got {dtypes}.")
    shapes = [shape for _, shape in layouts]
    gathered: list[Tensor] = _gather_with_shapes(model, tensor, shapes, members).wait()
    return gathered


@counts_interrupts
def all_gather_tensors_with_shapes(
    tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None
) -> list[Tensor]:
    """:func:`all_gather_ragged` with given shapes. It needs one collective instead of two.

    Args:
        tensor: of shape ``shapes[i]`` on the ``i``-th rank of the group; the same dtype on every rank.
        shapes: one shape per rank of the group, the same list on every rank.
        group: as in :func:`all_reduce`. A rank outside the group gets ``[tensor]``.

    Returns:
        One tensor per rank, in rank order, on this rank's device.

    Raises:
        ValueError: the number of shapes is wrong, or this rank's shape does not match ``tensor``. Nothing was
            sent.
    """
    model = current_model()
    check_dense("all_gather_tensors_with_shapes", tensor)
    members = model.groups.resolve(group)
    group_shapes = [tuple(index(size) for size in shape) for shape in shapes]
    description = ""
    if is_member(model, members):
        if len(group_shapes) != len(members.ranks):
            raise ValueError(
                f"shapes needs one shape per rank: {len(members.ranks)} ranks, {len(group_shapes)} shapes."
            )
        own_shape = group_shapes[members.ranks.index(model.get_rank())]
        if own_shape != tuple(tensor.shape):
            raise ValueError(f"shapes has {own_shape} for this rank, got a tensor of {tuple(tensor.shape)}.")
        description = f"{tensor.dtype} {group_shapes}"
    gathered: list[Tensor] = perform(
        model,
        "all_gather_tensors_with_shapes",
        members,
        lambda members: _gather_with_shapes(model, tensor, group_shapes, members),
        outside=[tensor],
        value=description,
        begin_outside=lambda members: _gather_with_shapes(model, tensor.new_empty(0), group_shapes, members),
    )
    return gathered


def _gather_with_shapes(
    model: ComputationModel, tensor: Tensor, shapes: Sequence[tuple[int, ...]], group: Group
) -> Work:
    sizes = [prod(shape) for shape in shapes]
    flat = tensor.detach().reshape(-1)
    padded = (
        torch.cat([flat, flat.new_empty(max(sizes) - flat.numel())]) if max(sizes) > flat.numel() else flat
    )

    def unpad(rows: Tensor) -> list[Tensor]:
        # The tensors that iteration or torch.split() gives cannot be changed in place.
        split = torch.unsafe_split_with_sizes(rows.view(-1), [rows.shape[1]] * len(rows))
        return [row[:size].view(shape) for row, size, shape in zip(split, sizes, shapes, strict=True)]

    return gather_rows(model, padded, group).then(unpad)


def gathered_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """The shape of the gathered ``tensor``."""
    return (len(group.ranks) * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
