"""Faster replacements for gloo's collectives of CPU tensors, and a wait for gloo's threads at exit.

gloo gathers in a ring of ``group_size - 1`` steps and reduces in a ring of twice as many steps. Most of
the cost is that of the steps for small tensors, and that of the copies for large tensors.
``benchmarks/one_round.py`` measures both.

gloo's threads release a collective's tensors after the collective has returned, and need Python's GIL to
do so. If the process ends earlier, with an open context, such a thread aborts the process. Raw torch 2.13
aborted 3 of 24 processes whose last statement was a collective. So this module waits for them at exit.
https://github.com/pytorch/pytorch/issues/190489
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, Work
from torch.distributed.distributed_c10d import AllToAllOptions

from ignite_dist.values.reduce_ops import reduce_rows

# An all-to-all exchange is one step. Up to this total size over all ranks the exchange is 2 to 5 times faster
# than both rings.
_ONE_ROUND_BYTES = 1 << 20
# The largest group in which all ranks broadcast at once: gloo then makes no copy. Measured with 8 ranks.
_MAX_BROADCASTS = 32
# Up to this size, allocating the buffers costs more than exchanging them.
_SCRATCH_BYTES = 8 << 10
_MAX_LAYOUTS = 64
# Free buffers of each layout: the number of calls that may run at the same time.
_MAX_FREE = 16

_EXCHANGE = AllToAllOptions()  # gloo only reads it, so calls share it

# The tensor to send, the tensor that receives, and the rows of the second tensor.
_Buffer = tuple[Tensor, Tensor, tuple[Tensor, ...]]

# Tensors that gloo's threads may still reference. Older ones have been released.
_lent: deque[weakref.ref[Tensor]] = deque(maxlen=4 * _MAX_BROADCASTS)
_POLL_SECONDS = 1e-4
# Long enough to schedule each thread on a busy machine. A thread that takes longer is considered stuck.
_EXIT_SECONDS = 0.5


def wait_for_threads_at_exit() -> None:
    """Register an exit handler that waits until gloo's threads have released all lent tensors."""
    atexit.unregister(wait_for_threads)  # registered by an earlier context, perhaps
    atexit.register(wait_for_threads)


def wait_for_threads() -> bool:
    """Wait until gloo's threads have released all lent tensors. False if half a second was not enough."""
    deadline = time.monotonic() + _EXIT_SECONDS
    while _has_lent_tensors():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)  # releases the GIL for gloo's threads
    return True


def _has_lent_tensors() -> bool:
    try:
        return any(lent() is not None for lent in tuple(_lent))
    except RuntimeError:  # a daemon thread has lent another tensor during the iteration
        return True


def forget_lent() -> None:
    """Clear the list of lent tensors. For a forked child, which has none of gloo's threads."""
    _lent.clear()


def lend(tensor: Tensor) -> Tensor:
    """Return a separate tensor object with the memory of ``tensor``, to pass to gloo."""
    lent = tensor.detach()
    _lent.append(weakref.ref(lent))
    return lent


def fits_one_round(nbytes: int, group_size: int) -> bool:
    """True if ``nbytes`` from each rank are few enough to be sent to all other ranks in one step."""
    return nbytes * group_size <= _ONE_ROUND_BYTES


def exchange(
    group: ProcessGroup,
    sent: Tensor,
    received: Tensor,
    sent_sizes: Sequence[int] = (),
    received_sizes: Sequence[int] = (),
) -> Work:
    """Send row ``i`` of ``sent`` to rank ``i``; write rank ``i``'s row for this rank into ``received[i]``.

    With sizes, the first dimension is split into parts of these sizes instead of rows.
    """
    return group.alltoall_base(lend(received), lend(sent), list(received_sizes), list(sent_sizes), _EXCHANGE)


def begin_broadcasts(group: ProcessGroup, rows: Sequence[Tensor]) -> list[Work] | None:
    """Broadcast ``rows[i]`` from rank ``i``, all rows at once; None if there are too many ranks."""
    if len(rows) > _MAX_BROADCASTS:
        return None
    return [
        group.broadcast([lend(row)], broadcast_options(root, is_async=True)) for root, row in enumerate(rows)
    ]


@lru_cache(maxsize=4 * _MAX_BROADCASTS)
def broadcast_options(root: int, is_async: bool) -> BroadcastOptions:
    """The options of a broadcast from the rank at ``root`` in the group. Do not modify them."""
    options = BroadcastOptions()
    options.rootRank = root
    options.asyncOp = is_async
    return options


class ScratchBuffers:
    """Small all-reduces: every rank sends its values to all other ranks, and reduces them in rank order.

    This takes at most half the steps of a ring, and gives the same bits on every rank in every run.
    """

    def __init__(self) -> None:
        # Unused buffers, by layout. A call removes its buffer from the list until the call ends. So another
        # thread, or a signal handler, __del__ or hook during that call, gets another buffer. No lock is
        # needed, because pop(), append() and setdefault() are atomic.
        self._free: dict[object, list[_Buffer]] = {}

    def all_reduce(
        self, group: ProcessGroup, tensor: Tensor, op: str, group_size: int
    ) -> tuple[Callable[[bool], Work], Callable[[Any], Tensor]]:
        """Prepare to reduce the contiguous ``tensor`` in place.

        Returns:
            A function that begins the exchange of all ranks' values, and a function to call after that, which
            reduces the values and returns ``tensor``.
        """
        # A buffer holds no data between calls, so groups of one size share buffers.
        key = (group_size, tensor.dtype, tensor.shape)
        free = self._free.get(key)
        try:
            buffer = free.pop() if free else _new_buffer(tensor, group_size)
        except IndexError:  # another thread has taken the last buffer
            buffer = _new_buffer(tensor, group_size)
        sent, received, rows = buffer
        sent.copy_(tensor)

        def reduce(_: Any) -> Tensor:
            reduce_rows(rows, op, out=tensor)
            # After an exception the buffer is not reused: gloo's threads may still read and write it.
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
            self._free = {}  # running calls hold references to their lists
        self._free.setdefault(key, []).append(buffer)


def _new_buffer(tensor: Tensor, group_size: int) -> _Buffer:
    with torch.inference_mode(False):  # an inference tensor could be written to in inference mode only
        sent = torch.empty((group_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        received = torch.empty_like(sent)
        return sent, received, received.unbind()
