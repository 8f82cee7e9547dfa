"""Connections between the launchers of a job. Each message is a line of JSON."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ignite_dist.environments.rendezvous import connections

_SEND_SECONDS = 30.0


class Node(NamedTuple):
    """A machine of the job. ``job_id`` is known of node 0 only."""

    rank: int
    host: str
    address: str
    nproc_per_node: int
    job_id: str = ""

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, {self.address})"


@dataclass(frozen=True)
class Hello:
    """First message of a launcher. All nodes need the same ``nnodes``, ``backend`` and ``max_restarts``."""

    node_rank: int
    nnodes: int
    nproc_per_node: int
    backend: str
    host: str
    max_restarts: int = 0
    job_id: str = ""

    def objection(self, other: Hello, taken: Mapping[int, str]) -> str | None:
        """The reason why the sender of ``other`` cannot join this launcher's job; None if it can."""
        for name in ("nnodes", "backend", "max_restarts"):
            value, other_value = getattr(self, name), getattr(other, name)
            if value != other_value:
                place = f"{self.host} (node {self.node_rank})"
                return f"{name} is {value!r} on {place}, and {other_value!r} on {other.host}"
        if not 0 <= other.node_rank < self.nnodes:
            return f"node_rank={other.node_rank} on {other.host} is not in [0, {self.nnodes})"
        if other.node_rank in taken:
            return f"node_rank is {other.node_rank} on both {taken[other.node_rank]} and {other.host}"
        return None


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
