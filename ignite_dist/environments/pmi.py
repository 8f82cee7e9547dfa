"""MPICH, Intel MPI, MVAPICH and Cray's PALS, which say ranks as the PMI has it.

- MPICH and Intel MPI (``mpiexec.hydra``): ``PMI_*``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``;
  https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
- MVAPICH2: ``MV2_COMM_WORLD_*``; https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
- PALS: ``PALS_LOCAL_RANKID``, ``PALS_LOCAL_SIZE``; https://cpe.ext.hpe.com/docs/24.03/pals/
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import slurm
from ignite_dist.environments.base import Environment, numbered, read_int

__all__ = ["detect"]

_WORLD = (("PMI_RANK", "PMI_SIZE"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"))
_NODE = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_JOB = ("PALS_APID", "PMI_JOBID", "PBS_JOBID", "SLURM_JOB_ID")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that one of them started.

    Raises:
        EnvironmentVariablesError: one of rank and size is missing, or holds something else.
    """
    world = next((names for names in _WORLD if any(environ.get(name) for name in names)), None)
    if world is None or _is_sruns(environ):
        return None
    node = next((names for names in _NODE if all(environ.get(name) for name in names)), ())
    job = next((environ[name] for name in _JOB if environ.get(name)), "")
    first_host = slurm.first_host_of_job(environ)
    return numbered(environ, "PMI", "MPI's mpiexec", (*world, *node), job=job, first_host=first_host)


def _is_sruns(environ: Mapping[str, str]) -> bool:
    """Whether it is ``srun --mpi=pmi2`` that set them: Slurm's own variables say more."""
    return bool(environ.get("SLURM_STEP_ID")) and (
        read_int(environ, "PMI_RANK"),
        read_int(environ, "PMI_SIZE"),
    ) == (read_int(environ, "SLURM_PROCID"), read_int(environ, "SLURM_STEP_NUM_TASKS"))
