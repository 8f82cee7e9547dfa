"""Every rank's value, on every rank of a group."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import check_blocking
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.collectives.tensors import gather_rows
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.tracing import traced, traced_as

__all__ = ["all_gather", "all_gather_ragged", "all_gather_tensors_with_shapes"]


_Object = TypeVar("_Object")


@traced
def _all_gather_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_gather(*args, **kwargs)


@overload
def all_gather(  # type: ignore[overload-overlap]  # a tensor is an object, too
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
def all_gather(
    tensor: Any,
    group: Any = None,
    *,
    out: Tensor | None = None,
    sync_grads: bool = False,
    async_op: bool = False,
) -> Any:
    """Every rank's value, on every rank of the group, all of which call it.

    Args:
        tensor: a tensor of the same shape ``(*S)``, dtype and device type on every rank; or anything else
            that can be pickled, of any type and size on each.
        group: as in :func:`all_reduce`. A rank outside gets its value back unchanged.
        out: a contiguous tensor of the result's shape and dtype, filled and returned. Worth it in a loop:
            a fresh result costs page faults. It may hold ``tensor`` itself.
        sync_grads: the result has a gradient: each rank's tensor gets that of the sum of all ranks' losses.
            For a contrastive loss over the whole batch. The backward pass is a collective too, so every rank
            of the group makes it; it can be differentiated again. In a ``DistributedDataParallel`` of which
            ranks use different parameters pass ``group=new_group(range(get_world_size()))``: in the world's
            own group it could come between DDP's collectives, elsewhere on each rank.
        async_op: True returns a :class:`Work` at once, whose ``wait()`` gives the result. Not with
            ``sync_grads``.

    Returns:
        For a tensor ``(*S) -> (group_size * S[0], *S[1:])``, and 0-d ``-> (group_size,)``, in rank order,
        with a gradient only if ``sync_grads``. For anything else a list with one entry per rank; a small
        object costs one collective, a large one two.

    Raises:
        TypeError: an object that cannot be pickled; ``sync_grads`` without a floating-point tensor. Nothing
            was sent.
        ValueError: an unknown group, or an ``out`` that does not fit; ``sync_grads`` with ``out``, or with
            XLA and a part of the ranks. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, an object of a type that is not registered.

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
            raise ValueError("all_gather with sync_grads=True returns a new tensor: leave out= out.")
        check_blocking("all_gather", async_op)
        autograd.check_differentiable("all_gather", model, tensor, members)
    shape = _gathered_shape(tensor, members)
    if out is not None and is_member(model, members):
        _check_out(out, tensor, shape)

    def begin() -> Work:
        if sync_grads:
            return Completed(autograd.gathered(model, tensor, members).view(shape))
        rows = gather_rows(model, tensor, members, out=out)
        return rows.then(lambda gathered: gathered.view(shape) if out is None else out)

    return perform(
        model,
        "all_gather",
        members,
        begin,
        outside=tensor,
        value=tensor,
        take_part=lambda: Completed(None) if sync_grads else gather_rows(model, tensor, members),
        async_op=async_op,
    )


