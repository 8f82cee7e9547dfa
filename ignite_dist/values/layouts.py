"""Layouts: the dtypes and shapes of a call's value."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Maximum length of a description. A whole call must fit into the header of one message.
_MAX_VALUE = 120

_NUMBERS = frozenset({int, float, bool})  # isinstance(number, Tensor) is slow


def layout_of(value: Tensor | torch.dtype | Sequence[Any] | str) -> Any:
    """``(dtype, shape)`` of a tensor, a list of these for a tree, or the description that ``value`` is.

    It is recorded in place of the value, whose memory it does not keep allocated.
    """
    if isinstance(value, (str, torch.dtype)):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    return [
        "number" if type(leaf) in _NUMBERS or not isinstance(leaf, Tensor) else (leaf.dtype, leaf.shape)
        for leaf in value
    ]


def describe_layout(layout: Any) -> str:
    """A description of a layout, the same on all ranks."""
    if isinstance(layout, tuple):
        dtype, shape = layout
        return f"{dtype} {tuple(shape)}"
    words = ", ".join(map(describe_layout, layout)) if isinstance(layout, list) else str(layout)
    if len(words) <= _MAX_VALUE:
        return words
    return f"{words[:_MAX_VALUE]}... ({zlib.crc32(words.encode()):08x})"


def num_bytes_of(layout: Any) -> int:
    """The bytes of the tensors; 0 if only a description is known."""
    if isinstance(layout, tuple):
        dtype, shape = layout
        return int(shape.numel() * dtype.itemsize)
    return sum(map(num_bytes_of, layout)) if isinstance(layout, list) else 0
