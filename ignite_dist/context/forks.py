"""An inherited context in a forked child: only its getters work.

The child does not have the threads that run the collectives, and its connections are shared with the parent:
data that the child sends would mix with the parent's data. So the child may not call collectives, and its
exit does not end the context.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from ignite_dist.comp_models import ComputationModel, registered_computation_models
from ignite_dist.comp_models.work import Work, communicating

# The context marks of the contexts inherited at the fork, and the pid of the parent.
_inherited: list[object] = []
_parent = 0


def disable_if_inherited(model: ComputationModel) -> None:
    """If this process has inherited the context of ``model``, disable everything except the getters."""
    mark = model.context_mark()
    if mark is None or not any(mark is inherited for inherited in _inherited):
        return
    keep_only_getters(model, _parent)


def keep_only_getters(model: ComputationModel, parent: int) -> None:
    """Disable everything except the getters of ``model``, whose context belongs to the process ``parent``.

    The methods of the instance are replaced, so other processes have no extra cost.
    """
    global _parent
    _parent = parent
    for role in (model.groups, model.objects, model.training, model.transport):
        for name in communicating(role):
            setattr(role, name, _refuse)
    for name in ("can_be_replaced_by", "_exchange_places"):
        setattr(model, name, _refuse)
    for name in ("abort", "close", "forget", "meet_at_end"):
        setattr(model, name, _do_nothing)
    model.groups.once.forget()


def is_inherited(model: ComputationModel) -> bool:
    """True if the context of ``model`` belongs to another process, from which this one is a fork."""
    return model.close is _do_nothing


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    what = "a worker of a DataLoader" if get_worker_info() is not None else "a forked child"
    raise RuntimeError(
        f"This process ({os.getpid()}) is {what} of the process that has the context ({_parent}). A "
        "collective would hang here, and no context can begin here. Call collectives and initialize() in the "
        "main process. get_rank(), get_world_size() and the other getters work in this process too."
    )


def _do_nothing() -> None:
    pass


class WorkOfParent(Work):
    """A collective that the parent has begun. The child has no thread that completes it."""

    __slots__ = ()

    def wait(self, timeout: object = None) -> NoReturn:  # noqa: D102
        _refuse()

    def is_completed(self) -> bool:  # noqa: D102
        return True


def before_fork() -> None:
    """Import what :func:`after_fork` needs: an import in the child may wait for a thread of the parent."""
    with suppress(ImportError):  # a broken entry point: the next call of idist raises this error
        registered_computation_models.with_imported_library()


def after_fork(model: ComputationModel) -> None:
    """Record the inherited contexts in a forked child. ``model`` is the current model."""
    global _parent
    registered_computation_models.renew_lock()
    for kind in registered_computation_models.loaded():
        mark = kind.prepare_forked_child() if kind.library in sys.modules else None
        if mark is not None:
            _inherited.append(mark)
            _parent = _parent or os.getppid()  # a fork of a fork: the first of them
    disable_if_inherited(model)
