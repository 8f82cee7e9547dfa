"""Notice parameters that should be equal on all ranks and are not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ignite_dist.collectives.coordination import same_outcome
from ignite_dist.comp_models import ComputationModel
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.internals.ranks import describe_ranks
from ignite_dist.training.comparisons import trained_together
from ignite_dist.training.wrapped_models import unwrap_model

_SAMPLES = 64  # about, of each parameter: what trains ranks apart changes most values of some parameter

_Ranks = tuple[int, ...]


class Samples:
    """Some values of the parameters that the ranks of a group train together.

    Args:
        live: the context.
        models: the models by name, or modules that contain models of ``auto_model``.

    Attributes:
        digests: one for the ranks of each group. They can be sent.
    """

    def __init__(self, live: ComputationModel, models: Mapping[str, Module]) -> None:
        self._by_group: dict[_Ranks, dict[str, bytes]] = {}
        for prefix, model in models.items():
            names = {
                id(one): f"{prefix}.{name}" if prefix else name
                for name, one in unwrap_model(model).named_parameters()
            }
            for group, parameters in trained_together(live, model):
                named = {names[id(one)]: one for one in parameters if id(one) in names and _is_whole(one)}
                self._by_group.setdefault(group.ranks, {}).update(_taken_from(named))
        self.digests = {ranks: _digest(b"".join(values.values())) for ranks, values in self._by_group.items()}

    def warn_if_different(
        self, live: ComputationModel, function: str, digests_by_rank: Sequence[dict[_Ranks, str]]
    ) -> None:
        """Warn on rank 0, with the name of the first parameter that differs. Every rank calls this."""
        if not any(_different(digests_by_rank, ranks, ranks) for row in digests_by_rank for ranks in row):
            return
        names = {
            (ranks, name): _digest(value)
            for ranks, values in self._by_group.items()
            for name, value in values.items()
        }
        rows = same_outcome(live, lambda: names, function)
        found = ((key, _different(rows, key[0], key)) for row in rows for key in row)
        text = next((_text(key[1], different, function) for key, different in found if different), "")
        # Every rank waits for rank 0, where a filter may make an error of the warning.
        same_outcome(live, lambda: warn_user(text) if text and live.get_rank() == 0 else None, function)


def _different(rows: Sequence[Mapping[Any, str]], ranks: _Ranks, key: Any) -> list[int]:
    """The first of ``ranks`` that has the key, and those with another digest; empty if there are none."""
    having = [rank for rank in ranks if key in rows[rank]]
    others = [rank for rank in having if rows[rank][key] != rows[having[0]][key]]
    return [having[0], *others] if others else []


def _text(name: str, different: list[int], function: str) -> str:
    first, *others = different
    return (
        f"The parameters of {describe_ranks(others)} differ from those of rank {first}, for example "
        f"{name!r}. {function} saves those of rank 0. Usual causes are a step, a learning rate or a clipping "
        "that depends on a value of each rank, and other hardware. In local SGD, save after "
        "idist.average_parameters."
    )


def _is_whole(parameter: Tensor) -> bool:
    """True for a plain tensor of this rank: no shard, and no class of another library."""
    return (
        type(parameter) is Parameter
        and type(parameter.data) is Tensor
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and parameter.itemsize > 1
        and parameter.numel() > 0
    )


def _taken_from(named: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Bytes of evenly spaced values, by name: one copy to the CPU for all tensors of a dtype and a device."""
    by_kind: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        step = tensor.numel() // _SAMPLES | 1  # odd, because an even one may stay in one column
        values = tensor.detach().reshape(-1)[::step].clone()  # reshape may have copied it
        by_kind.setdefault((tensor.dtype, tensor.device), {})[name] = values
    found = {}
    for samples in by_kind.values():
        joined = torch.cat(list(samples.values())).cpu()
        parts = torch.split(joined, [len(one) for one in samples.values()])
        for name, part in zip(samples, parts, strict=True):
            found[name] = bytes(part.view(torch.uint8).tolist())
    return {name: found[name] for name in named}


def _digest(values: bytes) -> str:
    return hashlib.sha1(values, usedforsecurity=False).hexdigest()
