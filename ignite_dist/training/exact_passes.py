"""The models of ``auto_model`` that are trained in the live context, and their buffers before an evaluation.

Running statistics are each rank's own while it trains. ``DistributedDataParallel`` gives all ranks those of
rank 0 in the next forward pass through it; where nothing is wrapped, nobody does.
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
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import announce
from ignite_dist.errors import CollectiveMismatchError

__all__ = ["check_pass", "group_of_parameters", "remember_model", "share_buffers"]


class _Adapted(NamedTuple):
    """A model, without its wrapper. Its number is the same on every rank of its group."""

    number: int
    module: weakref.ref[Module]
    shares_buffers: bool


@dataclass
class _OfGroup:
    """What ``auto_model`` has adapted for one group of ranks, all of which have called it as often."""

    group: Group
    count: int = 0
    had_buffers: bool = False
    models: list[_Adapted] = field(default_factory=list)


# By context and rank (replicas of XLA share a context), then by the ranks of the group.
_known: weakref.WeakKeyDictionary[ComputationModel, dict[int, dict[tuple[int, ...], _OfGroup]]]
_known = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards the outer two levels; the innermost is this rank's alone


def _of_this_rank(live: ComputationModel) -> dict[tuple[int, ...], _OfGroup]:
    with _lock:
        return _known.setdefault(live, {}).setdefault(live.get_rank(), {})


def remember_model(live: ComputationModel, module: Module, group: Group, shares_buffers: bool) -> None:
    """Note that ``module`` is trained by the ranks of ``group``, all of which call it.

    Args:
        live: the context.
        module: without its wrapper. It is not kept alive, and counts once however often it is adapted.
        group: whose gradients are averaged.
        shares_buffers: whether all ranks evaluate with the buffers of the first.
    """
    known = _of_this_rank(live)
    own = known.setdefault(group.ranks, _OfGroup(group))
    own.group = group  # an earlier handle may have been destroyed
    for other in known.values():
        other.models = [one for one in other.models if one.module() not in (None, module)]
    own.models.append(_Adapted(own.count, weakref.ref(module), shares_buffers))
    own.count += 1
    own.had_buffers |= shares_buffers and bool(_own_buffers(module))


def group_of_parameters(live: ComputationModel, parameters: Iterable[Tensor]) -> Group:
    """The group of the remembered model that has any of ``parameters``; else the world."""
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
    """Give every rank the buffers that the first rank of its group has, in all models that are trained.

    Every rank calls it. One exchange, and one broadcast for each 16 MB; nothing for models that had no
    buffers when ``auto_model`` saw them.

    Raises:
        CollectiveMismatchError: the ranks have different buffers, or another rank makes another call. Nothing
            was changed.
        RuntimeError: inside of ``join()``.
    """
    live = current_model()
    known = _of_this_rank(live)
    for ranks in sorted(known):  # in one order on all ranks, which may be in several groups
        if known[ranks].had_buffers:
            live.groups.check_not_joining()
            _share(live, known[ranks])


def _share(live: ComputationModel, known: _OfGroup) -> None:
    group = known.group
    announce(live, "exact pass", group)
    found, different = _compare(live, known)
    if different:
        # A model that was dropped may wait for the garbage collector. All ranks see it, so all look again.
        del found
        gc.collect()
        found, different = _compare(live, known)
    if different:
        _raise_for_buffers(live, group, *found[different[0]])
    buffers = {id(buffer): buffer for _, named in found.values() for _, buffer in named}
    broadcast_tensors(live, buffers.values(), group.ranks[0], group)


_Found = dict[int, tuple[Module, list[tuple[str, Tensor]]]]


def _compare(live: ComputationModel, known: _OfGroup) -> tuple[_Found, list[int]]:
    """The models that every rank still has, with their buffers, and the numbers of those that differ."""
    alive = [(one.number, one.module()) for one in known.models if one.shares_buffers]
    found = {number: (module, _own_buffers(module)) for number, module in alive if module is not None}
    digests = [(number, _digest(buffers)) for number, (_, buffers) in found.items()]
    rows = live.objects.gather((_KIND, known.count, digests), known.group)
    if not all(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError(
            "Some ranks begin a pass over a loader of auto_dataloader(exact=...), and others make another "
            "call. Each pass begins on every rank, which there takes over the buffers of rank 0."
        )
    counts = [count for _, count, _ in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatchError(
            f"The ranks have given {counts} models to auto_model: every rank calls it as often as the others."
        )
    everyones = [dict(one) for *_, one in rows]
    numbers = sorted(set(found).intersection(*everyones))
    different = [number for number in numbers if len({one[number] for one in everyones}) > 1]
    return {number: found[number] for number in numbers}, different


def _own_buffers(module: Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` by name, without those that are each rank's own (``DDP`` has this rule)."""
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
    """Say which is the first that differs. Every rank of ``group`` calls it."""
    everyones: list[dict[str, str]] = live.objects.gather(_described(buffers), group)
    names = dict.fromkeys(name for one in everyones for name in one)
    differing = (name for name in names if len({one.get(name) for one in everyones}) > 1)
    first = next(differing, None)
    by_rank = [
        f"rank {rank}: {one.get(first or '')}" for rank, one in zip(group.ranks, everyones, strict=True)
    ]
    raise CollectiveMismatchError(
        f"The ranks have different buffers in a {type(module).__name__}, so they cannot evaluate with those "
        + (
            f"of rank {group.ranks[0]}: {first!r} is {', '.join(by_rank)}. "
            if first
            else "of one: in order. "
        )
        + "Where each rank has buffers of its own, call auto_model(..., broadcast_buffers=False)."
    )


def check_pass(rows: Sequence[object]) -> None:
    """Refuse what ``gather_in_order`` has gathered if some ranks begin a pass meanwhile.

    Raises:
        CollectiveMismatchError: they do; it is raised on all ranks.
    """
    if any(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError(
            "Some ranks call gather_in_order, and others begin another pass over a loader of "
            "auto_dataloader(exact=...). Every rank begins each pass."
        )
