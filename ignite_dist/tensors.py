"""A tensor of any dtype, device and layout, over a model's primitives, which take only some.

How a model takes tensors of one dtype on one device is worked out once and kept in ``model.plans``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_dist import reduction, wire
from ignite_dist.comp_models import ComputationModel, Group

__all__ = [
    "average_tensors",
    "broadcast_tensor",
    "broadcast_tensors",
    "check_dense",
    "check_writable",
    "gather_rows",
    "is_sharded",
    "plan_reduction",
    "reduce_messages",
    "reduce_tensor",
    "sent_dtype",
    "to_message",
]

# Large enough that a collective's own time does not count, small enough for a second copy.
_BUCKET_BYTES = 16 << 20


# --- reduce ------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a model reduces tensors of one dtype on one device by one operation.

    Attributes:
        moves: whether they are sent from another device than theirs. Which one is asked each time: replicas
            of XLA share a model, and each has its own.
        carrier: how they are sent; None if they have to be gathered.
        in_place: whether they are sent as they are.
    """

    moves: bool
    carrier: reduction.Carrier | None
    in_place: bool


def plan_reduction(model: ComputationModel, op: str, tensor: Tensor) -> Plan:
    """The plan for ``tensor``, from the model's cache but for the first time.

    Raises:
        TypeError, ValueError: ``op`` does not take such a tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        check_dense("all_reduce", tensor)
    key = (op, tensor.dtype, tensor.device)
    found: Plan | None = model.plans.get(key)
    if found is None:
        reduction.check_op(op, tensor.dtype)
        if op == "ADASUM" and not model.carries("all_reduce", op, tensor.dtype, tensor.device):
            raise ValueError(
                f"ADASUM needs Horovod built with MPI; backend {model.backend()!r} does not have it."
            )
        device = _carrying_device(model, tensor)
        carrier = reduction.find_carrier(
            op, tensor.dtype, lambda sent, dtype: model.carries("all_reduce", sent, dtype, device)
        )
        moves = device != tensor.device
        in_place = not moves and carrier is not None and carrier.dtype is tensor.dtype
        found = model.plans[key] = Plan(moves, carrier, in_place)
    return found


def reduce_tensor(model: ComputationModel, tensor: Tensor, op: str, plan: Plan, group: Group) -> Tensor:
    """Reduce ``tensor`` in place, as planned, and return it."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # the only place where it may be written to
            return reduce_tensor(model, tensor, op, plan, group)
    carrier = plan.carrier
    if plan.in_place and carrier is not None and _is_plain(tensor):
        reduced = tensor.detach() if tensor.requires_grad else tensor
        model._all_reduce(reduced, carrier.op, group)
        if op == "AVERAGE":
            reduced /= len(group.ranks)
        return tensor
    with torch.no_grad():
        local = _sendable(model, tensor, plan.moves)
        if carrier is None:
            reduced = reduction.reduce_gathered(gather_rows(model, local, group), op)
        else:
            reduced = model._all_reduce(carrier.encode(local).contiguous(), carrier.op, group)
            if op == "AVERAGE":
                reduced /= len(group.ranks)
            reduced = carrier.decode(reduced)
        tensor.copy_(_moved(reduced, tensor.device))
    return tensor


# --- gather and broadcast ----------------------------------------------------------------------------


