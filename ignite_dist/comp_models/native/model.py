"""torch.distributed: gloo, NCCL, MPI, and other backends that are registered with torch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ignite_dist import environments
from ignite_dist.comp_models.base import ProcessModel, weak_method
from ignite_dist.comp_models.native import gloo
from ignite_dist.comp_models.native.accelerator_transport import AcceleratorTransport
from ignite_dist.comp_models.native.gloo_transport import GlooTransport
from ignite_dist.comp_models.native.launcher import NativeLauncher
from ignite_dist.comp_models.native.training import NativeTraining
from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.comp_models.topology import Topology
from ignite_dist.comp_models.work import never_free
from ignite_dist.environments import Environment, devices, own_variables
from ignite_dist.environments.rendezvous import connections, roll_call, stores
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.internals import _torch
from ignite_dist.internals._torch import WORLD_STATE
from ignite_dist.internals.arguments import as_int, check_keywords, check_timeout
from ignite_dist.internals.call_sites import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

_FROM_SOURCE = "To get it, install the library and build torch from source."
_BUILD_HINTS = {
    "nccl": "torch's builds for CUDA have it: https://pytorch.org/get-started/locally/.",
    "xccl": "torch's builds for Intel GPUs have it: https://pytorch.org/get-started/locally/.",
    "mpi": _FROM_SOURCE,
    "ucc": _FROM_SOURCE,
}


def _available_backends() -> tuple[str, ...]:
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return tuple(name for name in known if dist.is_backend_available(name))


class NativeModel(ProcessModel):
    """The model of torch's default process group.

    Args:
        world: the default process group.
        undo: reverts the changes by :meth:`open` in this process; None if other code has made the group.
        environment: the launcher's environment; None to read it from variables with this rank and world size.
        connecting: makes a context manager for code that opens connections between the ranks.
    """

    name: ClassVar[str] = "native-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "torch.distributed"
    launcher: ClassVar[type[NativeLauncher]] = NativeLauncher
    transport: NativeTransport

    _local_rank_hint: ClassVar[int | None] = None

    def __init__(
        self,
        world: ProcessGroup,
        undo: Callable[[], None] | None = None,
        environment: Environment | None = None,
        connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._world = world
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._backends = _by_device(dist.get_backend_config())
        self._fixed_device = _find_device(world, self._backends, is_own=undo is not None)
        self._environment = environment or _environment_of(self._rank, self._world_size)
        self._local_rank = self._environment.local_rank if self._environment else _local_rank_without_rank()
        super().__init__(
            _transport_class(self._backends)(
                world,
                self._rank,
                self._backends,
                weak_method(self.device),
                connecting,
                own_store=undo is not None,
            ),
            undo,
        )
        self.training = NativeTraining(self, self.transport)
        gloo.wait_for_threads_at_exit()

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def find(cls) -> Self | None:
        world = dist.group.WORLD
        return None if world is None else cls(world)

    @classmethod
    def can_run(cls, backend: str) -> bool:
        # A name may give one backend per device ("cpu:gloo,cuda:nccl"). Look up the backends again, because a
        # backend may have been registered with torch after the import of this package.
        names = [part.rpartition(":")[2] for part in backend.split(",")]
        return all(name in _available_backends() for name in names)

    def runs(self, backend: str) -> bool:
        return super().runs(backend) or _backends_of(backend) == self._backends

    @classmethod
    def unavailable_reason(cls, backend: str) -> str | None:
        if backend not in dist.Backend.backend_list:
            return None
        return (
            f"torch {torch.__version__} was built without {backend}. {_BUILD_HINTS.get(backend, '')}".rstrip()
        )

    @classmethod
    def open(
        cls,
        backend: str,
        *,
        init_method: str | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> Self:
        """See ``idist.initialize``; ``kwargs`` are passed to ``torch.distributed.init_process_group``."""
        world_size, rank = as_int(world_size), as_int(rank)
        _check_initialize(backend, init_method, world_size, rank, timeout, kwargs)
        place = stores.find_place(init_method, rank, world_size)
        is_mpi = backend == dist.Backend.MPI  # MPI assigns the ranks and needs no store
        # These variables stay set until the context ends, because every new group opens listening sockets.
        for_sockets = {} if is_mpi else stores.interface_variables(place, init_method) | stores.GLOO_VARIABLES
        stores.set_missing(place, for_sockets)
        connecting = nullcontext if stores.is_on_one_machine(place, init_method) else connections.keepalive
        excepthook, world_connections = sys.excepthook, connections.Connections()
        try:
            devices.select_device(backend, _backends_of(backend), place)
            if timeout is not None:
                kwargs["timeout"] = timeout
            with connecting():
                if not is_mpi:
                    store = stores.join_store(place, init_method, timeout)
                    if "nccl" in backend and place.rank == 0:
                        stores.forget_failures(store)
                    devices.claim_device(backend, store, place)  # returns when every rank has called it
                    kwargs.update(store=store, rank=place.rank, world_size=place.world_size)
                _init_process_group(backend, place, world_connections, kwargs)
        except BaseException:
            own_variables.restore()
            raise
        stores.count_context(place, init_method)
        model = cls(_world(), _make_undo(excepthook), place, connecting)
        if "gloo" in model._backends.values():
            model.transport.world_connections = world_connections
            if connecting is not nullcontext and set(model._backends.values()) == {"gloo"}:
                connections.to_other_machines.add(world_connections)
        if devices.needs_one_per_rank(model.backend()):
            # Makes the communicator now, on the selected device. A barrier may go to the backend of the CPU.
            first = torch.zeros(1, device=model.device())
            model.transport.all_reduce(first, "SUM", model.groups.world).wait().item()
        elif model.device().type != "cpu":
            model.transport.barrier(model.groups.world).wait()
        return model

    def is_current(self) -> bool:
        return WORLD_STATE.default_pg is self._world

    def is_current_by_guards(self) -> bool:
        return self.is_current()

    def close(self) -> None:
        # A DistributedDataParallel is a reference cycle that includes the group. If the cycle is freed at the
        # interpreter's exit, the group's threads may abort the process: raw torch 2.13, 2 of 20 runs.
        gc.collect()
        # torch frees a group with Python's GIL held, and waits for the end of gloo's threads. A thread that
        # still has a tensor to release waits for the GIL, and the process hangs: raw torch 2.13, 4 of 900
        # runs on two busy cores. If a thread takes too long, its groups are never freed.
        if not gloo.wait_for_threads():
            never_free(_torch.groups_and_stores())
        dist.destroy_process_group()

    def abort(self) -> None:
        groups = _torch.groups_and_stores()
        _torch.abort_process_groups()
        # A DistributedDataParallel would keep connections open, on which other ranks wait.
        self.transport.end_waits()
        # A gloo thread that sends on a connection that is being shut down may not notice, and wait on.
        if not gloo.wait_for_threads():
            never_free(groups)

    def forget(self) -> None:
        self.transport.forget()
        super().forget()

    def context_mark(self) -> object:
        return self._world

    @classmethod
    def prepare_forked_child(cls) -> object | None:
        gloo.forget_lent()
        never_free(_torch.groups_and_stores())  # the child does not have their threads
        return dist.group.WORLD

    # --- identity ------------------------------------------------------------------------------------

    def backend(self) -> str:
        return self._backends.get(self.device().type) or next(iter(self._backends.values()))

    def get_local_rank(self) -> int:
        local_rank = self._local_rank
        if local_rank is None:
            local_rank = self._local_rank = self._find_local_rank()
        return local_rank

    def _find_local_rank(self) -> int:
        if self._local_rank_hint is not None:
            return self._local_rank_hint
        warn_user(
            "The local rank is not in the environment. This call gathers the host names of all ranks to find "
            "the local rank, so every rank must make this call. To avoid it, set LOCAL_RANK or call "
            "idist.set_local_rank(local_rank).",
        )
        return self.find_topology().local_rank

    @classmethod
    def hint_local_rank(cls, local_rank: int) -> None:
        """Set the local rank for later contexts whose environment does not have it."""
        cls._local_rank_hint = local_rank

    def set_local_rank(self, local_rank: int) -> None:
        known = self._environment.local_rank if self._environment else _local_rank_without_rank()
        if known is None:
            self._local_rank = local_rank

    def known_local_rank(self) -> int | None:
        return self._local_rank if self._local_rank is not None else self._local_rank_hint

    def known_topology(self) -> Topology | None:
        environment = self._environment
        if self._found_topology is None and environment is not None:
            self._found_topology = Topology.from_environment(environment)
        return self._found_topology


# --- properties of the context -----------------------------------------------------------------------


def _transport_class(backends: Mapping[str, str]) -> type[NativeTransport]:
    of_cpu = backends.get("cpu")
    if of_cpu is None:
        return AcceleratorTransport
    return GlooTransport if of_cpu == "gloo" else NativeTransport


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _find_device(world: ProcessGroup, backends: Mapping[str, str], is_own: bool) -> torch.device | None:
    """The device of this rank; None if a context that others made does not say which."""
    if devices.accelerator_in(backends) is None:
        return torch.device("cpu")
    # Another thread has another current device, and a forked process cannot ask for its own.
    return devices.current_accelerator() if is_own else world.bound_device_id


def _make_undo(excepthook: Callable[..., Any]) -> Callable[[], None]:
    """A function that restores the environment variables and ``excepthook``, which torch has replaced."""
    installed = sys.excepthook

    def undo() -> None:
        own_variables.restore()
        if sys.excepthook is installed:  # torch chains a new hook at every init_process_group
            sys.excepthook = excepthook

    return undo


def _init_process_group(
    backend: str, place: Environment, world_connections: connections.Connections, kwargs: Mapping[str, Any]
) -> None:
    """Make the default process group; log a warning if this takes long."""
    with world_connections.recording(), roll_call.logging_wait(place, "connections to the other ranks"):
        dist.init_process_group(backend, **kwargs)


def _backends_of(name: str) -> dict[str, str]:
    """The backend of each type of device in a context of the backend ``name``."""
    return _by_device(dist.BackendConfig(dist.Backend(name)))


def _by_device(backends: dist.BackendConfig | str) -> dict[str, str]:
    """``"cpu:gloo,cuda:nccl"`` -> ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(part.split(":") for part in str(backends).split(","))


