"""torchrun, and other launchers that use torch's elastic agent (``accelerate launch``, for example).

The names of the variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

LAUNCHER = "torchrun"
VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_*",
    "GROUP_*",
    "ROLE_*",
)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of torch's elastic agent."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return plain.read(environ, LAUNCHER, "TORCHELASTIC_RUN_ID is set")
