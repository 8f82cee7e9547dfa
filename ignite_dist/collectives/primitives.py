"""Collectives of tensors of any dtype, device and layout, on transports that support only some of them.

The plan for each dtype and device is made once per context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.sending import (
    carrying_device,
    fill_from,
    in_inference_mode,
    is_plain,
    plain,
    route_of,
    sendable,
    shares_memory,
    to_device,
)
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.all_to_all import exchange_parts
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.transport import CollectiveKind, Sizes
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.values import carriers, reduce_ops, serialization

# --- reduce ------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a model reduces tensors of one dtype on one device by one operation.

    Attributes:
        moves: True if tensors are copied to another device for sending. The plan does not store that device,
            because XLA replicas share a model but have different devices.
        carrier: the dtype and operation that the backend runs; None if each rank gathers and reduces values.
        in_place: True if the backend reduces the caller's tensor in place.
        reduces_exactly: True if the transport's ``reduce_exactly`` reduces the tensor.
    """

    moves: bool
    carrier: carriers.Carrier | None
    in_place: bool
    reduces_exactly: bool


def plan_reduction(model: ComputationModel, op: str, tensor: Tensor, exact: bool = True) -> Plan:
    """The plan for ``tensor``, cached per model. ``exact=True`` rounds narrow floats only once.

    Raises:
        TypeError, ValueError: ``op`` does not support ``tensor``.
    """
    # A cached plan has been checked for its dtype and device only.
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) is not Tensor:
        check_dense("all_reduce", tensor)
    try:
        plans = _plans.by_id[id(model)]
    except KeyError:
        plans = _plans.setdefault(model, {})
    key = (op, tensor.dtype, tensor.device, exact)
    plan = plans.get(key)
    if plan is None:
        check_dense("all_reduce", tensor)
        plan = plans[key] = _make_plan(model, op, tensor, exact)
    return plan


_plans: PerContext[dict[tuple[str, torch.dtype, torch.device, bool], Plan]] = PerContext()


def _make_plan(model: ComputationModel, op: str, tensor: Tensor, exact: bool) -> Plan:
    reduce_ops.check_reducible(tensor.dtype)
    reduce_ops.check_op(op, tensor.dtype)
    exact = exact or tensor.dtype.itemsize == 1  # no backend can add float8
    supports = model.transport.supports
    if op == "ADASUM" and not supports("all_reduce", op, tensor.dtype, tensor.device):
        raise ValueError(
            f"ADASUM needs Horovod built with MPI; backend {model.backend()!r} does not have it."
        )
    device = carrying_device(model, tensor)
    is_exact = exact or reduce_ops.is_extreme(op, tensor.dtype)
    needs_own_way = is_exact and reduce_ops.is_inexact(op, tensor.dtype)
    reduces_exactly = needs_own_way and supports("reduce_exactly", op, tensor.dtype, device)

    def carries(sent_op: str, dtype: torch.dtype) -> bool:
        return supports("all_reduce", sent_op, dtype, device)

    carrier = (
        carriers.as_itself(op, tensor.dtype)
        if reduces_exactly
        else carriers.find_carrier(op, tensor.dtype, carries, exact)
    )
    moves = device != tensor.device
    in_place = not moves and carrier is not None and carrier.dtype is tensor.dtype
    return Plan(moves, carrier, in_place, reduces_exactly)


