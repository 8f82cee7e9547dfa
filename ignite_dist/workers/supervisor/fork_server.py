"""Python's fork server, and the encoding of a worker's environment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, reduction, resource_tracker, util
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any

from ignite_dist.errors import LaunchError
from ignite_dist.internals import limits
from ignite_dist.internals._python import ForkServer, is_importing_main
from ignite_dist.workers.output import is_open
from ignite_dist.workers.sent_calls import main_is_importable
from ignite_dist.workers.worker import apply_launch

BEGIN_IMPORTS = signal.SIGURG
"""The signal that starts the imports of ``idle_imports``. Other processes ignore it by default."""

_IDLE_IMPORTS = "ignite_dist.workers.supervisor.idle_imports"


def exit_if_main_is_not_guarded() -> None:
    """End this process if it is a worker that imports a script which starts workers when it is imported."""
    if not is_importing_main():
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(
            "The script starts workers when it is imported, and workers import the script. Put this part of "
            'the script under `if __name__ == "__main__":`.\n'
        )
    raise SystemExit(1)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep ``multiprocessing`` from importing a main module whose file does not exist."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or main_is_importable():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def context_of(start_method: str | None) -> BaseContext:
    """Python's context for a start method (default: forkserver, else spawn); starts the fork server.

    Raises:
        ValueError: this platform has no such start method.
    """
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # multiprocessing reads it; pdb removes it
    allowed = multiprocessing.get_all_start_methods()
    method = start_method or ("forkserver" if "forkserver" in allowed else "spawn")
    if method not in allowed:
        raise ValueError(f"Unknown start_method {method!r}. Allowed here: {', '.join(map(repr, allowed))}.")
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # The preload list omits "__main__", which Python preloads by default: each worker imports the main
        # module with its launch's environment. A server that already runs ignores the list.
        server = ForkServer()
        modules = [name for name in server.preload_modules if name != "__main__"]
        context.set_forkserver_preload(list(dict.fromkeys([*modules, "ignite_dist", _IDLE_IMPORTS])))
        with _server_lock:
            _forget_server_of_parent(server)
            if server.pid is None:
                with interrupt_delayed():
                    _start_server(server)
    return context


_server_lock = threading.Lock()
# The process ids of this process and of the fork server that it has started, until import_in_idle_server().
_idle_server: tuple[int, int] | None = None


@contextmanager
def interrupt_delayed() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block. A new process must not be a fork of this one.

    The fork server of Python 3.14 dies if its client closes the connection too early. A blocked SIGINT is not
    enough: another thread may receive it, and Python runs the handler in this one.
    """
    action = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(action):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, action)
        if received:
            signal.raise_signal(signal.SIGINT)


def _forget_server_of_parent(server: ForkServer) -> None:
    """In a forked process: forget the fork server that its parent has started. Python would wait for it.

    Raises nothing, and does not reap a server that has died: Python does that.
    """
    if server.pid is None:
        return
    try:
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        server.forget()
        if (pipe := server.take_pipe()) is not None:
            os.close(pipe)  # or the server would live as long as this process


def _start_server(server: ForkServer) -> None:
    """Start the fork server with the import path of this process.

    Before Python 3.13 the server does not get ``sys.path``, and would preload the installed package.

    The server ignores Ctrl-C, but only after its imports. Until then SIGINT is blocked: see ``idle_imports``.
    """
    global _idle_server
    resource_tracker.ensure_running()  # the server starts it otherwise, which would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    folders = [folder for folder in sys.path if isinstance(folder, str)]
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    if "" not in folders:
        environ["PYTHONSAFEPATH"] = "1"  # `python -c` would look for modules in the working folder first
    previous = {name: os.environ.get(name) for name in environ}
    try:
        os.environ.update(environ)
        _ensure_running(server)
        assert server.pid is not None
        _idle_server = os.getpid(), server.pid
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: the server inherits the mask


# The path of a socket has at most 103 bytes on macOS, and 107 on Linux. multiprocessing adds 32 bytes.
_LONGEST_FOLDER = 103 - len("/pymp-01234567/listener-01234567")


def _ensure_running(server: ForkServer) -> None:
    """Start the fork server, whose socket is in ``multiprocessing``'s temporary folder.

    Raises:
        LaunchError: the folder's path is too long for a socket, or no folder can be written.
    """
    try:
        if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
            configured, tempfile.tempdir = tempfile.tempdir, "/tmp"
            try:
                with suppress(OSError):
                    util.get_temp_dir()  # makes the folder, unless this process has one already
            finally:
                tempfile.tempdir = configured
        server.ensure_running()
    except BlockingIOError:  # no more processes
        raise
    except OSError as error:
        if "AF_UNIX path too long" in str(error):
            raise LaunchError(
                f"The path of the temporary folder {util.get_temp_dir()} is too long for the socket of the "
                "fork server. Set TMPDIR to a short path."
            ) from error
        room = limits.room_in(os.environ.get("TMPDIR", "/tmp"))
        about = " ".join(filter(None, (f"{error}.", room, limits.sentences_about("File too large"))))
        raise LaunchError(
            f"The fork server cannot be started: {about} Set TMPDIR to a folder that can be written."
        ) from error


def import_in_idle_server() -> None:
    """Let the fork server import what the workers of later launches may need; see ``idle_imports``.

    To be called when a launch has ended. The workers of a running launch would have to share the cores. Only
    the first call has an effect, and only if this package has started the server, with its preload list.
    """
    global _idle_server
    with _server_lock:
        idle_server, _idle_server = _idle_server, None
    if idle_server is not None and idle_server == (os.getpid(), ForkServer().pid):
        with suppress(ProcessLookupError):
            os.kill(idle_server[1], BEGIN_IMPORTS)


class Launch(str):
    """A process name that carries the environment and the output files of the launch.

    A worker of ``multiprocessing`` decodes its name before it imports the main module. No other hook runs
    that early.
    """

    environ: dict[str, str]
    fault_writer: connection.Connection | None
    outputs: Mapping[int, int]

    def __new__(  # noqa: D102
        cls,
        name: str,
        environ: dict[str, str],
        fault_writer: connection.Connection,
        outputs: Mapping[int, int],
    ) -> Launch:
        self = super().__new__(cls, name)
        self.environ = environ
        self.fault_writer = fault_writer
        self.outputs = outputs
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        popen = get_spawning_popen()
        outputs = self.outputs
        if popen is not None and popen.method == "forkserver":
            # The fork server has the first launch's stdout and stderr. Later launches may have other files.
            outputs = {**{fd: fd for fd in (1, 2) if is_open(fd)}, **outputs}
        # The name is pickled again with the process, but files can be sent only once.
        fault_writer, self.fault_writer = self.fault_writer, None
        sent = {} if fault_writer is None else {fd: reduction.DupFd(file) for fd, file in outputs.items()}
        return apply_launch, (str(self), self.environ, fault_writer, sent)
