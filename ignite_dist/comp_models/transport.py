"""The interface that carries tensors between the ranks of a context. Every backend implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, Store

from ignite_dist.comp_models.work import Completed, Work, communicates
from ignite_dist.internals import tracing
from ignite_dist.internals.ranks import key_of_ranks
from ignite_dist.values import serialization
from ignite_dist.values.calls import NO_CALL, Call

_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
STANDARD_DTYPES = frozenset({*_INTS, torch.float16, torch.float32, torch.float64})
"""Dtypes that both torch and numpy have. Most libraries can send these dtypes."""


class Group(NamedTuple):
    """A set of ranks that take part in a collective.

    Attributes:
        handle: the backend's object for the group; None for the world.
        ranks: the global ranks of the members, ascending; empty if this rank is outside and cannot know them.
        call: the call that makes the collective.
        token: differs between the calls of this rank, and is equal for all collectives of one call; 0 if each
            collective counts as a call.
    """

    handle: Any
    ranks: tuple[int, ...]
    call: Call = NO_CALL
    token: int = 0

    def in_call(self, call: Call, token: int = 0) -> Group:
        """This group, for the collectives of ``call``."""
        return Group(self.handle, self.ranks, call, token)

    def position(self, rank: int) -> int | None:
        """Return the group rank of the global ``rank``; None if ``rank`` is not in the group."""
        found = bisect_left(self.ranks, rank)
        return found if found < len(self.ranks) and self.ranks[found] == rank else None


_NO_MESHES = (
    "This context has no meshes. A mesh needs a context of torch.distributed (gloo, NCCL, ...), also in one "
    "process: idist.initialize('gloo'). Horovod and XLA have no meshes."
)

CollectiveKind = Literal[
    "all_reduce", "reduce_exactly", "reduce_scatter", "all_gather", "all_to_all", "broadcast"
]


class Sizes(NamedTuple):
    """Numbers of elements in an all-to-all exchange, in the group's order.

    Attributes:
        sent: size of the part for each rank.
        received: size of the part from each rank.
    """

    sent: Sequence[int]
    received: Sequence[int]


class PendingCalls(NamedTuple):
    """This rank's asynchronous calls of a group that its thread has not completed.

    Attributes:
        are_there: True if there are any.
        are_awaited: True if a thread of this rank waits for one: in ``wait()``, or in a blocking call.
    """

    are_there: bool = False
    are_awaited: bool = False


class Wait(NamedTuple):
    """A rank's wait for a call: the collective or message, and the ranks that the call needs.

    Attributes:
        ranks: the ranks of the call's group; for a broadcast only the source; for a message the peer. If the
            call is not known, the ranks that are in all groups to which the call may belong.
        name: the group's name in :meth:`Transport.calls_begun`; empty for a message or an unnamed group.
        is_known: True if the call is known.
        needs_all: True if the call cannot complete on any rank before all of ``ranks`` have begun it. False
            for a gather: a rank may send its part and end its context while other parts are missing.
        is_message: True for a message between two ranks.
    """

    ranks: tuple[int, ...] = ()
    name: str = ""
    is_known: bool = False
    needs_all: bool = False
    is_message: bool = False


class Transport(ABC):
    """Collectives of contiguous tensors.

    Every rank of the group calls a primitive with a tensor of the same shape and dtype, for which
    :meth:`supports` is True. Tensors may be empty. The ranks call the primitives of one group in the same
    order, one at a time. Several threads of a rank may call primitives of different groups at the same time.
    A primitive begins the collective and returns a :class:`Work`, or :class:`Completed` if the backend can
    only block. The primitive or ``wait()`` raises ``RuntimeError`` if the backend fails or another rank ends.
    """

    groups_need_all_ranks: ClassVar[bool] = False
    """True if every rank of the world, member or not, must call the collectives of a group."""

    has_meshes: ClassVar[bool] = False
    """True if :meth:`make_mesh` makes meshes."""

    is_synchronous: ClassVar[bool] = False
    """True if every primitive returns only when the collective is complete."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tracing.untrace_class(cls)

    def overlaps(self, group: Group) -> bool:
        """True if an asynchronous collective of ``group`` may begin before earlier ones have completed.

        Then it must make progress while any thread of the rank waits for another collective, and
        :meth:`separate_group` must give another group. If False, a thread of this package runs the
        asynchronous collectives of the group one after the other. The result is the same on all ranks.
        """
        return False

    @abstractmethod
    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """True if the primitive ``kind`` accepts such a tensor. False for an unknown ``kind``.

        Called once for each combination of arguments. Unsupported dtypes are sent as a supported dtype. So
        "all_gather" and "broadcast" must support ``uint8``, on the CPU or on the device of the model.
        Reductions of ``float32``, ``float64``, ``int32`` and ``int64`` serve nearly all other dtypes.

        A reduction is supported if the result is the same as torch's: sums and products of ints wrap around,
        "AND", "OR" and "XOR" are bitwise, and "MIN" and "MAX" of floats are NaN if any rank has NaN. Most
        libraries treat NaN differently: return False, and floats are sent as ints of the same order. A
        "reduce_scatter" of narrow floats is supported if it rounds once.

        Args:
            kind: the primitive's name.
            op: "SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR" or "ADASUM"; None if ``kind`` is not
                a reduction. "AVERAGE" too for "reduce_exactly" and "reduce_scatter" of narrow floats.
            dtype: the dtype of the tensor.
            device: the device of the tensor.
        """

    @communicates
    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        """Reduce ``tensor`` in place; the result is ``tensor``, with the same bits on every rank."""

    @communicates
    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        """Reduce floats in place as ``reduce_rows`` does: with one rounding, and with NaN in MIN and MAX.

        Optional: without this method, the floats are sent as float64 or as ints. The result is ``tensor``.
        """
        raise NotImplementedError

    @communicates
    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        """``(*S) -> (group_size, *S)`` in the group's order, into the contiguous ``out`` if given."""

    @communicates
    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        """The buffers of all ranks, concatenated in the group's order.

        All buffers have the same length, at least 1 byte. Called only if "all_gather" supports ``uint8`` on
        the CPU. Override this method if the library has a faster one.
        """
        gathered = bytearray(len(group.ranks) * len(buffer))
        rows = serialization.as_tensor(gathered).view(len(group.ranks), len(buffer))
        self.all_gather(serialization.as_tensor(buffer), group, out=rows).wait()
        return gathered

    @communicates
    def fill_rows(self, rows: Sequence[Tensor], position: int, group: Group) -> None:
        """Fill each 1-d row of ``uint8`` on the CPU with the row of its rank; ``position`` is the caller's.

        The sizes of the rows differ. Called only if "all_gather" supports ``uint8`` on the CPU. Override this
        method if the library needs no padding.
        """
        padded = bytearray(max(map(len, rows)))
        serialization.as_tensor(padded)[: len(rows[position])] = rows[position]
        gathered = serialization.as_tensor(self.gather_bytes(padded, group)).view(len(rows), len(padded))
        for row, received in zip(rows, gathered, strict=True):
            row.copy_(received[: len(row)])

    @communicates
    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        """Copy the values from the global rank ``src`` into ``tensor``; the result is ``tensor``."""

    @communicates
    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        """Send a part of the 1-d ``tensor`` to each rank, and concatenate the parts for this rank in ``out``.

        The parts are in the group's order. Without ``sizes``, all parts of all ranks have the same size.
        Optional: without this method, every rank gathers the tensors of all ranks. The result is ``out``. If
        :attr:`groups_need_all_ranks`, this method is called for the group of all ranks only.
        """
        raise NotImplementedError

    @communicates
    def reduce_scatter(self, tensor: Tensor, op: str, group: Group, out: Tensor) -> Work:
        """``(group_size, *S) -> (*S)``: the rank at position ``i`` gets row ``i`` of the reduced ``tensor``.

        Optional: without this method, the ranks exchange the rows, and each rank reduces its own. The result
        is ``out``.
        """
        raise NotImplementedError

    @communicates
    @abstractmethod
    def barrier(self, group: Group) -> Work:
        """Complete when every rank of the group has called this method."""

    def count_interrupted(self, group: Group) -> None:  # noqa: B027  # optional
        """Count ``group.call`` if this rank was interrupted before the call's first step. Optional."""

    # --- groups ---

    @communicates
    @abstractmethod
    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        """A handle for the ascending global ``ranks``. Without options, only members must call this method.

        The handle must not be None. A list, a tuple (also a named tuple) or a range counts as ranks, not as a
        handle. ``ranks`` may be empty or lack this rank: then this rank calls no collective of the group.
        Called once for each list of ranks and for each ``new_group()``, also by several threads at once.

        Raises:
            TypeError: unknown options; raised before any communication.
        """

    @communicates
    def separate_group(self, group: Group) -> Work:
        """Begin to make a group of the same ranks, whose collectives have an order of their own.

        Called once per group, on each member, at the first asynchronous collective that a thread runs. This
        thread waits for the result, a :class:`Group`, and then runs the collectives in it. Meanwhile other
        threads begin collectives in ``group``. The work becomes complete without a call of ``wait()``. The
        default is for libraries where no collectives overlap.
        """
        return Completed(group)

    @abstractmethod
    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        """The global ranks of a live handle, ascending; empty if this rank is outside and does not know them.

        Raises:
            ValueError: the handle, which may be any object, is not of this transport, or was destroyed.
        """

    def is_alive(self, handle: Any) -> bool:
        """True if ``handle``, a result of :meth:`make_group`, has not been destroyed."""
        return True

    def world_handle(self) -> Any:
        """The backend's object for the group of all ranks, which users may pass as ``group=``."""
        return None

    @communicates
    def make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """A mesh of all ranks, by the names of its dimensions. Every rank calls this with the same sizes.

        A backend that has this method sets :attr:`has_meshes`.

        Raises:
            ValueError: the backend has no meshes.
        """
        raise ValueError(_NO_MESHES)

    def group_of_mesh(self, mesh: DeviceMesh, dimensions: Collection[int]) -> Any:
        """A handle or the ranks of this rank's group along ``dimensions``. Must not communicate.

        Raises:
            ValueError: the backend has no meshes, or ``mesh`` belongs to another context.
        """
        raise ValueError(_NO_MESHES)

    def group_key(self, group: Group) -> str:
        """A name of ``group`` that is equal on all of its ranks; empty for the world. Only members call this.

        Ranks use the name out of band to identify the group of a call. The default depends on the ranks only.
        If several threads use two handles of the same ranks, the names must differ, for example by a count
        of the groups of these ranks.
        """
        return "" if group.handle is None else key_of_ranks(group.ranks)

    pending_calls: Callable[[str], PendingCalls] = staticmethod(lambda group_key: PendingCalls())
    """The state of a group's asynchronous calls that a thread of this rank runs. What runs them sets this."""

    # --- called by the watchdog's thread; the defaults mean "not known" ---

    def store(self) -> Store | None:
        """A store that only the ranks of this context use, or None."""
        return None

    def shares_memory(self, group: Group) -> bool | None:
        """True if shared memory carries tensors between the ranks of ``group``; None if not known yet."""
        return False

    def num_collectives(self) -> int:
        """Number of collectives that the backend has begun, for any code; 0 if not counted."""
        return 0

    def calls_begun(self) -> dict[str, int | None]:
        """Number of calls that the backend has begun in each group of this rank; None if not counted.

        The keys are names of groups, equal on all ranks.
        """
        return {}

    def find_wait(self, frame: FrameType) -> Wait:
        """Find the call for which a thread waits.

        ``frame`` is the thread's innermost frame of a function that :func:`waits_for_ranks` marks, or of a
        module of a library in which threads wait.
        """
        return Wait()

    def is_broken(self) -> bool | None:
        """True if the backend knows that another rank is gone; None if the backend cannot tell."""
        return None

    def end_waits(self) -> None:  # noqa: B027  # optional
        """End all waits of this process for collectives: ``wait()`` raises ``RuntimeError``."""
