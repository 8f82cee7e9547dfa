"""Ray Train's ``TorchTrainer``, whose workers have torchrun's variables and a process group already.

https://docs.ray.io/en/latest/train/getting-started-pytorch.html
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

__all__ = ["detect"]


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of Ray Train; other workers of Ray have no ranks."""
    if not environ.get("RAY_JOB_ID") or not environ.get("RANK") or not environ.get("LOCAL_WORLD_SIZE"):
        return None
    return plain.read(environ, "Ray Train", "RAY_JOB_ID, RANK and LOCAL_WORLD_SIZE are set")
