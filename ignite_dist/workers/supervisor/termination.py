"""The end of workers: by the launcher's Ctrl-C or SIGTERM, with time to save, or at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from ignite_dist.environments.base import read_int
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.workers.worker import TERMINATE_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Self

# Time for the workers to save and to end, after the launcher has passed them its signal.
_GRACE_SECONDS = 10
GRACE_VARIABLE = "IGNITE_DIST_GRACE_SECONDS"


def grace_seconds() -> int:
    """How long the workers may run after Ctrl-C or SIGTERM. An environment variable overrides the default.

    Raises:
        EnvironmentVariablesError: the environment variable is not a number, or negative.
    """
    seconds = read_int(os.environ, GRACE_VARIABLE)
    if seconds is None:
        return _GRACE_SECONDS
    if seconds < 0:
        raise EnvironmentVariablesError(f"{GRACE_VARIABLE} must be 0 seconds or more, got {seconds}.")
    return seconds


class SigtermReceived(BaseException):
    """The launcher has received SIGTERM."""


class SigtermDelay:
    """Context manager: delay SIGTERM until the end of the block. The process then dies of it.

    Without effect outside of the main thread, or if SIGTERM has another action than the default one.

    Attributes:
        received: True after SIGTERM.
        fds: file descriptors that become readable then.
    """

    def __init__(self) -> None:
        self.received = False
        self.fds: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.fds = os.pipe()
            signal.signal(signal.SIGTERM, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            os.write(self.fds[1], b"x")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.fds:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
        if self.received:
            os.kill(os.getpid(), signal.SIGTERM)


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """End the processes within seconds, even after repeated Ctrl-C."""
    try:
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