def reduce_tensor(model: ComputationModel, tensor: Tensor, op: str, plan: Plan, group: Group) -> Work:
    """Begin to reduce ``tensor`` in place by ``plan``. The work's result is ``tensor``."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return in_inference_mode(lambda: reduce_tensor(model, tensor, op, plan, group))
    carrier = plan.carrier
    if plan.in_place and carrier is not None and is_plain(tensor):
        reduced = tensor.detach() if tensor.requires_grad else tensor
        increment_version(tensor)  # for autograd, which does not see the backend's change
        work = _begin_reduction(model, reduced, op, carrier.op, plan, group)
        if op == "AVERAGE" and not plan.reduces_exactly:
            return work.then(lambda _: reduced.div_(len(group.ranks))).then(lambda _: tensor)
        return work if reduced is tensor else work.then(lambda _: tensor)
    with torch.no_grad():
        local = sendable(model, tensor, plan.moves)
        if carrier is None:
            work = gather_rows(model, local, group).then(lambda rows: carriers.reduce_gathered(rows, op))
        elif carrier.dtype.itemsize > local.itemsize and local.numel() > carriers.piece_numel(local, carrier):
            work = Steps(lambda: _reduce_in_pieces(model, local, op, carrier, plan, group))
        else:
            work = _reduce_encoded(model, local, op, carrier, plan, group)
    return work.then(lambda reduced: fill_from(tensor, reduced))


def _reduce_in_pieces(
    model: ComputationModel, tensor: Tensor, op: str, carrier: carriers.Carrier, plan: Plan, group: Group
) -> Tensor:
    """Reduce in pieces to save memory: the encoded tensor is larger than ``tensor``."""
    with torch.no_grad():
        for piece in torch.split(tensor.view(-1), carriers.piece_numel(tensor, carrier)):
            piece.copy_(_reduce_encoded(model, piece, op, carrier, plan, group).wait())
    return tensor


def _reduce_encoded(
    model: ComputationModel, tensor: Tensor, op: str, carrier: carriers.Carrier, plan: Plan, group: Group
) -> Work:
    """Begin to reduce ``tensor``, which is dense and on the sending device, in its carrier dtype."""
    carried = carrier.encode(tensor).contiguous()

    def finish(reduced: Tensor) -> Tensor:
        with torch.no_grad():
            if op == "AVERAGE" and not plan.reduces_exactly:
                reduced.div_(len(group.ranks))
            return carrier.decode(reduced)

    return _begin_reduction(model, carried, op, carrier.op, plan, group).then(finish)


def _begin_reduction(
    model: ComputationModel, tensor: Tensor, op: str, sent_op: str, plan: Plan, group: Group
) -> Work:
    """Begin to reduce ``tensor`` in place. Without ``reduces_exactly``, the caller divides an AVERAGE."""
    if plan.reduces_exactly:
        return model.transport.reduce_exactly(tensor, op, group)
    return model.transport.all_reduce(tensor, sent_op, group)


# --- gather and broadcast ----------------------------------------------------------------------------


def gather_rows(model: ComputationModel, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
    """Begin ``(*S) -> (group_size, *S)`` for a tensor of any dtype, device and layout."""
    if tensor.dtype in reduce_ops.BYTES:
        out_bytes = None if out is None else out.view(torch.uint8)
        gathered_bytes = gather_rows(model, tensor.view(torch.uint8), group, out_bytes)
        return gathered_bytes.then(lambda gathered: gathered.view(tensor.dtype))
    rows_shape = (len(group.ranks), *tensor.shape)
    route = route_of(model, "all_gather", tensor)
    if out is None and route.is_direct and is_plain(tensor) and not tensor.requires_grad:
        return model.transport.all_gather(tensor, group)
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return in_inference_mode(lambda: gather_rows(model, tensor, group, out))
    with torch.no_grad():
        local = sendable(model, tensor, route.moves)
        writes_to_out = out is not None and out.device == local.device and is_plain(out)
        if out is not None and writes_to_out:
            rows = out.detach().view(rows_shape)
            if shares_memory(local, rows):
                local = local.clone()  # the result would overwrite the send buffer
        else:
            rows = torch.empty(rows_shape, dtype=tensor.dtype, device=local.device)
        if route.keeps_dtype:
            work = model.transport.all_gather(local, group, out=rows)
        else:  # send the bytes
            row_bytes = serialization.as_bytes(rows).view(rows_shape[0], -1)
            work = model.transport.all_gather(serialization.as_bytes(local), group, out=row_bytes)

    def finish(_: Any) -> Tensor:
        if out is None:
            return to_device(rows, tensor.device)
        if writes_to_out:
            increment_version(out)
            return rows
        return out.detach().copy_(to_device(rows, out.device).view(out.shape)).view(rows_shape)

    return work.then(finish)


def exchange_tensor(
    model: ComputationModel,
    tensor: Tensor,
    group: Group,
    sizes: Sizes | None = None,
    out: Tensor | None = None,
) -> Work:
    """Begin to exchange parts of ``tensor``, read as 1-d, of any dtype, device and layout.

    See :func:`~ignite_dist.comp_models.all_to_all.exchange_parts`. The result is 1-d, on the tensor's device;
    with ``out``, which is contiguous, it is ``out``.
    """
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return in_inference_mode(lambda: exchange_tensor(model, tensor, group, sizes, out))
    route = route_of(model, "all_gather", tensor)
    with torch.no_grad():
        local = sendable(model, tensor, route.moves).view(-1)
        numel = local.numel() if sizes is None else sum(sizes.received)
        writes_to_out = out is not None and out.device == local.device and is_plain(out)
        if out is not None and writes_to_out:
            received = out.detach().view(-1)
            if shares_memory(local, received):
                local = local.clone()
        else:
            received = local.new_empty(numel)
        sent, filled = local, received
        if not route.keeps_dtype:  # send the bytes
            sent, filled = serialization.as_bytes(local), serialization.as_bytes(received)
            sizes = sizes and Sizes(*([size * local.itemsize for size in part] for part in sizes))
        work = exchange_parts(model.transport, model.get_rank(), sent, group, filled, sizes)

    def finish(_: Any) -> Tensor:
        if out is None:
            return to_device(received, tensor.device)
        if not writes_to_out:
            return fill_from(out, received.view(out.shape))
        increment_version(out)
        return out

    return work.then(finish)


def broadcast_tensor(model: ComputationModel, tensor: Tensor, src: int, group: Group) -> Work:
    """Begin to fill ``tensor`` with the tensor of global rank ``src``. The work's result is ``tensor``."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return in_inference_mode(lambda: broadcast_tensor(model, tensor, src, group))
    if tensor.dtype in reduce_ops.BYTES:
        return broadcast_tensor(model, tensor.view(torch.uint8), src, group).then(lambda _: tensor)
    route = route_of(model, "broadcast", tensor)
    with torch.no_grad():
        carried = sendable(model, tensor, route.moves)
        sent = carried if route.keeps_dtype else serialization.as_bytes(carried)
        work = model.transport.broadcast(sent, src, group)

    def finish(_: Any) -> Tensor:
        if route.moves or not is_plain(tensor):  # a copy was sent
            tensor.detach().copy_(to_device(carried, tensor.device))
        else:
            increment_version(tensor)
        return tensor

    return work.then(finish)


