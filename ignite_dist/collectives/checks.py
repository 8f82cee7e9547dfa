"""Tensors that cannot be sent, or cannot hold a result, are refused before anything is sent."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ignite_dist import _torch
from ignite_dist.values import reduce_ops

__all__ = ["check_dense", "check_writable", "is_sharded"]


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def check_dense(function: str, tensor: Any) -> None:
    """Refuse what has no dense memory to send, with a ``TypeError`` that names ``function``."""
    if (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and reduce_ops.is_movable(tensor.dtype)
    ):
        return
    _refuse_what_is_not_dense(function, tensor)


def _refuse_what_is_not_dense(function: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function} takes a tensor, got {type(tensor).__name__}.")
    if is_sharded(tensor):
        raise TypeError(
            f"{function} takes plain tensors, got a DTensor, of which each rank has a part. Use "
            "tensor.full_tensor(), or tensor.to_local() for this rank's part."
        )
    if tensor.is_nested:
        raise TypeError(
            f"{function} takes dense tensors, got a nested one. Use tensor.unbind() for its parts, or "
            "torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    if tensor.is_meta:
        raise TypeError(f"{function} takes tensors with data, got one on the meta device.")
    if tensor.is_quantized:
        raise TypeError(
            f"{function} takes no quantized tensors, whose scales may differ between ranks. Use "
            "tensor.dequantize()."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{function} takes dense tensors, got {tensor.layout}. Use tensor.to_dense().")
    if not reduce_ops.is_movable(tensor.dtype):
        raise TypeError(
            f"{function} takes no {tensor.dtype}, which torch does not compute with. Use "
            "tensor.view(torch.uint8) for its bytes."
        )
    kind = type(tensor)
    is_wrapper = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # keeps its values in other tensors
    if is_wrapper and tensor.device.type != "xla" and not tensor.data_ptr():
        raise TypeError(
            f"{function} takes plain tensors, got a {kind.__name__}, which has no memory of its own. "
            "Pass the tensors that it is made of."
        )


def check_writable(function: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot hold a result, with a ``ValueError`` that names ``function``."""
    is_xla = tensor.is_xla  # type: ignore[attr-defined]  # which tells no layout, so not by its strides either
    if tensor.is_contiguous() and not is_xla:
        return
    base = _torch.storage_base(tensor) if is_xla else None
    if (base is not None and tensor.nbytes > base.nbytes) or _overlaps_itself(tensor):
        raise ValueError(
            f"{function} writes its result into the tensor, whose elements share memory (as after expand()). "
            "Pass tensor.clone()."
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of ``tensor`` are in the same place."""
    if not tensor.numel():
        return False
    extent = 0  # of the dimensions looked at so far: how far their last element is from the first
    dimensions = [
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ]
    for stride, size in sorted(dimensions):
        if stride == 0:
            return True
        if stride <= extent:
            break
        extent += stride * (size - 1)
    else:
        return False  # each dimension steps over all that the smaller ones reach
    # Only a layout made by hand comes here. So mark the places, and count them.
    extent = sum(stride * (size - 1) for stride, size in dimensions)
    if tensor.numel() > extent + 1:
        return True
    taken = torch.zeros(extent + 1, dtype=torch.bool, device="cpu")
    taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(taken.count_nonzero()) < tensor.numel()
