"""Memory that the ranks of a group share on one machine, and a number of each rank, for which others wait.

A rank writes its data, then its number, and then wakes the ranks that sleep until the number changes (a
futex). x86-64 keeps the order of a processor's writes, and of its reads. So a rank that has read the number
then reads the data. Other processors need barriers in between, which Python does not have.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from ignite_dist.comp_models.work import begun_call, place_of
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.call_sites import users_frame
from ignite_dist.internals.processes import Peer
from ignite_dist.internals.ranks import describe_by_rank

_logger = logging.getLogger(__name__)

# The parts of all ranks fit into the processor's cache.
_MAX_PART_BYTES = 1 << 20
_MAX_BYTES = 8 << 20

# The words of a rank: the number of its last step, 0 or why it has left, the position (from 1) of the rank
# for which it sleeps; and of its last steps the checksums, the numbers of the calls, and the descriptions.
# Only a rank that was interrupted is more than one step ahead of others.
_WORDS_PER_RANK, _SLOTS = 64, 4
_WHY_LEFT, _SLEEPS_FOR, _CHECKSUMS, _CALLS, _DESCRIPTIONS = 1, 2, 3, 3 + _SLOTS, 3 + 2 * _SLOTS
# In place of a call's number: the rank has made the call in another memory of the group.
_IN_OTHER_ORDER = 0
# Why a rank has left.
_ENDED_CONTEXT, _TIMED_OUT = 1, 2
DESCRIPTION_BYTES = (_WORDS_PER_RANK - 1 - _DESCRIPTIONS) // _SLOTS * 8
_IS_AWAITED = _WORDS_PER_RANK - 1  # 1 if the rank waits in a step without which it does not go on
PAGE_BYTES = 4096
_LOW_BITS = 0xFFFFFFFF
# Behind the words each rank has an area: the number of a step, and the place of its call in the script. A
# rank writes its area when it finds a mismatch or was interrupted. Others wait for it, at most these seconds.
_PLACE_BYTES, _PLACE_SECONDS = 256, 1.0

# Looks before a rank sleeps: 0.3 ms. With 60 looks, 4 bytes took 44 us instead of 14.
_LOOKS = 500
# After this time a sleeping rank checks whether the others are alive. Signals are handled then at the latest.
_SLEEP_SECONDS = 0.5

_WAITING = "Rank %d has waited %.0f s for %s in %s."

_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL_SLEEPERS = 202, 0, 1, 0x7FFFFFFF  # the system call on x86-64
_TIMEOUT = struct.pack("qq", 0, int(_SLEEP_SECONDS * 1e9))


def _find_syscall() -> Any:
    if sys.platform != "linux":
        return None
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
    syscall.restype = ctypes.c_long
    return syscall


_syscall = _find_syscall()


class Step(NamedTuple):
    """A step of a collective, as the ranks compare it.

    Attributes:
        checksum: 32 bits that are equal on all ranks if they make the same step of the same call.
        description: up to ``DESCRIPTION_BYTES`` bytes for the error message, padded.
    """

    checksum: int
    description: bytes


def do_nothing(*_: object) -> None:
    """Stands for a check."""


class EarlierCallError(Exception):
    """Other ranks are still in an earlier call, which this rank has left, for example by an interrupt."""


class Segment:
    """The shared memory of one group, on one rank.

    A collective takes one or more steps. Each rank has two parts and a number, which counts its steps. The
    data of step ``n`` is in the rank's part ``n % 2``. A rank publishes ``n`` after it has read the data of
    step ``n - 1``, or has given that step up. So a rank that has seen ``n - 1`` at all ranks may write the
    data of ``n`` over those of ``n - 2``. Only ranks that write data wait for this, in :meth:`begin`.

    Args:
        memory: a part of the mapped file.
        position: this rank's position in the group.
        peers: the processes of the group.
        timeout: how long to wait for another rank.
        check_backend: called while this rank waits; raises if the ranks cannot meet any more.
        patience_seconds: after this time a waiting rank logs for whom it waits.

    Attributes:
        call: number of the call of the next steps, from 1.
        check_order: called with the positions of the late ranks while this rank waits; raises if they wait
            for this rank elsewhere.
    """

    def __init__(
        self,
        memory: memoryview,
        position: int,
        peers: list[Peer],
        timeout: timedelta,
        check_backend: Callable[[], None],
        patience_seconds: float,
    ) -> None:
        self.position = position
        self.others = [place for place in range(len(peers)) if place != position]
        self.part_bytes = part_bytes(len(peers))
        self._peers = peers
        self._timeout = timeout
        self._check_backend = check_backend
        self._patience_seconds = patience_seconds
        self._header_bytes = _header_bytes(len(peers))
        self._bytes = memory
        self._words = self._bytes[: self._header_bytes].cast("Q")
        with torch.inference_mode(False):  # an inference tensor could be written to in inference mode only
            self._tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._tensor.data_ptr()
        self._own = position * _WORDS_PER_RANK
        self.call = 0
        self.check_order: Callable[[list[int]], None] = do_nothing
        self._sleepers = [place * _WORDS_PER_RANK + _SLEEPS_FOR for place in self.others]
        self._fence = threading.Lock()
        self._described: list[Step | None] = [None] * _SLOTS
        self._why_left = ""

    @property
    def has_left(self) -> bool:
        """True if :meth:`leave` was called."""
        return bool(self._why_left)

    def check(self) -> None:
        """Raise ``DistBackendError`` if this rank has left."""
        if self._why_left:
            raise DistBackendError(self._why_left)

    @property
    def number(self) -> int:
        """Number of this rank's steps."""
        return self._words[self._own]

    def bytes_of(self, position: int, parity: int) -> memoryview:
        """The part of the rank at ``position`` for steps of even or odd numbers."""
        return self._bytes[self._extent(position, parity)]

    def tensor_of(self, position: int, parity: int) -> Tensor:
        """:meth:`bytes_of` as a tensor."""
        return self._tensor[self._extent(position, parity)]

    def _extent(self, position: int, parity: int) -> slice:
        start = self._header_bytes + (2 * position + parity) * self.part_bytes
        return slice(start, start + self.part_bytes)

    # --- a step: begin, write the data, publish, wait, read the data ---

    def begin(self) -> int:
        """The number of this rank's next step. Returns when no rank reads the part that the step writes."""
        number = self._words[self._own] + 1
        self.wait_for(number - 1)
        return number

    def publish(self, number: int, step: Step, *, in_other_order: bool = False) -> None:
        """Tell the other ranks that this rank has begun ``step``, and written its data.

        ``in_other_order``: the step is of a call that this rank has made in another memory of the group.
        """
        words, own = self._words, self._own
        slot = number % _SLOTS
        words[own + _CHECKSUMS + slot] = (number & _LOW_BITS) << 32 | step.checksum
        words[own + _CALLS + slot] = _IN_OTHER_ORDER if in_other_order else self.call
        if step is not self._described[slot]:
            start = (own + _DESCRIPTIONS) * 8 + slot * DESCRIPTION_BYTES
            self._bytes[start : start + DESCRIPTION_BYTES] = step.description
            self._described[slot] = step
        words[own] = number
        # Taking a lock is a memory fence. A rank that goes to sleep first writes _SLEEPS_FOR, and then the
        # kernel reads the number. So it sees the new number, or this rank sees _SLEEPS_FOR.
        with self._fence:
            pass
        for word in self._sleepers:
            if words[word] == self.position + 1:
                self._wake(self.position)
                return

    def wait_for_step(self, number: int, step: Step) -> None:
        """Return when all other ranks have published ``step``.

        Raises:
            CollectiveMismatchError: a rank has published another step.
            EarlierCallError: a rank has published a step of an earlier call, which this rank has left.
            RuntimeError: a rank has ended, or the timeout has passed.
        """
        self.wait_for(number)
        expected = (number & _LOW_BITS) << 32 | step.checksum
        words, slot = self._words, number % _SLOTS
        for place in self.others:
            word = place * _WORDS_PER_RANK
            if words[word + _CHECKSUMS + slot] != expected or words[word + _CALLS + slot] != self.call:
                self._compare(number)

    def _compare(self, number: int) -> None:
        """Raise ``EarlierCallError`` if this rank is ahead of others, and none is ahead of it."""
        calls = [self._call_of(place, number) for place in self.others]
        if _IN_OTHER_ORDER not in calls and min(calls) < self.call and max(calls) <= self.call:
            raise EarlierCallError
        self.raise_mismatch(number)

    def _call_of(self, position: int, number: int) -> int:
        """The number of the call to which step ``number`` of another rank belongs; less if not known."""
        word, slot = position * _WORDS_PER_RANK, number % _SLOTS
        call = self._words[word + _CALLS + slot]
        if self._words[word + _CHECKSUMS + slot] >> 32 == number & _LOW_BITS:
            return call
        # A later step has taken the slot. If it belongs to a later call, so may this step; else this step
        # belonged to an earlier call than this rank's.
        return call if call > self.call else self.call - 1

    def is_in_other_order(self) -> bool:
        """True if another rank has made its step of this rank's number in another memory of the group."""
        calls = [self._call_of(place, self.number) for place in self.others]
        return _IN_OTHER_ORDER in calls

    def note_awaited(self, is_awaited: bool) -> None:
        """Tell the other ranks whether this rank, which waits in a step, goes on only after the step."""
        self._words[self._own + _IS_AWAITED] = is_awaited

    def waits_ahead(self, position: int) -> bool:
        """True if the rank at ``position`` goes on only after a step that this rank has not begun."""
        word = position * _WORDS_PER_RANK
        return self._words[word] > self.number and self._words[word + _IS_AWAITED] != 0

    def wait_for(self, number: int) -> None:
        """Return when the other ranks have published ``number``."""
        words = self._words
        for place in self.others:
            word = place * _WORDS_PER_RANK
            if words[word] < number:
                for _ in range(_LOOKS):
                    if words[word] >= number:
                        break
                    os.sched_yield()  # there may be more ranks than processors
                else:
                    self._sleep(word, number)

    def _sleep(self, word: int, number: int) -> None:
        self._words[self._own + _SLEEPS_FOR] = word // _WORDS_PER_RANK + 1
        try:
            self._sleep_until(word, number)
        finally:
            self._words[self._own + _SLEEPS_FOR] = self._words[self._own + _IS_AWAITED] = 0

    def _sleep_until(self, word: int, number: int) -> None:
        words = self._words
        began = checked = time.monotonic()
        patience = self._patience_seconds
        while (seen := words[word]) < number:
            if not self.has_left:
                _syscall(_FUTEX, self._address + 8 * word, _FUTEX_WAIT, seen & _LOW_BITS, _TIMEOUT)
            now = time.monotonic()
            if not (self.has_left or words[word + _WHY_LEFT] or now - checked >= _SLEEP_SECONDS):
                continue
            checked = now
            self._check_peers(number)
            late = self._late(number)
            names = ", ".join(self._peers[place].who for place in late)
            if late and now - began > patience:
                patience = math.inf
                _logger.warning(_WAITING, self._peers[self.position].rank, now - began, names, _call())
            if late and now - began > self._timeout.total_seconds():
                seconds = self._timeout.total_seconds()
                why = f"Connection closed: this rank has waited for {names} for {seconds:g} s, its timeout."
                self._leave(_TIMED_OUT, why)
                raise RuntimeError(f"Timed out waiting {seconds * 1e3:.0f}ms for {names} in a collective.")

    def _check_peers(self, number: int) -> None:
        """Raise if one of the awaited ranks has ended."""
        self.check()
        for place in self._late(number):
            word, peer = place * _WORDS_PER_RANK, self._peers[place]
            why, has_ended = self._words[word + _WHY_LEFT], peer.has_ended()
            if (why or has_ended) and self._words[word] < number:
                what = "has ended" if has_ended else _LEFT_BY[why]
                raise DistBackendError(f"Connection closed by peer: {peer.who} {what}.")
        try:
            self._check_backend()
        except DistBackendError:  # another rank may have ended it after its part of this step
            if self._late(number):
                raise
        self.check_order(self._late(number))

    def _late(self, number: int) -> list[int]:
        """The positions of the ranks that have not published ``number``."""
        return [place for place in self.others if self._words[place * _WORDS_PER_RANK] < number]

    def raise_mismatch(self, number: int) -> None:
        """Raise ``CollectiveMismatchError`` with the step ``number`` of each rank."""
        places, slot = self._places(number), number % _SLOTS
        numbers = [self._words[place * _WORDS_PER_RANK + _CALLS + slot] for place in range(len(places))]
        in_one_call = len(set(numbers)) == 1 or _IN_OTHER_ORDER in numbers
        calls: list[str] = []
        for place in range(len(self._peers)):
            word = place * _WORDS_PER_RANK
            start = (word + _DESCRIPTIONS) * 8 + slot * DESCRIPTION_BYTES
            description = bytes(self._bytes[start : start + DESCRIPTION_BYTES]).rstrip().decode()
            call = "" if in_one_call else f"call {numbers[place]}"
            if self._words[word + _CHECKSUMS + slot] >> 32 != number & _LOW_BITS:
                description = "not there yet" if self._words[word] < number else "a later call"
            else:
                description = _with_place(description, places[place], call)
            calls.append(description)
        by_rank = describe_by_rank([peer.rank for peer in self._peers], calls)
        hint = "" if all(places) else " idist.compare_calls() shows their places."
        if _IN_OTHER_ORDER in numbers:
            hint = " Some ranks made a call with async_op=True, others without, or in another order." + hint
        elif not in_one_call:
            hint = " A rank has skipped a call, or has left one early, for example by a KeyboardInterrupt."
        raise CollectiveMismatchError(f"The ranks made different calls ({by_rank}).{hint}")

    def _places(self, number: int) -> list[str]:
        """Where each rank has made its step of this number; empty for a rank that does not say it in time."""
        self.write_place(number)
        start = len(self._peers) * _WORDS_PER_RANK * 8
        areas = [
            self._bytes[start + place * _PLACE_BYTES : start + (place + 1) * _PLACE_BYTES]
            for place in range(len(self._peers))
        ]
        expected = number.to_bytes(8, "little")
        deadline = time.monotonic() + _PLACE_SECONDS
        there = [place for place in range(len(areas)) if self._words[place * _WORDS_PER_RANK] >= number]
        while not all(areas[place][:8] == expected for place in there) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [
            bytes(area[8:]).rstrip().decode(errors="replace") if area[:8] == expected else ""
            for area in areas
        ]

    def write_place(self, number: int) -> None:
        """Write for the other ranks where this rank has made its step of this number."""
        start = len(self._peers) * _WORDS_PER_RANK * 8 + self.position * _PLACE_BYTES
        text = _call().encode()[: _PLACE_BYTES - 8].ljust(_PLACE_BYTES - 8)
        self._bytes[start + 8 : start + _PLACE_BYTES] = text
        self._bytes[start : start + 8] = number.to_bytes(8, "little")

    def _wake(self, position: int) -> None:
        """Wake the ranks that sleep until the rank at ``position`` has published."""
        word = position * _WORDS_PER_RANK
        _syscall(_FUTEX, self._address + 8 * word, _FUTEX_WAKE, _ALL_SLEEPERS, None)

    def leave(self) -> None:
        """Mark that this rank has left. Its waits, and waits for it, then raise."""
        self._leave(_ENDED_CONTEXT, "Connection closed by peer, or the context of this rank has ended.")

    def _leave(self, how: int, why: str) -> None:
        if os.getpid() == self._peers[self.position].pid:  # not a forked child
            if not self._why_left:
                self._why_left = why
                self._words[self._own + _WHY_LEFT] = how
            for place in range(len(self._peers)):  # also the threads of this rank
                self._wake(place)


