"""All private names of Python's standard library that the package uses.

:data:`PRIVATE_NAMES` gives the reason for each name. Other files use the functions below. ``ignite-dist env``
and the tests look up each name in the running Python.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from typing import Any

from ignite_dist.internals.private_names import PrivateName, missing

_OLD = "3.10 or older"  # 3.10 is the oldest Python that the package supports
_SERVER = "multiprocessing.forkserver.ForkServer"
_END = "a worker's end raises AttributeError"
_LAUNCH = "none: a launch with the start method forkserver raises AttributeError"

PRIVATE_NAMES = tuple(
    PrivateName(name, why, fallback, _OLD)
    for name, why, fallback in (
        (
            "multiprocessing.forkserver._forkserver",
            "No public name gives the fork server of this process, only the function that starts it.",
            _LAUNCH,
        ),
        (
            f"{_SERVER}._forkserver_pid",
            "A fork must not wait for its parent's server, and the server gets a signal when it is idle.",
            _LAUNCH,
        ),
        (f"{_SERVER}._forkserver_address", "A fork forgets the server of its parent.", _LAUNCH),
        (
            f"{_SERVER}._forkserver_alive_fd",
            "The server lives while this pipe is open. A worker must not keep the launcher's server alive.",
            _LAUNCH,
        ),
        (
            f"{_SERVER}._preload_modules",
            "set_forkserver_preload() replaces the script's own list, which nothing public returns.",
            _LAUNCH,
        ),
        (f"{_SERVER}._lock", "Threads of a worker may start its fork server at the same time.", _LAUNCH),
        (
            "multiprocessing.process.BaseProcess._config",
            "Only this dict goes to each new process, with any start method. A rank puts its identity there.",
            "none: `initialize` raises AttributeError",
        ),
        (
            "multiprocessing.spawn._main._inheriting",
            "Tells a worker that still imports its main module, where it may not start workers.",
            "the message is multiprocessing's own",
        ),
        (
            "multiprocessing.reduction.ForkingPickler._extra_reducers",
            "Tells the types that multiprocessing can send only to a new process.",
            "none: `spawn` raises AttributeError",
        ),
        (
            "multiprocessing.synchronize.SemLock._semlock",
            "Only its name tells a lock of a fork context, which no other process can open.",
            "none: sending a lock raises AttributeError",
        ),
        ("multiprocessing.util._exit_function", "A forked worker joins its children at its end.", _END),
        ("threading._shutdown", "A forked worker joins its threads at its end.", _END),
        ("atexit._run_exitfuncs", "multiprocessing ends a fork without the handlers of atexit.", _END),
        ("atexit._clear", "The launcher's handlers run in the launcher only.", _END),
        (
            "weakref.finalize._registry",
            "The launcher's finalizers run in the launcher only. They are left, not called.",
            "none: a worker fails at its start",
        ),
        (
            "weakref.finalize._registered_with_atexit",
            "Python 3.14 clears the handlers of a fork, and a new finalizer must register itself again.",
            "finalizers of a forked worker do not run at its end",
        ),
        (
            "pickle._Pickler",
            "The pickler in C cannot change how ints are written, and weights_only reads no large ints.",
            "none: `import ignite_dist` fails, with this name in the message",
        ),
    )
)


def check() -> list[PrivateName]:
    """The members of :data:`PRIVATE_NAMES` that this Python lacks."""
    return missing(PRIVATE_NAMES)


PythonPickler = pickle._Pickler
"""The pickler that is written in Python."""


# --- multiprocessing ---------------------------------------------------------------------------------


class ForkServer:
    """The fork server of this process: its process id, its pipe and its start."""

    def __init__(self) -> None:
        self._server: Any = multiprocessing.forkserver._forkserver

    @property
    def pid(self) -> int | None:
        """The server's process id; None if this process has started none."""
        pid: int | None = self._server._forkserver_pid
        return pid

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while the server is started."""
        lock: AbstractContextManager[Any] = self._server._lock
        return lock

    @property
    def preload_modules(self) -> list[str]:
        """What the server imports at its start, as the script has chosen."""
        return list(self._server._preload_modules)

    def ensure_running(self) -> None:
        """Start the server if it does not run."""
        self._server.ensure_running()

    def start_by(self, function: Callable[[Callable[[], None]], None]) -> None:
        """Call ``function`` whenever Python needs the server. Its argument starts the server."""
        original = type(self._server).ensure_running
        self._server.ensure_running = lambda: function(lambda: original(self._server))

    def take_pipe(self, stand_in: int | None = None) -> int | None:
        """Return the pipe that keeps the server alive. Child processes inherit ``stand_in`` instead of it."""
        pipe: int | None = self._server._forkserver_alive_fd
        self._server._forkserver_alive_fd = stand_in
        return pipe

    def forget(self) -> None:
        """Let Python start another server when it needs one."""
        self._server._forkserver_pid = self._server._forkserver_address = None


def sent_to_new_processes() -> dict[str, Any]:
    """What multiprocessing sends to each process that this process starts; may be changed."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


def is_importing_main() -> bool:
    """True in a process of multiprocessing that still imports the main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def reducer_for_processes(kind: type[Any]) -> Any:
    """The function registered to send objects of ``kind`` to new processes; None if there is none."""
    return ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]


def is_of_fork_context(lock: SemLock) -> bool:
    """True for a lock that only a fork of this process can use."""
    return lock._semlock.name is None  # type: ignore[attr-defined]


# --- the end of a process ----------------------------------------------------------------------------


def leave_finalizers() -> None:
    """Let no ``weakref.finalize`` of now run at the exit of this process."""
    finalize: Any = weakref.finalize
    for entry in finalize._registry.values():
        entry.atexit = False
    # Python 3.14 clears the handlers of ``atexit`` in a fork. A later finalizer registers a new one.
    finalize._registered_with_atexit = False


def leave_exit_handlers() -> None:
    """Let no handler of ``atexit`` of now run at the exit of this process."""
    atexit._clear()


def join_children() -> None:
    """Do what multiprocessing does at the exit: join its processes, terminate its daemons."""
    util._exit_function()  # type: ignore[attr-defined]


def join_threads() -> None:
    """Do what ``threading`` does at the exit."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Run the handlers of ``atexit``, and print what they raise."""
    atexit._run_exitfuncs()
