"""Workers that are kept, each with a connection to the process that has started them."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from ignite_dist.errors import DistributedError

_POLLING_SECONDS = 0.02
_START_SECONDS = 120.0
_STACKS_SECONDS = 1.0  # from the signal until a worker has written its stacks, at most
_STACKS_SIGNAL = signal.SIGUSR2

_stacks: TextIO | None = None  # the file of this worker
_lock = threading.Lock()  # guards _stacks: replicas of XLA are threads of one worker


def register_stacks(address: str) -> None:
    """In a worker: let :meth:`KeptWorkers.stacks` ask it for the stacks of its threads."""
    global _stacks
    with _lock:
        if _stacks is None:
            _stacks = Path(f"{address}-{os.getpid()}").open("w", encoding="utf-8")  # noqa: SIM115
            faulthandler.register(_STACKS_SIGNAL, _stacks)


class KeptWorkers:
    """Workers that wait for messages.

    Every worker calls :func:`register_stacks`, connects to the address with
    ``multiprocessing.connection.Client``, and sends its rank and its process id.

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
        with ExitStack() as end, socket.socket(socket.AF_UNIX) as listener:
            folder = end.enter_context(tempfile.TemporaryDirectory(prefix="idist-"))
            self._address = str(Path(folder) / "workers")
            listener.bind(self._address)
            listener.listen(world_size)
            self.workers = start(self._address)
            end.callback(self._end_workers)
            deadline = time.monotonic() + _START_SECONDS
            while len(self.connections) < world_size:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the workers had not started after {_START_SECONDS:.0f} s.")
                self._accept(listener)
            self._end = end.pop_all()

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

    def stacks(self, rank: int) -> str:
        """The stacks of all threads of a worker; a sentence if it has not written them in a second.

        Raises:
            ProcessLookupError: the worker has ended.
        """
        file = Path(f"{self._address}-{self.pids[rank]}")
        os.kill(self.pids[rank], _STACKS_SIGNAL)
        size, before, until = 0, -1, time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < until and not (size and size == before):
            time.sleep(_POLLING_SECONDS)
            size, before = file.stat().st_size, size
        return file.read_text(encoding="utf-8", errors="replace") or "It wrote no stacks within a second."

    def failure(self) -> str:
        """How the workers have failed, when one of them has ended; empty if that is not known in a second."""
        try:
            self.workers.join(1)
        except DistributedError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the workers."""
        self._end.close()

    def _end_workers(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.workers.terminate()
        with suppress(DistributedError):  # the workers were ended
            self.workers.join()
