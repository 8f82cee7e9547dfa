"""``idist.spawn``: its workers have torchrun's variables, and a mark."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

__all__ = ["LAUNCHER", "detect", "mark"]

LAUNCHER = "idist.spawn"

_MARK = "IGNITE_DIST_SPAWNED"


def mark(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells workers with the variables ``environ`` that ``spawn`` has started them.

    It names their rendezvous: what a worker starts in its turn, with another launcher, has another one.
    """
    return {_MARK: _rendezvous(environ)}


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of ``spawn``."""
    if environ.get(_MARK) != _rendezvous(environ) or not environ.get("RANK"):
        return None
    return plain.read(environ, LAUNCHER, f"{_MARK} is set")


def _rendezvous(environ: Mapping[str, str]) -> str:
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
