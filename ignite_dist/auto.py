"""A model and an optimizer, adapted to the live context; data loaders are in ``data.py``."""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import DataParallel, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist import tree
from ignite_dist.averaging import average_in_step
from ignite_dist.context import current_model
from ignite_dist.data import auto_dataloader
from ignite_dist.samplers import DistributedProxySampler
from ignite_dist.tensors import broadcast_tensors

# Scripts written for pytorch-ignite import the loader and the sampler from here.
__all__ = [
    "DistributedProxySampler",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "to_device",
    "unwrap_model",
]


def auto_model(model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
    """``model`` on :func:`device`, wrapped for the live context.

    torch.distributed with more than one rank: ``DistributedDataParallel``. No context and several GPUs:
    ``DataParallel``. With Horovod and XLA the optimizer averages gradients (:func:`auto_optim`), so the
    module itself comes back; on XLA with new parameters, and the optimizer is made from these. All ranks
    start from the parameters and buffers of rank 0, unless the module has nothing to train: then it is left
    as it is, and no rank waits for another.

    Args:
        model: any module.
        sync_bn: turns BatchNorm into torch's SyncBatchNorm, which needs GPUs; on the CPU it warns instead.
        kwargs: those of the wrapping class: ``find_unused_parameters`` and so on. Where there is no
            wrapper they have no meaning and are not looked at, so that a script can keep them.

    Returns:
        The wrapped module, or ``model`` itself.
    """
    live = current_model()
    device = live.device()
    if any(value.device != device for value in [*model.parameters(), *model.buffers()]):
        _move(model, device)
    wrapped = live.wrap_model(model, sync_bn=sync_bn, **kwargs)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if wrapped is model and is_trained and live.get_world_size() > 1:  # nobody has made them equal
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], 0, live.world())
    return wrapped


def _move(model: Module, device: torch.device) -> None:
    """Move ``model``, and keep parameters tied: an XLA device gets new ones, one for each place."""
    places: dict[Parameter, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    model.to(device)
    for (module, name), *others in places.values():
        for other, its_name in others:
            setattr(other, its_name, getattr(module, name))


def unwrap_model(model: Module) -> Module:
    """The module inside of what :func:`auto_model` and ``torch.compile`` have put around it.

    ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` are taken off, nested in any order, as
    far as they are on the outside. A model that is none of them comes back as it is, one with FSDP2 too: it
    is changed in place and has nothing around it. To save it, to evaluate it without collectives, or to call
    a method of its own.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile, in 0.5 s
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        else:
            return model


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


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        # On the way to the CPU nobody would wait for the copy before the values are read.
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, type):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, (dict, list, tuple)):
        return tree.map_children(lambda child: _moved(child, device), batch)
    if is_dataclass(batch):
        moved = copy(batch)
        for field in fields(batch):
            object.__setattr__(
                moved, field.name, _moved(getattr(batch, field.name), device)
            )  # frozen ones too
        return moved
    return batch


def auto_optim(optimizer: Optimizer, **kwargs: Any) -> Optimizer:
    """``optimizer``, ready for the live context: itself, but under Horovod.

    Where a model's wrapper averages the gradients nothing is to do. With XLA, and with a computation model
    that has no wrapper, a step hook does it: before the step, and with a closure each time that it has run,
    whose loss is averaged too. A parameter that this rank has not used counts as one with a zero gradient.

    Under Horovod it becomes a ``hvd.DistributedOptimizer`` that starts from the state of rank 0 (Adam's
    moments after a resume) and averages the gradients before each step, and the loss that a closure returns.
    Schedulers, ``zero_grad(set_to_none=...)``, ``add_param_group`` and ``state_dict`` work as without it.
    Between ``backward`` and ``step`` gradients are still each rank's own: to clip them, call
    ``optimizer.synchronize()`` first and step under ``optimizer.skip_synchronize()``.

    Args:
        optimizer: any torch optimizer. Its class can be made from parameters alone, as torch's own can.
        kwargs: for Horovod those of ``hvd.DistributedOptimizer``: ``named_parameters``, ``compression``,
            ``backward_passes_per_step``, ...

    Returns:
        The optimizer to use from now on; schedulers take this one.
    """
    live = current_model()
    wrapped = live.wrap_optimizer(optimizer, **kwargs)
    live.optimizers[id(wrapped)] = wrapped
    if not live.averages_gradients and live.get_world_size() > 1:
        average_in_step(wrapped)
    return wrapped
