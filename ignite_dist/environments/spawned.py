"""``idist.spawn``: its workers have torchrun's variables, and one that names ``spawn``."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

__all__ = ["LAUNCHER", "VARIABLES", "detect", "mark"]

_MARK = "IGNITE_DIST_SPAWNED"

LAUNCHER = "idist.spawn"
VARIABLES = (_MARK,)


def mark(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which workers with the variables ``environ`` know that ``spawn`` has started them.

    Its value names their rendezvous. A process that a worker starts with another launcher inherits the
    variable, but has another rendezvous.
    """
    return {_MARK: _rendezvous(environ)}


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of ``spawn``."""
    if environ.get(_MARK) != _rendezvous(environ) or not environ.get("RANK"):
        return None
    return plain.read(environ, LAUNCHER, f"{_MARK} is set")


def _rendezvous(environ: Mapping[str, str]) -> str:
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
