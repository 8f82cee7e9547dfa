"""Some values of each parameter, by which ranks notice that parameters differ that should be equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ignite_dist.internals.ranks import describe_ranks

_SAMPLES = 64  # about, of each parameter: what trains ranks apart changes most values of some parameter


def is_whole(parameter: Tensor) -> bool:
    """True for a plain tensor of this rank: no shard, and no class of another library."""
    return (
        type(parameter) is Parameter
        and type(parameter.data) is Tensor
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and parameter.itemsize > 1
        and parameter.numel() > 0
    )


def taken_from(named: Mapping[str, Tensor]) -> dict[str, bytes]:
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


def digest_of(values: bytes) -> str:
    """A short text that differs if the values do."""
    return hashlib.sha1(values, usedforsecurity=False).hexdigest()


def describe_difference(name: str, digests: Mapping[int, str]) -> str:
    """A sentence about the ranks whose digest of the parameter ``name`` differs; empty if all are equal."""
    first = next(iter(digests), -1)
    others = [rank for rank, digest in digests.items() if digest != digests[first]]
    if not others:
        return ""
    return (
        f"The parameters of {describe_ranks(others)} differ from those of rank {first}, for example {name!r}."
    )
