"""The end of a worker that was forked: what Python does at the end of a process.

``multiprocessing`` ends such a process with ``os._exit``: files stay empty, temporary folders stay, and
handlers of ``atexit`` do not run. The start method "spawn" ends its processes as Python does.

Python destroys the objects of all modules. A fork shares the objects of the libraries with its server, so
only those of the user's modules are destroyed here. Objects of the launcher are left alone in a fork of it.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from ignite_dist.internals import _python
from ignite_dist.internals.call_sites import is_library_path

# A thread may hold a file's lock for ever. The end waits for such a file for this long.
_FLUSH_SECONDS = 10.0
_FAILED_OUTPUT = 120  # Python's exit status if stdout or stderr cannot be written
_MAIN_NAMES = ("__mp_main__", "__main__")

_failure_hooks: list[Callable[[], object]] = []
# What the modules of a forked launcher contained, by module.
_inherited: dict[str, dict[str, Any]] = {}
_collects_garbage = True
_fork_lock = threading.Lock()  # the garbage collector has one setting for all threads


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Context manager for a fork: keep garbage in the block, and in the fork until :func:`begin_in_fork`.

    The launcher's garbage may have a TCPStore. Its destructor waits for a thread, which a fork does not have.
    """
    global _collects_garbage
    flush_c_stdout()
    with _fork_lock:
        _collects_garbage = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if _collects_garbage:
                gc.enable()


def call_at_failure(hook: Callable[[], object]) -> None:
    """Let a failed worker call ``hook`` first, so that its peers need not wait for the worker's end."""
    if hook not in _failure_hooks:  # each replica of XLA makes this call
        _failure_hooks.append(hook)


def leave_finalizers() -> None:
    """Leave to the process, of which this one is a fork, what ``weakref.finalize`` would do at the exit.

    That process may have a temporary folder. In a fork server, torch's finalizers would take 50 ms.
    """
    _python.leave_finalizers()


def begin_in_fork() -> None:
    """Begin in a fork of the launcher: the launcher's handlers and finalizers run in the launcher only."""
    global _fork_lock
    _fork_lock = threading.Lock()  # the launcher's is held
    leave_finalizers()
    _python.leave_exit_handlers()
    _inherited.update((name, dict(names)) for name, names in _users_globals())
    gc.freeze()  # gc.get_objects() then returns this process's objects only
    if _collects_garbage:
        gc.enable()


def end(code: int, start_method: str) -> NoReturn:
    """End this process with the exit status ``code``, as Python ends a process.

    A Ctrl-C interrupts what waits: a child, a thread or a handler of ``atexit``. The other steps ignore it.
    """
    for hook in _failure_hooks if code else ():
        _try(hook)
    if start_method == "spawn":
        # multiprocessing would first join the children of an executor, which wait for one of its threads.
        _python.join_threads()
        sys.exit(code)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    _try(_python.join_threads, on_interrupt)
    _try(_python.run_exit_handlers, on_interrupt)
    _try(_python.join_children, on_interrupt)
    _try(logging.shutdown)  # Python 3.14 has removed this handler from a fork
    left_out: list[Any] = []
    # In a cycle a text file may lose its text: the collector may close the file inside of it first.
    _call_all("flush", _of_kinds(_open_files(), _TEXT), left_out)
    threading.excepthook = lambda _: None  # Python stops the daemon threads here
    for name, names in reversed(list(_users_globals())):
        _try(partial(_destroy_objects, names, _inherited.get(name, {})))
    _try(gc.collect)
    has_failed = _call_all("flush", [one for one in (sys.stdout, sys.stderr) if one is not None], left_out)
    files = _open_files()
    # Text goes to files of the other kinds, and these write to binary files.
    _call_all("flush", [*_of_kinds(files, _TEXT), _CStdout()], left_out)
    _call_all("close", _of_kinds(files, _compressed()), left_out)
    _call_all("flush", _of_kinds(files, _BINARY), left_out)
    os._exit(code or (_FAILED_OUTPUT if has_failed else 0))


