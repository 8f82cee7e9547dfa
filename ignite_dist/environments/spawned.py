"""``idist.spawn`` and ``ignite-dist run``: workers have torchrun's variables, and one that marks them."""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments import plain
from ignite_dist.environments.base import Environment

_MARK = "IGNITE_DIST_SPAWNED"
_RUN_MARK = "IGNITE_DIST_RUN"

LAUNCHER = "idist.spawn"
RUN_LAUNCHER = "ignite-dist run"
VARIABLES = (_MARK, _RUN_MARK)


def mark(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks workers of ``spawn``. ``environ`` has the other variables of these workers.

    The value is the rendezvous of the workers. If a worker starts another launcher, that launcher's processes
    inherit the variable, but have another rendezvous.
    """
    return {_MARK: _rendezvous(environ)}


def mark_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks a process in which ``ignite-dist run`` runs a script."""
    return {_RUN_MARK: _rendezvous(environ)}


def is_run(environ: Mapping[str, str]) -> bool:
    """True if ``ignite-dist run`` has made the context of this process, for a script."""
    return environ.get(_RUN_MARK) == _rendezvous(environ)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of ``spawn``."""
    if environ.get(_MARK) != _rendezvous(environ) or not environ.get("RANK"):
        return None
    if is_run(environ):
        return plain.read(environ, RUN_LAUNCHER, f"{_RUN_MARK} is set")
    return plain.read(environ, LAUNCHER, f"{_MARK} is set")


def _rendezvous(environ: Mapping[str, str]) -> str:
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
