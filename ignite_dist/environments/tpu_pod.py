"""A TPU pod: one process on each of its hosts, started by hand or by GKE.

https://docs.cloud.google.com/kubernetes-engine/docs/concepts/tpus. These ranks count hosts. The
XLA backend has other ranks: one per chip.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, read_port, require, require_range

LAUNCHER = "TPU pod"
VARIABLES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")

_DEFAULT_PORT = 15000


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of the process of one host; None if there is only one host."""
    hosts = [host.strip() for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
    if len(hosts) < 2:
        return None
    (rank,) = require(environ, "the TPU pod", "TPU_WORKER_ID")
    return require_range(
        Environment(
            launcher=LAUNCHER,
            rank=rank,
            world_size=len(hosts),
            local_rank=0,
            nproc_per_node=1,
            nnodes=len(hosts),
            node_rank=rank,
            main_address=environ.get("MASTER_ADDR") or hosts[0],
            main_port=read_port(environ, "MASTER_PORT") or _DEFAULT_PORT,
            reason="TPU_WORKER_ID and several TPU_WORKER_HOSTNAMES are set",
        )
    )
