"""LSF's ``jsrun``.

https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference, and for what
``jsrun`` itself sets https://docs.olcf.ornl.gov/systems/summit_user_guide.html.
"""

from __future__ import annotations

from collections.abc import Mapping

from ignite_dist.environments.base import Environment, numbered

__all__ = ["detect"]


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task that ``jsrun`` started.

    Raises:
        EnvironmentVariablesError: a variable that it sets is missing, or holds something else.
    """
    if not environ.get("JSM_NAMESPACE_RANK") and not environ.get("JSM_NAMESPACE_SIZE"):
        return None
    names = [f"JSM_NAMESPACE_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    job, first_host = environ.get("LSB_JOBID", ""), _first_compute_host(environ)
    return numbered(environ, "LSF", "jsrun", names, job=job, first_host=first_host)


def _first_compute_host(environ: Mapping[str, str]) -> str | None:
    """Where rank 0 runs. ``LSB_MCPU_HOSTS``: hosts and their slots in turn, first the script's own."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2]
    return next(iter(hosts[1:] or hosts), None)
