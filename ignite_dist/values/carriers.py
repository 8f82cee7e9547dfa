"""Replace reductions that a backend does not support by equivalent ones with another dtype or operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_dist.values.reduce_ops import (
    BITWISE,
    NARROW_FLOATS,
    ROW_DTYPES,
    is_inexact,
    is_rounded,
    reduce_rows,
    round_to_odd,
)


class Carrier(NamedTuple):
    """A reduction that replaces another one, with conversions before and after it.

    Attributes:
        op: the operation that the backend runs; SUM instead of AVERAGE.
        dtype: the dtype that the backend reduces.
        encode: converts a tensor to ``dtype``; the result may share the tensor's memory.
        decode: converts the reduced tensor to the caller's dtype.
    """

    op: str
    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


# Lossless wider dtypes, narrowest first. Sums of ints wrap correctly when cast back to the narrow dtype.
_WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (torch.uint8, torch.int32, torch.int64),
    torch.int8: (torch.int32, torch.int64),
    torch.uint8: (torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.uint16: (torch.int32, torch.int64),
    torch.int32: (torch.int64,),
    torch.uint32: (torch.int64,),
    torch.float32: (torch.float64,),
    **dict.fromkeys(NARROW_FLOATS, (torch.float32, torch.float64)),
}


_REAL_DTYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


_NAN = {torch.int32: 0x7FC00000, torch.int64: 0x7FF8000000000000}  # the bits of the default NaN


_BOOL_OPS = {"AND": "MIN", "OR": "MAX", "XOR": "XOR", "MIN": "MIN", "MAX": "MAX"}


def as_itself(op: str, dtype: torch.dtype) -> Carrier:
    """A :class:`Carrier` without conversions."""
    return Carrier(op, dtype, _identity, _identity)


def find_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool], exact: bool = True
) -> Carrier | None:
    """The carrier for ``op`` over ``dtype``; None if the values have to be gathered and reduced on each rank.

    Args:
        op: the operation; :func:`check_op` must allow it for ``dtype``.
        dtype: the dtype of the values.
        carries: ``carries(op, dtype)`` is True if the backend supports the reduction.
        exact: True sends sums and products of narrow floats as float64, or as float32 if the backend has no
            float64, because a backend would round narrow floats after each rank. False sends them unchanged.
    """
    if op in ("MIN", "MAX") and dtype.is_floating_point:
        return _ordered_carrier(op, dtype, carries)
    sent_op = "SUM" if op == "AVERAGE" else op  # the caller divides the sum
    if exact and is_rounded(op, dtype):
        return _narrow_carrier(sent_op, dtype, carries)
    if dtype in _REAL_DTYPES:
        return _complex_carrier(op, dtype, carries, exact)
    if carries(sent_op, dtype):
        return as_itself(sent_op, dtype)
    if dtype is torch.uint64:
        return _uint64_carrier(sent_op, carries)
    return _wider_carrier(_BOOL_OPS[op] if dtype is torch.bool else sent_op, dtype, carries)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype)


def _wider_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]
) -> Carrier | None:
    for wider in _WIDER.get(dtype, ()):
        if carries(op, wider):
            return Carrier(op, wider, partial(_cast, wider), partial(_cast, dtype))
    return None


def _narrow_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]
) -> Carrier | None:
    if not carries(op, torch.float64):
        return _wider_carrier(op, dtype, carries)
    return Carrier(
        op, torch.float64, partial(_cast, torch.float64), lambda total: round_to_odd(total).to(dtype)
    )


def _ordered_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]
) -> Carrier | None:
    """MIN and MAX of floats, sent as ints of the same order. A NaN is the least (MIN) or greatest (MAX) int.

    Backends compare floats with ``<``, so whether a NaN survives depends on the NaN's rank. With ints the
    result is NaN if any rank has a NaN, as in torch's ``amin`` and ``amax``.
    """
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    integer = torch.int64 if wide is torch.float64 else torch.int32
    if not carries(op, integer):
        return None
    lowest, nan = torch.iinfo(integer).min, _NAN[integer]
    # The bits of a NaN are above those of all numbers. XLA treats int constants as floats, so
    # both constants must be exact as floats. They are.
    nan_key = nan if op == "MAX" else lowest

    def flip(bits: Tensor) -> Tensor:
        # IEEE 754: positive floats have the order of their bits, negative floats the reverse order.
        return torch.where(bits < 0, ~bits ^ lowest, bits)

    def encode(tensor: Tensor) -> Tensor:
        values = tensor.to(wide)
        return flip(values.view(integer)).masked_fill_(values.isnan(), nan_key)

    def decode(keys: Tensor) -> Tensor:
        return flip(keys).view(wide).to(dtype)

    return Carrier(op, integer, encode, decode)


def _complex_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool], exact: bool
) -> Carrier | None:
    if op not in ("SUM", "AVERAGE"):
        return None
    inner = find_carrier(op, _REAL_DTYPES[dtype], carries, exact)
    if inner is None:
        return None

    def encode(tensor: Tensor) -> Tensor:
        return inner.encode(torch.view_as_real(tensor.resolve_conj()))

    def decode(carried: Tensor) -> Tensor:
        return torch.view_as_complex(inner.decode(carried))

    return Carrier(inner.op, inner.dtype, encode, decode)


def _uint64_carrier(op: str, carries: Callable[[str, torch.dtype], bool]) -> Carrier | None:
    """uint64 sent as int64 with the same bits. For MIN and MAX the sign bit is flipped to keep the order."""
    if not carries(op, torch.int64):
        return None
    flip = torch.iinfo(torch.int64).min if op in ("MIN", "MAX") else 0
    return Carrier(
        op,
        torch.int64,
        lambda tensor: tensor.view(torch.int64) ^ flip,
        lambda carried: (carried ^ flip).view(torch.uint64),
    )


# Large enough that the latency of a collective does not matter, small enough to copy.
PIECE_BYTES = 16 << 20
# On a GPU the launches of small pieces take longer than their kernels.
_PIECE_BYTES_ON_GPU = 32 << 20


def piece_numel(tensor: Tensor, carrier: Carrier) -> int:
    """Number of elements of ``tensor`` that are sent or reduced at once in the wider dtype of ``carrier``."""
    return (_PIECE_BYTES_ON_GPU if tensor.is_cuda else PIECE_BYTES) // carrier.dtype.itemsize


def reduce_gathered(rows: Tensor, op: str, out: Tensor | None = None) -> Tensor:
    """``(group_size, *S) -> (*S)``: a reduction that the backend does not support, computed locally.

    The result is the contiguous ``out``, if given.
    """

    def computes(sent_op: str, dtype: torch.dtype) -> bool:
        return dtype in ROW_DTYPES or (dtype is torch.bool and sent_op in BITWISE)

    if rows.device.type == "cpu" and is_inexact(op, rows.dtype):
        return reduce_rows(rows.unbind(), op, torch.empty_like(rows[0]) if out is None else out)
    carrier = find_carrier(op, rows.dtype, computes) or as_itself(op, rows.dtype)
    width = max(1, piece_numel(rows, carrier) // len(rows))
    if carrier.dtype is rows.dtype or rows[0].numel() <= width:
        reduced = _reduce_encoded(rows, op, carrier)
        return reduced if out is None else out.copy_(reduced)
    total = torch.empty_like(rows[0]) if out is None else out
    pieces = torch.split(rows.view(len(rows), -1), width, dim=1)
    for piece, part in zip(pieces, torch.split(total.view(-1), width), strict=True):
        part.copy_(_reduce_encoded(piece, op, carrier))
    return total


def _reduce_encoded(rows: Tensor, op: str, carrier: Carrier) -> Tensor:
    if rows.dtype is torch.complex32 and op == "PRODUCT":
        return _product_of_complex_halves(rows)
    encoded = carrier.encode(rows)
    total = reduce_rows(encoded.unbind(), carrier.op, torch.empty_like(encoded[0]))
    if op == "AVERAGE":
        total /= len(rows)
    return carrier.decode(total)


def _product_of_complex_halves(rows: Tensor) -> Tensor:
    wide = torch.view_as_complex(torch.view_as_real(rows).double())
    total = reduce_rows(wide.unbind(), "PRODUCT", torch.empty_like(wide[0]))
    return torch.view_as_complex(round_to_odd(torch.view_as_real(total)).half())
