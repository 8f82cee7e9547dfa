"""Each rank's share of the data, and the results for all of it in its order."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.context.live import current_model
from ignite_dist.data.splitting import sampler_kwargs
from ignite_dist.samplers import DistributedProxySampler, EpochSampler, ExactSampler, Shard
from ignite_dist.training.exact_passes import share_buffers

__all__ = ["auto_dataloader"]


# --- the share of this rank --------------------------------------------------------------------------


def auto_dataloader(
    dataset: Dataset[Any], *, exact: bool | str = False, shard: bool = False, **kwargs: Any
) -> Any:
    """A data loader that gives each rank its share of ``dataset``.

    In a world of one it is ``DataLoader(dataset, **kwargs)``. Else

    - ``batch_size`` is the batch of all ranks together and is divided by the world size; a warning says so if
      that leaves a remainder, or if it is smaller than the world size and therefore kept per rank;
    - ``num_workers`` is that of all processes of a node and is divided by their number, rounded up: each has
      one at least, if there are any;
    - ``sampler`` may be left out (each rank then gets its share, shuffled unless ``shuffle=False``), be a
      ``DistributedSampler`` (used as it is) or any other (its draws are shared out);
    - each full pass is a new epoch for the shuffling, until ``loader.sampler.set_epoch`` is called;
    - ``pin_memory`` is on by default where the device is a GPU.

    Ranks get equally many samples, for which some are drawn twice. With ``drop_last=True`` up to
    ``world_size - 1`` samples are left out instead. ``exact=True`` draws each once.

    With ``exact`` every rank begins each pass, also one without samples: where models with buffers are
    trained (BatchNorm's running statistics), it begins with a collective that gives all ranks those of rank
    0, in every model of :func:`auto_model`. So ``unwrap_model(model)`` predicts the same on each rank. A copy
    of a model, such as an average of its weights over time, has buffers of its own: ``broadcast`` each first.

    Args:
        dataset: an ``IterableDataset`` is left to give different data on different ranks by itself, but
            with ``shard``.
        exact: for an evaluation, with :func:`gather_in_order`: every sample exactly once, by an
            ``ExactSampler``, and in order unless ``shuffle=True``. Some ranks may have a batch less than
            others, or none, so the loop over it makes no further collective, nor does the model in it:
            ``unwrap_model``. With FSDP2, whose every forward pass is a collective, ``"padded"``: all ranks
            have as many, and :func:`gather_in_order` drops what is too much.
        shard: of an ``IterableDataset`` that gives every process the same items, each rank and each worker
            takes its share: rank ``r`` of ``n`` every ``n``-th item. Ranks may differ by one item, so by one
            batch; with ``drop_last=True`` they do not, where they have as many workers.
        kwargs: those of ``torch.utils.data.DataLoader``.

    Returns:
        A ``torch.utils.data.DataLoader``; with XLA an ``MpDeviceLoader`` that has its attributes, whose
        batches are on :func:`device` already. With ``exact`` a pass raises ``CollectiveMismatchError`` on
        every rank if their models' buffers differ in kind, and ``RuntimeError`` inside of :func:`join`.

    Raises:
        ValueError: ``exact`` with what leaves samples out or has an order of its own (``sampler``,
            ``batch_sampler``, ``drop_last``, an ``IterableDataset``), ``shard`` with a data set that is not
            an ``IterableDataset``.
    """
    model = current_model()
    kwargs.setdefault("pin_memory", model.device().type == "cuda")
    if shard:
        dataset = _sharded(dataset, bool(kwargs.get("drop_last")))
    if exact:
        _check_exact(exact, dataset, kwargs)
        shuffle = bool(kwargs.pop("shuffle", False))
        padded = exact == "padded"
        sampler = ExactSampler(dataset, **sampler_kwargs(), shuffle=shuffle, padded=padded)
        sampler.on_begin = share_buffers if model.get_world_size() > 1 else None
        kwargs["sampler"] = sampler
    if model.get_world_size() == 1:
        if kwargs.get("shuffle") and _is_empty(dataset):  # torch's sampler would refuse to shuffle nothing
            kwargs["shuffle"] = False
        return model.training.make_loader(dataset, **kwargs)
    if "batch_size" in kwargs:
        kwargs["batch_size"] = _per_rank_batch_size(kwargs["batch_size"], model.get_world_size())
    if kwargs.get("num_workers"):
        kwargs["num_workers"] = _per_process_workers(kwargs["num_workers"], model.get_nproc_per_node())
    if kwargs.get("batch_sampler") is not None:
        warnings.warn("batch_sampler is used as it is: it has to give each rank its own share.", stacklevel=2)
    elif not (exact or isinstance(dataset, IterableDataset)):
        kwargs["sampler"] = _share(
            dataset,
            kwargs.get("sampler"),
            kwargs.pop("shuffle", None),
            model.get_world_size(),
            model.get_rank(),
            bool(kwargs.get("drop_last")),
        )
    return model.training.make_loader(dataset, **kwargs)


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
    return -(-num_workers // nproc_per_node) if num_workers > 0 else num_workers  # which torch refuses


def _is_empty(dataset: Dataset[Any]) -> bool:
    return not isinstance(dataset, IterableDataset) and isinstance(dataset, Sized) and len(dataset) == 0


def _share(
    dataset: Dataset[Any], sampler: Any, shuffle: bool | None, world_size: int, rank: int, drop_last: bool
) -> Any:
    if sampler is None:
        # Shuffled unless told otherwise, as scripts written for pytorch-ignite rely on.
        return EpochSampler(
            dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle is not False,
            drop_last=drop_last,
        )
    if shuffle:
        raise ValueError("sampler and shuffle=True exclude each other, as in torch's DataLoader.")
    if not isinstance(sampler, DistributedSampler):
        return DistributedProxySampler(sampler, num_replicas=world_size, rank=rank, drop_last=drop_last)
    if (sampler.rank, sampler.num_replicas) != (rank, world_size):
        warnings.warn(
            f"The DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, but this is "
            f"rank {rank} of {world_size}.",
            stacklevel=3,
        )
    return sampler


def _sharded(dataset: Dataset[Any], drop_last: bool) -> Shard:
    if not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"shard=True is for an IterableDataset, got {type(dataset).__name__}, which has a length and is "
            "shared out by its sampler."
        )
    return Shard(dataset, **sampler_kwargs(), drop_last=drop_last)


def _check_exact(exact: bool | str, dataset: Dataset[Any], kwargs: dict[str, Any]) -> None:
    if exact is not True and exact != "padded":
        raise ValueError(f"exact is True, False or 'padded', got {exact!r}.")
    if isinstance(dataset, IterableDataset):
        raise ValueError("exact=True needs a data set with a length and an order, not an IterableDataset.")
    for name in ("sampler", "batch_sampler", "drop_last"):
        if kwargs.get(name):
            raise ValueError(f"exact=True draws every sample once by a sampler of its own, without {name}.")


# --- results in the order of the data set --------------------------------------------------------------
