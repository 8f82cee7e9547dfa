"""Objects that cannot run code when ``torch.load(weights_only=True)`` decodes them.

torch's unpickler builds plain values and tensors, and calls only registered functions. This module registers
more types that only hold data, and converts other types to values that torch can read.
"""

from __future__ import annotations

import collections
import datetime
import enum
import io
import os
import pathlib
import pickle
import re
import sys
import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ignite_dist.errors import CollectiveMismatchError, EnvironmentVariablesError, UnsafeObjectError
from ignite_dist.internals import _torch
from ignite_dist.internals._python import PythonPickler
from ignite_dist.values import views
from ignite_dist.values.arrivals import OwnDevice, arrive, arriving_on, no_accelerator

_Type = TypeVar("_Type", bound=type)

VARIABLE = "IGNITE_DIST_SAFE_OBJECTS"
_mode: bool | None = None  # None: the environment variable has not been read
_lock = threading.Lock()  # replicas of XLA are threads, and torch has one list of safe types per process


def safe_objects(*classes: Callable[..., Any]) -> None:
    """From now on, objects that other ranks send cannot run code in this process.

    Objects are decoded by ``torch.load(weights_only=True)``. These types need no registration: None, bools,
    numbers, strings and bytes; lists, tuples, dicts, sets, ``OrderedDict``, ``defaultdict``, ``Counter``,
    ``deque``; tensors, dtypes and devices; numpy scalars and arrays, except arrays of Python objects; paths,
    dates and times, ``Decimal``, ``Fraction``, ``UUID``. Register all other classes here; subclasses of dict
    and list are not supported. Functions are sent by name, so lambdas are not supported. Decoding costs about
    0.1 ms per object.

    Every rank calls this with the same classes before it sends objects. As an alternative, set
    ``IGNITE_DIST_SAFE_OBJECTS=1`` for every rank before its first object. The call sets this variable too, so
    workers that start later decode safely. Each worker must register its classes itself, for example at
    the top of the script.

    Args:
        classes: classes and functions. Another rank may call them with any arguments, so register only types
            that hold data. ``torch.serialization.add_safe_globals`` receives them, so ``torch.load`` accepts
            them too.

    Raises:
        TypeError: an argument is not a class or function, or is not supported.
        ValueError: an argument could run code: ``getattr``, ``eval``, members of ``os`` or ``subprocess``.

    Example::

        @dataclass
        class Score:
            value: float

        idist.safe_objects(Score)
        idist.all_gather(Score(0.5))  # [Score(0.5), Score(0.5)] on both
        with pytest.raises(idist.UnsafeObjectError, match="posix.getcwd"):  # on every rank
            idist.all_gather(os.getcwd)
    """
    global _mode
    for one in classes:
        if not callable(one) or not hasattr(one, "__qualname__"):
            raise TypeError(f"safe_objects takes classes and functions, got {one!r}.")
        if "<" in one.__qualname__:
            raise TypeError(f"safe_objects takes no lambdas and no local classes or functions, got {one!r}.")
        if isinstance(one, type) and issubclass(one, (dict, list)):
            raise TypeError(
                f"torch.load leaves subclasses of dict and list empty, got {one!r}. Send a dict or list."
            )
        is_error = isinstance(one, type) and issubclass(one, BaseException)
        if one.__module__.partition(".")[0] in _UNSAFE_MODULES and not is_error:
            raise ValueError(
                f"{one!r} could run code in this process if another rank sends it. Send the data instead."
            )
    with _lock:
        torch.serialization.add_safe_globals(list(classes))
        os.environ[VARIABLE] = "1"
        _mode = True


def is_safe() -> bool:
    """True if this process decodes objects safely.

    Raises:
        EnvironmentVariablesError: the variable is neither 0 nor 1.
    """
    global _mode
    if _mode is None:  # cached: reading the environment takes longer than pickling a number
        text = os.environ.get(VARIABLE, "")
        if text not in ("", "0", "1"):
            raise EnvironmentVariablesError(f"{VARIABLE} must be 0 or 1, got {text!r}.")
        _mode = text == "1"
    return _mode


def forget_mode() -> None:
    """Make :func:`is_safe` read the variable again: a forked process may have another environment."""
    global _mode
    _mode = None


