"""Collectives with a gradient: that of the sum of all ranks' losses.

Each result depends on the tensors of all ranks, so the gradient of a rank's own is made of what all ranks'
losses ask for. Where every rank computes the same loss of everything, their sum is ``group_size`` times that
loss, and the mean of the gradients, which DistributedDataParallel takes, is that of a single process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.tensors import gather_rows, plan_reduction, reduce_tensor
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.diagnostics.announcing import announce
from ignite_dist.values import reduce_ops

__all__ = ["check_differentiable", "gathered", "reduced"]


def check_differentiable(function: str, model: ComputationModel, tensor: Any, group: Group) -> None:
    """Refuse what cannot have a gradient; the message names ``function``.

    Raises:
        TypeError: not a dense tensor of floating-point or complex numbers.
        ValueError: the ranks outside ``group`` would have to take part, and their backward passes do not.
    """
    check_dense(function, tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{function} with sync_grads=True takes floating-point tensors, got {tensor.dtype}.")
    reduce_ops.check_reducible(tensor.dtype)  # in the backward pass
    if model.transport.groups_need_everyone and 1 < len(group.ranks) < model.get_world_size():
        raise ValueError(
            f"{function} with sync_grads=True takes no group= with backend {model.backend()!r}: a group's "
            "collectives are calls of every rank there, and in the backward pass only its members make them."
        )


def reduced(model: ComputationModel, tensor: Tensor, op: str, group: Group, exact: bool = True) -> Tensor:
    """``(*S) -> (*S)``, the sum ("SUM") or mean ("AVERAGE") over the ranks, as a new tensor."""
    return _Reduced.apply(tensor, model, op, group, exact)  # type: ignore[no-any-return, no-untyped-call]


def gathered(model: ComputationModel, tensor: Tensor, group: Group) -> Tensor:
    """``(*S) -> (group_size, *S)``."""
    return _Gathered.apply(tensor, model, group)  # type: ignore[no-any-return, no-untyped-call]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, model: ComputationModel, op: str, group: Group, exact: bool
    ) -> Tensor:
        ctx.call = (model, op, group, exact)
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        plan = plan_reduction(model, op, copy, exact)
        return reduce_tensor(model, copy, op, plan, group).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        model, op, group, _ = ctx.call
        announce(model, "all_reduce's backward pass", group, gradients[0], op)
        # A sum is its own adjoint, and so is a mean. By the same function, so that it has a gradient too.
        total = _Reduced.apply(*gradients, *ctx.call)  # type: ignore[no-untyped-call]
        return total, None, None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, model: ComputationModel, group: Group) -> Tensor:
        ctx.call = (model, "SUM", group, True)
        # Asked here: the backward pass may run in a thread of its own.
        ctx.own = group.ranks.index(model.get_rank())
        return gather_rows(model, tensor, group).wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        model, op, group, _ = ctx.call
        announce(model, "all_gather's backward pass", group, gradients[0], op)
        total = _Reduced.apply(*gradients, *ctx.call)  # type: ignore[no-untyped-call]
        return total[ctx.own].clone(), None, None  # a view would keep all of it
