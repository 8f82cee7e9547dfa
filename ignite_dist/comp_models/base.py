"""The interface of a computation model: what differs between backends, and nothing else.

A backend implements the abstract methods over tensors. What is written here on top of them (groups given
as lists, objects as bytes, the topology of the hosts) is the same for every backend.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ignite_dist import flight_recorder, tracing
from ignite_dist.arguments import as_int, keywords_of
from ignite_dist.comp_models.topology import Topology, read_places, write_place
from ignite_dist.samplers import loader_class
from ignite_dist.values import serialization

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NO_OPTIMIZER", "ComputationModel", "Group", "WaitedFor"]

NO_OPTIMIZER = (
    "No optimizer of auto_optim has parameters of this model, and with this backend it is the optimizer that "
    "averages the gradients: call auto_optim first."
)

# What a graph of torch.compile may hold of a model: getters, which read what guards look at again.
_TRACED = frozenset(
    {"is_current", "is_current_by_guards", "get_rank", "get_world_size", "device", "backend", "_topology"}
    | {"get_local_rank", "get_nproc_per_node", "get_nnodes", "get_node_rank"}
    | {"known_local_rank", "known_topology"}
)


_INTS = frozenset({int})


class Group(NamedTuple):
    """A set of ranks that take part in a collective.

    Attributes:
        handle: what the backend calls it; None is the whole world.
        ranks: its global ranks, ascending. Empty if the handle says only that this rank is outside.
    """

    handle: Any
    ranks: tuple[int, ...]

    def position(self, rank: int) -> int | None:
        """Where the global ``rank`` stands in the group, None if it is outside; by bisection."""
        found = bisect_left(self.ranks, rank)
        return found if found < len(self.ranks) and self.ranks[found] == rank else None


class _FirstUse:
    """A lock, and the thread that has it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may come between the lock and the line after it
        self.thread: int | None = None


class WaitedFor(NamedTuple):
    """What a rank waits for.

    Attributes:
        ranks: those of the group whose call it is; the source alone, for a broadcast; the other end, for a
            message. If the call is not known, those that are in each of the groups that it may be of.
        name: the group's in :meth:`ComputationModel.calls_begun`; empty for a message, or if it has none.
        is_known: whether it is known which call it is.
        needs_all: whether the call needs each of ``ranks`` until it ends: one that has ended has not begun
            it. In a gather a rank that has sent its part may end while another part is waited for.
        is_message: whether it is a message between two ranks.
    """

    ranks: tuple[int, ...] = ()
    name: str = ""
    is_known: bool = False
    needs_all: bool = False
    is_message: bool = False


