"""What every launcher tells its processes, under one set of names."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ignite_dist.environments import variables
from ignite_dist.errors import EnvironmentVariablesError

__all__ = [
    "LOOPBACK",
    "Environment",
    "located",
    "numbered",
    "port_of_job",
    "read_int",
    "read_port",
    "require",
    "require_range",
]

LOOPBACK = "127.0.0.1"

# What launchers write. int() takes more: other scripts' digits, underscores, numbers of any length.
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,10}\s*")


class Environment(NamedTuple):
    """The place of one process in a job, as its launcher describes it. None is what it does not say.

    Attributes:
        launcher: ``"torchrun"``, ``"Slurm"``, ``"Open MPI"``, ...; ``"none"``: there are no others.
        rank: of this process, in [0, world_size).
        world_size: number of processes.
        local_rank: of this process among those of its node.
        nproc_per_node: number of processes on this node.
        nnodes: number of nodes.
        node_rank: of this node, in [0, nnodes).
        main_address: address of rank 0's node.
        main_port: where rank 0 serves the rendezvous there.
        has_own_devices: whether the launcher shows each process just its own accelerators.
        reason: the variables that decided for this launcher, and the other launchers that it goes before.
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
        """Give back the environment variables that ``initialize`` has set in this process.

        For a script that goes on to start programs of its own, which must not take themselves for ranks. The
        context lives on, but groups made after it may listen on another interface. :func:`finalize` does the
        same at its end. A second call has no effect.
        """
        variables.give_back()


def read_int(environ: Mapping[str, str], name: str) -> int | None:
    """The number in the variable ``name``, or None if it is not set or empty.

    Raises:
        EnvironmentVariablesError: it holds something else, or more than ten digits.
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
    """The port in the variable ``name``, or None if it is not set or empty.

    Raises:
        EnvironmentVariablesError: it holds something else.
    """
    port = read_int(environ, name)
    if port is not None and not 1 <= port <= 65535:
        raise EnvironmentVariablesError(
            f"The environment variable {name} must be a port, in [1, 65535], got {port}."
        )
    return port


def require(environ: Mapping[str, str], launcher: str, *names: str) -> list[int]:
    """The numbers in the variables ``names``, all of which ``launcher`` sets.

    Raises:
        EnvironmentVariablesError: one is missing, or holds something else.
    """
    values = {name: read_int(environ, name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in names if name not in missing)
        raise EnvironmentVariablesError(
            f"Half-set environment variables of {launcher}: {given or 'others are set'}, but "
            f"{' and '.join(missing)} missing. "
            f"Start the script with {launcher}'s own command, or unset them to run alone."
        )
    return [value for value in values.values() if value is not None]


def port_of_job(job: str) -> int:
    """One port for all processes of a job, which other jobs are unlikely to share: from the job's name."""
    number = int(job) if job.isdecimal() and len(job) <= 10 else zlib.crc32(job.encode())
    return 15000 + number % 10000


def numbered(
    environ: Mapping[str, str],
    launcher: str,
    command: str,
    names: Sequence[str],
    *,
    job: str,
    first_host: str | None,
) -> Environment:
    """The environment of a launcher that numbers its processes, and gives them no address.

    Args:
        environ: all variables.
        launcher: its name.
        command: what starts the processes, for errors.
        names: the variables of rank and world size, and those of local rank and local size if there are any.
        job: what tells its jobs apart.
        first_host: where rank 0 runs, if not here; None if nothing says it.

    Raises:
        EnvironmentVariablesError: one of ``names`` is missing, or they contradict each other.
    """
    rank, world_size, *on_node = require(environ, command, *names)
    local_rank, nproc_per_node = on_node or (None, None)
    found = Environment(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        nproc_per_node=nproc_per_node,
        main_address=environ.get("MASTER_ADDR") or None,
        main_port=read_port(environ, "MASTER_PORT") or port_of_job(job),
        reason=f"{names[0]} and {names[1]} are set",
    )
    return located(found, first_host)


def located(found: Environment, first_host: str | None) -> Environment:
    """``found`` with what follows from its sizes, and with the address of rank 0's node.

    That is ``first_host`` where the processes are on several nodes, None if nothing says it.

    Raises:
        EnvironmentVariablesError: ``found`` contradicts itself.
    """
    if found.nproc_per_node == found.world_size:
        found = found._replace(nnodes=1, node_rank=0)
        first_host = LOOPBACK
    return require_range(found._replace(main_address=found.main_address or first_host))


def require_range(environment: Environment) -> Environment:
    """``environment``, if its sizes are at least 1 and its ranks lie within them.

    Raises:
        EnvironmentVariablesError: they are not, or do not.
    """
    at, size = environment, environment.world_size
    ranks = (
        ("rank", at.rank, "world size", size),
        ("local rank", at.local_rank, "processes per node", at.nproc_per_node),
        ("local rank", at.local_rank, "world size", size),
        ("node rank", at.node_rank, "number of nodes", at.nnodes),
    )
    sizes = (("processes per node", at.nproc_per_node), ("number of nodes", at.nnodes))
    wrong = [
        f"{name} {rank} with {of} {limit}"
        for name, rank, of, limit in ranks
        if rank is not None and (rank < 0 or (limit is not None and rank >= limit))
    ]
    wrong += [
        f"{name} {part} with world size {size}"
        for name, part in sizes
        if part is not None and not 1 <= part <= size
    ]
    if at.nproc_per_node is not None and at.nnodes is not None:
        num_elsewhere = size - at.nproc_per_node  # at least one on each other node, none if there is no other
        if num_elsewhere < at.nnodes - 1 or (at.nnodes == 1 and num_elsewhere > 0):
            wrong.append(" and ".join(f"{name} {part}" for name, part in sizes) + f" with world size {size}")
    if wrong:
        raise EnvironmentVariablesError(
            f"The environment variables of {at.launcher} contradict each other: {wrong[0]} ({at.reason})."
        )
    return environment
