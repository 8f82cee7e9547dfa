"""Find the line of the user's code that made a call, warn there, and tell library frames from the user's."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

import torch

from ignite_dist.internals import _torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MAX_SITE_LENGTH = 90

# The folders of this package, of torch and of Python's standard library.
_PACKAGE: str = sys.modules[__name__.partition(".")[0]].__path__[0]
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (_PACKAGE, os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
)
# The cases of the conformance suite play the user's code.
_CASES = os.path.join(_PACKAGE, "testing", "conformance", "test_")
_LIBRARY_NAMES = ("torch", "torch_xla", "horovod", os.path.basename(_PACKAGE))
# The files and package folders of backends that other packages define.
_backend_paths: set[str] = set()


def is_package_path(path: str) -> bool:
    """True if ``path`` is code of this package."""
    return path.startswith(_LIBRARIES[0]) and not path.startswith(_CASES)


def add_library(module: str) -> None:
    """Treat ``module``, which defines a backend, and its top-level package as library code.

    A script (``__main__``) that defines a backend stays user code.
    """
    package = sys.modules.get(module.partition(".")[0])
    path = getattr(package, "__file__", None)
    if path is not None and module != "__main__":
        folder, name = os.path.split(path)
        _backend_paths.add(os.path.join(folder, "") if name == "__init__.py" else path)
        is_library_path.cache_clear()
        _is_library_by_path.clear()


@lru_cache(maxsize=4096)
def is_library_path(path: str) -> bool:
    """True if ``path`` is code of this package, of torch, of a backend's library or of Python itself."""
    if path.startswith(_CASES):
        return False
    if path.startswith(tuple(_backend_paths)):
        return True
    _, packages, rest = path.rpartition("-packages" + os.sep)  # site-packages, dist-packages
    if packages:
        return rest.partition(os.sep)[0] in _LIBRARY_NAMES
    return path.startswith((*_LIBRARIES, "<frozen "))


def is_library(frame: FrameType) -> bool:
    """True if ``frame`` runs library code; see :func:`is_library_path`."""
    return is_library_path(frame.f_code.co_filename)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from ``frame`` outwards."""
    while frame is not None:
        path = frame.f_code.co_filename
        is_of_library = _is_library_by_path.get(path)  # cached: each collective calls this function
        if is_of_library is None:
            is_of_library = is_library_path(path) or _is_generated(frame) or _starts_worker(frame)
            if not path.startswith("<"):  # code of several modules may be called "<string>"
                _is_library_by_path[path] = is_of_library
        if not is_of_library:
            break
        frame = frame.f_back
    return frame


def warn_user(message: str) -> None:
    """Warn at the line of the user's code that made the call."""
    frame = users_frame(sys._getframe(1))
    if frame is None:  # at the interpreter's exit, for example
        warnings.warn(message, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


_is_library_by_path: dict[str, bool] = {}


def local_of(frame: FrameType | None, *names: str) -> Any:
    """The first local variable in ``names`` that is not None, in the innermost library frames; else None."""
    while frame is not None and is_library(frame):
        for name in names:
            if (found := frame.f_locals.get(name)) is not None:
                return found
        frame = frame.f_back
    return None


def _is_generated(frame: FrameType) -> bool:
    """True if torch.compile generated the code. Its file or module names differ between ranks."""
    module = frame.f_globals.get("__name__", "")
    return frame.f_code.co_filename.startswith("<eval_with_key>") or module.startswith("torch._inductor.")


def _starts_worker(frame: FrameType) -> bool:
    """True for the command of the ``python -c`` by which multiprocessing starts a process."""
    return (
        frame.f_back is None
        and frame.f_code.co_filename == "<string>"
        and multiprocessing.parent_process() is not None
    )


def reported_as(name: str) -> Callable[[_Function], _Function]:
    """Decorator: reports that say which function the user has called show ``name`` for this one."""

    def rename(function: _Function) -> _Function:
        function.__code__ = function.__code__.replace(co_name=name)
        return function

    return rename


# Modules of functions that wrap the functions that users call, such as a model's forward().
_WRAPPER_MODULES = (
    *("torch.distributed.c10d_logger", "torch.nn.modules.module", "contextlib"),
    *_torch.WRAPPER_MODULES,
)


def function_called(frame: FrameType | None) -> str:
    """Name of the library function that the user's code has called, for example ``"all_reduce"``."""
    name = "?"
    while frame is not None and is_library(frame):
        module = str(frame.f_globals.get("__name__"))
        if module not in _WRAPPER_MODULES:
            name = _torch.CALLED_AS.get((module, frame.f_code.co_name), frame.f_code.co_name)
        frame = frame.f_back
    return name


def site_of(frame: FrameType | None) -> str:
    """``"folder/file.py:12"``. It is the same on machines that have the code in different folders."""
    return "?" if frame is None else site_of_place(frame.f_code.co_filename, frame.f_lineno)


def site_of_place(path: str, line: int) -> str:
    """The result of :func:`site_of` for a file and a line."""
    return f"{_short(path)}:{line}"


@lru_cache(maxsize=4096)
def _short(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(os.path.basename(folder), name)[-_MAX_SITE_LENGTH:]