def _call() -> str:
    """The call of this thread, and where the user has made it; empty if no user has."""
    frame = sys._getframe(1)
    return begun_call(frame) or (place_of(frame) if users_frame(frame) else "")


def _with_place(description: str, place: str, call: str) -> str:
    """For example ``"all_reduce at file.py:12 (SUM torch.float32 (3,))"``. ``place``, ``call`` may be ""."""
    function = place.partition(" at ")[0]
    details = description
    if place and description.startswith(f"{function}("):
        details = description[len(function) + 1 :].removesuffix(")")
    details = ", ".join(filter(None, (details, call)))
    if not place:
        return details
    return f"{place} ({details})" if details else place


_LEFT_BY = {
    _ENDED_CONTEXT: "has ended its context",
    _TIMED_OUT: "has left the group after its timeout: it has waited in a collective for another rank",
}


def _header_bytes(group_size: int) -> int:
    return -(-group_size * (_WORDS_PER_RANK * 8 + _PLACE_BYTES) // PAGE_BYTES) * PAGE_BYTES


def part_bytes(group_size: int) -> int:
    """Size of a part of the memory of a group."""
    free = _MAX_BYTES - _header_bytes(group_size)
    return min(_MAX_PART_BYTES, free // (2 * group_size) // PAGE_BYTES * PAGE_BYTES)


def segment_bytes(group_size: int) -> int:
    """Size of the memory of a group: the words and two parts of each rank."""
    return _header_bytes(group_size) + 2 * group_size * part_bytes(group_size)
