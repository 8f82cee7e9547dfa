"""What a reduction means: its names, which dtypes it takes, and how it is computed in rank order.

Backends differ in the dtypes and operations that they carry. :func:`find_carrier` says how a reduction
that a backend cannot do as it stands is sent as one that it can, without rounding anything on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "BYTES",
    "NARROW_FLOATS",
    "OPS",
    "check_op",
    "check_reducible",
    "is_movable",
    "is_rounded",
    "normalize_op",
    "reduce_rows",
    "rounded_to_odd",
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
    return rounded_to_odd(total)


def rounded_to_odd(wide: Tensor) -> Tensor:
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


# --- without a backend's help --------------------------------------------------------------------------
