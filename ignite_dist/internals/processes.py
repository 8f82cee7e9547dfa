"""Processes on this machine, and whether they have ended."""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """The process of a rank.

    Attributes:
        rank: its rank.
        pid: its number on this machine.
        start: when the process started, see :func:`start_time`.
    """

    rank: int
    pid: int
    start: str

    @property
    def who(self) -> str:
        """The rank and the process, for messages."""
        return f"rank {self.rank} (pid {self.pid})"

    def has_ended(self) -> bool:
        """True once the process has ended."""
        try:
            return start_time(self.pid) != self.start
        except OSError:  # this process has no free file descriptor
            return False


def start_time(pid: int) -> str | None:
    """When the process started, which tells it from a later one with its number; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]
