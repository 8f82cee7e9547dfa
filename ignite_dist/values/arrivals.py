"""Where the tensors of a received object arrive.

A sender's ``cuda:3`` is not the receiver's: it belongs to another rank, or is not there. So a tensor of an
accelerator arrives on the accelerator of the receiving rank, and on the CPU of a process without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Returns the device of the process that decodes an object; None if that has no accelerator.
Receiver = Callable[[], torch.device | None]

_CPU = torch.device("cpu")
# The receiver of the object that this thread decodes.
_current = threading.local()


def no_accelerator() -> None:
    """The receiver of a process that must not start an accelerator: a launcher."""


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """In this block, objects are decoded for ``receiver``."""
    outer = getattr(_current, "receiver", no_accelerator)  # an object may decode another one
    _current.receiver = receiver
    try:
        yield
    finally:
        _current.receiver = outer


def place_of(sent: str) -> torch.device:
    """The device for a tensor that was on the device ``sent``."""
    device_type = torch.device(sent).type
    own = None if device_type == "cpu" else getattr(_current, "receiver", no_accelerator)()
    return own if own is not None and own.type == device_type else _CPU


def arrive(storage: Any, sent: str) -> Any:
    """The ``map_location`` of ``torch.load``. None leaves it to torch: tensors without data stay so."""
    if sent == "meta":
        return None
    place = place_of(sent)
    return storage if place.type == "cpu" else storage.to(device=place)
