"""Reductions of trees of numbers and tensors: which leaves share a collective."""

from __future__ import annotations

import sys
import zlib
from numbers import Number
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.arguments import copy_of
from ignite_dist.collectives.buckets import fill
from ignite_dist.collectives.checks import check_disjoint, check_writable
from ignite_dist.collectives.path import perform
from ignite_dist.collectives.primitives import (
    plan_reduction,
    reduce_messages,
    reduce_tensor,
    to_message,
)
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.call_sites import site_of, users_frame
from ignite_dist.values import number_ops, pytree
from ignite_dist.values.carriers import PIECE_BYTES

# Tensors of a tree up to this size share a collective: a copy costs less than another collective.
_PACK_BYTES = 1 << 16
# Up to this total size, the tensors of a tree are sent in the header that the ranks use to compare trees.
_INLINE_BYTES = 448


def reduce_tree(
    model: ComputationModel,
    tree: Any,
    op: str,
    group: Any,
    exact: bool = True,
    op_text: str = "",
    async_op: bool = False,
    fills: bool = False,
    function: str = "all_reduce",
) -> Any:
    """Reduce a number, or a tree of numbers and tensors; see :func:`ignite_dist.all_reduce`.

    ``op_text`` describes ``op`` and options (default: ``op``). It must be equal on all ranks. ``fills``
    writes the results into the tensors of ``tree``. ``function`` is the public function.
    """
    op_text = op_text or op
    leaves, structure = pytree.flatten(tree)
    values = [
        leaf
        if type(leaf) in number_ops.PLAIN_TYPES or isinstance(leaf, Tensor)
        else number_ops.plain_number(leaf)
        for leaf in leaves
    ]
    _check_leaves(model, values, op)
    if fills:
        values, sources = _distinct(_checked_fillable(values))
        structure += f" in place{'' if len(values) == len(leaves) else f' {sources}'}"
    members = model.groups.resolve(group)
    if async_op and not fills:  # the caller may change the tensors before wait()
        values = [copy_of(leaf) for leaf in values]
    structure = f"{op_text} of {structure}"
    has_tensors = any(issubclass(kind, Tensor) for kind in set(map(type, values)))

    def reduce(values: list[Any], members: Group) -> Any:
        if not has_tensors:
            reduced = _reduce_numbers(model, values, structure, op, members)
        else:
            reduced = _reduce_leaves(model, values, structure, op, exact, members, fills)
        return tree if fills else pytree.rebuild(tree, iter(reduced))

    return perform(
        model,
        function,
        members,
        lambda members: Steps(lambda: reduce(values, members)),
        outside=tree,
        value=values,
        op=op_text,
        begin_outside=lambda members: Steps(lambda: reduce([copy_of(leaf) for leaf in values], members)),
        async_op=async_op,
    )


def _checked_fillable(values: list[Any]) -> list[Any]:
    """``values``. Raises ``ValueError`` if a value is a number, or a tensor that cannot be filled."""
    for value in values:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"all_reduce(inplace=True) fills tensors, but the value has the number {value!r}, which "
                "cannot be filled. Omit inplace and use the result."
            )
        check_writable("all_reduce", value)
    return values


