"""Collectives of tensors of any dtype, device and layout, on transports that support only some of them.

The plan for each dtype and device is made once per context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ignite_dist.collectives.checks import check_dense
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.transport import CollectiveKind
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.values import carriers, reduce_ops, serialization

# Large enough that the latency of a collective does not matter, small enough to copy.
PIECE_BYTES = 16 << 20

# --- reduce ------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a model reduces tensors of one dtype on one device by one operation.

    Attributes:
        moves: True if tensors are copied to another device for sending. The plan does not store that device,
            because XLA replicas share a model but have different devices.
        carrier: the dtype and operation that the backend runs; None if each rank gathers and reduces values.
        in_place: True if the backend reduces the caller's tensor in place.
        reduces_narrow: True if the model's ``reduce_narrow`` reduces the tensor in float64.
    """

    moves: bool
    carrier: carriers.Carrier | None
    in_place: bool
    reduces_narrow: bool


def plan_reduction(model: ComputationModel, op: str, tensor: Tensor, exact: bool = True) -> Plan:
    """The plan for ``tensor``, cached per model. ``exact=True`` rounds narrow floats only once.

    Raises:
        TypeError, ValueError: ``op`` does not support ``tensor``.
    """
    # A cached plan has been checked for its dtype and device only.
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) is not Tensor:
        check_dense("all_reduce", tensor)
    plans = _plans_of(model)
    key = (op, tensor.dtype, tensor.device, exact)
    plan = plans.reductions.get(key)
    if plan is None:
        check_dense("all_reduce", tensor)
        plan = plans.reductions[key] = _make_plan(model, op, tensor, exact)
    return plan


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
    is_rounded = exact and reduce_ops.is_rounded(op, tensor.dtype)
    reduces_narrow = is_rounded and supports("reduce_narrow", op, tensor.dtype, device)

    def carries(sent_op: str, dtype: torch.dtype) -> bool:
        return supports("all_reduce", sent_op, dtype, device)

    carrier = (
        carriers.as_itself(op, tensor.dtype)
        if reduces_narrow
        else carriers.find_carrier(op, tensor.dtype, carries, exact)
    )
    moves = device != tensor.device
    in_place = not moves and carrier is not None and carrier.dtype is tensor.dtype
    return Plan(moves, carrier, in_place, reduces_narrow)


def reduce_tensor(model: ComputationModel, tensor: Tensor, op: str, plan: Plan, group: Group) -> Work:
    """Begin to reduce ``tensor`` in place by ``plan``. The work's result is ``tensor``."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return _in_inference_mode(lambda: reduce_tensor(model, tensor, op, plan, group))
    carrier = plan.carrier
    if plan.in_place and carrier is not None and _is_plain(tensor):
        reduced = tensor.detach() if tensor.requires_grad else tensor
        increment_version(tensor)  # for autograd, which does not see the backend's change
        work = _begin_reduction(model, reduced, op, carrier.op, plan, group)
        if op == "AVERAGE" and not plan.reduces_narrow:
            return work.then(lambda _: reduced.div_(len(group.ranks))).then(lambda _: tensor)
        return work if reduced is tensor else work.then(lambda _: tensor)
    with torch.no_grad():
        local = _sendable(model, tensor, plan.moves)
        if carrier is None:
            work = gather_rows(model, local, group).then(lambda rows: carriers.reduce_gathered(rows, op))
        elif carrier.dtype.itemsize > local.itemsize and local.numel() > _piece_numel(carrier):
            work = Steps(lambda: _reduce_in_pieces(model, local, op, carrier, plan, group))
        else:
            work = _reduce_encoded(model, local, op, carrier, plan, group)
    return work.then(lambda reduced: _fill_from(tensor, reduced))


def _fill_from(tensor: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.copy_(_to_device(values, tensor.device))


def _in_inference_mode(begin: Callable[[], Work]) -> Work:
    """A work that runs in inference mode, because inference tensors are writable only there."""

    def run() -> Any:
        with torch.inference_mode():
            return begin().wait()

    return Steps(run)


def _piece_numel(carrier: carriers.Carrier) -> int:
    return PIECE_BYTES // carrier.dtype.itemsize


def _reduce_in_pieces(
    model: ComputationModel, tensor: Tensor, op: str, carrier: carriers.Carrier, plan: Plan, group: Group
) -> Tensor:
    """Reduce in pieces to save memory: the encoded tensor is larger than ``tensor``."""
    with torch.no_grad():
        for piece in torch.split(tensor.view(-1), _piece_numel(carrier)):
            piece.copy_(_reduce_encoded(model, piece, op, carrier, plan, group).wait())
    return tensor


def _reduce_encoded(
    model: ComputationModel, tensor: Tensor, op: str, carrier: carriers.Carrier, plan: Plan, group: Group
) -> Work:
    """Begin to reduce ``tensor``, which is dense and on the sending device, in its carrier dtype."""
    carried = carrier.encode(tensor).contiguous()

    def finish(reduced: Tensor) -> Tensor:
        with torch.no_grad():
            if op == "AVERAGE" and not plan.reduces_narrow:
                reduced.div_(len(group.ranks))
            return carrier.decode(reduced)

    return _begin_reduction(model, carried, op, carrier.op, plan, group).then(finish)


def _begin_reduction(
    model: ComputationModel, tensor: Tensor, op: str, sent_op: str, plan: Plan, group: Group
) -> Work:
    """Begin to reduce ``tensor`` in place. Without ``reduces_narrow``, the caller divides an AVERAGE."""
    if plan.reduces_narrow:
        return model.transport.reduce_narrow(tensor, op, group)
    return model.transport.all_reduce(tensor, sent_op, group)


# --- gather and broadcast ----------------------------------------------------------------------------


def gather_rows(model: ComputationModel, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
    """Begin ``(*S) -> (group_size, *S)`` for a tensor of any dtype, device and layout."""
    if tensor.dtype in reduce_ops.BYTES:
        out_bytes = None if out is None else out.view(torch.uint8)
        gathered_bytes = gather_rows(model, tensor.view(torch.uint8), group, out_bytes)
        return gathered_bytes.then(lambda gathered: gathered.view(tensor.dtype))
    rows_shape = (len(group.ranks), *tensor.shape)
    route = _route(model, "all_gather", tensor)
    if out is None and route.is_direct and _is_plain(tensor) and not tensor.requires_grad:
        return model.transport.all_gather(tensor, group)
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return _in_inference_mode(lambda: gather_rows(model, tensor, group, out))
    with torch.no_grad():
        local = _sendable(model, tensor, route.moves)
        writes_to_out = out is not None and out.device == local.device and _is_plain(out)
        if out is not None and writes_to_out:
            rows = out.detach().view(rows_shape)
            if _shares_memory(local, rows):
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
            return _to_device(rows, tensor.device)
        if writes_to_out:
            increment_version(out)
            return rows
        return out.detach().copy_(_to_device(rows, out.device).view(out.shape)).view(rows_shape)

    return work.then(finish)


def broadcast_tensor(model: ComputationModel, tensor: Tensor, src: int, group: Group) -> Work:
    """Begin to fill ``tensor`` with the tensor of global rank ``src``. The work's result is ``tensor``."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return _in_inference_mode(lambda: broadcast_tensor(model, tensor, src, group))
    if tensor.dtype in reduce_ops.BYTES:
        return broadcast_tensor(model, tensor.view(torch.uint8), src, group).then(lambda _: tensor)
    route = _route(model, "broadcast", tensor)
    with torch.no_grad():
        carried = _sendable(model, tensor, route.moves)
        sent = carried if route.keeps_dtype else serialization.as_bytes(carried)
        work = model.transport.broadcast(sent, src, group)

    def finish(_: Any) -> Tensor:
        if route.moves or not _is_plain(tensor):  # a copy was sent
            tensor.detach().copy_(_to_device(carried, tensor.device))
        else:
            increment_version(tensor)
        return tensor

    return work.then(finish)


