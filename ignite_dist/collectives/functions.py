"""What a collective does with a number, a string, a tensor, an object, a tree, a group.

Written once, over the tensor primitives of a computation model. Every function takes the same path on every
rank: what it does depends on the type, dtype, shape and device type of the value, which ranks share.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from numbers import Number
from operator import index
from typing import Any

import torch
from torch import Tensor

from ignite_dist.arguments import as_int, check_timeout
from ignite_dist.collectives import autograd
from ignite_dist.collectives.tensors import (
    broadcast_tensor,
    check_dense,
    check_writable,
    gather_rows,
    plan_reduction,
    reduce_messages,
    reduce_tensor,
    to_message,
)
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import out_of_band
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.tracing import traced, traced_as
from ignite_dist.values import pytree, reduce_ops

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_anything",
    "new_group",
]

# Tensors of a tree up to this size share a collective: copying them together is cheaper than another one.
_PACK_BYTES = 1 << 16
# Tensors of a tree with so many bytes together travel in the header in which the ranks compare their trees.
_INLINE_BYTES = 448


# --- all_reduce --------------------------------------------------------------------------------------


@traced
def _all_reduce_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_reduce(*args, **kwargs)


@traced_as(_all_reduce_in_a_graph)
def all_reduce(
    tensor: Any,
    op: str = "SUM",
    group: Any = None,
    *,
    inplace: bool = True,
    sync_grads: bool = False,
    exact: bool = True,
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
        if op not in ("SUM", "AVERAGE"):
            raise ValueError(f"all_reduce with sync_grads=True is for SUM and AVERAGE, got {op}.")
        members = model.resolve_group(group)
        autograd.check_differentiable("all_reduce", model, tensor, members)
        model.announce("all_reduce", members, tensor, called)
        if not _is_member(model, members):
            return tensor
        return autograd.reduced(model, tensor, op, members, exact)
    if isinstance(tensor, Tensor):
        plan = plan_reduction(model, op, tensor, exact)
        if inplace:
            check_writable("all_reduce", tensor)
        members = model.resolve_group(group)
        model.announce("all_reduce", members, tensor, called)
        if not _is_member(model, members):
            return _outside(
                model, members, tensor, lambda: reduce_tensor(model, _copy(tensor), op, plan, members)
            )
        return reduce_tensor(model, tensor if inplace else _copy(tensor), op, plan, members)
    leaves, structure = pytree.flatten(tensor)
    values = [leaf if isinstance(leaf, Tensor) else reduce_ops.plain_number(leaf) for leaf in leaves]
    _check_leaves(model, values, op)
    members = model.resolve_group(group)
    model.announce("all_reduce", members, values, called)

    def reduce_leaves() -> list[Any]:
        return _reduce_leaves(model, values, structure, op, exact, members)

    if not _is_member(model, members):
        return _outside(model, members, tensor, reduce_leaves)
    return pytree.rebuild(tensor, iter(reduce_leaves()))


def _check_leaves(model: ComputationModel, values: list[Any], op: str) -> None:
    for kind, value in {type(value): value for value in values}.items():
        if issubclass(kind, Tensor):
            for tensor in values:
                if type(tensor) is kind:
                    plan_reduction(model, op, tensor)
        elif issubclass(kind, Number):
            reduce_ops.check_number_op(op, value)
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
    is_inline = nbytes <= _INLINE_BYTES and op != "ADASUM" and not model.computes_lazily()
    flats = [_flat(values, positions) for positions in packs] if is_inline else []
    sent = [values[position] for position in numbers]
    compared = structure if exact else f"{structure} exact=False"
    rows = _gather_equals(model, sent, compared, op, group, to_message(flats))
    reduced = list(values)
    if numbers:
        totals = reduce_ops.reduce_numbers([row for row, _ in rows], op)
        for position, total in zip(numbers, totals, strict=True):
            reduced[position] = total
    small = iter(reduce_messages([message for _, message in rows], flats, op) if flats else ())
    for positions in packs:
        if is_inline:
            flat = next(small)
        else:
            flat = _flat(values, positions)
            flat = reduce_tensor(model, flat, op, plan_reduction(model, op, flat, exact), group)
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
    gathered = model.gather_objects((check, numbers, message), group)
    if any(type(one) is not tuple or one[:1] != (check,) for one in gathered):
        raise CollectiveMismatchError(
            "The ranks of one all_reduce gave different values or operations; this one: "
            f"{op} of {structure[:500]}"
        )
    return [(row, sent) for _, row, sent in gathered]


# --- all_gather --------------------------------------------------------------------------------------


@traced
def _all_gather_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_gather(*args, **kwargs)


@traced_as(_all_gather_in_a_graph)
def all_gather(tensor: Any, group: Any = None, *, out: Tensor | None = None, sync_grads: bool = False) -> Any:
    """Every rank's value, on every rank of the group, all of which call it.

    Args:
        tensor: a tensor of the same shape ``(*S)``, dtype and device type on every rank; or anything else
            that can be pickled, of any type and size on each.
        group: as in :func:`all_reduce`. A rank outside gets its value back unchanged.
        out: a contiguous tensor of the result's shape and dtype, filled and returned. Worth it in a loop:
            a fresh result costs page faults. It may hold ``tensor`` itself.
        sync_grads: the result has a gradient: each rank's tensor gets that of the sum of all ranks' losses.
            For a contrastive loss over the whole batch. The backward pass is a collective too, so every rank
            of the group makes it; it can be differentiated again. In a ``DistributedDataParallel`` of which
            ranks use different parameters pass ``group=new_group(range(get_world_size()))``: in the world's
            own group it could come between DDP's collectives, elsewhere on each rank.

    Returns:
        For a tensor ``(*S) -> (group_size * S[0], *S[1:])``, and 0-d ``-> (group_size,)``, in rank order,
        with a gradient only if ``sync_grads``. For anything else a list with one entry per rank; a small
        object costs one collective, a large one two.

    Raises:
        TypeError: an object that cannot be pickled; ``sync_grads`` without a floating-point tensor. Nothing
            was sent.
        ValueError: an unknown group, or an ``out`` that does not fit; ``sync_grads`` with ``out``, or with
            XLA and a part of the ranks. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, an object of a type that is not registered.

    Example::

        idist.all_gather(torch.tensor([rank]))  # on two ranks: tensor([0, 1]) on both
        idist.all_gather({"rank": rank})  # [{"rank": 0}, {"rank": 1}] on both
    """
    model = current_model()
    is_tensor = isinstance(tensor, Tensor)
    if out is not None and not is_tensor:
        raise TypeError(f"out= holds gathered tensors; got a value of type {type(tensor).__name__}.")
    if is_tensor:
        check_dense("all_gather", tensor)
    members = model.resolve_group(group)
    if sync_grads:
        if out is not None:
            raise ValueError("all_gather with sync_grads=True returns a new tensor: leave out= out.")
        autograd.check_differentiable("all_gather", model, tensor, members)
    if out is not None and _is_member(model, members):
        _check_out(out, tensor, _gathered_shape(tensor, members))
    model.announce("all_gather", members, tensor if is_tensor else "an object")
    if sync_grads:
        if not _is_member(model, members):
            return tensor
        return autograd.gathered(model, tensor, members).view(_gathered_shape(tensor, members))
    if not _is_member(model, members):
        return _outside(
            model,
            members,
            tensor,
            lambda: gather_rows(model, tensor, members) if is_tensor else model.gather_objects(None, members),
        )
    if not is_tensor:
        return model.gather_objects(tensor, members)
    rows = gather_rows(model, tensor, members, out=out)
    return rows.view(_gathered_shape(tensor, members)) if out is None else out


def all_gather_ragged(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Tensors of different shapes from every rank, on every rank of the group, all of which call it.

    Args:
        tensor: any shape, of any number of dimensions; the same dtype on every rank.
        group: as in :func:`all_reduce`. A rank outside gets ``[tensor]``.

    Returns:
        One tensor per rank, in rank order, on this rank's device. Two collectives: the shapes, then the data.

    Raises:
        TypeError: not a tensor; nothing was sent.
        CollectiveMismatchError: the dtypes differ; raised on every rank.
    """
    model = current_model()
    check_dense("all_gather_ragged", tensor)
    members = model.resolve_group(group)
    model.announce("all_gather_ragged", members, tensor.dtype)
    if not _is_member(model, members):
        _outside(model, members, tensor, lambda: _gather_ragged(model, tensor.new_empty(0), members))
        return [tensor]
    return _gather_ragged(model, tensor, members)


