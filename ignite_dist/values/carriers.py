"""The dtype and operation that are sent in the place of those that a backend does not support."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_dist.values.reduce_ops import NARROW_FLOATS, is_rounded, reduce_rows, rounded_to_odd

__all__ = ["Carrier", "as_itself", "find_carrier", "reduce_gathered"]


class Carrier(NamedTuple):
    """A reduction in whose place another one, ``op`` over ``dtype``, gives the same result.

    Attributes:
        op: the operation that is sent; SUM in the place of AVERAGE.
        dtype: the dtype that is sent.
        encode: the tensor as it is sent; never the caller's own memory unless it is a view of it.
        decode: from what came back to the caller's dtype.
    """

    op: str
    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


# Lossless, narrowest first. Sums of ints wrap as in the narrow dtype when they are cast back.
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


_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


_NAN = {torch.int32: 0x7FC00000, torch.int64: 0x7FF8000000000000}  # the bits of the usual one


_BOOL_OPS = {"AND": "MIN", "OR": "MAX", "MIN": "MIN", "MAX": "MAX"}


def as_itself(op: str, dtype: torch.dtype) -> Carrier:
    """A reduction that is sent as it stands."""
    return Carrier(op, dtype, _same, _same)


def find_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool], exact: bool = True
) -> Carrier | None:
    """How a tensor of ``dtype`` is reduced by a backend of which ``carries(op, dtype)`` says what it can do.

    None means that no reduction of the backend will do, so the values have to be gathered and reduced on
    each rank. Only legal combinations (:func:`check_op`) may be asked for.

    Sums and products of narrow floats never go as themselves, whatever the backend carries: it would round
    after each rank. They go as float64, or as float32 where there is no float64. They do go as themselves if
    they need not be ``exact``.
    """
    if op in ("MIN", "MAX") and dtype.is_floating_point:
        return _ordered_carrier(op, dtype, carries)
    sent = "SUM" if op == "AVERAGE" else op  # the caller divides what comes back
    if exact and is_rounded(op, dtype):
        return _narrow_carrier(sent, dtype, carries)
    if dtype in _REAL:
        return _complex_carrier(op, dtype, carries, exact)
    if carries(sent, dtype):
        return as_itself(sent, dtype)
    if dtype is torch.uint64:
        return _uint64_carrier(sent, carries)
    return _widened(_BOOL_OPS[op] if dtype is torch.bool else sent, dtype, carries)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype)


def _widened(op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]) -> Carrier | None:
    for wider in _WIDER.get(dtype, ()):
        if carries(op, wider):
            return Carrier(op, wider, partial(_cast, wider), partial(_cast, dtype))
    return None


def _narrow_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]
) -> Carrier | None:
    if not carries(op, torch.float64):
        return _widened(op, dtype, carries)
    return Carrier(
        op, torch.float64, partial(_cast, torch.float64), lambda total: rounded_to_odd(total).to(dtype)
    )


def _ordered_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool]
) -> Carrier | None:
    """MIN and MAX of floats as MIN and MAX of the ints that are in the same order, NaN at the winning end.

    Backends compare floats with ``<``, so whether a NaN survives depends on the rank it came from; torch's
    own ``amin`` and ``amax`` return NaN whenever there is one, and so do we.
    """
    exact = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    integer = torch.int64 if exact is torch.float64 else torch.int32
    if not carries(op, integer):
        return None
    lowest, nan = torch.iinfo(integer).min, _NAN[integer]
    # A NaN's bits are above those of all numbers. (No other constants than these: XLA takes an int for a
    # float, and both are exact as one.)
    nan_key = nan if op == "MAX" else lowest

    def flip(bits: Tensor) -> Tensor:
        # IEEE 754: positive floats are ordered as their bits, negative ones the other way round.
        return torch.where(bits < 0, ~bits ^ lowest, bits)

    def encode(tensor: Tensor) -> Tensor:
        values = tensor.to(exact)
        return flip(values.view(integer)).masked_fill_(values.isnan(), nan_key)

    def decode(keys: Tensor) -> Tensor:
        return flip(keys).view(exact).to(dtype)

    return Carrier(op, integer, encode, decode)


def _complex_carrier(
    op: str, dtype: torch.dtype, carries: Callable[[str, torch.dtype], bool], exact: bool
) -> Carrier | None:
    if op not in ("SUM", "AVERAGE"):
        return None
    inner = find_carrier(op, _REAL[dtype], carries, exact)
    if inner is None:
        return None

    def encode(tensor: Tensor) -> Tensor:
        return inner.encode(torch.view_as_real(tensor.resolve_conj()))

    def decode(carried: Tensor) -> Tensor:
        return torch.view_as_complex(inner.decode(carried))

    return Carrier(inner.op, inner.dtype, encode, decode)


def _uint64_carrier(op: str, carries: Callable[[str, torch.dtype], bool]) -> Carrier | None:
    """uint64 as int64: the same bits under every operation but MIN and MAX, where the sign bit is flipped."""
    if not carries(op, torch.int64):
        return None
    flip = torch.iinfo(torch.int64).min if op in ("MIN", "MAX") else 0
    return Carrier(
        op,
        torch.int64,
        lambda tensor: tensor.view(torch.int64) ^ flip,
        lambda carried: (carried ^ flip).view(torch.uint64),
    )


_COMPUTED = {
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
}


def reduce_gathered(rows: Tensor, op: str) -> Tensor:
    """``(group_size, *S) -> (*S)``: the reduction that no operation of the backend does, computed here."""

    def computes(sent: str, dtype: torch.dtype) -> bool:
        return dtype in _COMPUTED or (dtype is torch.bool and sent in ("AND", "OR"))

    if rows.dtype is torch.complex32 and op == "PRODUCT":
        return _product_of_complex_halves(rows)
    carrier = find_carrier(op, rows.dtype, computes) or as_itself(op, rows.dtype)
    encoded = carrier.encode(rows)
    total = reduce_rows(encoded.unbind(), carrier.op, torch.empty_like(encoded[0]))
    if op == "AVERAGE":
        total /= len(rows)
    return carrier.decode(total)


def _product_of_complex_halves(rows: Tensor) -> Tensor:
    wide = torch.view_as_complex(torch.view_as_real(rows).double())
    total = reduce_rows(wide.unbind(), "PRODUCT", torch.empty_like(wide[0]))
    return torch.view_as_complex(rounded_to_odd(torch.view_as_real(total)).half())
