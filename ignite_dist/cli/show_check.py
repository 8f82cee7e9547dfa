"""The table of ``check``: a line per dtype, a column per collective."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ignite_dist.cli.check import PER_DTYPE, Cell, CheckReport, short
from ignite_dist.cli.jobs import num_processes
from ignite_dist.cli.output import Output
from ignite_dist.cli.values import DTYPES

__all__ = ["show_check"]

_STYLES = {"passed": "green", "carried": "cyan", "refused": "dim", "failed": "bold red"}
_WORDS = {"passed": "ok", "refused": "-", "failed": "FAIL"}
# 80 columns hold no longer ones.
_HEADINGS = {"AVERAGE": "AVG", "PRODUCT": "PROD", "all_gather": "gather", "all_gather_ragged": "ragged"}
_CARRIERS = {
    "float32": "f32",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "gather": "all",
}


def show_check(report: CheckReport, output: Output) -> None:
    """Write the report, as tables or as JSON."""
    if output.as_json:
        output.json(_as_json(report))
        return
    num_hosts = len(set(report.hosts))
    processes = num_processes(report.world_size)
    where = f"{processes} on {num_hosts} hosts" if num_hosts > 1 else f"{processes} on {report.hosts[0]}"
    output.show(f"[bold]{report.backend}[/], {where}, device {report.device}")
    output.show(_matrix(report.cells), _others(report.cells), _legend(report.cells))
    if report.links:
        output.show(_links(report))
    for failure in report.failures:
        what = f"{failure.operation} of {failure.dtype}" if failure.dtype else failure.operation
        host = report.hosts[failure.rank or 0]
        output.show(Text(f"FAILED: {what}, on rank {failure.rank} ({host}): {failure.detail}", "bold red"))
    for host in report.slow_hosts:
        output.show(Text(f"SLOW: every link of {host} takes more than 3 times as long as usual.", "yellow"))
    count = {outcome: sum(cell.outcome == outcome for cell in report.cells) for outcome in _STYLES}
    verdict = f"{count['failed']} failed" if report.failures else "All is well"
    output.show(
        Text(
            f"{verdict}: {count['passed']} passed, {count['carried']} carried through another dtype, "
            f"{count['refused']} refused.",
            "bold red" if report.failures else "bold green",
        )
    )


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {
        "ok": not report.failures,
        **report._asdict(),
        "cells": [cell._asdict() for cell in report.cells],
        "links": [link._asdict() for link in report.links],
    }


def _word(cell: Cell) -> Text:
    word = _WORDS.get(cell.outcome) or _CARRIERS.get(cell.detail, cell.detail)
    return Text(word, _STYLES[cell.outcome])


def _matrix(cells: list[Cell]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("dtype", style="cyan", no_wrap=True)
    for operation in PER_DTYPE:
        name = operation.removeprefix("all_reduce ")
        table.add_column(_HEADINGS.get(name, name), no_wrap=True)
    found = {(cell.operation, cell.dtype): cell for cell in cells}
    for dtype in map(short, DTYPES):
        table.add_row(dtype, *(_word(found[operation, dtype]) for operation in PER_DTYPE))
    return table


def _others(cells: list[Cell]) -> Text:
    parts = [
        Text.assemble(cell.operation, " ", _word(cell)) for cell in cells if cell.operation not in PER_DTYPE
    ]
    return Text("  ").join(parts)


def _legend(cells: list[Cell]) -> Text:
    carriers = dict.fromkeys(cell.detail for cell in cells if cell.outcome == "carried")
    sent = [f"{_CARRIERS.get(name, name)}: sent as {name}" for name in carriers if name != "gather"]
    notes = [", ".join(sent)] if sent else []
    if "gather" in carriers:
        notes.append("all: all values are gathered, and reduced on each rank")
    if any(cell.outcome == "refused" for cell in cells):
        notes.append("-: refused before anything is sent, because it has no exact meaning")
    return Text("\n".join(notes), "dim")


def _links(report: CheckReport) -> Table:
    table = Table(title="Between hosts", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("link", style="cyan", overflow="fold")
    table.add_column("latency", justify="right")
    table.add_column("1 MB", justify="right")
    for link in report.links:
        style = "yellow" if set(link.hosts) & set(report.slow_hosts) else ""
        figures = f"{link.latency_seconds * 1e6:,.0f} us", f"{link.megabytes_per_second:,.3g} MB/s"
        table.add_row(" - ".join(link.hosts), *figures, style=style)
    return table
