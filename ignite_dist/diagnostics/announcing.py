"""The flight recorder of each context, and :func:`announce`, which every collective calls first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Work
from ignite_dist.diagnostics import pending_calls
from ignite_dist.diagnostics.flight_recorder import Comparison, Recorder
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.values.calls import Call

_VARIABLE = "IGNITE_DIST_DEBUG"

# The same for all calls: the ranks compare what differs. A rank without compare_calls() makes another call.
_COMPARISON = Call("a comparison of compare_calls()")

_comparison: Comparison | None = None


def comparison_in_new_contexts() -> Comparison | None:
    """The comparison for contexts that begin later; None if these contexts compare nothing."""
    return _comparison


def set_comparison_in_new_contexts(comparison: Comparison | None) -> None:
    """Set the comparison for contexts that begin later."""
    global _comparison
    _comparison = comparison


# None: the context has no recorder.
_recorders: PerContext[Recorder | None] = PerContext()
_lock = threading.RLock()  # guards the creation of recorders


def recorder_of(model: ComputationModel) -> Recorder | None:
    """The recorder of the context of ``model``; None if the context has no recorder."""
    try:
        return _recorders.by_id[id(model)]
    except KeyError:
        with _lock:
            return _recorders.setdefault(model, _recorder_of_new_context())


def get_or_create_recorder(model: ComputationModel, keep_calls: bool) -> Recorder:
    """Return the recorder of the context of ``model``. Create a recorder if the context has none."""
    with _lock:
        recorder = recorder_of(model)
        if recorder is None:
            recorder = _recorders[model] = Recorder()
            recorder.keeps_calls = False
        recorder.keeps_calls = recorder.keeps_calls or keep_calls
        return recorder


def keeps_calls(model: ComputationModel) -> bool:
    """True if the context of ``model`` has a recorder that keeps calls."""
    recorder = recorder_of(model)
    return recorder is not None and recorder.keeps_calls


def finish_timeline(model: ComputationModel, has_failed: bool) -> None:
    """End the timeline of the caller's rank, if one is recorded, because the context ends."""
    recorder = recorder_of(model)
    times = None if recorder is None else recorder.timelines.get(model.get_rank())
    if times is not None:
        times.finish(has_failed)


def _forget_all() -> None:
    """Drop all recorders in a forked child: the child has no watchdog threads."""
    global _lock
    _lock = threading.RLock()
    _recorders.clear()


def _recorder_of_new_context() -> Recorder | None:
    """A recorder if ``compare_calls()`` or ``IGNITE_DIST_DEBUG=1`` is on for every context; else None."""
    if _comparison is not None:
        return Recorder(_comparison)
    text = os.environ.get(_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise EnvironmentVariablesError(f"The environment variable {_VARIABLE} must be 0 or 1, got {text!r}.")
    return Recorder(Comparison()) if text == "1" else None


def announce(
    model: ComputationModel,
    operation: str,
    group: Group,
    begin: Callable[[Group], Work],
    value: Any = "",
    op: str = "",
    *,
    async_op: bool = False,
) -> Callable[[Group], Work]:
    """Record the next collective. If ``compare_calls()`` is on, compare the collective on all ranks first.

    A blocking collective first waits until the thread of ``group`` has completed all pending calls.

    Args:
        model: the model of the context.
        operation: the name of the public function.
        group: the process group of the collective. A rank outside the group records nothing.
        begin: begins the collective in a given group of the same ranks.
        value: a description, a tensor or the leaves of a tree; dtypes and shapes must match on all ranks.
        op: the reduction, or the source rank; must be equal on all ranks.
        async_op: True if the collective may run in the thread of ``group``; must be equal on all ranks.

    Returns:
        The function that begins the collective: ``begin``, or one that also notes times for a timeline.

    Raises:
        CollectiveMismatchError: the ranks are about to call different collectives; raised on all ranks.
    """
    if _recorders.by_id.get(id(model), model) is None and not pending_calls.queues.by_id:
        return begin
    rank, transport = model.get_rank(), model.transport
    if group.handle is not None and group.position(rank) is None and not transport.groups_need_all_ranks:
        return begin
    recorder = recorder_of(model)
    is_compared = recorder is not None and recorder.keeps_calls and recorder.compares(rank)
    if is_compared or not async_op:
        pending_calls.drain(model, group)
    if recorder is None or not (recorder.keeps_calls or recorder.timelines):
        return begin
    key, times = transport.group_key(group), recorder.timelines.get(rank)
    if recorder.keeps_calls:
        call_op = op
        if async_op:
            call_op = f"{op}, async_op=True" if op else "async_op=True"
        call = recorder.record(rank, operation, group.ranks if key else (), value, call_op, key)
    if times is not None and (group.handle is None or group.position(rank) is not None):
        begin = times.timed(operation, op, value, group.ranks, key, async_op, begin)
    if is_compared and len(group.ranks) > 1:
        comparing = group.in_call(_COMPARISON)
        recorder.compare(rank, call, group.ranks, lambda row: model.objects.gather(row, comparing))
    return begin


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
