"""The live context: its computation model, its start and its end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ignite_dist.comp_models import ComputationModel, SerialModel, registered_computation_models
from ignite_dist.comp_models.serial import PollingSerialModel
from ignite_dist.context import forks, ignite_bridge, loader_workers
from ignite_dist.environments import devices, spawned
from ignite_dist.internals.arguments import check_keywords, did_you_mean, keywords_of
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.internals.tracing import call_eagerly, resolved_while_tracing, traced, traced_as

_model: ComputationModel = SerialModel()

begin_hooks: list[Callable[[ComputationModel], None]] = []
"""Hooks called with the model of each context that :func:`initialize` has made."""
before_end_hooks: list[Callable[[ComputationModel], None]] = []
"""Hooks called before a context ends after success. If a hook raises, the context stays live."""
failure_hooks: list[Callable[[ComputationModel], None]] = []
"""Hooks called when this rank has failed, before its connections close; often while the error is handled."""
end_hooks: list[Callable[[ComputationModel], None]] = []
"""Hooks called when a context ends, whatever code ends it."""
# Guards writes of _model: threads that find a context at the same time must share one model, which owns the
# groups. Never held while waiting for other ranks. Reads of _model need no lock.
_model_lock = threading.RLock()
# The threads inside initialize(), and the class of model that each one makes.
_initializing: dict[int, type[ComputationModel]] = {}


def _after_fork_in_child() -> None:
    global _model_lock
    _model_lock = threading.RLock()  # the thread that held the lock is not in the child
    _initializing.clear()
    forks.after_fork(_model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forks.before_fork, after_in_child=_after_fork_in_child)


# --- resolving ---------------------------------------------------------------------------------------


@resolved_while_tracing
def _resolve_while_tracing() -> None:
    current_model()


@traced
def model_of_the_graph() -> ComputationModel:
    """:func:`current_model` in a traced graph. If a guard fails, torch traces the graph again."""
    _resolve_while_tracing()
    model = _model  # torch guards the attributes that are read below
    model.is_current_by_guards()
    return model


@traced
def _guarded_model() -> ComputationModel:
    model = model_of_the_graph()
    if model.is_current_by_guards():
        return model
    live: ComputationModel = call_eagerly(current_model)
    return live


@traced_as(_guarded_model)
def current_model() -> ComputationModel:
    """The computation model of the live context. Never communicates."""
    model = _model
    return model if model.is_current() else _resolve()


def _resolve() -> ComputationModel:
    """Find a context that was made since the last call; a serial model if no context is live."""
    with _model_lock:
        model = _model
        if model.is_current():  # another thread has found the context
            return model
        _call_hooks(end_hooks, model)
        model.forget()
        # Replicas of XLA are threads and may end their contexts at different times. So return the model found
        # for this thread: another thread may replace _model at any time.
        found = _find_model_of_context()
        if _is_being_made(found):  # initialize() replaces this model, which would lose its groups
            return _set_model(SerialModel())
        forks.disable_if_inherited(found)
        model = _model
        return model if model.is_current() else _set_model(found)  # a signal handler may have set _model


def _is_being_made(model: ComputationModel) -> bool:
    """True if ``initialize`` in another thread is about to set its own model of this context."""
    # Ranks that are threads share one model, which initialize() does not replace.
    if not _initializing or model.ranks_in_process() > 1:
        return False
    thread_id = threading.get_ident()
    return any(kind is type(model) for thread, kind in list(_initializing.items()) if thread != thread_id)


def _set_model(model: ComputationModel) -> ComputationModel:
    global _model
    with _model_lock:
        _model = model
        loader_workers.send_identity(model)
    return model


def _drop_serial_model(_: Any) -> None:
    """Drop the serial model when multiprocessing has sent its configuration to this new process."""
    if isinstance(_model, SerialModel):
        _set_model(SerialModel())


loader_workers.call_in_new_processes(_drop_serial_model)


def _find_model_of_context() -> ComputationModel:
    """A model of the live context; a serial model if no context is live."""
    loaded = registered_computation_models.with_imported_library()
    for candidate in loaded:
        found = candidate.find()
        if found is not None:
            return found
    # A serial model itself detects contexts of torch.distributed and new imports.
    others = [model for model in loaded if model.name not in ("serial", "native-dist")]
    num_modules = len(sys.modules)
    worker_model = loader_workers.model_of_worker(num_modules)
    if worker_model is not None:
        return worker_model
    return PollingSerialModel(num_modules, others) if others else SerialModel(num_modules)


def sync(temporary: bool = False) -> None:
    """Find the live context. For compatibility only: every function finds the context itself.

    Args:
        temporary: has no effect.
    """
    current_model()


# --- lifecycle ---------------------------------------------------------------------------------------


def available_backends() -> tuple[str, ...]:
    """The backends that this installation can run, for example ``("gloo", "nccl")``.

    NCCL is included if torch was built with NCCL, even without a GPU.
    """
    return tuple(backend for model in registered_computation_models for backend in model.available_backends)


def resolve_backend(backend: str) -> str:
    """``backend``, or for ``"auto"`` the backend of the live context, else NCCL with a GPU, else gloo."""
    if backend != "auto":
        return backend
    return current_model().backend() or devices.auto_backend()


def find_model(backend: str) -> type[ComputationModel]:
    """The class of the computation model that runs ``backend``.

    Raises:
        ValueError: no model runs ``backend``.
    """
    if isinstance(backend, str):
        for model in registered_computation_models:
            if model.can_run(backend):
                return model
        for model in registered_computation_models:
            reason = model.unavailable_reason(backend)
            if reason is not None:
                raise ValueError(
                    f"Backend {backend!r} cannot run here: {reason} Available: {_backend_names()}."
                )
    raise ValueError(f"Unknown backend {backend!r}. Available: {_backend_names()}.{_hint(backend)}")


_DEVICE_HINTS = {
    "cuda": " For GPUs use 'nccl' or 'auto'.",
    "gpu": " For GPUs use 'nccl' or 'auto'.",
    "cpu": " For CPUs use 'gloo' or 'auto'.",
}


def _hint(backend: Any) -> str:
    if not isinstance(backend, str) or not backend:
        return " Pass the name of one of them, or 'auto'."
    known = [*available_backends(), "auto", "nccl", "mpi", "horovod", "xla-tpu"]
    hint = _DEVICE_HINTS.get(backend) or did_you_mean(backend.lower(), known)
    return hint or " Is the package of this backend installed?"


def _backend_names() -> str:
    return ", ".join(map(repr, available_backends()))


def initialize(backend: str, **kwargs: Any) -> None:
    """Make a distributed context. Every rank must call this. Returns when all ranks have called this.

    The rank and the world size come from the arguments or from the launcher's variables, as in
    :func:`environment` (for Horovod: the variables of ``horovodrun``). Without both, the world size is 1.

    ``initialize`` sets missing variables that scripts read: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT``; none for XLA, because ranks may share a process. If the launcher or a
    loopback address shows that all ranks run on this host, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``
    are set to the loopback interface. :func:`finalize` removes the variables that ``initialize`` has set.

    Under ``ignite-dist run``, which has made a context, the call has no effect.

    Args:
        backend: one of :func:`available_backends`, one per device (``"cpu:gloo,cuda:nccl"``), or ``"auto"``:
            NCCL on a machine with a GPU, else gloo.
        kwargs: for gloo, NCCL and MPI: ``timeout`` (``datetime.timedelta``; torch's default is 30 minutes,
            10 for NCCL), ``init_method`` (``"env://"``, ``"file://..."``, ``"tcp://..."``), ``rank`` and
            ``world_size`` (both, and only with an ``init_method``), ``pg_options``, ``device_id``; see
            https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group.
            For Horovod ``comm``: a list of all ranks, or an ``mpi4py`` communicator if Horovod was built with
            MPI. For XLA none.

    Raises:
        ValueError: an unknown backend, or arguments that contradict each other or the environment.
        TypeError: a keyword that the backend does not have.
        RuntimeError: a context exists already, or there is no GPU for NCCL.
        EnvironmentVariablesError: variables are missing, or belong to a launcher that Horovod does not know,
            or ``PJRT_DEVICE`` is missing for XLA.
        LaunchError: the port of the rendezvous is in use.
        MissingRanksError: ranks are missing after the timeout (torch's backends; others raise other errors).
    """
    backend = resolve_backend(backend)
    kind = find_model(backend)
    live = current_model()
    if not live.can_be_replaced_by(kind):
        if live.runs(backend) and spawned.is_run(os.environ):
            check_keywords("initialize", kwargs, keywords_of(kind.open))
            if kwargs:
                warn_user(f"initialize uses the context of ignite-dist run, and ignores {', '.join(kwargs)}.")
            return
        raise RuntimeError(
            f"A context of backend {live.backend()!r} exists already, and idist uses this context. "
            "To make a new context, call idist.finalize() first."
        )
    thread_id = threading.get_ident()
    _initializing[thread_id] = kind
    try:
        model = _set_model(kind.open(backend, **kwargs))
    finally:
        _initializing.pop(thread_id, None)
    ignite_bridge.context_began(model)
    _call_hooks(begin_hooks, model)


def is_context_of(backend: str) -> bool:
    """True if a context of ``backend`` is live, and ``initialize(backend)`` would raise."""
    live = current_model()
    return not live.can_be_replaced_by(find_model(backend)) and live.runs(backend)


def finalize() -> None:
    """End the context and all of its groups. No effect without a context.

    Waits without a timeout until all ranks have called ``finalize``. If another rank waits in a collective
    that this rank has not called, both ranks raise within seconds, and the context ends.

    While an exception is being handled (for example in a ``finally`` block), ``finalize`` ends the context of
    this rank at once and does not wait. The next collective of each other rank raises instead of hanging.

    Raises:
        RankFailedError: another rank waits in a collective that this rank has not called (torch's backends
            and workers of :func:`spawn`).
    """
    if sys.exc_info()[0] is None:
        conclude()
    else:
        abort()


def conclude() -> None:
    """End the context after success, as :func:`finalize` does when no exception is being handled."""
    model = current_model()
    if not forks.is_inherited(model):  # else the parent waits for what it has begun
        _call_hooks(before_end_hooks, model)
    model.meet_at_end()
    _call_hooks(end_hooks, model)  # before the rank that serves the store exits
    model.close()
    _forget(model)


def abort() -> None:
    """End the context after a failure on this rank. Does not wait for other ranks.

    Under torchrun, the exception that is being handled is shown in torchrun's failure summary. If the
    exception is a consequence of another rank's failure, this rank waits 3 s for torchrun to end it.
    """
    from ignite_dist.workers import torchelastic

    model = current_model()
    try:
        with torchelastic.report_to_torchrun(sys.exc_info()[1]):
            try:
                _call_hooks(failure_hooks, model)  # before the connections close and the peers notice
            finally:
                model.abort()
    finally:
        _call_hooks(end_hooks, model)
        _forget(model)


def _forget(model: ComputationModel) -> None:
    model.forget()
    _set_model(SerialModel())
    ignite_bridge.context_ended()


def _call_hooks(hooks: Sequence[Callable[[ComputationModel], None]], model: ComputationModel) -> None:
    for hook in hooks:
        hook(model)
