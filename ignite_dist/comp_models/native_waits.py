"""Which of torch's groups a rank waits in, by the frames of its thread, and how far each group has come."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from ignite_dist.comp_models.base import Group, WaitedFor
from ignite_dist.recorder import is_library, local_of

__all__ = ["calls_begun", "waited_for"]

# Messages. gloo counts them as calls of the group, so two ranks that send each other messages have made more
# "calls" than the others: a higher count alone does not say that another rank lacks a call.
_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
# No rank can complete one of these before all have begun it: of this package, then torch's.
_NEEDS_ALL = frozenset(
    {
        *("_all_reduce", "_all_gather", "_barrier", "_reduce_narrow", "gather_bytes"),
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
        *("reduce_scatter", "reduce_scatter_tensor"),
    }
)
# Where the group that a rank waits in can be seen. Elsewhere it waits for what it has begun before: in a
# backward pass (of a DistributedDataParallel, say), or in a Work.wait() of the user's or of FSDP.
_WHERE_SEEN = ("/torch/distributed/distributed_c10d.py", "/torch/nn/parallel/distributed.py")
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def calls_begun() -> dict[str, int]:
    """How many calls, also of other libraries, each live group of this rank has begun, by its name."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}
    except RuntimeError:  # not every backend counts
        return {}


def waited_for(frame: FrameType, world: ProcessGroup) -> WaitedFor:
    """See ``ComputationModel.waited_for``."""
    path = frame.f_code.co_filename
    if not (path.startswith(_HERE) or path.endswith(_WHERE_SEEN)):
        return WaitedFor(_in_each_group(), needs_all=False)
    if _names(frame) & _MESSAGES:
        return WaitedFor(_other_end(frame), is_known=True, is_message=True)
    being_made = local_of(frame, "group_name")
    if isinstance(being_made, str) and being_made:
        ranks = local_of(frame, "global_ranks_in_group") or ()
        return WaitedFor(tuple(ranks), being_made, is_known=True)
    group = local_of(frame, "group", "process_group")
    handle = group.handle if isinstance(group, Group) else group
    if handle is None:
        handle = getattr(local_of(frame, "self"), "process_group", None) or world
    if not isinstance(handle, ProcessGroup):
        return WaitedFor()
    ranks = distributed_c10d._world.pg_group_ranks.get(handle, {})
    needs_all = bool(_names(frame) & _NEEDS_ALL)
    return WaitedFor(tuple(ranks), handle.group_name, is_known=True, needs_all=needs_all)


def _names(frame: FrameType | None) -> set[str]:
    """The functions of libraries that the user's code is in."""
    names = set()
    while frame is not None and is_library(frame.f_code.co_filename):
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _other_end(frame: FrameType) -> tuple[int, ...]:
    """The rank that a message goes to or comes from; none if it may come from any."""
    rank = local_of(frame, "dst", "src")
    if rank is None and (position := local_of(frame, "group_dst", "group_src")) is not None:
        positions = distributed_c10d._world.pg_group_ranks.get(local_of(frame, "group"), {})
        rank = next((one for one, place in positions.items() if place == position), None)
    return () if rank is None else (int(rank),)


def _in_each_group() -> tuple[int, ...]:
    """The ranks that are in each of this rank's groups: it waits for them, whichever group it waits in."""
    members = [set(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values() if len(ranks) > 1]
    return tuple(set.intersection(*members)) if members else ()
