"""Kubeflow: a pod of a PyTorchJob or of a TrainJob that started the script without torchrun.

A PyTorchJob sets RANK and WORLD_SIZE, which count pods. Both kinds of job set torchrun's arguments as
variables (PET_...): https://www.kubeflow.org/docs/components/trainer/ and, for PyTorchJob,
https://github.com/kubeflow/trainer/tree/v1.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import LOOPBACK, Environment, read_int, read_port, require_range
from ignite_dist.errors import EnvironmentVariablesError

LAUNCHER = "Kubeflow"
VARIABLES = (
    "PET_NODE_RANK",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_*",
)

_DEFAULT_PORT = 29500  # torchrun's default


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a pod that runs one process.

    Raises:
        EnvironmentVariablesError: the job has several processes per pod, or a variable number of nodes.
            Only torchrun can start such a job.
    """
    if not environ.get("PET_NODE_RANK") or not environ.get("PET_NNODES"):
        return None
    node_rank = read_int(environ, "PET_NODE_RANK") or 0
    nproc_per_node, nnodes = environ.get("PET_NPROC_PER_NODE") or "1", environ["PET_NNODES"]
    has_rank = bool(environ.get("RANK") and environ.get("WORLD_SIZE"))
    # "auto" means one process per device. With RANK set, the pod may still run a single process.
    has_one_process = nproc_per_node == "1" or (has_rank and not nproc_per_node.isdecimal())
    if not has_one_process or ":" in nnodes:
        raise EnvironmentVariablesError(
            f"Kubeflow set PET_NNODES={nnodes} and PET_NPROC_PER_NODE={nproc_per_node}, which are for "
            "torchrun. This script was started without torchrun: use `torchrun script.py`."
        )
    rank = read_int(environ, "RANK") if has_rank else node_rank
    world_size = read_int(environ, "WORLD_SIZE" if has_rank else "PET_NNODES")
    assert rank is not None and world_size is not None
    return require_range(
        Environment(
            launcher=LAUNCHER,
            rank=rank,
            world_size=world_size,
            local_rank=0,
            nproc_per_node=1,
            nnodes=world_size,
            node_rank=rank,
            main_address=environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or LOOPBACK,
            main_port=read_port(environ, "MASTER_PORT")
            or read_port(environ, "PET_MASTER_PORT")
            or _DEFAULT_PORT,
            reason="PET_NODE_RANK and PET_NNODES are set, and each pod runs one process",
        )
    )