def _gather_ragged(model: ComputationModel, tensor: Tensor, members: Group) -> list[Tensor]:
    layouts = model.gather_objects((tensor.dtype, tuple(tensor.shape)), members)
    if len({dtype for dtype, _ in layouts}) > 1:
        described = ", ".join(
            f"rank {r}: {dtype}" for r, (dtype, _) in zip(members.ranks, layouts, strict=True)
        )
        raise CollectiveMismatchError(f"all_gather_ragged needs one dtype on every rank, got {described}.")
    return _gather_shapes(model, tensor, [shape for _, shape in layouts], members)


def all_gather_tensors_with_shapes(
    tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None
) -> list[Tensor]:
    """:func:`all_gather_ragged` where the shapes are known already, for one collective instead of two.

    Args:
        tensor: of shape ``shapes[i]`` on the ``i``-th rank of the group; the same dtype on every rank.
        shapes: one shape per rank of the group, the same list on every rank.
        group: as in :func:`all_reduce`. A rank outside gets ``[tensor]``.

    Returns:
        One tensor per rank, in rank order, on this rank's device.

    Raises:
        ValueError: not one shape per rank, or not this tensor's shape in this rank's place. Nothing was sent.
    """
    model = current_model()
    check_dense("all_gather_tensors_with_shapes", tensor)
    members = model.resolve_group(group)
    known = [tuple(index(size) for size in shape) for shape in shapes]
    if not _is_member(model, members):
        model.announce("all_gather_tensors_with_shapes", members)
        _outside(model, members, tensor, lambda: _gather_shapes(model, tensor.new_empty(0), known, members))
        return [tensor]
    if len(known) != len(members.ranks):
        raise ValueError(f"shapes needs one shape per rank: {len(members.ranks)} ranks, {len(known)} shapes.")
    own = known[members.ranks.index(model.get_rank())]
    if own != tuple(tensor.shape):
        raise ValueError(f"shapes says {own} for this rank, but its tensor is {tuple(tensor.shape)}.")
    model.announce("all_gather_tensors_with_shapes", members, f"{tensor.dtype} {known}")
    return _gather_shapes(model, tensor, known, members)


