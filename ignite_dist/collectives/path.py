"""The one path of every collective: record the call, tell members from others, begin, wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite_dist.collectives import progress
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.diagnostics.announcing import announce

__all__ = ["is_member", "perform"]


def perform(
    model: ComputationModel,
    operation: str,
    group: Group,
    begin: Callable[[], Work],
    outside: Any,
    *,
    value: Any = "",
    op: str = "",
    take_part: Callable[[], Work] | None = None,
    async_op: bool = False,
) -> Any:
    """Make a collective, whose arguments have been checked.

    Args:
        model: the context.
        operation: the public function.
        group: whose call it is.
        begin: begins it on a member of the group.
        outside: what a rank outside of the group gets.
        value: what has to be alike on all ranks; see
            :func:`~ignite_dist.diagnostics.flight_recorder.announce`.
        op: what else has to be the same.
        take_part: begins it on a rank outside, where the backend makes a group's collective everybody's call;
            by default as ``begin``. Its result is dropped.
        async_op: give the work instead of its result.
    """
    announce(model, operation, group, value, op, async_op=async_op)
    if not is_member(model, group):
        if model.transport.groups_need_everyone and len(group.ranks) > 1:
            (take_part or begin)().wait()
        return Completed(outside) if async_op else outside
    if async_op:
        return progress.begin(model, operation, group, begin)
    return begin().wait()


def is_member(model: ComputationModel, group: Group) -> bool:
    """True if the caller's rank is in ``group``."""
    return group.handle is None or group.position(model.get_rank()) is not None
