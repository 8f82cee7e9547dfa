"""The common steps of every collective: record the call, check membership, begin, wait."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from ignite_dist.collectives import progress
from ignite_dist.collectives.interrupts import count_interrupted, is_interrupt, latest_tokens
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.diagnostics.announcing import announce
from ignite_dist.values.calls import call_of, new_token

_Result = TypeVar("_Result")


def perform(
    model: ComputationModel,
    operation: str,
    group: Group,
    begin: Callable[[Group], Work],
    outside: Any,
    *,
    value: Any = "",
    op: str = "",
    begin_outside: Callable[[Group], Work] | None = None,
    async_op: bool = False,
) -> Any:
    """Run a collective. Its arguments have been checked.

    Args:
        model: the model of the context.
        operation: the name of the public function.
        group: the group of the collective.
        begin: begins the collective on a member, in a given group of the same ranks. Only that group carries
            the call, which the ranks compare.
        outside: the result on a rank outside the group.
        value: a description, a tensor or the leaves of a tree; dtypes and shapes must match on all ranks.
        op: the reduction, or the source rank; must be equal on all ranks.
        begin_outside: begins the collective on a rank outside the group, if the backend needs every rank.
            None uses ``begin``. The result is ignored.
        async_op: True returns the work instead of the result.
    """
    called = _in_call(group, operation, op, value)
    try:
        latest_tokens[get_ident()] = called.token
        begin = announce(model, operation, group, begin, value, op, async_op=async_op)
        if not is_member(model, group):
            if takes_part(model, group):
                (begin_outside or begin)(called).wait()
            return Completed(outside) if async_op else outside
        if async_op:
            return progress.begin(model, operation, called, begin)
        return begin(called).wait()
    except BaseException as error:
        latest_tokens[get_ident()] = called.token  # the interrupt may have come before the line above
        if is_interrupt(error):
            count_interrupted(model, called, async_op)
        raise


def perform_backward(
    model: ComputationModel,
    function: str,
    group: Group,
    run: Callable[[Group], _Result],
    value: Any,
    op: str = "",
) -> _Result:
    """``run(group)``, which makes the collective of a backward pass of ``function``. See :func:`perform`."""
    result: _Result = perform(
        model,
        f"{function}'s backward pass",
        group,
        lambda group: Completed(run(group)),
        outside=None,
        value=value,
        op=op,
    )
    return result


def _in_call(group: Group, operation: str, op: str, value: Any) -> Group:
    """``group`` with the call that its collectives belong to."""
    if len(group.ranks) == 1:
        return group
    return group.in_call(call_of(operation, op, value), new_token())


def is_member(model: ComputationModel, group: Group) -> bool:
    """True if the caller's rank is in ``group``."""
    return group.handle is None or group.position(model.get_rank()) is not None


def takes_part(model: ComputationModel, group: Group) -> bool:
    """True if the caller's rank must make the calls of ``group``: a member, or any rank with XLA."""
    return is_member(model, group) or (model.transport.groups_need_all_ranks and len(group.ranks) > 1)
