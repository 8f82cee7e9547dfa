"""Numpy arrays as tensors, and back."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_array(value: Any) -> bool:
    """True for a numpy array, but not for those of numpy's subclasses."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def tensor_of(array: Any) -> Tensor:
    """A tensor with the values of ``array``, and with its memory where torch can use and change it.

    Raises:
        TypeError: torch has no such dtype.
    """
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_usable = all(stride >= 0 and stride % native.itemsize == 0 for stride in native.strides)
    if not is_usable or not native.flags.writeable:
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise TypeError(f"torch has no dtype for arrays of {array.dtype}. Pass array.astype(...).") from error


def fill_array(array: Any, tensor: Tensor) -> Any:
    """``array`` with the values of a result of :func:`tensor_of` for it."""
    if tensor.data_ptr() != array.ctypes.data:
        array[...] = tensor.numpy()
    return array


def check_writable_array(function: str, array: Any) -> None:
    """Raise ``ValueError`` if ``array`` is read-only. The message names ``function``."""
    if not array.flags.writeable:
        raise ValueError(
            f"{function} with inplace=True writes its result into the array, which is read-only. Pass "
            "array.copy(), or leave out inplace=True."
        )
