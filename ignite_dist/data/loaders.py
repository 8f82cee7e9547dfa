"""Data loaders for this rank's share of the data."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.collectives.interrupts import one_call
from ignite_dist.comp_models import ComputationModel
from ignite_dist.context.live import current_model
from ignite_dist.data.model_buffers import check_exact_group, share_buffers
from ignite_dist.data.orders import agree_on_order, batch_sampler_keyword
from ignite_dist.data.passes import Order, make_loader
from ignite_dist.data.samplers import (
    BatchSamplerPart,
    DistributedProxySampler,
    EpochSampler,
    ExactSampler,
    Shard,
    length_or_none,
    part_size,
    place_of,
)
from ignite_dist.data.splitting import Place, data_group, place_in
from ignite_dist.internals.call_sites import warn_user


@one_call
def auto_dataloader(
    dataset: Dataset[Any] | DataLoader[Any],
    *,
    exact: bool | str = False,
    shard: bool = False,
    group: Any = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """A data loader for this rank's share of ``dataset``. All ranks make this call.

    On any number of ranks it draws the batches that one process would draw, and each rank takes its part of
    each batch: of ``n`` ranks, rank ``r`` takes the items ``r``, ``r + n``, ``r + 2 * n``, ... of it. So
    ``batch_size`` is the total over all ranks. In a batch with fewer items than ranks, ranks without an item
    repeat one of its items.

    The order depends only on the loader's seed and on the epoch: the number of whole passes so far, until
    ``loader.set_epoch`` is called. In one small collective the ranks compare what has to agree.

    With ``exact`` every rank must begin each pass, even without samples. In a block ``with mesh:`` (see
    :func:`mesh`) "all ranks" are the ranks along the data dimensions of the mesh.

    See the guide ``docs/data.md``.

    Args:
        dataset: a data set, or a ``DataLoader``, which is taken over with all that it was made with. An
            ``IterableDataset`` must itself yield different data on each rank, unless ``shard=True``.
        exact: for an evaluation with :func:`gather_in_order`: an ``ExactSampler`` draws every sample exactly
            once, in order unless ``shuffle=True``. Ranks may have different numbers of batches, or none, so
            the loop must not call collectives: use ``unwrap_model``. Under FSDP2 every forward pass is a
            collective. With ``"padded"`` all ranks draw equally many samples, and :func:`gather_in_order`
            drops the extra samples.
        shard: split an ``IterableDataset`` as above. It must yield the same items in every process. If the
            last batch has fewer items than there are ranks, ranks without an item have no such batch;
            ``drop_last=True`` drops it.
        group: the ranks that share the data, as in :func:`all_reduce`. Ranks at the same position of
            different groups draw the same samples. Only ``exact`` makes a group of a list of ranks, which
            then needs the same calls as in :func:`new_group`.
        seed: of random orders, the same on every rank. By default the first rank draws it from
            ``generator``, else from torch's default generator. With ``group`` the default is the seed of the
            last :func:`seed_everything`, else 0.
        kwargs: keywords of ``torch.utils.data.DataLoader``. ``num_workers`` is the total per node.
            ``sampler`` and ``batch_sampler`` are drawn from as in one process, and each rank takes its part;
            a sampler that was made for this rank is used as it is. With ``generator``, which is the same on
            every rank, the workers of each rank have a seed of their own.

    Returns:
        A ``torch.utils.data.DataLoader`` that also has ``set_epoch``. With XLA an ``MpDeviceLoader`` with
        the same attributes, whose batches are on :func:`device` already. With ``exact`` a pass raises
        ``CollectiveMismatchError`` on every rank if the models' buffers differ in names, shapes or dtypes,
        and ``RuntimeError`` inside of :func:`uneven_inputs`.

    Raises:
        CollectiveMismatchError: the ranks have other data sets, batch sizes or samplers, or some of them make
            another call. Raised on every rank that takes part.
        TypeError: ``dataset`` is None, or a loader of another class than ``DataLoader``.
        ValueError: ``exact`` with ``sampler``, ``batch_sampler``, ``drop_last`` or an ``IterableDataset``;
            ``shard`` with a data set that is not an ``IterableDataset``; this rank is outside ``group``; a
            sampler was made for another rank; or ``exact`` on XLA with a group of only some ranks.
    """
    if isinstance(dataset, DataLoader):
        dataset, kwargs = _taken_over(dataset, kwargs)
    _check_settings(dataset, exact, shard, seed, kwargs)
    model = current_model()
    requested, group = group, data_group(model) if group is None else group
    place = place_in(model, group)
    is_whole = shard or not isinstance(dataset, IterableDataset)
    order = Order()
    if is_whole:
        order = agree_on_order(model, requested, dataset, place, exact, seed, kwargs)
    if is_whole and kwargs.get("in_order") is False and kwargs.get("num_workers"):
        kwargs["in_order"] = True
        warn_user(
            "in_order=False is left out: batches that come in another order on each rank are parts of other "
            "steps, and a checkpoint could not name those that a run has had."
        )
    kwargs.setdefault("pin_memory", model.device().type == "cuda")
    if kwargs.get("shuffle") and length_or_none(dataset) == 0:  # torch's RandomSampler raises
        kwargs["shuffle"] = False
    if kwargs.get("num_workers") and model.get_world_size() > 1:
        kwargs["num_workers"] = _per_process_workers(kwargs["num_workers"], model.get_nproc_per_node())
    if batches := batch_sampler_keyword(kwargs):
        if place.num_ranks > 1 and order.num_ranks_of_sampler is None:
            kwargs[batches] = BatchSamplerPart(kwargs[batches], *place)
    elif exact:
        kwargs["sampler"] = _exact_sampler(model, dataset, place, group, order, exact, kwargs)
        batch_size = kwargs.get("batch_size") or 0  # an evaluation has no steps, whose size would count
        if batch_size >= place.num_ranks:
            kwargs["batch_size"] = batch_size // place.num_ranks
    elif order.num_ranks_of_sampler is not None or not is_whole:
        _split_batch_size(kwargs, place, group, order)
    else:
        dataset = _split_batches(dataset, place, group, order, kwargs)
    if model.ranks_in_process() > 1:  # they would share torch's generator
        own = torch.Generator().manual_seed(torch.initial_seed() + model.get_rank())
        kwargs.setdefault("generator", own)
    device_loader = model.training.device_loader()
    return make_loader(dataset, order, place.number, device_loader, model.device(), **kwargs)


def _check_settings(
    dataset: Dataset[Any], exact: bool | str, shard: bool, seed: Any, kwargs: dict[str, Any]
) -> None:
    if dataset is None or _is_loader(dataset):
        raise TypeError(
            f"auto_dataloader takes a data set and the keywords of DataLoader, or a torch DataLoader, got a "
            f"{type(dataset).__name__}. Pass its data set, with batch_size, shuffle and so on."
        )
    if exact:
        _check_exact(exact, dataset, kwargs)
    if shard and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"shard=True needs an IterableDataset, got {type(dataset).__name__}. A data set "
            "with a length needs no shard=True: its sampler splits it."
        )
    size = kwargs.get("batch_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"batch_size must be an int of at least 1, or None, got {size!r}.")
    if kwargs.get("shuffle") and (
        kwargs.get("sampler") is not None or kwargs.get("batch_sampler") is not None
    ):
        raise ValueError("sampler and shuffle=True exclude each other, as in torch's DataLoader.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 62):
        raise ValueError(f"seed must be an int in [0, 2**62), got {seed!r}.")


def _is_loader(value: Any) -> bool:
    """True for another library's loader: it has batches of a data set."""
    return isinstance(value, DataLoader) or (hasattr(value, "dataset") and hasattr(value, "batch_size"))


