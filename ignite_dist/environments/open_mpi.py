"""Open MPI's ``mpirun``.

https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import slurm
from ignite_dist.environments.base import Environment, numbered
from ignite_dist.errors import EnvironmentVariablesError

LAUNCHER = "Open MPI"
VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_MCA_ess",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "OMPI_*",
    "PMIX_*",
)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that Open MPI's ``mpirun`` started.

    Raises:
        EnvironmentVariablesError: a variable of mpirun is missing or not a number, or the variables
            contradict each other.
    """
    if not environ.get("OMPI_COMM_WORLD_RANK") and not environ.get("OMPI_COMM_WORLD_SIZE"):
        return None
    # No node_rank: OMPI_COMM_WORLD_NODE_RANK numbers the processes of all jobs on this node.
    names = {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "nproc_per_node": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    job, first_host = environ.get("PMIX_NAMESPACE", ""), slurm.first_host_of_job(environ)
    return numbered(environ, LAUNCHER, "Open MPI's mpirun", names, job=job, first_host=first_host)


def is_singleton(environ: Mapping[str, str]) -> bool:
    """True if this process or its parent has initialized MPI without mpirun, by ``from mpi4py import MPI``.

    Open MPI 4 then sets ``PMIX_RANK=0`` in the environment, and child processes inherit the variable.
    """
    return environ.get("OMPI_MCA_ess") == "singleton"


def missing_size_error(environ: Mapping[str, str]) -> EnvironmentVariablesError:
    """The error for a process with ``PMIX_RANK`` but without a variable for the number of processes."""
    return EnvironmentVariablesError(
        f"PMIX_RANK={environ['PMIX_RANK']} is set, so a launcher has started several processes, but no "
        "variable says how many. Set RANK and WORLD_SIZE (and LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for "
        "every process, or unset PMIX_RANK to run alone."
    )
