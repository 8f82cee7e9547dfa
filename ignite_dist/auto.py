"""A model and an optimizer, adapted to the live context; data loaders are in ``data``."""

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

# Scripts written for pytorch-ignite import the loader and the sampler from here.
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

    torch.distributed with more than one rank: ``DistributedDataParallel``, or sharded in place with
    ``strategy="fsdp"``. No context and several GPUs: ``DataParallel``. With Horovod and XLA the optimizer
    averages gradients (:func:`auto_optim`), so the module itself comes back; on XLA with new parameters, and
    the optimizer is made from these. All ranks start from the parameters and buffers of rank 0 (of the first
    rank of ``process_group`` or ``mesh``), unless the module has nothing to train: then it is left as it is,
    and no rank waits for another.

    Unfreeze what is trained before. A backward pass raises ``RuntimeError`` if it computes a gradient that
    would be this rank's own: of a model that was all frozen here, and with ``DistributedDataParallel`` of a
    parameter that was. ``auto_model(unwrap_model(model))`` adapts it again.

    While a model is trained, its running statistics (buffers) are each rank's own. Each pass over a loader of
    ``auto_dataloader(exact=...)`` begins with those of rank 0; in another evaluation call
    ``broadcast(buffer)`` for each of ``unwrap_model(model).buffers()`` first.

    Args:
        model: any module.
        sync_bn: turns BatchNorm into torch's SyncBatchNorm, under Horovod into Horovod's; both need GPUs. On
            the CPU and with XLA it warns instead.
        wrapper: a class to take for ``DistributedDataParallel``, with the same arguments.
        comm_hook: how ``DistributedDataParallel`` sends gradients: ``"fp16"``, ``"bf16"`` (NCCL only) or
            ``"powersgd"``, torch's own hooks; a ``torch.distributed.BuiltinCommHookType``; or a pair
            ``(state, hook)`` for ``register_comm_hook``. Not looked at where there is no such wrapper.
        buffer_hook: ``(state, hook)``, or with its place in the forward pass, for the buffers.
        strategy: ``"ddp"``, or ``"fsdp"`` for torch's FSDP2: parameters, gradients and the optimizer's state
            are sharded, so the optimizer is made afterwards.
        wrap: with ``"fsdp"``, the classes of modules that are gathered one at a time: the layers of a
            transformer. Without any the whole model is, as it has to be where such modules share a weight.
        kwargs: those of the wrapping class: ``static_graph``, ``bucket_cap_mb``, ...; with ``"fsdp"`` those
            of ``torch.distributed.fsdp.fully_shard``: ``mp_policy``, ``reshard_after_forward``, ...
            Where there is no wrapper they have no meaning and are not looked at, so that a script can keep
            them, but for ``broadcast_buffers``: False leaves buffers as each rank's own, with ``"fsdp"`` too.
            ``find_unused_parameters`` is False, as in torch: with True each backward pass first walks
            the graph and exchanges a bitmap. It must be True if a pass does not use every parameter, on any
            rank; else that pass raises, or the next one.

    Returns:
        The wrapped module, or ``model`` itself.

    Raises:
        ValueError: an unknown ``strategy`` or ``comm_hook``, ``"bf16"`` without NCCL, ``"fsdp"`` with what
            belongs to DDP, or with Horovod or XLA. Nothing was sent. Or a model on the meta device: with
            ``"fsdp"`` raised on every rank, where rank 0 has no values; the others need none.
    """
    live = current_model()
    live.groups.check_not_joining()
    given = {"wrapper": wrapper, "comm_hook": comm_hook, "buffer_hook": buffer_hook}
    options = {name: value for name, value in given.items() if value is not None}
    _check_strategy(strategy, sync_bn, wrap, comm_hook, options)
    shards = strategy == "fsdp" and live.get_world_size() > 1
    shares_buffers = kwargs.get("broadcast_buffers", True)
    if strategy == "fsdp":  # this keyword alone means something without DistributedDataParallel
        kwargs.pop("broadcast_buffers", None)
    if shards:
        live.training.check_sharding()
        group = _sharding_group(live, kwargs.get("mesh"))
        _bring_from_meta(live, model, group)
    _check_not_meta(model)
    device = live.device()
    if any(value.device != device for value in [*model.parameters(), *model.buffers()]):
        _move(model, device)
    wrapped = (
        model if strategy == "fsdp" else live.training.wrap_model(model, sync_bn=sync_bn, **options, **kwargs)
    )
    if live.get_world_size() == 1:
        return wrapped
    inner = unwrap_model(wrapped)
    is_adapted = shards or any(parameter.requires_grad for parameter in model.parameters())
    if not shards:
        group = live.training.gradient_group(wrapped, ())
    if is_adapted and wrapped is model:  # a wrapper sees to it
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], group.ranks[0], group)
    if shards:
        live.training.shard_model(model, wrap, **kwargs)
    if is_adapted:
        remember_model(live, inner, group, shares_buffers)
    is_averaged_later = shards or (is_adapted and not isinstance(wrapped, DistributedDataParallel))
    watch_frozen(live, inner, wrapped, is_averaged_later)
    return wrapped


def _sharding_group(live: ComputationModel, mesh: Any) -> Group:
    """The ranks of the device mesh that a model is sharded over; of none the world."""
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, Tensor):
        return live.groups.world
    return live.groups.resolve(sorted(ranks.flatten().tolist()))


def _bring_from_meta(live: ComputationModel, model: Module, group: Group) -> None:
    """Give a model on the meta device memory, where the first rank of ``group`` has the values for it.

    Every rank of ``group`` calls it.

    Raises:
        ValueError: the first rank has none; raised on every rank.
    """
    own = _names_on_meta(model)
    everyones: list[list[str]] = exchange_outcomes(live, group, None, own[:3])
    if everyones[0]:
        raise ValueError(_ON_META.format(names=everyones[0]))
    if own:
        _move(model, live.device(), is_empty=True)


_ON_META = (
    "auto_model needs values, and the model has tensors on the meta device: {names}, ... Give it memory "
    "(model.to_empty(device=...)) and values first. With strategy='fsdp' rank 0 alone needs them."
)


def _names_on_meta(model: Module) -> list[str]:
    return [name for name, one in [*model.named_parameters(), *model.named_buffers()] if one.is_meta]


def _check_not_meta(model: Module) -> None:
    if names := _names_on_meta(model):
        raise ValueError(_ON_META.format(names=names[:3]))


def _check_strategy(
    strategy: str, sync_bn: bool, wrap: Sequence[type[Module]], comm_hook: Any, options: dict[str, Any]
) -> None:
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"strategy is 'ddp' or 'fsdp', got {strategy!r}.")
    if strategy == "ddp" and wrap:
        raise ValueError("wrap= names what strategy='fsdp' shards by, and the strategy is 'ddp'.")
    if strategy == "fsdp" and (sync_bn or options):
        named = ", ".join([*["sync_bn"] * sync_bn, *options])
        raise ValueError(f"{named}: this is DistributedDataParallel's, and the strategy is 'fsdp'.")
    if isinstance(comm_hook, str) and comm_hook not in _COMM_HOOKS:
        raise ValueError(f"comm_hook is one of {_COMM_HOOKS}, or (state, hook); got {comm_hook!r}.")


def _move(model: Module, device: torch.device, is_empty: bool = False) -> None:
    """Move ``model``, and keep parameters tied: an XLA device gets new ones, one for each place.

    With ``is_empty`` it gets memory there, and no values.
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
        for other, its_name in others:
            setattr(other, its_name, getattr(module, name))


