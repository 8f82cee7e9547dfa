"""Reductions of tensors, numbers and trees over the ranks of a group."""

from __future__ import annotations

import zlib
from numbers import Number
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import check_blocking, copy_of
from ignite_dist.collectives.checks import check_writable
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.collectives.tensors import plan_reduction, reduce_messages, reduce_tensor, to_message
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.tracing import traced, traced_as
from ignite_dist.values import number_ops, pytree, reduce_ops

__all__ = ["all_reduce"]

# Tensors of a tree up to this size share a collective: a copy costs less than another collective.
_PACK_BYTES = 1 << 16
# Up to this total size, the tensors of a tree are sent in the header that the ranks use to compare trees.
_INLINE_BYTES = 448


_Value = TypeVar("_Value")


@traced
def _all_reduce_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_reduce(*args, **kwargs)


@overload
def all_reduce(
    tensor: _Value,
    op: str = ...,
    group: Any = ...,
    *,
    inplace: bool = ...,
    sync_grads: bool = ...,
    exact: bool = ...,
    async_op: Literal[False] = ...,
) -> _Value: ...


@overload
def all_reduce(
    tensor: Any,
    op: str = ...,
    group: Any = ...,
    *,
    inplace: bool = ...,
    exact: bool = ...,
    async_op: Literal[True],
) -> Work: ...


@traced_as(_all_reduce_in_a_graph)
def all_reduce(
    tensor: Any,
    op: str = "SUM",
    group: Any = None,
    *,
    inplace: bool = True,
    sync_grads: bool = False,
    exact: bool = True,
    async_op: bool = False,
) -> Any:
    """Reduce a value over the ranks of a group. Every rank of the group must call this function.

    A tensor is reduced in place and returned: same object, device, dtype and memory layout on every backend.
    Autograd counts the result as a change in place: a backward pass that needs the old value raises.
    For a number, or a tree (dict, list, tuple, named tuple) of numbers and tensors, the result is a new
    object. All numbers of a tree share one collective. They are reduced in rank order with Python's
    arithmetic: ints are exact at any size, and every rank gets the same bits. NumPy numbers become Python
    numbers. The ranks match the values of a dict by key: str, int, bool, enum member, or a tuple of these.

    A dtype that the backend does not support is sent in a wider carrier dtype without loss. float16, bfloat16
    and float8 are added and multiplied in float64 (on TPUs in float32) and rounded once.

    Args:
        tensor: a dense tensor of shape ``(*S)`` on every rank and of any dtype with arithmetic; a number; or
            a tree.
        op: "SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", or "ADASUM" (Horovod with MPI). AND and OR
            are bitwise on ints and logical on bools. MIN and MAX are NaN if any rank has a NaN.
        group: None for all ranks, a handle of :func:`new_group`, or a list of global ranks. A rank outside
            the group gets its own value back.
        inplace: False returns a new tensor and does not change ``tensor``.
        sync_grads: True returns a new tensor with an autograd graph. The gradient of ``tensor`` is the
            gradient of the sum of all ranks' losses. Only for SUM and AVERAGE of floating-point tensors.
            Every rank of the group must run the backward pass, which is a collective. Double backward works.
        exact: False uses the backend's own SUM, AVERAGE or PRODUCT for float16 and bfloat16. The backend may
            round after each rank, and may overflow (60000 + 60000 - 60000 is inf in float16). True sends
            float64, except with gloo on the CPU, so False is faster on the other backends. Other dtypes
            ignore ``exact``. Must be the same on every rank.
        async_op: True returns a :class:`Work` at once; its ``wait()`` returns the result. Do not use the
            tensor before ``wait()`` has returned. Not allowed with ``sync_grads``.

    Returns:
        ``(*S)``, of the same type as ``tensor``.

    Raises:
        TypeError: ``op`` cannot reduce the value or its dtype, or a dict key has another type than the above.
            Nothing was sent.
        ValueError: the ``op`` or group is unknown, the elements of the tensor share memory, or
            ``sync_grads`` is combined with another ``op``, with ``async_op``, or on XLA with a group of only
            some ranks. Nothing was sent.
        CollectiveMismatchError: the trees of the ranks differ in keys, shapes or dtypes, or the ranks passed
            different ``op``; raised on every rank. A single tensor is not compared. A tree without numbers
            and with more than 448 bytes of tensors needs one more small collective for the comparison. The
            host waits for this collective, also on a GPU.

    Example::

        idist.all_reduce(torch.tensor([1.0, 2.0]))  # on two ranks: tensor([2., 4.]) on both
        idist.all_reduce({"loss": 0.5, "n": 10})  # {"loss": 1.0, "n": 20} on both
    """
    model = current_model()
    op = reduce_ops.normalize_op(op)
    called = op if exact else f"{op} with exact=False"
    if sync_grads:
        return _reduce_with_grad(model, tensor, op, group, exact, called, async_op)
    if isinstance(tensor, Tensor):
        plan = plan_reduction(model, op, tensor, exact)
        if inplace:
            check_writable("all_reduce", tensor)
        members = model.groups.resolve(group)
        target = tensor if inplace or not is_member(model, members) else copy_of(tensor)
        return perform(
            model,
            "all_reduce",
            members,
            lambda: reduce_tensor(model, target, op, plan, members),
            outside=tensor,
            value=tensor,
            op=called,
            take_part=lambda: reduce_tensor(model, copy_of(tensor), op, plan, members),
            async_op=async_op,
        )
    return _reduce_tree(model, tensor, op, group, exact, called, async_op)


