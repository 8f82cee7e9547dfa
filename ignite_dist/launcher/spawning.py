"""Start workers, and wait for their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from ignite_dist.context import identity, live
from ignite_dist.environments import spawned, tpu_pod
from ignite_dist.errors import DistributedError, EnvironmentVariablesError
from ignite_dist.internals import limits
from ignite_dist.internals.arguments import as_int, as_port, check_keywords, check_signature
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.launcher import restarts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ignite_dist.workers.supervisor.processes import Workers

_Result = TypeVar("_Result")

_AS_INT = {"nproc_per_node": as_int, "nnodes": as_int, "node_rank": as_int, "master_port": as_port}


def with_python_ints(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``given`` in which NumPy ints and a port given as a string are Python ints."""
    return {name: _AS_INT[name](value) if name in _AS_INT else value for name, value in given.items()}


class SpawnOptions(TypedDict, total=False):
    """The keywords of :func:`spawn`, for editors. Each backend accepts some of them."""

    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | str | None
    init_method: str | None
    timeout: timedelta | None
    start_method: str | None
    daemon: bool
    max_restarts: int
    prefix_output: bool
    hosts: str | None
    verbose: int | None
    use_mpi: bool | None
    ssh_port: int | None
    start_timeout: int | None
    network_interfaces: str | None
    env: Any


@overload
def spawn(
    backend: str,
    fn: Callable[..., _Result],
    args: tuple[Any, ...] = ...,
    kwargs_dict: Mapping[str, Any] | None = ...,
    nproc_per_node: int | Literal["auto"] = ...,
    *,
    join: Literal[True] = ...,
    **kwargs: Unpack[SpawnOptions],
) -> list[_Result]: ...


@overload
def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = ...,
    kwargs_dict: Mapping[str, Any] | None = ...,
    nproc_per_node: int | Literal["auto"] = ...,
    *,
    join: Literal[False],
    **kwargs: Unpack[SpawnOptions],
) -> Workers: ...


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int | Literal["auto"] = 1,
    **kwargs: Any,
) -> Any:
    """Run ``fn(local_rank, *args, **kwargs_dict)`` in new processes, in a context of ``backend``.

    On one machine, no free port is needed, and sockets listen on the loopback interface only. A fork server
    that has imported torch starts the workers. Workers inherit the launcher's current environment, working
    directory and output. They import the main module again (as with ``torch.multiprocessing``), so a script
    must start its work under ``if __name__ == "__main__":``. If ``OMP_NUM_THREADS`` is not set, the workers
    share the cores.

    On several machines (gloo or NCCL), call this function on each machine with the same ``nnodes``,
    ``master_addr`` and ``master_port``, and with its own ``node_rank``. The call returns when the ranks of
    all nodes have ended. After a failure on any node, every call raises the same error. The guide
    ``docs/launchers/several_machines.md`` is about ports, restarts and lost machines.

    Args:
        backend: one of :func:`available_backends`, or ``"auto"``: NCCL on a machine with a GPU, else gloo.
        fn: any function, also a lambda, a closure or a function of a notebook cell.
        args: arguments of ``fn`` after the local rank. Sent by pickle, or by cloudpickle if pickle fails.
        kwargs_dict: keyword arguments of ``fn``, sent in the same way.
        nproc_per_node: number of processes on this machine; for XLA, 1 or the number of its devices.
            ``"auto"`` is the number of GPUs, or without a GPU, of cores divided by ``OMP_NUM_THREADS`` (1).
        kwargs: All backends: ``start_method="forkserver"`` (or "spawn", "fork"), ``join=True``,
            ``daemon=False``, ``prefix_output=False`` (True: ``[rank 1]`` before each line of output), and
            ``max_restarts=0``: after a failure, all workers start again, up to so many times. The function
            continues from its own checkpoint; :func:`restart_count` is the number of the attempt. An error
            that would come again (an ``ImportError``, or a ``TypeError`` before the first collective) is
            raised at once. gloo and NCCL: ``nnodes=1``, ``node_rank=0``, ``master_addr`` and ``master_port``
            (needed if ``nnodes > 1``), ``init_method`` (``"env://"``, ``"file://..."``), ``timeout`` (a
            ``datetime.timedelta``, for collectives). Horovod: ``hosts="node1:2,node2:2"``, ``nnodes`` (the
            number of hosts) and the options of ``horovod.run``; each of these makes Horovod's own launcher
            start the workers, which takes seconds and listens on all interfaces.
            XLA: ``nnodes``; ranks may be threads of one process. On a TPU pod, call this function on each
            host: PJRT finds the other hosts.

    Returns:
        The results of ``fn`` on this machine, one per rank, by local rank. With ``join=False``, the call
        returns immediately, with an object that has ``join(timeout=None)``, ``pids()`` and ``terminate()``.

    Raises:
        RankFailedError: a worker failed; the other workers were stopped. The error names the rank that failed
            first and contains its traceback. It is also a ``torch.multiprocessing.ProcessRaisedException`` or
            ``ProcessExitedException``, unless a machine is lost.
        LaunchError: a port is in use, or the other machines did not join within ``timeout`` (30 minutes), or
            they have a different job. The message names these machines. Nothing was started.
        MemoryError: the launcher has no memory left; names the limit (``ulimit -v``) if there is one.
        ValueError, TypeError, RuntimeError: wrong arguments. Nothing was started.
    """
    try:
        _check_call(backend, fn, args)
        backend = live.resolve_backend(backend)
        model = live.find_model(backend)
        check_keywords("spawn", kwargs, model.launcher.options() | _OWN_KEYWORDS)
        check_word(nproc_per_node)
        if nproc_per_node == "auto":
            nproc_per_node = model.launcher.auto_nproc_per_node()
        options = with_python_ints({"nproc_per_node": nproc_per_node, **kwargs})
        max_restarts = options.pop("max_restarts", 0)
        restarts.check_max_restarts(model.launcher, max_restarts, options)
        check_signature(fn, args, kwargs_dict or {})
        _warn_of_launcher()
        entry = restarts.Entry(backend, fn, tuple(args), dict(kwargs_dict or {}))
        return restarts.start(model.launcher, entry, max_restarts, backend=backend, **options)
    except (DistributedError, KeyboardInterrupt) as error:
        raise error.with_traceback(None)  # noqa: B904  # the frames of the launcher would hide the message
    except (MemoryError, OSError) as error:
        if not limits.lacks_memory(error):
            raise
        raise limits.memory_error("spawn") from error


