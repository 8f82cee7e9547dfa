"""Reductions of trees of numbers and tensors: which leaves share a collective."""

from __future__ import annotations

import zlib
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.arguments import copy_of
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.tensors import plan_reduction, reduce_messages, reduce_tensor, to_message
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.values import number_ops, pytree

# Tensors of a tree up to this size share a collective: a copy costs less than another collective.
_PACK_BYTES = 1 << 16
# Up to this total size, the tensors of a tree are sent in the header that the ranks use to compare trees.
_INLINE_BYTES = 448


def reduce_tree(
    model: ComputationModel, tree: Any, op: str, group: Any, exact: bool, op_text: str, async_op: bool
) -> Any:
    """Reduce a number, or a tree of numbers and tensors; see :func:`ignite_dist.all_reduce`.

    ``op_text`` describes ``op`` and ``exact``. It must be equal on all ranks.
    """
    leaves, structure = pytree.flatten(tree)
    values = [leaf if isinstance(leaf, Tensor) else number_ops.plain_number(leaf) for leaf in leaves]
    _check_leaves(model, values, op)
    members = model.groups.resolve(group)
    if async_op:  # the caller may change the tensors before wait()
        values = [copy_of(leaf) for leaf in values]
    structure = structure if exact else f"{structure} exact=False"
    has_tensors = any(isinstance(value, Tensor) for value in values)
    reduce_leaves = _reduce_leaves if has_tensors else _reduce_numbers

    def reduce(members: Group) -> Any:
        return pytree.rebuild(tree, iter(reduce_leaves(model, values, structure, op, exact, members)))

    return perform(
        model,
        "all_reduce",
        members,
        lambda members: Steps(lambda: reduce(members)),
        outside=tree,
        value=values,
        op=op_text,
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
    rows = _gather_checked(model, values, structure, op, group)
    return number_ops.reduce_numbers([row for row, _ in rows], op)


def _reduce_leaves(
    model: ComputationModel, values: list[Any], structure: str, op: str, exact: bool, group: Group
) -> list[Any]:
    """The reduced leaves. First the ranks compare the structures of their trees.

    The same collective sends all numbers, and tensors up to ``_INLINE_BYTES`` in total. Above this total,
    tensors up to ``_PACK_BYTES`` with the same dtype and device type share a collective.
    """
    number_positions = [position for position, leaf in enumerate(values) if not isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
    layouts = [(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in tensors]
    structure += f" {number_positions} {layouts}"
    packs = _packs(values)
    nbytes = sum(values[position].nbytes for positions in packs for position in positions)
    # A lazy device (XLA) would have to compute the tensors now to send them with the comparison.
    is_inline = nbytes <= _INLINE_BYTES and op != "ADASUM" and not model.training.computes_lazily
    flats = [_flat(values, positions) for positions in packs] if is_inline else []
    numbers = [values[position] for position in number_positions]
    rows = _gather_checked(model, numbers, structure, op, group, to_message(flats))
    reduced = list(values)
    if numbers:
        totals = number_ops.reduce_numbers([row for row, _ in rows], op)
        for position, total in zip(number_positions, totals, strict=True):
            reduced[position] = total
    inline_flats = iter(reduce_messages([message for _, message in rows], flats, op) if flats else ())
    for positions in packs:
        if is_inline:
            flat = next(inline_flats)
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
            # The packs must be equal on all ranks. The device's type is equal on all ranks, its index is not.
            is_small = leaf.nbytes <= _PACK_BYTES
            packs.setdefault((leaf.dtype, leaf.device.type) if is_small else position, []).append(position)
    return list(packs.values())


def _flat(values: list[Any], positions: list[int]) -> Tensor:
    return torch.cat([values[position].detach().reshape(-1) for position in positions])


def _gather_checked(
    model: ComputationModel, numbers: list[Any], structure: str, op: str, group: Group, message: bytes = b""
) -> list[tuple[list[Any], bytes]]:
    """The ``numbers`` and ``message`` of every rank. Raises if ``op`` or ``structure`` differs on a rank."""
    check = zlib.crc32(f"{op} {structure}".encode())
    gathered = model.objects.gather((check, numbers, message), group)
    if any(type(entry) is not tuple or entry[:1] != (check,) for entry in gathered):
        raise CollectiveMismatchError(
            "The ranks called one all_reduce with different operations, tree structures, dtypes or shapes. "
            f"This rank: {op} of {structure[:500]}"
        )
    return [(row, data) for _, row, data in gathered]
