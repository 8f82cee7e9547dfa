"""A model, an optimizer and a data loader, adapted to the live context."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.collectives import all_reduce
from ignite_dist.context import current_model
from ignite_dist.samplers import DistributedProxySampler, EpochSampler
from ignite_dist.tensors import average_tensors, broadcast_tensors

__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]


def auto_dataloader(dataset: Dataset[Any], **kwargs: Any) -> Any:
    """A data loader that gives each rank its share of ``dataset``.

    In a world of one it is ``DataLoader(dataset, **kwargs)``. Else

    - ``batch_size`` is the batch of all ranks together and is divided by the world size; a warning says so if
      that leaves a remainder, or if it is smaller than the world size and therefore kept per rank;
    - ``num_workers`` is that of all processes of a node and is divided by their number, rounded up;
    - ``sampler`` may be left out (each rank then gets its share, shuffled unless ``shuffle=False``), be a
      ``DistributedSampler`` (used as it is) or any other (its draws are shared out);
    - each full pass is a new epoch for the shuffling, until ``loader.sampler.set_epoch`` is called;
    - ``pin_memory`` is on by default where the device is a GPU.

    Args:
        dataset: an ``IterableDataset`` is left to give different data on different ranks by itself.
        kwargs: those of ``torch.utils.data.DataLoader``.

    Returns:
        A ``torch.utils.data.DataLoader``; with XLA an ``MpDeviceLoader`` that has its attributes, whose
        batches are on :func:`device` already.
    """
    model = current_model()
    kwargs.setdefault("pin_memory", model.device().type == "cuda")
    if model.get_world_size() == 1:
        return model.make_dataloader(dataset, **kwargs)
    if "batch_size" in kwargs:
        kwargs["batch_size"] = _per_rank_batch_size(kwargs["batch_size"], model.get_world_size())
    if kwargs.get("num_workers"):
        kwargs["num_workers"] = _per_process_workers(kwargs["num_workers"], model.get_nproc_per_node())
    if kwargs.get("batch_sampler") is not None:
        warnings.warn("batch_sampler is used as it is: it has to give each rank its own share.", stacklevel=2)
    elif not isinstance(dataset, IterableDataset):
        kwargs["sampler"] = _share(
            dataset,
            kwargs.get("sampler"),
            kwargs.pop("shuffle", None),
            model.get_world_size(),
            model.get_rank(),
        )
    return model.make_dataloader(dataset, **kwargs)


def _per_rank_batch_size(batch_size: int | None, world_size: int) -> int | None:
    if batch_size is None:
        return None
    if batch_size < world_size:
        warnings.warn(
            f"batch_size={batch_size} is smaller than the world size {world_size}, so every rank takes "
            f"batches of {batch_size}: {batch_size * world_size} samples per step.",
            stacklevel=3,
        )
        return batch_size
    per_rank = batch_size // world_size
    if batch_size % world_size:
        warnings.warn(
            f"batch_size={batch_size} does not divide by the world size {world_size}: every rank takes "
            f"batches of {per_rank}, {per_rank * world_size} samples per step.",
            stacklevel=3,
        )
    return per_rank


def _per_process_workers(num_workers: int, nproc_per_node: int) -> int:
    return -(-num_workers // nproc_per_node) if num_workers >= nproc_per_node else num_workers


def _share(dataset: Dataset[Any], sampler: Any, shuffle: bool | None, world_size: int, rank: int) -> Any:
    if sampler is None:
        # Shuffled unless told otherwise, as scripts written for pytorch-ignite rely on.
        return EpochSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle is not False)
    if shuffle:
        raise ValueError("sampler and shuffle=True exclude each other, as in torch's DataLoader.")
    if not isinstance(sampler, DistributedSampler):
        return DistributedProxySampler(sampler, num_replicas=world_size, rank=rank)
    if (sampler.rank, sampler.num_replicas) != (rank, world_size):
        warnings.warn(
            f"The DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, but this is "
            f"rank {rank} of {world_size}.",
            stacklevel=3,
        )
    return sampler


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
    hooks = wrapped._optimizer_step_pre_hooks.values()
    if not live.averages_gradients and live.get_world_size() > 1 and _average_first not in hooks:
        wrapped.register_step_pre_hook(_average_first)
    return wrapped


def _average_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step hook: average the gradients first; with a closure, each time that it has computed them."""
    own, *positional = args
    closure = positional[0] if positional else kwargs.get("closure")
    if closure is None:
        _average_gradients(optimizer)
        return None

    def averaging_closure() -> Any:
        loss = closure()
        _average_gradients(optimizer)
        if loss is None:
            return None
        return all_reduce(loss, "AVERAGE", inplace=False)  # optimizers branch on it, all ranks alike

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (own, averaging_closure, *positional[1:]), others


def _average_gradients(optimizer: Optimizer) -> None:
    live = current_model()
    if live.get_world_size() == 1:  # the context has ended
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:  # another rank may have used it
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    average_tensors(live, gradients, live.world())
