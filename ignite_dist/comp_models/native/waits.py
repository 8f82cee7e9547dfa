"""Finds the process group that a rank waits in, from its thread's frames, and counts the calls per group."""

from __future__ import annotations

from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ignite_dist.comp_models.transport import Wait
from ignite_dist.comp_models.work import work_of
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import is_library, local_of

# gloo counts messages as calls of the group. So a rank with a lower count does not always lack a collective.
_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
# No rank can complete one of these collectives before all ranks have begun it.
_NEEDS_ALL = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
        *("reduce_scatter", "reduce_scatter_tensor"),
    }
)
_BROADCASTS = frozenset({"broadcast", "broadcast_object_list"})
# Modules of torch in which a frame shows the group that the rank waits for. In other modules a rank waits for
# collectives that it has begun earlier, for example in the backward pass of a DistributedDataParallel.
_MODULES_WITH_GROUP = ("torch.distributed.distributed_c10d", "torch.nn.parallel.distributed")


def calls_begun() -> dict[str, int | None]:
    """Number of collectives that this rank has begun in each live group, by the group's name."""
    return {group.group_name: _torch.sequence_number(group) for group, _ in _torch.groups_and_stores()}


def find_wait(frame: FrameType, world: ProcessGroup, rank: int, device: torch.device) -> Wait:
    """See :meth:`Transport.find_wait`. ``rank`` and ``device`` are this rank's."""
    work = work_of(frame)
    if work is not None:
        return Wait(work.ranks, work.group_name, is_known=True, needs_all=work.needs_all)
    if frame.f_globals.get("__name__") not in _MODULES_WITH_GROUP:
        # On a GPU, a thread that computes cannot be distinguished from a thread that waits.
        return Wait(_ranks_in_all_groups() if device.type == "cpu" else ())
    names = _function_names(frame)
    if names & _MESSAGES:
        peer = _rank_argument(frame, "dst", "src")
        return Wait(() if peer is None else (peer,), is_known=True, is_message=True)
    new_group_name = local_of(frame, "group_name")
    if isinstance(new_group_name, str) and new_group_name:
        ranks = local_of(frame, "global_ranks_in_group") or ()
        return Wait(tuple(ranks), new_group_name, is_known=True, needs_all=True)
    handle = local_of(frame, "group", "process_group")
    if handle is None:
        handle = getattr(local_of(frame, "self"), "process_group", None) or world
    if not isinstance(handle, ProcessGroup):
        return Wait()
    source = _rank_argument(frame, "src") if names & _BROADCASTS else None
    if source is not None and source != rank:
        return Wait((source,), handle.group_name, is_known=True, needs_all=True)
    return Wait(_ranks_of(handle), handle.group_name, is_known=True, needs_all=bool(names & _NEEDS_ALL))


def _ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # the group is being made, or was destroyed
        return ()


def _function_names(frame: FrameType | None) -> set[str]:
    """The names of the library functions on the stack, from ``frame`` to the user's code."""
    names = set()
    while frame is not None and is_library(frame):
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _rank_argument(frame: FrameType, *names: str) -> int | None:
    """The global rank in an argument of ``names`` (a global rank) or ``group_<name>`` (a group rank)."""
    rank = local_of(frame, *names)
    if rank is None and (position := local_of(frame, *(f"group_{name}" for name in names))) is not None:
        try:
            rank = dist.get_global_rank(local_of(frame, "group"), position)
        except ValueError:  # this rank is not in the group, or the group has no such rank
            return None
    return None if rank is None else int(rank)


def _ranks_in_all_groups() -> tuple[int, ...]:
    """The ranks that are in all groups of this rank. In any of these groups, this rank waits for them."""
    members = [ranks for ranks in _torch.ranks_of_groups() if len(ranks) > 1]
    return tuple(set.intersection(*members)) if members else ()
