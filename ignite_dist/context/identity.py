"""What the live context says about this process."""

from __future__ import annotations

import logging
import socket
from typing import Any

import torch

from ignite_dist import environments
from ignite_dist.arguments import as_int
from ignite_dist.comp_models import NativeModel
from ignite_dist.context.live import current_model
from ignite_dist.environments import Environment
from ignite_dist.tracing import traced

__all__ = [
    "backend",
    "device",
    "environment",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "hostname",
    "is_global_zero",
    "is_local_zero",
    "model_name",
    "set_local_rank",
    "show_config",
    "world_group",
]

_logger = logging.getLogger(__name__)


@traced
def get_rank() -> int:
    """Rank of this process, in [0, world_size). Never communicates.

    A worker of a DataLoader has the rank of its main process, by whatever method it was started. If it was
    not forked, it has it once it works: what it imports and unpickles before sees a world of one.
    """
    return current_model().get_rank()


@traced
def get_world_size() -> int:
    """Number of processes of the context; 1 without one. Never communicates."""
    return current_model().get_world_size()


@traced
def get_local_rank() -> int:
    """Rank of this process among those of its node.

    It comes from the environment, else from :func:`set_local_rank`. Where neither says it, the first call
    finds it from the host names of all ranks; every rank has to make that call.
    """
    return current_model().get_local_rank()


@traced
def get_nproc_per_node() -> int:
    """Number of processes on this node. The first call may be an exchange, as in :func:`get_local_rank`."""
    return current_model().get_nproc_per_node()


@traced
def get_nnodes() -> int:
    """Number of nodes. The first call may be an exchange, as in :func:`get_local_rank`."""
    return current_model().get_nnodes()


@traced
def get_node_rank() -> int:
    """Rank of this node, in [0, nnodes). The first call may be an exchange, as in :func:`get_local_rank`."""
    return current_model().get_node_rank()


@traced
def is_global_zero() -> bool:
    """Whether this process is the first of all. Never communicates."""
    return current_model().get_rank() == 0


@traced
def is_local_zero() -> bool:
    """Whether this process is the first of its node. The first call may be an exchange, as above."""
    return current_model().get_local_rank() == 0


def world_group() -> Any:
    """The live context's own handle of the group of all ranks, to hand to other libraries.

    Returns:
        For torch a ``ProcessGroup``, for Horovod a ``ProcessSet``, for XLA the ranks as a tuple, and in a
        serial context ``(0,)``. It is a ``group=`` of every collective here too.
    """
    model = current_model()
    handle = model.transport.world_handle()
    return model.groups.world.ranks if handle is None else handle


@traced
def device() -> torch.device:
    """The device to put a model and its data on: this rank's accelerator, else ``torch.device("cpu")``."""
    return current_model().device()


@traced
def backend() -> str | None:
    """``"gloo"``, ``"nccl"``, ...; None without a context. Of one backend per device, the accelerator's."""
    return current_model().backend()


@traced
def model_name() -> str:
    """The computation model: ``"serial"``, ``"native-dist"``, ..."""
    return current_model().name


def environment() -> Environment:
    """What started this process, and why that is believed. Never communicates.

    It is what the environment variables say, not whether there is a context: under torchrun without one it is
    torchrun's. Variables that this package has set itself do not count.

    Returns:
        An ``Environment`` with the attributes ``launcher`` (``"torchrun"``, ``"Slurm"``, ``"Open MPI"``, ...;
        ``"none"`` where nothing was found), ``rank``, ``world_size``, ``local_rank``, ``nproc_per_node``,
        ``nnodes``, ``node_rank``, ``main_address``, ``main_port`` (None: the launcher does not say) and
        ``reason``, in words. Its ``teardown()`` gives back the variables that ``initialize`` has set.

    Raises:
        EnvironmentVariablesError: the variables are half set or contradict each other; it names them.
    """
    return environments.current()


def hostname() -> str:
    """Name of this host."""
    return socket.gethostname()


def set_local_rank(index: int) -> None:
    """Say this process's local rank, for a context that was made without ``LOCAL_RANK`` in the environment.

    Args:
        index: the local rank; what the environment says goes before it.
    """
    index = as_int(index)
    if type(index) is not int or index < 0:
        raise ValueError(f"A local rank is an int from 0 on, got {index!r}.")
    NativeModel.hint_local_rank(index)
    current_model().set_local_rank(index)


def show_config() -> None:
    """Log the configuration at INFO level, one fact per line, on rank 0. Never communicates.

    It shows whether or not ``logging`` is configured: without a handler it goes to the standard error.
    """
    model = current_model()
    if model.get_rank() != 0:
        return
    local_rank, topology = model.known_local_rank(), model.known_topology()
    unknown = "not known yet"
    facts = {
        "distributed configuration": model.name,
        "backend": model.backend(),
        "device": model.device().type,
        "hostname": hostname(),
        "world size": model.get_world_size(),
        "rank": model.get_rank(),
        "local rank": unknown if local_rank is None else local_rank,
        "num processes per_node": topology.nproc_per_node if topology else unknown,
        "num nodes": topology.nnodes if topology else unknown,
        "node rank": topology.node_rank if topology else unknown,
    }
    handler = None if _logger.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        _logger.addHandler(handler)
    try:
        for name, value in facts.items():
            # Handled, not logged: who calls this wants to see it, whatever the root logger's level is.
            record = _logger.makeRecord(
                _logger.name, logging.INFO, __file__, 0, "%s: %s", (name, value), None, "show_config"
            )
            _logger.handle(record)
    finally:
        if handler is not None:
            _logger.removeHandler(handler)
