"""Reductions: their names, their dtypes, and their computation in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

OPS = ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR", "ADASUM")
BITWISE = ("AND", "OR", "XOR")
"""Operations on ints and bools only."""

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
"""Floats with so few bits that a sum of three often has a wrong last bit, or overflows halfway."""

BYTES = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2})
"""Dtypes that torch can copy but not compute with. They are sent as bytes."""

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


_OTHER_NAMES = {"MEAN": "AVERAGE", "AVG": "AVERAGE", "PROD": "PRODUCT", "MUL": "PRODUCT", "ADD": "SUM"}


def normalize_op(op: str) -> str:
    """The name of ``op`` in :data:`OPS`.

    Raises:
        ValueError: there is no such operation.
    """
    try:
        return _SPELLINGS[op]
    except (KeyError, TypeError):
        name = _SPELLINGS.get(op.upper()) if isinstance(op, str) else None
        if name is None:
            meant = _OTHER_NAMES.get(op.upper()) if isinstance(op, str) else None
            hint = f" For {op!r} use {meant!r}." if meant else ""
            hint = hint if isinstance(op, str) else " Pass the name as a str."
            raise ValueError(
                f"Unknown reduction {op!r}. Allowed: {', '.join(map(repr, OPS))}.{hint}"
            ) from None
        return name


def check_reducible(dtype: torch.dtype) -> None:
    """Raise if ``all_reduce`` does not support ``dtype``.

    Raises:
        TypeError: no operation supports ``dtype``. The message names an alternative.
    """
    if dtype is torch.float8_e8m0fnu:
        raise TypeError(f"all_reduce does not support {dtype}: no sign and no zero. Use tensor.float().")
    if dtype not in _REDUCED:
        raise TypeError(f"all_reduce does not support {dtype}: it has no arithmetic. Use all_gather.")


def is_movable(dtype: torch.dtype) -> bool:
    """True if tensors of ``dtype`` can be gathered and broadcast."""
    return dtype in _REDUCED or dtype in BYTES


def is_rounded(op: str, dtype: torch.dtype) -> bool:
    """True if ``op`` over ``dtype`` loses bits at each step unless it is computed in a wider dtype."""
    return dtype in NARROW_FLOATS and op in ("SUM", "AVERAGE", "PRODUCT")


def is_extreme(op: str, dtype: torch.dtype) -> bool:
    """True for MIN and MAX of floats: libraries lose a NaN or the sign of a zero, depending on its rank."""
    return op in ("MIN", "MAX") and dtype.is_floating_point


def is_inexact(op: str, dtype: torch.dtype) -> bool:
    """True if a library's own reduction is not what the package promises, and :func:`reduce_rows` is."""
    return is_rounded(op, dtype) or (is_extreme(op, dtype) and dtype.itemsize > 1)


