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

# Tensors of a tree up to this size share a collective: copying them together is cheaper than another one.
_PACK_BYTES = 1 << 16
# Tensors of a tree with so many bytes together travel in the header in which the ranks compare their trees.
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
    """Reduce a value over the ranks of a group; every rank of the group calls it and gets the result.

    A tensor is reduced in place and returned: same object, device, dtype and memory layout, whatever the
    backend. A number, or a tree (dict, list, tuple, named tuple) of numbers and tensors, comes back new:
    all of a tree's numbers take one collective, in rank order and with Python's own arithmetic, so ints are
    exact at any size and every rank gets the same bits. A number of numpy's counts as Python's own, which is
    what comes back. The values of a dict are paired by its keys: str, int, bool, members of enums, or tuples
    of these. A dtype that the backend does not carry is sent as a wider one, so nothing is lost on the way.
    float16, bfloat16 and float8 are added and multiplied in float64 (on TPUs in float32) and rounded once.
    Without a gradient, but with ``sync_grads``. Autograd counts the result as a change in place: a backward
    pass that needs the old value raises.

    Args:
        tensor: shape ``(*S)`` on every rank, a dense tensor of any dtype that has arithmetic; or a number; or
            a tree.
        op: "SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR" ("ADASUM" where Horovod has it). AND and OR
            are bitwise on ints and logical on bools. A NaN anywhere is the MIN and the MAX.
        group: None for all ranks, a handle of :func:`new_group`, or a list of global ranks. A rank outside
            gets its value back unchanged.
        inplace: False leaves a tensor alone and returns a new one.
        sync_grads: returns a new tensor with a gradient: that of the sum of all ranks' losses. For a SUM or
            an AVERAGE of floating-point tensors. The backward pass is a collective too, so every rank of the
            group makes it; it can be differentiated again.
        exact: False is the backend's own SUM, AVERAGE or PRODUCT of float16 and bfloat16: it may be rounded
            after each rank, and overflow on the way (60000 + 60000 - 60000 is inf in float16). It is faster
            where the exact one sends float64: everywhere but with gloo on the CPU. Nothing changes for other
            dtypes. The same on every rank.
        async_op: True returns a :class:`Work` at once, whose ``wait()`` gives the result. The tensor belongs
            to the collective until then. Not with ``sync_grads``.

    Returns:
        ``(*S)``, of the type that was given.

    Raises:
        TypeError: a value or dtype that cannot be reduced, or not by ``op``; a dict with other keys. Nothing
            was sent.
        ValueError: an unknown ``op`` or group, memory that overlaps itself; ``sync_grads`` with another
            ``op``, or with XLA and a part of the ranks. Nothing was sent.
        CollectiveMismatchError: ranks gave trees with different keys, shapes or dtypes, or another ``op``;
            raised on all of them. The comparison travels with the numbers of a tree, and with tensors of up
            to 448 bytes together. A tree of more bytes, and without numbers, takes a small collective more
            for it, and a GPU is waited for. A tensor by itself is not compared.

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
    if async_op:  # the caller may go on to write to them
        values = [copy_of(leaf) for leaf in values]

    def reduce() -> Any:
        return pytree.rebuild(given, iter(_reduce_leaves(model, values, structure, op, exact, members)))

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
                "all_reduce takes a tensor, a number, or a dict, list or tuple of them; got "
                f"{kind.__name__}. Use all_gather for other objects."
            )


def _reduce_leaves(
    model: ComputationModel, values: list[Any], structure: str, op: str, exact: bool, group: Group
) -> list[Any]:
    """The leaves reduced, after a look at whether all ranks have such leaves.

    Numbers share the collective in which the ranks compare their trees, and so do tensors that fit in there.
    Of the other tensors small ones of one dtype and device share one.
    """
    numbers = [position for position, leaf in enumerate(values) if not isinstance(leaf, Tensor)]
    if len(numbers) < len(values):
        tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
        structure += f" {numbers} {[(one.dtype, tuple(one.shape), one.device.type) for one in tensors]}"
    packs = _packs(values)
    nbytes = sum(values[position].nbytes for positions in packs for position in positions)
    # To send them along is to look at them, for which a lazy device would have to compute.
    is_inline = nbytes <= _INLINE_BYTES and op != "ADASUM" and not model.training.computes_lazily
    flats = [_flat(values, positions) for positions in packs] if is_inline else []
    sent = [values[position] for position in numbers]
    compared = structure if exact else f"{structure} exact=False"
    rows = _gather_equals(model, sent, compared, op, group, to_message(flats))
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
    """Which tensors share a collective, by their positions in ``values``."""
    packs: dict[Any, list[int]] = {}
    for position, leaf in enumerate(values):
        if isinstance(leaf, Tensor):
            # Only what is equal on all ranks may decide what is packed: a device's type is, its index is not.
            small = leaf.nbytes <= _PACK_BYTES
            packs.setdefault((leaf.dtype, leaf.device.type) if small else position, []).append(position)
    return list(packs.values())


def _flat(values: list[Any], positions: list[int]) -> Tensor:
    return torch.cat([values[position].detach().reshape(-1) for position in positions])


def _gather_equals(
    model: ComputationModel, numbers: list[Any], structure: str, op: str, group: Group, message: bytes = b""
) -> list[tuple[list[Any], bytes]]:
    """Every rank's ``numbers`` and ``message`` of a tree whose ``structure`` is the same on all of them."""
    check = zlib.crc32(f"{op} {structure}".encode())
    gathered = model.objects.gather((check, numbers, message), group)
    if any(type(one) is not tuple or one[:1] != (check,) for one in gathered):
        raise CollectiveMismatchError(
            "The ranks of one all_reduce gave different values or operations; this one: "
            f"{op} of {structure[:500]}"
        )
    return [(row, sent) for _, row, sent in gathered]
