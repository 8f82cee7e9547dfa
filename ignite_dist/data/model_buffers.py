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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.interrupts import own_call
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals import _torch
from ignite_dist.internals.ranks import describe_by_rank


class _AdaptedModel(NamedTuple):
    """A model without its wrapper. ``number`` is the same on every rank of the group.

    ``parameters`` are those that the ranks train together. They may live longer than ``module``.
    """

    number: int
    module: weakref.ref[Module]
    shares_buffers: bool
    parameters: tuple[weakref.ref[Parameter], ...]

    def trained(self) -> list[Parameter]:
        """The parameters that still live."""
        return [one for reference in self.parameters if (one := reference()) is not None]


@dataclass
class _GroupModels:
    """The models that ``auto_model`` adapted for one group. ``count`` must be the same on its ranks."""

    group: Group
    count: int = 0
    had_buffers: bool = False
    models: list[_AdaptedModel] = field(default_factory=list)


_ModelsByGroup = dict[tuple[int, ...], _GroupModels]  # keyed by the ranks of the group

# Keyed by context, then by rank, because replicas of XLA share a context.
_models_by_context: weakref.WeakKeyDictionary[ComputationModel, dict[int, _ModelsByGroup]]
_models_by_context = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards both levels; only one rank uses each _ModelsByGroup


def _models_by_group(live: ComputationModel) -> _ModelsByGroup:
    """The models of this rank."""
    with _lock:
        return _models_by_context.setdefault(live, {}).setdefault(live.get_rank(), {})


def remember_model(
    live: ComputationModel,
    module: Module,
    group: Group,
    shares_buffers: bool,
    parameters: Iterable[Parameter],
) -> None:
    """Remember that the ranks of ``group`` train ``module``. All ranks of ``group`` call this.

    Args:
        live: the context.
        module: the module without its wrapper. A later call for the same module replaces this one.
        group: the group over which gradients are averaged.
        shares_buffers: True if all ranks evaluate with the buffers of the group's first rank.
        parameters: those that the ranks of the group train together, not those that a rank has of its own.
    """
    by_group = _models_by_group(live)
    adapted = by_group.setdefault(group.ranks, _GroupModels(group))
    adapted.group = group  # an earlier group of the same ranks may have been destroyed
    for group_models in by_group.values():
        others = [one for one in group_models.models if one.module() is not module]
        group_models.models = [one for one in others if one.module() is not None or one.trained()]
    references = tuple(map(weakref.ref, parameters))
    adapted.models.append(_AdaptedModel(adapted.count, weakref.ref(module), shares_buffers, references))
    adapted.count += 1
    adapted.had_buffers |= shares_buffers and bool(_shared_buffers(module))


def remembered_models(live: ComputationModel) -> list[Module]:
    """The models of this rank that are still alive."""
    modules = [one.module() for adapted in _models_by_group(live).values() for one in adapted.models]
    return [module for module in modules if module is not None]


def parameters_by_group(live: ComputationModel) -> list[tuple[Group, list[Parameter]]]:
    """What the ranks of each group train together, in an order that all ranks share.

    It does not depend on the garbage collector: a parameter that somebody still has is in it, also if the
    module has been deleted.
    """
    by_group = _models_by_group(live)
    return [
        (by_group[ranks].group, [one for adapted in by_group[ranks].models for one in adapted.trained()])
        for ranks in sorted(by_group)
    ]


def group_of_parameters(live: ComputationModel, parameters: Iterable[Tensor]) -> Group:
    """The group of the ``auto_model`` model that has any of ``parameters``; the world if there is none."""
    ids = {id(parameter) for parameter in parameters}
    for adapted in _models_by_group(live).values():
        for model in adapted.models:
            module = model.module()
            if module is not None and any(id(parameter) in ids for parameter in module.parameters()):
                return adapted.group
    return live.groups.world


# --- buffers -----------------------------------------------------------------------------------------


def check_exact_group(function: str, live: ComputationModel, group: Group) -> None:
    """Raise ``ValueError`` if the ranks outside ``group`` would have to take part in its exact passes."""
    if live.transport.groups_need_all_ranks and len(group.ranks) < live.get_world_size():
        raise ValueError(
            f"{function} got the group {list(group.ranks)}. With this backend every rank takes part in every "
            "collective, but ranks outside the group have no loader: omit group."
        )


