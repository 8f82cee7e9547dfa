"""How a tensor of any device, dtype and layout is sent on a transport that supports only some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.transport import CollectiveKind
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.values import serialization

# --- routes ------------------------------------------------------------------------------------------


def carrying_device(model: ComputationModel, tensor: Tensor) -> torch.device:
    """The sending device: the device of ``tensor`` if the backend can send bytes from it."""
    if model.transport.supports("all_gather", None, torch.uint8, tensor.device):
        return tensor.device
    return model.objects.device


class Route(NamedTuple):
    """How a model gathers or broadcasts tensors of one dtype on one device."""

    moves: bool  # as in Plan
    keeps_dtype: bool  # False: the tensor is sent as bytes
    is_direct: bool  # the tensor is sent on its device and in its dtype


def route_of(model: ComputationModel, kind: CollectiveKind, tensor: Tensor) -> Route:
    """The route of ``tensor``, cached per model."""
    try:
        routes = _routes.by_id[id(model)]
    except KeyError:
        routes = _routes.setdefault(model, {})
    key = (kind, tensor.dtype, tensor.device)
    route = routes.get(key)
    if route is None:
        device = carrying_device(model, tensor)
        keeps_dtype = model.transport.supports(kind, None, tensor.dtype, device)
        moves = device != tensor.device
        route = routes[key] = Route(moves, keeps_dtype, keeps_dtype and not moves)
    return route


_routes: PerContext[dict[tuple[CollectiveKind, torch.dtype, torch.device], Route]] = PerContext()

# --- devices and layouts -----------------------------------------------------------------------------


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """True if two contiguous tensors on the same device overlap. XLA tensors never overlap."""
    if tensor.device.type == "xla":
        return False
    begin, other_begin = tensor.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + tensor.nbytes


def is_plain(tensor: Tensor) -> bool:
    """True if ``tensor`` is contiguous, without a lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, contiguous, without lazy conjugation or negation. Copied only if needed."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def sendable(model: ComputationModel, tensor: Tensor, moves: bool) -> Tensor:
    """:func:`plain` on the sending device."""
    whole = plain(tensor)
    return to_device(whole, model.objects.device) if moves else whole


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous ``tensor`` on ``device``, with the same bits.

    A plain copy from an XLA device may lose the imaginary part of complex128. A plain copy to an XLA device
    may change the bits of a NaN.
    """
    if tensor.device == device:
        return tensor
    if tensor.is_complex():
        return torch.view_as_complex(to_device(torch.view_as_real(tensor), device))
    if tensor.is_floating_point():
        return serialization.as_bytes(tensor).to(device).view(tensor.dtype).view(tensor.shape)
    return tensor.to(device)


# --- results ---


def fill_from(tensor: Tensor, values: Tensor) -> Tensor:
    """Copy ``values``, which may be on another device, into ``tensor``."""
    with torch.no_grad():
        return tensor.copy_(to_device(values, tensor.device))


def in_inference_mode(begin: Callable[[], Work]) -> Work:
    """A work that runs in inference mode, because inference tensors are writable only there."""

    def run() -> Any:
        with torch.inference_mode():
            return begin().wait()

    return Steps(run)