def adds_rows(op: str, dtype: torch.dtype) -> bool:
    """True if :func:`reduce_rows` gives what the package promises for SUM, MIN and so on of ``dtype``."""
    return is_inexact(op, dtype) or (dtype in ROW_DTYPES and op in _ROW_OPS)


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise if ``op`` over ``dtype`` has no exact meaning.

    Raises:
        TypeError: ``op`` does not support ``dtype``. The message names an alternative.
    """
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op} is bitwise on ints and logical on bools; got {dtype}. Use MIN or MAX.")
    if op in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(f"{op} needs an order, and {dtype} has none. Reduce the absolute values.")
    if dtype is torch.bool and op in ("SUM", "PRODUCT"):
        raise TypeError(f"{op} of torch.bool does not fit into a bool. Use tensor.int(), or AND, OR and XOR.")
    if op in ("AVERAGE", "ADASUM") and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"{op} of {dtype} would round. Use tensor.double(), or SUM and divide.")


# --- tensors, row by row -----------------------------------------------------------------------------

ROW_DTYPES = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}
_ROW_OPS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.bitwise_and,
    "OR": torch.bitwise_or,
    "XOR": torch.bitwise_xor,
}


# The bits of a float64 that a float32 does not have.
_BEYOND_FLOAT32 = (1 << 29) - 1
# Of the size in bytes of a float.
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of elements reduced at a time, so that their float64 copies fit into the processor's cache.
_BLOCK = 1 << 15
# On a GPU the launches of small blocks take longer than their kernels.
_BLOCK_ON_GPU = 1 << 22


def reduce_rows(rows: Iterable[Tensor], op: str, out: Tensor) -> Tensor:
    """Reduce ``rows``, each of the shape and dtype of ``out``, into ``out`` in order.

    Equal rows give equal bits on every rank. Narrow floats are rounded once. MIN and MAX are NaN if any row
    is, and -0.0 is less than 0.0. "AVERAGE" is supported for narrow floats only.
    """
    first, *others = rows
    if not others:
        return out.copy_(first)
    if is_inexact(op, out.dtype):
        reduce = _reduce_narrow if is_rounded(op, out.dtype) else _find_extremes
        size = _BLOCK if out.device.type == "cpu" else _BLOCK_ON_GPU
        for *parts, result in zip(
            *(torch.split(row.view(-1), size) for row in (first, *others, out)), strict=True
        ):
            result.copy_(reduce(parts[0], parts[1:], op))
        return out
    combine = _ROW_OPS[op]
    second, *rest = others
    combine(first, second, out=out)
    for row in rest:
        combine(out, row, out=out)
    return out


def _reduce_narrow(first: Tensor, others: Sequence[Tensor], op: str) -> Tensor:
    """Reduce narrow floats in float64. The caller's conversion of the result is the only rounding.

    float16 and float8 values are multiples of 2**-24 and smaller than 2**16, so their sums are exact in
    float64 for thousands of ranks. bfloat16 covers 2**-133 to 2**128. Its sums in float64 lose only bits
    below 2**-44 of the largest value, and do not overflow, unlike sums in float32.
    """
    if len(others) == 1 and op != "AVERAGE":
        # float32 has more than twice the bits of a narrow float, so a first rounding to float32 does no harm.
        return _ROW_OPS[op](first.float(), others[0].float())
    combine = torch.mul if op == "PRODUCT" else torch.add
    total = first.float().double()  # direct conversion from float16 to float64 takes twice as long
    for row in others:
        combine(total, row.float(), out=total)
    if op == "AVERAGE":
        total /= 1 + len(others)
    return round_to_odd(total)


def _find_extremes(first: Tensor, others: Sequence[Tensor], op: str) -> Tensor:
    """The least or greatest floats.

    torch's operators return either zero of two with different signs. The least number has a sign if any row
    has one, and the greatest if all have one. This gives the signs of zeros too.
    """
    combine, combine_signs = _ROW_OPS[op], torch.bitwise_or if op == "MIN" else torch.bitwise_and
    bits = _INTS[first.itemsize]
    found = combine(first, others[0])
    signs = combine_signs(first.view(bits), others[0].view(bits))
    for row in others[1:]:
        combine(found, row, out=found)
        combine_signs(signs, row.view(bits), out=signs)
    return torch.copysign(found, signs.view(first.dtype), out=found)


def round_to_odd(wide: Tensor) -> Tensor:
    """Round ``wide`` (float64) to float32 precision, so that a later rounding to a narrow float is correct.

    torch converts float64 to float32, and then to a narrow float. The first rounding may give the midpoint of
    two narrow floats, and the second may then round in the wrong direction. This function rounds to the odd
    one of the two float32 neighbours, which is never a midpoint. (Exception: the smallest bfloat16 numbers,
    below 2**-126.)
    """
    bits = wide.view(torch.int64)
    odd = bits & _BEYOND_FLOAT32
    odd += _BEYOND_FLOAT32  # carries into the last bit of float32 if any lower bit is set
    odd |= bits
    odd &= ~_BEYOND_FLOAT32
    return odd.view(torch.float64)
