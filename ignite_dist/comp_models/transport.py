"""What carries tensors between the ranks of a context: the one role that every backend has to fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from types import FrameType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from ignite_dist import tracing
from ignite_dist.comp_models.work import Work
from ignite_dist.values.ranks import key_of_ranks

__all__ = ["CollectiveKind", "Group", "Transport", "WaitedFor"]


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


CollectiveKind = Literal["all_reduce", "reduce_narrow", "all_gather", "broadcast"]


class WaitedFor(NamedTuple):
    """What a rank waits for.

    Attributes:
        ranks: those of the group whose call it is; the source alone, for a broadcast; the other end, for a
            message. If the call is not known, those that are in each of the groups that it may be of.
        name: the group's in :meth:`Transport.calls_begun`; empty for a message, or if it has none.
        is_known: True if it is known which call it is.
        needs_all: True if the call needs each of ``ranks`` until it ends: one that has ended has not begun
            it. In a gather a rank that has sent its part may end while another part is waited for.
        is_message: True for a message between two ranks.
    """

    ranks: tuple[int, ...] = ()
    name: str = ""
    is_known: bool = False
    needs_all: bool = False
    is_message: bool = False


class Transport(ABC):
    """Contiguous tensors between ranks.

    A primitive is called by every rank of the group with a tensor of the same shape and dtype, on a device
    and of a dtype for which :meth:`supports` is True, by any thread; two threads of a rank call primitives of
    different groups at once. It begins the collective and returns a :class:`Work`, whose ``wait()`` gives the
    result. Where the backend can only block, it returns :class:`Completed`. Tensors may have no elements.
    A failure of the backend, also the end of another rank, is a ``RuntimeError`` from the primitive or from
    ``wait()``. The calls of one group come in the same order on all of its ranks, one at a time.
    """

    groups_need_everyone: ClassVar[bool] = False
    """True if the collectives of a group are calls that every rank of the world makes, members or not."""

    overlap: ClassVar[bool] = False
    """True if a rank may begin a collective of a group before an earlier one of that group has completed.

    What has begun has to go on at least while any thread of the rank waits for another collective. If False,
    a thread of the package waits for each one, so that it goes on while the rank computes.
    """

    is_synchronous: ClassVar[bool] = False
    """True if every primitive is complete when it returns, so that there is nothing to wait for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tracing.untrace_class(cls)

    @abstractmethod
    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """True if ``kind`` takes such a tensor as it is. False for a ``kind`` that it does not know.

        Asked once for each kind of tensor. What is not supported is sent as something that is: at least
        "all_gather" and "broadcast" of ``uint8`` on the CPU or on the device of the model. Reductions of
        ``float32``, ``float64``, ``int32`` and ``int64`` carry nearly everything else.

        A reduction is supported if it gives what torch would: sums and products of ints wrap around, "AND"
        and "OR" are those of the bits, and "MIN" and "MAX" of floats are NaN where any rank has one. For the
        last False is right in most libraries: floats then go as ints that have the same order.

        Args:
            kind: the primitive's name.
            op: "SUM", "PRODUCT", "MIN", "MAX", "AND", "OR" or "ADASUM"; None for the others.
            dtype: of the tensor.
            device: of the tensor.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        """Reduce ``tensor`` in place; the result is ``tensor``, with the same bits on every rank."""

    def reduce_narrow(self, tensor: Tensor, op: str, group: Group) -> Work:
        """Reduce narrow floats in place by "SUM", "AVERAGE" or "PRODUCT", in float64 and with one rounding.

        Optional: where it is not supported they are sent as float64. The result is ``tensor``.
        """
        raise NotImplementedError

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        """``(*S) -> (group_size, *S)`` in the group's order, into the contiguous ``out`` if there is one."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        """Fill ``tensor`` with that of the global rank ``src``; the result is ``tensor``."""

    @abstractmethod
    def barrier(self, group: Group) -> Work:
        """Complete when every rank of the group has called it."""

    # --- groups ---

    @abstractmethod
    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        """A handle for the ascending global ``ranks``. Without options only the members have to call it.

        It is any object but None, a list, a tuple (a named one too) or a range: those are ranks. ``ranks``
        may be empty, and need not have this rank in it: then no collective is made on the handle. Called once
        for a list of ranks, and for each ``new_group()``; for different ranks by several threads at once.

        Raises:
            TypeError: options that the backend does not have. Nothing was sent.
        """

    @abstractmethod
    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        """The global ranks of a live handle, ascending; empty if this rank is outside and does not know them.

        Raises:
            ValueError: the handle, which may be anything that a user gave, is not one of this transport's, or
                was destroyed by the backend's own function.
        """

    def is_alive(self, handle: Any) -> bool:
        """True if a handle that :meth:`make_group` gave has not been destroyed since."""
        return True

    def world_handle(self) -> Any:
        """What the backend calls the group of all ranks, which is a ``group=`` like any other."""
        return None

    def group_key(self, group: Group) -> str:
        """What tells ``group`` from others of the same ranks, the same on all of them; empty for the world.

        By it the ranks know, out of band, of which group a call is. Only members ask. The default knows a
        group by its ranks: not enough for two handles of the same ranks that several threads use. The number
        of groups of these ranks that were made before tells them apart.
        """
        return "" if group.handle is None else key_of_ranks(group.ranks)

    # --- for the watchdog, whose thread calls these; each default says that nothing is known ---

    def store(self) -> Store | None:
        """A store that the ranks of this context alone use, if it has one."""
        return None

    def num_collectives(self) -> int:
        """How many collectives the backend has begun, whoever asked for them; 0 if it does not count."""
        return 0

    def calls_begun(self) -> dict[str, int | None]:
        """How many calls the backend has begun in each of this rank's groups, by names equal on all ranks.

        None for a group whose calls it does not count.
        """
        return {}

    def waited_for(self, frame: FrameType) -> WaitedFor:
        """What a rank waits for whose innermost waiting frame is ``frame``.

        It is one of a function marked by :func:`waits_for_ranks`.
        """
        return WaitedFor()

    def is_broken(self) -> bool | None:
        """True if another rank of the world is gone, as far as the backend knows; None if it cannot tell."""
        return None

    def end_waits(self) -> None:  # noqa: B027  # not abstract: not every backend can
        """Let the collectives that this process waits in fail: their ``wait()`` raises ``RuntimeError``."""
