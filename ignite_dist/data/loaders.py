"""Data loaders for this rank's share of the data."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.call_sites import warn_user
from ignite_dist.comp_models import ComputationModel
from ignite_dist.context.live import current_model
from ignite_dist.context.meshes import data_group
from ignite_dist.data.splitting import Place, place_in
from ignite_dist.samplers import DistributedProxySampler, EpochSampler, ExactSampler, Shard
from ignite_dist.training.exact_passes import check_exact_group, share_buffers


def auto_dataloader(
    dataset: Dataset[Any],
    *,
    exact: bool | str = False,
    shard: bool = False,
    group: Any = None,
    **kwargs: Any,
) -> Any:
    """A data loader for this rank's share of ``dataset``.

    In a block ``with mesh:`` (see :func:`mesh`) "all ranks" below are the ranks along the data dimensions of
    the mesh. The ranks of one tensor-parallel group get the same batches.

    In a world of one the result is ``DataLoader(dataset, **kwargs)``. In a larger world:

    - ``batch_size`` is the total over all ranks and is divided by the world size. There is a warning if
      the division leaves a remainder, or if ``batch_size`` is less than the world size and kept per rank.
    - ``num_workers`` is the total per node. It is divided by the node's number of processes and rounded up.
    - ``sampler`` may be left out (each rank draws its share, shuffled unless ``shuffle=False``), may be a
      ``DistributedSampler`` (used as it is), or any other sampler (its draws are split over the ranks).
    - The shuffle order changes after each full pass, until ``loader.sampler.set_epoch`` is called.
    - ``pin_memory`` is on by default if the device is a GPU.

    All ranks draw equally many samples: some samples are drawn twice, or with ``drop_last=True`` up to
    ``world_size - 1`` samples are dropped. ``exact=True`` draws each sample once.

    With ``exact`` every rank must begin each pass, even without samples. If models with buffers (running
    statistics of BatchNorm) are trained, the pass begins with a collective: every model of
    :func:`auto_model` takes the buffers of rank 0, so ``unwrap_model(model)`` predicts the same on each
    rank. A copy of a model (for averaged weights, say) has its own buffers: ``broadcast`` them first.

    With ``group``, the ranks of the group share the data. Above and below, "all ranks" are then those of the
    group, and the world size is the group's size. Ranks at the same position of different groups draw the
    same samples: with tensor parallelism pass the group of data-parallel ranks, because the ranks of a
    tensor-parallel group need equal batches. A data set that draws random numbers (augmentation) must draw
    the same ones on those ranks. Buffers are shared inside the group only.

    Args:
        dataset: an ``IterableDataset`` must itself yield different data on each rank, unless ``shard=True``.
        exact: for an evaluation with :func:`gather_in_order`: an ``ExactSampler`` draws every sample exactly
            once, in order unless ``shuffle=True``. Ranks may have different numbers of batches, or none, so
            the loop must not call collectives: use ``unwrap_model``. Under FSDP2 every forward pass is a
            collective. With ``"padded"`` all ranks draw equally many samples, and :func:`gather_in_order`
            drops the extra samples.
        shard: split an ``IterableDataset`` over ranks and workers: rank ``r`` of ``n`` takes every ``n``-th
            item. The data set must yield the same items in every process. The ranks' numbers of items, and
            of batches, differ by at most one. They are equal with ``drop_last=True`` and equally many
            workers per rank.
        group: the ranks that share the data, as in :func:`all_reduce`. Only ``exact`` makes a group of a list
            of ranks, which then needs the same calls as in :func:`new_group`.
        kwargs: keywords of ``torch.utils.data.DataLoader``.

    Returns:
        A ``torch.utils.data.DataLoader``. With XLA an ``MpDeviceLoader`` with the same attributes, whose
        batches are on :func:`device` already. With ``exact`` a pass raises ``CollectiveMismatchError`` on
        every rank if the models' buffers differ in names, shapes or dtypes, and ``RuntimeError`` inside of
        :func:`join`.

    Raises:
        TypeError: ``dataset`` is None or a ``DataLoader``.
        ValueError: ``exact`` with ``sampler``, ``batch_sampler``, ``drop_last`` or an ``IterableDataset``;
            ``shard`` with a data set that is not an ``IterableDataset``; this rank is outside ``group``; or
            ``exact`` on XLA with a group of only some ranks.
    """
    if dataset is None or isinstance(dataset, DataLoader):
        raise TypeError(
            f"auto_dataloader takes a data set and the keywords of DataLoader, got {type(dataset).__name__}."
        )
    model = current_model()
    group = data_group(model) if group is None else group
    place = place_in(model, group)
    kwargs.setdefault("pin_memory", model.device().type == "cuda")
    if shard:
        dataset = _sharded(dataset, place, bool(kwargs.get("drop_last")))
    if exact:
        _check_exact(exact, dataset, kwargs)
        kwargs["sampler"] = _exact_sampler(
            model, dataset, place, group, shuffle=bool(kwargs.pop("shuffle", False)), padded=exact == "padded"
        )
    if model.get_world_size() == 1:
        if kwargs.get("shuffle") and _is_empty(dataset):  # torch's RandomSampler raises for an empty data set
            kwargs["shuffle"] = False
        return model.training.make_loader(dataset, **kwargs)
    if "batch_size" in kwargs:
        size_name = "world size" if group is None else "group's size"
        kwargs["batch_size"] = _per_rank_batch_size(kwargs["batch_size"], place.num_ranks, size_name)
    if kwargs.get("num_workers"):
        kwargs["num_workers"] = _per_process_workers(kwargs["num_workers"], model.get_nproc_per_node())
    if kwargs.get("batch_sampler") is not None:
        warn_user("batch_sampler is used as it is: it must draw only this rank's share.")
    elif not (exact or isinstance(dataset, IterableDataset)):
        kwargs["sampler"] = _sampler_of_rank(
            dataset, kwargs.get("sampler"), kwargs.pop("shuffle", None), place, bool(kwargs.get("drop_last"))
        )
    return model.training.make_loader(dataset, **kwargs)


def _exact_sampler(
    model: ComputationModel, dataset: Dataset[Any], place: Place, group: Any, *, shuffle: bool, padded: bool
) -> ExactSampler:
    members = model.groups.world if group is None else model.groups.resolve(group)
    check_exact_group("auto_dataloader(exact=...)", model, members)
    sampler = ExactSampler(dataset, place.num_ranks, place.number, shuffle=shuffle, padded=padded)
    sampler.group = members.handle
    if model.get_world_size() > 1:
        sampler.on_begin = partial(share_buffers, members.handle)
    return sampler


def _per_rank_batch_size(batch_size: int | None, num_ranks: int, size_name: str) -> int | None:
    if batch_size is None:
        return None
    if batch_size < num_ranks:
        warn_user(
            f"batch_size={batch_size} is smaller than the {size_name} {num_ranks}. It is used on every rank, "
            f"so each step has {batch_size * num_ranks} samples.",
        )
        return batch_size
    per_rank = batch_size // num_ranks
    if batch_size % num_ranks:
        warn_user(
            f"batch_size={batch_size} is not divisible by the {size_name} {num_ranks}. Every rank uses "
            f"batches of {per_rank}: {per_rank * num_ranks} samples per step.",
        )
    return per_rank


def _per_process_workers(num_workers: int, nproc_per_node: int) -> int:
    # Negative numbers stay as they are: DataLoader raises its own error.
    return -(-num_workers // nproc_per_node) if num_workers > 0 else num_workers


def _is_empty(dataset: Dataset[Any]) -> bool:
    return not isinstance(dataset, IterableDataset) and isinstance(dataset, Sized) and len(dataset) == 0


def _sampler_of_rank(
    dataset: Dataset[Any], sampler: Any, shuffle: bool | None, place: Place, drop_last: bool
) -> Any:
    if sampler is None:
        # Shuffled by default: scripts written for pytorch-ignite rely on it.
        return EpochSampler(
            dataset,
            num_replicas=place.num_ranks,
            rank=place.number,
            shuffle=shuffle is not False,
            drop_last=drop_last,
        )
    if shuffle:
        raise ValueError("sampler and shuffle=True exclude each other, as in torch's DataLoader.")
    if not isinstance(sampler, DistributedSampler):
        return DistributedProxySampler(sampler, place.num_ranks, place.number, drop_last=drop_last)
    if (sampler.num_replicas, sampler.rank) != place:
        warn_user(
            f"The DistributedSampler was made for rank {sampler.rank} of {sampler.num_replicas}, but this is "
            f"rank {place.number} of {place.num_ranks}.",
        )
    return sampler


def _sharded(dataset: Dataset[Any], place: Place, drop_last: bool) -> Shard:
    if not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"shard=True needs an IterableDataset, got {type(dataset).__name__}. A data set "
            "with a length needs no shard=True: its sampler splits it."
        )
    return Shard(dataset, place.num_ranks, place.number, drop_last=drop_last)


def _check_exact(exact: bool | str, dataset: Dataset[Any], kwargs: dict[str, Any]) -> None:
    if exact is not True and exact != "padded":
        raise ValueError(f"exact must be True, False or 'padded', got {exact!r}.")
    if isinstance(dataset, IterableDataset):
        raise ValueError("exact=True needs a data set with a length and an order, not an IterableDataset.")
    for name in ("sampler", "batch_sampler", "drop_last"):
        if kwargs.get(name):
            raise ValueError(f"exact=True uses its own sampler, so {name} must be left out.")
