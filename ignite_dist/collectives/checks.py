"""Checks of tensors, before a collective sends anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_dist.internals import _torch
from ignite_dist.values import reduce_ops


def is_sharded(tensor: Any) -> bool:
    """True if ``tensor`` is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_dense(function: str, tensor: Any) -> None:
    """Raise ``TypeError`` if ``tensor`` has no dense memory to send. The message names ``function``."""
    if (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and reduce_ops.is_movable(tensor.dtype)
    ):
        return
    _raise_not_dense(function, tensor)


def _raise_not_dense(function: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function} takes a tensor, got {type(tensor).__name__}.")
    if is_sharded(tensor):
        raise TypeError(
            f"{function} takes plain tensors, got a DTensor, which is sharded over the ranks. Use "
            "tensor.full_tensor(), or tensor.to_local() for this rank's shard."
        )
    if tensor.is_nested:
        raise TypeError(
            f"{function} takes dense tensors, got a nested tensor. Use tensor.unbind() for its parts, or "
            "torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    if tensor.is_meta:
        raise TypeError(f"{function} takes tensors with data, got a tensor on the meta device.")
    if tensor.is_quantized:
        raise TypeError(
            f"{function} takes no quantized tensors, whose scales may differ between ranks. Use "
            "tensor.dequantize()."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{function} takes dense tensors, got {tensor.layout}. Use tensor.to_dense().")
    if not reduce_ops.is_movable(tensor.dtype):
        raise TypeError(
            f"{function} takes no {tensor.dtype}, which has no arithmetic in torch. Use "
            "tensor.view(torch.uint8) for its bytes."
        )
    kind = type(tensor)
    is_wrapper = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # other tensors hold its values
    if is_wrapper and tensor.device.type != "xla" and not tensor.data_ptr():
        raise TypeError(
            f"{function} takes plain tensors, got a {kind.__name__}, which has no memory of its own. "
            "Pass its inner tensors."
        )


def check_writable(function: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if elements of ``tensor`` share memory. The message names ``function``."""
    is_xla = tensor.is_xla  # type: ignore[attr-defined]  # strides are unknown on XLA
    if tensor.is_contiguous() and not is_xla:
        return
    base = _torch.storage_base(tensor) if is_xla else None
    if (base is not None and tensor.nbytes > base.nbytes) or _overlaps_itself(tensor):
        raise ValueError(
            f"{function} writes its result into the tensor, whose elements share memory (as after expand()). "
            "Pass tensor.clone()."
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """True if two elements of ``tensor`` have the same memory address."""
    if not tensor.numel():
        return False
    extent = 0  # offset of the last element in the dimensions so far
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
        return False  # each stride is larger than the extent of the smaller dimensions
    # An unusual layout, for example from as_strided(). Mark the address of each element and count the marks.
    extent = sum(stride * (size - 1) for stride, size in dimensions)
    if tensor.numel() > extent + 1:
        return True
    marks = torch.zeros(extent + 1, dtype=torch.bool, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marks.count_nonzero()) < tensor.numel()


def check_disjoint(function: str, tensors: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if two of the ``tensors`` share memory. The message names ``function``.

    Addresses on XLA are not known.
    """
    known = [one for one in tensors if one.device.type != "xla" and one.numel()]
    known.sort(key=lambda one: (one.device.index or -1, one.data_ptr()))
    reached: list[Tensor] = []  # the tensors that may extend behind the beginning of the next
    for tensor in known:
        reached = [one for one in reached if one.device == tensor.device and _end(one) > tensor.data_ptr()]
        if any(_share_memory(one, tensor) for one in reached):
            raise ValueError(
                f"{function} fills tensors, two of which share memory. Pass the larger one only."
            )
        reached.append(tensor)


def _end(tensor: Tensor) -> int:
    """The address behind the last element."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """True if the tensors have a byte in common. The address of ``first`` is not above that of ``second``."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    begin = first.data_ptr()
    marks = torch.zeros(max(_end(first), _end(second)) - begin, dtype=torch.bool, device="cpu")
    _bytes_among(marks, first, begin).fill_(True)
    return bool(_bytes_among(marks, second, begin).any())


def _bytes_among(marks: Tensor, tensor: Tensor, begin: int) -> Tensor:
    """The part of ``marks`` for the bytes of ``tensor``; ``marks`` begins at the address ``begin``."""
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), tensor.data_ptr() - begin)
