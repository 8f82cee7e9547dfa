"""Each rank's share of the data, and the results for all of it in its order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_dist import tree
from ignite_dist.adapted import check_pass, share_buffers
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.safe import safe
from ignite_dist.samplers import DistributedProxySampler, EpochSampler, ExactSampler, Shard, part
from ignite_dist.tensors import gather_rows

__all__ = ["auto_dataloader", "gather_in_order", "sampler_kwargs", "split"]


# --- the share of this rank --------------------------------------------------------------------------


def sampler_kwargs() -> dict[str, int]:
    """``num_replicas`` and ``rank``, for a sampler of one's own: ``MySampler(data, **sampler_kwargs())``."""
    model = current_model()
    return {"num_replicas": model.get_world_size(), "rank": model.get_rank()}


def split(sequence: Any) -> Any:
    """This rank's share of a sequence: a contiguous part, in rank order. Never communicates.

    The parts together are the sequence, and ``all_gather`` of a list made of one gives lists in its order.
    Their lengths differ by one at most, and the first ranks have the longer ones.

    Args:
        sequence: the same on every rank; has a length and can be sliced: a list, a tensor, an array.

    Returns:
        ``sequence[start:stop]``, which is empty on the last ranks if there are more ranks than items.

    Raises:
        TypeError: it cannot be sliced.

    Example::

        idist.split(["a", "b", "c"])  # on two ranks: ["a", "b"] and ["c"]
    """
    model = current_model()
    try:
        return sequence[part(len(sequence), model.get_world_size(), model.get_rank())]
    except (TypeError, KeyError):
        raise TypeError(
            f"split takes what has a length and can be sliced, got {type(sequence).__name__}. "
            "Of anything that can be iterated over, make a list first."
        ) from None


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
        return model.make_dataloader(dataset, **kwargs)
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


