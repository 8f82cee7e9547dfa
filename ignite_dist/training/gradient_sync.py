"""Choose when gradients are averaged, and clip averaged gradients.

``DistributedDataParallel`` and Horovod average in the backward pass (Horovod at the end of :func:`grad_sync`
or in the step, if a rank made no backward pass). The hook of ``auto_optim`` averages in the step.
The functions here give the same results with every backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ignite_dist.collectives.all_gather import all_gather
from ignite_dist.collectives.all_reduce import all_reduce
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import exchange_outcomes
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.training import NO_OPTIMIZER
from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import check_module
from ignite_dist.training.gradient_averaging import (
    agree_on_gradients,
    average_gradients,
    average_now,
    local_gradient,
)
from ignite_dist.values.gradients import mark_averaged, parameters_of


class DDPSyncStrategy(Enum):
    """When the gradients of several microbatches are averaged over the ranks.

    Attributes:
        SINGLE_AUTO_SYNC: once, in the last microbatch's backward pass (XLA: in the step). The fastest.
            A rank may skip that backward pass or some parameters, with ``DistributedDataParallel`` too.
            At the end of the block the rank then contributes its accumulated gradients. Without
            ``find_unused_parameters=True`` a parameter that no rank used in the whole step then has a
            gradient of zeros, not None.
        MULTI_AUTO_SYNC: in each microbatch's backward pass. With ``find_unused_parameters=True`` the
            gradients equal single-process gradients, whichever parameters each microbatch uses. The cost is
            an all-reduce per microbatch. Horovod averages once, in the last backward pass, and XLA once, in
            the step, with the same result.
        FORCED_SYNC: once, after the last microbatch's block. The ranks agree on the parameters that have a
            gradient on any rank and average these gradients in buckets. The gradients equal single-process
            gradients without ``find_unused_parameters``. Communication does not overlap with the backward
            pass. Sparse gradients (of an embedding) stay sparse. If a block raises on one rank, the other
            ranks raise ``RankFailedError``, and no gradient is changed.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise ValueError(
            f"strategy must be one of {', '.join(map(str, cls))}, or one of their values; got {value!r}."
        )


@contextmanager
def no_sync(model: Module) -> Iterator[None]:
    """Context manager: backward passes in the block accumulate gradients and average nothing.

    The next average is over the accumulated sums. Run the forward and the backward pass in the block. If
    gradients are averaged in the step, or never, ``no_sync`` changes nothing. With ``strategy="fsdp"`` it
    changes nothing either: every pass averages, and the sums are the same.

    Args:
        model: the result of :func:`auto_model`, or a module that contains it. With Horovod, an
            optimizer from :func:`auto_optim` must have the parameters of the model.

    Raises:
        ValueError: no optimizer of :func:`auto_optim` has the parameters (Horovod).

    Example::

        with idist.no_sync(model):
            model(first).sum().backward()
        model(second).sum().backward()  # averages the gradients of both
    """
    live = current_model()
    with live.training.accumulate(model, optimizers_of(live, model, None)):
        yield


@contextmanager
def grad_sync(
    model: Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    is_final_microbatch: bool = True,
    strategy: DDPSyncStrategy = DDPSyncStrategy.SINGLE_AUTO_SYNC,
) -> Iterator[None]:
    """Context manager around a microbatch's forward and backward pass.

    After the block of the final microbatch, the gradients are summed over the microbatches and averaged over
    the ranks. On XLA, and with Horovod's own optimizers, the step averages the gradients. Every rank must
    enter the final block. A rank may skip all passes in that block and then contributes its accumulated
    gradients; otherwise the rank makes as many passes as the other ranks. Under ``torch.no_grad()`` nothing
    is averaged. With FSDP2 no rank can skip a pass, because the other ranks need its shards. If all ranks
    skip the last pass, the sums stay local until the next backward pass.

    Args:
        model: the result of :func:`auto_model`, or a module that contains it.
        optimizers: the optimizers of the model's parameters; None finds those that :func:`auto_optim`
            returned.
        is_final_microbatch: True if a step comes next. It must be the same on every rank.
        strategy: see :class:`DDPSyncStrategy`.

    Raises:
        RankFailedError: the block of another rank raised (FORCED_SYNC only).
        RuntimeError: a parameter was frozen after ``DistributedDataParallel`` was made, and DDP waits for its
            gradient; or ``model`` contains several DDP modules, and this rank has used none of them. Not with
            FORCED_SYNC.
        ValueError: as in :func:`no_sync`.
    """
    live = current_model()
    strategy = DDPSyncStrategy(strategy)
    found = optimizers_of(live, model, optimizers)
    if strategy is DDPSyncStrategy.FORCED_SYNC:
        check_not_sharded(model, "FORCED_SYNC")
        with _forced_sync(live, model, found, is_final_microbatch):
            yield
    elif is_final_microbatch or (
        strategy is DDPSyncStrategy.MULTI_AUTO_SYNC and live.training.averages_in_backward
    ):
        with live.training.average_in_block(model, found):
            yield
    else:
        with live.training.accumulate(model, found):
            yield