# --- devices and layouts -----------------------------------------------------------------------------


def carrying_device(model: ComputationModel, tensor: Tensor) -> torch.device:
    """The sending device: the device of ``tensor`` if the backend can send bytes from it."""
    if model.transport.supports("all_gather", None, torch.uint8, tensor.device):
        return tensor.device
    return model.objects.device


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """True if two contiguous tensors on the same device overlap. XLA tensors never overlap."""
    if tensor.device.type == "xla":
        return False
    begin, other_begin = tensor.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + tensor.nbytes


def _is_plain(tensor: Tensor) -> bool:
    """True if ``tensor`` is contiguous, without a lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, contiguous, without lazy conjugation or negation. Copied only if needed."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sendable(model: ComputationModel, tensor: Tensor, moves: bool) -> Tensor:
    """:func:`plain` on the sending device."""
    whole = plain(tensor)
    return _to_device(whole, model.objects.device) if moves else whole


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous ``tensor`` on ``device``, with the same bits.

    A plain copy from an XLA device may lose the imaginary part of complex128. A plain copy to an XLA device
    may change the bits of a NaN.
    """
    if tensor.device == device:
        return tensor
    if tensor.is_complex():
        return torch.view_as_complex(_to_device(torch.view_as_real(tensor), device))
    if tensor.is_floating_point():
        return serialization.as_bytes(tensor).to(device).view(tensor.dtype).view(tensor.shape)
    return tensor.to(device)


class _Route(NamedTuple):
    """How a model gathers or broadcasts tensors of one dtype on one device."""

    moves: bool  # as in Plan
    keeps_dtype: bool  # False: the tensor is sent as bytes
    is_direct: bool  # the tensor is sent on its device and in its dtype


def _route(model: ComputationModel, kind: CollectiveKind, tensor: Tensor) -> _Route:
    routes = _plans_of(model).routes
    key = (kind, tensor.dtype, tensor.device)
    route = routes.get(key)
    if route is None:
        device = carrying_device(model, tensor)
        keeps_dtype = model.transport.supports(kind, None, tensor.dtype, device)
        moves = device != tensor.device
        route = routes[key] = _Route(moves, keeps_dtype, keeps_dtype and not moves)
    return route


class _Plans:
    """Cached plans and routes of one model."""

    def __init__(self) -> None:
        self.reductions: dict[tuple[str, torch.dtype, torch.device, bool], Plan] = {}
        self.routes: dict[tuple[CollectiveKind, torch.dtype, torch.device], _Route] = {}


_plans: PerContext[_Plans] = PerContext()


def _plans_of(model: ComputationModel) -> _Plans:
    try:
        return _plans.by_id[id(model)]
    except KeyError:
        return _plans.setdefault(model, _Plans())


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
    return tensor.dtype if _route(model, collective, tensor).keeps_dtype else torch.uint8


def to_message(tensors: Sequence[Tensor]) -> bytes:
    """The bytes of contiguous ``tensors``, concatenated, to send inside an object."""
    message = bytearray(sum(tensor.nbytes for tensor in tensors))
    if message:
        parts = [serialization.as_bytes(_to_device(tensor, torch.device("cpu"))) for tensor in tensors]
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
        reduced.append(_to_device(carriers.reduce_gathered(values, op), tensor.device))
    return reduced
