"""The interface of a backend: a computation model, a transport, and optionally training and a launcher.

A backend implements the abstract methods of :class:`ComputationModel` and of
:class:`~ignite_dist.comp_models.transport.Transport`. All other features have defaults that use only these
methods: groups given as lists, objects, any dtype and memory layout, numbers, trees, gradients and topology.
A backend imports all names that it needs from this module. Example: ``examples/mpi4py_backend.py``.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakMethod

import torch

from ignite_dist.comp_models.groups import Groups
from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.comp_models.objects import Objects
from ignite_dist.comp_models.topology import Topology, decode_places, encode_place
from ignite_dist.comp_models.training import Training
from ignite_dist.comp_models.transport import CollectiveKind, Group, Transport, Wait
from ignite_dist.comp_models.work import Completed, Steps, Work, waits_for_ranks
from ignite_dist.environments import devices
from ignite_dist.internals import tracing
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.values.calls import Call, own_token

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CollectiveKind",
    "Completed",
    "ComputationModel",
    "Group",
    "Launcher",
    "ProcessModel",
    "Steps",
    "Topology",
    "Training",
    "Transport",
    "Wait",
    "Work",
    "waits_for_ranks",
    "weak_method",
]


_Result = TypeVar("_Result")

_PLACES = Call("the exchange of the ranks' machines")

# Getters that torch.compile may trace: its guards check the attributes that these methods read.
_TRACED = frozenset(
    {"is_current", "is_current_by_guards", "get_rank", "get_world_size", "device", "backend"}
    | {"get_local_rank", "get_nproc_per_node", "get_nnodes", "get_node_rank"}
    | {"known_local_rank", "known_topology", "find_topology"}
)


def weak_method(method: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return ``method`` with only a weak reference to its computation model, for objects that the model owns.

    A strong reference would make a cycle. If the garbage collector of a forked child freed the cycle, the
    destructor of the parent's process group would wait for threads that the child does not have.
    """
    found = WeakMethod(method)

    def call() -> _Result:
        bound = found()
        assert bound is not None
        return bound()

    return call


