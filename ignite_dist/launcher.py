"""Start workers, or join those that a launcher has started."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, overload

from ignite_dist.arguments import as_int, as_port, check_keywords, keywords_of
from ignite_dist.context import identity, live
from ignite_dist.diagnostics import announcing, watchdog
from ignite_dist.environments import spawned, tpu_pod
from ignite_dist.errors import EnvironmentVariablesError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ignite_dist.workers.processes import Workers

__all__ = ["Parallel", "spawn"]

_logger = logging.getLogger(__name__)

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_PLAIN = {"nproc_per_node": as_int, "nnodes": as_int, "node_rank": as_int, "master_port": as_port}


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with numbers as ints: they may be numpy's, and a port may be a text."""
    return {name: _PLAIN[name](value) if name in _PLAIN else value for name, value in given.items()}


class _Entry:
    """What a worker runs: it makes the context, calls the user's function and ends the context."""

    def __init__(
        self, backend: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.backend = backend
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.comparison = announcing.compared_in_new_contexts()  # what debug() has said in the launcher

    def __call__(self, local_rank: int, **initialize_kwargs: Any) -> Any:
        announcing.compare_in_new_contexts(self.comparison)
        live.initialize(self.backend, **initialize_kwargs)
        watchdog.start_here()
        result = self.function(local_rank, *self.args, **self.kwargs)
        live.conclude()
        return result


class SpawnOptions(TypedDict, total=False):
    """The keywords of :func:`spawn`, as editors show them. Not every backend has all; it says which."""

    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | str | None
    init_method: str | None
    timeout: timedelta | None
    start_method: str | None
    daemon: bool
    hosts: str | None
    verbose: int | None
    use_mpi: bool | None
    ssh_port: int | None
    start_timeout: int | None
    network_interfaces: str | None
    env: Any


class ParallelOptions(TypedDict, total=False):
    """The further keywords of :class:`Parallel`, as editors show them."""

    timeout: timedelta | None
    start_method: str | None
    join: bool
    daemon: bool
    hosts: str | None
    pg_options: Any
    device_id: Any
    comm: Any


@overload
def spawn(
    backend: str,
    fn: Callable[..., _Result],
    args: tuple[Any, ...] = ...,
    kwargs_dict: Mapping[str, Any] | None = ...,
    nproc_per_node: int = ...,
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
    nproc_per_node: int = ...,
    *,
    join: Literal[False],
    **kwargs: Unpack[SpawnOptions],
) -> Workers: ...


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> Any:
    """Run ``fn(local_rank, *args, **kwargs_dict)`` in new processes, in a context of ``backend``.

    On one machine it needs no free port and listens on the loopback interface only. Workers come from a fork
    server that has torch imported; each sees the launcher's environment, working directory and output of this
    launch. As with ``torch.multiprocessing``, they import the main module again, so a script starts its work
    under ``if __name__ == "__main__":``. If ``OMP_NUM_THREADS`` is not set, workers share the cores.

    On several machines, with gloo or NCCL, each of them makes this call, with ``nnodes``, ``master_addr`` and
    ``master_port`` alike and a ``node_rank`` of its own; ``nproc_per_node`` may differ. Node 0 listens there
    for the others, and at another port of the same address for the ranks; gloo listens on the interface that
    leads there, unless ``GLOO_SOCKET_IFNAME`` names one. The call returns when the ranks of all nodes have
    ended. After a failure on any of them every call raises the same error. So it does when a machine, its
    link or its launcher is gone; a machine or link that is silent is given up after two thirds of
    ``IGNITE_DIST_SILENCE_SECONDS`` (30), by the ranks themselves after all of them.

    Args:
        backend: one of :func:`available_backends`.
        fn: any function: of a module, a notebook cell, a lambda, a closure.
        args: its arguments behind the local rank; pickled, or sent by cloudpickle where pickle cannot.
        kwargs_dict: its keyword arguments, likewise.
        nproc_per_node: number of processes on this machine; for XLA 1 or the number of its devices.
        kwargs: for gloo and NCCL ``nnodes`` (1), ``node_rank`` (0), ``master_addr`` and ``master_port``
            (needed if ``nnodes > 1``), ``init_method`` (``"env://"``, ``"file://..."``), ``timeout`` (a
            ``datetime.timedelta``, for collectives), ``start_method`` ("forkserver"; "spawn", "fork"),
            ``join`` (True), ``daemon`` (False). For Horovod the last three, and ``hosts``
            (``"node1:2,node2:2"``), ``nnodes`` (as many as hosts) and the options of ``horovod.run``; with
            any of these Horovod's own launcher starts the workers, which takes seconds and listens on all
            interfaces. For XLA those three and ``nnodes``; its ranks may be threads of one process, and on a
            pod PJRT itself finds the other hosts, each of which makes this call.

    Returns:
        The list of what ``fn`` returned, one per rank on this machine, by local rank. With ``join=False``
        at once an object with ``join(timeout=None)``, ``pids()`` and ``terminate()``.

    Raises:
        RankFailedError: a worker failed. It names the rank that failed first and carries its traceback; it
            is a ``torch.multiprocessing.ProcessRaisedException`` or ``ProcessExitedException`` as well,
            unless it names a machine that is gone. The other workers are ended.
        LaunchError: a port is in use; or the other machines did not come within ``timeout`` (30 minutes), or
            want another job, and it names them. Nothing was started.
        ValueError, TypeError, RuntimeError: the arguments; nothing was started.
    """
    model = live.find_model(backend)
    if not callable(fn):
        raise TypeError(f"spawn calls a function in each worker, got {type(fn).__name__}.")
    check_keywords("spawn", kwargs, model.launcher.options() | {"nproc_per_node"})
    entry = _Entry(backend, fn, tuple(args), dict(kwargs_dict or {}))
    return model.launcher.start(
        entry, backend=backend, **_plain({"nproc_per_node": nproc_per_node, **kwargs})
    )


def _compare_with_launcher(nproc_per_node: int | None, nnodes: int) -> None:
    """Refuse a wish for several machines that nobody fulfils; warn of one that every process fulfils anew."""
    try:
        place = identity.environment()
    except EnvironmentVariablesError:  # initialize() says what is wrong, if anybody wants a context
        return
    if nproc_per_node is None and nnodes > 1 and place.launcher == "none":
        raise ValueError(
            f"nnodes={nnodes} without nproc_per_node: no launcher has started any processes, so say how many "
            "to start on this machine."
        )
    # spawn's own workers may start more; and the processes of a TPU pod's hosts find each other by PJRT.
    is_wanted = place.launcher in (spawned.LAUNCHER, tpu_pod.LAUNCHER)
    if nproc_per_node is not None and nnodes == 1 and place.world_size > 1 and not is_wanted:
        warnings.warn(
            f"{place.launcher} has started {place.world_size} processes, and nproc_per_node={nproc_per_node} "
            "lets each of them start a job of its own. To join the processes that are there, leave it out.",
            stacklevel=3,
        )


class Parallel:
    """Context manager that runs a function in a distributed context, however the script was started.

    With ``nproc_per_node`` it starts the processes itself; without it, it joins those that torchrun, Slurm or
    another launcher has started, and the arguments that say where to start some are not looked at; with
    ``backend=None`` it runs the function in this process.

    Where a context of ``backend`` is live already (Ray Train and Lightning Fabric make one before they call a
    script's function, and so does :func:`spawn`) it is used as it is, and left to whoever made it.

    A block that raises ends this rank's part at once and waits for nobody. torchrun's summary then shows the
    traceback of the rank that failed first. A context that somebody else made is left to them then too.

    Args:
        backend: one of :func:`available_backends`, or None for no context.
        nproc_per_node: number of processes to start on this machine; other machines may start more or fewer.
        nnodes: number of machines; 1 if not given.
        node_rank: this machine's number, in [0, nnodes); needed if ``nnodes > 1``.
        master_addr: address of the machine with ``node_rank=0``; needed if ``nnodes > 1``.
        master_port: a free port there, as an int or a text; needed if ``nnodes > 1``.
        init_method: ``"file://..."``, for example, in the place of address and port.
        spawn_kwargs: further keywords of :func:`spawn`.

    Raises:
        ValueError: an unknown backend, or arguments that do not go together.
        RuntimeError: on entering, a context of another backend is live.

    Example::

        with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
            accuracy = parallel.run(train, config)
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | str | None = None,
        init_method: str | None = None,
        **spawn_kwargs: Unpack[ParallelOptions],
    ) -> None:
        places = {
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
        }
        places, nproc_per_node, nnodes = _plain(places), as_int(nproc_per_node), as_int(nnodes)
        self.backend = backend
        self._initialize_kwargs: dict[str, Any] = {}
        self._spawn_kwargs: dict[str, Any] | None = None
        self._owns_context = False
        if backend is None:
            for name, value in {"nproc_per_node": nproc_per_node, **places}.items():
                if value is not None:
                    raise ValueError(
                        f"backend=None runs in this process, so {name} must be None too, got {value!r}."
                    )
            return
        model = live.find_model(backend)
        for_initialize, for_spawn = keywords_of(model.open), model.launcher.options()
        given = {"init_method": init_method, **spawn_kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        check_keywords("Parallel", given, for_initialize | for_spawn | {"nproc_per_node"})
        self._initialize_kwargs = {name: given[name] for name in given if name in for_initialize}
        if nproc_per_node is not None:
            given.update((name, value) for name, value in places.items() if value is not None)
            check_keywords("Parallel", given, for_spawn)
            model.launcher.check(nproc_per_node=nproc_per_node, **given)
            self._spawn_kwargs = {"nproc_per_node": nproc_per_node, **given}
        _compare_with_launcher(nproc_per_node, nnodes or 1)

    def __enter__(self) -> Self:
        if self.backend is None or self._spawn_kwargs is not None:
            return self
        if live.is_context_of(self.backend):
            _logger.info("Use the context of backend '%s' that is live", self.backend)
            self._warn_of_unused()
        else:
            live.initialize(self.backend, **self._initialize_kwargs)
            self._owns_context = True
            _logger.info("Initialized backend '%s'", self.backend)
        return self

    def _warn_of_unused(self) -> None:
        """Say which keywords come too late for a live context; where to meet has been settled otherwise."""
        unused = sorted(self._initialize_kwargs.keys() - {"init_method"})
        if unused:
            warnings.warn(
                f"A context of backend {self.backend!r} is live already, so Parallel uses it as it is, "
                f"without {', '.join(unused)}: give that to whoever makes the context.",
                stacklevel=3,
            )

    def run(
        self,
        func: Callable[Concatenate[int, _Params], _Result],
        *args: _Params.args,
        **kwargs: _Params.kwargs,
    ) -> _Result:
        """Call ``func(local_rank, *args, **kwargs)`` in every process.

        Returns:
            What ``func`` returned in this process; on local rank 0, if processes were started.

        Raises:
            RankFailedError: a process that was started failed; see :func:`spawn`.
        """
        if self.backend is None or self._spawn_kwargs is None:
            _logger.info("Run '%s' in %d processes", func, identity.get_world_size())
            return func(identity.get_local_rank(), *args, **kwargs)
        _logger.info("Spawn '%s' with %s", func, self._spawn_kwargs)
        results: Any = spawn(self.backend, func, args=args, kwargs_dict=kwargs, **self._spawn_kwargs)
        first: _Result = results[0] if isinstance(results, list) else results
        return first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owns_context:
            return
        self._owns_context = False
        if error is None:
            live.conclude()
            return
        try:
            live.abort()
        except Exception:  # what reaches the user is the exception that ended the block
            _logger.exception("The context could not be ended after %r", error)