def _reduce_with_grad(
    model: ComputationModel, tensor: Any, op: str, group: Any, exact: bool, called: str, async_op: bool
) -> Any:
    if op not in ("SUM", "AVERAGE"):
        raise ValueError(f"all_reduce with sync_grads=True is for SUM and AVERAGE, got {op}.")
    check_blocking("all_reduce", async_op)
    members = model.groups.resolve(group)
    autograd.check_differentiable("all_reduce", model, tensor, members)
    return perform(
        model,
        "all_reduce",
        members,
        lambda: Completed(autograd.reduced(model, tensor, op, members, exact)),
        outside=tensor,
        value=tensor,
        op=called,
        take_part=lambda: Completed(None),
    )


def _reduce_tree(
    model: ComputationModel, given: Any, op: str, group: Any, exact: bool, called: str, async_op: bool
) -> Any:
    leaves, structure = pytree.flatten(given)
    values = [leaf if isinstance(leaf, Tensor) else number_ops.plain_number(leaf) for leaf in leaves]
    _check_leaves(model, values, op)
    members = model.groups.resolve(group)
    if async_op:  # the caller may change the tensors before wait()
        values = [copy_of(leaf) for leaf in values]
    compared = structure if exact else f"{structure} exact=False"
    holds_tensors = any(isinstance(value, Tensor) for value in values)
    reduce_leaves = _reduce_leaves if holds_tensors else _reduce_numbers

    def reduce() -> Any:
        return pytree.rebuild(given, iter(reduce_leaves(model, values, compared, op, exact, members)))

    return perform(
        model,
        "all_reduce",
        members,
        lambda: Steps(reduce),
        outside=given,
        value=values,
        op=called,
        async_op=async_op,
    )


def _check_leaves(model: ComputationModel, values: list[Any], op: str) -> None:
    for kind, value in {type(value): value for value in values}.items():
        if issubclass(kind, Tensor):
            for tensor in values:
                if type(tensor) is kind:
                    plan_reduction(model, op, tensor)
        elif issubclass(kind, Number):
            number_ops.check_number_op(op, value)
        else:
            raise TypeError(
                "all_reduce takes a tensor, a number, or a dict, list or tuple of tensors and numbers; got "
                f"{kind.__name__}. Use all_gather for other objects."
            )


def _reduce_numbers(
    model: ComputationModel, values: list[Any], structure: str, op: str, exact: bool, group: Group
) -> list[Any]:
    """:func:`_reduce_leaves` of a tree without tensors."""
    rows = _gather_equals(model, values, structure, op, group)
    return number_ops.reduce_numbers([row for row, _ in rows], op)


def _reduce_leaves(
    model: ComputationModel, values: list[Any], structure: str, op: str, exact: bool, group: Group
) -> list[Any]:
    """The reduced leaves. First the ranks compare the structures of their trees.

    All numbers, and tensors up to ``_INLINE_BYTES`` in total, are sent in the collective of that comparison.
    Otherwise tensors up to ``_PACK_BYTES`` with the same dtype and device type share a collective.
    """
    numbers = [position for position, leaf in enumerate(values) if not isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
    structure += f" {numbers} {[(one.dtype, tuple(one.shape), one.device.type) for one in tensors]}"
    packs = _packs(values)
    nbytes = sum(values[position].nbytes for positions in packs for position in positions)
    # A lazy device (XLA) would have to compute the tensors now to send them with the comparison.
    is_inline = nbytes <= _INLINE_BYTES and op != "ADASUM" and not model.training.computes_lazily
    flats = [_flat(values, positions) for positions in packs] if is_inline else []
    sent = [values[position] for position in numbers]
    rows = _gather_equals(model, sent, structure, op, group, to_message(flats))
    reduced = list(values)
    if numbers:
        totals = number_ops.reduce_numbers([row for row, _ in rows], op)
        for position, total in zip(numbers, totals, strict=True):
            reduced[position] = total
    small = iter(reduce_messages([message for _, message in rows], flats, op) if flats else ())
    for positions in packs:
        if is_inline:
            flat = next(small)
        else:
            flat = _flat(values, positions)
            plan = plan_reduction(model, op, flat, exact)
            flat = reduce_tensor(model, flat, op, plan, group).wait()
        parts = torch.split(flat, [values[position].numel() for position in positions])
        for position, part in zip(positions, parts, strict=True):
            reduced[position] = part.view(values[position].shape)
    return reduced


def _packs(values: list[Any]) -> list[list[int]]:
    """Groups of tensors that share a collective, as positions in ``values``."""
    packs: dict[Any, list[int]] = {}
    for position, leaf in enumerate(values):
        if isinstance(leaf, Tensor):
            # The packs must be equal on all ranks. The device type is equal on all ranks; its index is not.
            small = leaf.nbytes <= _PACK_BYTES
            packs.setdefault((leaf.dtype, leaf.device.type) if small else position, []).append(position)
    return list(packs.values())


def _flat(values: list[Any], positions: list[int]) -> Tensor:
    return torch.cat([values[position].detach().reshape(-1) for position in positions])


def _gather_equals(
    model: ComputationModel, numbers: list[Any], structure: str, op: str, group: Group, message: bytes = b""
) -> list[tuple[list[Any], bytes]]:
    """The ``numbers`` and ``message`` of every rank. Raises if ``op`` or ``structure`` differs on a rank."""
    check = zlib.crc32(f"{op} {structure}".encode())
    gathered = model.objects.gather((check, numbers, message), group)
    if any(type(one) is not tuple or one[:1] != (check,) for one in gathered):
        raise CollectiveMismatchError(
            "The ranks of one all_reduce gave different values or operations; this one: "
            f"{op} of {structure[:500]}"
        )
    return [(row, sent) for _, row, sent in gathered]
