"""Reductions whose result is on one rank, or in parts on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import (
    check_divisible,
    check_length,
    check_not_async,
    check_out,
    check_root,
    copy_of,
)
from ignite_dist.collectives.checks import check_dense, check_writable
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import perform, takes_part
from ignite_dist.collectives.primitives import plan_reduction, reduce_scatter_tensor, reduce_tensor
from ignite_dist.collectives.sending import fill_from
from ignite_dist.collectives.tree_reduction import reduce_tree
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import as_int
from ignite_dist.internals.tracing import traced, traced_as
from ignite_dist.values import reduce_ops
from ignite_dist.values.layouts import describe_layout

_Value = TypeVar("_Value")


@overload
def reduce(
    tensor: _Value,
    dst: int = ...,
    op: str = ...,
    group: Any = ...,
    *,
    exact: bool = ...,
    async_op: Literal[False] = ...,
) -> _Value | None: ...


@overload
def reduce(
    tensor: Any,
    dst: int = ...,
    op: str = ...,
    group: Any = ...,
    *,
    exact: bool = ...,
    async_op: Literal[True],
) -> Work: ...


@counts_interrupts
def reduce(
    tensor: Any,
    dst: int = 0,
    op: str = "SUM",
    group: Any = None,
    *,
    exact: bool = True,
    async_op: bool = False,
) -> Any:
    """Reduce a value to rank ``dst``. Every rank of the group must call this function.

    Args:
        tensor: as in :func:`all_reduce`: a tensor of shape ``(*S)``, a number, or a tree of these. On ``dst``
            a tensor is filled in place; on the other ranks it keeps its values.
        dst: a global rank of the group.
        op: as in :func:`all_reduce`.
        group: as in :func:`all_reduce`. A rank outside the group gets None.
        exact: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.

    Returns:
        On ``dst`` the result of :func:`all_reduce`, on the other ranks None. The ranks exchange the same
        values as in :func:`all_reduce`.

    Raises:
        TypeError, CollectiveMismatchError: as in :func:`all_reduce`.
        ValueError: as in :func:`all_reduce`, or ``dst`` is not a rank of the group. Nothing was sent.

    Example::

        idist.reduce(torch.ones(2))  # on two ranks: tensor([2., 2.]) on rank 0, None on rank 1
    """
    model = current_model()
    op = reduce_ops.normalize_op(op)
    dst = as_int(dst)
    members = model.groups.resolve(group)
    check_root("dst", dst, members, model.get_world_size())
    is_dst = model.get_rank() == dst
    call = f"{op} to {dst}{'' if exact else ' with exact=False'}"

    def result(reduced: Any) -> Any:
        return reduced if is_dst else None

    if not isinstance(tensor, Tensor):
        reduced = reduce_tree(model, tensor, op, group, exact, call, async_op, function="reduce")
        return reduced.then(result) if async_op else result(reduced)
    plan = plan_reduction(model, op, tensor, exact)
    check_writable("reduce", tensor)
    target = tensor if is_dst else copy_of(tensor)
    return perform(
        model,
        "reduce",
        members,
        lambda members: reduce_tensor(model, target, op, plan, members).then(result),
        outside=None,
        value=tensor,
        op=call,
        async_op=async_op,
    )


@traced
def _reduce_scatter_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.reduce_scatter(*args, **kwargs)


@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: str = ...,
    group: Any = ...,
    out: Tensor | None = ...,
    *,
    sync_grads: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def reduce_scatter(
    x: Any, op: str = ..., group: Any = ..., out: Tensor | None = ..., *, async_op: Literal[True]
) -> Work: ...


@traced_as(_reduce_scatter_in_a_graph)
@counts_interrupts
def reduce_scatter(
    x: Any,
    op: str = "SUM",
    group: Any = None,
    out: Tensor | None = None,
    *,
    sync_grads: bool = False,
    async_op: bool = False,
) -> Any:
    """Reduce a tensor over the ranks; each rank gets one part of the result. Every rank of the group calls.

    float16, bfloat16 and float8 are added and multiplied in float64 and rounded once. Each element is reduced
    on one rank only, in rank order.

    Args:
        x: a tensor of shape ``(group_size * n, *S)``, the same on every rank. Or a list with one tensor per
            rank of the group: the ``i``-th tensor has the same shape on every rank, and all have one dtype.
        op: as in :func:`all_reduce`, except "ADASUM".
        group: as in :func:`all_reduce`. A rank outside the group gets ``x`` back.
        out: a contiguous tensor with the shape and dtype of the result; it is filled and returned.
        sync_grads: True gives the result an autograd graph, as in :func:`all_gather`. Only for SUM and
            AVERAGE of floating-point tensors.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the result. Do
            not change ``x`` before ``wait()`` has returned. Not allowed with ``sync_grads``.

    Returns:
        On the ``i``-th rank of the group: ``(n, *S)``, rows ``i * n`` to ``(i + 1) * n`` of the reduced
        tensor.
        For a list: the reduced ``i``-th tensor. ``x`` keeps its values.

    Raises:
        TypeError: ``op`` cannot reduce the dtype. Nothing was sent.
        ValueError: the first dimension is not a multiple of the group's size, the length of the list is not
            the group's size, or ``out`` does not fit. Nothing was sent.

    Example::

        idist.reduce_scatter(torch.tensor([1.0, 2.0]))  # tensor([2.]) on rank 0, tensor([4.]) on rank 1
    """
    model = current_model()
    op = reduce_ops.normalize_op(op)
    members = model.groups.resolve(group)
    if sync_grads:
        _check_gradient(op, out, async_op)
    if not takes_part(model, members):
        return Completed(x) if async_op else x
    rows, shape = _rows(x, members, members.position(model.get_rank()) or 0)
    if sync_grads:
        autograd.check_differentiable("reduce_scatter", model, rows, members)
    _check_op(model, op, rows)
    if out is not None:
        check_out(out, rows, shape)
    is_padded = prod(shape) < rows[0].numel()

    def unpad(part: Tensor) -> Tensor:
        return part.view(-1)[: prod(shape)].view(shape)

    def begin(members: Group) -> Work:
        if sync_grads:
            return Completed(unpad(autograd.reduce_scatter_with_grad(model, rows, op, members)))
        work = reduce_scatter_tensor(model, rows, op, members, None if is_padded else out)
        if out is not None:
            return work.then(lambda part: fill_from(out, unpad(part))) if is_padded else work
        return work.then(unpad)

    return perform(
        model,
        "reduce_scatter",
        members,
        begin,
        outside=x,
        value=x if isinstance(x, Tensor) else describe_layout([(part.dtype, part.shape) for part in x]),
        op=f"{op}, sync_grads=True" if sync_grads else op,
        begin_outside=lambda members: (
            Completed(None) if sync_grads else reduce_scatter_tensor(model, rows, op, members)
        ),
        async_op=async_op,
    )


def _check_gradient(op: str, out: Tensor | None, async_op: bool) -> None:
    """Raise ``ValueError`` if a call with ``sync_grads`` has these arguments."""
    check_not_async("reduce_scatter", async_op)
    if out is not None or op not in ("SUM", "AVERAGE"):
        raise ValueError("reduce_scatter with sync_grads=True is for SUM and AVERAGE, and takes no out=.")


def _check_op(model: ComputationModel, op: str, rows: Tensor) -> None:
    """Raise if ``op`` cannot reduce ``rows``."""
    if op == "ADASUM":
        raise ValueError("reduce_scatter does not support ADASUM: use all_reduce.")
    plan_reduction(model, op, rows)


def _rows(x: Any, group: Group, position: int) -> tuple[Tensor, tuple[int, ...]]:
    """``(group_size, *S)``, the part of ``x`` for each rank, and the shape of the part at ``position``.

    The tensors of a list are padded to the size of the largest.
    """
    if isinstance(x, Tensor):
        check_dense("reduce_scatter", x)
        check_divisible("reduce_scatter", x, group)
        shape = (x.shape[0] // len(group.ranks), *x.shape[1:])
        return x.reshape(len(group.ranks), *shape), shape
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"reduce_scatter takes a tensor or a list, got {type(x).__name__}.")
    check_length("reduce_scatter", x, group)
    for tensor in x:
        check_dense("reduce_scatter", tensor)
    if len({(tensor.dtype, tensor.device) for tensor in x}) > 1:
        raise TypeError("reduce_scatter takes tensors of one dtype on one device.")
    width = max(tensor.numel() for tensor in x)
    rows = [pad(tensor.reshape(-1), (0, width - tensor.numel())) for tensor in x]
    return torch.stack(rows), tuple(x[position].shape)
