"""Share the buffers of the models of ``auto_model`` before an evaluation.

Each rank updates its own running statistics in training. ``DistributedDataParallel`` broadcasts the buffers
of rank 0 in its next forward pass. Without this wrapper the buffers stay different on each rank.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from ignite_dist import _torch
from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError

__all__ = ["check_pass", "group_of_parameters", "remember_model", "share_buffers"]


class _Adapted(NamedTuple):
    """A model without its wrapper. ``number`` is the same on every rank of the group."""

    number: int
    module: weakref.ref[Module]
    shares_buffers: bool


@dataclass
class _OfGroup:
    """The models that ``auto_model`` adapted for one group. ``count`` must be the same on its ranks."""

    group: Group
    count: int = 0
    had_buffers: bool = False
    models: list[_Adapted] = field(default_factory=list)


# Keyed by context, then by rank (replicas of XLA share a context), then by the ranks of the group.
_known: weakref.WeakKeyDictionary[ComputationModel, dict[int, dict[tuple[int, ...], _OfGroup]]]
_known = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards the outer two levels; only one rank uses each innermost level


def _of_this_rank(live: ComputationModel) -> dict[tuple[int, ...], _OfGroup]:
    with _lock:
        return _known.setdefault(live, {}).setdefault(live.get_rank(), {})


def remember_model(live: ComputationModel, module: Module, group: Group, shares_buffers: bool) -> None:
    """Note that the ranks of ``group`` train ``module``. All ranks of ``group`` call this.

    Args:
        live: the context.
        module: the module without its wrapper. A later call for the same module replaces this one.
        group: the group over which gradients are averaged.
        shares_buffers: whether all ranks evaluate with the buffers of the group's first rank.
    """
    known = _of_this_rank(live)
    own = known.setdefault(group.ranks, _OfGroup(group))
    own.group = group  # an earlier group of the same ranks may have been destroyed
    for other in known.values():
        other.models = [one for one in other.models if one.module() not in (None, module)]
    own.models.append(_Adapted(own.count, weakref.ref(module), shares_buffers))
    own.count += 1
    own.had_buffers |= shares_buffers and bool(_shared_buffers(module))


def group_of_parameters(live: ComputationModel, parameters: Iterable[Tensor]) -> Group:
    """The group of the ``auto_model`` model that has any of ``parameters``; the world if there is none."""
    own = {id(parameter) for parameter in parameters}
    for known in _of_this_rank(live).values():
        for one in known.models:
            module = one.module()
            if module is not None and any(id(parameter) in own for parameter in module.parameters()):
                return known.group
    return live.groups.world


# --- buffers -----------------------------------------------------------------------------------------

_KIND = "ignite_dist.exact_pass"


def share_buffers() -> None:
    """Broadcast the buffers of all remembered models from the first rank of each model's group.

    Every rank calls this. The cost is one gather of objects and one broadcast per 16 MB. A group whose models
    had no buffers in ``auto_model`` does not communicate.

    Raises:
        CollectiveMismatchError: the ranks have different buffers, or another rank is in another call. No
            buffer was changed.
        RuntimeError: called inside of ``join()``.
    """
    live = current_model()
    known = _of_this_rank(live)
    for ranks in sorted(known):  # the same order on all ranks: a rank may be in several groups
        if known[ranks].had_buffers:
            live.groups.check_not_joining()
            _share(live, known[ranks])


def _share(live: ComputationModel, known: _OfGroup) -> None:
    perform(live, "exact pass", known.group, lambda: Steps(lambda: _share_now(live, known)), outside=None)


def _share_now(live: ComputationModel, known: _OfGroup) -> None:
    group = known.group
    found, different = _compare(live, known)
    if different:
        # A deleted model may still await garbage collection on one rank. All ranks see that and retry.
        del found
        gc.collect()
        found, different = _compare(live, known)
    if different:
        _raise_for_buffers(live, group, *found[different[0]])
    buffers = {id(buffer): buffer for _, named in found.values() for _, buffer in named}
    broadcast_tensors(live, buffers.values(), group.ranks[0], group)


_Found = dict[int, tuple[Module, list[tuple[str, Tensor]]]]


def _compare(live: ComputationModel, known: _OfGroup) -> tuple[_Found, list[int]]:
    """The models that every rank still has, with their buffers, and the ``number`` of those that differ."""
    alive = [(one.number, one.module()) for one in known.models if one.shares_buffers]
    found = {number: (module, _shared_buffers(module)) for number, module in alive if module is not None}
    digests = [(number, _digest(buffers)) for number, (_, buffers) in found.items()]
    rows = live.objects.gather((_KIND, known.count, digests), known.group)
    if not all(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError(
            "Some ranks begin a pass over a loader of auto_dataloader(exact=...), and other ranks make "
            "another call. Every rank must begin each pass: the pass begins with a broadcast of buffers."
        )
    counts = [count for _, count, _ in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatchError(
            f"auto_model was called {counts} times on the ranks. Every rank must call it equally often."
        )
    everyones = [dict(one) for *_, one in rows]
    numbers = sorted(set(found).intersection(*everyones))
    different = [number for number in numbers if len({one[number] for one in everyones}) > 1]
    return {number: found[number] for number in numbers}, different


def _shared_buffers(module: Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` by name, without sharded ones and those that DDP is told to ignore."""
    ignored = _torch.ignored_by_ddp(module)
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if name not in ignored and not is_sharded(buffer)
    ]


def _described(buffers: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: f"{buffer.dtype} of shape {tuple(buffer.shape)}" for name, buffer in buffers}


def _digest(buffers: Sequence[tuple[str, Tensor]]) -> str:
    return hashlib.sha1(repr(_described(buffers)).encode(), usedforsecurity=False).hexdigest()


def _raise_for_buffers(
    live: ComputationModel, group: Group, module: Module, buffers: Sequence[tuple[str, Tensor]]
) -> None:
    """Raise with the name of the first buffer that differs. Every rank of ``group`` calls this."""
    everyones: list[dict[str, str]] = live.objects.gather(_described(buffers), group)
    names = dict.fromkeys(name for one in everyones for name in one)
    differing = (name for name in names if len({one.get(name) for one in everyones}) > 1)
    first = next(differing, None)
    by_rank = [
        f"rank {rank}: {one.get(first or '')}" for rank, one in zip(group.ranks, everyones, strict=True)
    ]
    raise CollectiveMismatchError(
        f"The ranks have different buffers in a {type(module).__name__} and cannot all take the buffers of "
        + (
            f"rank {group.ranks[0]}: {first!r} is {', '.join(by_rank)}. "
            if first
            else f"rank {group.ranks[0]}: the buffers are in a different order. "
        )
        + "If each rank needs its own buffers, call auto_model(..., broadcast_buffers=False)."
    )


def check_pass(rows: Sequence[object]) -> None:
    """Raise if some ranks begin a pass while this rank calls ``gather_in_order``.

    Args:
        rows: the objects that ``gather_in_order`` has gathered.

    Raises:
        CollectiveMismatchError: some ranks begin a pass, others do not; raised on all ranks.
    """
    if any(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError(
            "Some ranks call gather_in_order, and other ranks begin another pass over a loader of "
            "auto_dataloader(exact=...). Every rank must begin each pass."
        )
