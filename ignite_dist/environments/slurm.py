"""Slurm's ``srun``.

The names are those of https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ignite_dist.environments.base import Environment, read_int, read_port, require_range
from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["detect", "first_host"]

# A host, with brackets that stand for several. Nothing has to follow it, so it is found in linear time.
_HOSTS = re.compile(r"(?:[^\s,\[\]]+|\[[0-9][0-9,-]*\])+")
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task that ``srun`` started; a step's variables go before the job's.

    Raises:
        EnvironmentVariablesError: a variable that srun sets is missing, or holds something else.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    rank = read_int(environ, "SLURM_PROCID")
    local_rank = read_int(environ, "SLURM_LOCALID")
    world_size = read_int(environ, "SLURM_STEP_NUM_TASKS") or read_int(environ, "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    required = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NTASKS": world_size,
        "SLURM_JOB_NODELIST": nodes,
    }
    missing = ", ".join(name for name, value in required.items() if value in (None, ""))
    if rank is None or world_size is None or not nodes or missing:
        raise EnvironmentVariablesError(
            f"This is a Slurm job (SLURM_JOB_ID is set), but {missing} is missing. Start the script with "
            "srun, or unset SLURM_JOB_ID to run alone."
        )
    return require_range(
        Environment(
            launcher="Slurm",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            nnodes=read_int(environ, "SLURM_STEP_NUM_NODES") or read_int(environ, "SLURM_JOB_NUM_NODES"),
            node_rank=read_int(environ, "SLURM_NODEID"),
            main_address=environ.get("MASTER_ADDR") or first_host(nodes),
            main_port=read_port(environ, "MASTER_PORT") or _port_of_job(environ),
        )
    )


def _port_of_job(environ: Mapping[str, str]) -> int:
    """One port for all tasks that other jobs are unlikely to share: from the job's number."""
    return 15000 + (read_int(environ, "SLURM_JOB_ID") or 0) % 10000


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``"gpu[03-05,9],login"`` -> ``"gpu03"``.

    Raises:
        EnvironmentVariablesError: there is none.
    """
    hosts = _HOSTS.match(nodes := nodes.strip())
    if hosts is None or nodes[hosts.end() :].lstrip()[:1] not in ("", ","):
        raise EnvironmentVariablesError(
            f"SLURM_JOB_NODELIST (or SLURM_STEP_NODELIST) is not a list of hosts: {nodes[:100]!r}. Set "
            "MASTER_ADDR to the host of rank 0."
        )
    return _BRACKET.sub(r"\1", hosts[0])
