"""Getters: rank, world size, node, device and backend of this process."""

from __future__ import annotations

import logging
import socket
from typing import Any

import torch

from ignite_dist import environments
from ignite_dist.context.live import current_model
from ignite_dist.environments import Environment
from ignite_dist.internals.arguments import as_int
from ignite_dist.internals.tracing import traced

_logger = logging.getLogger(__name__)


@traced
def get_rank(group: Any = None) -> int:
    """Rank of this process in a group, in [0, group_size); without ``group`` in [0, world_size).

    Never communicates, and makes no group of a list of ranks. A DataLoader worker has the rank of its main
    process, with every start method. A worker that was not forked has rank 0 and world size 1 until its
    imports and its unpickling are complete.

    Args:
        group: as in :func:`all_reduce`.

    Returns:
        The position of this rank among the group's ranks, which are ascending; -1 outside the group.

    Raises:
        ValueError: ``group`` is not a group, was destroyed, or has wrong ranks.

    Example::

        idist.get_rank(group=[1, 3])  # on four ranks: 0 on rank 1, 1 on rank 3, -1 elsewhere
    """
    if group is None:
        return current_model().get_rank()
    return _rank_in(group)


@traced
def get_world_size(group: Any = None) -> int:
    """Number of ranks of a group; without ``group`` of the context, and 1 without a context.

    Never communicates, and makes no group of a list of ranks.

    Args:
        group: as in :func:`all_reduce`.

    Returns:
        The size, on ranks outside the group too; 0 for a group without members. Outside of the group,
        torch's handle (``GroupMember.NON_GROUP_MEMBER``) does not know the ranks: 0.

    Raises:
        ValueError: as in :func:`get_rank`.
    """
    if group is None:
        return current_model().get_world_size()
    return len(current_model().groups.ranks_of(group))


def _rank_in(group: Any) -> int:
    model = current_model()
    ranks, rank = model.groups.ranks_of(group), model.get_rank()
    return ranks.index(rank) if rank in ranks else -1


@traced
def get_local_rank() -> int:
    """Rank of this process on its node, in [0, nproc_per_node).

    The value comes from the environment, else from :func:`set_local_rank`. Without both, the first call
    gathers the host names of all ranks; in this case every rank must make the first call.
    """
    return current_model().get_local_rank()


@traced
def get_nproc_per_node() -> int:
    """Number of processes on this node. The first call may communicate: see :func:`get_local_rank`."""
    return current_model().get_nproc_per_node()


@traced
def get_nnodes() -> int:
    """Number of nodes. The first call may communicate: see :func:`get_local_rank`."""
    return current_model().get_nnodes()


@traced
def get_node_rank() -> int:
    """Rank of this node, in [0, nnodes). The first call may communicate: see :func:`get_local_rank`."""
    return current_model().get_node_rank()


def node_group() -> list[int]:
    """The global ranks of this node, ascending, for use as ``group=``.

    The first call communicates if there are several nodes, or if the number of nodes is not known: then every
    rank of the world must make the first call. Later calls do not communicate. The first collective with
    the list makes a group. Under Horovod every rank must make the groups of all nodes, in the same order:
    see :func:`new_group`.

    Example::

        idist.node_group()  # on two nodes of two ranks: [0, 1] on node 0, [2, 3] on node 1
        idist.barrier(group=idist.node_group())  # the ranks of one node wait for each other
    """
    model = current_model()
    if model.find_topology().nnodes == 1:
        return list(range(model.get_world_size()))
    return sorted(model.node_ranks().values())


@traced
def is_global_zero() -> bool:
    """True if the rank is 0. Never communicates."""
    return current_model().get_rank() == 0


@traced
def is_local_zero() -> bool:
    """True if the local rank is 0. The first call may communicate: see :func:`get_local_rank`."""
    return current_model().get_local_rank() == 0


def world_group() -> Any:
    """The backend's handle of the world group, for use with other libraries.

    Returns:
        A ``ProcessGroup`` for torch, a ``ProcessSet`` for Horovod, a tuple of ranks for XLA, and ``(0,)``
        without a context. The collectives of this package accept the handle as ``group=``.
    """
    model = current_model()
    handle = model.transport.world_handle()
    return model.groups.world.ranks if handle is None else handle


@traced
def device() -> torch.device:
    """The device for models and data: this rank's accelerator, else ``torch.device("cpu")``.

    A context of :func:`initialize`, :func:`spawn` or :class:`Parallel` keeps its device, for all threads and
    for forked processes.
    """
    return current_model().device()


@traced
def backend() -> str | None:
    """Name of the backend, for example ``"nccl"``; None without a context.

    If each device type has a backend, this is the backend of the accelerator.
    """
    return current_model().backend()


@traced
def model_name() -> str:
    """Name of the computation model: ``"serial"``, ``"native-dist"``, ..."""
    return current_model().name


def environment() -> Environment:
    """The launcher of this process and its variables. Never communicates.

    Only the environment variables count, not the context: under torchrun the result describes torchrun also
    before :func:`initialize`. Variables that this package has set are ignored.

    Returns:
        An ``Environment`` with the attributes ``launcher`` (``"torchrun"``, ``"Slurm"``, ``"Open MPI"``, ...,
        or ``"none"``), ``rank``, ``world_size``, ``local_rank``, ``nproc_per_node``, ``nnodes``,
        ``node_rank``, ``main_address``, ``main_port`` (None if the launcher does not set one) and ``reason``
        (why this launcher was detected). ``teardown()`` removes the variables that ``initialize`` has set.

    Raises:
        EnvironmentVariablesError: variables are missing or contradict each other; the message names them.
    """
    return environments.current()


def hostname() -> str:
    """Name of this host."""
    return socket.gethostname()


def set_local_rank(index: int) -> None:
    """Set this process's local rank, for a context without ``LOCAL_RANK`` in the environment.

    Args:
        index: the local rank. A local rank from the environment takes precedence.
    """
    index = as_int(index)
    if type(index) is not int or index < 0:
        raise ValueError(f"The local rank must be an int >= 0, got {index!r}.")
    from ignite_dist.comp_models.native import NativeModel

    NativeModel.hint_local_rank(index)
    current_model().set_local_rank(index)


def show_config() -> None:
    """Log the configuration at INFO level, one fact per line, on rank 0. Never communicates.

    Without a configured handler the lines go to the standard error.
    """
    model = current_model()
    if model.get_rank() != 0:
        return
    local_rank, topology = model.known_local_rank(), model.known_topology()
    shares_memory = model.transport.shares_memory(model.groups.world)
    unknown = "not known yet"
    facts = {
        "distributed configuration": model.name,
        "backend": model.backend(),
        "device": model.device().type,
        "shared memory": unknown if shares_memory is None else "yes" if shares_memory else "no",
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
            # handle() ignores the logger's level: the user has asked for these lines.
            record = _logger.makeRecord(
                _logger.name, logging.INFO, __file__, 0, "%s: %s", (name, value), None, "show_config"
            )
            _logger.handle(record)
    finally:
        if handler is not None:
            _logger.removeHandler(handler)
