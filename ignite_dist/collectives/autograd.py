"""Collectives with a gradient: the gradient of the sum of all ranks' losses.

Each result depends on the tensors of all ranks, so the losses of all ranks contribute to each gradient. If
every rank computes the same loss of the result, the sum of the losses is ``group_size`` times that loss.
DistributedDataParallel averages the gradients, which gives the gradient of a single process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.path import perform_backward
from ignite_dist.collectives.primitives import (
    exchange_tensor,
    gather_rows,
    plan_reduction,
    reduce_scatter_tensor,
    reduce_tensor,
)
from ignite_dist.collectives.sending import carrying_device
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.all_to_all import exchanges
from ignite_dist.comp_models.transport import Sizes
from ignite_dist.values import reduce_ops


def check_differentiable(function: str, model: ComputationModel, tensor: Any, group: Group) -> None:
    """Raise if the result of ``function`` cannot have a gradient.

    Raises:
        TypeError: ``tensor`` is not a dense tensor of floating-point or complex numbers.
        ValueError: the backend needs the ranks outside ``group`` too, and they run no backward pass.
    """
    check_dense(function, tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{function} with sync_grads=True takes floating-point tensors, got {tensor.dtype}.")
    reduce_ops.check_reducible(tensor.dtype)  # for the backward pass
    if model.transport.groups_need_all_ranks and 1 < len(group.ranks) < model.get_world_size():
        raise ValueError(
            f"{function} with sync_grads=True takes no group= with backend {model.backend()!r}: this backend "
            "needs every rank in a group's collective, but only members run the backward pass."
        )


def reduce_with_grad(
    model: ComputationModel, tensor: Tensor, op: str, group: Group, exact: bool = True
) -> Tensor:
    """``(*S) -> (*S)``: the sum or mean ("SUM", "AVERAGE") over the ranks, as a new tensor."""
    return _Reduce.apply(tensor, model, op, group, exact)  # type: ignore[no-any-return, no-untyped-call]


def gather_with_grad(model: ComputationModel, tensor: Tensor, group: Group) -> Tensor:
    """``(*S) -> (group_size, *S)``: the tensors of all ranks, as a new tensor."""
    return _Gather.apply(tensor, model, group)  # type: ignore[no-any-return, no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, model: ComputationModel, op: str, group: Group, exact: bool
    ) -> Tensor:
        ctx.call = (model, op, group, exact)
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        plan = plan_reduction(model, op, copy, exact)
        return reduce_tensor(model, copy, op, plan, group).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        model, op, group, exact = ctx.call
        # The sum and the mean are their own adjoints. _Reduce makes the gradient differentiable too.
        total = perform_backward(
            model,
            "all_reduce",
            group,
            lambda group: reduce_with_grad(model, gradient, op, group, exact),
            gradient,
            op,
        )
        return total, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, model: ComputationModel, group: Group) -> Tensor:
        ctx.call = (model, group)
        return gather_rows(model, tensor, group).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        model, group = ctx.call
        own = perform_backward(
            model,
            "all_gather",
            group,
            lambda group: _sum_of_own_rows(model, gradient, group),
            gradient,
            "SUM",
        )
        return own, None, None


def _sum_of_own_rows(model: ComputationModel, rows: Tensor, group: Group) -> Tensor:
    """``(group_size, *S) -> (*S)``: the sum of the rows of all ranks that are for this rank."""
    # Where ranks cannot exchange rows, a reduce-scatter gathers the rows of all ranks from all ranks.
    if exchanges(model.transport, group, torch.uint8, carrying_device(model, rows)):
        return reduce_scatter_with_grad(model, rows.contiguous(), "SUM", group)
    position = group.position(model.get_rank())
    return reduce_with_grad(model, rows, "SUM", group)[position].clone()  # a view would keep all rows


def exchange_with_grad(
    model: ComputationModel, tensor: Tensor, group: Group, sizes: Sizes | None = None
) -> Tensor:
    """Exchange parts of ``tensor``, as :func:`exchange_tensor`. Checked arguments."""
    return _Exchange.apply(tensor, model, group, sizes)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, model: ComputationModel, group: Group, sizes: Sizes | None
    ) -> Tensor:
        ctx.call, ctx.shape = (model, group, sizes), tensor.shape
        return exchange_tensor(model, tensor, group, sizes).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        model, group, sizes = ctx.call
        received = sizes and Sizes(sizes.received, sizes.sent)
        parts = perform_backward(
            model,
            "all_to_all",
            group,
            lambda group: exchange_with_grad(model, gradient, group, received),
            "" if sizes else gradient,
        )
        return parts.view(ctx.shape), None, None, None


def reduce_scatter_with_grad(model: ComputationModel, rows: Tensor, op: str, group: Group) -> Tensor:
    """``(group_size, *S) -> (*S)``, as :func:`reduce_scatter_tensor`. Checked arguments."""
    part: Tensor = _ReduceScatter.apply(rows, model, op, group)  # type: ignore[no-untyped-call]
    return part


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, model: ComputationModel, op: str, group: Group) -> Tensor:
        ctx.call = (model, op, group)
        return reduce_scatter_tensor(model, rows, op, group).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        model, op, group = ctx.call
        # The part of rank i is the sum of the rows i, so each of these rows has the gradient of that part.
        rows = perform_backward(
            model,
            "reduce_scatter",
            group,
            lambda group: gather_with_grad(model, gradient, group),
            gradient,
            op,
        )
        return rows / len(group.ranks) if op == "AVERAGE" else rows, None, None, None