# --- reduce and scatter ------------------------------------------------------------------------------


def reduce_scatter_tensor(
    model: ComputationModel, rows: Tensor, op: str, group: Group, out: Tensor | None = None
) -> Work:
    """Begin to reduce ``(group_size, *S)`` to this rank's row ``(*S)``, in ``out`` if given.

    :func:`plan_reduction` has checked ``rows``, which keep their values.
    """
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return in_inference_mode(lambda: reduce_scatter_tensor(model, rows, op, group, out))
    group_size = len(group.ranks)
    if _reduces_rows(model, op, rows):
        with torch.no_grad():
            local = plain(rows)
            target = _new_row(local) if out is None else out.detach().view(local.shape[1:])
            if shares_memory(local, target):
                local = local.clone()
            sent_op = _reduction_of_rows(op, rows.dtype)
            work = model.transport.reduce_scatter(local, sent_op, group, target)
        reduced = work if sent_op == op else work.then(lambda part: part.div_(group_size))
        return reduced if out is None else reduced.then(lambda part: _mark_changed(out))
    parts = exchange_tensor(model, rows, group)
    if out is not None and out.device == rows.device and is_plain(out):
        target = out.detach().view(rows.shape[1:])
        part = parts.then(lambda received: carriers.reduce_gathered(received.view(rows.shape), op, target))
        return part.then(lambda _: _mark_changed(out))
    part = parts.then(lambda received: carriers.reduce_gathered(received.view(rows.shape), op))
    return part if out is None else part.then(lambda reduced: fill_from(out, reduced.view(out.shape)))


def _new_row(rows: Tensor) -> Tensor:
    """An empty row. After an asynchronous call it is written to in ``wait()``, outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)


def _reduces_rows(model: ComputationModel, op: str, tensor: Tensor) -> bool:
    """True if the transport's own reduce-scatter gives the result that the package promises."""
    sent_op = _reduction_of_rows(op, tensor.dtype)
    return model.transport.supports("reduce_scatter", sent_op, tensor.dtype, tensor.device)


def _reduction_of_rows(op: str, dtype: torch.dtype) -> str:
    """The operation of the transport. It averages narrow floats itself, so that they are rounded once."""
    return "SUM" if op == "AVERAGE" and not reduce_ops.is_rounded(op, dtype) else op


def _mark_changed(tensor: Tensor) -> Tensor:
    increment_version(tensor)
    return tensor


# --- descriptions and messages -----------------------------------------------------------------------


def sent_dtype(
    model: ComputationModel, collective: CollectiveKind, tensor: Tensor, op: str = ""
) -> torch.dtype | None:
    """The dtype that an "all_reduce" by ``op``, an "all_gather" or a "broadcast" of ``tensor`` sends.

    None if the backend cannot do the reduction. The values are then gathered and reduced on each rank.

    Raises:
        TypeError, ValueError: ``op`` does not support ``tensor``.
    """
    if collective == "all_reduce":
        carrier = plan_reduction(model, op, tensor).carrier
        return None if carrier is None else carrier.dtype
    return tensor.dtype if route_of(model, collective, tensor).keeps_dtype else torch.uint8


def to_message(tensors: Sequence[Tensor]) -> bytes:
    """The bytes of contiguous ``tensors``, concatenated, to send inside an object."""
    message = bytearray(sum(tensor.nbytes for tensor in tensors))
    if message:
        parts = [serialization.as_bytes(to_device(tensor, torch.device("cpu"))) for tensor in tensors]
        serialization.as_tensor(message).copy_(torch.cat(parts))
    return bytes(message)


def reduce_messages(messages: Sequence[bytes], tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """Reduce the :func:`to_message` bytes of every rank in rank order, on the devices of ``tensors``."""
    rows = serialization.as_tensor(bytearray(b"".join(messages))).view(len(messages), len(messages[0]))
    parts = torch.split(rows, [tensor.nbytes for tensor in tensors], dim=1)
    reduced = []
    for part, tensor in zip(parts, tensors, strict=True):
        aligned = part.clone(memory_format=torch.contiguous_format).view(-1)
        values = aligned.view(tensor.dtype).view(len(messages), *tensor.shape)
        reduced.append(to_device(carriers.reduce_gathered(values, op), tensor.device))
    return reduced
