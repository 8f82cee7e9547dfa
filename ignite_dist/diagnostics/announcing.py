"""The recorder of each context, and the one call that every collective makes to it."""

from __future__ import annotations

import os
import threading
from typing import Any

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.diagnostics import pending_calls
from ignite_dist.diagnostics.flight_recorder import Comparison, Recorder
from ignite_dist.errors import EnvironmentVariablesError

__all__ = [
    "announce",
    "compare_in_new_contexts",
    "compared_in_new_contexts",
    "keeps_calls",
    "recorder_of",
    "watch_with_recorder",
]

_VARIABLE = "IGNITE_DIST_DEBUG"

_comparison: Comparison | None = None


def compared_in_new_contexts() -> Comparison | None:
    """What the ranks of contexts to come compare, if that was said."""
    return _comparison


def compare_in_new_contexts(comparison: Comparison | None) -> None:
    """What the ranks of contexts to come compare."""
    global _comparison
    _comparison = comparison


# None: nobody keeps the calls of that context.
_recorders: PerContext[Recorder | None] = PerContext()


_making = threading.RLock()


def recorder_of(model: ComputationModel) -> Recorder | None:
    """The recorder of a context, if it has one."""
    try:
        return _recorders.by_id[id(model)]
    except KeyError:
        with _making:
            return _recorders.setdefault(model, _wanted_in_new_contexts())


def watch_with_recorder(model: ComputationModel, keep_calls: bool) -> Recorder:
    """The recorder of a context, which has one from here on."""
    with _making:
        found = recorder_of(model)
        if found is None:
            found = _recorders[model] = Recorder()
            found.keeps_calls = False
        found.keeps_calls = found.keeps_calls or keep_calls
        return found


def keeps_calls(model: ComputationModel) -> bool:
    """True if the calls of this context are kept."""
    found = recorder_of(model)
    return found is not None and found.keeps_calls


def _forget_all() -> None:
    """In a forked child, where no watchdog is."""
    global _making
    _making = threading.RLock()
    _recorders.clear()


def _wanted_in_new_contexts() -> Recorder | None:
    """A recorder, if one is wanted in every context: ``debug()``, or ``IGNITE_DIST_DEBUG=1``."""
    if _comparison is not None:
        return Recorder(_comparison)
    text = os.environ.get(_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise EnvironmentVariablesError(f"The environment variable {_VARIABLE} is 0 or 1, got {text!r}.")
    return Recorder(Comparison()) if text == "1" else None


def announce(
    model: ComputationModel,
    operation: str,
    group: Group,
    value: Any = "",
    op: str = "",
    *,
    async_op: bool = False,
) -> None:
    """Note the collective that comes next, and compare it with those of the others, where that is wanted.

    It comes after what is still under way in the thread of the group, unless it goes there too.

    Args:
        model: the context.
        operation: the public function.
        group: whose call it is. A rank outside notes nothing.
        value: a tensor, or the leaves of a tree, that have to be alike on all ranks; or words.
        op: what else has to be the same.
        async_op: True if it may go to the thread of the group.

    Raises:
        CollectiveMismatchError: the ranks are about to make different calls; raised on all of them.
    """
    if _recorders.by_id.get(id(model), model) is None and not pending_calls.queues.by_id:
        return
    rank, transport = model.get_rank(), model.transport
    if group.handle is not None and group.position(rank) is None and not transport.groups_need_everyone:
        return
    recorder = recorder_of(model)
    is_compared = recorder is not None and recorder.compares(rank)
    if is_compared or not async_op:
        pending_calls.drain(model, group)
    if recorder is None or not recorder.keeps_calls:
        return
    key = transport.group_key(group)
    call = recorder.record(rank, operation, group.ranks if key else (), value, op, key)
    if is_compared and len(group.ranks) > 1:
        recorder.compare(rank, call, group.ranks, lambda sent: model.objects.gather(sent, group))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
