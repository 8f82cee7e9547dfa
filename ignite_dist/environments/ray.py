"""Ray Train's ``TorchTrainer``. Its workers have torchrun's variables and a process group.

https://docs.ray.io/en/latest/train/getting-started-pytorch.html
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

LAUNCHER = "Ray Train"
VARIABLES = ("RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of Ray Train. Ray's other workers have no rank."""
    if not environ.get("RAY_JOB_ID") or not environ.get("RANK") or not environ.get("LOCAL_WORLD_SIZE"):
        return None
    return plain.read(environ, LAUNCHER, "RAY_JOB_ID, RANK and LOCAL_WORLD_SIZE are set")
