"""Notice parameters that should be equal on all ranks and are not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ignite_dist.call_sites import warn_user
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel
from ignite_dist.coordination import same_outcome
from ignite_dist.training.exact_passes import find_group
from ignite_dist.values.ranks import describe_ranks

_SAMPLES = 64  # of each parameter: what makes ranks differ changes most values of a parameter

_Ranks = tuple[int, ...]


class Samples:
    """Some values of each parameter that the ranks of a group train together.

    Args:
        live: the context.
        models: the models by name; those that ``auto_model`` does not know have no samples.

    Attributes:
        digests: one digest for the ranks of each group. It can be sent.
    """

    def __init__(self, live: ComputationModel, models: Mapping[str, Module]) -> None:
        self._by_group: dict[_Ranks, dict[str, bytes]] = {}
        for prefix, model in models.items():
            named = {name: one for name, one in model.named_parameters() if _is_whole(one)}
            group = find_group(live, named.values())
            if group is not None and len(group.ranks) > 1:
                taken = _taken_from(named)
                values = {f"{prefix}.{name}" if prefix else name: one for name, one in taken.items()}
                self._by_group.setdefault(group.ranks, {}).update(values)
        self.digests = {ranks: _digest(b"".join(values.values())) for ranks, values in self._by_group.items()}

    def warn_if_different(
        self, live: ComputationModel, function: str, digests_by_rank: Sequence[dict[_Ranks, str]]
    ) -> None:
        """Warn on rank 0, with the name of the first parameter that differs. Every rank calls this."""
        if not any(_different(ranks, digests_by_rank) for found in digests_by_rank for ranks in found):
            return
        names = {
            (ranks, name): _digest(value)
            for ranks, values in self._by_group.items()
            for name, value in values.items()
        }
        rows = same_outcome(live, lambda: names, function)
        different = [key for row in rows for key in row if _different(key[0], rows, key)]
        if live.get_rank() == 0 and different:
            (first, *others), name = different[0]
            own = rows[first].get(different[0])
            others = [rank for rank in others if rows[rank].get(different[0]) != own]
            warn_user(
                f"{function} saves the parameters of rank {first}, but those of {describe_ranks(others)} "
                f"differ, for example {name!r}. Something trains them apart: a step, a learning rate or a "
                "clipping that depends on a value of each rank, for example. "
                "idist.average_parameters(model) makes them equal."
            )


def _different(ranks: _Ranks, rows: Sequence[Mapping[Any, str]], key: Any = None) -> bool:
    return len({rows[rank].get(ranks if key is None else key) for rank in ranks}) > 1


def _is_whole(parameter: Tensor) -> bool:
    return not (is_sharded(parameter) or is_lazy(parameter) or parameter.is_meta) and (
        parameter.layout is torch.strided and parameter.numel() > 0
    )


def _taken_from(named: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Bytes of evenly spaced values, by name: one copy to the CPU for all tensors of a dtype and a device."""
    by_kind: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]
        by_kind.setdefault((tensor.dtype, tensor.device), {})[name] = values
    found = {}
    for samples in by_kind.values():
        joined = torch.cat(list(samples.values())).cpu()
        parts = torch.split(joined, [len(one) for one in samples.values()])
        for name, part in zip(samples, parts, strict=True):
            found[name] = bytes(part.view(torch.uint8).tolist())
    return {name: found[name] for name in named}


def _digest(values: bytes) -> str:
    return hashlib.sha1(values, usedforsecurity=False).hexdigest()[:8]
