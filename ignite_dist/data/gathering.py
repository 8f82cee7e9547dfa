"""Gather the results of a pass over a loader, in data set order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ignite_dist.arguments import is_array
from ignite_dist.collectives.arguments import check_root
from ignite_dist.collectives.gather_scatter import gather
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.tensors import gather_rows
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.samplers import ExactSampler, part
from ignite_dist.training.exact_passes import check_exact_group, check_pass
from ignite_dist.values import pytree
from ignite_dist.values.safe_objects import register_safe


def gather_in_order(values: Any, loader: Any, group: Any = None, *, dst: int | None = None) -> Any:
    """Gather the results of all ranks for a pass over ``loader``, in data set order.

    Every sample occurs exactly once, for any number of samples and ranks, any batch size and ``shuffle``.
    Every rank calls this once after each whole pass, with or without samples. Communication: one small gather
    of metadata, one collective per tensor, and one for all lists together.

    Args:
        values: all results of this rank, in the order of its loader: a tensor of shape ``(n, *S)`` for ``n``
            samples; a numpy array of this shape; a list with one entry per sample; or a dict, tuple or named
            tuple of these. ``(*S)`` and the dtype must be the same on every rank. A rank without samples may
            pass any value.
        loader: from ``auto_dataloader(..., exact=True)``; or any loader with an ``ExactSampler``, but a pass
            over such a loader does not share the buffers of models.
        group: the ranks that share the loader's data, as in :func:`all_reduce`; default: the ``group=`` of
            ``auto_dataloader``. Only the ranks of the group call this. A rank outside gets ``values`` back,
            and may pass None as its loader.
        dst: a global rank of the group, which alone receives and holds the result; None for all ranks.

    Returns:
        The same structure for the ``N`` samples of the data set; with ``dst``, None on the other ranks.
        Tensors and arrays have shape ``(N, *S)``; tensors have the device of this rank's tensor and no
        gradient. A rank without samples gets them on :func:`device`, or on the CPU if the other ranks pass
        CPU tensors. Lists have ``N`` entries.

    Raises:
        ValueError: the loader has no ``ExactSampler`` or was made for another rank or group; or the group has
            only some ranks, on XLA. Raised on every rank: a rank's numbers of values and samples differ, or
            the ranks' samplers differ.
        TypeError: values are not supported; raised on every rank. Or :func:`all_reduce` does not support a
            dict key; raised on this rank before any communication.
        CollectiveMismatchError: structures, shapes or dtypes differ between ranks; raised on every rank.

    Example::

        loader = idist.auto_dataloader(data_set, batch_size=64, exact=True)
        predicted = [net(idist.to_device(x)).argmax(1) for x, _ in loader]
        everything = idist.gather_in_order(torch.cat(predicted) if predicted else None, loader)
    """
    model = current_model()
    if group is not None and model.get_rank() not in model.groups.ranks_of(group):
        check_exact_group("gather_in_order", model, model.groups.resolve(group))
        return values if dst is None else None
    sampler = _exact_sampler_of(loader)
    members = model.groups.resolve(sampler.group if group is None else group)
    check_exact_group("gather_in_order", model, members)
    _check_place(sampler, model.get_rank(), members)
    if dst is not None:
        check_root("dst", dst, members, model.get_world_size())
    return _gather(model, values, sampler, members, dst)


def _gather(
    model: ComputationModel, values: Any, sampler: ExactSampler, members: Group, dst: int | None
) -> Any:
    own_values = values if sampler.num_samples else None
    # flatten() raises for bad keys, so it comes before end_pass(), which may communicate.
    leaves, _ = pytree.flatten(own_values, list)
    sampler.end_pass()
    positions = range(len(members.ranks))
    order, counts = sampler.order(), [sampler.num_drawn_by(position) for position in positions]
    metadata = sampler.pass_settings(), pytree.rebuild(own_values, map(_Column.of, leaves), list)
    gathered = perform(
        model,
        "gather_in_order",
        members,
        lambda _: Steps(lambda: model.objects.gather(metadata, members)),
        outside=None,
    )
    check_pass(gathered)
    if any(settings != gathered[0][0] for settings, _ in gathered):
        by_rank = zip(members.ranks, gathered, strict=True)
        raise ValueError(
            "The samplers of the ranks differ (number of samples, shuffle, seed, epoch, padded): "
            f"{', '.join(f'rank {rank}: {settings}' for rank, (settings, _) in by_rank)}."
        )
    template = _common_columns(members.ranks, [columns for _, columns in gathered], counts)
    is_receiver = dst in (None, model.get_rank())
    if template is None:  # no rank has a sample
        return values if is_receiver else None
    columns, _ = pytree.flatten(template)
    if sampler.num_samples:
        leaves = [torch.from_numpy(leaf) if is_array(leaf) else leaf for leaf in leaves]
    else:
        leaves = [column.empty(model.device()) for column in columns]
    lists = [leaf for leaf in leaves if isinstance(leaf, list)]
    gathered = (_gather_lists(model, lists, members, dst) if lists else None) or []
    gathered_lists = zip(*gathered, strict=True)
    sizes = [len(order[part(len(order), len(counts), position)]) for position in positions]
    merged: list[Any] = []
    for column, leaf in zip(columns, leaves, strict=True):
        if column.kind != "list":
            rows = _gather_rows_in_order(model, leaf, counts[0], sizes, order, members, dst)
            merged.append(rows.numpy() if column.kind == "array" and rows is not None else rows)
        elif is_receiver:
            merged.append(_merge_lists(next(gathered_lists), sizes, order))
    return pytree.rebuild(template, iter(merged)) if is_receiver else None


def _gather_lists(
    model: ComputationModel, lists: list[list[Any]], group: Group, dst: int | None
) -> list[Any] | None:
    """The lists of every rank; with ``dst``, None on the other ranks."""
    if dst is None:
        return model.objects.gather(lists, group)
    found: list[Any] | None = gather(lists, dst, group.handle)
    return found


def _exact_sampler_of(loader: Any) -> ExactSampler:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ExactSampler):
        raise ValueError(
            "gather_in_order needs a loader of auto_dataloader(..., exact=True), whose sampler knows the "
            f"position of each sample; got a loader with a {type(sampler).__name__}."
        )
    return sampler


def _check_place(sampler: ExactSampler, rank: int, members: Group) -> None:
    """Raise ``ValueError`` if ``sampler`` was made for another rank or another group."""
    place = len(members.ranks), members.position(rank)
    if (sampler.num_replicas, sampler.rank) != place:
        group = "" if members.handle is None else f" of the group {list(members.ranks)}"
        raise ValueError(
            f"The loader was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{place[1]} of {place[0]}{group}. Pass the group= that the loader was made with."
        )


@register_safe
@dataclass(frozen=True)
class _Column:
    """Metadata of one leaf. ``count`` is the number of its values, None if the leaf is not supported."""

    kind: str
    count: int | None = None
    row_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, leaf: Any) -> _Column:
        if isinstance(leaf, list):
            return cls("list", len(leaf))
        if is_array(leaf) and leaf.ndim and leaf.dtype.kind in "biufc":
            return cls("array", leaf.shape[0], tuple(leaf.shape[1:]), torch.from_numpy(leaf).dtype)
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
            return cls(type(leaf).__name__ + (f" {leaf.layout}" if isinstance(leaf, Tensor) else ""))
        if not leaf.dim():
            return cls("0-d tensor")
        return cls(f"{leaf.device.type} tensor", leaf.shape[0], tuple(leaf.shape[1:]), leaf.dtype)

    def empty(self, device: torch.device) -> Any:
        """A leaf of this kind without samples."""
        if self.kind == "list":
            return []
        place = "cpu" if self.kind in ("cpu tensor", "array") else device
        return torch.empty((0, *self.row_shape), dtype=self.dtype, device=place)


def _common_columns(ranks: Sequence[int], columns_by_rank: list[Any], counts: list[int]) -> Any:
    """The tree of :class:`_Column` that all ranks with samples share. ``counts``: samples of each rank."""
    found: Any = None
    for rank, columns, count in zip(ranks, columns_by_rank, counts, strict=True):
        if not count:
            continue
        leaves, structure = pytree.flatten(columns)
        for column in leaves:
            if column.count is None:
                raise TypeError(
                    "gather_in_order takes tensors and arrays with one row per sample, lists with one entry "
                    f"per sample, and dicts and tuples of these; rank {rank} passed a {column.kind}."
                )
            if column.count != count:
                raise ValueError(
                    f"Rank {rank} drew {count} samples from the loader and passed {column.count} values. "
                    "gather_in_order needs the results of one whole pass, as one tensor or list: "
                    "torch.cat(batches)."
                )
        layout = structure, [replace(column, count=0) for column in leaves]
        if found is None:
            first, found, template = rank, layout, columns
        elif found != layout:
            raise CollectiveMismatchError(
                "gather_in_order needs the same structure, shapes and dtypes on every rank. Rank "
                f"{first} has {found}, rank {rank} has {layout}."
            )
    return None if found is None else template


def _gather_rows_in_order(
    model: ComputationModel,
    rows: Tensor,
    count: int,
    sizes: Sequence[int],
    order: range | Tensor,
    group: Group,
    dst: int | None,
) -> Tensor | None:
    """``(n, *S) -> (N, *S)`` in data set order, with ``n <= count`` on each rank."""
    indexed_as = _INDEXED_AS.get(rows.dtype, rows.dtype)
    gathered = _gather_padded(model, rows.view(indexed_as), count, group, dst)
    return None if gathered is None else _merge_rows(gathered, sizes, order).view(rows.dtype)


def _gather_padded(
    model: ComputationModel, rows: Tensor, count: int, group: Group, dst: int | None
) -> Tensor | None:
    """``(n, *S) -> (group_size, count, *S)``, with ``n <= count`` on each rank."""
    rows = rows.detach()
    if len(rows) < count:
        rows = torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
    if dst is None:
        return gather_rows(model, rows, group).wait()  # type: ignore[no-any-return]
    gathered: Tensor | None = gather(rows, dst, group.handle)
    return None if gathered is None else gathered.view(len(group.ranks), *rows.shape)


def _merge_rows(gathered: Tensor, sizes: Sequence[int], order: range | Tensor) -> Tensor:
    """``(group_size, count, *S) -> (N, *S)`` in data set order. ``sizes``: valid rows of each rank."""
    if min(sizes) == gathered.shape[1]:
        rows = gathered.flatten(0, 1)
    else:
        rows = torch.cat([padded[:size] for padded, size in zip(gathered, sizes, strict=True)])
    return rows if isinstance(order, range) else rows.index_select(0, _inverse(order).to(rows.device))


def _merge_lists(gathered: Sequence[list[Any]], sizes: Sequence[int], order: range | Tensor) -> list[Any]:
    entries = [entry for padded, size in zip(gathered, sizes, strict=True) for entry in padded[:size]]
    return entries if isinstance(order, range) else [entries[index] for index in _inverse(order).tolist()]


def _inverse(order: Tensor) -> Tensor:
    """The inverse of the permutation ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


# torch has no index_select() for these dtypes. The dtype of the same size is indexed instead.
_INDEXED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float4_e2m1fn_x2: torch.int8,
}