_TAKEN_OVER = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


def _taken_over(loader: DataLoader[Any], kwargs: dict[str, Any]) -> tuple[Dataset[Any], dict[str, Any]]:
    """The data set and the keywords that torch's ``loader`` was made with.

    Raises:
        TypeError: it is of a subclass, which may make its batches otherwise; or there are more keywords.
    """
    if type(loader) is not DataLoader:
        raise TypeError(
            f"auto_dataloader takes over a torch DataLoader, and {type(loader).__name__} is another class, "
            "which may make its batches otherwise. Pass its data set, with batch_size, shuffle and so on."
        )
    if kwargs:
        raise TypeError(
            f"auto_dataloader takes over the settings of the DataLoader: {', '.join(kwargs)} must be left "
            "out. To change a setting, pass the data set and all keywords."
        )
    settings = {name: getattr(loader, name) for name in _TAKEN_OVER if hasattr(loader, name)}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return loader.dataset, {**settings, "batch_sampler": loader.batch_sampler}
    settings.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, settings
    sampler: Any = loader.sampler
    draws_all = length_or_none(sampler) == length_or_none(loader.dataset)
    if type(sampler) is SequentialSampler and draws_all:
        settings["shuffle"] = False
    elif type(sampler) is RandomSampler and draws_all and _is_made_by(loader, sampler):
        settings["shuffle"] = True
    else:
        settings["sampler"] = sampler
        found = place_of(sampler)
        if found is not None and loader.batch_size is not None:  # it is that of a rank
            settings["batch_size"] = loader.batch_size * found[0]
    return loader.dataset, settings


def _is_made_by(loader: DataLoader[Any], sampler: RandomSampler) -> bool:
    """True if ``DataLoader(shuffle=True)`` would make such a sampler."""
    return not sampler.replacement and sampler.generator is loader.generator


def _split_batch_size(kwargs: dict[str, Any], place: Place, group: Any, order: Order) -> None:
    """Let this rank make smaller batches of its own share of the data, and note their size in ``order``."""
    if place.num_ranks > 1 and kwargs.get("batch_size") is not None:
        kwargs["batch_size"] = _equal_batch_size(kwargs["batch_size"], place.num_ranks, group)
    if isinstance(kwargs.get("sampler"), DistributedSampler):  # the same batches on any number of ranks
        order.num_ranks_of_sampler = None
        order.batch_size = (kwargs.get("batch_size", 1) or 1) * place.num_ranks