def auto_optim(optimizer: Optimizer, zero: bool = False, **kwargs: Any) -> Optimizer:
    """``optimizer``, ready for the live context: itself, but under Horovod and with ``zero``.

    On every backend the loss that a closure returns is averaged, each time that it has run: over the ranks
    that :func:`auto_model` trains the model on; over all, if it has not seen the model.
    An optimizer that decides by it (the line search of ``torch.optim.LBFGS``) decides alike on all ranks, and
    ``step`` returns that mean.

    Where a model's wrapper averages the gradients nothing else is to do. With XLA, and with a computation
    model that has no wrapper, a step hook does it: before the step, and with a closure each time that it has
    run. A parameter that this rank has not used counts as one with a zero gradient, and keeps None if no
    rank has used it (not so where a replica of XLA has a process of its own).

    Under Horovod it becomes an optimizer as ``hvd.DistributedOptimizer`` makes it, and starts from the state
    of rank 0 (Adam's moments after a resume). ``backward`` returns when the gradients are averages, so a
    ``GradScaler``, clipping, and whatever else reads or writes them before the step, works as with
    ``DistributedDataParallel``. A rank may use other parameters than the others, in several backward passes
    too; but all ranks make as many, or none makes more than ``backward_passes_per_step``, else
    ``CollectiveMismatchError``. Gradients that no backward pass has made are averaged in the step.
    Schedulers, ``zero_grad(set_to_none=...)``, ``add_param_group`` and ``state_dict`` work as without it, and
    parameters may be frozen and unfrozen at any time. Where optimizers share a parameter, the one that was
    adapted last says how its gradient is averaged.

    Args:
        optimizer: any torch optimizer.
        zero: shard its state over all ranks, by torch's ``ZeroRedundancyOptimizer``: for a model in
            ``DistributedDataParallel`` without a ``process_group``; each rank updates a part of the
            parameters and sends them to all. In a world of one it changes nothing; Horovod and XLA do not
            have it.
        kwargs: for Horovod those of ``hvd.DistributedOptimizer``: ``named_parameters``, ``compression``,
            ``backward_passes_per_step``, ...

    Returns:
        The optimizer to use from now on; schedulers take this one.

    Raises:
        ValueError: ``zero`` where there is no such thing, or for a model that only some ranks train;
            ``zero``, or a model with ``strategy="fsdp"``, with an optimizer that makes its step from all
            parameters together (one that cannot do without a closure: LBFGS). Nothing was sent.
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
            f"zero=True shards over all ranks, and the model is trained by ranks {list(group.ranks)}, as its "
            "process_group= or mesh= says: leave zero out."
        )
