"""Notice parameters that should be equal on all ranks and are not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ignite_dist.call_sites import warn_user
from ignite_dist.comp_models import ComputationModel
from ignite_dist.coordination import same_outcome
from ignite_dist.training.exact_passes import parameters_by_group
from ignite_dist.training.gradient_sync import optimizers_of
from ignite_dist.training.wrapped_models import unwrap_model
from ignite_dist.values.ranks import describe_ranks

_SAMPLES = 64  # of each parameter: what trains ranks apart changes most values of some parameter

_Ranks = tuple[int, ...]


class Samples:
    """Some values of each parameter that the ranks of a group train together.

    Args:
        live: the context.
        models: the models by name, or modules that contain models of ``auto_model``.

    Attributes:
        digests: one digest for the ranks of each group. It can be sent.
    """

    def __init__(self, live: ComputationModel, models: Mapping[str, Module]) -> None:
        names = {
            id(one): f"{prefix}.{name}" if prefix else name
            for prefix, model in models.items()
            for name, one in unwrap_model(model).named_parameters()
        }
        self._by_group: dict[_Ranks, dict[str, bytes]] = {}
        for group, parameters in parameters_by_group(live) if _all_ranks_train(live, models) else ():
            named = {names[id(one)]: one for one in parameters if id(one) in names and _is_whole(one)}
            if named and len(group.ranks) > 1:
                self._by_group[group.ranks] = _taken_from(named)
        self.digests = {ranks: _digest(b"".join(values.values())) for ranks, values in self._by_group.items()}

    def warn_if_different(
        self, live: ComputationModel, function: str, digests_by_rank: Sequence[dict[_Ranks, str]]
    ) -> None:
        """Warn on rank 0, with the name of the first parameter that differs. Every rank calls this."""
        if not any(_different(ranks, digests_by_rank, ranks) for found in digests_by_rank for ranks in found):
            return
        names = {
            (ranks, name): _digest(value)
            for ranks, values in self._by_group.items()
            for name, value in values.items()
        }
        rows = same_outcome(live, lambda: names, function)
        different = [key for row in rows for key in row if _different(key[0], rows, key)]

        def warn() -> None:
            if live.get_rank() == 0 and different:
                (first, *others), name = different[0]
                own = rows[first].get(different[0])
                others = [rank for rank in others if rows[rank].get(different[0]) != own]
                warn_user(
                    f"The parameters of {describe_ranks(others)} differ from those of rank {first}, for "
                    f"example {name!r}, and {function} saves those of rank 0. Something trains them apart: a "
                    "step, a learning rate or a clipping that depends on a value of each rank, for example. "
                    "In local SGD, save after idist.average_parameters."
                )

        same_outcome(live, warn, function)  # a filter may make an error of the warning


def _different(ranks: _Ranks, rows: Sequence[Mapping[Any, str]], key: Any) -> bool:
    return len({rows[rank].get(key) for rank in ranks}) > 1


def _all_ranks_train(live: ComputationModel, models: Mapping[str, Module]) -> bool:
    """False if an optimizer of Horovod averages over some ranks only, which ``auto_model`` cannot know."""
    if not live.training.shares_optimizers:
        return True
    with suppress(ValueError):  # parts of a model are averaged over different ranks
        groups = [
            live.training.gradient_group(one, optimizers_of(live, one, None)) for one in models.values()
        ]
        return all(len(group.ranks) == live.get_world_size() for group in groups)
    return False


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
        step = max(1, tensor.numel() // _SAMPLES) | 1  # odd, to hit all columns of a matrix
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
    return hashlib.sha1(values, usedforsecurity=False).hexdigest()[:8]
