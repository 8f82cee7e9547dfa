"""Run a function in a context: in the processes of a launcher, or in workers that are started for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar

from ignite_dist.context import identity, live
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.internals.arguments import as_int, check_keywords, keywords_of
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.launcher.restarts import check_max_restarts
from ignite_dist.launcher.spawning import NO_LAUNCHERS, check_word, spawn, with_python_ints

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_logger = logging.getLogger(__name__)

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class ParallelOptions(TypedDict, total=False):
    """The other keywords of :class:`Parallel`, for editors."""

    timeout: timedelta | None
    start_method: str | None
    join: bool
    daemon: bool
    max_restarts: int
    prefix_output: bool
    hosts: str | None
    pg_options: Any
    device_id: Any
    comm: Any


def _check_none(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"backend=None runs in this process, so {name} must be None too, got {value!r}.")


def _joins(backend: str, nproc_per_node: int | Literal["auto"] | None, nnodes: int) -> bool:
    """True if the processes that the arguments ask for have been started; False to start them here.

    Raises:
        ValueError: a launcher has started a different number of processes, or no launcher starts other nodes.
    """
    if nproc_per_node == "auto" and live.is_context_of(backend):
        return True
    try:
        place = identity.environment()
    except EnvironmentVariablesError:  # initialize() raises it again
        return nproc_per_node in (None, "auto")
    if nproc_per_node is None:
        if nnodes > 1 and place.launcher == "none":
            raise ValueError(
                f"nnodes={nnodes} without nproc_per_node: no launcher has started any processes. Pass the "
                "number of processes on this machine as nproc_per_node."
            )
        return True
    if place.launcher in NO_LAUNCHERS:
        return False
    num_here = place.nproc_per_node or place.world_size // nnodes
    if nproc_per_node in ("auto", num_here):
        return True
    if num_here == 1 and place.world_size == nnodes:  # one process per node, which starts the workers
        return False
    raise ValueError(
        f"{place.launcher} has started {num_here} process{'es' * (num_here != 1)} on this machine "
        f"({place.reason}), but nproc_per_node={nproc_per_node}. Pass nproc_per_node={num_here}, or 'auto' "
        "for any number."
    )


class Parallel:
    """Context manager that runs a function in a distributed context, under any launcher or none.

    Under torchrun, Slurm or another launcher, it joins the launcher's processes, and ignores ``nnodes``,
    ``node_rank`` and the address. Without a launcher, it starts ``nproc_per_node`` processes. If
    ``nproc_per_node`` is None, the function runs in this process, and so it does with ``backend=None``, but
    then without a context.

    A live context of ``backend`` is used and not ended: :func:`spawn`, Ray Train and Lightning Fabric make
    one before they call the script's function.

    If the block raises, this rank ends its own context at once, without waiting for other ranks. torchrun's
    summary then shows the traceback of the rank that failed first.

    Args:
        backend: as in :func:`spawn`; or None for no context.
        nproc_per_node: number of processes on this machine, or ``"auto"`` as in :func:`spawn`; it may differ
            between machines.
        nnodes: number of machines, default 1.
        node_rank: this machine's number, in [0, nnodes); needed if ``nnodes > 1``.
        master_addr: address of the machine with ``node_rank=0``; needed if ``nnodes > 1``.
        master_port: a free port on that machine, as an int or a string; needed if ``nnodes > 1``.
        init_method: replaces the address and port, for example ``"file://..."``.
        spawn_kwargs: further keywords of :func:`spawn`.

    Raises:
        ValueError: the backend is unknown, arguments contradict each other, or ``nproc_per_node`` is not the
            number of processes that a launcher has started on this machine.
        RuntimeError: on entry, a context of another backend is live.

    Example::

        with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
            accuracy = parallel.run(train, config)
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | Literal["auto"] | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | str | None = None,
        init_method: str | None = None,
        **spawn_kwargs: Unpack[ParallelOptions],
    ) -> None:
        node_kwargs: dict[str, Any] = {"nnodes": nnodes, "node_rank": node_rank}
        node_kwargs = with_python_ints(
            {**node_kwargs, "master_addr": master_addr, "master_port": master_port}
        )
        nproc_per_node, nnodes = as_int(nproc_per_node), as_int(nnodes)
        self.backend = backend = None if backend is None else live.resolve_backend(backend)
        self._initialize_kwargs: dict[str, Any] = {}
        self._spawn_kwargs: dict[str, Any] | None = None
        self._owns_context = False
        if backend is None:
            _check_none(nproc_per_node=nproc_per_node, **node_kwargs)
            return
        check_word(nproc_per_node)
        model = live.find_model(backend)
        initialize_names, spawn_names = keywords_of(model.open), model.launcher.options() | {"max_restarts"}
        given = {"init_method": init_method, **spawn_kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        max_restarts = given.get("max_restarts", 0)
        check_max_restarts(model.launcher, max_restarts, {**given, **node_kwargs})
        check_keywords("Parallel", given, initialize_names | spawn_names | {"nproc_per_node"})
        self._initialize_kwargs = {name: given[name] for name in given if name in initialize_names}
        if not _joins(backend, nproc_per_node, nnodes or 1):
            if nproc_per_node == "auto":
                nproc_per_node = model.launcher.auto_nproc_per_node()
            given.update((name, value) for name, value in node_kwargs.items() if value is not None)
            check_keywords("Parallel", given, spawn_names)
            checked = {name: value for name, value in given.items() if name != "max_restarts"}
            model.launcher.check(nproc_per_node=nproc_per_node, **checked)
            self._spawn_kwargs = {"nproc_per_node": nproc_per_node, **given}

    def __enter__(self) -> Self:
        if self.backend is None or self._spawn_kwargs is not None:
            return self
        if live.is_context_of(self.backend):
            _logger.info("Using the live context of backend '%s'", self.backend)
            self._warn_of_unused()
        else:
            live.initialize(self.backend, **self._initialize_kwargs)
            self._owns_context = True
            _logger.info("Initialized backend '%s'", self.backend)
        return self

    def _warn_of_unused(self) -> None:
        """Warn about keywords that a live context cannot use. ``init_method`` is ignored silently."""
        unused = sorted(self._initialize_kwargs.keys() - {"init_method"})
        if unused:
            warn_user(
                f"Parallel uses the live context of backend {self.backend!r} and ignores "
                f"{', '.join(unused)}. Pass them where the context is made.",
            )

    def run(
        self,
        func: Callable[Concatenate[int, _Params], _Result],
        *args: _Params.args,
        **kwargs: _Params.kwargs,
    ) -> _Result:
        """Call ``func(local_rank, *args, **kwargs)`` in every process.

        Returns:
            The result of ``func`` in this process, or on local rank 0 if processes were started.

        Raises:
            RankFailedError: a started process failed; see :func:`spawn`.
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
        except Exception:  # the user must see the exception of the block
            _logger.exception("Could not end the context after %r", error)
