"""What a reduction means: its names, which dtypes it takes, and how it is computed in rank order.

Backends differ in the dtypes and operations that they carry. :func:`find_carrier` says how a reduction
that a backend cannot do as it stands is sent as one that it can, without rounding anything on the way.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral, Number, Rational
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BYTES",
    "NARROW_FLOATS",
    "OPS",
    "Carrier",
    "as_itself",
    "check_number_op",
    "check_op",
    "check_reducible",
    "find_carrier",
    "is_movable",
    "is_rounded",
    "normalize_op",
    "plain_number",
    "reduce_gathered",
    "reduce_numbers",
    "reduce_rows",
]

OPS = ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", "ADASUM")

NARROW_FLOATS = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)
"""Floats of so few bits that a sum of three is easily off by one of them, or infinite without need."""

BYTES = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2})
"""What torch keeps and copies, and does not compute with: bytes for us."""

_REDUCED = NARROW_FLOATS | {
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}

_SPELLINGS = {spelling: op for op in OPS for spelling in (op, op.lower())}


def normalize_op(op: str) -> str:
    """``op`` as it stands in :data:`OPS`.

    Raises:
        ValueError: there is no such operation.
    """
    try:
        return _SPELLINGS[op]
    except (KeyError, TypeError):
        known = _SPELLINGS.get(op.upper()) if isinstance(op, str) else None
        if known is None:
            raise ValueError(f"Unknown reduction {op!r}. Allowed: {', '.join(map(repr, OPS))}.") from None
        return known


def check_reducible(dtype: torch.dtype) -> None:
    """Refuse the dtypes that have no arithmetic.

    Raises:
        TypeError: says what to do instead.
    """
    if dtype is torch.float8_e8m0fnu:
        raise TypeError(f"all_reduce takes no {dtype}, which has no sign and no zero. Use tensor.float().")
    if dtype not in _REDUCED:
        raise TypeError(f"all_reduce takes no {dtype}, which has no arithmetic. Use all_gather.")


def is_movable(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be gathered and broadcast."""
    return dtype in _REDUCED or dtype in BYTES


def is_rounded(op: str, dtype: torch.dtype) -> bool:
    """Whether ``op`` over ``dtype`` loses bits at each step unless it is computed in a wider dtype."""
    return dtype in NARROW_FLOATS and op in ("SUM", "AVERAGE", "PRODUCT")


def check_op(op: str, dtype: torch.dtype) -> None:
    """Refuse the combinations that have no exact meaning.

    Raises:
        TypeError: says which and what to do instead.
    """
    if op in ("AND", "OR") and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op} is bitwise on ints and logical on bools; got {dtype}. Use MIN or MAX.")
    if op in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(f"{op} needs an order, and {dtype} has none. Reduce the absolute values.")
    if dtype is torch.bool and op in ("SUM", "PRODUCT"):
        raise TypeError(f"{op} of torch.bool does not fit into a bool. Use tensor.int(), or AND and OR.")
    if op in ("AVERAGE", "ADASUM") and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op} of {dtype} would round. Use tensor.double(), or SUM and divide.")


# --- numbers -----------------------------------------------------------------------------------------


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a or a <= b else b  # a NaN wins, as in torch.amin


def _maximum(a: Any, b: Any) -> Any:
    return a if a != a or a >= b else b


_NUMBER_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVERAGE": operator.add,
    "PRODUCT": operator.mul,
    "MIN": _minimum,
    "MAX": _maximum,
    "AND": operator.and_,
    "OR": operator.or_,
}


def plain_number(value: Any) -> Any:
    """A number as Python's own of the same value: an int, a float, a complex, a bool or a fraction.

    What is no number is returned as it is.

    Raises:
        TypeError: a number that has no such value (a ``longdouble``), or whose sums are rounded by a setting
            that each rank has for itself (a ``Decimal``).
    """
    if type(value) in (int, float, bool, complex):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item() if value.dtype.kind in "biufc" else value  # a timedelta64 says it is a number
        if not isinstance(plain, numpy.generic) or not isinstance(plain, Number):
            return plain
    elif isinstance(value, float):
        return float(value)
    elif isinstance(value, complex):
        return complex(value)
    elif isinstance(value, Integral):
        return operator.index(value)
    elif isinstance(value, Rational) or not isinstance(value, Number):
        return value
    raise TypeError(
        "all_reduce takes numbers that are int, float, complex, bool, Fraction, or numpy's of such values; "
        f"got {value!r} of type {type(value).__name__}. Convert it first: to a Fraction, for example."
    )