def _local_rank_without_rank() -> int | None:
    """``LOCAL_RANK`` if ``RANK`` is not set, else None."""
    value = os.environ.get("LOCAL_RANK", "")
    is_number = value.isdecimal() and len(value) <= 10
    return int(value) if is_number and not os.environ.get("RANK") else None


def _environment_of(rank: int, world_size: int) -> Environment | None:
    """The launcher's environment if it has this rank and world size, else None."""
    try:
        environment = environments.current()
    except EnvironmentVariablesError:
        return None  # the context exists already, so the error does not matter
    return environment if (environment.rank, environment.world_size) == (rank, world_size) else None


# --- initialize --------------------------------------------------------------------------------------


def _check_initialize(
    backend: str,
    init_method: str | None,
    world_size: int | None,
    rank: int | None,
    timeout: timedelta | None,
    kwargs: dict[str, Any],
) -> None:
    allowed = ("init_method", "world_size", "rank", "timeout", "pg_options", "device_id")
    check_keywords("initialize", kwargs, allowed)
    if (rank is None) != (world_size is None):
        raise ValueError(f"Pass both rank and world_size, got rank={rank} and world_size={world_size}.")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} must be an int, got {value!r}.")
    if init_method is None and rank is not None:
        raise ValueError(
            "rank and world_size need an init_method ('env://', 'tcp://...', 'file://...'). Without an "
            "init_method, rank and world_size are read from the environment."
        )
    if timeout is not None:
        check_timeout("timeout", timeout)
    devices.check_devices(backend, 1)
