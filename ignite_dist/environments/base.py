"""What every launcher tells its processes, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["Environment", "read_int", "require_range"]


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
        EnvironmentVariablesError: it holds something else.
    """
    value = environ.get(name, "")
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise EnvironmentVariablesError(
            f"The environment variable {name} must be a number, got {value!r}."
        ) from None


def require_range(environment: Environment) -> Environment:
    """``environment``, if its ranks lie within its sizes.

    Raises:
        EnvironmentVariablesError: they do not.
    """
    pairs = (
        ("rank", environment.rank, "world size", environment.world_size),
        ("local rank", environment.local_rank, "processes per node", environment.nproc_per_node),
        ("node rank", environment.node_rank, "number of nodes", environment.nnodes),
    )
    for rank_name, rank, size_name, size in pairs:
        if rank is not None and (rank < 0 or (size is not None and rank >= size)):
            raise EnvironmentVariablesError(
                f"The environment variables of {environment.launcher} contradict each other: "
                f"{rank_name} {rank} with {size_name} {size}."
            )
    return environment
