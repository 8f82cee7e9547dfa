"""A worker's call as bytes, beside the objects that the launcher shares with its workers."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import SemLock
from socket import socket
from typing import Any

import torch

from ignite_dist.environments import devices
from ignite_dist.internals._python import is_of_fork_context, reducer_for_processes
from ignite_dist.values import serialization
from ignite_dist.workers.unsent_parts import error_of_sending

Call = Callable[..., Any]

# Where the classes are whose objects have semaphores in their attributes.
_WITH_SEMAPHORES = ("multiprocessing.queues", "multiprocessing.sharedctypes", "multiprocessing.synchronize")

# The objects of the call that this thread decodes.
_decoding = threading.local()


@dataclass(frozen=True)
class EncodedCall:
    """A call that a worker can decode.

    Attributes:
        payload: the call as bytes.
        shared: objects in the call that ``multiprocessing`` shares: it sends them with the process.
        sources: lines of functions that are in no file (cells of a notebook), by the file name in their code
            objects, for the tracebacks of workers.
    """

    payload: bytes
    shared: tuple[Any, ...]
    sources: dict[str, list[str]]

    def refuse_semaphores_of_fork(self) -> None:
        """Raise if a shared object has a semaphore without a name, which only forked processes can use.

        Python 3.11.5 and newer do so themselves. With older ones, the worker that uses it crashes.

        Raises:
            RuntimeError: as newer Pythons raise it.
        """
        is_refused_by_python = sys.version_info >= (3, 11, 5) or sys.platform == "win32"
        if not is_refused_by_python and any(map(_is_for_fork, self.shared)):
            raise RuntimeError("A SemLock created in a fork context cannot be used in other processes.")

    def decode(self, local_rank: int) -> Call:
        """The call, in the worker of the ``local_rank``."""
        for name, lines in self.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        _decoding.shared = self.shared
        try:
            call: Call = serialization.decode(self.payload, partial(devices.of_local_rank, local_rank))
        finally:
            del _decoding.shared
        return call


def encode_call(call: Call) -> EncodedCall:
    """``call``, pickled by value if the workers cannot import this process's main module.

    Raises:
        TypeError: the function or an argument cannot be sent.
    """
    encode = serialization.encode if main_is_importable() else serialization.encode_by_value
    shared = _SharedObjects()
    payload = _encoded(call, encode, shared)
    sources = {} if main_is_importable() else _sources_in(payload)
    return EncodedCall(payload, tuple(shared.objects), sources)


def encode_for_machines(call: Call) -> EncodedCall:
    """``call``, pickled by value, for workers on other machines. They share no objects with the launcher.

    Raises:
        TypeError: the function or an argument cannot be sent.
    """
    payload = _encoded(call, serialization.encode_by_value, None)
    return EncodedCall(payload, (), _sources_in(payload))


def _encoded(
    call: Call, encode: Callable[[Any, Any], serialization.Payload], shared: _SharedObjects | None
) -> bytes:
    try:
        return bytes(encode(call, None if shared is None else shared.reduce))
    except TypeError as error:
        found = error

    def encode_part(value: Any) -> object:
        return encode(value, None if shared is None else _SharedObjects().reduce)

    better = error_of_sending(call, found, encode_part)
    raise better from better.__cause__


def _sources_in(payload: bytes) -> dict[str, list[str]]:
    return {
        name: linecache.getlines(name)
        for name in list(linecache.cache)
        if not os.path.exists(name) and name.encode("utf-8", "surrogatepass") in payload
    }


def main_is_importable() -> bool:
    """True if workers import the main module. False in a notebook, with ``-c``, from a pipe.

    Nor does ``multiprocessing`` import the ``__main__`` of a package (``python -m package``).
    """
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None:
        return not str(spec.name).endswith("__main__")
    return path is not None and os.path.exists(path)


# --- shared objects ------------------------------------------------------------------------------------


class _SharedObjects:
    """The shared objects in a call, each once, and the reference to each in the call's pickle."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._indices: dict[Any, int] = {}

    def reduce(self, value: Any) -> Any:
        """The ``reducer_override`` of a pickler."""
        if not _is_shared(value):
            return NotImplemented
        key = value.data_ptr() if isinstance(value, torch.UntypedStorage) else f"id {id(value)}"
        if key not in self._indices:
            self._indices[key] = len(self.objects)
            self.objects.append(value)
        return _shared_object, (self._indices[key],)


def _shared_object(index: int) -> Any:
    return _decoding.shared[index]


def _is_shared(value: Any) -> bool:
    """True for storage in shared memory, and for objects that only ``multiprocessing`` sends to a process."""
    if isinstance(value, type):
        return False
    if isinstance(value, torch.UntypedStorage):
        return value.device.type == "cpu" and value.is_shared()
    if isinstance(value, socket):
        return True
    if any(kind.__module__.startswith("multiprocessing.") for kind in type(value).__mro__):
        return not isinstance(value, BaseException)
    # Other types that are registered for processes: raw values (objects of ctypes), and the user's.
    reducer = reducer_for_processes(type(value))
    return reducer is not None and not reducer.__module__.startswith(("torch.", "multiprocessing.reduction"))


def _is_for_fork(value: Any, depth: int = 3) -> bool:
    if isinstance(value, SemLock):
        return is_of_fork_context(value)
    has_parts = any(kind.__module__ in _WITH_SEMAPHORES for kind in type(value).__mro__)
    parts = vars(value).values() if has_parts and depth else ()
    return any(_is_for_fork(part, depth - 1) for part in parts)
