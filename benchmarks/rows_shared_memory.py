"""Collectives over shared memory, compared with torch.distributed over gloo: 2 and 4 ranks of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import ignite_dist as idist
from rows import OURS, RAW, Bar, Contenders, LauncherRow, RankRow, Row, zeros
from rows_collectives import GATHERS, gather_dict, reduce_numbers, reduce_tensor, reduce_under_way
from timing import Effort, Samples

_RANKS = (2, 4)
_KB, _MB = 1 << 10, 1 << 20


class _Line(NamedTuple):
    """A call with its bars.

    Attributes:
        section: the collective.
        name: its arguments and a comma; empty if it has none.
        contenders: those of `RankRow`.
        label: the reference.
        limits: the bar for each of `_RANKS`.
    """

    section: str
    name: str
    contenders: Callable[[torch.device], Contenders]
    label: str
    limits: tuple[float, float]


def rows() -> list[Row]:
    collectives: list[Row] = [
        RankRow(
            line.section,
            f"{line.name}{ranks} ranks",
            bars=(Bar("ratio", limit, label=line.label),),
            contenders=line.contenders,
            ranks=ranks,
        )
        for line in _lines()
        for ranks, limit in zip(_RANKS, line.limits, strict=True)
    ]
    bars = (Bar("value", 5),)
    return [
        *collectives,
        LauncherRow("barrier", "CPU time of a rank that waits for one second", "ms", bars, measure=_wait),
    ]


def _lines() -> Iterator[_Line]:
    for name, size, limits in (
        ("4 B", 4, (0.12, 0.06)),
        ("1 KB", _KB, (0.12, 0.06)),
        ("8 KB", 8 * _KB, (0.12, 0.06)),
        ("64 KB", 64 * _KB, (0.15, 0.1)),
        ("1 MB", _MB, (0.35, 0.2)),
        ("16 MB", 16 * _MB, (0.7, 0.9)),
    ):
        contenders = partial(reduce_tensor, size)
        yield _Line("all_reduce", f"tensor, {name}, ", contenders, "dist.all_reduce", limits)
    for name, size, limits in (
        ("64 KB", 64 * _KB, (0.15, 0.1)),
        ("1 MB", _MB, (0.4, 0.3)),
        ("16 MB", 16 * _MB, (0.6, 0.8)),
    ):
        for suffix, (gather, label) in GATHERS.items():
            title, contenders = f"tensor, {name} per rank{suffix}, ", partial(gather, size)
            yield _Line("all_gather", title, contenders, label, limits)
    for name, size, limits in (("64 KB", 64 * _KB, (0.3, 0.2)), ("16 MB", 16 * _MB, (0.7, 0.9))):
        contenders = partial(broadcast_tensor, size)
        yield _Line("broadcast", f"tensor, {name}, ", contenders, "dist.broadcast", limits)
    for name, size in (("4 KB", 4 * _KB), ("1 MB", _MB), ("16 MB", 16 * _MB)):
        yield _Line("all_reduce", f"MAX, {name}, ", partial(_maximum, size), "dist.all_reduce", (1.0, 1.0))
        for dtype in (torch.float32, torch.bfloat16):
            title, contenders = f"{dtype}, {name}, ".replace("torch.", ""), partial(_scatter, size, dtype)
            yield _Line("reduce_scatter", title, contenders, _RAW_SCATTER.__name__, (1.0, 1.0))
    label = "dist.all_reduce(async_op=True)"
    for name, count, size in (("4 B", 1, 4), ("16 MB", 1, 16 * _MB), ("16 of 64 KB under way", 16, 64 * _KB)):
        contenders = partial(reduce_under_way, count, size)
        yield _Line("all_reduce(async_op=True)", f"tensor, {name}, ", contenders, label, (1.0, 1.0))
    yield _Line("barrier", "", _barrier, "dist.barrier", (0.15, 0.1))
    label = "dist.all_reduce, packed by hand"
    yield _Line("all_reduce", "dict of 20 ints and floats, ", reduce_numbers, label, (0.15, 0.1))
    yield _Line("all_gather", "small dict, ", gather_dict, "dist.all_gather_object", (0.06, 0.05))


def broadcast_tensor(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    return {OURS: lambda: idist.broadcast(tensor), RAW: lambda: dist.broadcast(tensor, 0)}


def _maximum(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    return {
        OURS: lambda: idist.all_reduce(tensor, "MAX"),
        RAW: lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
    }


# The name in newer torch.
_RAW_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _scatter(size: int, dtype: torch.dtype, device: torch.device) -> Contenders:
    """``size`` bytes per rank before the call."""
    rows = zeros(size, device).view(dtype)
    out = rows.new_empty(len(rows) // idist.get_world_size())
    return {OURS: lambda: idist.reduce_scatter(rows, out=out), RAW: lambda: _RAW_SCATTER(out, rows)}


def _barrier(device: torch.device) -> Contenders:
    return {OURS: idist.barrier, RAW: dist.barrier}


def _wait(effort: Effort) -> Samples:
    seconds = [idist.spawn("gloo", _wait_for_rank_1, nproc_per_node=2)[0] for _ in range(effort.repeats)]
    return {name: [sample[name] for sample in seconds] for name in (OURS, RAW)}


def _wait_for_rank_1(local_rank: int) -> dict[str, float]:
    """Processor time of rank 0 in a barrier that rank 1 calls one second later, in seconds."""
    measured = {}
    for name, barrier in _barrier(torch.device("cpu")).items():
        barrier()
        if local_rank == 1:
            time.sleep(1)
        start = time.process_time()
        barrier()
        measured[name] = time.process_time() - start
    return measured
