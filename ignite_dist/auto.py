"""A model and an optimizer, adapted to the live context; data loaders are in ``data.py``."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import DataParallel, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist import tree
from ignite_dist.adapted import group_of_parameters, remember_model
from ignite_dist.averaged import parameters_of
from ignite_dist.averaging import average_in_step, average_losses
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context import current_model
from ignite_dist.control import exchange_outcomes
from ignite_dist.data import auto_dataloader
from ignite_dist.frozen import watch_frozen
from ignite_dist.samplers import DistributedProxySampler
from ignite_dist.tensors import broadcast_tensors
from ignite_dist.tracing import traced

# Scripts written for pytorch-ignite import the loader and the sampler from here.
__all__ = [
    "DistributedProxySampler",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "mark_forward_method",
    "to_device",
    "unwrap_model",
]

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
    live.check_not_joining()
    given = {"wrapper": wrapper, "comm_hook": comm_hook, "buffer_hook": buffer_hook}
    options = {name: value for name, value in given.items() if value is not None}
    _check_strategy(strategy, sync_bn, wrap, comm_hook, options)
    shards = strategy == "fsdp" and live.get_world_size() > 1
    shares_buffers = kwargs.get("broadcast_buffers", True)
    if strategy == "fsdp":  # this keyword alone means something without DistributedDataParallel
        kwargs.pop("broadcast_buffers", None)
    if shards:
        live.check_sharding()
        group = _sharding_group(live, kwargs.get("mesh"))
        _bring_from_meta(live, model, group)
    _check_not_meta(model)
    device = live.device()
    if any(value.device != device for value in [*model.parameters(), *model.buffers()]):
        _move(model, device)
    wrapped = model if strategy == "fsdp" else live.wrap_model(model, sync_bn=sync_bn, **options, **kwargs)
    if live.get_world_size() == 1:
        return wrapped
    inner = unwrap_model(wrapped)
    is_adapted = shards or any(parameter.requires_grad for parameter in model.parameters())
    if not shards:
        group = live.gradient_group(wrapped, ())
    if is_adapted and wrapped is model:  # a wrapper sees to it
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], group.ranks[0], group)
    if shards:
        live.shard_model(model, wrap, **kwargs)
    if is_adapted:
        remember_model(live, inner, group, shares_buffers)
    is_averaged_later = shards or (is_adapted and not isinstance(wrapped, DistributedDataParallel))
    watch_frozen(live, inner, wrapped, is_averaged_later)
    return wrapped


def _sharding_group(live: ComputationModel, mesh: Any) -> Group:
    """The ranks of the device mesh that a model is sharded over; of none the world."""
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, Tensor):
        return live.world()
    return live.resolve_group(sorted(ranks.flatten().tolist()))


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


def unwrap_model(model: Module) -> Module:
    """The module inside of what :func:`auto_model` and ``torch.compile`` have put around it.

    ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` are taken off, nested in any order, as
    far as they are on the outside. A model that is none of them comes back as it is, one with FSDP2 too: it
    is changed in place and has nothing around it. To save it, to evaluate it without collectives, or to call
    a method of its own. Never communicates, so one rank may call it alone. After training the module's
    buffers are this rank's, until a pass over a loader of ``auto_dataloader(exact=...)`` begins.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile, in 0.5 s
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def mark_forward_method(model: Module, name: str) -> None:
    """Make ``model.name(...)`` call that method of the module inside as a forward pass of the wrapper.

    Called on the module inside, a method of its own bypasses ``DistributedDataParallel``, and its gradients
    are not averaged. Where :func:`auto_model` wraps nothing this changes nothing.

    Args:
        model: what :func:`auto_model` returned.
        name: of a method of the module inside, which computes a loss for example.

    Raises:
        AttributeError: the module has no such method.
        ValueError: ``name`` is "forward"; or ``torch.compile`` is around the wrapper or inside of it, which
            keeps what ``forward`` was; or the wrapper is ``DataParallel``.

    Example::

        idist.mark_forward_method(model, "training_step")
        model.training_step(batch).backward()
    """
    inner = unwrap_model(model)
    method = getattr(inner, name)
    if name == "forward":
        raise ValueError("forward is what calling the model runs already.")
    if inner is model:
        return
    if not isinstance(model, DistributedDataParallel) or model.module is not inner:
        raise ValueError(
            f"{name} can go through the forward pass of a DistributedDataParallel around the module itself, "
            "not of torch.compile, which keeps what forward was, nor of DataParallel."
        )

    def through_forward(*args: Any, **kwargs: Any) -> Any:
        own = vars(inner).get("forward")  # somebody else may have replaced it

        def restore() -> None:
            vars(inner).pop("forward", None)
            if own is not None:
                inner.forward = own

        def instead(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call it
            return method(*args, **kwargs)

        inner.forward = instead
        try:
            return model(*args, **kwargs)
        finally:
            restore()

    setattr(model, name, through_forward)


@traced
def to_device(batch: Any) -> Any:
    """``batch`` with all of its tensors on :func:`device`.

    To an accelerator it does not wait for the copies of pinned memory: whatever uses them there comes after.

    Args:
        batch: a tensor, anything with a ``to(device)`` of its own (a ``PackedSequence``, a tokenizer's
            batch), or dicts, lists, tuples, named tuples and dataclasses of them. What is neither stays.

    Returns:
        A new structure of the same types; tensors that are there already are not copied.
    """
    return _moved(batch, current_model().device())


@traced
def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        # On the way to the CPU nobody would wait for the copy before the values are read.
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, (type, torch.Size)):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, (dict, list, tuple)):
        return tree.map_children(lambda child: _moved(child, device), batch)
    if isinstance(batch, deque):
        return deque((_moved(child, device) for child in batch), batch.maxlen)
    if isinstance(batch, MutableMapping):
        mapping = copy(batch)
        mapping.update({key: _moved(value, device) for key, value in batch.items()})
        return mapping
    if is_dataclass(batch):
        moved = copy(batch)
        for field in fields(batch):
            value = _moved(getattr(batch, field.name), device)
            object.__setattr__(moved, field.name, value)  # of frozen ones too
        return moved
    return batch


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
    live.check_not_joining()
    if zero and live.get_world_size() > 1:
        _check_zero(live, optimizer)
        optimizer = live.shard_optimizer(optimizer)
    wrapped = live.wrap_optimizer(optimizer, **kwargs)
    live.optimizers[id(wrapped)] = wrapped
    if not live.averages_gradients and live.get_world_size() > 1:
        average_in_step(wrapped)
    elif live.averages_in_backward and live.get_world_size() > 1:
        average_losses(wrapped)
    return wrapped


def _check_zero(live: ComputationModel, optimizer: Optimizer) -> None:
    group = group_of_parameters(live, parameters_of(optimizer))
    if len(group.ranks) < live.get_world_size():
        raise ValueError(
            f"zero=True shards over all ranks, and the model is trained by ranks {list(group.ranks)}, as its "
            "process_group= or mesh= says: leave zero out."
        )
