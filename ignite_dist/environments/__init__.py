"""What the environment variables of a launcher say, and who that launcher is.

Each launcher has a module with one function ``detect(environ)``: an :class:`Environment`, or None if the
launcher did not start this process. They are pure functions over a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import slurm, torchrun
from ignite_dist.environments.base import Environment

__all__ = ["Environment", "detect"]

# torchrun under srun is common, the other way round is not: so the variables of torchrun come first.
_LAUNCHERS = (torchrun, slurm)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of the launcher that started this process, or None.

    Raises:
        EnvironmentVariablesError: the variables are half set, or not numbers, or out of range.
    """
    for launcher in _LAUNCHERS:
        environment: Environment | None = launcher.detect(environ)
        if environment is not None:
            return environment
    return None
