"""The fork server of a worker, from which the worker starts its own processes.

Since Python 3.14 a data loader starts its processes from a fork server by default. A fork server ends when
the process that started it and all processes that it has started have closed a pipe. A data loader's process
ends when its parent, the fork server, has ended. After the worker's death each would wait for the other. So
this worker alone holds the pipe, and the server ends with the worker.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
from functools import partial
from typing import Any

# The end of the pipe that keeps the fork server alive, and the server's process id.
_alive_fd: int | None = None
_server_pid: int | None = None


def begin() -> None:
    """Release the launcher's fork server. Let a fork server that this worker starts end with this worker."""
    server: Any = multiprocessing.forkserver._forkserver
    # The launcher's server would otherwise live as long as this worker or its data loaders.
    keeps_alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if keeps_alive is not None:
        os.close(keeps_alive)
    server._forkserver_pid = server._forkserver_address = None  # a fork of the launcher inherits both values
    server.ensure_running = partial(_ensure_running, server)  # called before each start of a process
    os.register_at_fork(after_in_child=_close_pipe)


def _ensure_running(server: Any) -> None:
    """Start the fork server if none is running. Its processes get another file in place of the pipe."""
    global _alive_fd, _server_pid
    type(server).ensure_running(server)
    with server._lock:  # threads may start processes at the same time
        if server._forkserver_pid == _server_pid:
            return
        stand_in = os.open(os.devnull, os.O_RDONLY)
        _close_pipe()  # of a server that has died
        _alive_fd, _server_pid = server._forkserver_alive_fd, server._forkserver_pid
        server._forkserver_alive_fd = stand_in


def _close_pipe() -> None:
    global _alive_fd, _server_pid
    keeps_alive, _alive_fd, _server_pid = _alive_fd, None, None
    if keeps_alive is not None:
        os.close(keeps_alive)