def _try(function: Callable[[], object], on_interrupt: Any = None) -> None:
    """Call ``function``, and print what it raises. With ``on_interrupt``, the action of SIGINT meanwhile."""
    try:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)
        function()
    except KeyboardInterrupt:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _users_globals() -> Iterator[tuple[str, dict[str, Any]]]:
    """The global variables of the modules that are not from a library, the main module's last."""
    for name, module in list(sys.modules.items()):
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        is_users = isinstance(path, str) and not is_library_path(path) and f"-packages{os.sep}" not in path
        if is_users and name not in _MAIN_NAMES:
            yield name, vars(module)
    for name in _MAIN_NAMES:
        main = sys.modules.get(name)
        if isinstance(main, ModuleType):
            # multiprocessing has copied the variables. Functions of the script still use the original.
            functions = (one for one in list(vars(main).values()) if isinstance(one, FunctionType))
            originals = {id(one.__globals__): one.__globals__ for one in functions if one.__module__ == name}
            originals.pop(id(vars(main)), None)
            yield from ((name, names) for names in (*originals.values(), vars(main)))


def _destroy_objects(names: dict[str, Any], kept: dict[str, Any]) -> None:
    """Set the variables in ``names`` to None, except ``kept`` ones. Those with an underscore come first."""
    for key in sorted(names, key=lambda key: not str(key).startswith("_")):
        if not str(key).startswith("__") and (key not in kept or names.get(key) is not kept[key]):
            names[key] = None


_TEXT, _BINARY = (io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)


def _compressed() -> tuple[type, ...]:
    """Kinds of files whose end is written when they are closed: what comes last, and a checksum."""
    names = {"gzip": "GzipFile", "bz2": "BZ2File", "lzma": "LZMAFile", "zipfile": "ZipFile"}
    imported = [(sys.modules[module], name) for module, name in names.items() if module in sys.modules]
    return tuple(getattr(module, name) for module, name in imported)


def _open_files() -> list[Any]:
    """Files that this process has opened, without stdout and stderr."""
    files = _of_kinds(gc.get_objects(), (*_TEXT, *_BINARY, *_compressed()))
    return [file for file in files if file is not sys.stdout and file is not sys.stderr]


def _of_kinds(files: list[Any], kinds: tuple[type, ...]) -> list[Any]:
    return [file for file in files if issubclass(type(file), kinds)]


class _CStdout:
    """C's stdout as a file. Another thread may hold its lock for ever."""

    def flush(self) -> None:
        flush_c_stdout()


def flush_c_stdout() -> None:
    """Write the buffer of C's stdout. Otherwise each fork of this process would write its copy of it."""
    libc, name = ctypes.CDLL(None), "__stdoutp" if sys.platform == "darwin" else "stdout"
    libc.fflush(ctypes.c_void_p.in_dll(libc, name))


def _call_all(method: str, files: list[Any], left_out: list[Any]) -> bool:
    """Call a method of each file. True if that has failed for one of them.

    Such files, and those whose lock another thread keeps, are put into ``left_out`` with their buffers. Files
    that are there already are left out.
    """
    left, failed = iter(files), []
    current: list[Any] = []

    def call() -> None:
        for file in left:
            if any(file is other for other in left_out):
                continue
            current[:] = [file]
            try:
                getattr(file, method)()
            except (ValueError, AttributeError):  # a closed file, or a script's own object for stdout
                pass
            except Exception as error:
                failed.append(error)
                left_out.extend((file, getattr(file, "buffer", None)))

    while True:  # one more thread for each file whose lock another thread keeps
        thread = threading.Thread(target=call, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit allows no more threads
            call()
            break
        thread.join(_FLUSH_SECONDS)
        if not thread.is_alive():
            break
        left_out += [*current, *(getattr(file, "buffer", None) for file in current)]
    for error in failed:
        with suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    return bool(failed)