# Workers of spawn may start more workers. On a TPU pod, the hosts' processes connect by PJRT.
NO_LAUNCHERS = ("none", spawned.LAUNCHER, tpu_pod.LAUNCHER)

# Those of spawn itself, for the message about an unknown keyword.
_OWN_KEYWORDS = {"args", "kwargs_dict", "nproc_per_node", "max_restarts"}


def _check_call(backend: Any, fn: Any, args: Any) -> None:
    """Raise TypeError for arguments of :func:`spawn` in the wrong order or of a wrong type."""
    if callable(backend):
        name = getattr(backend, "__name__", repr(backend))
        raise TypeError(f"spawn takes the backend first: spawn({fn!r}, {name}, ...).")
    if not callable(fn):
        raise TypeError(
            f"spawn calls a function in each worker, got {type(fn).__name__}. Pass the function itself "
            "and its arguments: spawn(backend, function, args=(value,))."
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple, got {type(args).__name__}. For one argument write args=(value,)."
        )


def check_word(nproc_per_node: Any) -> None:
    """Raise ``ValueError`` for another string than ``"auto"``. Launchers check numbers."""
    if isinstance(nproc_per_node, str) and nproc_per_node != "auto":
        raise ValueError(f"nproc_per_node must be a positive int or 'auto', got {nproc_per_node!r}.")


def _warn_of_launcher() -> None:
    """Warn if a launcher has started several processes here: each of them starts workers."""
    with suppress(EnvironmentVariablesError):
        place = identity.environment()
        num_here = place.nproc_per_node or 1
        if place.launcher not in NO_LAUNCHERS and num_here > 1:
            warn_user(
                f"{place.launcher} has started {num_here} processes on this machine, and each of them starts "
                "workers in a job of its own. To use the launcher's processes, use idist.Parallel."
            )
