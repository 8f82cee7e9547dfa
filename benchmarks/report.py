"""Write the results to the terminal, as JSON, as Markdown and as a chart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rows import IGNITE, OURS, RAW

_HEADINGS = ("what", "ours", "reference", "ignite", "figure", "bar", "")
_CURVE_SECTION = "spawn"
_WORKERS = re.compile(r"(\d+) workers")
Result = dict[str, Any]


def print_table(results: list[Result]) -> None:
    table = Table(title="ignite_dist: medians; figures are medians of paired rounds")
    for heading, justify in zip(_HEADINGS, ("left", *["right"] * 4, "left", "left"), strict=True):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    colors = {"met": "green", "MISSED": "bold red"}
    section = None
    for result in results:
        if section not in (None, result["section"]):
            table.add_section()
        section = result["section"]
        for *cells, verdict in _lines(result):
            table.add_row(*cells, f"[{colors[verdict]}]{verdict}" if verdict else "")
    console = Console()
    Console(width=max(console.width, 150)).print(table)


def write_files(
    directory: Path, name: str, machine: dict[str, Any], results: list[Result], seconds: float
) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path, chart_path = (
        directory / f"{name}.{suffix}" for suffix in ("json", "md", "png")
    )
    document = {"machine": machine, "seconds": round(seconds, 1), "rows": results}
    json_path.write_text(json.dumps(document, indent=1) + "\n")
    markdown_path.write_text(_markdown(machine, results, chart_path.name))
    _chart(chart_path, machine, results)
    return [json_path, markdown_path, chart_path]


def _lines(result: Result) -> list[tuple[str, ...]]:
    """The table's lines for a row: one line per bar; one line if the row has no bar."""
    unit, contenders = result["unit"], result["contenders"]
    title = f"{result['section']}: {result['name']}"

    def median(name: str | None) -> str:
        return f"{contenders[name]['median']:.3g} {unit}" if name in contenders else ""

    if not result["bars"]:
        return [(title, median(OURS), median(RAW), median(IGNITE), "", "", "")]
    return [
        (
            title,
            median(OURS),
            median(bar["reference"] or RAW),
            median(IGNITE),
            bar["shown"],
            bar["text"],
            "met" if bar["met"] else "MISSED",
        )
        for bar in result["bars"]
    ]


def _markdown(machine: dict[str, Any], results: list[Result], chart: str) -> str:
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores{gpu}; torch {machine['torch']}, pytorch-ignite "
        f"{machine['pytorch-ignite']}, Python {machine['python']}; {machine['date'][:10]}. Medians; figures "
        f"are medians over rounds in which ours and the reference were timed in turn. [Chart]({chart})",
        "",
        "| " + " | ".join(_HEADINGS) + " |",
        "|---|--:|--:|--:|--:|---|---|",
    ]
    for result in results:
        for *cells, verdict in _lines(result):
            shown = "**missed**" if verdict == "MISSED" else verdict
            lines.append("| " + " | ".join([*cells, shown]) + " |")
    return "\n".join(lines) + "\n"


def _chart(path: Path, machine: dict[str, Any], results: list[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = [result for result in results if result["section"] == _CURVE_SECTION]
    figure = pyplot.figure(figsize=(15, 9) if curves else (10, 9), layout="constrained")
    gpu = machine["gpu"] or f"{machine['cores']} cores"
    figure.suptitle(
        f"ignite_dist on {machine['cpu']} ({gpu}), torch {machine['torch']}, {machine['date'][:10]}"
    )
    grid = figure.add_gridspec(2, 2 if curves else 1, width_ratios=[3, 2] if curves else None)
    _draw_ratios(figure.add_subplot(grid[:, 0]), results)
    if curves:
        _draw_curve(figure.add_subplot(grid[0, 1]), curves, "seconds to a first barrier", ["first barrier"])
        _draw_curve(figure.add_subplot(grid[1, 1]), curves, "MB per worker", ["(PSS)", "(USS)"])
    figure.savefig(path, dpi=110)


def _draw_ratios(axes: Any, results: list[Result]) -> None:
    """Draw a line per ratio: a dot at the median, a tick at the bar. A dot left of the tick meets the bar."""
    ratios = [(result, bar) for result in results for bar in result["bars"] if bar["kind"] == "ratio"]
    for height, (_, bar) in enumerate(reversed(ratios)):
        color = "tab:green" if bar["met"] else "tab:red"
        median = bar["figure"]["median"]
        axes.plot([bar["limit"], median], [height, height], color=color, linewidth=1)
        axes.plot(median, height, "o", color=color)
        axes.plot(bar["limit"], height, "|", color="black", markersize=14, markeredgewidth=2)
    labels = [
        f"{result['section']}: {result['name']}\nvs {bar['text'].partition(' x ')[2]}"
        for result, bar in ratios
    ]
    axes.set_yticks(range(len(ratios)), reversed(labels), fontsize=7)
    axes.axvline(1, color="gray", linewidth=0.5)
    axes.set_xscale("log")
    axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    axes.set_xlabel("time of ours / time of the reference (dot), and the bar (tick)")


def _draw_curve(axes: Any, curves: list[Result], label: str, endings: list[str]) -> None:
    from matplotlib.ticker import LogFormatter

    for ending in endings:
        for contender, style in ((OURS, "o-"), (IGNITE, "s--")):
            points = [
                (_WORKERS.search(result["name"]), result)
                for result in curves
                if result["name"].endswith(ending) and contender in result["contenders"]
            ]
            if points:
                name = "ignite_dist" if contender == OURS else "pytorch-ignite"
                suffix = f" {ending}" if len(endings) > 1 else ""
                medians = [result["contenders"][contender]["median"] for _, result in points]
                axes.plot([int(found[1]) for found, _ in points], medians, style, label=name + suffix)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_xlabel("workers")
    axes.set_ylabel(label)
    axes.legend()
