"""The table of ``bench``."""

from __future__ import annotations

from typing import Any

from ignite_dist.cli import chart
from ignite_dist.cli.bench import BenchReport, Figure
from ignite_dist.cli.jobs import num_processes
from ignite_dist.cli.output import Output
from ignite_dist.cli.tables import Column, Table

_NOTE = (
    "us: median time of a call. GB/s: bus bandwidth. Sizes and bandwidth as in nccl-tests.\n"
    "numbers: all_reduce of a dict of 20 numbers; raw: of a tensor, packed by hand.\n"
    "objects: all_gather of a small dict; raw: all_gather_object."
)
_NUMBERS = ("size", "ours us", "raw us", "ratio", "ours GB/s", "raw GB/s")


def show_bench(report: BenchReport, output: Output, save: str | None = None) -> None:
    """Write the figures as a table or as JSON. Draw a chart into the file ``save``."""
    if output.as_json:
        output.json({**report._asdict(), "figures": [_as_json(figure) for figure in report.figures]})
    else:
        num_hosts = len(set(report.hosts))
        hosts = f" on {num_hosts} hosts" if num_hosts > 1 else ""
        memory = ", ours over shared memory" if report.shared_memory else ""
        where = f"{report.backend}, {num_processes(report.world_size)}{hosts}"
        title = f"{where}, {report.device}, {report.dtype}{memory}"
        output.show(title, _table(report.figures), _NOTE)
    if save:
        chart.draw(report, save)
        output.log(f"Chart: {save}")


def _as_json(figure: Figure) -> dict[str, Any]:
    return {
        **figure._asdict(),
        "bus_gigabytes_per_second": _bandwidth(figure, figure.seconds),
        "raw_bus_gigabytes_per_second": _bandwidth(figure, figure.raw_seconds),
    }


def _bandwidth(figure: Figure, seconds: float | None) -> float | None:
    return figure.bus_bytes / seconds / 1e9 if seconds and figure.bus_bytes else None


def _table(figures: list[Figure]) -> Table:
    table = Table([Column("collective"), *(Column(name, is_number=True) for name in _NUMBERS)])
    previous = ""
    for figure in figures:
        if previous not in ("", figure.collective):
            table.rows.append(())
        ratio = "" if figure.raw_seconds is None else f"{figure.seconds / figure.raw_seconds:.2f} x"
        row = (
            figure.collective if figure.collective != previous else "",
            _size(figure.num_bytes) if figure.num_bytes else "",
            _time(figure.seconds),
            _time(figure.raw_seconds),
            ratio,
            _speed(_bandwidth(figure, figure.seconds)),
            _speed(_bandwidth(figure, figure.raw_seconds)),
        )
        table.rows.append(row)
        previous = figure.collective
    return table


def _size(num_bytes: int) -> str:
    """The size in the largest unit that gives a whole number, for example ``64 KiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.{int(seconds < 1e-3)}f}"


def _speed(gigabytes_per_second: float | None) -> str:
    return "" if gigabytes_per_second is None else f"{gigabytes_per_second:.3f}"
