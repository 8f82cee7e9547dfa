"""A rank's result in its pipe to the launcher: the size, then the bytes in pieces.

``multiprocessing`` reads a message as a whole, and copies it. In pieces the launcher needs no second copy.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import NamedTuple

from ignite_dist.values.serialization import Payload

_PIECE_BYTES = 1 << 20


class ResultSize(NamedTuple):
    """The message before the bytes of a result."""

    nbytes: int


def send_result(sender: Connection, payload: Payload) -> None:
    """Send an encoded result."""
    sender.send_bytes(pickle.dumps(ResultSize(len(payload))))
    view = memoryview(payload)
    for start in range(0, len(view), _PIECE_BYTES):
        sender.send_bytes(view[start : start + _PIECE_BYTES])


def receive_result(receiver: Connection, buffer: bytearray | memoryview) -> Payload:
    """``buffer``, filled with the bytes that follow a :class:`ResultSize`. Waits for them.

    Raises:
        EOFError: the worker ended before it had sent all.
        BufferTooShort: the worker was interrupted, and has sent something else.
    """
    start = 0
    while start < len(buffer):
        start += receiver.recv_bytes_into(buffer, start)
    return buffer
