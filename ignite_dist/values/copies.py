"""Copies of tensors on the CPU, for a file that is written later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_dist.values import serialization
from ignite_dist.values.views import Views

_LARGE_BYTES = 1 << 20


class Copies:
    """Copies of tensors on the CPU. They share memory as the tensors in a file of ``views.save`` do.

    Args:
        of_cpu: True to copy tensors on the CPU too. False keeps them.
    """

    def __init__(self, of_cpu: bool = True) -> None:
        self._of_cpu = of_cpu
        self._views = Views()
        self._promised: list[tuple[Tensor, Tensor]] = []

    def promise(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the CPU: itself if it needs no copy, or a copy that is empty until :meth:`make`."""
        if not self._of_cpu and tensor.device.type == "cpu":
            return tensor
        if not _has_simple_storage(tensor):
            return tensor.to("cpu", copy=True)
        self._views.part_of(tensor)
        self._promised.append((tensor, torch.empty(0, dtype=tensor.dtype, device="cpu")))
        return self._promised[-1][1]

    def make(self) -> None:
        """Copy what was promised."""
        self._views.cut()
        # torch.save refuses two dtypes of one storage, so each dtype gets a copy of its own.
        copies: dict[tuple[int, torch.dtype], Any] = {}
        promised, self._promised = self._promised, []
        for tensor, copy in promised:
            part = self._views.part_of(tensor)
            storage: Any = part.storage
            key = id(storage), tensor.dtype
            if key not in copies:
                copies[key] = _copied(storage)
            copy.set_(copies[key], part.offset, tensor.size(), part.stride)
        self._views = Views()


def _has_simple_storage(tensor: Tensor) -> bool:
    """True if a storage, an offset, sizes and strides describe ``tensor`` completely."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _copied(storage: Any) -> Any:
    if storage.nbytes() < _LARGE_BYTES:
        return storage.clone() if storage.device.type == "cpu" else storage.cpu()
    # Huge pages: torch's own copy spends most of its time in the page faults of new memory.
    copy = serialization.as_tensor(serialization.new_buffer(storage.nbytes())).untyped_storage()
    copy.copy_(storage, False)
    return copy