def share_buffers(group: Any = None) -> None:
    """Broadcast the buffers of all remembered models inside ``group``, the ranks that share a loader.

    Every rank of ``group`` calls this. Each model takes the buffers of the first rank that trains the model
    and is in ``group``. The cost is one gather of objects and one broadcast per 16 MB. A group whose models
    had no buffers in ``auto_model`` does not communicate.

    Raises:
        CollectiveMismatchError: the ranks have different buffers, or another rank is in another call. No
            buffer was changed.
        RuntimeError: called inside of ``uneven_inputs()``.
    """
    live = current_model()
    by_group = _models_by_group(live)
    for ranks in sorted(by_group):  # the same order on all ranks, because a rank may be in several groups
        if by_group[ranks].had_buffers:
            live.groups.check_not_joining()
            common = _common_group(live, by_group[ranks].group, group)
            if len(common.ranks) > 1:
                _share(live, replace(by_group[ranks], group=common))


def _common_group(live: ComputationModel, trained_by: Group, group: Any) -> Group:
    """The ranks that are in both groups. A third group is made only if neither contains the other."""
    members = live.groups.resolve(group)
    common = [rank for rank in trained_by.ranks if members.position(rank) is not None]
    if len(common) == len(trained_by.ranks):
        return trained_by
    if len(common) == len(members.ranks):
        return members
    return Group(None, (live.get_rank(),)) if len(common) == 1 else live.groups.resolve(common)


@own_call
def _share(live: ComputationModel, adapted: _GroupModels) -> None:
    def begin(group: Group) -> Work:
        return Steps(lambda: _share_now(live, replace(adapted, group=group)))

    perform(live, "the beginning of a pass", adapted.group, begin, outside=None)


def _share_now(live: ComputationModel, adapted: _GroupModels) -> None:
    group = adapted.group
    found, different = _compare(live, adapted)
    if different:
        # A deleted model may still await garbage collection on one rank. All ranks find this out and retry.
        del found
        gc.collect()
        found, different = _compare(live, adapted)
    if different:
        _raise_buffer_mismatch(live, group, *found[different[0]])
    buffers = {id(buffer): buffer for _, named in found.values() for _, buffer in named}
    broadcast_tensors(live, buffers.values(), group.ranks[0], group)


_Found = dict[int, tuple[Module, list[tuple[str, Tensor]]]]


def _compare(live: ComputationModel, adapted: _GroupModels) -> tuple[_Found, list[int]]:
    """The models that every rank still has, with their buffers, and the ``number`` of those that differ."""
    alive = [(model.number, model.module()) for model in adapted.models if model.shares_buffers]
    found = {number: (module, _shared_buffers(module)) for number, module in alive if module is not None}
    digests = [(number, _digest(buffers)) for number, (_, buffers) in found.items()]
    rows = live.objects.gather((adapted.count, digests), adapted.group)
    counts = [count for count, _ in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatchError(
            f"The ranks have called auto_model different numbers of times (by rank: {counts}). Every rank "
            "must call auto_model equally often."
        )
    digests_by_rank = [dict(sent) for _, sent in rows]
    numbers = sorted(set(found).intersection(*digests_by_rank))
    different = [number for number in numbers if len({sent[number] for sent in digests_by_rank}) > 1]
    return {number: found[number] for number in numbers}, different


def _shared_buffers(module: Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` by name, without sharded buffers and without those that DDP must ignore."""
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


def _raise_buffer_mismatch(
    live: ComputationModel, group: Group, module: Module, buffers: Sequence[tuple[str, Tensor]]
) -> None:
    """Raise with the name of the first buffer that differs. Every rank of ``group`` calls this."""
    gathered: list[dict[str, str]] = live.objects.gather(_described(buffers), group)
    names = dict.fromkeys(name for described in gathered for name in described)
    differing = (name for name in names if len({described.get(name) for described in gathered}) > 1)
    first = next(differing, None)
    by_rank = describe_by_rank(group.ranks, [str(described.get(first or "")) for described in gathered])
    raise CollectiveMismatchError(
        f"The ranks have different buffers in a {type(module).__name__} and cannot all take the buffers of "
        + (
            f"rank {group.ranks[0]}: {first!r} is {by_rank}. "
            if first
            else f"rank {group.ranks[0]}: the buffers are in a different order. "
        )
        + "If each rank needs its own buffers, call auto_model(..., broadcast_buffers=False)."
    )