@contextmanager
def _forced_sync(
    live: ComputationModel, model: Module, optimizers: Sequence[Optimizer], is_final: bool
) -> Iterator[None]:
    live.groups.check_not_joining()
    live.training.check_forced(model, optimizers)
    group = live.training.gradient_group(model, optimizers)
    if len(group.ranks) == 1:
        yield
        return
    try:
        with live.training.accumulate(model, optimizers):
            yield
    except BaseException as error:
        exchange_outcomes(live, group, error)  # the other ranks call this in their final microbatch
        raise
    if is_final:
        parameters = dict.fromkeys(model.parameters())
        if not live.training.averages_in_backward:  # the step will not average these gradients again
            parameters.update(dict.fromkeys(parameters_of(*optimizers)))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        average_gradients(live, agree_on_gradients(live, trained, group), group)
        live.training.mark_averaged(model)
        for optimizer in optimizers:
            if not live.training.averages_in_backward and id(optimizer) in live.training.optimizers:
                mark_averaged(optimizer)


# --- clipping ----------------------------------------------------------------------------------------


def clip_grad_norm(
    model: Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    group: Any = None,
) -> Tensor:
    """Scale the averaged gradients so that their global norm is at most ``max_norm``.

    Call this on every rank, between the last backward pass and the step. Gradients that are not averaged
    yet (XLA; Horovod, if this rank made no backward pass) are averaged in this call, not again in the step.
    The norm of sharded parameters (FSDP2, any ``DTensor``) is that of the whole parameters.

    Args:
        model: the result of :func:`auto_model`, or a module that contains it.
        max_norm: the largest norm of the gradients of all parameters together.
        norm_type: the p of the p-norm; ``inf`` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        group: the ranks that have different parts of one model, as in :func:`all_reduce`: the stages of a
            pipeline, experts, or parts of layers that are split by hand. The norm is that of all their
            gradients together. A parameter that several of the ranks have counts several times. All ranks
            of the group must call this; it costs one more small collective. A rank outside the group uses
            the norm of its own gradients.

    Returns:
        The norm before clipping: a 0-d tensor, the same on every rank (of the group).

    Raises:
        TypeError: ``model`` is not a module, for example its parameters.
        ValueError: no optimizer of :func:`auto_optim` has the model's parameters (Horovod and XLA, without
            ``group``); or a ``DTensor`` is sharded over other ranks of ``group``, so that its norm includes
            them already. Nothing was sent.
        RuntimeError: the norm is NaN or infinite, with ``error_if_nonfinite``.
    """
    check_module("clip_grad_norm", model)
    live = current_model()
    parameters = list(model.parameters())
    if group is not None:
        _check_parts(live, parameters, group)
    optimizers = optimizers_of(live, model, None)
    averages_in_step = not live.training.averages_in_backward and live.get_world_size() > 1
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if averages_in_step and not optimizers:
        if trained and group is None:
            raise ValueError(NO_OPTIMIZER)
    elif averages_in_step:
        for optimizer in optimizers:
            average_now(live, optimizer)
        owned = set(parameters_of(*optimizers))
        others = [parameter for parameter in trained if parameter not in owned]  # no step averages them
        if others:
            gradient_group = live.training.gradient_group(model, optimizers)
            average_gradients(live, agree_on_gradients(live, others, gradient_group), gradient_group)
    used = [parameter for parameter in parameters if parameter.grad is not None]
    if group is None and not any(map(is_sharded, used)):
        total = torch.nn.utils.clip_grad_norm_(used, max_norm, norm_type, error_if_nonfinite)
    else:
        total = _clip_parts(used, max_norm, norm_type, error_if_nonfinite, group)
    for optimizer in optimizers if averages_in_step else ():
        mark_averaged(optimizer)
    return total


