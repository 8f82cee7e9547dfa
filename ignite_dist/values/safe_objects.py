"""Objects that cannot run code where they are received: what ``torch.load(weights_only=True)`` reads.

torch's unpickler builds plain values and tensors, and calls nothing that it was not told of. Here it is told
of more types that only hold data, and what it cannot read is written in another way.
"""

from __future__ import annotations

import collections
import datetime
import io
import os
import pathlib
import pickle
import re
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ignite_dist import _torch
from ignite_dist.errors import CollectiveMismatchError, EnvironmentVariablesError, UnsafeObjectError

__all__ = ["VARIABLE", "ask_again", "broken", "is_message", "is_safe", "load", "safe", "safe_objects", "save"]

_Type = TypeVar("_Type", bound=type)

VARIABLE = "IGNITE_DIST_SAFE_OBJECTS"
_mode: bool | None = None  # None: the environment has not been asked yet
_lock = threading.Lock()  # replicas of XLA are threads, and torch's list of safe types is one per process


def safe_objects(*classes: Callable[..., Any]) -> None:
    """From now on, objects that other ranks send cannot run code in this process.

    They are decoded by ``torch.load(weights_only=True)``. These need nothing more: None, bools, numbers,
    strings and bytes; lists, tuples, dicts, sets, ``OrderedDict``, ``defaultdict``, ``Counter``, ``deque``;
    tensors, dtypes and devices; numpy's arrays and scalars, but for arrays of Python objects; paths, dates
    and times, ``Decimal``, ``Fraction``, ``UUID``. What else is sent has to be named here (subclasses of dict
    and list cannot be); functions go by their names, so no lambdas. It costs about 0.1 ms per object that is
    received.

    Every rank calls it with the same classes, before objects are sent. Or ``IGNITE_DIST_SAFE_OBJECTS=1`` is
    set for every rank, before its first object. The call sets that variable too, so workers that this process
    starts later are safe from their start on; the classes they have to name themselves, at the top of the
    script for example.

    Args:
        classes: classes, and functions, which another rank may call with whatever it likes: name what only
            holds data. They go to ``torch.serialization.add_safe_globals``, so ``torch.load`` takes them too.

    Raises:
        TypeError: not a class or function.
        ValueError: what could run code: ``getattr``, ``eval``, what is in ``os``, ``sys`` or ``subprocess``.

    Example::

        @dataclass
        class Score: ...

        idist.safe_objects(Score)
        idist.all_gather(Score(0.5))  # decoded
        idist.all_gather(os.getcwd)  # UnsafeObjectError, on every rank: posix.getcwd
    """
    global _mode
    for one in classes:
        if not callable(one) or not hasattr(one, "__qualname__"):
            raise TypeError(f"safe_objects takes classes and functions, got {one!r}.")
        if "<" in one.__qualname__:
            raise TypeError(f"safe_objects takes what has a name in its module, got {one!r}.")
        if isinstance(one, type) and issubclass(one, (dict, list)):
            raise TypeError(f"torch does not fill subclasses of dict and list: send such a one, not {one!r}.")
        is_error = isinstance(one, type) and issubclass(one, BaseException)
        if one.__module__.partition(".")[0] in _POWERFUL and not is_error:
            raise ValueError(
                f"{one!r} does not only hold data: with it others could run code here. Send the data instead."
            )
    with _lock:
        torch.serialization.add_safe_globals(list(classes))
        os.environ[VARIABLE] = "1"
        _mode = True


def is_safe() -> bool:
    """Whether objects are safe in this process.

    Raises:
        EnvironmentVariablesError: the environment says neither yes nor no.
    """
    global _mode
    if _mode is None:  # kept, because a look into the environment takes longer than to pickle a number
        text = os.environ.get(VARIABLE, "")
        if text not in ("", "0", "1"):
            raise EnvironmentVariablesError(f"The environment variable {VARIABLE} is 0 or 1, got {text!r}.")
        _mode = text == "1"
    return _mode


