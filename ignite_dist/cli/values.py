"""The tensors that each rank contributes to the collectives of ``check``, and the expected results.

Every rank computes the expected results itself. All values, sums and products are exact in every dtype, with
any number of ranks: only two ranks contribute a value that changes an element of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add, and_, mul, or_

import torch
from torch import Tensor

OPS = ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)
_NUMEL = 5

_COMBINE: dict[str, Callable[[int | complex, int | complex], int | complex]] = {
    "SUM": add,
    "AVERAGE": add,
    "PRODUCT": mul,
    "MIN": min,  # type: ignore[dict-item]  # complex numbers have no order
    "MAX": max,  # type: ignore[dict-item]
    "AND": and_,
    "OR": or_,
}
# The value that does not change the result. The other contributed values are 1, 2 and 3.
_NEUTRAL = {"SUM": 0, "AVERAGE": 0, "PRODUCT": 1, "MIN": 3, "MAX": 0, "AND": 3, "OR": 0}


def contribution(op: str, rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    """The tensor that ``rank`` contributes to a reduction by ``op``."""
    return torch.tensor([_element(op, rank, world_size, dtype, j) for j in range(_NUMEL)]).to(dtype)


def reduced(op: str, world_size: int, dtype: torch.dtype) -> Tensor:
    """The expected result of a reduction by ``op``; float64 or complex128 for AVERAGE."""
    totals = []
    for j in range(_NUMEL):
        owners = {j % world_size, (j + 1) % world_size}
        values = [_element(op, rank, world_size, dtype, j) for rank in sorted(owners)]
        total = reduce(_COMBINE[op], values)
        totals.append(total / world_size if op == "AVERAGE" else total)
    if op == "AVERAGE":
        return torch.tensor(totals, dtype=_wide(dtype))
    return torch.tensor(totals).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _element(op: str, rank: int, world_size: int, dtype: torch.dtype, j: int) -> int | complex:
    is_first, is_second = rank == j % world_size, rank == (j + 1) % world_size
    if not (is_first or is_second):
        return min(_NEUTRAL[op], 1) if dtype is torch.bool else _NEUTRAL[op]
    value = 1 + j % 3 if is_first else 2 + j % 2
    if dtype is torch.bool:
        return value % 2
    return complex(value, 1) if dtype.is_complex else value


def own_rows(rank: int, dtype: torch.dtype, num_rows: int = 2) -> Tensor:
    """The tensor of shape ``(num_rows, 3)`` that ``rank`` contributes to a gather or a broadcast."""
    values = (torch.arange(num_rows * 3).view(num_rows, 3) + rank) % 4
    if not dtype.is_complex:
        return values.to(dtype)
    return torch.complex(values.double(), 1 - values.double()).to(dtype)


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """True if ``found``, on any device, equals ``wanted`` bit by bit."""
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(_bytes(_on_cpu(found)), _bytes(wanted))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def is_right(op: str, found: Tensor, world_size: int, dtype: torch.dtype) -> bool:
    """True if ``found`` is the expected result of a reduction by ``op``, up to rounding for AVERAGE."""
    wanted = reduced(op, world_size, dtype)
    if op != "AVERAGE":
        return is_same(found, wanted)
    error = (_on_cpu(found).to(_wide(dtype)) - wanted).abs()
    return found.dtype is dtype and bool((error <= 8 * torch.finfo(dtype).eps).all())


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU. ``Tensor.cpu()`` of torch_xla loses the imaginary part of complex128."""
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor).cpu())
    return tensor.cpu()
