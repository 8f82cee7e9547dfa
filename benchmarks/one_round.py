"""Find the largest size at which a gather in one round beats gloo's ring: a constant of the native backend.

    python benchmarks/one_round.py --ranks 2 4 8

For a sum of float32 the script times raw `dist.all_reduce` (a ring of 2 (n - 1) steps) against two ways to
gather all ranks' values and add them up in rank order: an all-to-all exchange (one step) and gloo's
all-gather (a ring of n - 1 steps). The columns are medians of paired ratios: below 1, gathering is faster.
Every call allocates its memory.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist

import ignite_dist as idist
from rows import all_gather_raw, rank_processes
from timing import QUICK, Samples, time_in_turn

_SIZES = [4 << (2 * power) for power in range(10)]  # 4 B, 16 B, ..., 1 MB


def _measure(local_rank: int, sizes: list[int], seconds: float) -> list[Samples]:
    torch.set_num_threads(1)
    return [_measure_size(size, seconds) for size in sizes]


def _measure_size(size: int, seconds: float) -> Samples:
    world_size = dist.get_world_size()
    tensor = torch.full((size // 4,), 0.0)

    def add_up(rows: torch.Tensor) -> None:
        first, second, *others = rows.view(world_size, -1).unbind()
        torch.add(first, second, out=tensor)
        for row in others:
            tensor.add_(row)

    def exchange() -> None:
        rows = torch.empty(world_size * len(tensor))
        dist.all_to_all_single(rows, tensor.repeat(world_size))
        add_up(rows)

    def gather() -> None:
        rows = torch.empty(world_size * len(tensor))
        all_gather_raw(rows, tensor)
        add_up(rows)

    contenders = {"all_reduce": lambda: dist.all_reduce(tensor), "exchange": exchange, "gather": gather}
    return time_in_turn(contenders, QUICK._replace(row_seconds=seconds), rank_processes(torch.device("cpu")))


def _ratio(samples: Samples, name: str) -> float:
    return statistics.median(
        ours / raw for ours, raw in zip(samples[name], samples["all_reduce"], strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size and number of ranks")
    arguments = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    table = Table(
        "ranks", "bytes per rank", "bytes in all", "all_reduce (us)", "exchange + sum", "gather + sum"
    )
    for ranks in arguments.ranks:
        measured = idist.spawn("gloo", _measure, args=(_SIZES, arguments.seconds), nproc_per_node=ranks)[0]
        for size, samples in zip(_SIZES, measured, strict=True):
            table.add_row(
                str(ranks),
                str(size),
                str(ranks * size),
                f"{statistics.median(samples['all_reduce']) * 1e6:.0f}",
                f"{_ratio(samples, 'exchange'):.2f} x",
                f"{_ratio(samples, 'gather'):.2f} x",
            )
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
