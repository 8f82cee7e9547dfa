"""Broadcast of tensors and objects."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ignite_dist.collectives.arguments import check_root, copy_of
from ignite_dist.collectives.checks import check_dense, check_writable
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.primitives import broadcast_tensor
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import as_int
from ignite_dist.internals.tracing import traced, traced_as

_Value = TypeVar("_Value")


@traced
def _broadcast_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.broadcast(*args, **kwargs)


@overload
def broadcast(
    tensor: _Value,
    src: int = ...,
    safe_mode: Literal[False] = ...,
    group: Any = ...,
    *,
    async_op: Literal[False] = ...,
) -> _Value: ...


@overload
def broadcast(
    tensor: Any, src: int = ..., safe_mode: bool = ..., group: Any = ..., *, async_op: Literal[False] = ...
) -> Any: ...


@overload
def broadcast(
    tensor: Any, src: int = ..., safe_mode: bool = ..., group: Any = ..., *, async_op: Literal[True]
) -> Work: ...


@traced_as(_broadcast_in_a_graph)
@counts_interrupts
def broadcast(
    tensor: Any, src: int = 0, safe_mode: bool = False, group: Any = None, *, async_op: bool = False
) -> Any:
    """Send the value of rank ``src`` to every rank. Every rank of the group must call this function.

    Args:
        tensor: on ``src``, the value: a tensor, or a picklable object other than None. On the other
            ranks, for a tensor: a tensor of the same shape, dtype and device type, which is filled in place
            and returned; for an object: any value other than None, which is ignored.
        src: a global rank.
        safe_mode: True lets the other ranks pass any dense tensor or object, or None. If ``src`` sends a
            tensor, a tensor of the same shape, dtype and device type is filled in place, unless its elements
            share memory. Otherwise the result is a new tensor: on the CPU if the tensor of ``src`` is on the
            CPU, else on :func:`device`. A tensor costs one more small collective.
        group: as in :func:`all_reduce`. It must contain ``src``. A rank outside it gets its own value back.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the value. Do
            not use the tensor before ``wait()`` has returned.

    Returns:
        The value of ``src``.

    Raises:
        ValueError: ``src`` is not a rank of the group, ``src`` passed None, or another rank passed None
            without ``safe_mode``. Nothing was sent.
        TypeError: the object cannot be pickled. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, the type of an object is not registered.

    Example::

        idist.broadcast("from 0" if rank == 0 else "")  # "from 0" on every rank
        idist.broadcast(torch.ones(2) if rank == 0 else None, safe_mode=True)  # tensor([1., 1.]) on both
    """
    model = current_model()
    src = as_int(src)
    is_src = model.get_rank() == src
    if tensor is None and (is_src or not safe_mode):
        raise ValueError(
            f"broadcast got None on {'the source rank' if is_src else 'a rank that is not the source'}. "
            "The source needs a value. Other ranks may pass None with safe_mode=True."
        )
    if isinstance(tensor, Tensor):
        check_dense("broadcast", tensor)
        if not safe_mode:
            check_writable("broadcast", tensor)
    members = model.groups.resolve(group)
    check_root("src", src, members, model.get_world_size())
    is_tensor = isinstance(tensor, Tensor)
    payload = b"" if is_tensor or safe_mode or not is_src else model.objects.packed(tensor)

    def begin(value: Any, members: Group) -> Work:
        if is_tensor and not safe_mode:
            return broadcast_tensor(model, value, src, members)
        if safe_mode:
            return Steps(lambda: broadcast_anything(model, value, src, members))
        return Steps(lambda: model.objects.broadcast_packed(payload, src, members))

    return perform(
        model,
        "broadcast",
        members,
        lambda members: begin(tensor, members),
        outside=tensor,
        value="" if safe_mode else tensor if is_tensor else "an object",
        op=f"from {src}, safe_mode=True" if safe_mode else f"from {src}",
        begin_outside=lambda members: begin(copy_of(tensor), members),
        async_op=async_op,
    )


def broadcast_anything(model: ComputationModel, value: Any, src: int, group: Group) -> Any:
    """Broadcast any value, or None. If the value is a tensor, ``src`` first sends its shape and dtype."""
    is_src = model.get_rank() == src
    sent: Any = (None, value)
    if is_src and isinstance(value, Tensor):
        sent = ((tuple(value.shape), value.dtype, value.device.type), None)
    layout, received = model.objects.broadcast(sent if is_src else None, src, group)
    if layout is None:
        return value if is_src else received
    if is_src:
        sent = value if _is_writable(value) else value.clone()
        broadcast_tensor(model, sent, src, group).wait()
        return value
    shape, dtype, device_type = layout
    fits = isinstance(value, Tensor) and (tuple(value.shape), value.dtype, value.device.type) == layout
    if not (fits and _is_writable(value)):
        device = torch.device("cpu") if device_type == "cpu" else model.device()
        value = torch.empty(shape, dtype=dtype, device=device)
    return broadcast_tensor(model, value, src, group).wait()


def _is_writable(tensor: Tensor) -> bool:
    try:
        check_writable("broadcast", tensor)
    except ValueError:
        return False
    return True
