"""torch.distributed: gloo, NCCL, MPI, and whatever else is registered with torch."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, GroupMember, ProcessGroup, Store, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist import devices, environments
from ignite_dist.arguments import as_int, check_keywords, check_nodes, check_timeout
from ignite_dist.comp_models.base import ComputationModel, Group, WaitedFor
from ignite_dist.comp_models.native import ddp_reduction, gloo, narrow_floats, waits, wrappers
from ignite_dist.comp_models.topology import Topology
from ignite_dist.environments import Environment, spawned, variables
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.flight_recorder import describe_ranks
from ignite_dist.rendezvous import connections, roll_call, stores
from ignite_dist.values import serialization
from ignite_dist.workers import nodes, processes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NativeModel"]


def _all_reduce_options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = False
    return options


_CPU = torch.device("cpu")
_ALL_REDUCE = {
    "SUM": _all_reduce_options(dist.ReduceOp.SUM),
    "PRODUCT": _all_reduce_options(dist.ReduceOp.PRODUCT),
    "MIN": _all_reduce_options(dist.ReduceOp.MIN),
    "MAX": _all_reduce_options(dist.ReduceOp.MAX),
    "AND": _all_reduce_options(dist.ReduceOp.BAND),
    "OR": _all_reduce_options(dist.ReduceOp.BOR),
}
_ALL_GATHER = distributed_c10d.AllgatherOptions()
_ALL_GATHER.asyncOp = False
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_ARITHMETIC = frozenset({"SUM", "PRODUCT", "MIN", "MAX"})
# Which dtypes each backend carries, and which operations beside the arithmetic ones: tried out for gloo,
# by torch's and the libraries' documentation for the others. Backends not named here are taken for NCCL.
_CARRIED_DTYPES = {
    "gloo": _FLOATS | _INTS | {torch.bool},
    "mpi": (_INTS - {torch.int8}) | {torch.float32, torch.float64},
}
_CARRIED_OPS = {"gloo": _ARITHMETIC | {"AND", "OR"}}

# gloo's own all-reduce does not cut this few elements into segments, and one step cannot beat that.
_UNCUT_NUMEL = 2

_FROM_SOURCE = "Only a torch that is built from source, where the library is installed, has it."
_BUILDS_WITH = {
    "nccl": "The builds for CUDA have it: https://pytorch.org/get-started/locally/.",
    "xccl": "The builds for Intel's GPUs have it: https://pytorch.org/get-started/locally/.",
    "mpi": _FROM_SOURCE,
    "ucc": _FROM_SOURCE,
}


def _available_backends() -> tuple[str, ...]:
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return tuple(name for name in known if dist.is_backend_available(name))


class NativeModel(ComputationModel):
    """The model of torch's default process group.

    Args:
        world: the default process group.
        undo: what to take back when this model's own context ends.
        environment: what is known of it; by default what the variables say, if they speak of it.
        connecting: a context manager for what opens connections between the ranks.
    """

    name: ClassVar[str] = "native-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "torch.distributed"
    averages_gradients: ClassVar[bool] = True
    averages_in_backward: ClassVar[bool] = True

    _local_rank_hint: ClassVar[int | None] = None

    def __init__(
        self,
        world: ProcessGroup,
        undo: Callable[[], None] | None = None,
        environment: Environment | None = None,
        connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(undo)
        self._world = world
        self._connecting = connecting
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._backends = _by_device(dist.get_backend_config())
        self._fixed_device = None if devices.accelerator_in(self._backends) else torch.device("cpu")
        self._environment = environment or _environment_of(self._rank, self._world_size)
        self._local_rank = self._environment.local_rank if self._environment else _local_rank_alone()
        # How many groups of the same ranks this rank has made; and connections to the store, over which
        # nobody makes a group at present. There is no lock: next(), pop() and append() are atomic.
        self._generations: dict[tuple[int, ...], Iterator[int]] = {}
        self._free_connections: list[Store] = []
        self._scratch = gloo.ScratchBuffers()
        self._to_all, self._to_groups = (
            connections.Connections(),
            connections.Connections(),
        )  # gloo's, of own contexts
        gloo.tidy_at_exit()

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def create_from_context(cls) -> Self | None:
        world = distributed_c10d._world.default_pg
        return None if world is None else cls(world)

    @classmethod
    def can_run(cls, backend: str) -> bool:
        # One backend per device, "cpu:gloo,cuda:nccl", or one registered with torch after our import.
        names = [part.rpartition(":")[2] for part in backend.split(",")]
        return all(name in _available_backends() for name in names)

    def runs(self, backend: str) -> bool:
        return (
            super().runs(backend) or _by_device(dist.BackendConfig(dist.Backend(backend))) == self._backends
        )

    @classmethod
    def how_to_get(cls, backend: str) -> str | None:
        if backend not in dist.Backend.backend_list:
            return None
        return (
            f"this torch, {torch.__version__}, was built without it. {_BUILDS_WITH.get(backend, '')}".rstrip()
        )

    @classmethod
    def create_from_backend(
        cls,
        backend: str,
        *,
        init_method: str | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> Self:
        """See ``idist.initialize``; ``kwargs`` go to ``torch.distributed.init_process_group``."""
        world_size, rank = as_int(world_size), as_int(rank)
        _check_initialize(backend, init_method, world_size, rank, timeout, kwargs)
        place = stores.find_place(init_method, rank, world_size)
        brings_ranks = backend == dist.Backend.MPI  # and needs no store
        # They stay for the life of the context: every new group listens again.
        more = {} if brings_ranks else {**stores.interfaces(place, init_method), **stores.ASK_ONCE}
        stores.set_missing(place, more)
        connecting = nullcontext if stores.on_one_machine(place, init_method) else connections.watched
        hook, to_all = sys.excepthook, connections.Connections()
        try:
            devices.select_device(backend, place)
            if timeout is not None:
                kwargs["timeout"] = timeout
            with connecting():
                if not brings_ranks:
                    store = stores.join_store(place, init_method, timeout)
                    kwargs.update(store=store, rank=place.rank, world_size=place.world_size)
                waiting = connections.wait_told(lambda: roll_call.waiting(place, "connections to the others"))
                with to_all.noted(), waiting:
                    dist.init_process_group(backend, **kwargs)
        except BaseException:
            variables.give_back()
            raise
        stores.note_meeting(place, init_method)
        installed_hook = sys.excepthook

        def undo() -> None:
            variables.give_back()
            if sys.excepthook is installed_hook:  # torch chains a new one at every init_process_group
                sys.excepthook = hook

        model = cls(_world(), undo, place, connecting)
        if "gloo" in model._backends.values():
            model._to_all = to_all
        if model.device().type != "cpu":
            model._barrier(model.world())  # makes the communicator now, on the device that was selected
        return model

    @classmethod
    def check_spawn(
        cls,
        *,
        nproc_per_node: int,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_nodes(nproc_per_node, nnodes, node_rank, master_addr, master_port, init_method)

    @classmethod
    def spawn(  # type: ignore[override]  # the keywords are each backend's own
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int = 1,
        node_rank: int = 0,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
    ) -> Any:
        """See ``idist.spawn``."""
        check_nodes(nproc_per_node, nnodes, node_rank, master_addr, master_port, init_method)
        if timeout is not None:
            check_timeout("timeout", timeout)
        devices.check_devices(backend, nproc_per_node)
        store, environ = None, stores.loopback_only() if nnodes == 1 else {}
        job = nodes.assumed(node_rank, nnodes, nproc_per_node)
        if init_method in (None, "env://"):
            address, port = master_addr or "127.0.0.1", master_port or 0
            if nnodes == 1:
                store, port = stores.serve_store(address, port)
            else:
                hello = nodes.Hello(node_rank, nnodes, nproc_per_node, backend, socket.gethostname())
                job = nodes.meet(hello, address, port, timeout or default_pg_timeout, stores.serve_store)
                address, port = job.nodes[0].address, job.port
            # env:// joins the store, nobody serves one
            environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        inherited = {**os.environ, **environ}  # an init_method leaves what is inherited as it is
        environ.update(spawned.mark(inherited))
        workers = processes.start(
            entry,
            {"init_method": init_method, "timeout": timeout},
            [{**environ, **ranks} for ranks in job.environs()],
            serving=store,
            start_method=start_method,
            daemon=daemon,
            nodes=job,
        )
        del store  # a traceback through here would keep it, in a cycle that a forked process may not collect
        return workers.join() if join else workers

    def is_current(self) -> bool:
        return distributed_c10d._world.default_pg is self._world

    def is_current_by_guards(self) -> bool:
        return self.is_current()

    def finalize(self) -> None:
        try:
            # Nobody may close its connections while another still waits for data from them.
            self._barrier(self.world())
        except RuntimeError as error:
            warnings.warn(f"Not every rank came to finalize(): {error}", stacklevel=3)
        self.stop_watching()  # before the rank that serves the store goes
        # A DistributedDataParallel is a reference cycle that holds the group. Left to the end of the
        # interpreter, the group's threads now and then abort the process: raw torch 2.13, 2 of 20 runs.
        gc.collect()
        dist.destroy_process_group()
        self.left_behind()

    def abort(self) -> None:
        distributed_c10d._abort_process_group()
        self.end_waits()  # the other ranks', too: a DistributedDataParallel would keep the connections
        self.left_behind()

    def left_behind(self) -> None:
        self._free_connections.clear()
        super().left_behind()

    def context_mark(self) -> object:
        return self._world

    @classmethod
    def keep_through_fork(cls) -> object | None:
        gloo.forget_lent()
        groups = list(distributed_c10d._world.pg_map.items())
        for one in groups:  # they would wait at their ends for their threads: this list never ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        return distributed_c10d._world.default_pg

    def calls_begun(self) -> dict[str, int | None]:
        return waits.calls_begun()

    def waited_for(self, frame: FrameType) -> WaitedFor:
        return waits.waited_for(frame, self._world, self._rank, self.device())

    def is_broken(self) -> bool | None:
        return self._to_all.one_is_gone() if "gloo" in self._backends.values() else None

    def end_waits(self) -> None:
        self._to_all.cut()
        self._to_groups.cut()

    def store(self) -> Store | None:
        _, store = distributed_c10d._world.pg_map[self._world]
        return store if isinstance(store, Store) else None

    def side_store(self) -> Store | None:
        return None if self._undo is None else self.store()

    def num_collectives(self) -> int:
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        try:
            return sum(group._get_sequence_number_for_group() for group in groups)
        except RuntimeError:  # not every backend counts
            return 0

    # --- identity ------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._world_size

    def device(self) -> torch.device:
        fixed = self._fixed_device
        return fixed if fixed is not None else devices.current_accelerator()

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
        warnings.warn(
            "The local rank is not known: nothing in the environment says it. It is found from the host "
            "names of all ranks now, for which every rank must make this call. Set LOCAL_RANK, or call "
            "idist.set_local_rank(local_rank), to tell it.",
            stacklevel=4,
        )
        return self._topology().local_rank

    @classmethod
    def hint_local_rank(cls, local_rank: int) -> None:
        """The local rank in contexts to come that do not say it themselves."""
        cls._local_rank_hint = local_rank

    def set_local_rank(self, local_rank: int) -> None:
        known = self._environment.local_rank if self._environment else _local_rank_alone()
        if known is None:
            self._local_rank = local_rank

    def known_local_rank(self) -> int | None:
        return self._local_rank if self._local_rank is not None else self._local_rank_hint

    def known_topology(self) -> Topology | None:
        environment = self._environment
        if self._found_topology is None and environment is not None:
            self._found_topology = Topology.from_environment(environment)
        return self._found_topology

    # --- groups --------------------------------------------------------------------------------------

    def world_handle(self) -> ProcessGroup:
        return self._world

    def _new_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        if not ranks:  # which torch would take for all
            inspect.signature(dist.new_group).bind([], **options)
            return GroupMember.NON_GROUP_MEMBER
        with self._connecting(), self._to_groups.noted():
            return dist.new_group(list(ranks), **options) if options else self._new_group_by_name(ranks)

    def _new_group_by_name(self, ranks: tuple[int, ...]) -> Any:
        # torch names a group after the number of groups that this rank has made, so ranks with different
        # histories would wait for each other for ever. A name made of the ranks alone needs the members only.
        generation = next(self._generations.setdefault(ranks, count(1)))
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
        backend, worlds_store = distributed_c10d._world.pg_map[self._world]
        is_member = self._rank in ranks
        store = self._connection(worlds_store) if is_member else worlds_store
        handle, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(self._rank) if is_member else None,
            list(ranks),
            backend,
            store,
            group_name=f"ignite_dist:{digest}:{generation}",  # type: ignore[arg-type]
            timeout=self._timeout(backend),
            group_desc=f"ignite_dist:{describe_ranks(ranks)}",
        )
        if handle is not GroupMember.NON_GROUP_MEMBER:
            self._free_connections.append(store)  # not after an error: it may have been left in an answer
            positions = {rank: position for position, rank in enumerate(ranks)}
            distributed_c10d._world.pg_group_ranks[handle] = positions
        return handle

    def _connection(self, worlds_store: Any) -> Any:
        """A connection to the store, over which no other thread makes a group at the same time.

        A thread holds its connection while it waits for the other members. Two threads with one connection
        would deadlock if two ranks made their groups in opposite orders.
        """
        try:
            return self._free_connections.pop()
        except IndexError:
            return _connected_again(worlds_store)

    def _timeout(self, backend: str) -> timedelta:
        """The world's own timeout, which torch would not pass on to a group."""
        options = getattr(self._world._get_backend(self.device()), "options", None)
        return options._timeout if options else distributed_c10d._get_default_timeout(dist.Backend(backend))

    def _is_alive(self, handle: Any) -> bool:
        return handle in distributed_c10d._world.pg_map or handle == GroupMember.NON_GROUP_MEMBER

    def _group_ranks(self, handle: Any) -> tuple[int, ...]:
        if handle is None:
            return self.world().ranks
        if not isinstance(handle, ProcessGroup):
            if isinstance(handle, int) and handle == GroupMember.NON_GROUP_MEMBER:
                return ()
            raise ValueError(f"A group is a list of ranks or a ProcessGroup, got {handle!r}.")
        try:
            return tuple(dist.get_process_group_ranks(handle))
        except KeyError:
            raise ValueError(
                "This ProcessGroup was destroyed, or belongs to a context that has ended."
            ) from None

    def group_key(self, group: Group) -> str:
        handle = group.handle
        return "" if handle is None or handle is self._world else handle.group_name

    # --- tensor primitives -----------------------------------------------------------------------------

    def carries(self, collective: str, op: str | None, dtype: torch.dtype, device: torch.device) -> bool:
        backend = self._backends.get(device.type)
        if backend is None or dtype not in _CARRIED_DTYPES.get(backend, _FLOATS | _INTS):
            return False
        return op is None or op in _CARRIED_OPS.get(backend, _ARITHMETIC)

    # The process group's own methods, not torch.distributed's functions around them: those log and count, at
    # 15-25 us a call once the processor's caches have gone cold in the wait for other ranks.

    def _all_reduce(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        handle = self._handle(group)
        group_size = len(group.ranks)
        if (
            tensor.numel() > _UNCUT_NUMEL
            and self._is_gloo_on_cpu(tensor.device)
            and gloo.in_one_round(tensor.nbytes, group_size)
        ):
            self._scratch.all_reduce(handle, tensor, op, group_size)
        else:
            _wait(handle.allreduce([gloo.lend(tensor)], _ALL_REDUCE[op]))
        return tensor

    def rounds_once(self, dtype: torch.dtype, device: torch.device) -> bool:
        # Tried with gloo alone. On GPUs the network of a large job is better used by the library's own tree.
        return self._is_gloo_on_cpu(device)

    def _reduce_narrow(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        handle, group_size = self._handle(group), len(group.ranks)
        if group_size == 1 or not tensor.numel():
            return tensor

        def exchange(sent: Tensor, received: Tensor) -> None:
            gloo.exchange(handle, sent, received)

        def gather(sent: Tensor, received: Tensor) -> None:
            self._all_gather(sent, group, out=received.view(group_size, -1))

        if not gloo.in_one_round(tensor.nbytes, group_size):
            return narrow_floats.reduce_in_parts(tensor, op, group_size, exchange, gather)
        if tensor.numel() > _UNCUT_NUMEL and tensor.dtype in _FLOATS:
            return self._all_reduce(tensor, op, group)  # which gathers the rows and reduces them, too
        return narrow_floats.reduce_rows_of_all(tensor, op, group_size, gather)

    def _all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
        handle = self._handle(group)
        group_size = len(group.ranks)
        if out is None:
            out = torch.empty((group_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() == 0:
            return out
        if self._is_gloo_on_cpu(tensor.device):
            if gloo.in_one_round(tensor.nbytes, group_size):
                gloo.exchange(handle, tensor.expand(out.shape).contiguous(), out)
                return out
            out[group.position(self._rank)].copy_(tensor)
            if gloo.stream(handle, out):
                return out
        _wait(handle._allgather_base(gloo.lend(out.view(-1)), gloo.lend(tensor.view(-1)), _ALL_GATHER))
        return out

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        group_size = len(group.ranks)
        if not (self._is_gloo_on_cpu(_CPU) and gloo.in_one_round(len(buffer), group_size)):
            return super().gather_bytes(buffer, group)
        gathered = bytearray(group_size * len(buffer))
        gloo.exchange(
            self._handle(group),
            serialization.as_tensor(buffer * group_size),
            serialization.as_tensor(gathered),
        )
        return gathered

    def _handle(self, group: Group) -> ProcessGroup:
        handle: ProcessGroup | None = group.handle
        return self._world if handle is None else handle

    def _is_gloo_on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._backends.get("cpu") == "gloo"

    def _broadcast(self, tensor: Tensor, src: int, group: Group) -> Tensor:
        root = group.position(src)
        assert root is not None
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.asyncOp = False
        _wait(self._handle(group).broadcast([gloo.lend(tensor)], options))
        return tensor

    def _barrier(self, group: Group) -> None:
        # NCCL guesses a device unless it is told one.
        device_ids = None if "cpu" in self._backends else [self.device().index]
        try:
            dist.barrier(group=group.handle, device_ids=device_ids)
        except RuntimeError as error:
            connections.raise_explained(error)

    # --- adaptation ------------------------------------------------------------------------------------

    def wrap_model(
        self,
        model: Module,
        sync_bn: bool = False,
        wrapper: Callable[..., Module] = torch.nn.parallel.DistributedDataParallel,
        comm_hook: Any = None,
        buffer_hook: Any = None,
        **kwargs: Any,
    ) -> Module:
        if self._world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        return wrappers.wrap_model(
            model, self.device(), self.backend(), sync_bn, wrapper, comm_hook, buffer_hook, kwargs
        )

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        if self._world_size > 1:
            wrappers.check_optimizer(optimizer)
        return optimizer

    def check_sharding(self) -> None:
        pass

    def shard_model(self, model: Module, wrap: Sequence[type[Module]], **kwargs: Any) -> Module:
        return wrappers.shard_model(model, self.device(), wrap, **kwargs)

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return wrappers.shard_optimizer(optimizer)

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        groups = {self._group_ranks(handle): handle for handle in wrappers.process_groups(model)}
        if len(groups) > 1:
            raise ValueError(
                f"The parts of the model are averaged over different ranks, {[list(one) for one in groups]}, "
                "as their process_group= says: call this for each part."
            )
        for ranks, handle in groups.items():
            return self.world() if len(ranks) == self._world_size else Group(handle, ranks)
        return self.world()

    def were_averaged(self, model: Module) -> None:
        wrappers.were_averaged(model)

    def accumulate_locally(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        return wrappers.accumulating(model)

    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        return ddp_reduction.completing(model)

    def join(
        self, model: Module, optimizer: Optimizer | None, **kwargs: Any
    ) -> AbstractContextManager[list[int]]:
        return wrappers.joined(model, optimizer, kwargs)


# --- what the context looks like ---------------------------------------------------------------------


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # a backend may have waited by itself
        connections.wait(work)


def _world() -> ProcessGroup:
    world = distributed_c10d._world.default_pg
    assert world is not None
    return world


def _connected_again(store: Any) -> Any:
    """Another connection to ``store``, if it can make one: MPI has none, and users may bring their own."""
    if store is None:
        return None
    try:
        return store.clone()
    except DistError:  # the store is gone
        raise
    except RuntimeError:  # a store written in Python does not say how
        return store


def _by_device(backends: dist.BackendConfig | str) -> dict[str, str]:
    """``"cpu:gloo,cuda:nccl"`` -> ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(part.split(":") for part in str(backends).split(","))


def _local_rank_alone() -> int | None:
    """``LOCAL_RANK``, where it is all that the environment says of a job."""
    value = os.environ.get("LOCAL_RANK", "")
    is_number = value.isdecimal() and len(value) <= 10
    return int(value) if is_number and not os.environ.get("RANK") else None


def _environment_of(rank: int, world_size: int) -> Environment | None:
    """What the environment says, if it speaks of this very world."""
    try:
        environment = environments.current()
    except EnvironmentVariablesError:
        return None  # somebody made a context without it, so it does not matter
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
        raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}.")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} must be an int, got {value!r}.")
    if init_method is None and rank is not None:
        raise ValueError(
            "rank and world_size need an init_method ('env://', 'tcp://...', 'file://...'); without one they "
            "come from the environment."
        )
    if timeout is not None:
        check_timeout("timeout", timeout)
    devices.check_devices(backend, 1)