def save(value: Any) -> bytes:
    """``value`` in a format of ``torch.save``.

    A value with tensors becomes a zip file. Other values have torch's legacy format: a small dict takes 185
    bytes (1,260 as a zip file, which exceeds the header). In the legacy format tensor data comes last, so
    a tensor that is converted while the object is read (copied to an XLA device) would contain garbage.

    Raises:
        TypeError: ``value`` cannot be sent.
    """
    try:
        payload = _save(value, _Pickler)
        if pickle.LONG4 in payload:  # a large int, or other data with this byte
            payload = _save(value, _TextIntPickler)
    except Exception as error:  # a __reduce__ may raise anything
        raise TypeError(
            f"A value of type {type(value).__qualname__} cannot be sent to another process: {error}. "
            "torch.save writes functions and classes by name. Send the underlying data instead."
        ) from error
    return payload


def register_safe(one: _Type) -> _Type:
    """Decorator: register a class of this package as safe."""
    _safe_types.add(one)
    return one


def _save(value: Any, pickler: type[Any]) -> bytes:
    file = io.BytesIO()
    try:
        _torch.save_short(value, file, _PICKLE_MODULES[pickler])
    except _TensorFound:
        file = io.BytesIO()
        views.save(value, file, pickler)
    return file.getvalue()


def is_message(payload: bytes | bytearray | memoryview) -> bool:
    """True if :func:`save` may have made ``payload``."""
    return bytes(payload[:4]) in _STARTS


def load(payload: bytes | bytearray | memoryview, rank: int, own_device: OwnDevice = no_accelerator) -> Any:
    """The value that the global ``rank`` passed to :func:`save`.

    A tensor from a device of the type of ``own_device()`` arrives on that. All others arrive on the CPU.

    Raises:
        UnsafeObjectError: the payload could run code. No code was run.
        CollectiveMismatchError: the payload is not a complete message.
    """
    _register_with_torch()
    try:
        with arriving_on(own_device):
            return torch.load(io.BytesIO(payload), map_location=arrive, weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            reason = str(error).partition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
            raise UnsafeObjectError(
                f"Rank {rank} sent an object that torch.load(weights_only=True) refuses: {reason or error}",
                rank,
            ) from error
        message = _REFUSED.format(rank=rank, name=found[1], advice=_advice(found[1]))
        raise UnsafeObjectError(message, rank, found[1]) from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # corrupt data can raise anything
        raise decoding_error(rank, error) from error


_REFUSED = (
    "Rank {rank} sent an object that contains {name}, which is not registered as safe. It was not called. "
    "{advice} If no script sends {name} on purpose, check who can connect to this job: see SECURITY.md."
)


def _advice(name: str) -> str:
    module, _, short = name.rpartition(".")
    if short == "getattr":
        return (
            "pickle uses getattr for bound methods, class methods and nested classes. Send the data instead."
        )
    if module.partition(".")[0] in _UNSAFE_MODULES:
        return "It could run code in this process. Send the data instead."
    return (
        f"If this is your own type and only holds data, call idist.safe_objects({short}) on every rank "
        "before sending objects."
    )


def decoding_error(rank: int, error: Exception) -> CollectiveMismatchError:
    """The error for an object that cannot be decoded."""
    return CollectiveMismatchError(
        f"The object of rank {rank} cannot be decoded ({type(error).__name__}: {error}). Unless its own "
        "class raised this error, check that all ranks call the same collectives in the same order: the "
        "data may belong to another collective."
    )


def _register_with_torch() -> None:
    """Register ``_safe_types`` with torch again, because other code can clear torch's list."""
    registered = torch.serialization.get_safe_globals()
    if not _safe_types.issubset(registered):
        with _lock:
            torch.serialization.add_safe_globals(list(_safe_types))


def _array(dtype: Any, shape: tuple[int, ...], order: Any, data: bytes | Tensor, is_scalar: bool) -> Any:
    """A numpy array or scalar. The array shares the memory of ``data`` if ``data`` is a tensor."""
    import numpy

    array_dtype = numpy.lib.format.descr_to_dtype(dtype)
    if array_dtype.hasobject:
        raise ValueError("an array of Python objects")
    memory = bytearray(data) if isinstance(data, bytes) else data.numpy()
    array = numpy.ndarray(shape, array_dtype, memory, order=order)
    return array[()] if is_scalar else array


def _defaultdict(factory: Any, items: dict[Any, Any]) -> Any:
    return collections.defaultdict(factory, items)


def _decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text)


