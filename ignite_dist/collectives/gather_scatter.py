"""Gather on one rank, and scatter from one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from ignite_dist.collectives.all_gather import gathered_shape
from ignite_dist.collectives.arguments import check_length, check_root
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.messages import NOTHING, begin_messages, encode
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.collectives.primitives import exchange_tensor
from ignite_dist.comp_models import Group
from ignite_dist.comp_models.transport import Sizes
from ignite_dist.comp_models.work import Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import as_int

_Object = TypeVar("_Object")


@overload
def gather(  # type: ignore[overload-overlap]  # Tensor also matches _Object
    tensor: Tensor, dst: int = ..., group: Any = ..., *, async_op: Literal[False] = ...
) -> Tensor | None: ...


@overload
def gather(
    tensor: _Object, dst: int = ..., group: Any = ..., *, async_op: Literal[False] = ...
) -> list[_Object] | None: ...


@overload
def gather(tensor: Any, dst: int = ..., group: Any = ..., *, async_op: Literal[True]) -> Work: ...


@counts_interrupts
def gather(tensor: Any, dst: int = 0, group: Any = None, *, async_op: bool = False) -> Any:
    """Gather the values of all ranks on rank ``dst``. Every rank of the group must call this function.

    The other ranks neither receive nor hold the values. (With XLA, they get zeros of the same size; with
    ``group``, all ranks gather the values and drop them.)

    Args:
        tensor: as in :func:`all_gather`: a tensor of the same shape ``(*S)``, dtype and device type on every
            rank; or a picklable object, of any type and size on each rank.
        dst: a global rank of the group.
        group: as in :func:`all_reduce`. A rank outside the group gets None.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the result. Do
            not change a tensor before ``wait()`` has returned.

    Returns:
        On ``dst``: for a tensor ``(*S) -> (group_size * S[0], *S[1:])``, or ``() -> (group_size,)``, in rank
        order; for an object a list with one entry per rank. On the other ranks: None. Small objects take one
        collective, large objects two.

    Raises:
        TypeError: the value cannot be sent. Nothing was sent.
        ValueError: ``dst`` is not a rank of the group. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, the type of an object is not registered.

    Example::

        idist.gather(torch.tensor([rank]))  # on two ranks: tensor([0, 1]) on rank 0, None on rank 1
        idist.gather({"rank": rank}, dst=1)  # None on rank 0, [{"rank": 0}, {"rank": 1}] on rank 1
    """
    model = current_model()
    dst = as_int(dst)
    is_tensor = isinstance(tensor, Tensor)
    if is_tensor:
        check_dense("gather", tensor)
    members = model.groups.resolve(group)
    check_root("dst", dst, members, model.get_world_size())
    is_dst = model.get_rank() == dst

    def begin_tensor(members: Group) -> Work:
        work = exchange_tensor(model, tensor, members, _sizes(tensor.numel(), members, dst, is_dst))
        shape = gathered_shape(tensor, members)
        return work.then(lambda gathered: gathered.view(shape) if is_dst else None)

    messages = []
    if not is_tensor and is_member(model, members):
        messages = [encode(model, "gather", tensor if rank == dst else NOTHING) for rank in members.ranks]

    def begin_objects(members: Group) -> Work:
        work = begin_messages(model, messages, members)
        return work.then(lambda values: values if is_dst else None)

    return perform(
        model,
        "gather",
        members,
        begin_tensor if is_tensor else begin_objects,
        outside=None,
        value=tensor if is_tensor else "an object",
        op=f"to {dst}",
        async_op=async_op,
    )


def _sizes(numel: int, group: Group, dst: int, is_dst: bool) -> Sizes:
    sent = [numel if rank == dst else 0 for rank in group.ranks]
    return Sizes(sent, [numel if is_dst else 0] * len(group.ranks))


@overload
def scatter(
    values: Sequence[_Object] | None, src: int = ..., group: Any = ..., *, async_op: Literal[False] = ...
) -> _Object: ...


@overload
def scatter(values: Any, src: int = ..., group: Any = ..., *, async_op: Literal[True]) -> Work: ...


@counts_interrupts
def scatter(values: Any, src: int = 0, group: Any = None, *, async_op: bool = False) -> Any:
    """Send one entry of a list on rank ``src`` to each rank. Every rank of the group must call this function.

    Args:
        values: on ``src`` a list or tuple with one entry per rank of the group, in rank order: tensors of any
            shapes and dtypes, or picklable objects. On the other ranks None.
        src: a global rank of the group.
        group: as in :func:`all_reduce`. A rank outside the group gets None.
        async_op: as in :func:`gather`.

    Returns:
        This rank's entry. A tensor is new: on the CPU if the tensor of ``src`` is on the CPU, else on
        :func:`device`. Small entries take one collective, large entries two. No rank receives the entries of
        other ranks (with XLA and ``group``, all ranks do).

    Raises:
        TypeError: on ``src``, ``values`` is not a list, or an entry cannot be sent. Nothing was sent.
        ValueError: ``values`` has another length than the group, or is given on another rank than ``src``; or
            ``src`` is not a rank of the group. Nothing was sent.
        UnsafeObjectError: after :func:`safe_objects`, the type of an object is not registered.

    Example::

        idist.scatter([["a"], ["b", "c"]] if rank == 0 else None)  # ["a"] on rank 0, ["b", "c"] on rank 1
    """
    model = current_model()
    src = as_int(src)
    members = model.groups.resolve(group)
    check_root("src", src, members, model.get_world_size())
    entries: Sequence[Any] = [NOTHING] * len(members.ranks)
    if not is_member(model, members):
        pass
    elif model.get_rank() == src:
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"scatter takes a list on the source rank, got {type(values).__name__}.")
        check_length("scatter", values, members)
        entries = values
    elif values is not None:
        raise ValueError(f"scatter takes values on rank {src} only; pass None on the other ranks.")
    messages = [encode(model, "scatter", entry) for entry in entries]

    def begin(members: Group) -> Work:
        work = begin_messages(model, messages, members)
        return work.then(lambda received: received[members.ranks.index(src)])

    return perform(
        model, "scatter", members, begin, outside=None, value="a list", op=f"from {src}", async_op=async_op
    )
