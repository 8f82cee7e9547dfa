"""Adapt a model and an optimizer to the live context. Data loaders are in ``data``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.coordination import exchange_outcomes
from ignite_dist.data.loaders import auto_dataloader
from ignite_dist.gradients import parameters_of
from ignite_dist.samplers import DistributedProxySampler
from ignite_dist.training.exact_passes import group_of_parameters, remember_model
from ignite_dist.training.gradient_averaging import average_in_step, average_losses
from ignite_dist.training.late_parameters import watch_frozen
from ignite_dist.training.wrapped_models import unwrap_model

# Scripts written for pytorch-ignite import auto_dataloader and DistributedProxySampler from here.
__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]

_COMM_HOOKS = ("fp16", "bf16", "powersgd")


def auto_model(
    model: Module,
    sync_bn: bool = False,
    wrapper: Callable[..., Module] | None = None,
    comm_hook: Any = None,
    *,
    buffer_hook: Any = None,
    strategy: str = "ddp",
    wrap: Sequence[type[Module]] = (),
    **kwargs: Any,
) -> Module:
    """``model`` on :func:`device`, wrapped for the live context.

    torch.distributed with more than one rank: ``DistributedDataParallel``, or sharding in place with
    ``strategy="fsdp"``. Several GPUs without a context: ``DataParallel``. With Horovod and XLA the optimizer
    averages gradients (:func:`auto_optim`), so the module itself is returned. On XLA the module gets new
    parameters, so make the optimizer afterwards. All ranks take the parameters and buffers of rank 0 (of the
    first rank of ``process_group`` or ``mesh``). A module without trainable parameters stays as it is, and no
    rank waits for another.

    Unfreeze parameters before this call. If the whole model is frozen at this call, its gradients are never
    averaged, even if it is unfrozen later. With ``DistributedDataParallel`` this holds for each single frozen
    parameter. A backward pass that computes such a gradient raises ``RuntimeError``.
    ``auto_model(unwrap_model(model))`` adapts the model again.

    In training each rank has its own running statistics (buffers). Each pass over a loader of
    ``auto_dataloader(exact=...)`` begins with a broadcast of rank 0's buffers. Before an
    evaluation of any other kind, broadcast each buffer of ``unwrap_model(model).buffers()`` yourself.

    Args:
        model: any module.
        sync_bn: replace BatchNorm by torch's SyncBatchNorm, under Horovod by Horovod's. Both need GPUs. On
            the CPU and with XLA this option only warns.
        wrapper: a class to use instead of ``DistributedDataParallel``, with the same arguments.
        comm_hook: how ``DistributedDataParallel`` sends gradients: torch's hooks ``"fp16"``, ``"bf16"`` (NCCL
            only) or ``"powersgd"``; a ``torch.distributed.BuiltinCommHookType``; or a pair ``(state, hook)``
            for ``register_comm_hook``. Ignored without such a wrapper.
        buffer_hook: ``(state, hook)`` for the buffers, optionally with its position in the forward pass.
        strategy: ``"ddp"``, or ``"fsdp"`` for torch's FSDP2: parameters, gradients and optimizer state are
            sharded, so make the optimizer afterwards.
        wrap: with ``"fsdp"``, the classes of modules that are gathered one at a time: the layers of a
            transformer. By default the whole model is gathered at once, which modules that share a
            weight need.
        kwargs: keywords of the wrapper: ``static_graph``, ``bucket_cap_mb``, ...; with ``"fsdp"`` those of
            ``torch.distributed.fsdp.fully_shard``: ``mp_policy``, ``reshard_after_forward``, ...
            Without a wrapper all keywords except ``broadcast_buffers`` are ignored, so scripts can keep them.
            ``broadcast_buffers=False`` keeps each rank's own buffers, with ``"fsdp"`` too.
            ``find_unused_parameters`` is False by default, as in torch. With True each backward pass first
            walks the autograd graph and exchanges a bitmap. Set True if any pass of any rank does not use
            every parameter; otherwise that pass or the next pass raises.

    Returns:
        The wrapped module, or ``model`` itself.

    Raises:
        ValueError: an unknown ``strategy`` or ``comm_hook``, ``"bf16"`` without NCCL, or ``"fsdp"`` with DDP
            options, Horovod or XLA; raised before any communication. Or ``model`` has tensors on the
            meta device. With ``"fsdp"`` only rank 0's tensors count, and every rank raises.
    """
    live = current_model()
    live.groups.check_not_joining()
    given = {"wrapper": wrapper, "comm_hook": comm_hook, "buffer_hook": buffer_hook}
    options = {name: value for name, value in given.items() if value is not None}
    _check_strategy(strategy, sync_bn, wrap, comm_hook, options)
    if strategy == "fsdp":
        return _sharded(live, model, wrap, **kwargs)
    _place(live, model)
    wrapped = live.training.wrap_model(model, sync_bn=sync_bn, **options, **kwargs)
    if live.get_world_size() == 1:
        return wrapped
    inner = unwrap_model(wrapped)
    group = live.training.gradient_group(wrapped, ())
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if is_trained and wrapped is model:  # not with a wrapper, which has broadcast the parameters
        _broadcast(live, model, group)
    if is_trained:
        remember_model(live, inner, group, kwargs.get("broadcast_buffers", True))
    is_averaged_later = is_trained and not isinstance(wrapped, DistributedDataParallel)
    watch_frozen(live, inner, wrapped, is_averaged_later)
    return wrapped


def _sharded(
    live: ComputationModel,
    model: Module,
    wrap: Sequence[type[Module]],
    broadcast_buffers: bool = True,
    **kwargs: Any,
) -> Module:
    if live.get_world_size() == 1:
        _place(live, model)
        return model
    live.training.check_sharding()
    group = _sharding_group(live, kwargs.get("mesh"))
    _bring_from_meta(live, model, group)
    _place(live, model)
    _broadcast(live, model, group)
    live.training.shard_model(model, wrap, **kwargs)
    inner = unwrap_model(model)
    remember_model(live, inner, group, broadcast_buffers)
    watch_frozen(live, inner, model, is_averaged_later=True)
    return model


def _place(live: ComputationModel, model: Module) -> None:
    """Move ``model`` to this rank's device."""
    _check_not_meta(model)
    device = live.device()
    if any(value.device != device for value in [*model.parameters(), *model.buffers()]):
        _move(model, device)


