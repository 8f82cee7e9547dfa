"""Who waits for whom: a table and a picture of the trace that a timeline has written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ignite_dist.cli import chart
from ignite_dist.cli.output import Output
from ignite_dist.cli.tables import Column, Table

_MAX_LINES = 10

_Event = dict[str, Any]


class _Waits(NamedTuple):
    """The calls of a rank or of a line of the script, and the microseconds that they waited for each rank."""

    calls: list[_Event]
    by_rank: Counter[int]

    @property
    def waiting(self) -> float:
        return sum(self.by_rank.values())

    @property
    def working(self) -> float:
        return float(sum(call["args"]["working us"] for call in self.calls))


def show_timeline(path: str, output: Output, save: str | None = None) -> None:
    """Write the waiting time of each rank and line as tables or as JSON. Draw a picture into ``save``.

    Raises:
        ValueError: ``path`` is not a trace of a timeline, or the picture cannot be saved.
    """
    if save is not None:
        chart.check_file(save)
    names, events, notes = _read(path)
    calls = [event for event in events if event.get("cat") == "call"]
    by_rank = _waits(calls, lambda call: names[call["pid"]])
    by_line = _waits(calls, lambda call: f"{call['args']['line']} {call['name']}")
    lines = sorted(by_line, key=lambda line: -by_line[line].waiting)
    if output.as_json:
        tables = ((names.values(), by_rank), (lines, by_line))
        ranks, places = ({name: _as_json(waits[name]) for name in shown} for shown, waits in tables)
        output.json({"ranks": ranks, "lines": places, "notes": notes})
    else:
        output.show(_table("rank", list(names.values()), by_rank, 2), "")
        output.show(_table("line", lines[:_MAX_LINES], by_line, 1))
        output.show(*(f"{what}: {note}" for what, note in notes.items()))
    if save is not None:
        _draw(names, events, save)
        output.log(f"Picture: {save}")


def _read(path: str) -> tuple[dict[int, str], list[_Event], dict[str, str]]:
    """The name of each rank, the events and the notes of a trace."""
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
        events, notes = trace["traceEvents"], trace["otherData"]
        names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a trace of idist.record_timeline() or `ignite-dist run --timeline`."
        ) from None
    return names, events, notes


def _waits(calls: Sequence[_Event], group: Any) -> dict[str, _Waits]:
    waits: dict[str, _Waits] = defaultdict(lambda: _Waits([], Counter()))
    for call in calls:
        found = waits[group(call)]
        found.calls.append(call)
        if "waits for" in call["args"]:
            found.by_rank[call["args"]["waits for"]] += call["args"]["waiting us"]
    return waits


def _as_json(waits: _Waits) -> dict[str, Any]:
    return {
        "calls": len(waits.calls),
        "waiting_us": waits.waiting,
        "working_us": waits.working,
        "waiting_us_by_rank": dict(waits.by_rank),
    }


def _table(what: str, names: Sequence[str], waits: dict[str, _Waits], num_shown: int) -> Table:
    """A row for each name, with the ``num_shown`` ranks for which it waited longest."""
    numbers = (Column(name, is_number=True) for name in ("calls", "waiting", "working"))
    table = Table([Column(what), *numbers, Column("waits for")])
    for name in names:
        found = waits[name]
        most = ", ".join(f"rank {rank}: {_time(time)}" for rank, time in found.by_rank.most_common(num_shown))
        table.rows.append((name, str(len(found.calls)), _time(found.waiting), _time(found.working), most))
    return table


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.0f} us"


def _draw(names: dict[int, str], events: Sequence[_Event], path: str) -> None:
    """Save a picture with a row for each rank: when its calls waited, and when they worked."""
    canvas = chart.new_canvas(figsize=(10, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = canvas.subplots()
    for label, color in (("call", "tab:blue"), ("waiting", "tab:orange")):  # waiting is drawn over its call
        for row, rank in enumerate(names):
            spans = [
                (event["ts"] / 1e3, event["dur"] / 1e3)
                for event in events
                if event.get("cat") == label and event["pid"] == rank
            ]
            legend = {"label": {"call": "works in a collective", "waiting": "waits for a rank"}[label]}
            axes.broken_barh(spans, (row - 0.35, 0.7), color=color, **(legend if row == 0 else {}))
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    canvas.legend(loc="outside upper right", ncols=2)
    canvas.savefig(path, dpi=120)
