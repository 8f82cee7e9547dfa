"""``horovodrun``.

https://horovod.readthedocs.io/en/stable/running_include.html. The names of the variables are in Horovod's
source, horovod/runner/gloo_run.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, numbered

LAUNCHER = "Horovod"
VARIABLES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_*",
    "HOROVOD_CROSS_*",
    "HOROVOD_HOSTNAME",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a process that ``horovodrun`` started.

    Raises:
        EnvironmentVariablesError: a variable of horovodrun is missing or not a number, or the variables
            contradict each other.
    """
    if not environ.get("HOROVOD_RANK") and not environ.get("HOROVOD_SIZE"):
        return None
    # No nnodes: HOROVOD_CROSS_SIZE counts only the nodes that have a process with this local rank.
    names = {
        "rank": "HOROVOD_RANK",
        "world_size": "HOROVOD_SIZE",
        "local_rank": "HOROVOD_LOCAL_RANK",
        "nproc_per_node": "HOROVOD_LOCAL_SIZE",
    }
    job = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return numbered(environ, LAUNCHER, "horovodrun", names, job=job, first_host=None)
