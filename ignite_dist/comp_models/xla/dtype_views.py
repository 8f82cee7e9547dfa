"""Views of a tensor as another dtype on an XLA device, inside of the graph; and conversion of values to bits.

Values that are sent or added as ints are not rounded, a zero keeps its sign, and a NaN keeps its bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The dtypes that XLA preserves. XLA returns other unsigned ints as signed ints.
_XLA_NAMES = {
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int16: "s16",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}


def bits(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as ints: ``(*S) -> (n,)``. A complex number becomes two ints."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(_BITS[real.itemsize])


def from_bits(ints: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`bits` in the last dimension: ``ints``, ``(*S, n)``, as ``dtype``."""
    if not dtype.is_complex:
        return ints.view(dtype)
    real = ints.view(dtype.to_real())
    return torch.view_as_complex(real.view(*real.shape[:-1], -1, 2))


def lower_dtype_views() -> torch.library.Library:
    """Register a lowering of ``tensor.view(dtype)`` for the whole process, as long as the result lives.

    torch_xla has no lowering: such a view copies the tensor to the CPU and back, which splits the graph.
    """
    from torch_xla.core import xla_op_registry

    bitcast = xla_op_registry.register("ignite_dist_bitcast", _lower)

    def view_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if {tensor.dtype, dtype} == {torch.bool, torch.uint8}:  # XLA's bool is not a byte
            return tensor.to(dtype)
        if not {tensor.dtype, dtype} <= set(_XLA_NAMES):
            return tensor.cpu().view(dtype).to(tensor.device)
        shape, ratio = list(tensor.shape), dtype.itemsize / tensor.itemsize
        if ratio != 1:
            shape[-1] = int(shape[-1] / ratio)
        # A bitcast to a wider type needs the elements of each result in an extra last dimension.
        split = [*shape, int(ratio)] if ratio > 1 else list(tensor.shape)
        result: Tensor = bitcast(tensor, to_type=_XLA_NAMES[dtype], split=split, shape=shape)
        return result

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("view_copy.dtype", view_copy, "XLA")  # type: ignore[no-untyped-call]
    return library


def _lower(operand: Any, to_type: str, split: list[int], shape: list[int]) -> Any:
    return operand.reshape(split).bitcast(to_type).reshape(shape)
