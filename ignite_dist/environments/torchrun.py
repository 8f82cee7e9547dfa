"""torchrun, and everything else that sets ``RANK`` and ``WORLD_SIZE``.

The names are those of https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, read_int, read_port, require_range
from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["detect"]

# What pytorch-ignite falls back to, for a launcher that gives ranks but no address.
_DEFAULT_ADDRESS = "127.0.0.1"
_DEFAULT_PORT = 15000


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment, if ``RANK`` and ``WORLD_SIZE`` are set.

    Raises:
        EnvironmentVariablesError: only one of them is, and no other launcher is there to make up for it.
    """
    rank, world_size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE")
    local_rank = read_int(environ, "LOCAL_RANK")
    if rank is None or world_size is None:
        if environ.get("SLURM_JOB_ID") or (rank is None and world_size is None):
            return None
        state = ", ".join(f"{name}={environ.get(name)!r}" for name in ("RANK", "WORLD_SIZE"))
        raise EnvironmentVariablesError(
            f"Half-set environment variables: {state}. Set RANK and WORLD_SIZE (and LOCAL_RANK, MASTER_ADDR, "
            "MASTER_PORT) for every process, start the script with torchrun, or unset them to run alone."
        )
    return require_range(
        Environment(
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK and WORLD_SIZE",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            nproc_per_node=read_int(environ, "LOCAL_WORLD_SIZE"),
            nnodes=read_int(environ, "GROUP_WORLD_SIZE"),
            node_rank=read_int(environ, "GROUP_RANK"),
            main_address=environ.get("MASTER_ADDR") or _DEFAULT_ADDRESS,
            main_port=read_port(environ, "MASTER_PORT") or _DEFAULT_PORT,
        )
    )