def _gather_shapes(
    model: ComputationModel, tensor: Tensor, shapes: Sequence[tuple[int, ...]], group: Group
) -> list[Tensor]:
    sizes = [prod(shape) for shape in shapes]
    flat = tensor.detach().reshape(-1)
    padded = (
        torch.cat([flat, flat.new_empty(max(sizes) - flat.numel())]) if max(sizes) > flat.numel() else flat
    )
    rows = gather_rows(model, padded, group)
    return [row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


# --- broadcast ---------------------------------------------------------------------------------------


@traced
def _broadcast_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.broadcast(*args, **kwargs)


@traced_as(_broadcast_in_a_graph)
def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False, group: Any = None) -> Any:
    """The value of rank ``src``, on every rank of the group, all of which call it.

    Args:
        tensor: on ``src`` the value: a tensor, or anything that can be pickled except None. On the others a
            tensor of the same shape, dtype and device type where ``src`` has one, which is filled in place
            and returned; anything but None where ``src`` has an object, which is discarded.
        src: a global rank.
        safe_mode: the other ranks may pass any dense tensor, or anything else, None included, without
            knowing what ``src`` sends. A tensor of the right shape, dtype and device type is filled in place,
            if no two elements share memory; else a new one comes back, on the CPU if it was there on ``src``,
            else on :func:`device`. For a tensor it costs one small collective more.
        group: as in :func:`all_reduce`, with ``src`` in it. A rank outside gets its value back unchanged.

    Returns:
        The value of ``src``.

    Raises:
        ValueError: ``src`` is not a rank of the group; ``src`` gives None, or another rank does without
            ``safe_mode``. Nothing was sent.
        TypeError: an object that cannot be pickled. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, an object of a type that is not registered.

    Example::

        idist.broadcast("from 0" if rank == 0 else "")  # "from 0" on every rank
        idist.broadcast(tensor if rank == 0 else None, safe_mode=True)  # that tensor on every rank
    """
    model = current_model()
    src = as_int(src)
    is_src = model.get_rank() == src
    if tensor is None and (is_src or not safe_mode):
        raise ValueError(
            f"broadcast got None on {'the source rank' if is_src else 'a rank that is not the source'}. "
            "The source needs a value; the others may pass None with safe_mode=True."
        )
    if isinstance(tensor, Tensor):
        check_dense("broadcast", tensor)
        if not safe_mode:
            check_writable("broadcast", tensor)
    members = model.resolve_group(group)
    _check_src(src, members, model.get_world_size())
    kind = "" if safe_mode else tensor if isinstance(tensor, Tensor) else "an object"
    model.announce("broadcast", members, kind, f"from {src}")
    if not _is_member(model, members):
        return _outside(
            model, members, tensor, lambda: _broadcast(model, _copy(tensor), src, members, safe_mode)
        )
    return _broadcast(model, tensor, src, members, safe_mode)


def _broadcast(model: ComputationModel, value: Any, src: int, group: Group, safe_mode: bool) -> Any:
    if safe_mode:
        return broadcast_anything(model, value, src, group)
    if isinstance(value, Tensor):
        return broadcast_tensor(model, value, src, group)
    return model.broadcast_object(value, src, group)


def _check_src(src: int, group: Group, world_size: int) -> None:
    if type(src) is not int or not 0 <= src < world_size:
        raise ValueError(f"src is a global rank, an int in [0, {world_size}), got {src!r}.")
    if group.ranks and group.position(src) is None:
        raise ValueError(f"src is a global rank of the group, which has {list(group.ranks)}; got {src}.")


