"""LSF's ``jsrun``.

The variables of LSF:
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference.
The variables of ``jsrun``: https://docs.olcf.ornl.gov/systems/summit_user_guide.html.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, numbered

LAUNCHER = "LSF"
VARIABLES = (
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "LSB_JOBID",
    "LSB_MCPU_HOSTS",
    "JSM_*",
)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task that ``jsrun`` started.

    Raises:
        EnvironmentVariablesError: a variable of jsrun is missing or not a number, or the variables
            contradict each other.
    """
    if not environ.get("JSM_NAMESPACE_RANK") and not environ.get("JSM_NAMESPACE_SIZE"):
        return None
    names = {
        "rank": "JSM_NAMESPACE_RANK",
        "world_size": "JSM_NAMESPACE_SIZE",
        "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
        "nproc_per_node": "JSM_NAMESPACE_LOCAL_SIZE",
    }
    job, first_host = environ.get("LSB_JOBID", ""), _first_compute_host(environ)
    return numbered(environ, LAUNCHER, "jsrun", names, job=job, first_host=first_host)


def _first_compute_host(environ: Mapping[str, str]) -> str | None:
    """The host of rank 0. ``LSB_MCPU_HOSTS`` is ``host slots host slots``, with the batch host first."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2]
    return next(iter(hosts[1:] or hosts), None)
