"""Lightning's own launcher. It sets only local ranks, from which Lightning computes the ranks.

https://lightning.ai/docs/fabric/stable/guide/multi_node/barebones.html
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import LOOPBACK, Environment, read_int, read_port, require, require_range

LAUNCHER = "Lightning"
VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LT_*")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process on node 0; None elsewhere, where the variables do not give the rank."""
    if environ.get("RANK") or not (environ.get("LOCAL_RANK") and environ.get("WORLD_SIZE")):
        return None
    if read_int(environ, "NODE_RANK") != 0:
        return None
    local_rank, world_size = require(environ, LAUNCHER, "LOCAL_RANK", "WORLD_SIZE")
    return require_range(
        Environment(
            launcher=LAUNCHER,
            rank=local_rank,
            world_size=world_size,
            local_rank=local_rank,
            node_rank=0,
            main_address=environ.get("MASTER_ADDR") or LOOPBACK,
            main_port=read_port(environ, "MASTER_PORT"),
            reason="LOCAL_RANK, NODE_RANK and WORLD_SIZE are set without RANK",
        )
    )
