"""The differences between the clocks of the ranks, from barriers.

No rank leaves a barrier before every rank has entered it. So each barrier gives bounds for the difference of
two ranks' clocks, and the difference lies in the intersection of the bounds of several barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ignite_dist.comp_models import ComputationModel
from ignite_dist.diagnostics.profiler.timed_calls import now

# The first barriers may open connections. Their bounds are wide.
_NUM_BARRIERS = 10

Barriers = Sequence[Sequence[int]]
"""When a rank has entered and left each barrier."""


def time_barriers(model: ComputationModel) -> list[tuple[int, int]]:
    """Make barriers. Every rank of the world must call this."""
    barriers = []
    for _ in range(_NUM_BARRIERS if model.get_world_size() > 1 else 1):
        entered = now()
        model.transport.barrier(model.groups.world).wait()
        barriers.append((entered, now()))
    return barriers


class Clock(NamedTuple):
    """Translates the times of a rank into times of rank 0.

    Attributes:
        first: a time of the rank, and the nanoseconds to add to it.
        last: the same, later. The time between is interpolated, because clocks drift.
        error: the largest error of both sums, in nanoseconds; 0 if the ranks share a clock.
    """

    first: tuple[int, float]
    last: tuple[int, float]
    error: float

    def translate(self, time: int) -> int:
        """The time of rank 0, in nanoseconds."""
        (begin, offset), (end, last_offset) = self.first, self.last
        return time + round(offset + (last_offset - offset) * (time - begin) / max(1, end - begin))


def compare_clocks(
    of_rank_0: tuple[Barriers, Barriers], of_rank: tuple[Barriers, Barriers], is_same_host: bool
) -> Clock:
    """The clock of a rank, from the barriers at the begin and at the end of a recording."""
    bounds = [_bounds(*barriers) for barriers in zip(of_rank_0, of_rank, strict=True)]
    times = [barriers[-1][1] for barriers in of_rank]
    if is_same_host and all(low <= 0 <= high for low, high in bounds):
        return Clock((times[0], 0.0), (times[1], 0.0), 0.0)
    first, last = ((time, (low + high) / 2) for time, (low, high) in zip(times, bounds, strict=True))
    return Clock(first, last, max(high - low for low, high in bounds) / 2)


def _bounds(of_rank_0: Barriers, of_rank: Barriers) -> tuple[int, int]:
    """The bounds of the nanoseconds to add to a time of the rank."""
    pairs = list(zip(of_rank_0, of_rank, strict=True))
    low = max(entered_0 - left for (entered_0, _), (_, left) in pairs)
    return low, min(left_0 - entered for (_, left_0), (entered, _) in pairs)
