"""Where the tensors of a received object arrive.

A sender's ``cuda:3`` is not the receiver's: it belongs to another rank, or is not there. So a tensor arrives
on the accelerator of the rank that receives it, and on the CPU of a process without one. torch restores
tensors of XLA itself, which have no storage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

# Returns the device of the rank that decodes an object; None if it has no accelerator.
OwnDevice = Callable[[], torch.device | None]

_CPU = torch.device("cpu")
# The OwnDevice of the object that this thread decodes.
_current = threading.local()


def no_accelerator() -> None:
    """The :data:`OwnDevice` of a process that must not start an accelerator: a launcher."""


class arriving_on:  # a context manager; one from a generator takes three times as long
    """In this block, tensors in objects arrive on ``own_device()`` if they were on a device of its type."""

    __slots__ = ("_outer", "_own_device")

    def __init__(self, own_device: OwnDevice) -> None:
        self._own_device = own_device

    def __enter__(self) -> None:
        self._outer = getattr(_current, "own_device", no_accelerator)  # an object may decode another one
        _current.own_device = self._own_device

    def __exit__(self, *_: object) -> None:
        _current.own_device = self._outer


def arrival_device(sent: str) -> torch.device:
    """The device for a tensor that was on the device ``sent``."""
    device_type = torch.device(sent).type
    own = None if device_type == "cpu" else getattr(_current, "own_device", no_accelerator)()
    return own if own is not None and own.type == device_type else _CPU


def arrive(storage: Any, sent: str) -> Any:
    """``storage`` on its arrival device: the ``map_location`` of ``torch.load``.

    None leaves it to torch: a tensor without data stays so.
    """
    if sent == "meta":
        return None
    device = arrival_device(sent)
    return storage if device.type == "cpu" else storage.to(device=device)
