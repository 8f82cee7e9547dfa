"""Compare every collective of tensors with raw torch.distributed, by dtype and size: a search for cliffs.

    python benchmarks/grid.py                                   # 2 ranks, 2 seconds for each row
    python benchmarks/grid.py --ranks 2 4 --only "scatter|MAX"  # some rows on two and four ranks
    python benchmarks/grid.py --quick --dtypes float32 int64

The ranks are on this machine. "Over gloo" is ignite_dist without shared memory. A ratio above the limit is
marked: 1 x of raw, or 1.5 x for sums of narrow floats, which raw torch rounds at each rank.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ignite_dist as idist
from latency import OVER_GLOO, group_over_gloo
from rows import OURS, RAW, Contenders, all_gather_raw, launch, rank_processes
from timing import FULL, QUICK, Effort, time_in_turn

_DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")
_NARROW = ("float16", "bfloat16")
_SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}


class Point(NamedTuple):
    """A row: the median seconds of each contender. ``limit``: the allowed ratio to raw torch."""

    collective: str
    dtype: str
    size: str
    seconds: dict[str, float]
    limit: float


# --- in the ranks --------------------------------------------------------------------------------------


class _Calls(NamedTuple):
    """A collective: ``ours(group)``, and the same with raw torch."""

    name: str
    ours: Callable[[Any], Any]
    raw: Callable[[], Any]

    def contenders(self, over_gloo: Any) -> Contenders:
        return {OURS: lambda: self.ours(None), OVER_GLOO: lambda: self.ours(over_gloo), RAW: self.raw}


def _all_reduce(tensor: Tensor, op: str) -> _Calls:
    return _Calls(
        f"all_reduce {op}",
        lambda group: idist.all_reduce(tensor, op, group),
        lambda: dist.all_reduce(tensor, getattr(dist.ReduceOp, op)),
    )


def _collectives(tensor: Tensor) -> list[_Calls]:
    """The collectives of ``tensor``, which has the rows of all ranks where a rank has one row."""
    world_size, rank = idist.get_world_size(), idist.get_rank()
    rows, out = list(tensor.chunk(world_size)), torch.empty_like(tensor)
    own, row = rows[rank], torch.empty_like(rows[rank])
    exchange = dist.all_to_all_single
    sent, received = (rows, list(out.chunk(world_size))) if rank == 0 else (None, None)
    scatter_rows = getattr(
        dist, "reduce_scatter_single", dist.reduce_scatter_tensor
    )  # the name in newer torch
    return [
        _all_reduce(tensor, "SUM"),
        _all_reduce(tensor, "MAX"),
        _Calls("reduce SUM", lambda g: idist.reduce(tensor, group=g), lambda: dist.reduce(tensor, 0)),
        _Calls(
            "reduce_scatter SUM",
            lambda g: idist.reduce_scatter(tensor, group=g, out=row),
            lambda: scatter_rows(row, tensor),
        ),
        _Calls("all_gather", lambda g: idist.all_gather(own, g, out), lambda: all_gather_raw(out, own)),
        _Calls(
            "all_to_all",
            lambda g: idist.all_to_all(tensor, g, out),
            lambda: exchange(out, tensor),
        ),
        _Calls("broadcast", lambda g: idist.broadcast(tensor, group=g), lambda: dist.broadcast(tensor, 0)),
        _Calls("gather", lambda g: idist.gather(own, group=g), lambda: dist.gather(own, received)),
        _Calls("scatter", lambda g: idist.scatter(sent, group=g), lambda: dist.scatter(row, sent)),
    ]


def _measure(local_rank: int, dtypes: list[str], only: str, effort: Effort) -> list[Point]:
    torch.set_num_threads(1)
    idist.barrier()
    group, processes = group_over_gloo(), rank_processes(torch.device("cpu"))
    points = []
    for dtype in dtypes:
        for size, num_bytes in _SIZES.items():
            # Zeros, because their sums stay zeros.
            tensor = torch.full(
                (num_bytes // getattr(torch, dtype).itemsize,), 0, dtype=getattr(torch, dtype)
            )
            for calls in _collectives(tensor):
                if not re.search(only, f"{calls.name} {dtype} {size}"):
                    continue
                samples = time_in_turn(calls.contenders(group), effort, processes)
                medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
                limit = 1.5 if dtype in _NARROW and calls.name.endswith("SUM") else 1.0
                points.append(Point(calls.name, dtype, size, medians, limit))
    return points


# --- the table -----------------------------------------------------------------------------------------


def _line(point: Point) -> str:
    raw = point.seconds[RAW]
    ratios = [point.seconds[name] / raw for name in (OURS, OVER_GLOO)]
    marks = "".join(f"{ratio:9.2f} x{'!' if ratio > point.limit else ' '}" for ratio in ratios)
    return f"{point.collective:20} {point.dtype:9} {point.size:>6} {raw * 1e6:10,.0f} us{marks}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="a table for each")
    parser.add_argument("--dtypes", nargs="+", choices=(*_DTYPES, "float16", "int32"), default=_DTYPES)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows like 'scatter.*1 MB'")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, more noise")
    arguments = parser.parse_args()
    effort = (QUICK if arguments.quick else FULL)._replace(row_seconds=0.5 if arguments.quick else 2.0)
    for ranks in arguments.ranks:
        points = launch("gloo", ranks, _measure, arguments.dtypes, arguments.only, effort)[0]
        if not points:
            parser.error(f"--only {arguments.only!r} matches no row")
        print(f"\n{ranks} ranks{'':34}raw{'ours':>13}{'over gloo':>13}")
        for point in sorted(points, key=lambda point: point.collective):
            print(_line(point))
        slow = sum(point.seconds[OURS] > point.limit * point.seconds[RAW] for point in points)
        over_gloo = sum(point.seconds[OVER_GLOO] > point.limit * point.seconds[RAW] for point in points)
        print(f"of {len(points)} rows {slow} are above their limit, {over_gloo} over gloo")


if __name__ == "__main__":
    main()