def ask_again() -> None:
    """Forget what the environment has said: this process was forked from one with another environment."""
    global _mode
    _mode = None


def save(value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it.

    A zip file if there are tensors. If not, its format from before zip files: 185 bytes for a small dict,
    where a zip file takes 1,260 and would not fit the header. Not for tensors, because it has their data
    last: what is made from a tensor while the object is read (a copy on an XLA device) would be garbage.

    Raises:
        TypeError: it cannot be sent.
    """
    try:
        payload = _save(value, _Pickler)
        if pickle.LONG4 in payload:  # perhaps as part of something else
            payload = _save(value, _SpellingPickler)
    except Exception as error:  # see encode
        raise TypeError(
            f"A value of type {type(value).__qualname__} cannot be sent to another process: {error}. What "
            "torch.save writes has functions and classes by their names. Send the data it is made from."
        ) from error
    return payload


def safe(one: _Type) -> _Type:
    """Decorator: a class of this package that is sent as it is."""
    _ours.add(one)
    return one


def _save(value: Any, pickler: type[Any]) -> bytes:
    for takes_tensors in (False, True):
        file = io.BytesIO()
        module = _MODULES[pickler, takes_tensors]
        with suppress(_HoldsTensors):
            _torch.save(value, file, module, _PROTOCOL, as_zip=takes_tensors)
            break
    return file.getvalue()


def is_message(payload: bytes | memoryview) -> bool:
    """Whether :func:`save` may have made ``payload``."""
    return bytes(payload[:4]) in _STARTS


def load(payload: bytes | memoryview, rank: int) -> Any:
    """The value that :func:`save` made ``payload`` from, on the global ``rank``.

    Raises:
        UnsafeObjectError: it holds something that could run code. It has not run.
        CollectiveMismatchError: it is no message, or not a whole one.
    """
    _tell_torch()
    try:
        return torch.load(io.BytesIO(payload), weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            reason = str(error).partition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
            raise UnsafeObjectError(
                f"Rank {rank} sent an object that torch.load(weights_only=True) refuses: {reason or error}",
                rank,
            ) from error
        message = _REFUSED.format(rank=rank, name=named[1], advice=_advice(named[1]))
        raise UnsafeObjectError(message, rank, named[1]) from None
    except Exception as error:  # garbage raises anything
        raise broken(rank, error) from error


_REFUSED = (
    "Rank {rank} sent an object with {name} in it, which is not registered as safe and has not been called. "
    "{advice} If nobody meant to send it, see who can reach this job: SECURITY.md."
)


def _advice(name: str) -> str:
    module, _, short = name.rpartition(".")
    if short == "getattr":
        return "Bound methods, class methods and nested classes are sent by way of it: send the data instead."
    if module.partition(".")[0] in _POWERFUL:
        return "With it others could run code: send the data instead."
    return (
        f"If that is a type of yours that only holds data, call idist.safe_objects({short}) on every rank, "
        "before objects are sent."
    )


def broken(rank: int, error: Exception) -> CollectiveMismatchError:
    """The error of what cannot be decoded."""
    return CollectiveMismatchError(
        f"The object of rank {rank} cannot be decoded ({type(error).__name__}: {error}). If that is not what "
        "its own class says, look at which collectives the ranks call, in which order: what came may belong "
        "to another one."
    )


def _tell_torch() -> None:
    """See to it that torch knows our types as safe. Others can clear its list."""
    known = torch.serialization.get_safe_globals()
    if not _ours.issubset(known):
        with _lock:
            torch.serialization.add_safe_globals(list(_ours))


def _array(dtype: Any, shape: tuple[int, ...], order: Any, data: bytes | Tensor, is_scalar: bool) -> Any:
    """A numpy array, over the memory of ``data`` if that is a tensor; or a scalar of numpy's."""
    import numpy

    known = numpy.lib.format.descr_to_dtype(dtype)
    if known.hasobject:
        raise ValueError("an array of Python objects")
    memory = bytearray(data) if isinstance(data, bytes) else data.numpy()
    array = numpy.ndarray(shape, known, memory, order=order)
    return array[()] if is_scalar else array


def _defaultdict(factory: Any, items: dict[Any, Any]) -> Any:
    return collections.defaultdict(factory, items)


def _decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text)


