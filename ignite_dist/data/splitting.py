"""This rank's share of a sequence."""

from __future__ import annotations

from typing import Any

from ignite_dist.context.live import current_model
from ignite_dist.samplers import part

__all__ = ["sampler_kwargs", "split"]


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
