"""The end of a worker that was forked: what Python does at the end of a process.

``multiprocessing`` ends such a process with ``os._exit``: files stay empty, temporary folders stay, and
handlers of ``atexit`` do not run. The start method "spawn" ends its processes as Python does.

Python destroys the objects of all modules. A fork shares the objects of the libraries with its server, so
only those of the user's modules are destroyed here. Objects of the launcher are left alone in a fork of it.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import util
from types import ModuleType
from typing import Any, NoReturn

from ignite_dist.call_sites import is_library_path

failure_hooks: list[Callable[[], object]] = []
"""Functions that a failed worker calls before anything else, so that its peers need not wait for its end."""

# What the modules of a forked launcher contained: ids by module, then by name.
_inherited: dict[str, dict[str, int]] = {}


def begin_in_fork() -> None:
    """Leave to the launcher, of which this process is a fork, its handlers, finalizers and objects."""
    finalize: Any = weakref.finalize
    for entry in finalize._registry.values():
        entry.atexit = False  # a temporary folder of the launcher, for example
    atexit._clear()
    finalize._registered_with_atexit = False
    atexit.register(logging.shutdown)
    _inherited.update(
        (name, {key: id(one) for key, one in vars(module).items()}) for name, module in _users()
    )
    gc.freeze()  # gc.get_objects() then returns this process's objects only


def end(code: int, start_method: str) -> NoReturn:
    """End this process with the exit status ``code``, as Python ends a process."""
    for hook in failure_hooks if code else ():
        _try(hook)
    if start_method == "spawn":
        sys.exit(code)
    _try(util._exit_function)  # type: ignore[attr-defined]  # joins the children
    _try(threading._shutdown)  # type: ignore[attr-defined]  # joins the threads
    _try(atexit._run_exitfuncs)  # prints exceptions of handlers
    threading.excepthook = lambda _: None  # Python stops the daemon threads here
    _try(_destroy_objects)
    _try(gc.collect)
    _try(_flush_files)
    os._exit(code)


def _try(function: Any) -> None:
    try:
        function()
    except BaseException:
        sys.excepthook(*sys.exc_info())


def _users() -> Iterator[tuple[str, ModuleType]]:
    """The modules that are not from a library, the main module last."""
    modules = [(name, module) for name, module in sys.modules.items() if isinstance(module, ModuleType)]
    for name, module in modules:
        path = vars(module).get("__file__")  # not getattr, which imports a lazy module
        if isinstance(path, str) and not is_library_path(path) and f"-packages{os.sep}" not in path:
            yield name, module
    for name in ("__mp_main__", "__main__"):
        if name in sys.modules:
            yield name, sys.modules[name]


def _destroy_objects() -> None:
    """Forget what the user's modules have, the main module's first. Names with an underscore go first."""
    for name, module in reversed(list(_users())):
        kept, names = _inherited.get(name, {}), vars(module)
        for key in sorted(names, key=lambda key: not key.startswith("_")):
            if not key.startswith("__") and kept.get(key) != id(names.get(key)):
                names[key] = None


def _flush_files() -> None:
    """Write the buffers of the files that are open, those of a text before those of its bytes."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [one for one in gc.get_objects() if isinstance(one, kinds)]
    for file in sorted([*files, sys.stdout, sys.stderr], key=lambda one: not isinstance(one, io.TextIOBase)):
        with suppress(Exception):
            file.flush()
