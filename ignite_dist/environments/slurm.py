"""Slurm's ``srun``.

The names of the variables: https://slurm.schedmd.com/srun.html (OUTPUT ENVIRONMENT VARIABLES). A job consists
of steps. ``srun`` sets variables of the step and of the job; ``sbatch`` and ``salloc`` set only the job's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ignite_dist.environments.base import (
    Environment,
    located,
    port_of_job,
    read_int,
    read_port,
    require,
    require_range,
)
from ignite_dist.errors import EnvironmentVariablesError

LAUNCHER = "Slurm"
VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_*",
    "SLURMD_*",
)

# A host, or hosts with numbers in brackets. Matching takes linear time, because the repetition is at the end.
_HOSTS = re.compile(r"(?:[^\s,\[\]]+|\[[0-9][0-9,-]*\])+")
_BRACKET = re.compile(r"\[([0-9]+)[^\]]*\]")
# "2(x3)" means two tasks on each of the next three nodes.
_TASKS = re.compile(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task that ``srun`` started, from the variables of its step.

    Raises:
        EnvironmentVariablesError: this process is not a task of the job; or variables of srun are missing,
            not numbers, or contradict each other.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    world_size = read_int(environ, "SLURM_STEP_NUM_TASKS")
    if world_size is None:
        return _environment_outside_steps(environ)
    rank, local_rank = require(environ, "srun", "SLURM_PROCID", "SLURM_LOCALID")
    node_rank = read_int(environ, "SLURM_NODEID")
    address = environ.get("MASTER_ADDR")
    return require_range(
        Environment(
            launcher=LAUNCHER,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            nproc_per_node=_tasks_on_node(environ, node_rank, world_size),
            nnodes=read_int(environ, "SLURM_STEP_NUM_NODES"),
            node_rank=node_rank,
            main_address=address or first_host(environ.get("SLURM_STEP_NODELIST") or _job_nodes(environ)),
            main_port=read_port(environ, "MASTER_PORT") or port_of_job(environ["SLURM_JOB_ID"]),
            has_own_devices=_binds_devices(environ),
            reason="SLURM_JOB_ID and SLURM_STEP_NUM_TASKS are set",
        )
    )


def _environment_outside_steps(environ: Mapping[str, str]) -> Environment:
    """The environment of a process that ``sbatch`` or ``salloc`` started, in a job of one task."""
    num_tasks = read_int(environ, "SLURM_NTASKS") or 1
    if num_tasks > 1:
        raise EnvironmentVariablesError(
            f"This Slurm job has SLURM_NTASKS={num_tasks} tasks, but this process is not one of these tasks: "
            "SLURM_STEP_NUM_TASKS is not set. Start the script with srun, or unset SLURM_JOB_ID to run alone."
        )
    alone = Environment(LAUNCHER, rank=0, world_size=1, local_rank=0, nproc_per_node=1)
    return located(alone._replace(reason="SLURM_JOB_ID is set, and SLURM_NTASKS is not above 1"), None)


def _tasks_on_node(environ: Mapping[str, str], node_rank: int | None, world_size: int) -> int | None:
    """The number of tasks on the node ``node_rank``; None if unknown."""
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not tasks_per_node or node_rank is None:
        return None
    first, num_tasks, tasks_on_node = 0, 0, None
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise EnvironmentVariablesError(
                "The environment variable SLURM_STEP_TASKS_PER_NODE must be a list like '4(x2),3', got "
                f"{tasks_per_node[:100]!r}."
            )
        tasks, nodes = int(match[1]), int(match[2] or 1)
        num_tasks += tasks * nodes
        if first <= node_rank < first + nodes:
            tasks_on_node = tasks
        first += nodes
    if num_tasks != world_size or tasks_on_node is None:
        raise EnvironmentVariablesError(
            f"The environment variables of Slurm contradict each other: SLURM_STEP_TASKS_PER_NODE="
            f"{tasks_per_node[:100]} with SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node_rank}."
        )
    return tasks_on_node


def _binds_devices(environ: Mapping[str, str]) -> bool:
    """True if each task sees only its own GPUs: the job asks for GPUs per task, or for tasks per GPU."""
    variables = ("SLURM_NTASKS_PER_GPU", "SLURM_GPUS_PER_TASK")
    return any(environ.get(name) for name in variables) or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def _job_nodes(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST", "")


def first_host_of_job(environ: Mapping[str, str]) -> str | None:
    """The first node of the Slurm job that runs this process; None outside of Slurm."""
    nodes = _job_nodes(environ)
    return first_host(nodes) if nodes else None


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``"gpu[03-05,9],login"`` -> ``"gpu03"``.

    Raises:
        EnvironmentVariablesError: ``nodes`` is not such a list.
    """
    hosts = _HOSTS.match(nodes := nodes.strip())
    if hosts is None or nodes[hosts.end() :].lstrip()[:1] not in ("", ","):
        raise EnvironmentVariablesError(
            f"SLURM_JOB_NODELIST (or SLURM_STEP_NODELIST) is not a list of hosts: {nodes[:100]!r}. Set "
            "MASTER_ADDR to the host of rank 0."
        )
    return _BRACKET.sub(r"\1", hosts[0])
