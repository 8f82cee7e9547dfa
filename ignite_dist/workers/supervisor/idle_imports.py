"""Imports in the fork server's idle time. Only the fork server imports this module, which handles signals.

The constructor of ``DistributedDataParallel`` imports 800 modules, which takes each worker seconds. If the
fork server has imported these modules, its workers have them too. The server must not import them before it
starts its first workers: the launch would wait for the imports. So the launcher sends ``BEGIN_IMPORTS`` when
its first launch has ended, and the server begins a second later: most scripts have only one launch, and have
ended by then. The server's main loop starts workers between two imports. The imports stop when the launcher
ends: the server has the launcher's output files open, and a reader of a pipe would wait for it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from types import FrameType

from ignite_dist.internals._torch import DYNAMO
from ignite_dist.internals.collector import collector_paused
from ignite_dist.workers.process_end import flush_c_stdout, leave_finalizers
from ignite_dist.workers.supervisor.fork_server import BEGIN_IMPORTS

# From the leaves up, so that each import is short: a launch waits until the import under way has ended.
_MODULES = (
    "numpy",
    "mpmath",
    "sympy.core",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    DYNAMO,
    "torch.nn.parallel",
    "torch.distributed.optim",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
)

_IDLE_SECONDS = 1.0  # from BEGIN_IMPORTS to the first import
# The server's loop accepts connections in this time. Then SIGALRM starts the next import.
_PAUSE_SECONDS = 0.001

_modules = iter(_MODULES)


class _LauncherEnded(BaseException):
    """Raised inside of an import. Not an ``Exception``, which the importing modules might handle."""


class _LauncherCheck:
    """A finder that finds nothing, but is asked before each module of an import."""

    launcher_pid = os.getppid()

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Raise if the launcher has ended."""
        if os.getppid() != cls.launcher_pid:
            raise _LauncherEnded


def _begin(number: int, frame: FrameType | None) -> None:
    """Set the timer for the first import."""
    signal.signal(BEGIN_IMPORTS, signal.SIG_DFL)  # a second timer could start an import inside of an import
    signal.setitimer(signal.ITIMER_REAL, _IDLE_SECONDS)


def _import_next(number: int, frame: FrameType | None) -> None:
    """Import one module, then set the timer for the next one."""
    name = next(_modules, None)
    if name is None:
        return
    show, warnings.showwarning = warnings.showwarning, _show_nothing
    sys.meta_path.insert(0, _LauncherCheck)
    try:
        with suppress(Exception):  # a worker that needs the module gets the exception
            __import__(name)
    except _LauncherEnded:
        return
    finally:
        sys.meta_path.remove(_LauncherCheck)
        warnings.showwarning = show
    gc.freeze()
    signal.setitimer(signal.ITIMER_REAL, _PAUSE_SECONDS)


def _show_nothing(*args: object, **kwargs: object) -> None:
    """Replaces ``warnings.showwarning``. ``catch_warnings`` would drop the filters that a module sets."""


def _before_fork() -> None:
    """Block SIGTERM, so that a new process gets a SIGTERM that arrives before its own action is set.

    The server ignores SIGTERM, and an ignored signal is lost.
    """
    if os.getpid() == _server_pid:
        flush_c_stdout()  # preloaded modules may have printed from C
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_server() -> None:
    if os.getpid() == _server_pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _after_fork_in_worker() -> None:
    """Give a process that the server has started the actions of the signals that the server had first.

    The server keeps its finalizers.
    """
    if os.getppid() != _server_pid:  # a child of a worker
        return
    if _collects:
        gc.enable()
    leave_finalizers()
    signal.signal(signal.SIGTERM, _sigterm_action)
    for number in (BEGIN_IMPORTS, signal.SIGALRM):
        if signal.getsignal(number) in (_begin, _import_next):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _unblock_sigint() -> None:
    """Drop a Ctrl-C that came during the imports of the server, which has inherited a blocked SIGINT."""
    action = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The server's main loop keeps this action for the workers, and ignores SIGINT.
    signal.signal(signal.SIGINT, action)


def _import_package() -> None:
    """Import the whole package, which by itself imports half of its modules late."""
    package = import_module("ignite_dist")
    for name in package.__all__:
        getattr(package, name)


_collects = gc.isenabled()
with collector_paused():
    _import_package()
_server_pid = os.getpid()
# A garbage collection in a worker would write to all objects, and so copy the memory shared with this server.
gc.freeze()
# A SIGTERM to the process group is for the launcher and the workers. The server ends with the launcher: its
# earlier end would be taken for the end of the workers, whose exit codes it reports.
_sigterm_action = signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGALRM, _import_next)
signal.signal(BEGIN_IMPORTS, _begin)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_server, after_in_child=_after_fork_in_worker
)
# The server needs no collections. Each would look at everything that it has imported.
gc.disable()
_unblock_sigint()
