"""The fork server of a worker, from which the worker starts its own processes.

Since Python 3.14 a data loader starts its processes from a fork server by default. A fork server ends when
nobody holds its pipe open any more. Python gives the pipe to the process that starts the server, and to all
that the server starts. A data loader's process ends when its parent, the fork server, has ended. After the
worker's death the loader's process would wait for the server, and the server for that process. So this worker
alone holds the pipe, and the server ends with the worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from ignite_dist.internals._python import ForkServer

# The write end of the pipe (the fork server lives while it is open), and the server's process id.
_alive_fd: int | None = None
_server_pid: int | None = None


def begin() -> None:
    """Release the launcher's fork server. Let a fork server that this worker starts end with this worker."""
    server = ForkServer()
    server.forget()  # a forked worker inherits it
    # The launcher's server would otherwise live as long as this worker or its data loaders.
    if (keeps_alive := server.take_pipe()) is not None:
        os.close(keeps_alive)
    server.start_by(partial(_start, server))
    os.register_at_fork(after_in_child=_close_pipe)


def _start(server: ForkServer, ensure_running: Callable[[], None]) -> None:
    """Start the fork server if none is running. The processes that it starts get /dev/null for the pipe."""
    global _alive_fd, _server_pid
    ensure_running()
    with server.lock:  # threads may start processes at the same time
        if server.pid == _server_pid:
            return
        stand_in = os.open(os.devnull, os.O_RDONLY)
        _close_pipe()  # of a server that has died
        _alive_fd, _server_pid = server.take_pipe(stand_in), server.pid


def _close_pipe() -> None:
    global _alive_fd, _server_pid
    keeps_alive, _alive_fd, _server_pid = _alive_fd, None, None
    if keeps_alive is not None:
        os.close(keeps_alive)