class ComputationModel(ABC):
    """One way to run several processes together.

    An instance stands for one live context: a process group, Horovod between ``init`` and ``shutdown``, the
    XLA runtime. It is made by :meth:`create_from_context` when somebody else made the context, or by
    :meth:`create_from_backend`.

    A third party's backend is a subclass under ``@register_computation_model``, or one named by the
    entry-point group ``ignite_dist.computation_models``.
    """

    name: ClassVar[str]
    """What ``model_name()`` returns: ``"native-dist"``, for example."""

    available_backends: ClassVar[tuple[str, ...]]
    """The backends that this installation can run, by the names that ``initialize`` takes."""

    library: ClassVar[str]
    """The module that makes this model's contexts; they are looked for only after its import."""

    averages_gradients: ClassVar[bool] = False
    """Whether what :meth:`wrap_model` or :meth:`wrap_optimizer` gives averages the gradients of all ranks.
    Where it does not, ``auto_optim`` sees to it with the collectives below."""

    averages_in_backward: ClassVar[bool] = False
    """Whether the backward pass leaves averaged gradients behind, by what :meth:`wrap_model` gives. Elsewhere
    the step averages them."""

    groups_need_everyone: ClassVar[bool] = False
    """Whether a group's collectives are calls that every rank of the world makes, members or not."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tracing.untrace_class(cls, _TRACED)

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        self._undo = undo
        self._groups: dict[tuple[int, ...], Group] = {}
        self._first_uses: dict[Hashable, _FirstUse] = {}
        self._everyone: Group | None = None
        self.plans: dict[
            Any, Any
        ] = {}  # what the collectives have worked out from carries(), by their own keys
        self.optimizers: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()  # auto_optim's, by id
        self.is_joining = False  # inside of join()
        self.recorder = flight_recorder.for_new_context()  # None: nobody keeps the calls
        self.watching: flight_recorder.Recorder | None = None  # of the watchdog, which may keep no calls
        self._found_topology: Topology | None = None
        self._found_node_ranks: dict[int, int] | None = None

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def create_from_context(cls) -> Self | None:
        """A model of the live context, or None. Called often: must not communicate nor import anything."""

    @classmethod
    @abstractmethod
    def create_from_backend(cls, backend: str, **kwargs: Any) -> Self:
        """Make a context and its model. Every rank calls it; returns when all have."""

    @classmethod
    @abstractmethod
    def spawn(cls, entry: Callable[[int], Any], *, backend: str, nproc_per_node: int, **kwargs: Any) -> Any:
        """Start ``nproc_per_node`` workers here, each of which calls ``entry(local_rank)``.

        ``entry`` makes the context in the worker and ends it; it can be pickled. Returns the list of the
        results by local rank, or a handle with ``join()`` where ``join=False`` was asked for.
        """

    @classmethod
    def spawn_keywords(cls) -> set[str]:
        """The keywords of :meth:`spawn` that are the user's to give."""
        return keywords_of(cls.spawn) - {"backend", "nproc_per_node"}

    @classmethod  # noqa: B027  # not abstract: most models can start what they are given
    def check_spawn(cls, *, nproc_per_node: int, **kwargs: Any) -> None:
        """Refuse, before anything is started, what :meth:`spawn` would; ``Parallel`` asks when it is made.

        Raises:
            ValueError: the arguments do not go together.
        """

    @classmethod
    def can_run(cls, backend: str) -> bool:
        """Whether ``backend`` is one of this model's and can run here."""
        return backend in cls.available_backends

    @classmethod
    def how_to_get(cls, backend: str) -> str | None:
        """Why ``backend``, one of this model's, cannot run here, and what to do; None for the others."""
        return None

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the context that made this model is still the live one. Called by every facade function."""

    def is_current_by_guards(self) -> bool:
        """Whether guards of ``torch.compile`` can tell that this context is the live one, and it is.

        Traced: what is read here of Python's objects is looked at again at each call of a compiled function.
        """
        return False

    def gives_way_to(self, model: type[ComputationModel]) -> bool:
        """Whether ``initialize`` may make a context of ``model`` although this one is live."""
        return False

    def runs(self, backend: str) -> bool:
        """Whether this context is what ``initialize(backend)`` would make."""
        return backend == self.backend()

    @abstractmethod
    def finalize(self) -> None:
        """End the context after success. Every rank calls it."""

    @abstractmethod
    def abort(self) -> None:
        """End the context after a failure on this rank. Waits for nobody."""

    def meet_at_end(self) -> None:
        """Wait until all ranks have come to the end of the context, if a watchdog can tell; then finalize().

        Raises:
            RankFailedError: another rank waits in a collective that this one has not made.
        """
        watchdog = self.watching.watchdog if self.watching is not None else None
        if watchdog is not None and self.get_world_size() > 1:
            watchdog.meet_at_end(self.get_rank())

    def forget_first_uses(self) -> None:
        """In a forked child the thread that was in one of them is not there to end it."""
        self._first_uses.clear()

    def stop_watching(self) -> None:
        """End the watchdog of this context."""
        for one in (self.recorder, self.watching):
            if one is not None:
                one.close()

    def left_behind(self) -> None:
        """The context has ended, whoever ended it: take back what this model did to the process for it."""
        self.stop_watching()
        self._groups.clear()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def context_mark(self) -> object | None:
        """What stands for this context, and for no other; None where a forked child may go on with it."""
        return None

    @classmethod
    def keep_through_fork(cls) -> object | None:
        """The :meth:`context_mark` of the context that this forked child has inherited, if there is one.

        Called in the child, where the context's threads are not. Nothing that the child does at its end may
        wait for them, nor end the parent's context.
        """
        return None

    def store(self) -> Store | None:
        """A key-value store of all ranks, beside the collectives, if the backend has one."""
        return None

    def side_store(self) -> Store | None:
        """A store where the ranks of this context alone tell each other where they are, if it brings one.

        Not where the context is somebody else's, who may have used the store for another one before.
        """
        return None

    def num_collectives(self) -> int:
        """How many collectives the backend has begun, whoever asked for them; 0 where it does not count."""
        return 0

    def calls_begun(self) -> dict[str, int | None]:
        """How many calls the backend has begun in each of this rank's groups, by names equal on all ranks.

        None for a group whose calls it does not count.
        """
        return {}

    def waited_for(self, frame: FrameType) -> WaitedFor:
        """What a rank waits for whose innermost waiting frame is ``frame``. Called in another thread."""
        return WaitedFor()

    def is_broken(self) -> bool | None:
        """Whether another rank of the world is gone, as far as the backend knows; None if it cannot tell."""
        return None

    def end_waits(self) -> None:  # noqa: B027  # not abstract: not every backend can
        """Let the collectives that this process waits in fail. Called in another thread."""

    # --- identity: local, never communicates ---------------------------------------------------------

    @abstractmethod
    def get_rank(self) -> int:
        """Rank of the caller, in [0, world_size)."""

    @abstractmethod
    def get_world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device of the caller."""

    @abstractmethod
    def backend(self) -> str | None:
        """The backend's name, one of those that ``initialize`` takes."""

    def ranks_in_process(self) -> int:
        """How many ranks this process runs; more than one where ranks are threads."""
        return 1

    # --- topology: the first call may need one exchange, which every rank then makes -------------------

    def get_local_rank(self) -> int:
        """Rank of the caller on its node."""
        return self._topology().local_rank

    def get_nproc_per_node(self) -> int:
        """Number of ranks on the caller's node."""
        return self._topology().nproc_per_node

    def get_nnodes(self) -> int:
        """Number of nodes."""
        return self._topology().nnodes

    def get_node_rank(self) -> int:
        """Rank of the caller's node, in [0, nnodes)."""
        return self._topology().node_rank

    def known_local_rank(self) -> int | None:
        """The local rank if it is known without asking anybody."""
        return self._found_topology.local_rank if self._found_topology else None

    def known_topology(self) -> Topology | None:
        """The topology if it is known without asking anybody."""
        return self._found_topology

    def set_local_rank(self, local_rank: int) -> None:  # noqa: B027  # not abstract: most models know it
        """What ``idist.set_local_rank`` was told. Models that know better ignore it."""

    def node_ranks(self) -> dict[int, int]:
        """The global ranks on this node, by local rank. The first call may be an exchange."""
        self._topology()
        if self._found_node_ranks is None:  # the environment has said where this rank is, and no more
            with self._first_use("the ranks on this node", self.get_rank()):
                if self._found_node_ranks is None:
                    self._exchange_places(f"node {self.get_node_rank()}", self.get_local_rank())
        assert self._found_node_ranks is not None
        return self._found_node_ranks

    def _topology(self) -> Topology:
        found = self.known_topology()
        if found is None:
            with self._first_use("the topology", self.get_rank()):
                found = self.known_topology()
                if found is None:
                    found = self._exchange_places(socket.gethostname(), self.known_local_rank())
                    self._found_topology = found
        return found

    def _exchange_places(self, node: str, local_rank: int | None) -> Topology:
        """The topology by what each rank says of its place. A call that every rank of the world makes."""
        gathered = self.gather_bytes(write_place(node, local_rank), self.world())
        found, self._found_node_ranks = Topology.from_places(self.get_rank(), read_places(gathered))
        return found

    # --- groups --------------------------------------------------------------------------------------

    @abstractmethod
    def _new_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        """A handle for the ascending global ``ranks``. Without options only the members have to call it.

        There may be none: then it is any handle but None, on which no collective is made.
        """

    @abstractmethod
    def _group_ranks(self, handle: Any) -> tuple[int, ...]:
        """The global ranks of a live handle, ascending; empty if this rank is outside.

        Raises:
            ValueError: the handle is not one of this model's, or was destroyed.
        """

    def _is_alive(self, handle: Any) -> bool:
        """Whether a handle that ``_new_group`` gave has not been destroyed since."""
        return True

    def group_key(self, group: Group) -> str:
        """What tells ``group`` from others of the same ranks, the same on all of them; empty for the world.

        By it the ranks know, beside the collectives, of which group a call is. Only members ask.
        """
        return "" if group.handle is None else flight_recorder.key_of_ranks(group.ranks)

    def world(self) -> Group:
        """The group of all ranks."""
        if self._everyone is None:
            self._everyone = Group(None, tuple(range(self.get_world_size())))
        return self._everyone

    def check_not_joining(self) -> None:
        """Refuse, inside of ``join()``, what every rank would have to call.

        Raises:
            RuntimeError: says where it can be called.
        """
        if self.is_joining:
            raise RuntimeError(
                "In join() ranks make different numbers of steps, so a collective would wait for ranks "
                "that have left. Make it after the block."
            )

    def world_handle(self) -> Any:
        """What the backend calls the group of all ranks, which is a ``group=`` like any other."""
        return self.world().ranks

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        """A new handle for ``ranks``, which a list of the same ranks finds again if it has no options."""
        checked = self._check_ranks(ranks)
        handle = self._new_group(checked, **options)
        if not options:
            self._groups[checked] = Group(handle, checked)
        return handle

    def resolve_group(self, group: Any) -> Group:
        """The group that a collective's ``group=`` means: None, a handle, or a list of global ranks.

        Raises:
            ValueError: a rank out of range or given twice, a handle that was destroyed, or no group at all.
            RuntimeError: inside of ``join()``.
        """
        self.check_not_joining()
        if group is None:
            return self.world()
        if not isinstance(group, (list, tuple, range)):
            return Group(group, self._group_ranks(group))
        key = tuple(group)
        if not _INTS.issuperset(map(type, key)):  # a float or a bool that is equal to a rank would be found
            key = self._check_ranks(key)
        found = self._groups.get(key)
        if found is not None and (found.handle is None or self._is_alive(found.handle)):
            return found
        checked = self._check_ranks(key)
        if checked != key:  # only the ascending ranks are kept: one group, whoever names it first and how
            return self.resolve_group(checked)
        if len(checked) == self.get_world_size():
            self._groups[key] = self.world()
            return self.world()
        with self._first_use("the group", key):
            made = self._groups.get(key)
            if made is None or made is found:  # else another thread has made it meanwhile
                made = self._groups[key] = Group(self._new_group(checked), checked)
            return made

    @contextmanager
    def _first_use(self, what: str, key: Hashable) -> Iterator[None]:
        """Let one thread of a rank do what its other threads, which wait here meanwhile, then find done.

        It may wait for other ranks, so nobody waits here but for the same ``what`` and ``key``.

        Raises:
            RuntimeError: the thread is doing it already: this call comes from a signal handler or ``__del__``
                that has interrupted it, and would have to wait for what it has interrupted.
        """
        use = self._first_uses.setdefault((what, key), _FirstUse())
        if use.thread == threading.get_ident():
            raise RuntimeError(
                f"This call, of a signal handler or __del__, has interrupted the first use of {what} "
                f"{list(key) if isinstance(key, tuple) else ''}, and needs it too. Use it once before the "
                "handler may run."
            )
        with use.lock:
            use.thread = threading.get_ident()
            try:
                yield
            finally:
                use.thread = None

    def _check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        world_size = self.get_world_size()
        try:
            plain = [as_int(rank) for rank in ranks]
        except TypeError:  # nothing to iterate over
            plain = [None]
        if not _INTS.issuperset(map(type, plain)):
            raise ValueError(f"Ranks of a group are a list of ints, got {ranks!r}.")
        checked = tuple(sorted(plain))
        if not checked:
            return checked
        if len(set(checked)) != len(checked) or checked[0] < 0 or checked[-1] >= world_size:
            raise ValueError(
                f"Ranks of a group are distinct and in [0, {world_size}), the world size; got {list(ranks)}."
            )
        return checked

    # --- for the watchdog ------------------------------------------------------------------------------

    def announce(self, operation: str, group: Group, value: Any = "", op: str = "") -> None:
        """Note the collective that comes next, and compare it with those of the others, where that is wanted.

        Args:
            operation: the public function.
            group: whose call it is. A rank outside notes nothing.
            value: a tensor, or the leaves of a tree, that have to be alike on all ranks; or words.
            op: what else has to be the same.

        Raises:
            CollectiveMismatchError: the ranks are about to make different calls; raised on all of them.
        """
        if self.recorder is None:
            return
        rank, is_world = self.get_rank(), group.handle is None
        if not is_world and group.position(rank) is None and not self.groups_need_everyone:
            return
        key = self.group_key(group)
        call = self.recorder.record(rank, operation, group.ranks if key else (), value, op, key)
        if len(group.ranks) > 1:
            self.recorder.compare(rank, call, group.ranks, lambda sent: self.gather_objects(sent, group))

    # --- tensor primitives: contiguous, of a dtype and on a device for which carries() is true ----------

    @abstractmethod
    def carries(self, collective: str, op: str | None, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether ``collective`` ("all_reduce", "all_gather" or "broadcast") takes such a tensor as it is."""

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        """Reduce in place and return ``tensor``."""

    def rounds_once(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether :meth:`_reduce_narrow` takes such tensors; the others are sent as float64."""
        return False

    def _reduce_narrow(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        """Reduce narrow floats in place by "SUM", "AVERAGE" or "PRODUCT", in float64 and with one rounding.

        Every rank gets the same bits.
        """
        raise NotImplementedError

    @abstractmethod
    def _all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
        """``(*S) -> (group_size, *S)``, into the contiguous ``out`` of that shape if there is one."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, group: Group) -> Tensor:
        """In place, and returned. ``src`` is a global rank."""

    @abstractmethod
    def _barrier(self, group: Group) -> None:
        """Return when every rank of the group has come."""

    # --- objects, as bytes over the tensor primitives ---------------------------------------------------

    def gather_objects(self, value: Any, group: Group) -> list[Any]:
        """``value`` of every rank in the group's order. One collective where all fit the header, else two.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: after ``safe_objects()``, what a rank sent could run code. On every rank of the
                group, because all of them get it; nothing has run, and the group is as usable as before.
            CollectiveMismatchError: a rank made another call.
        """
        payload = serialization.pack(value)
        width = serialization.HEADER_BYTES
        gathered = memoryview(self.gather_bytes(serialization.write_header(payload), group))
        headers = [
            serialization.read_header(gathered[width * row : width * (row + 1)], rank)
            for row, rank in enumerate(group.ranks)
        ]
        if all(inline is not None for _, inline in headers):
            return [
                serialization.unpack(inline, rank)
                for (_, inline), rank in zip(headers, group.ranks, strict=True)
                if inline is not None
            ]
        width = max(size for size, _ in headers)
        padded = bytearray(width)
        own = payload[:width]  # a rank outside may have more than any member, and nobody looks at it
        padded[: len(own)] = own
        rows = memoryview(self.gather_bytes(padded, group))
        return [
            serialization.unpack(rows[width * row : width * row + size], rank)
            for row, ((size, _), rank) in enumerate(zip(headers, group.ranks, strict=True))
        ]

    def broadcast_object(self, value: Any, src: int, group: Group) -> Any:
        """``value`` of the global rank ``src`` on every rank of the group. One collective or two, as above.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: as above, on every rank.
            CollectiveMismatchError: ``src`` made another call.
        """
        payload = serialization.pack(value) if self.get_rank() == src else b""
        return serialization.unpack(self.broadcast_bytes(payload, src, group), src)

    def broadcast_bytes(self, payload: bytes, src: int, group: Group) -> bytes | memoryview:
        """``payload`` of the global rank ``src``; what the others give is not looked at."""
        is_src = self.get_rank() == src
        header = serialization.write_header(payload) if is_src else bytearray(serialization.HEADER_BYTES)
        size, inline = serialization.read_header(memoryview(self._broadcast_buffer(header, src, group)), src)
        if inline is not None:
            return inline
        return memoryview(
            self._broadcast_buffer(bytearray(payload) if is_src else bytearray(size), src, group)
        )

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        """``buffer``, of the same length on every rank, from all ranks of the group in its order."""
        device = self._bytes_device()
        gathered = bytearray(len(group.ranks) * len(buffer))
        rows = serialization.as_tensor(gathered).view(len(group.ranks), len(buffer))
        if device.type == "cpu":
            self._all_gather(serialization.as_tensor(buffer), group, out=rows)
        else:
            rows.copy_(self._all_gather(serialization.as_tensor(buffer).to(device), group))
        return gathered

    def _broadcast_buffer(self, buffer: bytearray, src: int, group: Group) -> bytearray:
        device = self._bytes_device()
        tensor = serialization.as_tensor(buffer)
        if device.type == "cpu":
            self._broadcast(tensor, src, group)
        else:
            tensor.copy_(self._broadcast(tensor.to(device), src, group))
        return buffer

    def _bytes_device(self) -> torch.device:
        cpu = torch.device("cpu")
        return cpu if self.carries("all_gather", None, torch.uint8, cpu) else self.device()

    # --- adaptation: identity unless a backend needs something -------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed torch on the CPU and on this rank's devices."""
        torch.manual_seed(seed)

    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        """``model``, which is on :meth:`device` already, ready for this context."""
        return model

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        """``optimizer``, ready for this context."""
        return optimizer

    def check_sharding(self) -> None:
        """Refuse :meth:`shard_model` where there is none, before anything is sent."""
        raise ValueError(
            f"strategy='fsdp' is torch.distributed's, and this backend is {self.backend()!r}: leave it out."
        )

    def shard_model(self, model: Module, wrap: Sequence[type[Module]], **kwargs: Any) -> Module:
        """``model`` with its parameters, equal on all ranks, sharded over them."""
        return model

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer as ``optimizer``, with its state sharded over the ranks."""
        raise ValueError(
            f"zero=True is torch.distributed's, and this backend is {self.backend()!r}: leave it out."
        )

    def join(
        self, model: Module, optimizer: Optimizer | None, **kwargs: Any
    ) -> AbstractContextManager[list[int]]:
        """In the block ranks may make different numbers of steps.

        It gives a list which after the block holds the rank whose parameters the others take, unless they
        have them already.
        """
        raise ValueError(
            f"join() is not there for backend {self.backend()!r}, where every rank has to take part in every "
            "step. Give every rank as many batches, or stop all ranks together: any_true(...)."
        )

    def accumulate_locally(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """Backward passes in the block leave the gradients as each rank's own, to be averaged after it.

        Args:
            model: what :meth:`wrap_model` gave, or what contains it.
            optimizers: those of :meth:`wrap_optimizer` that have its parameters.
        """
        return nullcontext()

    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """After the block the gradients of ``model`` are averaged, where backward passes do that.

        Backward passes in the block average them. At its end this rank takes part in what it has left out:
        the whole reduction of a rank without a backward pass, or that of the parameters it has not used.
        Arguments as above.
        """
        return nullcontext()

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        """The ranks over which the gradients of ``model`` are averaged. Arguments as above.

        Raises:
            ValueError: its parts are averaged over different ranks.
        """
        return self.world()

    def check_forced(self, model: Module, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027
        """Refuse what an average over all ranks, apart from backward pass and step, would not get right."""

    def were_averaged(self, model: Module) -> None:  # noqa: B027  # not abstract: see above
        """Note that the gradients of ``model`` have been averaged apart from its backward passes."""

    def reduce_gradients(self, optimizer: Optimizer) -> None:  # noqa: B027  # not abstract: see above
        """Average now what a step of ``optimizer``, of :meth:`wrap_optimizer`, would average."""

    def computes_lazily(self) -> bool:
        """Whether tensors are computed only when Python looks at them, so that it should not in each step."""
        return False

    def make_dataloader(self, dataset: Dataset[Any], **kwargs: Any) -> Any:
        """The loader of this rank's share of ``dataset``, which ``kwargs`` say."""
        return loader_class(dataset, kwargs.get("sampler"))(dataset, **kwargs)


tracing.untrace_class(ComputationModel, _TRACED)
