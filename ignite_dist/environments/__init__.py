"""The launcher that started this process, and the values of its environment variables.

Each launcher has a file with three names: ``LAUNCHER`` (its name), ``VARIABLES`` (the environment variables
that it sets) and ``detect(environ)``, a pure function. ``detect`` returns an :class:`Environment`, or None if
the launcher did not start this process. :func:`register_environment` adds launchers of other packages.

The order of detection matters, because one launcher often runs inside another one:

1. ``idist.spawn``, torchrun, Ray Train, Kubeflow, and plain ``RANK`` with ``WORLD_SIZE``. These often start
   processes inside a job of another launcher.
2. Launchers of other packages: first those added with :func:`register_environment`, in this order, then
   entry points, sorted by name.
3. Lightning, Horovod, LSF, Open MPI, PMI, Slurm and TPU pods, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ignite_dist.environments import (
    horovod,
    kubeflow,
    lightning,
    lsf,
    open_mpi,
    plain,
    pmi,
    ray,
    slurm,
    spawned,
    torchrun,
    tpu_pod,
)
from ignite_dist.environments.base import Environment, require_range
from ignite_dist.environments.own_variables import given
from ignite_dist.environments.registry import Launcher, LauncherT, Registry
from ignite_dist.errors import EnvironmentVariablesError

__all__ = [
    "ALONE",
    "Environment",
    "Launcher",
    "current",
    "detect",
    "is_launcher_variable",
    "launcher_variables",
    "register_environment",
]

ALONE = Environment(
    "none",
    rank=0,
    world_size=1,
    local_rank=0,
    nproc_per_node=1,
    nnodes=1,
    node_rank=0,
    reason="no variable of a launcher is set",
)

# The inner launcher comes before the outer one: torchrun often runs under srun, and mpirun in a Slurm job.
# LSF comes before Open MPI, because jsrun also sets Open MPI's variables. TPU pods come last, because their
# variables are set for the whole machine, whatever launcher runs on it.
_launchers = Registry(
    first=(spawned, torchrun, ray, kubeflow, plain),
    last=(lightning, horovod, lsf, open_mpi, pmi, slurm, tpu_pod),
)


def register_environment(launcher: LauncherT) -> LauncherT:
    """Add the launcher of another package. A second call with the same launcher has no effect.

    ``launcher`` is a module, a class (this function can decorate it) or another object with the three names
    of :class:`Launcher`. Instead of a call, a package can declare an entry point of the group
    ``ignite_dist.environments``. Entry points are loaded at the first detection, not at the import of
    ``ignite_dist``.

    Detection tries ``launcher`` after ``idist.spawn``, torchrun, Ray Train, Kubeflow, and ``RANK`` with
    ``WORLD_SIZE``, but before Lightning, Horovod, LSF, Open MPI, PMI, Slurm and TPU pods. If one of the
    latter may run inside yours, ``launcher.detect`` must return None when its variables are set.

    Returns:
        ``launcher``.

    Raises:
        ValueError: another launcher with the same name is registered.
        TypeError: ``launcher`` lacks one of the three names.
    """
    return _launchers.register(launcher)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of the launcher that started this process; None if no launcher started it.

    Raises:
        EnvironmentVariablesError: the variables are incomplete, not numbers, out of range, or contradict
            each other.
        ImportError: an entry point of another package is broken; the error names it.
    """
    launchers = list(_launchers)
    for position, launcher in enumerate(launchers):
        found = _detect_one(launcher, environ)
        if found is not None:
            outer = list(_detect_all(launchers[position + 1 :], environ))
            if found.launcher == plain.LAUNCHER:
                for other in outer:
                    _check_numbering(found, other)
            names = " and ".join(dict.fromkeys(other.launcher for other in outer))
            return found._replace(reason=f"{found.reason}, before {names}") if names else found
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        raise plain.incomplete_error(environ)
    if environ.get("PMIX_RANK") and not open_mpi.is_singleton(environ):
        raise open_mpi.missing_size_error(environ)
    return None


def _detect_one(launcher: Launcher, environ: Mapping[str, str]) -> Environment | None:
    """The environment that ``launcher`` detects; None if it detects none.

    Raises:
        EnvironmentVariablesError: the launcher's variables are incomplete or contradict each other.
        TypeError: ``launcher.detect`` returns something other than an ``Environment`` or None.
    """
    found: object = launcher.detect(environ)
    if found is None:
        return None
    if not isinstance(found, Environment):
        raise TypeError(
            f"detect(environ) of the environment {launcher.LAUNCHER!r} returned {found!r}. It must return an "
            "ignite_dist.environments.Environment or None."
        )
    return require_range(found)


def _detect_all(launchers: Iterable[Launcher], environ: Mapping[str, str]) -> Iterator[Environment]:
    """The environments that ``launchers`` detect. Skips launchers with errors, and plain ``RANK``."""
    for launcher in launchers:
        try:
            found = _detect_one(launcher, environ)
        except EnvironmentVariablesError:
            continue  # an inner launcher has been found already
        if found is not None and found.launcher != plain.LAUNCHER:
            yield found


def _check_numbering(found: Environment, other: Environment) -> None:
    """Raise if ``RANK`` and the launcher ``other`` give different ranks in worlds of the same size.

    This happens if a batch script sets ``RANK`` once for the whole job. Worlds of different sizes do not
    contradict each other: each task of the launcher may have started several processes, each with its own
    ``RANK``.
    """
    if found.world_size == other.world_size > 1 and found.rank != other.rank:
        raise EnvironmentVariablesError(
            f"The environment variables contradict each other: RANK={found.rank} and WORLD_SIZE="
            f"{found.world_size}, but {other.launcher} says rank {other.rank} of {other.world_size} "
            f"({other.reason}). Unset RANK and WORLD_SIZE, or set them for every process."
        )


def current() -> Environment:
    """The environment of the launcher that started this process; :data:`ALONE` if no launcher started it.

    Variables that this package has set are ignored.

    Raises:
        EnvironmentVariablesError, ImportError: see :func:`detect`.
    """
    return detect(given()) or ALONE


# --- the variables of all launchers ------------------------------------------------------------------


def launcher_variables() -> frozenset[str]:
    """The full names in the launchers' ``VARIABLES``, without prefixes like ``SLURM_*``."""
    return frozenset(name for name in _declared_variables() if not name.endswith("*"))


def is_launcher_variable(name: str) -> bool:
    """True if a launcher lists the variable ``name``, in full or as a prefix like ``SLURM_*``."""
    return any(
        name.startswith(declared[:-1]) if declared.endswith("*") else name == declared
        for declared in _declared_variables()
    )


def _declared_variables() -> Iterator[str]:
    for launcher in _launchers:
        yield from launcher.VARIABLES
