"""torchrun, and what is built on torch's elastic agent (``accelerate launch``, for example).

The names are those of https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

__all__ = ["detect"]


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of torch's elastic agent."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return plain.read(environ, "torchrun", "TORCHELASTIC_RUN_ID is set")
