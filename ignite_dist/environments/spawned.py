"""``idist.spawn``. Its workers have torchrun's variables and a variable that marks them."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

_MARK = "IGNITE_DIST_SPAWNED"

LAUNCHER = "idist.spawn"
VARIABLES = (_MARK,)


def mark(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks workers of ``spawn``. ``environ`` has the other variables of these workers.

    The value is the rendezvous of the workers. If a worker starts another launcher, that launcher's processes
    inherit the variable, but have another rendezvous.
    """
    return {_MARK: _rendezvous(environ)}


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of ``spawn``."""
    if environ.get(_MARK) != _rendezvous(environ) or not environ.get("RANK"):
        return None
    return plain.read(environ, LAUNCHER, f"{_MARK} is set")


def _rendezvous(environ: Mapping[str, str]) -> str:
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