def gather_rows(model: ComputationModel, tensor: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """``(*S) -> (group_size, *S)`` for a tensor of any dtype, device and layout."""
    rows_shape = (len(group.ranks), *tensor.shape)
    route = _route(model, "all_gather", tensor)
    if route.direct and _is_plain(tensor) and not tensor.requires_grad:
        return model._all_gather(tensor, group, out=None if out is None else out.view(rows_shape))
    with torch.no_grad():
        local = _sendable(model, tensor, route.moves)
        if out is not None and out.device == local.device:
            rows = out.detach().view(rows_shape)
        else:
            rows = torch.empty(rows_shape, dtype=tensor.dtype, device=local.device)
        if route.as_is:
            model._all_gather(local, group, out=rows)
        else:  # bytes lose nothing
            model._all_gather(_as_bytes(local), group, out=_as_bytes(rows).view(rows_shape[0], -1))
        if out is not None and out.device != local.device:
            return out.copy_(_moved(rows, out.device).view(out.shape))
        return _moved(rows, tensor.device)


def broadcast_tensor(model: ComputationModel, tensor: Tensor, src: int, group: Group) -> Tensor:
    """Fill ``tensor`` with that of the global rank ``src`` and return it."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            return broadcast_tensor(model, tensor, src, group)
    route = _route(model, "broadcast", tensor)
    with torch.no_grad():
        carried = _sendable(model, tensor, route.moves)
        model._broadcast(carried if route.as_is else _as_bytes(carried), src, group)
        if route.moves or not _is_plain(tensor):  # then it was a copy
            tensor.detach().copy_(_moved(carried, tensor.device))
    return tensor


def broadcast_tensors(model: ComputationModel, tensors: Iterable[Tensor], src: int, group: Group) -> None:
    """Fill ``tensors`` with those of the global rank ``src``, which has as many of the same layouts.

    Small ones travel together, as bytes: one collective for each :data:`_BUCKET_BYTES`.

    Raises:
        TypeError, ValueError: one of them is not dense, or overlaps itself. Nothing was sent.
    """
    checked = _checked("broadcast", tensors)
    model.announce("broadcast", group, checked, f"from {src}")
    for bucket in _buckets(checked, lambda tensor: tensor.device):
        with torch.no_grad():
            device = _carrying_device(model, bucket[0])
            sent = torch.cat([_as_bytes(_plain(tensor)).to(device) for tensor in bucket])
            model._broadcast(sent, src, group)
            parts = torch.split(sent, [tensor.nbytes for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                # A part may begin at any byte, but is looked at as elements only where one begins.
                tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def average_tensors(model: ComputationModel, tensors: Iterable[Tensor], group: Group) -> None:
    """Fill ``tensors`` with their means over the ranks, each of which has as many of the same layouts.

    Small ones of one dtype travel together: one collective for each :data:`_BUCKET_BYTES`.

    Raises:
        TypeError, ValueError: one of them cannot be averaged, or overlaps itself. Nothing was sent.
    """
    for bucket in _buckets(_checked("average", tensors), lambda tensor: (tensor.dtype, tensor.device)):
        with torch.no_grad():
            flat = torch.cat([_plain(tensor).view(-1) for tensor in bucket])
            reduce_tensor(model, flat, "AVERAGE", plan_reduction(model, "AVERAGE", flat), group)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _checked(function: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors``, if each can be sent and hold a result."""
    checked = list(tensors)
    for tensor in checked:
        check_dense(function, tensor)
        check_writable(function, tensor)
    return checked


def _buckets(tensors: Sequence[Tensor], kind: Callable[[Tensor], Any]) -> Iterator[list[Tensor]]:
    """``tensors`` in their order, as lists of one ``kind`` and of :data:`_BUCKET_BYTES` at most."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if bucket and (size > _BUCKET_BYTES or kind(tensor) != kind(bucket[0])):
            yield bucket
            bucket, size = [], tensor.nbytes
        bucket.append(tensor)
    if bucket:
        yield bucket


# --- where and how a tensor is sent ------------------------------------------------------------------


def _carrying_device(model: ComputationModel, tensor: Tensor) -> torch.device:
    """Where ``tensor`` is sent from: where it is, if the backend takes bytes from there."""
    if model.carries("all_gather", None, torch.uint8, tensor.device):
        return tensor.device
    return model._bytes_device()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is its value: contiguous, and not conjugated or negated lazily."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    """``tensor`` without a graph, in memory that is its value; its own memory if that is so already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sendable(model: ComputationModel, tensor: Tensor, moves: bool) -> Tensor:
    """``tensor`` as :func:`_plain` has it, where it is sent from."""
    plain = _plain(tensor)
    return _moved(plain, model._bytes_device()) if moves else plain


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous ``tensor`` on ``device``, bit by bit.

    On its way from an XLA device a complex128 may lose its imaginary part, and to one a NaN some of its bits.
    """
    if tensor.device == device:
        return tensor
    if tensor.is_complex():
        return torch.view_as_complex(_moved(torch.view_as_real(tensor), device))
    if tensor.is_floating_point():
        return _as_bytes(tensor).to(device).view(tensor.dtype).view(tensor.shape)
    return tensor.to(device)


class _Route(NamedTuple):
    """How a model gathers or broadcasts tensors of one dtype on one device; see :class:`Plan`."""

    moves: bool
    as_is: bool
    direct: bool


def _route(model: ComputationModel, collective: str, tensor: Tensor) -> _Route:
    key = (collective, tensor.dtype, tensor.device)
    found: _Route | None = model.plans.get(key)
    if found is None:
        device = _carrying_device(model, tensor)
        as_is = model.carries(collective, None, tensor.dtype, device)
        moves = device != tensor.device
        found = model.plans[key] = _Route(moves, as_is, as_is and not moves)
    return found


def sent_dtype(model: ComputationModel, collective: str, tensor: Tensor, op: str = "") -> torch.dtype | None:
    """The dtype that travels for ``tensor`` in an "all_reduce" by ``op``, an "all_gather" or a "broadcast".

    None for a reduction that no operation of the backend does: values are gathered and reduced on each rank.

    Raises:
        TypeError, ValueError: ``op`` does not take such a tensor.
    """
    if collective == "all_reduce":
        carrier = plan_reduction(model, op, tensor).carrier
        return None if carrier is None else carrier.dtype
    return tensor.dtype if _route(model, collective, tensor).as_is else torch.uint8


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view of it."""
    return tensor.view(-1).view(torch.uint8)


def to_message(tensors: Sequence[Tensor]) -> bytes:
    """The bytes of contiguous ``tensors``, one after the other, to send them as a part of an object."""
    message = bytearray(sum(tensor.nbytes for tensor in tensors))
    if message:
        parts = [_as_bytes(_moved(tensor, torch.device("cpu"))) for tensor in tensors]
        wire.as_tensor(message).copy_(torch.cat(parts))
    return bytes(message)


def reduce_messages(messages: Sequence[bytes], tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """Every rank's :func:`to_message` of such ``tensors`` reduced in rank order, where ``tensors`` are."""
    rows = wire.as_tensor(bytearray(b"".join(messages))).view(len(messages), len(messages[0]))
    reduced = []
    for part, tensor in zip(torch.split(rows, [one.nbytes for one in tensors], dim=1), tensors, strict=True):
        aligned = part.clone(memory_format=torch.contiguous_format).view(-1)
        values = aligned.view(tensor.dtype).view(len(messages), *tensor.shape)
        reduced.append(_moved(reduction.reduce_gathered(values, op), tensor.device))
    return reduced


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


# --- arguments -----------------------------------------------------------------------------------------


def check_dense(function: str, tensor: Any) -> None:
    """Refuse what has no dense memory to send, with a ``TypeError`` that names ``function``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function} takes a tensor, got {type(tensor).__name__}.")
    if tensor.is_meta:
        raise TypeError(f"{function} takes tensors with data, got one on the meta device.")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{function} takes dense tensors, got {tensor.layout}. Use tensor.to_dense().")


def check_writable(function: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot hold a result, with a ``ValueError`` that names ``function``."""
    is_xla = tensor.is_xla  # type: ignore[attr-defined]  # which tells no layout, so not by its strides either
    if tensor.is_contiguous() and not is_xla:
        return
    base = tensor._base if is_xla else None
    if (base is not None and tensor.nbytes > base.nbytes) or any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{function} writes its result into the tensor, whose elements share memory (as after expand()). "
            "Pass tensor.clone()."
        )