def _split_batches(
    dataset: Dataset[Any], place: Place, group: Any, order: Order, kwargs: dict[str, Any]
) -> Dataset[Any]:
    """Let this rank take its part of each batch that one process would make; returns the data set to use."""
    sampler = kwargs.get("sampler")
    order.source = dataset if sampler is None else sampler
    order.is_batched = kwargs.get("batch_size") is not None
    order.batch_size = place.num_ranks
    if order.is_batched:
        order.batch_size = _total_batch_size(kwargs["batch_size"], place.num_ranks, group)
        kwargs["batch_size"] = part_size(order.batch_size, *place)
    if isinstance(dataset, IterableDataset):
        return _shard(dataset, place, order.batch_size, kwargs)
    if place.num_ranks > 1:
        kwargs["sampler"] = _sampler_of_rank(dataset, place, order, kwargs)
    return dataset


def _exact_sampler(
    model: ComputationModel,
    dataset: Dataset[Any],
    place: Place,
    group: Any,
    order: Order,
    exact: bool | str,
    kwargs: dict[str, Any],
) -> ExactSampler:
    members = model.groups.world if group is None else model.groups.resolve(group)
    check_exact_group("auto_dataloader(exact=...)", model, members)
    shuffle = bool(kwargs.pop("shuffle", False))
    sampler = ExactSampler(
        dataset,
        place.num_ranks,
        place.number,
        shuffle=shuffle,
        seed=order.seed or 0,
        padded=exact == "padded",
    )
    sampler.group = members.handle
    if model.get_world_size() > 1:
        sampler.on_begin = partial(share_buffers, members.handle)
    return sampler


def _sampler_of_rank(
    dataset: Dataset[Any], place: Place, order: Order, kwargs: dict[str, Any]
) -> DistributedSampler[Any]:
    settings: dict[str, Any] = {
        "num_replicas": place.num_ranks,
        "rank": place.number,
        "drop_last": bool(kwargs.get("drop_last")),
        "batch_size": order.batch_size,
        "seed": order.seed or 0,
    }
    shuffle, sampler = kwargs.pop("shuffle", None), kwargs.get("sampler")
    if sampler is not None:
        return DistributedProxySampler(sampler, **settings)
    if shuffle is None:
        warn_user(
            "The samples are drawn in the order of the data set, as in one process: pass shuffle=True, or "
            "shuffle=False. (pytorch-ignite shuffles them if there are several ranks.)"
        )
    return EpochSampler(dataset, shuffle=bool(shuffle), **settings)


def _shard(dataset: IterableDataset[Any], place: Place, batch_size: int, kwargs: dict[str, Any]) -> Shard:
    """This rank's part of a stream, as whole batches: these are the same with any number of workers."""
    drop_last = bool(kwargs.pop("drop_last", False))
    is_batched = kwargs.get("batch_size", 1) is not None
    if is_batched:
        kwargs["batch_size"] = None
        if kwargs.get("collate_fn") is None:
            kwargs["collate_fn"] = default_collate
    return Shard(dataset, *place, drop_last=drop_last, batch_size=batch_size, is_batched=is_batched)


def _total_batch_size(batch_size: int, num_ranks: int, group: Any) -> int:
    """Samples of a batch of all ranks together, at least one per rank."""
    if batch_size >= num_ranks:
        return batch_size
    warn_user(
        f"batch_size={batch_size} is smaller than the {_size_name(group)} {num_ranks}. It is used on every "
        f"rank, so each step has {batch_size * num_ranks} samples.",
    )
    return batch_size * num_ranks


def _equal_batch_size(batch_size: int, num_ranks: int, group: Any) -> int:
    """The same batch size on each rank, for data that is split otherwise."""
    per_rank = _total_batch_size(batch_size, num_ranks, group) // num_ranks
    if batch_size > num_ranks and batch_size % num_ranks:
        warn_user(
            f"batch_size={batch_size} is not divisible by the {_size_name(group)} {num_ranks}. Every rank "
            f"uses batches of {per_rank}: {per_rank * num_ranks} samples per step.",
        )
    return per_rank


def _size_name(group: Any) -> str:
    return "world size" if group is None else "group's size"


def _per_process_workers(num_workers: int, nproc_per_node: int) -> int:
    # Negative numbers stay as they are: DataLoader raises its own error.
    return -(-num_workers // nproc_per_node) if num_workers > 0 else num_workers


def _check_exact(exact: bool | str, dataset: Dataset[Any], kwargs: dict[str, Any]) -> None:
    if exact is not True and exact != "padded":
        raise ValueError(f"exact must be True, False or 'padded', got {exact!r}.")
    if isinstance(dataset, IterableDataset):
        raise ValueError("exact=True needs a data set with a length and an order, not an IterableDataset.")
    for name in ("sampler", "batch_sampler", "drop_last"):
        if kwargs.get(name):
            raise ValueError(f"exact=True uses its own sampler, so {name} must be left out.")
