"""Variables of launchers, and the environment that is detected from them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ignite_dist import environments
from ignite_dist.environments import Environment
from ignite_dist.environments.base import numbered

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NODEID": "1",
}


def detect(environ: Mapping[str, str]) -> Environment | None:
    return environments.detect(MappingProxyType(dict(environ)))  # it cannot be written to


def found_in(environ: Mapping[str, str]) -> Environment:
    found = detect(environ)
    assert found is not None
    return found


# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
FLUX = {
    **{"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"},
    **{"FLUX_JOB_NNODES": "2", "FLUX_JOB_ID": "ƒ2oLkTLb"},
}
FLUX_NAMES = {
    "rank": "FLUX_TASK_RANK",
    "world_size": "FLUX_JOB_SIZE",
    "local_rank": "FLUX_TASK_LOCAL_ID",
    "nnodes": "FLUX_JOB_NNODES",
}


def numbered_by_flux(environ: Mapping[str, str], *attributes: str) -> Environment:
    names = {attribute: FLUX_NAMES[attribute] for attribute in ("rank", "world_size", *attributes)}
    return numbered(environ, "Flux", "flux run", names, job=environ["FLUX_JOB_ID"], first_host="node7")
