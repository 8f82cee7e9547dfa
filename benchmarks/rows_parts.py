"""gather, scatter, reduce, reduce_scatter, all_to_all, lists and checkpoints, compared with plain torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ignite_dist as idist
from rows import OURS, RAW, Bar, Contenders, RankRow, Row, zeros

_MB = 1 << 20
_SIZES = {"1 MB": _MB, "16 MB": 16 * _MB}
_ALL_GATHER = "all_gather"

_reduce_scatter_raw = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rows() -> list[Row]:
    calls: dict[str, Callable[..., Contenders]] = {
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
    found: list[Row] = [
        RankRow(
            call,
            f"tensor, {name}, out=",
            bars=(Bar("ratio", 1.05, label=f"dist's {call}, reused buffer"),),
            contenders=partial(contenders, size),
        )
        for call, contenders in calls.items()
        for name, size in _SIZES.items()
    ]
    return [
        *found,
        RankRow(
            "gather",
            "tensor, 16 MB per rank",
            bars=(
                Bar("ratio", 0.6, reference=_ALL_GATHER, label="our all_gather"),
                Bar("ratio", 1, label="dist.gather"),
            ),
            contenders=_gather,
        ),
        RankRow(
            "gather",
            "small dict",
            bars=(Bar("ratio", 1, label="dist.gather_object"),),
            contenders=_gather_object,
        ),
        RankRow(
            "scatter",
            "small dicts",
            bars=(Bar("ratio", 1, label="dist.scatter_object_list"),),
            contenders=_scatter_objects,
        ),
        RankRow("reduce", "tensor, 16 MB", contenders=_reduce),
        RankRow(
            "all_reduce(inplace=True)",
            "a list of 200 tensors of 4 KB",
            bars=(Bar("ratio", 0.5, label="200 calls of dist.all_reduce"),),
            contenders=_list,
        ),
        RankRow(
            "save_checkpoint",
            "a model of 64 MB",
            unit="ms",
            bars=(Bar("ratio", 1.2, label="torch.save and fsync on rank 0, barrier"),),
            contenders=_checkpoint,
        ),
    ]


def _reduce_scatter(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    out = zeros(size // dist.get_world_size(), device)
    return {
        OURS: lambda: idist.reduce_scatter(tensor, out=out),
        RAW: lambda: _reduce_scatter_raw(out, tensor),
    }


def _all_to_all(size: int, device: torch.device) -> Contenders:
    tensor, out = zeros(size, device), zeros(size, device)
    return {
        OURS: lambda: idist.all_to_all(tensor, out=out),
        RAW: lambda: dist.all_to_all_single(out, tensor),
    }


def _gather(device: torch.device) -> Contenders:
    tensor, size = zeros(16 * _MB, device), dist.get_world_size()

    def raw() -> None:
        rows = torch.empty(size * len(tensor)) if dist.get_rank() == 0 else None
        dist.gather(tensor, list(rows.chunk(size)) if rows is not None else None)

    return {
        OURS: lambda: idist.gather(tensor),
        RAW: raw,
        _ALL_GATHER: lambda: idist.all_gather(tensor),
    }


def _gather_object(device: torch.device) -> Contenders:
    value = {"loss": 0.5, "n": 3}
    received: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    return {
        OURS: lambda: idist.gather(value),
        RAW: lambda: dist.gather_object(value, received),
    }


def _scatter_objects(device: torch.device) -> Contenders:
    is_first, received = dist.get_rank() == 0, [None]
    values = [{"files": [str(rank)]} for rank in range(dist.get_world_size())]
    return {
        OURS: lambda: idist.scatter(values if is_first else None),
        RAW: lambda: dist.scatter_object_list(received, values if is_first else None),
    }


def _reduce(device: torch.device) -> Contenders:
    tensor = zeros(16 * _MB, device)
    return {OURS: lambda: idist.reduce(tensor), RAW: lambda: dist.reduce(tensor, 0)}


def _list(device: torch.device) -> Contenders:
    tensors = [zeros(4 << 10, device) for _ in range(200)]
    return {
        OURS: lambda: idist.all_reduce(tensors, inplace=True),
        RAW: lambda: [dist.all_reduce(tensor) for tensor in tensors],
    }


def _checkpoint(device: torch.device) -> Contenders:
    folder = tempfile.TemporaryDirectory()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device=device) for _ in range(16)))

    def ours() -> None:
        idist.save_checkpoint(Path(folder.name) / "ours.pt", model=model)

    def raw() -> None:
        if dist.get_rank() == 0:
            with open(Path(folder.name) / "raw.pt", "wb") as file:
                torch.save(model.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    return {OURS: ours, RAW: raw}