def _fraction(numerator: int, denominator: int) -> Any:
    import fractions

    return fractions.Fraction(numerator, denominator)  # parsing a text could take very long


def _zone(key: str) -> Any:
    import zoneinfo

    return zoneinfo.ZoneInfo(key)


class _TensorFound(Exception):
    pass


class _Converting:
    """Mixin for picklers: convert values that ``weights_only`` refuses or leaves empty.

    numpy values become bytes or tensors. That is fast, and numpy's constructors need not be registered.
    """

    def __init__(self, file: Any, protocol: int | None = None) -> None:
        super().__init__(file, protocol, fix_imports=False)  # type: ignore[call-arg]  # keeps Python 3 names

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):  # not called for those that ``views.save`` reduces
            raise _TensorFound
        if kind is collections.defaultdict:
            return _defaultdict, (value.default_factory, dict(value))
        if kind is collections.deque:
            return collections.deque, (list(value), value.maxlen)
        name = f"{kind.__module__}.{kind.__qualname__}"  # compared by name, which needs no import
        if name == "fractions.Fraction":
            return _fraction, (value.numerator, value.denominator)
        if name == "decimal.Decimal":
            return _decimal, (str(value),)
        if name == "zoneinfo.ZoneInfo" and value.key is not None:
            return _zone, (value.key,)
        if kind in (datetime.datetime, datetime.time) and value.fold:  # protocol 2 would lose fold
            return value.__reduce_ex__(4)
        # Python 3.11.0 to 3.11.3 pickle members of enums by getattr, which no receiver may call.
        if isinstance(value, enum.Enum) and value.__reduce_ex__(_PROTOCOL)[0] is getattr:
            return kind, (value.value,)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return _reduce_array(value, numpy)
        return NotImplemented


def _reduce_array(value: Any, numpy: Any) -> Any:
    if value.dtype.hasobject:
        raise TypeError("an array of Python objects could hold anything")
    order = "F" if value.flags.fnc else "C"
    data: Any = value.tobytes(order)
    if len(data) > _SMALL_BYTES:
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dtype = numpy.lib.format.dtype_to_descr(value.dtype)
    return _array, (dtype, value.shape, order, data, isinstance(value, numpy.generic))


class _Pickler(_Converting, pickle.Pickler):
    pass


class _TextIntPickler(_Converting, PythonPickler):
    """A pickler in Python that writes large ints as text: ``weights_only`` cannot read their usual opcode.

    This class is slower than the C pickler, which cannot change how ints are written.
    """

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if type(value) is int and value.bit_length() >= _LARGE_BITS:
            self.save_reduce(int, (hex(value), 16))  # type: ignore[attr-defined]
        else:
            super().save(value, save_persistent_id)  # type: ignore[misc]


# Replacements for the ``pickle`` module. torch.save derives its own pickler from ``Pickler``.
_PICKLE_MODULES = {
    pickler: SimpleNamespace(__name__="pickle", Pickler=pickler, dump=pickle.dump)
    for pickler in (_Pickler, _TextIntPickler)
}
_PROTOCOL = 2  # the protocol of torch.save
_LARGE_BITS = 255 * 8  # weights_only reads ints with fewer bits
# No name of these modules may be registered. With getattr alone, a message could call any function.
_UNSAFE_MODULES = ("__builtin__", "builtins", "ctypes", "importlib", "nt", "os", "posix", "subprocess", "sys")
# The first bytes of torch.save's formats (zip file, pickled number). encode() starts with other bytes.
_STARTS = frozenset([b"PK\x03\x04", pickle.dumps(torch.serialization.MAGIC_NUMBER, _PROTOCOL)[:4]])
# Larger arrays are sent as tensors in a zip file. Protocol 2 makes bytes 1.5 times as large.
_SMALL_BYTES = 256

# Types that only hold data, in addition to those that weights_only accepts by itself.
_safe_types: set[Any] = {
    *(_array, _defaultdict, bool, bytes, dict, float, frozenset, int, list, range, slice, str, tuple),
    *(collections.deque, _decimal, _fraction, uuid.UUID, _zone),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
}
