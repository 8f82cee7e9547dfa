"""Move the tensors of a batch to this rank's device."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ignite_dist.context.live import current_model
from ignite_dist.internals.tracing import traced
from ignite_dist.values import pytree


@traced
def to_device(batch: Any) -> Any:
    """``batch`` with all of its tensors on :func:`device`.

    Copies from pinned memory to an accelerator are asynchronous. Later work on the accelerator sees the
    copied values.

    Args:
        batch: a tensor, an object with a ``to(device)`` method (a ``PackedSequence``, a tokenizer's batch),
            or dicts, lists, tuples, named tuples and dataclasses of these. Other values stay unchanged.

    Returns:
        A new structure of the same types. Tensors on the device already are not copied.
    """
    return _moved(batch, current_model().device())


@traced
def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        # A non-blocking copy to the CPU could be read before it is complete.
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, (type, torch.Size)):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, (dict, list, tuple)):
        return pytree.map_children(lambda child: _moved(child, device), batch)
    if isinstance(batch, deque):
        return deque((_moved(child, device) for child in batch), batch.maxlen)
    if isinstance(batch, MutableMapping):
        mapping = copy(batch)
        mapping.update({key: _moved(value, device) for key, value in batch.items()})
        return mapping
    if is_dataclass(batch):
        moved = copy(batch)
        for field in fields(batch):
            value = _moved(getattr(batch, field.name), device)
            object.__setattr__(moved, field.name, value)  # also works for frozen dataclasses
        return moved
    return batch
