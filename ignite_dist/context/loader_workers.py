"""The context in a DataLoader worker that was not forked: getters return the values of the main process.

Such a worker (``multiprocessing_context="spawn"``, or ``"forkserver"``, the default since Python 3.14) is a
new process. Multiprocessing sends the parent's configuration to the worker, so a rank stores its identity in
the configuration. Environment variables would not work: a fork server keeps the environment of its own start.
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
from ignite_dist.internals._python import sent_to_new_processes

_KEY = "ignite_dist"


class _Identity:
    """The identity of this rank. Pickles to plain values, because a worker need not import this package."""

    def __init__(self, model: ComputationModel) -> None:
        self._model = weakref.ref(model)  # a stored Process object must not keep the context alive

    def __reduce__(self) -> tuple[Any, ...]:
        model = self._model()
        return dict, ({} if model is None or not model.is_current() else _identity_values(model),)


def _identity_values(model: ComputationModel) -> dict[str, Any]:
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


def send_identity(model: ComputationModel) -> None:
    """Send the identity of ``model`` to processes started later. Ranks that share a process send nothing."""
    config = sent_to_new_processes()
    if isinstance(model, WorkerModel):
        return
    if model.backend() is not None and model.get_world_size() > 1 and model.ranks_in_process() == 1:
        config[_KEY] = _Identity(model)
    elif isinstance(config.get(_KEY), _Identity):  # keep the values that the parent process has sent
        del config[_KEY]


def call_in_new_processes(function: Callable[[Any], None]) -> None:
    """Call ``function`` in each new process after multiprocessing has set its configuration."""
    util.register_after_fork(function, function)  # runs with every start method, not only fork


def model_of_worker(num_modules: int) -> ComputationModel | None:
    """The model of this process, if it is a worker of a DataLoader whose main process has a context."""
    facts = sent_to_new_processes().get(_KEY) if get_worker_info() is not None else None
    parent = multiprocessing.parent_process()
    # A process passes these values on to its own children too. The values are valid only if the direct
    # parent is the rank that has made them.
    if not isinstance(facts, dict) or not facts or parent is None or parent.pid != facts["pid"]:
        return None
    return WorkerModel(num_modules, facts)


class WorkerModel(SerialModel):
    """The getters of the main process's context. Methods that communicate raise.

    Args:
        num_modules: see :class:`SerialModel`.
        facts: the values that the main process has sent.
    """

    def __init__(self, num_modules: int, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._rank: int = facts["rank"]
        self._world_size: int = facts["world_size"]
        super().__init__(num_modules)
        self.name = facts["name"]  # type: ignore[misc]  # a ClassVar in the base class
        self._device = torch.device(facts["device"])
        topology = facts["topology"]
        self._found_topology = None if topology is None else Topology(*topology)
        forks.keep_only_getters(self, facts["pid"])

    def is_current_by_guards(self) -> bool:
        """False: guards cannot detect the context of another process."""
        return False

    def get_rank(self) -> int:
        """The rank of the main process."""
        return self._rank

    def get_world_size(self) -> int:
        """The world size of the main process."""
        return self._world_size

    def backend(self) -> str | None:
        """The backend of the main process."""
        backend: str = self._facts["backend"]
        return backend

    def known_local_rank(self) -> int | None:
        """The local rank of the main process; None if the main process does not know it."""
        local_rank: int | None = self._facts["local_rank"]
        return local_rank

    def get_local_rank(self) -> int:
        """The local rank of the main process; raises if the main process does not know it."""
        local_rank = self.known_local_rank()
        return self.find_topology().local_rank if local_rank is None else local_rank
