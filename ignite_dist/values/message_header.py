"""The header of a message between ranks.

Every message starts with a header of :data:`HEADER_BYTES`: magic bytes, the payload's length and, if the
payload fits, the payload. A rank can post its header without information about the other ranks' objects, so a
small object takes one collective and a large object takes two.
"""

from __future__ import annotations

import struct
import zlib

from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.values.calls import NO_CALL, Call

# gloo and NCCL need the same time for 512 bytes as for 8: latency dominates up to a few KB. 512 bytes hold
# a dict of twenty numbers. The size is part of the protocol: it must be the same on all ranks.
HEADER_BYTES = 512
# Magic bytes with the version, a checksum of the bytes after the checksum, the payload's length.
_START = struct.Struct("<4sIq")
_MAGIC = b"idw1"
_CHECKED_FROM = 8
INLINE_BYTES = HEADER_BYTES - _START.size


def write_header(payload: bytes | bytearray | memoryview, call: Call = NO_CALL) -> bytearray:
    """A header of :data:`HEADER_BYTES`: the length of ``payload``, and ``payload`` itself if it fits.

    Only a rank that makes the same ``call`` can read it.
    """
    header = bytearray(HEADER_BYTES)
    size = len(payload)
    end = _START.size
    if size <= INLINE_BYTES:
        end += size
        header[_START.size : end] = payload
    _START.pack_into(header, 0, _MAGIC, 0, size)
    struct.pack_into("<I", header, 4, zlib.crc32(memoryview(header)[_CHECKED_FROM:end], call.checksum))
    return header


def read_header(header: memoryview, rank: int, call: Call = NO_CALL) -> tuple[int, memoryview | None]:
    """``(length of the payload, payload)`` of the global ``rank``. The payload is None if it does not fit.

    Raises:
        CollectiveMismatchError: the data is not a header of ``call``: ``rank`` made another call.
    """
    magic, checksum, size = _START.unpack_from(header, 0)
    end = _START.size + size if 0 <= size <= INLINE_BYTES else _START.size
    if magic != _MAGIC or size < 0 or zlib.crc32(header[_CHECKED_FROM:end], call.checksum) != checksum:
        raise CollectiveMismatchError(
            f"Expected an object or a number from rank {rank}, but received other data: rank {rank} called a "
            "different collective, or with another src, dst or op. Check that all ranks call the same "
            "collectives in the same order, with a tensor on all ranks or on none, and use the same version "
            f"of ignite_dist.{f' This rank called {call.text}.' if call.text else ''}"
        )
    return size, header[_START.size : end] if size <= INLINE_BYTES else None
