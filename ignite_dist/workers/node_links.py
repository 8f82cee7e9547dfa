"""Lines of text between the launchers of a job, one connection for each pair."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ignite_dist.rendezvous import connections

__all__ = ["Link", "Node"]


_SECONDS_TO_SEND = 30.0


class Node(NamedTuple):
    """A machine of the job."""

    rank: int
    host: str
    address: str
    nproc_per_node: int

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, {self.address})"


class Link:
    """A connection between two launchers."""

    def __init__(self, sock: socket.socket) -> None:
        # Launchers find out before their workers do, and say so.
        connections.watch(sock, max(connections.seconds_of_silence() * 2 // 3, 3))
        self.sock = sock
        self._received = b""

    def fileno(self) -> int:
        """The file descriptor, for ``select``."""
        return self.sock.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. That the other end is gone is found by :meth:`receive`."""
        # Until then there may be something to read.
        with suppress(OSError):
            self.sock.settimeout(_SECONDS_TO_SEND)
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """The messages that have come, none if it was a part of one.

        Raises:
            OSError: the other end is gone, or nothing has come within ``seconds``.
            ValueError: what has come is no message.
        """
        self.sock.settimeout(seconds)
        received = self.sock.recv(1 << 20)
        if not received:
            raise ConnectionResetError("its launcher has ended")
        *lines, self._received = (self._received + received).split(b"\n")
        return [_decoded(line) for line in lines]

    def receive_some(self, deadline: float) -> list[dict[str, Any]]:
        """At least one message; else see :meth:`receive`."""
        while True:
            messages = self.receive(max(0.001, deadline - time.monotonic()))
            if messages:
                return messages


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {message!r:.100}")
    return message