def check_number_op(op: str, number: Any) -> None:
    """Refuse what :func:`reduce_numbers` cannot do with ``number``, before it is sent.

    Raises:
        TypeError: a float under AND or OR.
        ValueError: ADASUM, which is defined on tensors.
    """
    if op == "ADASUM":
        raise ValueError("ADASUM is defined on tensors; got a number. Use SUM or AVERAGE.")
    if op in ("AND", "OR"):
        try:
            operator.and_(number, number)
        except TypeError:
            raise TypeError(f"{op} is bitwise on ints and logical on bools; got {number!r}.") from None
    if op in ("MIN", "MAX") and isinstance(number, complex):
        raise TypeError(f"{op} needs an order, and complex numbers have none; got {number!r}.")


def reduce_numbers(rows: Sequence[Sequence[Any]], op: str) -> list[Any]:
    """Each rank's row of numbers reduced into one row, in rank order and with Python's own arithmetic.

    Ints are exact at any size; a bool counts as 0 or 1, except under AND and OR; AVERAGE divides at the end.
    """
    combine = _NUMBER_OPS[op]
    totals = list(rows[0])  # any of them may be empty; all are then
    for row in rows[1:]:
        totals = list(map(combine, totals, row))
    if op == "AVERAGE":
        return [total / len(rows) for total in totals]
    if op in ("SUM", "PRODUCT"):  # a world of one must not return another type than a world of two
        return [int(total) if total is True or total is False else total for total in totals]
    return totals


# --- tensors, row by row -----------------------------------------------------------------------------

_ROW_OPS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.bitwise_and,
    "OR": torch.bitwise_or,
}


# The bits of a float64 that a float32 does not have.
_BEYOND_FLOAT32 = (1 << 29) - 1
# So many narrow floats are reduced at a time: their float64 stay in the processor's cache.
_BLOCK = 1 << 15


def reduce_rows(rows: Iterable[Tensor], op: str, out: Tensor) -> Tensor:
    """Reduce ``rows``, each of the shape and dtype of ``out``, into ``out`` in their order.

    Every rank that holds the same rows gets the same bits. Narrow floats are rounded once, and they alone
    take "AVERAGE" too.
    """
    first, *others = rows
    if not others:
        return out.copy_(first)
    if is_rounded(op, out.dtype):
        for *parts, result in zip(
            *(torch.split(row.view(-1), _BLOCK) for row in (first, *others, out)), strict=True
        ):
            result.copy_(_reduce_narrow(parts[0], parts[1:], op))
        return out
    combine = _ROW_OPS[op]
    second, *rest = others
    combine(first, second, out=out)
    for row in rest:
        combine(out, row, out=out)
    return out


def _reduce_narrow(first: Tensor, others: Sequence[Tensor], op: str) -> Tensor:
    """Narrow floats reduced in float64, and then such that the caller's conversion is the only rounding.

    A sum of float16 or float8 is exact in float64 for thousands of ranks: these numbers are multiples of
    2**-24 below 2**16. bfloat16 reaches from 2**-133 to 2**128. Its sums lose only what is smaller than
    2**-44 of the largest one, and do not overflow on the way, as they would in float32.
    """
    if len(others) == 1 and op != "AVERAGE":
        # float32 has more than twice the bits of either: to round to it first changes nothing.
        return _ROW_OPS[op](first.float(), others[0].float())
    combine = torch.mul if op == "PRODUCT" else torch.add
    total = first.float().double()  # float16 to float64 at once takes twice as long
    for row in others:
        combine(total, row.float(), out=total)
    if op == "AVERAGE":
        total /= 1 + len(others)
    return _rounded_to_odd(total)


def _rounded_to_odd(wide: Tensor) -> Tensor:
    """float64 with no more bits than float32 has, such that rounding that once more is rounding ``wide``.

    torch converts float64 to a narrow float by way of float32, and would take a value next to the middle of
    two narrow floats for that middle. So what float32 cannot hold goes to the odd one of its two neighbours,
    which is never such a middle. (It may be one below 2**-126, in some of the smallest numbers of bfloat16.)
    """
    bits = wide.view(torch.int64)
    odd = bits & _BEYOND_FLOAT32
    odd += _BEYOND_FLOAT32  # reaches the last bit of float32 if there is anything beyond it
    odd |= bits
    odd &= ~_BEYOND_FLOAT32
    return odd.view(torch.float64)


# --- carriers ----------------------------------------------------------------------------------------


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
        op, torch.float64, partial(_cast, torch.float64), lambda total: _rounded_to_odd(total).to(dtype)
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


# --- without a backend's help --------------------------------------------------------------------------

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
    return torch.view_as_complex(_rounded_to_odd(torch.view_as_real(total)).half())