def _check_parts(live: ComputationModel, parameters: Sequence[Tensor], group: Any) -> None:
    others = set(live.groups.ranks_of(group)) - {live.get_rank()}
    for parameter in filter(is_sharded, parameters):
        mesh_ranks = parameter.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if not others.isdisjoint(mesh_ranks):
            raise ValueError(
                f"A parameter is a DTensor over the ranks {mesh_ranks}, so its norm includes these ranks "
                f"already, and the group has some of them: {sorted(others.intersection(mesh_ranks))}. Omit "
                "group, or pass the group of the ranks that have other parts of the model."
            )


@torch.no_grad()
def _clip_parts(
    parameters: Sequence[Parameter], max_norm: float, norm_type: float, error_if_nonfinite: bool, group: Any
) -> Tensor:
    """Clip gradients of which other ranks have parts: shards, and with ``group`` other parameters.

    torch's function cannot mix meshes and plain tensors.
    """
    total = _norm_of(parameters, float(norm_type))
    if group is not None:
        norms = all_gather(total.double(), group)  # the ranks may have different dtypes
        total = torch.linalg.vector_norm(norms, norm_type).to(total.dtype)
    if error_if_nonfinite and not total.isfinite():  # not earlier: the other ranks would wait
        raise RuntimeError(
            f"The norm of the gradients of all ranks is {total.item()}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    parts: Any = [SimpleNamespace(grad=local_gradient(parameter)) for parameter in parameters]
    clip_grads_with_norm_(parts, max_norm, total)  # one kernel for many gradients
    return total


def _norm_of(parameters: Sequence[Parameter], norm_type: float) -> Tensor:
    """The norm of all gradients, with those of all shards: the same bits on every rank.

    One small collective for each set of dimensions over which gradients are sharded.
    """
    by_ranks: dict[Any, list[Tensor]] = {}  # the gradients by the dimensions over which they are sharded
    for parameter in parameters:
        local, whole = local_gradient(parameter), parameter.grad
        mesh, placements = getattr(whole, "device_mesh", None), getattr(whole, "placements", ())
        dimensions = tuple(number for number, one in enumerate(placements) if not one.is_replicate())
        by_ranks.setdefault((mesh, dimensions) if dimensions else None, []).append(local)
    groups, norms = current_model().groups, []
    for key, gradients in by_ranks.items():
        norm = get_total_norm([one for one in gradients if one.numel()], norm_type).to(gradients[0].device)
        group = groups.of_mesh(*key) if key else None
        if group is not None and norm_type == inf:
            norm = all_reduce(norm, "MAX", group.handle)
        elif group is not None:
            norm = all_reduce(norm.double() ** norm_type, "SUM", group.handle) ** (1 / norm_type)
        norms.append(norm.to(gradients[0].dtype))
    if not norms:
        return torch.zeros((), device=current_model().device())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


# --- shared ------------------------------------------------------------------------------------------


def optimizers_of(
    live: ComputationModel, model: Module, given: Optimizer | Sequence[Optimizer] | None
) -> list[Optimizer]:
    """The optimizers of the parameters of ``model``, in the order of the calls of ``auto_optim``."""
    if given is not None:
        return [given] if isinstance(given, Optimizer) else list(given)
    if live.training.averages_in_backward:  # the optimizers are not needed
        return []
    parameters = set(model.parameters())
    # Not values(), because another replica in this process may add an optimizer during the iteration.
    adapted = [reference() for reference in live.training.optimizers.valuerefs()]
    alive = [optimizer for optimizer in adapted if optimizer is not None]
    return [optimizer for optimizer in alive if not parameters.isdisjoint(parameters_of(optimizer))]


def fsdp_modules(model: Module) -> list[Any]:
    """The modules in ``model`` that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [one for one in model.modules() if isinstance(one, fsdp.FSDPModule)]


def check_not_sharded(model: Module, function: str) -> None:
    """Raise a ValueError if the parameters of ``model`` are sharded by FSDP2."""
    if fsdp_modules(model):
        raise ValueError(
            f"{function} does not support a model with sharded parameters (FSDP2): no rank ever has whole "
            "gradients. Use another strategy, or no_sync(model) around all microbatches except the last."
        )
