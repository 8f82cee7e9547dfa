"""Open the memory that the ranks of a group share, in the first call of the group.

The memory is a file without a name in any folder (``memfd_create``), so no death leaves anything behind, and
``/dev/shm`` is not used. One rank makes the file. The others open it through ``/proc/<pid>/fd``, which only
processes of this user may do. The random name of the file proves that the ranks have opened the same file.
Host names prove nothing: containers may share a name, or a machine but not their processes.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from ignite_dist.comp_models.shared_memory.segment import PAGE_BYTES, Segment, segment_bytes
from ignite_dist.errors import CollectiveMismatchError, EnvironmentVariablesError, without_link
from ignite_dist.internals.processes import Peer, start_time
from ignite_dist.internals.ranks import describe_by_rank

VARIABLE = "IGNITE_DIST_SHARED_MEMORY"
"""The environment variable that turns shared memory off, by ``0`` on any rank."""

MAX_RANKS = 64
_NUM_SEGMENTS = 2  # one for blocking calls, and one for asynchronous calls. Unused pages take no memory.
_OFFER_BYTES, _MAX_CHARACTERS = 1024, 120


class _Offer(NamedTuple):
    """What a rank tells the others in its first call of a group. Only the first rank has a file."""

    reason: str  # why this rank cannot share memory; empty if it can
    rank: int
    call: str = ""  # the first call
    is_async: bool = False  # an asynchronous call opens no memory: it makes a separate group
    pid: int = 0
    start: str = ""
    pid_namespace: str = ""
    name: str = ""
    fd: int = -1

    @property
    def peer(self) -> Peer:
        return Peer(self.rank, self.pid, self.start)


def check_variable() -> None:
    """Check :data:`VARIABLE`.

    Raises:
        EnvironmentVariablesError: it is neither 0 nor 1.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise EnvironmentVariablesError(f"The environment variable {VARIABLE} must be 0 or 1, got {text!r}.")


def unavailable_reason() -> str:
    """The reason why this process cannot share memory; empty if it can.

    Raises:
        EnvironmentVariablesError: see :func:`check_variable`.
    """
    check_variable()
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return f"only on Linux and x86-64, not on {sys.platform} and {platform.machine()}"
    try:
        fd, name = _make_file(PAGE_BYTES)
        with os.fdopen(fd):
            os.close(_open_through_proc(os.getpid(), fd, name))
    except OSError as error:
        return str(error)
    return "" if start_time(os.getpid()) else "/proc does not show this process"


def separate_group_row(rank: int, call: str) -> bytearray:
    """The row of a rank whose first call of the group is asynchronous. See :func:`name_of_separate_group`."""
    return _row(_Offer("", rank, call, is_async=True, name=secrets.token_hex(16)))


def name_of_separate_group(rows: bytes) -> str:
    """The name of the separate group, the same on every rank. ``rows`` are those of all ranks.

    Raises:
        CollectiveMismatchError: the first call of another rank is blocking.
    """
    return _offers(rows)[0].name


def open_segments(
    gather: Callable[[bytearray], bytearray],
    rank: int,
    call: str,
    position: int,
    group_size: int,
    timeout: timedelta,
    check_backend: Callable[[], None],
    patience_seconds: float,
) -> list[Segment] | str:
    """Two segments of a group (see ``_NUM_SEGMENTS``), or the reason why its ranks share no memory.

    Every rank of the group calls this.

    Args:
        gather: gathers buffers of one length from all ranks of the group.
        rank: this rank.
        call: the first call of the group.
        position: its position in the group.
        group_size: number of ranks.
        timeout: how long to wait for another rank in a collective.
        check_backend: called while a rank waits; raises if the ranks cannot meet any more.
        patience_seconds: after this time a waiting rank logs for whom it waits.

    Raises:
        CollectiveMismatchError: the first call of another rank is asynchronous.
    """
    fd, size = -1, segment_bytes(group_size)
    offer = _Offer("", rank, call)
    try:
        try:
            offer = _Offer(unavailable_reason(), rank, call)
            if not offer.reason:
                pid, namespace = os.getpid(), os.readlink("/proc/self/ns/pid")
                offer = offer._replace(pid=pid, start=start_time(pid) or "", pid_namespace=namespace)
                if position == 0:
                    fd, name = _make_file(_NUM_SEGMENTS * size)
                    offer = offer._replace(name=name, fd=fd)
        except (OSError, EnvironmentVariablesError) as error:
            offer = _Offer(without_link(str(error)), rank, call)
        offers, reason = _exchange(gather, offer)
        if reason:
            return reason
        memory: memoryview | None = None
        try:
            memory = memoryview(_map(offers, position, _NUM_SEGMENTS * size))
        except OSError as error:
            offer = offer._replace(reason=str(error))
        _, reason = _exchange(gather, offer)
        if memory is None or reason:
            return reason
        parts = [memory[start : start + size] for start in range(0, _NUM_SEGMENTS * size, size)]
        peers = [one.peer for one in offers]
        return [Segment(part, position, peers, timeout, check_backend, patience_seconds) for part in parts]
    finally:
        if fd >= 0:
            os.close(fd)


def _make_file(size: int) -> tuple[int, str]:
    """A file in memory that this user alone may open, and its name, which no other file has."""
    name = f"ignite_dist-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd, name


def _exchange(gather: Callable[[bytearray], bytearray], offer: _Offer) -> tuple[list[_Offer], str]:
    """The offers of all ranks, and the reason of the first rank that cannot share memory."""
    offers = _offers(gather(_row(offer)))
    return offers, next((f"rank {one.rank}: {one.reason}" for one in offers if one.reason), "")


def _row(offer: _Offer) -> bytearray:
    def ascii_only(text: str) -> str:
        return ascii(text)[1:-1][:_MAX_CHARACTERS]

    short = offer._replace(reason=ascii_only(offer.reason), call=ascii_only(offer.call))
    return bytearray(json.dumps(short).encode().ljust(_OFFER_BYTES))


def _offers(rows: bytes | bytearray) -> list[_Offer]:
    """The offers of all ranks. Raises ``CollectiveMismatchError`` if only some are of asynchronous calls."""
    starts = range(0, len(rows), _OFFER_BYTES)
    offers = [_Offer(*json.loads(rows[start : start + _OFFER_BYTES])) for start in starts]
    if len({offer.is_async for offer in offers}) > 1:
        calls = [f"{offer.call} with{'' if offer.is_async else 'out'} async_op=True" for offer in offers]
        by_rank = describe_by_rank([offer.rank for offer in offers], calls)
        raise CollectiveMismatchError(
            f"The ranks made different calls ({by_rank}). idist.compare_calls() shows their places."
        )
    return offers


def _map(offers: list[_Offer], position: int, size: int) -> mmap.mmap:
    """Map the first rank's file.

    Raises:
        OSError: this process cannot, or does not see the processes of the other ranks.
    """
    first, own = offers[0], offers[position]
    if any(one.pid_namespace != own.pid_namespace or start_time(one.pid) != one.start for one in offers):
        raise OSError("the ranks are on different machines, or in different PID namespaces")
    fd = _open_through_proc(first.pid, first.fd, first.name)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _open_through_proc(pid: int, fd: int, name: str) -> int:
    """Open a file of another process. Its name is compared first: opening another file may have effects."""
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise OSError(f"{path} is another file")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
