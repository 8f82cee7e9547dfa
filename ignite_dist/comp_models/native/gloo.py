"""What gloo does faster by other means than its own collectives, for tensors on the CPU.

gloo gathers in a ring of ``group_size - 1`` steps and reduces in a ring of twice as many. Below some size the
steps are what it costs, and above it the copies are; ``benchmarks/one_round.py`` measures both.

And what it would leave undone: its threads let go of a collective's tensors after the caller has gone on, and
need the interpreter for that. In a process that ends meanwhile with its context open, one of them aborts it:
in raw torch 2.13, 3 of 24 processes whose last statement was a collective. So they are waited for at exit.
https://github.com/pytorch/pytorch/issues/190489
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, Work
from torch.distributed.distributed_c10d import AllToAllOptions

from ignite_dist.values.reduce_ops import reduce_rows

__all__ = [
    "ScratchBuffers",
    "exchange",
    "forget_lent",
    "from_root",
    "in_one_round",
    "lend",
    "stream",
    "tidy_at_exit",
]

# An all-to-all exchange is one step. Up to this size over all ranks it beats both rings, by 2 to 5 times.
_ONE_ROUND_BYTES = 1 << 20
# Where every rank broadcasts into everybody's result at once, gloo keeps no copy. Tried with 8 ranks.
_MAX_STREAMS = 32
# Up to this size allocating what is exchanged costs more than the exchange of it.
_SCRATCH_BYTES = 8 << 10
_MAX_LAYOUTS = 64
# Of each layout: as many as there are calls at once.
_MAX_FREE = 16

_EXCHANGE = AllToAllOptions()  # gloo only reads it, so calls share it

# What is sent, what is received, and the rows of the latter.
_Buffer = tuple[Tensor, Tensor, tuple[Tensor, ...]]

# Tensors that gloo's threads may still reference. Older ones have been released.
_lent: deque[weakref.ref[Tensor]] = deque(maxlen=4 * _MAX_STREAMS)
_POLL_SECONDS = 1e-4
# A busy machine may take as long to give each thread a turn; a thread that is stuck is not waited for.
_TIDY_SECONDS = 0.5


def tidy_at_exit() -> None:
    """When the process ends, wait until gloo's threads have let go of all that they were lent."""
    atexit.unregister(_tidy)  # of an earlier context: once is enough
    atexit.register(_tidy)


def _tidy() -> None:
    until = time.monotonic() + _TIDY_SECONDS
    while _holds_some() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # which gives them the interpreter


def _holds_some() -> bool:
    try:
        return any(lent() is not None for lent in tuple(_lent))
    except RuntimeError:  # a daemon thread goes on and has lent another one meanwhile
        return True


def forget_lent() -> None:
    """In a forked child, where gloo's threads are not."""
    _lent.clear()


def lend(tensor: Tensor) -> Tensor:
    """What gloo gets in place of ``tensor``: an object of its own, with the same memory."""
    lent = tensor.detach()
    _lent.append(weakref.ref(lent))
    return lent


def in_one_round(nbytes: int, group_size: int) -> bool:
    """Whether ``nbytes`` from each rank go to all others in one step."""
    return nbytes * group_size <= _ONE_ROUND_BYTES


def exchange(group: ProcessGroup, sent: Tensor, received: Tensor) -> Work:
    """Row ``i`` of ``sent`` goes to rank ``i``, whose row for this rank comes into ``received``."""
    return group.alltoall_base(lend(received), lend(sent), [], [], _EXCHANGE)


def stream(group: ProcessGroup, rows: Tensor) -> list[Work] | None:
    """Fill ``rows``, this rank's own being there, from all ranks at once; None if they are too many."""
    if len(rows) > _MAX_STREAMS:
        return None
    return [group.broadcast([lend(row)], from_root(root, True)) for root, row in enumerate(rows.unbind())]


@lru_cache(maxsize=4 * _MAX_STREAMS)
def from_root(root: int, is_async: bool) -> BroadcastOptions:
    """The options of a broadcast from the rank at ``root`` in the group; read only."""
    options = BroadcastOptions()
    options.rootRank = root
    options.asyncOp = is_async
    return options


class ScratchBuffers:
    """Small all-reduces: every rank sends its values to all others, and each reduces them in rank order.

    That takes half the steps of a ring or less, and gives the same bits on every rank in every run.
    """

    def __init__(self) -> None:
        # Buffers that no call uses, by layout. A call takes one out for as long as it is under way. Another
        # thread, or a signal handler, __del__ or hook in the middle of that call, finds another buffer. There
        # is no lock: pop(), append() and setdefault() are atomic.
        self._free: dict[object, list[_Buffer]] = {}

    def all_reduce(
        self, group: ProcessGroup, tensor: Tensor, op: str, group_size: int
    ) -> tuple[Callable[[bool], Work], Callable[[Any], Tensor]]:
        """Prepare to reduce the contiguous ``tensor`` in place.

        Returns:
            What begins the exchange of all ranks' values; and what to call after it, which gives ``tensor``.
        """
        # Nothing is kept in a buffer between calls, so groups of one size share them.
        key = (group_size, tensor.dtype, tensor.shape)
        free = self._free.get(key)
        try:
            buffer = free.pop() if free else _new_buffer(tensor, group_size)
        except IndexError:  # another thread has taken the last one
            buffer = _new_buffer(tensor, group_size)
        sent, received, rows = buffer
        sent.copy_(tensor)

        def reduce(_: Any) -> Tensor:
            reduce_rows(rows, op, out=tensor)
            # Not after an exception: gloo's threads may still read and write the buffer.
            if free is not None:
                if len(free) < _MAX_FREE:
                    free.append(buffer)
            elif tensor.nbytes <= _SCRATCH_BYTES:
                self._keep(key, buffer)
            return tensor

        return lambda _: exchange(group, sent, received), reduce

    def _keep(self, key: object, buffer: _Buffer) -> None:
        """Keep the first buffer of a layout for the next call."""
        if len(self._free) >= _MAX_LAYOUTS:
            self._free = {}  # calls under way have the lists that they have begun with
        self._free.setdefault(key, []).append(buffer)


def _new_buffer(tensor: Tensor, group_size: int) -> _Buffer:
    with torch.inference_mode(False):  # else the buffer could be written to there alone
        sent = torch.empty((group_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        received = torch.empty_like(sent)
        return sent, received, received.unbind()
