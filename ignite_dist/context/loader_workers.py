"""A context in a worker of a DataLoader that was not forked: the getters answer as in its main process.

Such a worker (``multiprocessing_context="spawn"``, or ``"forkserver"``, the default since Python 3.14) is a
new process, and has only what multiprocessing sends. Each process sends its configuration to all that it
starts, so a rank notes there who it is. The environment would not do: a fork server has that of its start.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ignite_dist.comp_models import ComputationModel, SerialModel
from ignite_dist.comp_models.topology import Topology
from ignite_dist.context import forks

__all__ = ["WorkerModel", "model_of_worker", "note", "when_sent"]

_KEY = "ignite_dist"


def _config() -> dict[str, Any]:
    """What this process sends to those that it starts."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


class _Note:
    """What a worker is told: plain values, because it need not import this package."""

    def __init__(self, model: ComputationModel) -> None:
        self._model = weakref.ref(model)  # a Process object that is kept does not keep the context alive

    def __reduce__(self) -> tuple[Any, ...]:
        model = self._model()
        return dict, ({} if model is None or not model.is_current() else _facts(model),)


def _facts(model: ComputationModel) -> dict[str, Any]:
    topology = model.known_topology()
    return {
        "name": model.name,
        "rank": model.get_rank(),
        "world_size": model.get_world_size(),
        "backend": model.backend(),
        "device": str(model.device()),
        "local_rank": model.known_local_rank(),
        "topology": None if topology is None else tuple(topology),
        "pid": os.getpid(),
    }


def note(model: ComputationModel) -> None:
    """Tell the processes that this one starts of ``model``. Ranks that share a process tell nothing."""
    config = _config()
    if isinstance(model, WorkerModel):
        return
    if model.backend() is not None and model.get_world_size() > 1 and model.ranks_in_process() == 1:
        config[_KEY] = _Note(model)
    elif isinstance(config.get(_KEY), _Note):  # what the parent process has sent stays
        del config[_KEY]


def when_sent(function: Callable[[Any], None]) -> None:
    """Call ``function`` in a process that multiprocessing starts, once its configuration is there."""
    util.register_after_fork(function, function)  # called for each start method, whatever its name says


def model_of_worker(num_modules: int) -> ComputationModel | None:
    """The model of this process, if it is a worker of a DataLoader whose main process has a context."""
    facts = _config().get(_KEY) if get_worker_info() is not None else None
    parent = multiprocessing.parent_process()
    # A process hands on what it was told: the facts are not about this worker's main process if that is
    # itself started by a rank, and none.
    if not isinstance(facts, dict) or not facts or parent is None or parent.pid != facts["pid"]:
        return None
    return WorkerModel(num_modules, facts)


class WorkerModel(SerialModel):
    """The getters of another process's context; whatever communicates is refused.

    Args:
        num_modules: as for a serial model.
        facts: what the main process has told.
    """

    def __init__(self, num_modules: int, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._rank: int = facts["rank"]
        self._world_size: int = facts["world_size"]
        super().__init__(num_modules)
        self.name = facts["name"]  # type: ignore[misc]  # a ClassVar elsewhere
        self._device = torch.device(facts["device"])
        known = facts["topology"]
        self._found_topology = None if known is None else Topology(*known)
        forks.keep_getters(self, facts["pid"])

    def is_current_by_guards(self) -> bool:
        """See ``ComputationModel``: the guards cannot tell."""
        return False

    def get_rank(self) -> int:
        """The rank of the main process."""
        return self._rank

    def get_world_size(self) -> int:
        """The world size of the main process."""
        return self._world_size

    def backend(self) -> str | None:
        """The backend of the main process."""
        found: str = self._facts["backend"]
        return found

    def known_local_rank(self) -> int | None:
        """The local rank of the main process, if it knew it."""
        found: int | None = self._facts["local_rank"]
        return found

    def get_local_rank(self) -> int:
        """The local rank of the main process; refused if it did not know it."""
        found = self.known_local_rank()
        return self.find_topology().local_rank if found is None else found
