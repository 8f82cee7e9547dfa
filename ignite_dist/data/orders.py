"""What all ranks that share a data set must agree on: the data, the batches, and the seed of their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler, Subset, TensorDataset

from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.samplers import draw_seed
from ignite_dist.training.seeding import latest_seed
from ignite_dist.values import meshes
from ignite_dist.values.serialization import as_bytes

_KIND = "ignite_dist.loader"

# What a checkpoint compares: the rest may change between two runs.
OF_THE_DATA = ("number of samples", "indices", "sampler")


def is_random(sampler: Any, shuffle: Any) -> bool:
    """True if the order of a loader depends on random numbers, as far as one can see."""
    return bool(shuffle) if sampler is None else type(sampler) is not SequentialSampler


def facts_of(dataset: Any, sampler: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Plain values by name, equal on all ranks whose loaders draw the same batches. Draws no item."""
    indices, contents = _digests(dataset)
    return {
        "data set": type(dataset).__name__,
        "number of samples": len(dataset) if _has_length(dataset) else None,
        "indices": indices,
        "contents": contents,
        "sampler": None if sampler is None else type(sampler).__name__,
        "batch_size": kwargs.get("batch_size", 1),
        "shuffle": bool(kwargs.get("shuffle")),
        "drop_last": bool(kwargs.get("drop_last")),
    }


def agreed_seed(
    model: ComputationModel,
    group: Any,
    seed: int | None,
    facts: dict[str, Any],
    is_random: bool,
    sampler: Any,
    generator: torch.Generator | None,
) -> int | None:
    """The seed of the order, None if it is not random. Every rank that shares the data calls this.

    Args:
        model: the model of the context.
        group: the ``group=`` of ``auto_dataloader``.
        seed: the ``seed=`` of ``auto_dataloader``.
        facts: the results of :func:`facts_of`.
        is_random: whether a seed is needed.
        sampler: may have a generator, from which the seed is drawn.
        generator: the loader's.

    Raises:
        CollectiveMismatchError: the ranks have different facts, or some make another call.
    """
    members = _members(model, group)
    drawn = None
    if is_random and seed is None:
        # Ranks of other groups draw the same samples, and do not take part here.
        has_all_ranks = members is not None and len(members.ranks) == model.get_world_size()
        drawn = draw_seed(sampler, generator) if has_all_ranks or generator is not None else latest_seed()
    if members is None or len(members.ranks) == 1:
        return drawn if seed is None else seed
    row = _KIND, seed, drawn, facts
    rows = perform(
        model,
        "auto_dataloader",
        members,
        lambda _: Steps(lambda: model.objects.gather(row, members)),
        outside=[row],
    )
    _compare(members, rows)
    return rows[0][2] if seed is None else seed


def _members(model: ComputationModel, group: Any) -> Group | None:
    """The ranks that compare; None if this would need other calls than those of the ranks that have the data.

    Without ``group`` these are all ranks, in a mesh too: the ranks of a tensor-parallel group draw the same.
    """
    if group is None:
        mesh = meshes.current()
        return model.groups.world if mesh is None or mesh.mesh.numel() == model.get_world_size() else None
    if isinstance(group, (list, tuple, range)) or model.transport.groups_need_all_ranks:
        return None
    return model.groups.resolve(group)


def _compare(members: Group, rows: Sequence[Any]) -> None:
    if not all(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError(
            "Some ranks call auto_dataloader, and other ranks make another call. All ranks that share the "
            "data make the loader: move auto_dataloader out of `if idist.get_rank() == 0:`."
        )
    named = [{"seed": seed, **facts} for _, seed, _, facts in rows]
    different = [name for name in named[0] if len({repr(one.get(name)) for one in named}) > 1]
    if not different:
        return
    name = different[0]
    by_rank = ", ".join(
        f"rank {rank}: {one.get(name)!r}" for rank, one in zip(members.ranks, named, strict=True)
    )
    raise CollectiveMismatchError(
        f"auto_dataloader needs the same data set and settings on every rank, but the ranks differ in "
        f"{', '.join(different)}. By rank, {name!r} is: {by_rank}. {_ADVICE.get(name, '')}".rstrip()
    )


_ADVICE = {
    "indices": "A random_split draws other indices on ranks with other seeds: give it "
    "generator=torch.Generator().manual_seed(0).",
    "contents": "Pass the whole data set on every rank, not a share of it (of idist.split, say): the loader "
    "splits it. For each rank's own data use torch's DataLoader. Random data needs the same seed on every "
    "rank: seed_everything(0, per_rank=False).",
    "number of samples": "Pass the whole data set on every rank: the loader splits it. For each rank's own "
    "data use torch's DataLoader.",
}


def _has_length(dataset: Any) -> bool:
    try:
        return isinstance(dataset, Sized) and len(dataset) >= 0
    except TypeError:  # a class with a __len__ that raises
        return False


def _digests(dataset: Dataset[Any] | Any) -> tuple[str | None, str | None]:
    """Digests of the indices of subsets, and of some items of data that is in memory."""
    indices = []
    while isinstance(dataset, Subset):
        indices.append(_digest(list(map(int, dataset.indices))))
        dataset = dataset.dataset
    if isinstance(dataset, range):
        return _joined(indices), repr(dataset)
    if isinstance(dataset, TensorDataset):
        return _joined(indices), _digest([_ends(tensor) for tensor in dataset.tensors])
    if isinstance(dataset, (list, tuple, Tensor)) or type(dataset).__module__ == "numpy":
        return _joined(indices), _digest(_ends(dataset))
    return _joined(indices), None


def _joined(digests: list[str]) -> str | None:
    return "/".join(digests) or None


def _ends(items: Any) -> list[Any]:
    size = len(items)
    return [items[number] for number in sorted({0, size // 2, size - 1})] if size else []


def _digest(value: Any) -> str:
    hashed = hashlib.sha1(usedforsecurity=False)
    _update(hashed, value)
    return hashed.hexdigest()[:12]


def _update(hashed: Any, value: Any) -> None:
    """Add plain values to a hash, and the types of others."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if not value.is_quantized:
            hashed.update(bytes(as_bytes(value.detach().cpu().contiguous()).tolist()))  # without numpy
    elif isinstance(value, (list, tuple)):
        hashed.update(f"{len(value)}".encode())
        for one in value:
            _update(hashed, one)
    elif type(value) in (int, float, bool, str, bytes, type(None), complex):
        hashed.update(repr(value).encode())
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        hashed.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    else:
        hashed.update(type(value).__qualname__.encode())
