"""Where in the user's code a call comes from, and which frames are those of libraries."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

__all__ = [
    "is_library",
    "is_library_path",
    "is_package_path",
    "local_of",
    "note_library",
    "site_of",
    "site_of_place",
    "users_frame",
]

_MAX_SITE = 90

# Of this package, wherever this file is; of torch; of Python.
_PACKAGE: str = sys.modules[__name__.partition(".")[0]].__path__[0]
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (_PACKAGE, os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
)
_INSTALLED = ("torch", "torch_xla", "horovod", os.path.basename(_PACKAGE))
# The code of backends that others have written: files, and folders of packages.
_backends: set[str] = set()


def is_package_path(path: str) -> bool:
    """True if ``path`` is code of this package."""
    return path.startswith(_LIBRARIES[0])


def note_library(module: str) -> None:
    """Count ``module``, which defines a backend, and its whole package as a library's code.

    Not a script that defines a backend beside its own code.
    """
    found = sys.modules.get(module.partition(".")[0])
    path = getattr(found, "__file__", None)
    if path is not None and module != "__main__":
        folder, name = os.path.split(path)
        _backends.add(os.path.join(folder, "") if name == "__init__.py" else path)
        is_library_path.cache_clear()
        _known.clear()


@lru_cache(maxsize=4096)
def is_library_path(path: str) -> bool:
    """True if ``path`` is code of this package, of torch, of a backend's library or of Python's own."""
    if path.startswith(tuple(_backends)):
        return True
    _, packages, rest = path.rpartition("-packages" + os.sep)  # site-packages, dist-packages
    if packages:
        return rest.partition(os.sep)[0] in _INSTALLED
    return path.startswith((*_LIBRARIES, "<frozen "))


def is_library(frame: FrameType) -> bool:
    """True if the code of ``frame`` is a library's; see :func:`is_library_path`."""
    return is_library_path(frame.f_code.co_filename)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` on outwards, that is the user's own code."""
    while frame is not None:
        path = frame.f_code.co_filename
        is_of_library = _known.get(path)  # each collective comes here while its calls are kept
        if is_of_library is None:
            is_of_library = _known[path] = is_library_path(path)
        if not is_of_library and not _is_generated(frame):
            break
        frame = frame.f_back
    return frame


_known: dict[str, bool] = {}


def local_of(frame: FrameType | None, *names: str) -> Any:
    """The first variable of one of these names in the library's innermost frames; None if there is none."""
    while frame is not None and is_library(frame):
        for name in names:
            if (found := frame.f_locals.get(name)) is not None:
                return found
        frame = frame.f_back
    return None


def _is_generated(frame: FrameType) -> bool:
    """True if torch.compile wrote the code: under a name, or into a file, that is each rank's own."""
    module = frame.f_globals.get("__name__", "")
    return frame.f_code.co_filename.startswith("<eval_with_key>") or module.startswith("torch._inductor.")


def site_of(frame: FrameType | None) -> str:
    """``"folder/file.py:12"``, the same on machines where the code is in different places."""
    return "?" if frame is None else site_of_place(frame.f_code.co_filename, frame.f_lineno)


def site_of_place(path: str, line: int) -> str:
    """:func:`site_of` a line of a file."""
    return f"{_short(path)}:{line}"


@lru_cache(maxsize=4096)
def _short(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(os.path.basename(folder), name)[-_MAX_SITE:]
