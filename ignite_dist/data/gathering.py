"""Gather the results of a pass over a loader, in data set order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.arguments import check_root
from ignite_dist.collectives.gather_scatter import gather
from ignite_dist.collectives.interrupts import one_call
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.primitives import gather_rows
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.data.model_buffers import check_exact_group
from ignite_dist.data.samplers import ExactSampler, part
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.arguments import as_int
from ignite_dist.values import pytree
from ignite_dist.values.arrays import is_array, tensor_of
from ignite_dist.values.layouts import describe_layout
from ignite_dist.values.safe_objects import register_safe


@one_call
def gather_in_order(values: Any, loader: Any, group: Any = None, *, dst: int | None = None) -> Any:
    """Gather the results of all ranks for a pass over ``loader``, in data set order.

    Every sample occurs exactly once, for any number of samples and ranks, any batch size and ``shuffle``.
    Every rank calls this once after each whole pass, with or without samples. Communication: one small gather
    of metadata, one collective per tensor, and one for all lists together; with ``dst``, two for large lists.

    Args:
        values: all results of this rank, in the order of its loader: a tensor of shape ``(n, *S)`` for ``n``
            samples; a numpy array of this shape; a list with one entry per sample; or a dict, tuple or named
            tuple of these. ``(*S)`` and the dtype must be the same on every rank. A rank without samples may
            pass any value.
        loader: from ``auto_dataloader(..., exact=True)``; or any loader with an ``ExactSampler``, but a pass
            over such a loader does not share the buffers of models.
        group: the ranks that share the loader's data, as in :func:`all_reduce`; default: the ``group=`` of
            ``auto_dataloader``. Only the ranks of the group call this. A rank outside gets ``values`` back
            (with ``dst``, None), and may pass None as its loader.
        dst: a global rank of the group, which alone gets the result; None for all ranks. The same on every
            rank.

    Returns:
        The same structure for the ``N`` samples of the data set; with ``dst``, None on the other ranks.
        Tensors and arrays have shape ``(N, *S)``. Arrays have the machine's byte order. Tensors have the
        device of this rank's tensor and no gradient. A rank without samples gets them on :func:`device`, or
        on the CPU if the other ranks pass CPU tensors. Lists have ``N`` entries. If no rank has a sample, the
        result is ``values``.

    Raises:
        ValueError: the loader has no ``ExactSampler`` or was made for another rank or group; or the group has
            only some ranks, on XLA. Raised on every rank: a rank's numbers of values and samples differ, the
            ranks' samplers or ``dst`` differ, or ``dst`` is not a rank of the group.
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
    return _gather(model, values, sampler, members, as_int(dst))


def _gather(
    model: ComputationModel, values: Any, sampler: ExactSampler, members: Group, dst: int | None
) -> Any:
    own_values = values if sampler.num_samples else None
    # flatten() raises for bad keys, so it comes before end_pass(), which may communicate.
    leaves, _ = pytree.flatten(own_values, list)
    sampler.end_pass()
    counts = [sampler.num_drawn_by(position) for position in range(len(members.ranks))]
    results = _Results(model, members, dst, sampler.order(), counts)
    template = results.compare(sampler, pytree.rebuild(own_values, map(_Column.of, leaves), list))
    if template is None:  # no rank has a sample
        return values if results.are_here else None
    columns, _ = pytree.flatten(template)
    if sampler.num_samples:
        leaves = [tensor_of(leaf) if is_array(leaf) else leaf for leaf in leaves]
    else:
        leaves = [column.empty(model.device()) for column in columns]
    lists = iter(results.of_lists([leaf for leaf in leaves if isinstance(leaf, list)]))
    merged: list[Any] = []
    for column, leaf in zip(columns, leaves, strict=True):
        one: Any = next(lists) if column.kind == "list" else results.of_rows(leaf)
        merged.append(one.numpy() if column.kind == "array" and results.are_here else one)
    return pytree.rebuild(template, iter(merged)) if results.are_here else None


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
        if is_array(leaf):
            with suppress(TypeError):  # a dtype that torch does not have
                if leaf.ndim:
                    return cls("array", leaf.shape[0], tuple(leaf.shape[1:]), tensor_of(leaf[:0]).dtype)
            return cls(f"{leaf.ndim}-d array of {leaf.dtype}")
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


