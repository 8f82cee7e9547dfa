"""``horovodrun``.

https://horovod.readthedocs.io/en/stable/running_include.html; the names are those of Horovod's own source,
horovod/runner/gloo_run.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, numbered

__all__ = ["detect"]


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that ``horovodrun`` started.

    Raises:
        EnvironmentVariablesError: a variable that it sets is missing, or holds something else.
    """
    if not environ.get("HOROVOD_RANK") and not environ.get("HOROVOD_SIZE"):
        return None
    # HOROVOD_CROSS_SIZE counts the nodes that have this local rank, so where nodes differ it is not all.
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    job = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return numbered(environ, "Horovod", "horovodrun", names, job=job, first_host=None)