def _broadcast(live: ComputationModel, model: Module, group: Group) -> None:
    """Fill the parameters and buffers with those of the first rank of ``group``."""
    broadcast_tensors(live, [*model.parameters(), *model.buffers()], group.ranks[0], group)


def _sharding_group(live: ComputationModel, mesh: Any) -> Group:
    """The ranks of the device mesh that shards a model; without a mesh the world."""
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, Tensor):
        return live.groups.world
    return live.groups.resolve(sorted(ranks.flatten().tolist()))


def _bring_from_meta(live: ComputationModel, model: Module, group: Group) -> None:
    """Allocate a model that is on the meta device, if the first rank of ``group`` has values for it.

    Every rank of ``group`` calls this.

    Raises:
        ValueError: the first rank has no values; raised on every rank.
    """
    names = _names_on_meta(model)
    names_by_rank: list[list[str]] = exchange_outcomes(live, group, None, names[:3])
    if names_by_rank[0]:
        raise ValueError(_ON_META.format(names=names_by_rank[0]))
    if names:
        _move(model, live.device(), is_empty=True)


_ON_META = (
    "auto_model needs values, but the model has tensors on the meta device: {names}, ... Allocate the model "
    "(model.to_empty(device=...)) and set its values first. With strategy='fsdp' only rank 0 needs values."
)


def _names_on_meta(model: Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def _check_not_meta(model: Module) -> None:
    if names := _names_on_meta(model):
        raise ValueError(_ON_META.format(names=names[:3]))


def _check_strategy(
    strategy: str, sync_bn: bool, wrap: Sequence[type[Module]], comm_hook: Any, options: dict[str, Any]
) -> None:
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"strategy must be 'ddp' or 'fsdp', got {strategy!r}.")
    if strategy == "ddp" and wrap:
        raise ValueError("wrap= needs strategy='fsdp', but the strategy is 'ddp'.")
    if strategy == "fsdp" and (sync_bn or options):
        names = ", ".join([*["sync_bn"] * sync_bn, *options])
        raise ValueError(f"{names}: only DistributedDataParallel supports this, and the strategy is 'fsdp'.")
    if isinstance(comm_hook, str) and comm_hook not in _COMM_HOOKS:
        raise ValueError(f"comm_hook must be one of {_COMM_HOOKS}, or (state, hook); got {comm_hook!r}.")


