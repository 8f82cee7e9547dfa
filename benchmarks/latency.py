"""Measure collectives by size over shared memory, over gloo and with raw torch.distributed. Draw a chart.

    python benchmarks/latency.py                       # 4 minutes on two idle cores
    python benchmarks/latency.py --quick --out build   # 30 seconds, more noise; files in another folder
    python benchmarks/latency.py --draw FILE.json      # draws the chart of measured results again

Writes benchmarks/results/latency-*.json and docs/latency.svg. The ranks are on this machine. "Over gloo" is
ignite_dist with IGNITE_DIST_SHARED_MEMORY=0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory import opening as shared_memory
from ignite_dist.context.live import current_model
from rows import OURS, RAW, Contenders, all_gather_raw, launch, rank_processes, zeros
from timing import FULL, QUICK, Effort, time_in_turn

OVER_GLOO = "over gloo"
_SIZES = [4 << (2 * power) for power in range(12)]  # 4 B, 16 B, ..., 16 MB
_ROOT = Path(__file__).parent.parent
Curves = dict[str, dict[str, list[float]]]
"""Medians in seconds, one for each size: by collective and contender."""


# --- in the ranks --------------------------------------------------------------------------------------


def group_over_gloo() -> Any:
    """A group of all ranks that does not use shared memory."""
    group = idist.new_group(range(idist.get_world_size()))
    # The ranks decide in the group's first collective.
    before = os.environ.get(shared_memory.VARIABLE)
    os.environ[shared_memory.VARIABLE] = "0"
    try:
        idist.barrier(group=group)
    finally:
        os.environ.pop(shared_memory.VARIABLE)
        os.environ.update({} if before is None else {shared_memory.VARIABLE: before})
    model = current_model()
    assert model.transport.shares_memory(model.groups.world)
    assert not model.transport.shares_memory(model.groups.resolve(group))
    return group


def _all_reduce(size: int, group: Any) -> Contenders:
    tensor = zeros(size, torch.device("cpu"))
    return {
        OURS: lambda: idist.all_reduce(tensor),
        OVER_GLOO: lambda: idist.all_reduce(tensor, group=group),
        RAW: lambda: dist.all_reduce(tensor),
    }


def _all_gather(size: int, group: Any) -> Contenders:
    tensor = zeros(size, torch.device("cpu"))
    out = zeros(size * idist.get_world_size(), torch.device("cpu"))
    return {
        OURS: lambda: idist.all_gather(tensor, out=out),
        OVER_GLOO: lambda: idist.all_gather(tensor, out=out, group=group),
        RAW: lambda: all_gather_raw(out, tensor),
    }


def _broadcast(size: int, group: Any) -> Contenders:
    tensor = zeros(size, torch.device("cpu"))
    return {
        OURS: lambda: idist.broadcast(tensor),
        OVER_GLOO: lambda: idist.broadcast(tensor, group=group),
        RAW: lambda: dist.broadcast(tensor, 0),
    }


_COLLECTIVES: dict[str, Callable[[int, Any], Contenders]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}


def _measure(local_rank: int, sizes: list[int], effort: Effort) -> Curves:
    torch.set_num_threads(1)
    idist.barrier()
    group, processes = group_over_gloo(), rank_processes(torch.device("cpu"))
    curves: Curves = {}
    for collective, contenders in _COLLECTIVES.items():
        curves[collective] = {OURS: [], OVER_GLOO: [], RAW: []}
        for size in sizes:
            samples = time_in_turn(contenders(size, group), effort, processes)
            for name, seconds in samples.items():
                curves[collective][name].append(statistics.median(seconds))
        if local_rank == 0:
            print(f"  {collective}", flush=True)
    return curves


# --- the chart -----------------------------------------------------------------------------------------


def draw(document: dict[str, Any], path: Path) -> None:
    """Save a chart: a row of panels for each number of ranks, a column for each collective."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ignite_dist"  # the same results give the same file
    worlds, sizes, about = document["worlds"], document["sizes"], document["machine"]
    canvas = Figure(figsize=(11, 1 + 3 * len(worlds)), layout="constrained")
    canvas.suptitle(
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {about['date'][:10]}", fontsize=9
    )
    panels = canvas.subplots(len(worlds), len(_COLLECTIVES), squeeze=False, sharex=True, sharey="row")
    for row, (ranks, curves) in zip(panels, worlds.items(), strict=True):
        for panel, (collective, by_contender) in zip(row, curves.items(), strict=True):
            _draw_panel(panel, f"{collective}, {ranks} ranks", sizes, by_contender)
        row[0].set_ylabel("time per call, us")
    for panel in panels[-1]:
        panel.set_xlabel("bytes per rank")
    canvas.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    canvas.savefig(path, metadata=metadata)


def _draw_panel(panel: Any, title: str, sizes: list[int], by_contender: dict[str, list[float]]) -> None:
    for name, label, style in (
        (OURS, "ignite_dist", "o-"),
        (OVER_GLOO, "ignite_dist, IGNITE_DIST_SHARED_MEMORY=0", "s:"),
        (RAW, "torch.distributed, gloo", "x--"),
    ):
        panel.plot(sizes, [seconds * 1e6 for seconds in by_contender[name]], style, label=label, markersize=4)
    panel.set_title(title, fontsize=10)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([4, 1 << 10, 1 << 20, 1 << 24], ["4 B", "1 KB", "1 MB", "16 MB"])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.3)


def measure(all_ranks: list[int], sizes: list[int], effort: Effort) -> dict[str, Any]:
    """The document that `draw` takes."""
    import machine  # here, because workers import this module too

    about, worlds = machine.describe("cpu"), {}
    for ranks in all_ranks:
        print(f"{ranks} ranks", flush=True)
        worlds[str(ranks)] = launch("gloo", ranks, _measure, sizes, effort)[0]
    return {"machine": about, "sizes": sizes, "worlds": worlds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="a row of panels for each")
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="in bytes per rank")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, more noise")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw these results, measure nothing")
    parser.add_argument("--out", type=Path, help="folder for the files (benchmarks/results and docs)")
    arguments = parser.parse_args()
    results, charts = arguments.out or _ROOT / "benchmarks/results", arguments.out or _ROOT / "docs"

    if arguments.draw is not None:
        document = json.loads(arguments.draw.read_text())
    elif reason := shared_memory.unavailable_reason():
        parser.error(f"The ranks of this machine cannot share memory: {reason}.")
    else:
        document = measure(arguments.ranks, arguments.sizes, QUICK if arguments.quick else FULL)
        results.mkdir(parents=True, exist_ok=True)
        written = results / f"latency-{document['machine']['tag']}.json"
        written.write_text(json.dumps(document, indent=1) + "\n")
        print(os.path.relpath(written))
    charts.mkdir(parents=True, exist_ok=True)
    draw(document, charts / "latency.svg")
    print(os.path.relpath(charts / "latency.svg"))


if __name__ == "__main__":
    main()
