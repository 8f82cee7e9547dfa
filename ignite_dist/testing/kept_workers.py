"""Workers that are kept, each with a connection to the process that has started them."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ignite_dist.errors import DistributedError

_POLLING_SECONDS = 0.02
_START_SECONDS = 120.0


class KeptWorkers:
    """Workers that wait for messages.

    Every worker connects to the address with ``multiprocessing.connection.Client``, and sends its rank and
    its process id.

    Attributes:
        workers: what ``start`` has returned.
        connections: to each rank.
        pids: process id of each rank.

    Raises:
        DistributedError: a worker ended before it connected.
        TimeoutError: a worker has not connected in two minutes.
    """

    def __init__(self, start: Callable[[str], Any], world_size: int) -> None:
        """Start the workers and wait for their connections.

        Args:
            start: takes the address. Returns an object that has ``join(timeout=None)``, which raises if a
                worker has failed, and ``terminate()``: ``idist.spawn(..., join=False)``.
            world_size: number of workers.
        """
        self.connections: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        with (
            tempfile.TemporaryDirectory(prefix="idist-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            address = str(Path(folder) / "workers")
            listener.bind(address)
            listener.listen(world_size)
            self.workers = start(address)
            deadline = time.monotonic() + _START_SECONDS
            try:
                while len(self.connections) < world_size:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the workers had not started after {_START_SECONDS:.0f} s.")
                    self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_POLLING_SECONDS)
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            self.workers.join(0)
            return
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        rank, pid = connection.recv()
        self.connections[rank], self.pids[rank] = connection, pid

    def close(self) -> None:
        """End the workers."""
        for connection in self.connections.values():
            connection.close()
        self.workers.terminate()
        with suppress(DistributedError):  # the workers were ended
            self.workers.join()
