"""What a rank has collected from a loader, gathered in the order of the data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.tensors import gather_rows
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import announce
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.samplers import ExactSampler, part
from ignite_dist.training.exact_passes import check_pass
from ignite_dist.values import pytree
from ignite_dist.values.safe_objects import safe

__all__ = ["gather_in_order"]


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
    members = model.groups.resolve(None)
    if (sampler.num_replicas, sampler.rank) != (len(members.ranks), model.get_rank()):
        raise ValueError(
            f"The loader was made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{model.get_rank()} of {len(members.ranks)}."
        )
    own = values if sampler.num_samples else None  # what a rank without a sample gives is not looked at
    leaves, _ = pytree.flatten(
        own, list
    )  # refuses keys, so before the pass, which may have a collective, ends
    sampler.end_pass()
    order, counts = sampler.order(), [sampler.num_drawn_by(rank) for rank in members.ranks]
    described = pytree.rebuild(own, map(_Column.of, leaves), list)
    announce(model, "gather_in_order", members)
    gathered = model.objects.gather((sampler.meant(), described), members)
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
        columns, _ = pytree.flatten(template)
        leaves = [column.empty(model.device()) for column in columns]
    lists = [leaf for leaf in leaves if isinstance(leaf, list)]
    gathered_lists = zip(*model.objects.gather(lists, members), strict=True) if lists else iter(())
    sizes = [len(order[part(len(order), len(counts), rank)]) for rank in members.ranks]
    merged = [
        _merge_lists(next(gathered_lists), sizes, order)
        if isinstance(leaf, list)
        else _gather_rows_in_order(model, leaf, counts[0], sizes, order, members)
        for leaf in leaves
    ]
    return pytree.rebuild(template, iter(merged))


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
        leaves, structure = pytree.flatten(columns)
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
    return gather_rows(model, rows, group).wait()  # type: ignore[no-any-return]


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


# The dtypes that torch has no index_select() for, as those of the same size that it has one for.
_INDEXED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float4_e2m1fn_x2: torch.int8,
}
