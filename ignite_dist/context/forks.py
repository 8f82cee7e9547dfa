"""A context in a forked child: another process's, of which only the getters still work.

The threads that carry the collectives are not in the child. Its connections are the parent's: anything that
the child sends would mix with the parent's data. So the child makes no collective, and its end leaves the
context alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from ignite_dist.comp_models import ComputationModel, registered_computation_models

__all__ = ["after_fork", "keep_getters", "note_inherited"]

# Whatever communicates, or makes another context, by the role that has it.
_REFUSED = {
    "groups": ("check_not_joining", "new", "resolve"),
    "objects": ("broadcast", "broadcast_bytes", "gather", "gather_bytes"),
    "training": ("join", "shard_model", "shard_optimizer", "wrap_model", "wrap_optimizer"),
    "transport": ("all_gather", "all_reduce", "barrier", "broadcast", "make_group"),
}

# What stands for the contexts that this process had when it was forked; the pid of its parent.
_inherited: list[object] = []
_parent = 0


def note_inherited(model: ComputationModel) -> None:
    """If this process has inherited the context of ``model``, only its getters work from here on.

    The instance is marked, not the class, so that a process that was not forked pays nothing.
    """
    mark = model.context_mark()
    if mark is None or not any(mark is one for one in _inherited):
        return
    keep_getters(model, _parent)


def keep_getters(model: ComputationModel, parent: int) -> None:
    """Let only the getters of ``model`` work here: its context is that of the process ``parent``."""
    global _parent
    _parent = parent
    for role, names in _REFUSED.items():
        for name in names:
            setattr(getattr(model, role), name, _refuse)
    for name in ("gives_way_to", "_exchange_places"):
        setattr(model, name, _refuse)
    for name in ("abort", "close", "forget", "meet_at_end"):
        setattr(model, name, _nothing)
    model.groups.once.forget()


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    what = "a worker of a DataLoader" if get_worker_info() is not None else "a forked child"
    raise RuntimeError(
        f"This process ({os.getpid()}) is {what} of the process that has the context ({_parent}). A "
        "collective would wait for ever here, and no context can begin. Make both in the main process. "
        "get_rank(), get_world_size() and the other getters work here too."
    )


def _nothing() -> None:
    pass


def after_fork(model: ComputationModel) -> None:
    """In a forked child: note what it has inherited. ``model`` is that of the facade."""
    global _parent
    for kind in registered_computation_models:
        if kind.library in sys.modules:
            mark = kind.keep_through_fork()
            if mark is not None:
                _inherited.append(mark)
                _parent = os.getppid()
    note_inherited(model)
