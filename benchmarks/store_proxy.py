"""A proxy in front of a TCPStore: it counts the clients' requests, and the bytes in both directions.

The proxy reads torch's wire format: one byte for the kind of the request, then integers of eight bytes, and
strings after their lengths. An unknown request is an error.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import Counter
from typing import NamedTuple

_INTEGER = struct.Struct("<Q")
# The requests by their first byte, and the fields that follow: s is a string, q an integer of 8 bytes, i an
# integer of 4 bytes, * a count of repetitions of the fields after it.
_REQUESTS = (
    ("validate", "i"),
    ("set", "ss"),
    ("compare_set", "sss"),
    ("get", "s"),
    ("add", "sq"),
    ("check", "*s"),
    ("wait", "*s"),
    ("num_keys", ""),
    ("delete_key", "s"),
    ("append", "ss"),
    ("multi_get", "*s"),
    ("multi_set", "*ss"),
    ("cancel_wait", ""),
    ("ping", "i"),
)


class Request(NamedTuple):
    """One request of a client.

    Attributes:
        name: the store's operation.
        num_keys: number of keys in the request.
        nbytes: size of the request.
    """

    name: str
    num_keys: int
    nbytes: int


class StoreProxy:
    """Forwards and counts requests from :attr:`port` to a store on this machine.

    Attributes:
        clients: the requests of each connection, in the order of the connections.
        reply_bytes: the bytes of all answers.
    """

    def __init__(self, store_port: int) -> None:
        self.clients: list[list[Request]] = []
        self.reply_bytes = 0
        self.port = 0
        self._store_port = store_port
        self._loop = asyncio.new_event_loop()
        self._is_open = threading.Event()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()
        self._is_open.wait()

    def totals(self) -> Counter[str]:
        """The number of requests of each kind, over all clients."""
        return Counter(request.name for requests in self.clients for request in requests)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._is_open.set()
        await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[Request] = []
        self.clients.append(requests)
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store_port)
        replies = asyncio.ensure_future(self._forward_replies(store_reader, writer))
        try:
            while True:
                request, message = await _read(reader)
                requests.append(request)
                store_writer.write(message)
        except asyncio.IncompleteReadError:  # the client has disconnected
            store_writer.close()
            await replies
            writer.close()

    async def _forward_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(1 << 16):
            self.reply_bytes += len(part)
            writer.write(part)


async def _read(reader: asyncio.StreamReader) -> tuple[Request, bytes]:
    """The next request of a client, and the request's bytes."""
    first = await reader.readexactly(1)
    name, fields = _REQUESTS[first[0]]
    parts = [first]
    repeats = 1
    if fields.startswith("*"):
        parts.append(await reader.readexactly(8))
        repeats, fields = _INTEGER.unpack(parts[-1])[0], fields[1:]
    for field in fields * repeats:
        parts.append(await reader.readexactly(4 if field == "i" else 8))
        if field == "s":
            parts.append(await reader.readexactly(_INTEGER.unpack(parts[-1])[0]))
    message = b"".join(parts)
    return Request(name, repeats if "s" in fields else 0, len(message)), message
