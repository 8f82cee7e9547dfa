"""MPICH, Intel MPI, MVAPICH and Cray's PALS: launchers with a process management interface (PMI).

- MPICH and Intel MPI (``mpiexec.hydra``): ``PMI_*``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``;
  https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
- MVAPICH2: ``MV2_COMM_WORLD_*``; https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
- PALS: ``PALS_LOCAL_RANKID``, ``PALS_LOCAL_SIZE``; https://cpe.ext.hpe.com/docs/24.03/pals/
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import slurm
from ignite_dist.environments.base import Environment, numbered, read_int

LAUNCHER = "PMI"
VARIABLES = (
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "PMI_JOBID",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_RANKID",
    "PALS_LOCAL_SIZE",
    "PALS_APID",
    "PBS_JOBID",
    "PMI_*",
    "MPI_LOCAL*",
    "MV2_COMM_WORLD_*",
    "PALS_*",
)

_WORLD = (("PMI_RANK", "PMI_SIZE"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"))
_NODE = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_JOB = ("PALS_APID", "PMI_JOBID", "PBS_JOBID", "SLURM_JOB_ID")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that one of these launchers started.

    Raises:
        EnvironmentVariablesError: the rank or the world size is missing or not a number.
    """
    world = next((names for names in _WORLD if any(environ.get(name) for name in names)), None)
    if world is None or _is_set_by_srun(environ):
        return None
    node = next((names for names in _NODE if all(environ.get(name) for name in names)), ())
    attributes = ("rank", "world_size", "local_rank", "nproc_per_node")
    names = dict(zip(attributes, (*world, *node), strict=False))
    job = next((environ[name] for name in _JOB if environ.get(name)), "")
    first_host = slurm.first_host_of_job(environ)
    return numbered(environ, LAUNCHER, "MPI's mpiexec", names, job=job, first_host=first_host)


def _is_set_by_srun(environ: Mapping[str, str]) -> bool:
    """True if ``srun --mpi=pmi2`` has set the variables. Slurm's own variables then have more information."""
    return bool(environ.get("SLURM_STEP_ID")) and (
        read_int(environ, "PMI_RANK"),
        read_int(environ, "PMI_SIZE"),
    ) == (read_int(environ, "SLURM_PROCID"), read_int(environ, "SLURM_STEP_NUM_TASKS"))
