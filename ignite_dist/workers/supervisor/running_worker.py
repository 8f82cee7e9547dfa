"""A worker as the launcher sees it: its process, and what the worker has reported."""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import dataclass
from multiprocessing import BufferTooShort, connection
from multiprocessing.process import BaseProcess
from typing import Any

from ignite_dist.values import serialization
from ignite_dist.workers.failures import FailedRank, Failure, failure_of, silent_failure
from ignite_dist.workers.sent_results import ResultSize, receive_result

_NONE = serialization.encode(None)


@dataclass
class FaultOutput:
    """Output of a process's fault handler: the stacks of all threads at a fatal signal."""

    reader: connection.Connection
    text: str = ""

    def read(self) -> str:
        """The whole output, after the process has ended."""
        if not self.reader.closed:
            os.set_blocking(self.reader.fileno(), False)  # child processes may keep the pipe open
            with open(self.reader.fileno(), "rb", buffering=0, closefd=False) as file:
                self.text = (file.read() or b"").decode(errors="replace")
            self.reader.close()
        return self.text


@dataclass
class RunningWorker:
    """A rank and its process. The process may run other ranks too."""

    process: BaseProcess
    receiver: connection.Connection
    fault: FaultOutput
    control: connection.Connection  # to the process: the number of a signal; see interrupts.py
    local_rank: int
    rank: int
    started: bool = False
    done: bool = False
    result: serialization.Payload | None = None
    failure: Failure | None = None
    is_torn: bool = False  # a part of a result was read, and what follows is no message

    def read(self) -> None:
        """Read the messages that the worker has sent, without waiting."""
        try:
            while not self.is_torn and self.receiver.poll():
                message = pickle.loads(self.receiver.recv_bytes())
                if isinstance(message, int):
                    self.rank, self.started = message, True
                elif isinstance(message, Failure):
                    self.failure = message
                    self.result = _NONE if message.is_exit_0 else None
                else:
                    self._read_result(message)
        except (EOFError, OSError, BufferTooShort):
            pass  # the worker has closed the pipe, or was interrupted; the exit code gives the reason

    def _read_result(self, size: ResultSize) -> None:
        try:
            buffer = serialization.new_buffer(size.nbytes)
        except (MemoryError, OSError) as error:
            self.failure = failure_of(error)
            self.receiver.close()  # the worker need not send the rest
            return
        self.is_torn = True
        self.result = receive_result(self.receiver, buffer)
        self.is_torn = False

    def take_result(self) -> Any:
        """Decode the worker's result and free its bytes. A decoding error is a failure."""
        payload, self.result = self.result or b"", None
        try:
            return serialization.decode(payload)
        except Exception as error:  # raised by a class of the user
            self.failure = failure_of(error)
            return None

    def reap(self) -> None:
        """Record how the process ended."""
        self.read()
        self.process.join()
        self.done = True
        code, fault = self.process.exitcode or 0, self.fault.read()
        if self.failure is None and (self.result is None or code):
            self.failure = silent_failure(code, fault)  # it may have died after the function

    @property
    def has_reported(self) -> bool:
        """True if the user's function has ended: only the end of the process is left."""
        return self.failure is not None or self.result is not None

    @property
    def has_failed(self) -> bool:
        """True if the worker failed. ``sys.exit(0)`` does not count."""
        return self.failure is not None and not self.failure.is_exit_0

    def failed_rank(self) -> FailedRank | None:
        """The rank and its failure; None if the worker has not failed."""
        if self.failure is None:
            return None
        pid = int(self.process.pid or 0)
        return FailedRank(self.rank, self.local_rank, pid, socket.gethostname(), self.failure, self.started)
