"""This rank's share of a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

from ignite_dist.comp_models import ComputationModel
from ignite_dist.context.live import current_model
from ignite_dist.data.samplers import part
from ignite_dist.values import meshes


class Place(NamedTuple):
    """The place of this rank among the ranks that share the data: in [0, num_ranks)."""

    num_ranks: int
    number: int


def data_group(model: ComputationModel) -> Any:
    """The ranks that share the data, as a ``group=`` argument; None for all ranks. Never communicates.

    These are the ranks along the data dimensions of the current mesh. Ranks outside of this group that have
    the same position in theirs get the same data.
    """
    current = meshes.current()
    if current is None:
        return None
    return model.transport.group_of_mesh(current, meshes.data_dimensions(current))


def place_in(model: ComputationModel, group: Any) -> Place:
    """The place of this rank in ``group``, by default among the ranks that share the data. No communication.

    Raises:
        ValueError: ``group`` is not a group, or this rank is outside the group.
    """
    ranks, rank = model.groups.ranks_of(data_group(model) if group is None else group), model.get_rank()
    if rank not in ranks:
        raise ValueError(
            f"Rank {rank} is outside the group {list(ranks)} and has no share of its data. Make this call "
            "only on ranks of the group: if idist.get_rank(group) >= 0."
        )
    return Place(len(ranks), ranks.index(rank))


def sampler_kwargs(group: Any = None) -> dict[str, int]:
    """Keywords ``num_replicas`` and ``rank`` of a sampler: ``MySampler(data, **sampler_kwargs())``.

    Args:
        group: as in :func:`all_reduce`: ``num_replicas`` is its size, and ``rank`` the position of this rank.
            Never communicates, and makes no group of a list of ranks. Default: the data dimensions of the
            current :func:`mesh`, or all ranks.

    Raises:
        ValueError: ``group`` is not a group, or this rank is outside the group.
    """
    place = place_in(current_model(), group)
    return {"num_replicas": place.num_ranks, "rank": place.number}


def split_by_rank(sequence: Any, group: Any = None) -> Any:
    """This rank's share of a sequence: a contiguous part, in rank order. Never communicates.

    The parts in rank order make up the sequence: ``all_gather`` of a list made from each part returns the
    items in order. Lengths differ by at most one; the first ranks have the longer parts.

    Args:
        sequence: a list, a tensor, an array or another object with a length and slices; equal on every rank.
        group: the ranks that share the sequence, as in :func:`all_reduce`. No group of a list is made.
            Default: the data dimensions of the current :func:`mesh`, or all ranks.

    Returns:
        ``sequence[start:stop]``, empty on the last ranks if there are more ranks than items.

    Raises:
        TypeError: ``sequence`` cannot be sliced.
        ValueError: ``group`` is not a group, or this rank is outside the group.

    Example::

        idist.split_by_rank(["a", "b", "c"])  # on two ranks: ["a", "b"] on rank 0, ["c"] on rank 1
        idist.split_by_rank(["a", "b", "c"], group=idist.node_group())  # a node's ranks share the list
    """
    place = place_in(current_model(), group)
    try:
        return sequence[part(len(sequence), place.num_ranks, place.number)]
    except (TypeError, KeyError):
        raise TypeError(
            f"split_by_rank needs a sequence with a length and slices, got {type(sequence).__name__}. "
            "Convert other iterables to a list first."
        ) from None