class ComputationModel(ABC):
    """One live context of one backend.

    A third-party backend is a subclass that ``@register_computation_model`` or an entry point of the group
    ``ignite_dist.computation_models`` registers.

    Args:
        transport: carries tensors between the ranks.
        undo: reverts the changes of :meth:`open` to the process; called once, when the context has ended.
    """

    name: ClassVar[str]
    """The result of ``model_name()``, for example ``"native-dist"``."""

    library: ClassVar[str]
    """The module that makes this backend's contexts. :meth:`find` is called only after its import."""

    available_backends: ClassVar[tuple[str, ...]]
    """The backends that this installation can run, by the names that ``initialize`` takes."""

    launcher: ClassVar[type[Launcher]] = Launcher

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tracing.untrace_class(cls, _TRACED)

    def __init__(self, transport: Transport, undo: Callable[[], None] | None = None) -> None:
        self._undo = undo
        self.transport = transport
        self.groups = Groups(transport, self.get_world_size())
        self.objects = Objects(transport, weak_method(self.get_rank), weak_method(self.device))
        self.training = Training(self)
        self._found_topology: Topology | None = None
        self._found_node_ranks: dict[int, int] | None = None

    # --- contexts ---

    @classmethod
    def can_run(cls, backend: str) -> bool:
        """True if ``backend`` belongs to this model and this installation can run it."""
        return backend in cls.available_backends

    @classmethod
    def unavailable_reason(cls, backend: str) -> str | None:
        """The reason why ``backend`` cannot run, and the remedy; None for a backend of another model."""
        return None

    @classmethod
    @abstractmethod
    def find(cls) -> Self | None:
        """A model of the live context, whichever code has made it; None if no context is live. Called often.

        This method must not communicate or import anything; :attr:`library` has been imported. An imported
        or initialized library is not a context yet: return None until code has requested a context.
        """

    @classmethod
    @abstractmethod
    def open(cls, backend: str, **options: Any) -> Self:
        """Make a context and its model. Returns when all ranks have called this method.

        ``options`` are the keywords of ``initialize``. A backend declares each of its options as a
        keyword-only parameter, without ``**options``; ``Parallel`` reads these parameters too. A process may
        make several contexts, one after another.

        Raises:
            TypeError, ValueError: options that are unknown or incompatible; raised before any communication.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """True if this model's context is still live. Every call of the package checks this.

        False after :meth:`close` and :meth:`abort`.
        """

    def is_current_by_guards(self) -> bool:
        """True if this context is live, and guards of ``torch.compile`` can check this.

        torch.compile traces this method: each Python attribute read here is checked again at each call of a
        compiled function.
        """
        return False

    def can_be_replaced_by(self, model: type[ComputationModel]) -> bool:
        """True if ``initialize`` may make a context of ``model`` while this context is live."""
        return False

    def runs(self, backend: str) -> bool:
        """True if this context is the kind of context that ``initialize(backend)`` makes."""
        return backend == self.backend()

    @abstractmethod
    def close(self) -> None:
        """End the context after success. Called after :meth:`meet_at_end` and before :meth:`forget`."""

    @abstractmethod
    def abort(self) -> None:
        """End the context after a failure on this rank, without waiting. Called before :meth:`forget`.

        Other ranks may be waiting for this rank in a collective. Either the backend ends these waits, or its
        launcher ends the job when this process exits. So this process must not wait for other ranks at exit.
        """

    def forget(self) -> None:
        """Revert this backend's changes to the process. Called after any code has ended the context."""
        self.groups.forget()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    finds_early_ends: ClassVar[bool] = False
    """True if :meth:`meet_at_end` itself detects that a rank ends while other ranks wait in a collective."""

    def meet_at_end(self) -> None:
        """Return when all ranks have reached the end of the context; warn if a rank has exited earlier."""
        try:
            # A rank must not close its connections while another rank still waits for its data.
            self.transport.barrier(self.groups.world).wait()
        except RuntimeError as error:
            warn_user(f"Not every rank reached finalize(): {error}")

    def context_mark(self) -> object | None:
        """Return an object that identifies this context; None if a forked child may use the context.

        The object is compared by identity. ``self`` is enough if each context has one model.
        """
        return None

    @classmethod
    def prepare_forked_child(cls) -> object | None:
        """Prepare this forked child for its exit. Return the :meth:`context_mark` of the inherited context.

        Called in the child, which has none of the context's threads. At its exit the child must neither wait
        for these threads nor end the parent's context. Returns None if no context was inherited.
        """
        return None

    # --- identity: local, never communicates ---

    @abstractmethod
    def get_rank(self) -> int:
        """Rank of the caller, in [0, world_size)."""

    @abstractmethod
    def get_world_size(self) -> int:
        """Number of ranks. ``__init__`` of this class calls this method: subclasses set the number first."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device of the caller."""

    @abstractmethod
    def backend(self) -> str | None:
        """The backend's name, as in ``initialize(backend)``."""

    def ranks_in_process(self) -> int:
        """Number of ranks in this process; more than 1 if ranks are threads."""
        return 1

    # --- topology: local; if known_topology() returns None, all ranks exchange their places once ---

    def known_topology(self) -> Topology | None:
        """The topology if it is known without communication."""
        return self._found_topology

    def known_local_rank(self) -> int | None:
        """The local rank if it is known without communication."""
        return self._found_topology.local_rank if self._found_topology else None

    def set_local_rank(self, local_rank: int) -> None:  # noqa: B027  # optional
        """Set the local rank, for ``idist.set_local_rank``. Ignored by backends that know the local rank."""

    def get_local_rank(self) -> int:
        """Rank of the caller on its node."""
        return self.find_topology().local_rank

    def get_nproc_per_node(self) -> int:
        """Number of ranks on the caller's node."""
        return self.find_topology().nproc_per_node

    def get_nnodes(self) -> int:
        """Number of nodes."""
        return self.find_topology().nnodes

    def get_node_rank(self) -> int:
        """Rank of the caller's node, in [0, nnodes)."""
        return self.find_topology().node_rank

    def find_topology(self) -> Topology:
        """The topology. The first call may communicate, so all ranks make it, for example in :meth:`open`."""
        found = self.known_topology()
        if found is None:
            with self.groups.once("the topology", self.get_rank()):
                found = self.known_topology()
                if found is None:
                    found = self._exchange_places(socket.gethostname(), self.known_local_rank())
                    self._found_topology = found
        return found

    def node_ranks(self) -> dict[int, int]:
        """The ranks on this node, by local rank. The first call may communicate, so all ranks make it."""
        self.find_topology()
        if self._found_node_ranks is None:  # the environment describes this rank only
            with self.groups.once("the ranks on this node", self.get_rank()):
                if self._found_node_ranks is None:
                    self._exchange_places(f"node {self.get_node_rank()}", self.get_local_rank())
        assert self._found_node_ranks is not None
        return self._found_node_ranks

    def _exchange_places(self, node: str, local_rank: int | None) -> Topology:
        group = self.groups.world.in_call(_PLACES, own_token())
        gathered = self.objects.gather_bytes(encode_place(node, local_rank), group)
        found, self._found_node_ranks = Topology.from_places(self.get_rank(), decode_places(gathered))
        return found


class ProcessModel(ComputationModel):
    """A backend whose ranks are processes. Subclasses set the attributes before ``super().__init__()``."""

    _rank: int
    _world_size: int
    _fixed_device: torch.device | None
    """The rank's device; None if it is the current accelerator of the calling thread."""

    def get_rank(self) -> int:  # noqa: D102
        return self._rank

    def get_world_size(self) -> int:  # noqa: D102
        return self._world_size

    def device(self) -> torch.device:  # noqa: D102
        fixed = self._fixed_device
        return fixed if fixed is not None else devices.current_accelerator()


tracing.untrace_class(ComputationModel, _TRACED)