def broadcast_anything(model: ComputationModel, value: Any, src: int, group: Group) -> Any:
    """Broadcast what only ``src`` knows, None too: first what it is, then a tensor's data."""
    is_src = model.get_rank() == src
    sent: Any = (None, value)
    if is_src and isinstance(value, Tensor):
        sent = ((tuple(value.shape), value.dtype, value.device.type), None)
    layout, received = model.broadcast_object(sent if is_src else None, src, group)
    if layout is None:
        return value if is_src else received
    if is_src:
        broadcast_tensor(model, value if _is_writable(value) else value.clone(), src, group)
        return value
    shape, dtype, device_type = layout
    fits = isinstance(value, Tensor) and (tuple(value.shape), value.dtype, value.device.type) == layout
    if not (fits and _is_writable(value)):
        device = torch.device("cpu") if device_type == "cpu" else model.device()
        value = torch.empty(shape, dtype=dtype, device=device)
    return broadcast_tensor(model, value, src, group)


def _is_writable(tensor: Tensor) -> bool:
    try:
        check_writable("broadcast", tensor)
    except ValueError:
        return False
    return True


# --- barrier and groups ------------------------------------------------------------------------------


@traced
def _barrier_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.barrier(*args, **kwargs)


@traced_as(_barrier_in_a_graph)
def barrier(group: Any = None, timeout: timedelta | None = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: as in :func:`all_reduce`. A rank outside returns at once (with XLA: when all have come).
        timeout: a ``datetime.timedelta`` after which it raises and says which ranks have not come, and where
            they are, if they are watched (:func:`watch`; workers of :func:`spawn` are). It goes through a
            store beside the backend, with which collectives go on afterwards as if nothing had been.

    Raises:
        MissingRanksError: ``timeout`` has passed; also on a rank that comes later.
        TypeError, ValueError: a ``timeout`` that is not a timedelta, or not positive.
        RuntimeError: ``timeout`` in a context that idist did not make, before :func:`watch`.
    """
    if isinstance(group, timedelta):
        raise TypeError(f"barrier takes its timeout by name: barrier(timeout={group!r}).")
    model = current_model()
    members = model.resolve_group(group)
    if timeout is not None:
        check_timeout("timeout", timeout)
        if _is_member(model, members):
            out_of_band.barrier(model, members, timeout)
        return
    model.announce("barrier", members)
    if _is_member(model, members) or (model.groups_need_everyone and members.ranks):
        model._barrier(members)


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """A handle for a group of ranks, to pass as ``group=``. A list of ranks does as well, and is cached.

    Without options only the members need to call it (Horovod, MPI, and a default group bound to a device by
    ``device_id=``: every rank of the world); with options every rank of the world does, in the same order.
    The same holds for the first use of a list. With Horovod all ranks make their groups in the same order.
    With XLA making one costs nothing, and every collective of it is a call of every rank of the world.

    Threads of one rank may make collectives at once if each uses groups of its own (not with XLA, whose ranks
    are threads). Two handles of the same ranks are two groups; make them in the same order on all ranks, so
    before the threads begin. A list of ranks is no third one: it means the handle that was made last.

    Args:
        ranks: distinct global ranks; the group's order is ascending. Of none it is a group without members,
            which every rank is outside of.
        kwargs: options of ``torch.distributed.new_group``: ``backend``, ``timeout``, ``pg_options``, ...

    Returns:
        What the backend calls a group: for torch a ``ProcessGroup``, and
        ``GroupMember.NON_GROUP_MEMBER`` on a rank outside; for Horovod a ``ProcessSet``; for XLA the ranks.
        Each of them, and a list of the ranks, is a ``group=``.

    Raises:
        ValueError: ranks that are not ints, given twice or out of range.
    """
    return current_model().new_group(ranks, **kwargs)


# --- shared ------------------------------------------------------------------------------------------


def _is_member(model: ComputationModel, group: Group) -> bool:
    return group.handle is None or group.position(model.get_rank()) is not None


def _outside(model: ComputationModel, group: Group, value: Any, take_part: Callable[[], Any]) -> Any:
    """A rank outside the group: its value back, after its part in what the backend makes everybody's call."""
    if model.groups_need_everyone and len(group.ranks) > 1:
        take_part()
    return value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _gathered_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    return (len(group.ranks) * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])


def _check_out(out: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> None:
    expected = (shape, tensor.dtype, tensor.device)
    if (tuple(out.shape), out.dtype, out.device) != expected or not out.is_contiguous():
        raise ValueError(
            f"out= must be a contiguous {tensor.dtype} tensor of shape {shape} on {tensor.device}, got "
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
            f"{'' if out.is_contiguous() else ', not contiguous'}."
        )
