"""What every launcher tells its processes, under one set of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["Environment", "read_int", "read_port", "require_range"]

# What launchers write. int() takes more: other scripts' digits, underscores, numbers of any length.
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,10}\s*")


class Environment(NamedTuple):
    """The place of one process in a job, as its launcher describes it. None is what it does not say."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    main_address: str | None = None
    main_port: int | None = None


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


def require_range(environment: Environment) -> Environment:
    """``environment``, if its sizes are at least 1 and its ranks lie within them.

    Raises:
        EnvironmentVariablesError: they are not, or do not.
    """
    pairs = (
        ("rank", environment.rank, "world size", environment.world_size),
        ("local rank", environment.local_rank, "processes per node", environment.nproc_per_node),
        ("node rank", environment.node_rank, "number of nodes", environment.nnodes),
    )
    for rank_name, rank, size_name, size in pairs:
        least = 0 if rank is None else rank
        if least < 0 or (size is not None and least >= size):
            raise EnvironmentVariablesError(
                f"The environment variables of {environment.launcher} contradict each other: "
                f"{rank_name} {rank} with {size_name} {size}."
            )
    return environment
