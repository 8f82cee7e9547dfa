"""Which computation model is live, and what it says about this process."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ignite_dist.arguments import did_you_mean
from ignite_dist.comp_models import ComputationModel, NativeModel, SerialModel, registered_computation_models
from ignite_dist.comp_models.serial import WatchfulSerialModel
from ignite_dist.context import forks, ignite_bridge, loader_workers
from ignite_dist.tracing import eagerly, resolved_while_tracing, traced, traced_as
from ignite_dist.workers import torchelastic

__all__ = [
    "abort",
    "available_backends",
    "begun",
    "conclude",
    "current_model",
    "ended",
    "ending",
    "finalize",
    "find_model",
    "initialize",
    "is_context_of",
    "model_of_the_graph",
    "sync",
]

_logger = logging.getLogger(__name__)
_model: ComputationModel = SerialModel()

begun: list[Callable[[ComputationModel], None]] = []
"""What rooms above this one do with each context that :func:`initialize` has made."""
ending: list[Callable[[ComputationModel], None]] = []
"""What they do before a context ends after success. An exception leaves it as it is."""
ended: list[Callable[[ComputationModel], None]] = []
"""What they do when a context ends, whoever ends it and however."""
# Guards the change of _model: threads that notice a context at once have to get one model of it, because that
# model has the groups. Never held while other ranks are waited for. Who only reads _model needs no lock.
_changing = threading.RLock()
# The threads that are in initialize(), and the kind of model that each makes.
_initializing: dict[int, type[ComputationModel]] = {}


def _after_fork_in_child() -> None:
    global _changing
    _changing = threading.RLock()  # the thread that had it is not there to give it back
    _initializing.clear()
    forks.after_fork(_model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# --- resolving ---------------------------------------------------------------------------------------


@resolved_while_tracing
def _look_while_tracing() -> None:
    current_model()


@traced
def model_of_the_graph() -> ComputationModel:
    """:func:`current_model` for a graph that is being traced, which is made again when a guard fails."""
    _look_while_tracing()
    model = _model  # what is read of it is guarded
    model.is_current_by_guards()
    return model


@traced
def _guarded_model() -> ComputationModel:
    model = model_of_the_graph()
    if model.is_current_by_guards():
        return model
    found: ComputationModel = eagerly(current_model)
    return found


@traced_as(_guarded_model)
def current_model() -> ComputationModel:
    """The computation model of the live context. Never communicates."""
    model = _model
    return model if model.is_current() else _resolve()


def _resolve() -> ComputationModel:
    """Look for a context that somebody made since; without one, this process is serial."""
    with _changing:
        model = _model
        if model.is_current():  # another thread has looked meanwhile
            return model
        _call(ended, model)
        model.forget()
        # Replicas of XLA are threads, and one of them may end its context before another: what is found here
        # is this thread's, whatever the others make of the module's variable afterwards.
        found = _find()
        if _is_being_made(found):  # initialize() would replace this one, and its groups would be lost
            return _use(SerialModel())
        forks.note_inherited(found)
        model = _model
        return model if model.is_current() else _use(found)  # a signal handler may have looked meanwhile


def _is_being_made(model: ComputationModel) -> bool:
    """Whether ``initialize`` in another thread is about to give the model of this very context."""
    # Ranks that are threads share one model, so none is lost.
    if not _initializing or model.ranks_in_process() > 1:
        return False
    here = threading.get_ident()
    return any(kind is type(model) for thread, kind in list(_initializing.items()) if thread != here)


def _use(model: ComputationModel) -> ComputationModel:
    global _model
    with _changing:
        _model = model
        loader_workers.note(model)
    return model


def _look_again(_: Any) -> None:
    """In a process that multiprocessing has started, and which now has its configuration: look anew."""
    if isinstance(_model, SerialModel):
        _use(SerialModel())


loader_workers.when_sent(_look_again)


def _find() -> ComputationModel:
    """A model of the live context."""
    loaded = [model for model in registered_computation_models if model.library in sys.modules]
    for candidate in loaded:
        found = candidate.find()
        if found is not None:
            return found
    # Every serial model watches torch.distributed by itself, and whether anything else has been imported.
    others = [model for model in loaded if model not in (SerialModel, NativeModel)]
    num_modules = len(sys.modules)
    of_worker = loader_workers.model_of_worker(num_modules)
    if of_worker is not None:
        return of_worker
    return WatchfulSerialModel(num_modules, others) if others else SerialModel(num_modules)


def sync(temporary: bool = False) -> None:
    """Look for the live context and use it.

    There is no need to call it: every function of the package notices a context that was made, ended or
    replaced. It is here for scripts that call it.

    Args:
        temporary: accepted and without effect; a context is never used for longer than it lives.
    """
    current_model()


# --- lifecycle ---------------------------------------------------------------------------------------


def available_backends() -> tuple[str, ...]:
    """The backends that this installation can run, ``("gloo", "nccl")`` for example.

    NCCL counts when torch was built with it, whether or not there is a GPU.
    """
    return tuple(backend for model in registered_computation_models for backend in model.available_backends)


def find_model(backend: str) -> type[ComputationModel]:
    """The class of the computation model that runs ``backend``.

    Raises:
        ValueError: there is none.
    """
    if isinstance(backend, str):
        for model in registered_computation_models:
            if model.can_run(backend):
                return model
        for model in registered_computation_models:
            reason = model.unavailable_reason(backend)
            if reason is not None:
                raise ValueError(f"Backend {backend!r} cannot run here: {reason} Available: {_listed()}.")
    hint = (
        did_you_mean(str(backend).lower(), available_backends())
        or " Is the package that brings it installed?"
    )
    raise ValueError(f"Unknown backend {backend!r}. Available: {_listed()}.{hint}")


def _listed() -> str:
    return ", ".join(map(repr, available_backends()))


def initialize(backend: str, **kwargs: Any) -> None:
    """Make a distributed context. Every rank calls it; it returns when all have.

    The ranks come from the arguments or from the launcher's variables, as :func:`environment` shows them
    (Horovod: of ``horovodrun``); with nothing set it is a world of one.
    Variables that scripts read (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``) are set where they are missing, and :func:`finalize` takes back just those (XLA: none of
    them, because ranks may share a process). So are ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``, to the
    loopback interface, if the launcher or a loopback address says that all ranks run on this machine.

    Args:
        backend: one of :func:`available_backends`, or one per device: ``"cpu:gloo,cuda:nccl"``.
        kwargs: for gloo, NCCL and MPI: ``timeout`` (``datetime.timedelta``; torch's default is 30 minutes,
            10 for NCCL), ``init_method`` (``"env://"``, ``"file://..."``, ``"tcp://..."``), ``rank`` and
            ``world_size`` (both, and only with an ``init_method``), ``pg_options``, ``device_id``; see
            https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group.
            For Horovod ``comm``: a list of all ranks, or an ``mpi4py`` communicator if it was built with MPI.
            For XLA none.

    Raises:
        ValueError: an unknown backend, or arguments that contradict each other or the environment.
        TypeError: a keyword that the backend does not have.
        RuntimeError: a context exists already, NCCL without a GPU.
        EnvironmentVariablesError: the environment is half set, of a launcher that Horovod does not know, or
            without the ``PJRT_DEVICE`` that XLA is to use.
        LaunchError: the port of the rendezvous is in use.
        MissingRanksError: not all ranks have come in time (torch's backends; others say it otherwise).
    """
    model = find_model(backend)
    live = current_model()
    if not live.gives_way_to(model):
        raise RuntimeError(
            f"A context of backend {live.backend()!r} exists already, so a second one cannot be initialised. "
            "idist uses the one that exists without any call; or end it first with idist.finalize()."
        )
    here = threading.get_ident()
    _initializing[here] = model
    try:
        made = _use(model.open(backend, **kwargs))
    finally:
        _initializing.pop(here, None)
    ignite_bridge.context_began(made)
    _call(begun, made)


def is_context_of(backend: str) -> bool:
    """Whether a context of ``backend`` is live, which ``initialize(backend)`` would refuse to make again."""
    live = current_model()
    return not live.gives_way_to(find_model(backend)) and live.runs(backend)


def finalize() -> None:
    """End the context: a barrier, then the end of all of its groups. Without a context it does nothing.

    It waits for the others as long as they take. If one of them waits in a collective that this rank has not
    made, both get an error within seconds, and the context ends.

    Called while an exception is being handled (in a ``finally``, say) it ends this rank's part at once and
    waits for nobody: the other ranks get an error from their next collective instead of waiting for ever.

    Raises:
        RankFailedError: another rank waits in a collective that this one has not made (torch's backends and
            workers of :func:`spawn`).
    """
    if sys.exc_info()[0] is None:
        conclude()
    else:
        abort()


def conclude() -> None:
    """End the context after success: what :func:`finalize` does when no exception is being handled."""
    model = current_model()
    for hook in ending:
        hook(model)
    model.meet_at_end()
    _call(ended, model)  # before the rank that serves the store goes
    model.close()
    _forget(model)


def abort() -> None:
    """End the context after a failure on this rank. Waits for nobody.

    Under torchrun the exception that is being handled gets into the summary of the failure. A rank that only
    notices the failure of another gives torchrun a moment to notice it too.
    """
    with torchelastic.recorded(sys.exc_info()[1]):
        model = current_model()
        model.abort()
    _call(ended, model)
    _forget(model)


def _forget(model: ComputationModel) -> None:
    model.forget()
    _use(SerialModel())
    ignite_bridge.context_ended()


def _call(hooks: Sequence[Callable[[ComputationModel], None]], model: ComputationModel) -> None:
    for hook in hooks:
        hook(model)


# --- this process ------------------------------------------------------------------------------------
