"""Connections between the launchers of a job. Each message is a line of JSON."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ignite_dist.rendezvous import connections

_SEND_SECONDS = 30.0


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
        # Shorter than the workers' keepalive timeout: the launchers report a lost node first.
        connections.enable_keepalive(sock, max(connections.keepalive_seconds() * 2 // 3, 3))
        self.sock = sock
        self._received = b""

    def fileno(self) -> int:
        """The file descriptor, for ``select``."""
        return self.sock.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. Errors are ignored: :meth:`receive` raises them after the peer's last messages."""
        with suppress(OSError):
            self.sock.settimeout(_SEND_SECONDS)
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Wait for data. Returns the complete messages, if any.

        Raises:
            OSError: the peer is gone, or no data arrived within ``seconds``.
            ValueError: the data are not a message.
        """
        self.sock.settimeout(seconds)
        received = self.sock.recv(1 << 20)
        if not received:
            raise ConnectionResetError("its launcher has ended")
        *lines, self._received = (self._received + received).split(b"\n")
        return [_decode(line) for line in lines]

    def receive_some(self, deadline: float) -> list[dict[str, Any]]:
        """Wait for at least one message; see :meth:`receive`."""
        while True:
            messages = self.receive(max(0.001, deadline - time.monotonic()))
            if messages:
                return messages


def _decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("the message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {message!r:.100}")
    return message
