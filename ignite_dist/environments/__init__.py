"""What the environment variables of a launcher say, and who that launcher is.

Each launcher has a module with one function ``detect(environ)``: an :class:`Environment`, or None if the
launcher did not start this process. They are pure functions over a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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
from ignite_dist.environments.base import Environment
from ignite_dist.environments.variables import given
from ignite_dist.errors import EnvironmentVariablesError

__all__ = ["ALONE", "Environment", "current", "detect"]

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

# What starts processes inside of a job goes before what has started the job: torchrun under srun is common,
# and so is mpirun in an allocation. TPU pods come last, because their variables are those of the machine.
_DETECTORS: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (
    spawned.detect,
    torchrun.detect,
    ray.detect,
    kubeflow.detect,
    plain.detect,
    lightning.detect,
    horovod.detect,
    lsf.detect,
    open_mpi.detect,
    pmi.detect,
    slurm.detect,
    tpu_pod.detect,
)


def detect(environ: Mapping[str, str]) -> Environment | None:
    """The environment of the launcher that started this process, or None.

    Raises:
        EnvironmentVariablesError: the variables are half set, not numbers, out of range, or number the
            processes of one world in two ways.
    """
    for position, detector in enumerate(_DETECTORS):
        found = detector(environ)
        if found is not None:
            others = list(_others(environ, _DETECTORS[position + 1 :]))
            if found.launcher == plain.LAUNCHER:
                for other in others:
                    _check_numbering(found, other)
            names = " and ".join(dict.fromkeys(other.launcher for other in others))
            return found._replace(reason=f"{found.reason}, before {names}") if names else found
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        raise plain.half_set(environ)
    unknown = open_mpi.without_size(environ)
    if unknown is not None:
        raise unknown
    return None


def _others(
    environ: Mapping[str, str], detectors: tuple[Callable[[Mapping[str, str]], Environment | None], ...]
) -> Iterator[Environment]:
    """What the launchers around the one that was found say, if they are in order: they do not matter."""
    for detector in detectors:
        try:
            other = detector(environ)
        except EnvironmentVariablesError:
            continue
        if other is not None and other.launcher != plain.LAUNCHER:
            yield other


def _check_numbering(found: Environment, other: Environment) -> None:
    """Refuse ``RANK`` and ``WORLD_SIZE`` that were meant to be the launcher's, and are not.

    Set once for the whole job, in a batch script, say. Worlds of other sizes are others: a launcher may start
    tasks each of which has started a few processes by hand.
    """
    if found.world_size == other.world_size > 1 and found.rank != other.rank:
        raise EnvironmentVariablesError(
            f"The environment variables contradict each other: RANK={found.rank} and WORLD_SIZE="
            f"{found.world_size}, but {other.launcher} says rank {other.rank} of {other.world_size} "
            f"({other.reason}). Unset RANK and WORLD_SIZE, or set them for every process."
        )


def current() -> Environment:
    """The environment that this process was given, whatever this package has set since; or :data:`ALONE`.

    Raises:
        EnvironmentVariablesError: as :func:`detect`.
    """
    return detect(given()) or ALONE