def gather_in_order(values: Any, loader: Any) -> Any:
    """What all ranks have computed in a pass over ``loader``, in the order of its data set.

    Every sample comes exactly once, whatever the number of samples and ranks, the batch size and
    ``shuffle``. Every rank calls it, once after a whole pass and before the next, those without a sample too.
    A small exchange of what each has, then a collective for each tensor and one for all lists together.

    Args:
        values: everything this rank has computed from the loader, in its order: a tensor of shape
            ``(n, *S)`` for its ``n`` samples; a list with one entry per sample, strings for example; or a
            dict, tuple or named tuple of them. ``(*S)`` and dtype are the same on every rank. What a rank
            without a sample gives is not looked at.
        loader: of ``auto_dataloader(..., exact=True)``; or any with an ``ExactSampler``, a pass over which
            leaves the buffers of models as they are on each rank.

    Returns:
        The same kind of value for the ``N`` samples of the data set, on every rank: ``(N, *S)`` on the
        device it came from (of a rank without a sample: on :func:`device`, or the CPU where others have it
        there), without a gradient; a list of ``N`` entries.

    Raises:
        ValueError: the loader has no ``ExactSampler``; or a rank's values are not as many as its samples, or
            the ranks' samplers differ: raised on every rank, with what each has.
        TypeError: other values, raised on every rank; or a dict with other keys than :func:`all_reduce`
            takes, on this rank before anything was sent.
        CollectiveMismatchError: ranks gave different structures, shapes or dtypes; raised on every rank.

    Example::

        loader = idist.auto_dataloader(data_set, batch_size=64, exact=True)
        predicted = [net(idist.to_device(x)).argmax(1) for x, _ in loader]
        everything = idist.gather_in_order(torch.cat(predicted) if predicted else None, loader)
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ExactSampler):
        raise ValueError(
            "gather_in_order needs a loader of auto_dataloader(..., exact=True), which knows which sample is "
            f"where; got one with {type(sampler).__name__}."
        )
    model = current_model()
    members = model.resolve_group(None)
    if (sampler.num_replicas, sampler.rank) != (len(members.ranks), model.get_rank()):
        raise ValueError(
            f"The loader was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{model.get_rank()} of {len(members.ranks)}."
        )
    own = values if sampler.num_samples else None  # what a rank without a sample gives is not looked at
    leaves, _ = tree.flatten(own, list)  # refuses keys, so before the pass, which may have a collective, ends
    sampler.end_pass()
    order, counts = sampler.order(), [sampler.num_drawn_by(rank) for rank in members.ranks]
    described = tree.rebuild(own, map(_Column.of, leaves), list)
    model.announce("gather_in_order", members)
    gathered = model.gather_objects((sampler.meant(), described), members)
    check_pass(gathered)
    if any(meant != gathered[0][0] for meant, _ in gathered):
        raise ValueError(
            "The ranks mean different passes (number of samples, shuffle, seed, epoch, padded): "
            f"{', '.join(f'rank {rank}: {meant}' for rank, (meant, _) in enumerate(gathered))}."
        )
    template = _agree([columns for _, columns in gathered], counts)
    if template is None:  # nobody has a sample
        return values
    if not sampler.num_samples:
        columns, _ = tree.flatten(template)
        leaves = [column.empty(model.device()) for column in columns]
    lists = [leaf for leaf in leaves if isinstance(leaf, list)]
    gathered_lists = zip(*model.gather_objects(lists, members), strict=True) if lists else iter(())
    sizes = [len(order[part(len(order), len(counts), rank)]) for rank in members.ranks]
    merged = [
        _merge_lists(next(gathered_lists), sizes, order)
        if isinstance(leaf, list)
        else _gather_rows_in_order(model, leaf, counts[0], sizes, order, members)
        for leaf in leaves
    ]
    return tree.rebuild(template, iter(merged))


@safe
@dataclass(frozen=True)
class _Column:
    """What a rank has of one leaf: as many values as samples, if they are right."""

    kind: str
    count: int | None = None
    row_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, leaf: Any) -> _Column:
        if isinstance(leaf, list):
            return cls("list", len(leaf))
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
            return cls(type(leaf).__name__ + (f" {leaf.layout}" if isinstance(leaf, Tensor) else ""))
        if not leaf.dim():
            return cls("0-d tensor")
        return cls(f"{leaf.device.type} tensor", leaf.shape[0], tuple(leaf.shape[1:]), leaf.dtype)

    def empty(self, device: torch.device) -> Any:
        """The same of no samples."""
        if self.kind == "list":
            return []
        on = "cpu" if self.kind == "cpu tensor" else device
        return torch.empty((0, *self.row_shape), dtype=self.dtype, device=on)


def _agree(described: list[Any], counts: list[int]) -> Any:
    """The tree of :class:`_Column` that all ranks with samples have, of which there are ``counts``."""
    found: Any = None
    for rank, (columns, count) in enumerate(zip(described, counts, strict=True)):
        if not count:
            continue
        leaves, structure = tree.flatten(columns)
        for column in leaves:
            if column.count is None:
                raise TypeError(
                    "gather_in_order takes tensors with one row per sample, lists with one entry per sample, "
                    f"and dicts and tuples of them; rank {rank} gave a {column.kind}."
                )
            if column.count != count:
                raise ValueError(
                    f"Rank {rank} drew {count} samples from the loader and gave {column.count} values. "
                    "gather_in_order takes what a whole pass has computed, not one that was broken off, as "
                    "one tensor or list: torch.cat(batches)."
                )
        layout = structure, [replace(column, count=0) for column in leaves]
        if found is None:
            first, found, template = rank, layout, columns
        elif found != layout:
            raise CollectiveMismatchError(
                "gather_in_order needs the same structure, shapes and dtypes on every rank; rank "
                f"{first} has {found}, rank {rank} {layout}."
            )
    return None if found is None else template


# The dtypes that torch has no index_select() for, as those of the same size that it has one for.
_INDEXED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float4_e2m1fn_x2: torch.int8,
}


def _gather_rows_in_order(
    model: ComputationModel,
    rows: Tensor,
    count: int,
    sizes: Sequence[int],
    order: range | Tensor,
    group: Group,
) -> Tensor:
    """``(n, *S)``, with ``n`` up to ``count`` on each rank ``-> (N, *S)`` in the order of the data set."""
    indexed_as = _INDEXED_AS.get(rows.dtype)
    if indexed_as is None:
        return _merge_rows(_gather_padded(model, rows, count, group), sizes, order)
    gathered = _gather_padded(model, rows.view(indexed_as), count, group)
    return _merge_rows(gathered, sizes, order).view(rows.dtype)


def _gather_padded(model: ComputationModel, rows: Tensor, count: int, group: Group) -> Tensor:
    """``(n, *S)``, with ``n`` up to ``count`` on each rank ``-> (group_size, count, *S)``."""
    rows = rows.detach()
    if len(rows) < count:
        rows = torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
    return gather_rows(model, rows, group)


def _merge_rows(gathered: Tensor, sizes: Sequence[int], order: range | Tensor) -> Tensor:
    """``(group_size, count, *S)``, of which ``sizes`` count, ``-> (N, *S)`` in the order of the data set."""
    if min(sizes) == gathered.shape[1]:
        rows = gathered.flatten(0, 1)
    else:
        rows = torch.cat([one[:size] for one, size in zip(gathered, sizes, strict=True)])
    return rows if isinstance(order, range) else rows.index_select(0, _inverse(order).to(rows.device))


def _merge_lists(gathered: Sequence[list[Any]], sizes: Sequence[int], order: range | Tensor) -> list[Any]:
    entries = [entry for one, size in zip(gathered, sizes, strict=True) for entry in one[:size]]
    return entries if isinstance(order, range) else [entries[place] for place in _inverse(order).tolist()]


def _inverse(order: Tensor) -> Tensor:
    """Where in ``order``, a permutation, each number is."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