def _gather_objects(
    model: ComputationModel, value: Any, group: Any, out: Any, sync_grads: bool, async_op: bool
) -> Any:
    if out is not None:
        raise TypeError(f"out= holds gathered tensors; got a value of type {type(value).__name__}.")
    members = model.groups.resolve(group)
    if sync_grads:
        autograd.check_differentiable("all_gather", model, value, members)  # raises: it is no tensor
    payload = model.objects.packed(value) if is_member(model, members) else b""
    return perform(
        model,
        "all_gather",
        members,
        lambda: Steps(lambda: model.objects.gather_packed(payload, members)),
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


def all_gather_ragged(tensor: Tensor, group: Any = None, *, async_op: bool = False) -> Any:
    """Tensors of different shapes from every rank, on every rank of the group, all of which call it.

    Args:
        tensor: any shape, of any number of dimensions; the same dtype on every rank.
        group: as in :func:`all_reduce`. A rank outside gets ``[tensor]``.
        async_op: as in :func:`all_gather`.

    Returns:
        One tensor per rank, in rank order, on this rank's device. Two collectives: the shapes, then the data.

    Raises:
        TypeError: not a tensor; nothing was sent.
        CollectiveMismatchError: the dtypes differ; raised on every rank.
    """
    model = current_model()
    check_dense("all_gather_ragged", tensor)
    members = model.groups.resolve(group)
    return perform(
        model,
        "all_gather_ragged",
        members,
        lambda: Steps(lambda: _gather_ragged(model, tensor, members)),
        outside=[tensor],
        value=tensor.dtype,
        take_part=lambda: Steps(lambda: _gather_ragged(model, tensor.new_empty(0), members)),
        async_op=async_op,
    )


def _gather_ragged(model: ComputationModel, tensor: Tensor, members: Group) -> list[Tensor]:
    layouts = model.objects.gather((tensor.dtype, tuple(tensor.shape)), members)
    if len({dtype for dtype, _ in layouts}) > 1:
        described = ", ".join(
            f"rank {r}: {dtype}" for r, (dtype, _) in zip(members.ranks, layouts, strict=True)
        )
        raise CollectiveMismatchError(f"all_gather_ragged needs one dtype on every rank, got {described}.")
    gathered: list[Tensor] = _gather_shapes(model, tensor, [shape for _, shape in layouts], members).wait()
    return gathered


def all_gather_tensors_with_shapes(
    tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None
) -> list[Tensor]:
    """:func:`all_gather_ragged` where the shapes are known already, for one collective instead of two.

    Args:
        tensor: of shape ``shapes[i]`` on the ``i``-th rank of the group; the same dtype on every rank.
        shapes: one shape per rank of the group, the same list on every rank.
        group: as in :func:`all_reduce`. A rank outside gets ``[tensor]``.

    Returns:
        One tensor per rank, in rank order, on this rank's device.

    Raises:
        ValueError: not one shape per rank, or not this tensor's shape in this rank's place. Nothing was sent.
    """
    model = current_model()
    check_dense("all_gather_tensors_with_shapes", tensor)
    members = model.groups.resolve(group)
    known = [tuple(index(size) for size in shape) for shape in shapes]
    described = ""
    if is_member(model, members):
        if len(known) != len(members.ranks):
            raise ValueError(
                f"shapes needs one shape per rank: {len(members.ranks)} ranks, {len(known)} shapes."
            )
        own = known[members.ranks.index(model.get_rank())]
        if own != tuple(tensor.shape):
            raise ValueError(f"shapes says {own} for this rank, but its tensor is {tuple(tensor.shape)}.")
        described = f"{tensor.dtype} {known}"
    found: list[Tensor] = perform(
        model,
        "all_gather_tensors_with_shapes",
        members,
        lambda: _gather_shapes(model, tensor, known, members),
        outside=[tensor],
        value=described,
        take_part=lambda: _gather_shapes(model, tensor.new_empty(0), known, members),
    )
    return found


def _gather_shapes(
    model: ComputationModel, tensor: Tensor, shapes: Sequence[tuple[int, ...]], group: Group
) -> Work:
    sizes = [prod(shape) for shape in shapes]
    flat = tensor.detach().reshape(-1)
    padded = (
        torch.cat([flat, flat.new_empty(max(sizes) - flat.numel())]) if max(sizes) > flat.numel() else flat
    )

    def cut(rows: Tensor) -> list[Tensor]:
        return [row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    return gather_rows(model, padded, group).then(cut)


def _gathered_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    return (len(group.ranks) * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])


def _check_out(out: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> None:
    expected = (shape, tensor.dtype, tensor.device)
    if (tuple(out.shape), out.dtype, out.device) != expected or not out.is_contiguous():
        raise ValueError(
            f"out= must be a contiguous {tensor.dtype} tensor of shape {shape} on {tensor.device}, got "
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
            f"{'' if out.is_contiguous() else ', not contiguous'}."
        )