def _describe(layout: tuple[str, list[_Column]]) -> str:
    structure, columns = layout
    kinds = [
        column.kind
        if column.dtype is None
        else f"{column.kind} with rows of {describe_layout((column.dtype, column.row_shape))}"
        for column in columns
    ]
    return ", ".join(kinds) + ("" if structure == "." else f" in {structure}")


def _common_columns(ranks: Sequence[int], columns_by_rank: Sequence[Any], counts: list[int]) -> Any:
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
                f"{first} has {_describe(found)}, rank {rank} has {_describe(layout)}."
            )
    return None if found is None else template


@dataclass(frozen=True)
class _Results:
    """The results of a pass over all samples. Every rank of the group calls each method.

    Attributes:
        model: the context.
        group: the ranks that share the samples.
        dst: the global rank that gets the results; None for all ranks.
        order: the order of all samples in the pass.
        counts: number of samples that each rank has drawn, padding included.
    """

    model: ComputationModel
    group: Group
    dst: int | None
    order: range | Tensor
    counts: list[int]

    @property
    def are_here(self) -> bool:
        """True if this rank gets the results."""
        return self.dst in (None, self.model.get_rank())

    def compare(self, sampler: ExactSampler, columns: Any) -> Any:
        """The tree of :class:`_Column` that all ranks with samples share; None if no rank has a sample.

        Raises:
            ValueError, TypeError, CollectiveMismatchError: see :func:`gather_in_order`. Raised on every rank.
        """
        dst = self.dst if self.dst is None or type(self.dst) is int else repr(self.dst)
        metadata = sampler.pass_settings(), dst, columns
        rows = perform(
            self.model,
            "gather_in_order",
            self.group,
            lambda group: Steps(lambda: self.model.objects.gather(metadata, group)),
            outside=None,
            value="the results of a pass",
        )
        settings_by_rank, dst_by_rank, columns_by_rank = zip(*rows, strict=True)
        names = "number of samples, shuffle, seed, epoch, padded"
        _check_same(f"The samplers of the ranks differ ({names})", self.group, settings_by_rank)
        _check_same("The ranks pass different dst", self.group, dst_by_rank)
        if dst is not None:
            check_root("dst", self.dst, self.group, self.model.get_world_size())
        return _common_columns(self.group.ranks, columns_by_rank, self.counts)

    def of_lists(self, lists: list[list[Any]]) -> list[Any]:
        """The lists of all ranks in data set order; None for each on a rank that does not get them."""
        if not lists:
            return []
        gathered: list[Any] | None
        if self.dst is None:
            gathered = self.model.objects.gather(lists, self.group)
        else:
            gathered = gather(lists, self.dst, self.group.handle)
        if gathered is None:
            return [None] * len(lists)
        return [_merge_lists(parts, self._sizes(), self.order) for parts in zip(*gathered, strict=True)]

    def of_rows(self, rows: Tensor) -> Tensor | None:
        """``(n, *S) -> (N, *S)`` in data set order; None on a rank that does not get them."""
        indexed_as = _INDEXED_AS.get(rows.dtype)
        if indexed_as is not None:
            merged = self.of_rows(rows.view(indexed_as))
            return None if merged is None else merged.view(rows.dtype)
        rows, count = rows.detach(), self.counts[0]
        if len(rows) < count:
            rows = torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
        gathered: Tensor | None
        if self.dst is None:
            gathered = gather_rows(self.model, rows, self.group).wait()
        else:
            gathered = gather(rows, self.dst, self.group.handle)
        if gathered is None:
            return None
        return _merge_rows(gathered.view(len(self.counts), *rows.shape), self._sizes(), self.order)

    def _sizes(self) -> list[int]:
        """Number of samples of each rank, without padding."""
        num_parts = len(self.counts)
        return [len(self.order[part(len(self.order), num_parts, number)]) for number in range(num_parts)]


def _check_same(problem: str, group: Group, values: Sequence[Any]) -> None:
    """Raise ``ValueError`` with ``problem`` if the ``values`` of the ranks differ."""
    if any(value != values[0] for value in values):
        by_rank = (f"rank {rank}: {value}" for rank, value in zip(group.ranks, values, strict=True))
        raise ValueError(f"{problem}: {', '.join(by_rank)}.")


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