def _fraction(numerator: int, denominator: int) -> Any:
    import fractions

    return fractions.Fraction(numerator, denominator)  # of a text it could take for ever


def _zone(key: str) -> Any:
    import zoneinfo

    return zoneinfo.ZoneInfo(key)


class _HoldsTensors(Exception):
    pass


class _Reducing:
    """What ``weights_only`` would not take, or not fill, as something that it does.

    Numpy's values as bytes or tensors: fast, and what numpy rebuilds them with need not be safe.
    """

    takes_tensors = True

    def __init__(self, file: Any, protocol: int | None = None) -> None:
        super().__init__(file, protocol, fix_imports=False)  # type: ignore[call-arg]  # names are those of now

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor) and not self.takes_tensors:
            raise _HoldsTensors
        if kind is collections.defaultdict:
            return _defaultdict, (value.default_factory, dict(value))
        if kind is collections.deque:
            return collections.deque, (list(value), value.maxlen)
        name = f"{kind.__module__}.{kind.__qualname__}"  # of modules that this process may do without
        if name == "fractions.Fraction":
            return _fraction, (value.numerator, value.denominator)
        if name == "decimal.Decimal":
            return _decimal, (str(value),)
        if name == "zoneinfo.ZoneInfo" and value.key is not None:
            return _zone, (value.key,)
        if kind in (datetime.datetime, datetime.time) and value.fold:  # which protocol 2 leaves out
            return value.__reduce_ex__(4)
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


class _Pickler(_Reducing, pickle.Pickler):
    pass


class _SpellingPickler(_Reducing, pickle._Pickler):
    """The same in Python, with large ints as text: what else pickle writes for them is not read.

    Slower, and the other does not ask how an int is to be written.
    """

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if type(value) is int and value.bit_length() >= _LARGE_BITS:
            self.save_reduce(int, (hex(value), 16))  # type: ignore[attr-defined]
        else:
            super().save(value, save_persistent_id)  # type: ignore[misc]


def _module(pickler: type[Any], takes_tensors: bool) -> SimpleNamespace:
    """What torch.save wants of a module, from whose pickler it derives one of its own."""
    kind = type(pickler.__name__, (pickler,), {"takes_tensors": takes_tensors})
    return SimpleNamespace(__name__="pickle", Pickler=kind, dump=pickle.dump)


_MODULES = {
    (pickler, takes_tensors): _module(pickler, takes_tensors)
    for pickler in (_Pickler, _SpellingPickler)
    for takes_tensors in (False, True)
}
_PROTOCOL = 2  # which weights_only reads
_LARGE_BITS = 255 * 8  # up to which it reads ints
# Of these modules nothing is taken: with getattr alone a message could call anything.
_POWERFUL = ("__builtin__", "builtins", "ctypes", "importlib", "nt", "os", "posix", "subprocess", "sys")
# What its formats begin with: a zip file, and a pickled number. What encode() writes is of a later protocol.
_STARTS = frozenset([b"PK\x03\x04", pickle.dumps(torch.serialization.MAGIC_NUMBER, _PROTOCOL)[:4]])
# Arrays of so many bytes are not worth a zip file; in protocol 2 bytes take half as much again.
_SMALL_BYTES = 256

# What weights_only takes without being told is plain values and tensors; this is what else holds data only.
_ours: set[Any] = {
    *(_array, _defaultdict, bool, bytes, dict, float, frozenset, int, list, range, slice, str, tuple),
    *(collections.deque, _decimal, _fraction, uuid.UUID, _zone),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
}
