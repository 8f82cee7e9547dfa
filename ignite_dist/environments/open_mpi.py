"""Open MPI's ``mpirun``.

https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import slurm
from ignite_dist.environments.base import Environment, numbered
from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["detect", "without_size"]


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that Open MPI's ``mpirun`` started.

    Raises:
        EnvironmentVariablesError: a variable that it sets is missing, or holds something else.
    """
    if not environ.get("OMPI_COMM_WORLD_RANK") and not environ.get("OMPI_COMM_WORLD_SIZE"):
        return None
    # OMPI_COMM_WORLD_NODE_RANK is a rank on the node among the processes of all jobs, not the node's.
    names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    job, first_host = environ.get("PMIX_NAMESPACE", ""), slurm.first_host_of_job(environ)
    return numbered(environ, "Open MPI", "Open MPI's mpirun", names, job=job, first_host=first_host)


def without_size(environ: Mapping[str, str]) -> EnvironmentVariablesError | None:
    """The error of a process that some launcher started by PMIx, whose variables do not say how many."""
    if not environ.get("PMIX_RANK"):
        return None
    return EnvironmentVariablesError(
        f"PMIX_RANK={environ['PMIX_RANK']} is set, so a launcher has started several processes, but no "
        "variable says how many. Set RANK and WORLD_SIZE (and LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for "
        "every process, or unset PMIX_RANK to run alone."
    )