def _distinct(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The tensors without repetitions, and the position of each given tensor among these.

    Tied parameters are different objects in the same memory. Addresses on XLA are not known.
    """
    positions: dict[Any, int] = {}
    distinct: list[Tensor] = []
    sources = []
    for tensor in tensors:
        is_known = tensor.device.type != "xla" and tensor.numel()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if is_known else id(tensor)
        if key not in positions:
            positions[key] = len(distinct)
            distinct.append(tensor)
        sources.append(positions[key])
    check_disjoint("all_reduce(inplace=True)", distinct)
    return distinct, sources


_HINTS: dict[type, str] = {
    type(None): "Leave out gradients that are None, on every rank, or use all_gather.",
    GeneratorType: "Make a list of it, or use all_gather.",
}


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
                "all_reduce and reduce take a tensor, a number, or a dict, list or tuple of these; got "
                f"{kind.__name__}. {_HINTS.get(kind, 'Use all_gather for other objects.')}"
            )


def _reduce_numbers(
    model: ComputationModel, values: list[Any], structure: str, op: str, group: Group
) -> list[Any]:
    """:func:`_reduce_leaves` of a tree without tensors."""
    rows = _gather_checked(model, values, structure, group)
    return number_ops.reduce_numbers([row for row, _ in rows], op)


def _reduce_leaves(
    model: ComputationModel,
    values: list[Any],
    structure: str,
    op: str,
    exact: bool,
    group: Group,
    fills: bool,
) -> list[Any]:
    """The reduced leaves. First the ranks compare the structures of their trees.

    The same collective sends all numbers, and tensors up to ``_INLINE_BYTES`` in total. Above this total,
    tensors with the same dtype and device type share a collective (see :func:`_packs`).
    """
    number_positions = [position for position, leaf in enumerate(values) if not isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
    layouts = [(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in tensors]
    structure += f" {number_positions} {layouts}"
    packs = _buckets(values) if fills else _packs(values)
    nbytes = sum(values[position].nbytes for positions in packs for position in positions)
    # A lazy device (XLA) would have to compute the tensors now to send them with the comparison.
    is_inline = nbytes <= _INLINE_BYTES and op != "ADASUM" and not model.training.computes_lazily
    flats = [_flat(values, positions) for positions in packs] if is_inline else []
    numbers = [values[position] for position in number_positions]
    rows = _gather_checked(model, numbers, structure, group, to_message(flats))
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
            needs_no_copy = fills and len(positions) == 1
            flat = values[positions[0]] if needs_no_copy else _flat(values, positions)
            plan = plan_reduction(model, op, flat, exact)
            reduce_tensor(model, flat, op, plan, group).wait()
            if needs_no_copy:
                continue
        _unpack(flat, values, positions, reduced, fills)
    return reduced


def _unpack(flat: Tensor, values: list[Any], positions: list[int], reduced: list[Any], fills: bool) -> None:
    """Split ``flat`` into the tensors at ``positions``: fill ``values``, or set views in ``reduced``."""
    # Not torch.split(): autograd refuses changes of its views in place.
    parts = torch.unsafe_split_with_sizes(flat, [values[position].numel() for position in positions])
    for position, part in zip(positions, parts, strict=True):
        if fills:
            with torch.no_grad():
                fill(values[position], part)
        else:
            reduced[position] = part.view(values[position].shape)


def _packs(values: list[Any]) -> list[list[int]]:
    """Groups of tensors that share a collective, as positions in ``values``."""
    packs: dict[Any, list[int]] = {}
    for position, leaf in enumerate(values):
        if isinstance(leaf, Tensor):
            # The packs must be equal on all ranks. The device's type is equal on all ranks, its index is not.
            is_small = leaf.nbytes <= _PACK_BYTES
            packs.setdefault((leaf.dtype, leaf.device.type) if is_small else position, []).append(position)
    return list(packs.values())


def _buckets(tensors: list[Tensor]) -> list[list[int]]:
    """:func:`_packs` of up to ``PIECE_BYTES``, for tensors that are filled in place."""
    buckets: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # the last bucket of each kind, and its size
    for position, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device.type  # equal on all ranks, see _packs()
        bucket, size = last.get(kind, ([], 0))
        if not bucket or size + tensor.nbytes > PIECE_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(position)
        last[kind] = bucket, size + tensor.nbytes
    return buckets


def _flat(values: list[Any], positions: list[int]) -> Tensor:
    return torch.cat([values[position].detach().reshape(-1) for position in positions])


def _gather_checked(
    model: ComputationModel, numbers: list[Any], structure: str, group: Group, message: bytes = b""
) -> list[tuple[list[Any], bytes]]:
    """The ``numbers`` and ``message`` of every rank. Raises if ``structure`` differs on a rank."""
    check = zlib.crc32(structure.encode())
    gathered = model.objects.gather((check, numbers, message), group)
    if any(type(entry) is not tuple or entry[:1] != (check,) for entry in gathered):
        raise CollectiveMismatchError(_mismatch(model, gathered, structure, group))
    return [(row, data) for _, row, data in gathered]


_SHOWN_BEFORE, _SHOWN = 60, 300  # characters, before and from the first difference


def _mismatch(model: ComputationModel, gathered: list[Any], structure: str, group: Group) -> str:
    """The message for ranks whose calls differ. If all of them have called this, they exchange the calls."""
    function = group.call.text.partition("(")[0]
    parts = [list(map(type, entry)) if type(entry) is tuple else [] for entry in gathered]
    if any(kinds != [int, list, bytes] for kinds in parts):
        called = structure[:_SHOWN]
        return f"Some ranks call {function}, and other ranks make another call. This rank: {called}"
    calls = model.objects.gather((structure, site_of(users_frame(sys._getframe()))), group)
    columns = enumerate(zip(*(other for other, _ in calls), strict=False))
    difference = next((number for number, column in columns if len(set(column)) > 1), 0)
    start = max(0, difference - _SHOWN_BEFORE)
    by_call: dict[str, list[str]] = {}
    for rank, (other, site) in zip(group.ranks, calls, strict=True):
        end = start + _SHOWN_BEFORE + _SHOWN
        shown = f"{'...' * (start > 0)}{other[start:end]}{'...' * (end < len(other))}"
        place = "" if site == "?" else f" (at {site})"  # "?" in the thread of an asynchronous call
        by_call.setdefault(f"{shown}{place}", []).append(str(rank))
    described = "; ".join(f"rank {', '.join(ranks)}: {call}" for call, ranks in by_call.items())
    return (
        f"The ranks called {function} with different operations, tree structures, dtypes or shapes (a dot is "
        f"a value): {described}"
    )
