"""The table of ``check``: a row for each dtype, a column for each collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ignite_dist.cli.check import PER_DTYPE, Cell, CheckReport, short
from ignite_dist.cli.jobs import num_processes
from ignite_dist.cli.output import Output
from ignite_dist.cli.tables import Column, Table
from ignite_dist.cli.values import DTYPES

_WORDS = {"passed": "ok", "refused": "-", "failed": "FAIL"}
# Short, because the table must fit into 80 columns.
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
    where = f"{num_hosts} hosts" if num_hosts > 1 else report.hosts[0]
    processes = num_processes(report.world_size)
    output.show(f"{report.backend}, {processes} on {where}, device {report.device}")
    output.show(_matrix(report.cells), _others(report.cells), *_legend(report.cells))
    if report.links:
        output.show(_links(report))
    output.show(*_problems(report), _verdict(report))


def _problems(report: CheckReport) -> list[str]:
    """A line for each failure and each slow host."""
    lines = []
    for failure in report.failures:
        call = f"{failure.operation} of {failure.dtype}" if failure.dtype else failure.operation
        host = report.hosts[failure.rank or 0]
        lines.append(f"FAILED: {call}, on rank {failure.rank} ({host}): {failure.detail}")
    for host in report.slow_hosts:
        lines.append(f"SLOW: every link of {host} takes more than 3 times as long as usual.")
    return lines


def _verdict(report: CheckReport) -> str:
    count = Counter(cell.outcome for cell in report.cells)
    verdict = f"{count['failed']} failed" if report.failures else "All is well"
    return (
        f"{verdict}: {count['passed']} passed, {count['carried']} carried through another dtype, "
        f"{count['refused']} refused."
    )


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {
        "ok": not report.failures,
        **report._asdict(),
        "cells": [cell._asdict() for cell in report.cells],
        "links": [link._asdict() for link in report.links],
    }


def _word(cell: Cell) -> str:
    """The word for an outcome."""
    return _WORDS.get(cell.outcome) or _CARRIERS.get(cell.detail, cell.detail)


def _matrix(cells: list[Cell]) -> Table:
    names = [operation.removeprefix("all_reduce ") for operation in PER_DTYPE]
    table = Table([Column("dtype"), *(Column(_HEADINGS.get(name, name)) for name in names)])
    found = {(cell.operation, cell.dtype): cell for cell in cells}
    for dtype in map(short, DTYPES):
        table.rows.append((dtype, *(_word(found[operation, dtype]) for operation in PER_DTYPE)))
    return table


def _others(cells: list[Cell]) -> str:
    """The outcomes that do not depend on a dtype, in one line."""
    return "  ".join(f"{cell.operation} {_word(cell)}" for cell in cells if cell.operation not in PER_DTYPE)


def _legend(cells: list[Cell]) -> list[str]:
    """The meaning of each word that occurs in the table."""
    carriers = dict.fromkeys(cell.detail for cell in cells if cell.outcome == "carried")
    carried = [f"{_CARRIERS.get(name, name)}: sent as {name}" for name in carriers if name != "gather"]
    notes = [", ".join(carried)] if carried else []
    if "gather" in carriers:
        notes.append("all: all values are gathered, and each rank reduces them")
    if any(cell.outcome == "refused" for cell in cells):
        notes.append("-: refused before anything is sent, because it has no exact meaning")
    return notes


def _links(report: CheckReport) -> Table:
    columns = [Column("link"), Column("latency", is_number=True), Column("1 MB", is_number=True)]
    table = Table(columns, title="Between hosts")
    for link in report.links:
        latency, speed = f"{link.latency_seconds * 1e6:,.0f} us", f"{link.megabytes_per_second:,.3g} MB/s"
        table.rows.append((" - ".join(link.hosts), latency, speed))
    return table
