"""The chart of ``bench``: latency and bus bandwidth by size, of this package and of torch.distributed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ignite_dist.cli.bench import BenchReport, Figure
from ignite_dist.cli.jobs import num_processes


def check_file(path: str) -> None:
    """Raise if a chart cannot be saved. Commands call this before their work.

    Raises:
        ValueError: matplotlib is missing or does not support the format, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--save needs matplotlib, which is not installed: pip install matplotlib")
    file = Path(path).resolve()
    if not file.parent.is_dir():
        raise ValueError(f"--save {path}: there is no folder {file.parent}.")
    formats = new_canvas().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise ValueError(f"--save {path}: the name must end in one of {', '.join(sorted(formats))}.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--save {path}: {file} cannot be written.")


def new_canvas(**kwargs: Any) -> Any:
    """An empty figure of matplotlib."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(**kwargs)


def draw(report: BenchReport, path: str) -> None:
    """Save a chart with two panels for each collective that has sizes: latency above bandwidth."""
    by_collective: dict[str, list[Figure]] = {}
    for figure in report.figures:
        if figure.num_bytes:
            by_collective.setdefault(figure.collective, []).append(figure)
    canvas = new_canvas(figsize=(4 * max(1, len(by_collective)), 6), layout="constrained")
    canvas.suptitle(f"{report.backend}, {num_processes(report.world_size)}, {report.device}, {report.dtype}")
    panels = canvas.subplots(2, max(1, len(by_collective)), squeeze=False, sharex=True, sharey="row")
    for column, (collective, figures) in enumerate(by_collective.items()):
        latency, bandwidth = panels[0, column], panels[1, column]
        latency.set_title(collective)
        raw = [figure for figure in figures if figure.raw_seconds is not None]
        for label, style, drawn, times in (
            ("ignite_dist", "o-", figures, [figure.seconds for figure in figures]),
            ("torch.distributed", "x--", raw, [figure.raw_seconds or 0.0 for figure in raw]),
        ):
            sizes = [figure.num_bytes for figure in drawn]
            speeds = [figure.bus_bytes / time / 1e9 for figure, time in zip(drawn, times, strict=True)]
            latency.plot(sizes, [time * 1e6 for time in times], style, label=label, markersize=4)
            bandwidth.plot(sizes, speeds, style, markersize=4)
        latency.set_xscale("log", base=2)
        latency.set_yscale("log")
        bandwidth.set_xlabel("bytes")
        for panel in (latency, bandwidth):
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("time per call, us")
    panels[1, 0].set_ylabel("bus bandwidth, GB/s")
    if by_collective:
        panels[0, 0].legend()
    canvas.savefig(path, dpi=120)
