"""Which of torch's groups a rank waits in, by the frames of its thread, and how far each group has come."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from ignite_dist.comp_models.base import Group, WaitedFor
from ignite_dist.recorder import is_library, local_of

__all__ = ["calls_begun", "waited_for"]

# Calls of two ranks, which a group's count has in it, but which are no calls of the group's other ranks.
_OF_TWO_RANKS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
# Where a rank waits for what it has begun elsewhere: in a backward pass, of a DistributedDataParallel say.
_AUTOGRAD = "graph.py"


def calls_begun() -> dict[str, int]:
    """How many calls, also of other libraries, each group of this rank has begun, by the group's name."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}
    except RuntimeError:  # not every backend counts
        return {}


def waited_for(frame: FrameType, world: ProcessGroup) -> WaitedFor:
    """See ``ComputationModel.waited_for``."""
    if _is_of_two_ranks(frame):
        return WaitedFor(is_known=True)
    being_made = local_of(frame, "group_name")
    if isinstance(being_made, str) and being_made:
        ranks = local_of(frame, "global_ranks_in_group") or ()
        return WaitedFor(tuple(ranks), being_made, is_known=True)
    if frame.f_code.co_filename.endswith(_AUTOGRAD):
        return WaitedFor(_in_each_group())
    group = local_of(frame, "group", "process_group")
    handle = group.handle if isinstance(group, Group) else group
    if handle is None:
        handle = getattr(local_of(frame, "self"), "process_group", None) or world
    if not isinstance(handle, ProcessGroup):
        return WaitedFor()
    ranks = distributed_c10d._world.pg_group_ranks.get(handle, {})
    return WaitedFor(tuple(ranks), handle.group_name, is_known=True)


def _is_of_two_ranks(frame: FrameType | None) -> bool:
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_name in _OF_TWO_RANKS:
            return True
        frame = frame.f_back
    return False


def _in_each_group() -> tuple[int, ...]:
    """The ranks that are in each of this rank's groups: it waits for them, whichever group it waits in."""
    members = [set(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values() if len(ranks) > 1]
    return tuple(set.intersection(*members)) if members else ()
