"""``RANK`` and ``WORLD_SIZE``, set by hand or by another launcher.

torchrun defines these names, and other launchers use the same names:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. ``NODE_RANK`` comes from
Azure ML and Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import LOOPBACK, Environment, read_int, read_port, require_range
from ignite_dist.errors import EnvironmentVariablesError

LAUNCHER = "RANK and WORLD_SIZE"
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MASTER_*",
)

# pytorch-ignite's default, for a launcher that sets ranks but no address.
_DEFAULT_PORT = 15000


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment, if ``RANK`` and ``WORLD_SIZE`` are set."""
    if not environ.get("RANK") or not environ.get("WORLD_SIZE"):
        return None
    return read(environ, LAUNCHER, "RANK and WORLD_SIZE are set")


def read(environ: Mapping[str, str], launcher: str, reason: str) -> Environment:
    """The environment of a ``launcher`` that sets torchrun's variables.

    Args:
        environ: all variables.
        launcher: name of the launcher.
        reason: the variables that identify the launcher.

    Raises:
        EnvironmentVariablesError: ``RANK`` or ``WORLD_SIZE`` is missing, or variables contradict each other.
    """
    rank, world_size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE")
    if rank is None or world_size is None:
        raise incomplete_error(environ, reason)
    local_rank, node_rank = read_int(environ, "LOCAL_RANK"), read_int(environ, "GROUP_RANK")
    return require_range(
        Environment(
            launcher=launcher,
            rank=rank,
            world_size=world_size,
            local_rank=0 if local_rank is None and world_size == 1 else local_rank,
            nproc_per_node=read_int(environ, "LOCAL_WORLD_SIZE"),
            nnodes=read_int(environ, "GROUP_WORLD_SIZE"),
            node_rank=read_int(environ, "NODE_RANK") if node_rank is None else node_rank,
            main_address=environ.get("MASTER_ADDR") or LOOPBACK,
            main_port=read_port(environ, "MASTER_PORT") or _DEFAULT_PORT,
            reason=reason,
        )
    )


def incomplete_error(environ: Mapping[str, str], reason: str = "") -> EnvironmentVariablesError:
    """The error for an environment with only one of ``RANK`` and ``WORLD_SIZE``."""
    state = ", ".join(f"{name}={environ.get(name)!r}" for name in ("RANK", "WORLD_SIZE"))
    return EnvironmentVariablesError(
        f"Incomplete environment variables: {state}{f' ({reason})' if reason else ''}. Set RANK and "
        "WORLD_SIZE (and LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for every process, start the script with "
        "torchrun, or unset both variables to run alone."
    )
