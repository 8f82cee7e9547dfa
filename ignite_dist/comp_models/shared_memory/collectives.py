"""Collectives of CPU tensors over memory that the ranks of a group share.

In each step the ranks copy data into their parts of the memory, and read the parts of the other ranks after
these have published. Tensors that are larger than a part take several steps.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from ignite_dist.comp_models.shared_memory.segment import (
    DESCRIPTION_BYTES,
    EarlierCallError,
    Segment,
    Step,
    do_nothing,
)
from ignite_dist.comp_models.transport import Group, PendingCalls, Sizes
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.values.calls import NO_CALL, Call, whole_call
from ignite_dist.values.reduce_ops import is_rounded, reduce_rows
from ignite_dist.values.serialization import as_bytes, as_tensor

# Up to this size every rank reduces the whole tensor. Above, each rank reduces a chunk, which takes a second
# step, in which the ranks exchange the reduced chunks.
_WHOLE_BYTES = 1 << 16
_MAX_LAYOUTS = 256


class _Layout(NamedTuple):
    """A step with a tensor of one dtype and shape, and views of the memory: one per rank, for both parts."""

    step: Step
    rows: tuple[list[Tensor], list[Tensor]]


class SharedMemory:
    """The collectives of one group. Tensors are contiguous, and of the same dtype and size on all ranks.

    Args:
        segment: the group's memory.
        name: the group's name.
        for_async_calls: the memory of its asynchronous calls; None in that memory.
        pending_calls: the state of this rank's asynchronous calls.
    """

    def __init__(
        self,
        segment: Segment,
        name: str,
        for_async_calls: SharedMemory | None = None,
        pending_calls: Callable[[], PendingCalls] = PendingCalls,
    ) -> None:
        self.segment = segment
        self.name = name
        self.for_async_calls = for_async_calls
        self._pending_calls = pending_calls
        self._for_blocking_calls: SharedMemory | None = None
        if for_async_calls is not None:
            for_async_calls._for_blocking_calls = self
            segment.check_order = self._check_order
            for_async_calls.segment.check_order = self._note_awaited
        self._position = segment.position
        self._positions = range(len(segment.others) + 1)
        self._parts = [[segment.bytes_of(place, parity) for place in self._positions] for parity in (0, 1)]
        self._layouts: dict[tuple[Call, str, torch.dtype, torch.Size], _Layout] = {}
        self._call, self._token = NO_CALL, 0  # of the last steps; guarded by _lock
        self._lock = threading.RLock()  # a signal handler does not wait for its own thread
        self._is_running = False  # guarded by _lock
        self._has_ended_early = False  # the latest call of run()
        self._num_steps_before = 0  # before the latest call of run()
        self._interrupted_late: deque[tuple[Call, int]] = deque()

    def run(self, collective: Callable[[SharedMemory], Any], group: Group) -> Any:
        """Run ``collective`` in ``group``. Only one thread at a time may be in a collective of the group.

        Raises:
            RuntimeError: this thread is in a collective of the group already, or this rank has left it.
        """
        self.segment.check()
        with self._lock:
            if self._is_running:
                raise RuntimeError(
                    "A signal handler or a finalizer has called a collective while its thread was in a "
                    "collective of the same group. Let the handler set a flag, and call the collective later."
                )
            self._count_late()
            number = self._num_steps_before = self.segment.number
            self._is_running, self._call, self._has_ended_early = True, group.call, False
            ends_early = is_mismatch = False
            try:
                self._count(group.token or whole_call.token)
                while True:
                    try:
                        return collective(self)
                    except EarlierCallError:  # the other ranks raise now, and make this call in the next step
                        self.segment.write_place(number + 1)
                        if self.segment.number > number + 1:
                            self.segment.raise_mismatch(self.segment.number)
                        number = self._num_steps_before = self.segment.number
            except BaseException as error:
                # Otherwise the other ranks would receive this rank's next call instead of this call.
                ends_early = self.segment.number == number and not self._has_broken(error)
                is_mismatch = isinstance(error, CollectiveMismatchError)
                raise
            finally:
                # In `finally`, not in `except`: finding the user's frame would keep `error` alive.
                if ends_early:
                    self._end_early(group.call)
                if is_mismatch and self._for_blocking_calls and self.segment.is_in_other_order():
                    # The others have made one call in each memory: `refuse` has counted theirs here.
                    self._for_blocking_calls.count_interrupted(group.call, group.token)
                self._is_running = False
                self._count_late()

    def count_interrupted(self, call: Call, token: int) -> None:
        """Count ``call``, in which this rank was interrupted, unless it has made a step."""
        # Another thread may hold the lock while it waits for other ranks. It counts then.
        if not self._lock.acquire(blocking=False):
            self._interrupted_late.append((call, token))
            return
        try:
            self._count_interrupted(call, token)
        finally:
            self._lock.release()

    def _count_late(self) -> None:
        while self._interrupted_late:
            self._count_interrupted(*self._interrupted_late.popleft())

    def _count_interrupted(self, call: Call, token: int) -> None:
        if self._is_running or self.segment.has_left or token == self._token != 0:
            return
        self._count(token)
        self._end_early(call)

    def leave(self) -> None:
        """Mark that this rank has left both memories."""
        self.segment.leave()
        self.segment.check_order = do_nothing  # no cycle of references keeps the memory
        self._for_blocking_calls = None
        if self.for_async_calls is not None:
            self.for_async_calls.leave()

    def was_summed(self, tensor: Tensor) -> bool:
        """True if the latest call of :meth:`run`, the sum of ``tensor``, has begun its last step.

        Then the other ranks get the sum, even if an interrupt has ended the call on this rank.
        """
        num_steps = len(self._pieces(tensor)) * (2 if self._has_chunks(tensor, "SUM") else 1)
        return not self._has_ended_early and self.segment.number - self._num_steps_before == num_steps

    def _note_awaited(self, _: object) -> None:
        """While an asynchronous call waits for other ranks: say if this rank goes on only after the call."""
        if self.for_async_calls is not None:
            self.for_async_calls.segment.note_awaited(self._pending_calls().are_awaited)

    def _check_order(self, late: Sequence[int]) -> None:
        """Raise if a late rank goes on only after an asynchronous call that this rank has not begun.

        A backward pass is no such proof on that rank: its collectives do not wait for asynchronous calls.
        """
        other = self.for_async_calls
        if other is None or self._pending_calls().are_there:
            return
        if any(other.segment.waits_ahead(place) for place in late):
            other.refuse(self._call)

    def refuse(self, call: Call) -> None:
        """Raise here, and on the ranks that wait in this memory. This rank has made ``call`` in the other."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._count(0)
            number = self.segment.number + 1
            self.segment.write_place(number)
            self.segment.publish(number, _step("a call in another order", call), in_other_order=True)
        finally:
            self._lock.release()
        self.segment.raise_mismatch(number)

    def _end_early(self, call: Call) -> None:
        self._has_ended_early = True
        number = self.segment.number + 1
        self.segment.write_place(number)
        self.segment.publish(number, _step(_ENDED_EARLY, call))

    def _count(self, token: int) -> None:
        """Begin a new call if ``token`` is new, or if the steps have none. All ranks count alike."""
        if token != self._token or token == 0:
            self._token = token
            self.segment.call += 1

    def _has_broken(self, error: BaseException) -> bool:
        """True if no rank can make another call of the group."""
        return self.segment.has_left or isinstance(error, DistBackendError)

    # --- collectives, in run() -------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Reduce ``tensor`` in place and in rank order, with the same bits on every rank."""
        has_chunks = self._has_chunks(tensor, op)
        for name, piece in self._steps(f"all_reduce {op}", tensor):
            if has_chunks:
                self._reduce_in_chunks(name, piece, op)
            else:
                reduce_rows(self._share(name, piece), op, out=piece)
        return tensor

    def _has_chunks(self, tensor: Tensor, op: str) -> bool:
        """True if each rank reduces a part of the tensor, and the ranks exchange the parts."""
        has_gain = len(self._positions) > 2 or is_rounded(op, tensor.dtype)
        return tensor.nbytes > _WHOLE_BYTES and has_gain

    def _reduce_in_chunks(self, name: str, piece: Tensor, op: str) -> None:
        piece = piece.view(-1)
        bounds = [
            len(piece) * place // len(self._positions) for place in (*self._positions, len(self._positions))
        ]
        chunks = [slice(*bounds[place : place + 2]) for place in self._positions]
        own = chunks[self._position]
        reduced = piece[own]
        reduce_rows([row[own] for row in self._share(name, piece)], op, out=reduced)
        number, rows, step = self._begin(f"{name} (reduced)", piece)
        rows[self._position][own].copy_(reduced)
        self._meet(number, step)
        for place in self.segment.others:
            piece[chunks[place]].copy_(rows[place][chunks[place]])

    def all_gather(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Fill the rows of ``out`` with the tensors of all ranks."""
        rows = [self._pieces(row) for row in out.unbind()]
        for (name, piece), *targets in zip(self._steps("all_gather", tensor), *rows, strict=True):
            shared = self._share(name, piece)
            targets[self._position].copy_(piece)
            for place in self.segment.others:
                targets[place].copy_(shared[place])
        return out

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Send one of the equal parts of the 1-d ``tensor`` to each rank. The tensor fits into a part."""
        size = len(tensor) // len(self._positions)
        own = slice(self._position * size, (self._position + 1) * size)
        for place, row in enumerate(self._share("all_to_all", tensor)):
            out[place * size : (place + 1) * size].copy_(row[own])
        return out

    def reduce_scatter(self, rows: Tensor, op: str, out: Tensor) -> Tensor:
        """Reduce the ``(group_size, n)`` rows in rank order, and fill ``out`` with this rank's row."""
        own = self._position
        width = max(1, self.segment.part_bytes // (len(rows) * rows.itemsize))
        steps = _named_pieces(f"reduce_scatter {op}", rows.numel(), torch.split(rows, width, dim=1))
        for (name, piece), target in zip(steps, torch.split(out, width), strict=True):
            number, parts, step = self._begin(name, piece)
            for other in (slice(own), slice(own + 1, None)):  # the own row is not sent
                parts[own][other].copy_(piece[other])
            self._meet(number, step)
            received = [part[own] for part in parts]
            received[own] = piece[own]
            reduce_rows(received, op, out=target)
        return out

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Fill ``tensor`` with the values of the rank at position ``src``."""
        for name, piece in self._steps(f"broadcast from {src}", tensor):
            if src == self._position:
                number, rows, step = self._begin(name, piece)
                rows[src].copy_(piece)
                self._meet(number, step)
            else:
                number = self.segment.number + 1
                rows, step = self._layout(name, piece, number)
                self._meet(number, step)
                piece.copy_(rows[src])
        return tensor

    def exchange(self, sent: Tensor, out: Tensor, sizes: Sizes) -> Tensor:
        """Send a part of the 1-d ``sent`` to each rank. Fill the 1-d ``out`` with the parts for this rank.

        ``sizes`` are in bytes. In the first step the ranks also share where their parts begin.
        """
        starts = torch.tensor([0, *sizes.sent], dtype=torch.int64, device="cpu").cumsum(0)
        targets = torch.split(as_bytes(out), list(sizes.received))
        own, step = as_bytes(sent), _step("parts of any sizes", self._call)
        number = self.segment.begin()
        tables = [self.segment.tensor_of(place, number % 2) for place in self._positions]
        heads = [table[: starts.nbytes].view(torch.int64) for table in tables]
        heads[self._position].copy_(starts)
        first = self.segment.part_bytes - starts.nbytes
        tables[self._position][starts.nbytes :][: len(own)].copy_(own[:first])
        self._meet(number, step)
        starts_of = [head.tolist() for head in heads]
        for place, target in enumerate(targets):
            begin, end = starts_of[place][self._position : self._position + 2]
            assert end - begin == len(target)  # the ranks have compared the shapes, or exchanged the sizes
            _copy_overlap(tables[place][starts.nbytes :], 0, target, begin)
        for start in range(first, max(ends[-1] for ends in starts_of), self.segment.part_bytes):
            number = self.segment.begin()
            parts = [self.segment.tensor_of(place, number % 2) for place in self._positions]
            piece = own[start : start + self.segment.part_bytes]
            parts[self._position][: len(piece)].copy_(piece)
            self._meet(number, step)
            for place, target in enumerate(targets):
                _copy_overlap(parts[place], start, target, starts_of[place][self._position])
        return out

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._meet(self.segment.number + 1, _step("barrier", self._call))

    def gather_bytes(self, buffer: bytearray) -> bytearray:
        """The buffers of all ranks, of the same size, concatenated."""
        size = len(buffer)
        if size > self.segment.part_bytes:
            gathered = bytearray(size * len(self._positions))
            self.all_gather(as_tensor(buffer), as_tensor(gathered).view(-1, size))
            return gathered
        number = self.segment.begin()
        parts = self._parts[number % 2]
        parts[self._position][:size] = buffer
        self._meet(number, _step(f"numbers or objects of {size} bytes", self._call))
        return bytearray().join([part[:size] for part in parts])

    def fill_rows(self, rows: Sequence[Tensor]) -> None:
        """Fill the 1-d rows of the other ranks, in bytes. The sizes may differ."""
        part_bytes, largest = self.segment.part_bytes, max(map(len, rows))
        for start in range(0, largest, part_bytes):
            number = self.segment.begin()
            pieces = [row[start : start + part_bytes] for row in rows]
            parts = [self.segment.tensor_of(place, number % 2) for place in self._positions]
            own = pieces[self._position]
            parts[self._position][: len(own)].copy_(own)
            name = f"objects of at most {largest} bytes: {'next' if start else 'first'} piece"
            self._meet(number, _step(name, self._call))
            for place in self.segment.others:
                pieces[place].copy_(parts[place][: len(pieces[place])])

    # --- one step ----------------------------------------------------------------------------------------

    def _share(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks. Valid until this rank begins the next step."""
        number, rows, step = self._begin(name, tensor)
        rows[self._position].copy_(tensor)
        self._meet(number, step)
        return rows

    def _begin(self, name: str, tensor: Tensor) -> tuple[int, list[Tensor], Step]:
        number = self.segment.begin()
        return (number, *self._layout(name, tensor, number))

    def _meet(self, number: int, step: Step) -> None:
        self.segment.publish(number, step)
        self.segment.wait_for_step(number, step)

    def _steps(self, name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
        return _named_pieces(name, tensor.numel(), self._pieces(tensor))

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.nbytes <= self.segment.part_bytes:
            return (tensor,)
        return torch.split(tensor.view(-1), self.segment.part_bytes // tensor.itemsize)

    def _layout(self, name: str, tensor: Tensor, number: int) -> tuple[list[Tensor], Step]:
        key = self._call, name, tensor.dtype, tensor.shape
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts = {}
            layout = self._layouts[key] = self._make_layout(name, tensor)
        return layout.rows[number % 2], layout.step

    def _make_layout(self, name: str, tensor: Tensor) -> _Layout:
        with torch.inference_mode(False):  # an inference tensor could be written to in inference mode only
            rows = [
                [
                    self.segment.tensor_of(place, parity)[: tensor.nbytes]
                    .view(tensor.dtype)
                    .view(tensor.shape)
                    for place in self._positions
                ]
                for parity in (0, 1)
            ]
        step = _step(f"{name} of {tensor.numel()} {tensor.dtype}", self._call)
        return _Layout(step, (rows[0], rows[1]))


def _named_pieces(name: str, numel: int, pieces: Sequence[Tensor]) -> Sequence[tuple[str, Tensor]]:
    """``pieces``, each with a name that tells its step from those of other calls.

    So a step of a longer or an interrupted call is a mismatch.
    """
    first, *others = pieces
    if not others:
        return ((name, first),)
    name = f"{name} of {numel}"
    return [(f"{name}: first piece", first), *((f"{name}: next piece", piece) for piece in others)]


def _copy_overlap(piece: Tensor, piece_start: int, target: Tensor, target_start: int) -> None:
    """Copy the bytes that are in both. Each starts at its place in the sender's tensor."""
    start = max(piece_start, target_start)
    end = min(piece_start + len(piece), target_start + len(target))
    if start < end:
        source = piece[start - piece_start : end - piece_start]
        target[start - target_start : end - target_start].copy_(source)


@lru_cache(maxsize=_MAX_LAYOUTS)
def _step(name: str, call: Call) -> Step:
    """The step ``name`` of ``call``. The description is what the user has called."""
    text = call.text or name
    if name == _ENDED_EARLY and call.text:
        text = f"{_ENDED_EARLY}: {call.text}"
    return Step(
        zlib.crc32(name.encode(), call.checksum),
        text.encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES),
    )


_ENDED_EARLY = "ended before it sent data"
