"""Values <-> bytes, and the fixed header in which small ones travel.

Two kinds of bytes. What a launcher and its own workers hand each other over pipes is pickle
(:func:`encode`, :func:`decode`). What ranks send each other in collectives may come over a network
(:func:`pack`, :func:`unpack`): pickle too, or, after :func:`safe_objects`, what ``torch.save`` writes, which
``torch.load(weights_only=True)`` reads without running anything that it was not told of.

Every object that a collective sends starts with one header of :data:`HEADER_BYTES`: what shows that it is
one, the payload's length and, where it fits, the payload itself. All ranks can post a header without knowing
anything about the others' objects, so a small object costs one collective and a large one costs two.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from ignite_dist.errors import CollectiveMismatchError, UnsafeObjectError
from ignite_dist.values import safe_objects

__all__ = [
    "HEADER_BYTES",
    "INLINE_BYTES",
    "as_bytes",
    "as_tensor",
    "decode",
    "encode",
    "encode_by_value",
    "pack",
    "read_header",
    "unpack",
    "write_header",
]

# --- pipes: between a launcher and the workers that it has started -----------------------------------


def encode(value: Any) -> bytes:
    """``value`` as bytes.

    Plain pickle sends functions and classes by reference, which is what scripts rely on; cloudpickle takes
    what pickle refuses: lambdas, closures, notebook cells.

    Raises:
        TypeError: neither can send it. Nothing has been sent then.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickle.PicklingError, AttributeError, TypeError, or whatever a __reduce__ raises
        return encode_by_value(value)


def encode_by_value(value: Any) -> bytes:
    """``value`` as bytes that need nothing of this process's main module to be decoded elsewhere.

    Raises:
        TypeError: cloudpickle cannot serialise it.
    """
    import cloudpickle

    try:
        payload: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"A value of type {type(value).__qualname__} cannot be sent to another process: {error}. "
            "Neither pickle nor cloudpickle can serialise it; send the data it is made from instead."
        ) from error
    return payload


def decode(payload: bytes | memoryview) -> Any:
    """The value that :func:`encode` made ``payload`` from. Only for what processes of this job sent."""
    return pickle.loads(payload)


# --- messages: between the ranks of a collective -----------------------------------------------------


def pack(value: Any) -> bytes:
    """``value`` as the bytes of a message: pickle, or what ``torch.save`` writes once objects are safe.

    Raises:
        TypeError: it cannot be sent. Nothing has been sent then.
    """
    return safe_objects.save(value) if safe_objects.is_safe() else encode(value)


def unpack(payload: bytes | memoryview, rank: int) -> Any:
    """The value that :func:`pack` made ``payload`` from, on the global ``rank``.

    Raises:
        UnsafeObjectError: objects are safe here, and it holds something that could run code. It has not run.
        CollectiveMismatchError: it is no message, or not a whole one.
    """
    if safe_objects.is_message(payload):  # it needs no trust, so it is given none, in either mode
        return safe_objects.load(payload, rank)
    if safe_objects.is_safe():
        raise UnsafeObjectError(
            f"Rank {rank} sent a plain pickle, which could run anything here, so it was not decoded: objects "
            "are safe on this rank and not on that one. Call idist.safe_objects() on every rank, or set "
            f"{safe_objects.VARIABLE}=1 for all of them.",
            rank,
        )
    try:
        return decode(payload)
    except (pickle.UnpicklingError, EOFError) as error:
        raise safe_objects.broken(rank, error) from error


# --- the header --------------------------------------------------------------------------------------

# 512 bytes cost gloo and NCCL the same time as 8 do (both are bound by latency up to some KB), and hold
# a dict of twenty numbers. Every rank must agree on it: it is part of the protocol, no setting.
HEADER_BYTES = 512
# What it is and which version, a checksum of all that follows, the payload's length.
_START = struct.Struct("<4sIq")
_MAGIC = b"idw1"
_CHECKED_FROM = 8
INLINE_BYTES = HEADER_BYTES - _START.size


def write_header(payload: bytes) -> bytearray:
    """One header of :data:`HEADER_BYTES`: the length of ``payload``, and ``payload`` if it fits."""
    header = bytearray(HEADER_BYTES)
    size = len(payload)
    end = _START.size
    if size <= INLINE_BYTES:
        end += size
        header[_START.size : end] = payload
    _START.pack_into(header, 0, _MAGIC, 0, size)
    struct.pack_into("<I", header, 4, zlib.crc32(memoryview(header)[_CHECKED_FROM:end]))
    return header


def read_header(header: memoryview, rank: int) -> tuple[int, memoryview | None]:
    """``(length of the payload, the payload)`` of the global ``rank``; no payload where it did not fit.

    Raises:
        CollectiveMismatchError: it is no header: that rank is in another kind of collective.
    """
    magic, checksum, size = _START.unpack_from(header, 0)
    end = _START.size + size if 0 <= size <= INLINE_BYTES else _START.size
    if magic != _MAGIC or size < 0 or zlib.crc32(header[_CHECKED_FROM:end]) != checksum:
        raise CollectiveMismatchError(
            f"An object or a number of rank {rank} was to come here, and something else came. Look at what "
            "each rank calls: the same collectives in the same order, with a tensor on all ranks or on none, "
            "and with the same version of ignite_dist."
        )
    return size, header[_START.size : end] if size <= INLINE_BYTES else None


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view of it: libraries need not know its dtype."""
    return tensor.view(-1).view(torch.uint8)


def as_tensor(buffer: bytearray) -> Tensor:
    """A uint8 tensor over ``buffer``'s own memory: what is written to one shows in the other."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
