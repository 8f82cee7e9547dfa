"""This rank's share of a sequence."""

from __future__ import annotations

from typing import Any

from ignite_dist.context.live import current_model
from ignite_dist.samplers import part


def sampler_kwargs() -> dict[str, int]:
    """Keywords ``num_replicas`` and ``rank`` of a sampler: ``MySampler(data, **sampler_kwargs())``."""
    model = current_model()
    return {"num_replicas": model.get_world_size(), "rank": model.get_rank()}


def split(sequence: Any) -> Any:
    """This rank's share of a sequence: a contiguous part, in rank order. Never communicates.

    The parts in rank order make up the sequence: ``all_gather`` of a list made from each part returns the
    items in order. Lengths differ by at most one; the first ranks have the longer parts.

    Args:
        sequence: a list, a tensor, an array or another object with a length and slices; equal on every rank.

    Returns:
        ``sequence[start:stop]``, empty on the last ranks if there are more ranks than items.

    Raises:
        TypeError: ``sequence`` cannot be sliced.

    Example::

        idist.split(["a", "b", "c"])  # on two ranks: ["a", "b"] and ["c"]
    """
    model = current_model()
    try:
        return sequence[part(len(sequence), model.get_world_size(), model.get_rank())]
    except (TypeError, KeyError):
        raise TypeError(
            f"split needs a sequence with a length and slices, got {type(sequence).__name__}. "
            "Convert other iterables to a list first."
        ) from None
