"""Broadcast and average of many tensors in few collectives (buckets)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.checks import check_dense, check_writable
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.primitives import plan_reduction, reduce_tensor
from ignite_dist.collectives.sending import carrying_device, plain, shares_memory
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.values import serialization
from ignite_dist.values.carriers import PIECE_BYTES


def broadcast_tensors(model: ComputationModel, tensors: Iterable[Tensor], src: int, group: Group) -> None:
    """Fill ``tensors`` with the tensors of global rank ``src``. Shapes and dtypes must be equal on all ranks.

    Tensors are sent as bytes, in buckets of up to :data:`PIECE_BYTES`: one collective per bucket.

    Raises:
        TypeError, ValueError: a tensor is not dense, or its elements share memory. Nothing was sent.
    """
    checked = _checked("broadcast", tensors)

    def begin(group: Group) -> Work:
        return Steps(lambda: _broadcast_checked(model, checked, src, group))

    perform(model, "broadcast", group, begin, outside=None, value=checked, op=f"from {src}")


def _broadcast_checked(model: ComputationModel, checked: list[Tensor], src: int, group: Group) -> None:
    for bucket in _buckets(checked, lambda tensor: tensor.device):
        with torch.no_grad():
            device = carrying_device(model, bucket[0])
            sent = torch.cat([serialization.as_bytes(plain(tensor)).to(device) for tensor in bucket])
            model.transport.broadcast(sent, src, group).wait()
            parts = torch.split(sent, [tensor.nbytes for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                # view(dtype) needs an aligned offset. clone() provides one.
                fill(tensor, part.clone().view(tensor.dtype))


def average_tensors(model: ComputationModel, tensors: Iterable[Tensor], group: Group) -> None:
    """Fill ``tensors`` with their means over the ranks. Shapes and dtypes must be equal on all ranks.

    A bucket has tensors of one dtype and up to :data:`PIECE_BYTES`. Each bucket needs one collective.

    Raises:
        TypeError, ValueError: a tensor cannot be averaged, or its elements share memory. Nothing was sent.
    """
    for bucket in _buckets(_checked("average", tensors), lambda tensor: (tensor.dtype, tensor.device)):
        with torch.no_grad():
            values = [plain(tensor).view(-1) for tensor in bucket]
            flat = torch.cat(values) if len(values) > 1 else values[0]
            plan = plan_reduction(model, "AVERAGE", flat)
            reduce_tensor(model, flat, "AVERAGE", plan, group).wait()
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                if not shares_memory(part, tensor):  # else it was averaged in place
                    fill(tensor, part)


def fill(tensor: Tensor, values: Tensor) -> None:
    """Write ``values``, which may have another shape, into ``tensor``."""
    with torch.inference_mode() if tensor.is_inference() else nullcontext():  # needed for writing
        tensor.detach().copy_(values.view(tensor.shape))


def _checked(function: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors`` as a list. Raises if a tensor is not dense or not writable."""
    checked = list(tensors)
    for tensor in checked:
        check_dense(function, tensor)
        check_writable(function, tensor)
    return checked


def _buckets(tensors: Sequence[Tensor], kind: Callable[[Tensor], Any]) -> Iterator[list[Tensor]]:
    """``tensors`` in order, split into lists of one ``kind`` and at most :data:`PIECE_BYTES` each."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if bucket and (size > PIECE_BYTES or kind(tensor) != kind(bucket[0])):
            yield bucket
            bucket, size = [], tensor.nbytes
        bucket.append(tensor)
    if bucket:
        yield bucket
