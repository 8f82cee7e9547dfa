"""The place of a process in its job, and how to read it from environment variables."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ignite_dist.environments import own_variables
from ignite_dist.errors import EnvironmentVariablesError

LOOPBACK = "127.0.0.1"

# Numbers as launchers write them. int() also accepts non-ASCII digits, underscores and any length.
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,10}\s*")


class Environment(NamedTuple):
    """The place of one process in a job, as the launcher describes it. None means unknown.

    Attributes:
        launcher: ``"torchrun"``, ``"Slurm"``, ``"Open MPI"``, ...; ``"none"`` if no launcher was found.
        rank: rank of this process, in [0, world_size).
        world_size: number of processes.
        local_rank: rank of this process on its node, in [0, nproc_per_node).
        nproc_per_node: number of processes on this node.
        nnodes: number of nodes.
        node_rank: rank of this node, in [0, nnodes).
        main_address: address of rank 0's node.
        main_port: port of the rendezvous on rank 0's node.
        has_own_devices: True if the launcher was asked to show each process its own accelerators only.
        reason: a text with the variables that identify this launcher, and with the names of outer launchers.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    main_address: str | None = None
    main_port: int | None = None
    has_own_devices: bool = False
    reason: str = ""

    def teardown(self) -> None:
        """Remove the environment variables that ``initialize`` has set in this process.

        Call this method before the script starts other programs, because these would inherit the variables.
        The context stays usable, but new groups may listen on another network interface. ``finalize`` also
        removes the variables. A second call has no effect.
        """
        own_variables.restore()


def read_int(environ: Mapping[str, str], name: str) -> int | None:
    """The number in the variable ``name``; None if the variable is missing or empty.

    Raises:
        EnvironmentVariablesError: the value is not a number of at most ten digits.
    """
    value = environ.get(name, "")
    if not value:
        return None
    if _NUMBER.fullmatch(value) is None:
        raise EnvironmentVariablesError(
            f"The environment variable {name} must be a number, got {value[:100]!r}."
        )
    return int(value)


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """The port in the variable ``name``; None if the variable is missing or empty.

    Raises:
        EnvironmentVariablesError: the value is not a port.
    """
    port = read_int(environ, name)
    if port is not None and not 1 <= port <= 65535:
        raise EnvironmentVariablesError(
            f"The environment variable {name} must be a port, in [1, 65535], got {port}."
        )
    return port


def require(environ: Mapping[str, str], launcher: str, *names: str) -> list[int]:
    """The numbers in the variables ``names``, which ``launcher`` always sets.

    Raises:
        EnvironmentVariablesError: a variable is missing, or its value is not a number.
    """
    values = {name: read_int(environ, name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in names if name not in missing)
        raise EnvironmentVariablesError(
            f"Incomplete environment variables of {launcher}: {given or 'others are set'}, but "
            f"{' and '.join(missing)} missing. "
            f"Start the script with {launcher}'s own command, or unset the variables to run alone."
        )
    return [value for value in values.values() if value is not None]


def port_of_job(job: str) -> int:
    """A port in [15000, 25000): equal in all processes of ``job``, and rarely equal for two jobs."""
    number = int(job) if job.isdecimal() and len(job) <= 10 else zlib.crc32(job.encode())
    return 15000 + number % 10000


def numbered(
    environ: Mapping[str, str],
    launcher: str,
    command: str,
    names: Mapping[str, str],
    *,
    job: str,
    first_host: str | None,
) -> Environment:
    """The environment of a launcher that sets ranks and sizes, but no address.

    Args:
        environ: all variables.
        launcher: name of the launcher.
        command: the command that starts the processes, for errors.
        names: the variable for each attribute of :class:`Environment`, for example
            ``{"rank": "FLUX_TASK_RANK", "world_size": "FLUX_JOB_SIZE", "local_rank": "FLUX_TASK_LOCAL_ID"}``.
            ``rank`` and ``world_size`` are required.
        job: the job's name, for :func:`port_of_job`.
        first_host: the host of rank 0; None if unknown.

    Raises:
        EnvironmentVariablesError: a variable is missing, or the variables contradict each other.
    """
    numbers: dict[str, Any] = dict(zip(names, require(environ, command, *names.values()), strict=True))
    found = Environment(
        launcher=launcher,
        **numbers,
        main_address=environ.get("MASTER_ADDR") or None,
        main_port=read_port(environ, "MASTER_PORT") or port_of_job(job),
        reason=f"{names['rank']} and {names['world_size']} are set",
    )
    return located(found, first_host)


def located(found: Environment, first_host: str | None) -> Environment:
    """``found`` with the address of rank 0's node, and with sizes computed from the other sizes.

    All processes are on this node if ``nnodes`` is 1 or ``nproc_per_node`` is the world size.

    Args:
        found: the values from the launcher.
        first_host: the host of rank 0 in a job of several nodes; None if unknown.

    Raises:
        EnvironmentVariablesError: ``found`` contradicts itself.
    """
    if found.nnodes == 1 and found.nproc_per_node is None:
        found = found._replace(nproc_per_node=found.world_size)
    if found.nnodes is None and found.nproc_per_node == found.world_size:
        found = found._replace(nnodes=1)
    if found.nnodes == 1:
        first_host = LOOPBACK
        if found.node_rank is None:
            found = found._replace(node_rank=0)
    return require_range(found._replace(main_address=found.main_address or first_host))


def require_range(environment: Environment) -> Environment:
    """``environment`` itself, if every size is at least 1 and every rank is smaller than its size.

    Raises:
        EnvironmentVariablesError: a size or a rank is out of range.
    """
    place, size = environment, environment.world_size
    ranks = (
        ("rank", place.rank, "world size", size),
        ("local rank", place.local_rank, "processes per node", place.nproc_per_node),
        ("local rank", place.local_rank, "world size", size),
        ("node rank", place.node_rank, "number of nodes", place.nnodes),
    )
    sizes = (("processes per node", place.nproc_per_node), ("number of nodes", place.nnodes))
    wrong = [
        f"{name} {rank} with {limit_name} {limit}"
        for name, rank, limit_name, limit in ranks
        if rank is not None and (rank < 0 or (limit is not None and rank >= limit))
    ]
    wrong += [
        f"{name} {value} with world size {size}"
        for name, value in sizes
        if value is not None and not 1 <= value <= size
    ]
    if place.nproc_per_node is not None and place.nnodes is not None:
        num_elsewhere = size - place.nproc_per_node  # each other node has at least one process
        if num_elsewhere < place.nnodes - 1 or (place.nnodes == 1 and num_elsewhere > 0):
            both = " and ".join(f"{name} {value}" for name, value in sizes)
            wrong.append(f"{both} with world size {size}")
    if wrong:
        raise EnvironmentVariablesError(
            f"The environment variables of {place.launcher} contradict each other: {wrong[0]} "
            f"({place.reason})."
        )
    return environment
