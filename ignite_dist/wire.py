"""Values <-> bytes, and the fixed header in which small ones travel.

Every object that a collective sends starts with one header of :data:`HEADER_BYTES`: the payload's length
and, where it fits, the payload itself. All ranks can post a header without knowing anything about the
others' objects, so a small object costs one collective and a large one costs two.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HEADER_BYTES",
    "INLINE_BYTES",
    "as_tensor",
    "decode",
    "encode",
    "encode_by_value",
    "read_header",
    "write_header",
]

# 512 bytes cost gloo and NCCL the same time as 8 do (both are bound by latency up to some KB), and hold
# a dict of twenty numbers. Every rank must agree on it: it is part of the protocol, no setting.
HEADER_BYTES = 512
_LENGTH = struct.Struct("<q")
INLINE_BYTES = HEADER_BYTES - _LENGTH.size


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
    """The value that :func:`encode` made ``payload`` from. Only ever called on what this job's ranks sent."""
    return pickle.loads(payload)


def write_header(payload: bytes) -> bytearray:
    """One header of :data:`HEADER_BYTES`: the length of ``payload``, and ``payload`` if it fits."""
    header = bytearray(HEADER_BYTES)
    size = len(payload)
    _LENGTH.pack_into(header, 0, size)
    if size <= INLINE_BYTES:
        header[_LENGTH.size : _LENGTH.size + size] = payload
    return header


def read_header(header: memoryview) -> tuple[int, memoryview | None]:
    """``(length of the payload, the payload)``; the payload is None where it did not fit."""
    (size,) = _LENGTH.unpack_from(header, 0)
    if size <= INLINE_BYTES:
        return size, header[_LENGTH.size : _LENGTH.size + size]
    return size, None


def as_tensor(buffer: bytearray) -> Tensor:
    """A uint8 tensor over ``buffer``'s own memory: what is written to one shows in the other."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