def _move(model: Module, device: torch.device, is_empty: bool = False) -> None:
    """Move ``model`` to ``device``, or only allocate it there, and keep tied parameters tied.

    An XLA device makes a new parameter for each use of a tied one.
    """
    places: dict[Parameter, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    if is_empty:
        model.to_empty(device=device)
    else:
        model.to(device)
    for (module, name), *others in places.values():
        for other_module, other_name in others:
            setattr(other_module, other_name, getattr(module, name))


def auto_optim(optimizer: Optimizer, zero: bool = False, **kwargs: Any) -> Optimizer:
    """``optimizer``, adapted to the live context. It is a new object only under Horovod or with ``zero``.

    On every backend the loss of a closure is averaged after each call of the closure: over the ranks on
    which :func:`auto_model` trains the model, or over all ranks for an unknown model. An optimizer whose
    step depends on the loss (the line search of ``torch.optim.LBFGS``) then takes the same step on all ranks,
    and ``step`` returns the mean loss.

    If the model's wrapper averages gradients, the optimizer does not. With XLA, and with a backend without a
    wrapper, a step hook averages gradients before the step, or after each call of a closure. A parameter
    that this rank has not used counts with a zero gradient. The gradient stays None if no rank has used it
    (except with one process per replica of XLA).

    Under Horovod the result works like ``hvd.DistributedOptimizer`` and takes the state of rank 0 (Adam's
    moments after a resume). Gradients are averages when ``backward`` returns, so a ``GradScaler``, clipping
    and other code that changes gradients before the step works as with ``DistributedDataParallel``.
    Ranks may use different parameters, also over several backward passes. Either all ranks make the same
    number of passes, or each rank makes at most ``backward_passes_per_step``; otherwise
    ``CollectiveMismatchError`` is raised. Gradients that come from no backward pass are averaged in the step.
    Schedulers, ``zero_grad(set_to_none=...)``, ``add_param_group`` and ``state_dict`` work as usual, and
    parameters may be frozen and unfrozen at any time. If optimizers share a parameter, the options of the
    optimizer that was adapted last apply.

    Args:
        optimizer: any torch optimizer.
        zero: shard the optimizer state over all ranks with torch's ``ZeroRedundancyOptimizer``: each rank
            updates some of the parameters and broadcasts them. For a model in ``DistributedDataParallel``
            without ``process_group``. Ignored in a world of one; not supported by Horovod and XLA.
        kwargs: under Horovod the keywords of ``hvd.DistributedOptimizer``: ``named_parameters``,
            ``compression``, ``backward_passes_per_step``, ...

    Returns:
        The optimizer to use from now on, for schedulers too.

    Raises:
        ValueError: ``zero`` is True, and the backend does not support it, or only some ranks train the model.
            ``zero`` or ``strategy="fsdp"`` is used with an optimizer whose step needs all parameters
            together (one that requires a closure: LBFGS). Raised before any communication.
    """
    live = current_model()
    live.groups.check_not_joining()
    if zero and live.get_world_size() > 1:
        _check_zero(live, optimizer)
        optimizer = live.training.shard_optimizer(optimizer)
    wrapped = live.training.wrap_optimizer(optimizer, **kwargs)
    live.training.optimizers[id(wrapped)] = wrapped
    if not live.training.averages_gradients and live.get_world_size() > 1:
        average_in_step(wrapped)
    elif live.training.averages_in_backward and live.get_world_size() > 1:
        average_losses(wrapped)
    return wrapped


def _check_zero(live: ComputationModel, optimizer: Optimizer) -> None:
    group = group_of_parameters(live, parameters_of(optimizer))
    if len(group.ranks) < live.get_world_size():
        raise ValueError(
            f"zero=True shards over all ranks, but only ranks {list(group.ranks)} train the model, because "
            "of process_group= or mesh=. Do not pass zero=True."
        )
