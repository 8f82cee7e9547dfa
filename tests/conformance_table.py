"""The table of what every backend was seen to do: a pytest plugin that keeps the suite's own results.

    python -m pytest ignite_dist/testing/conformance --conformance-results here.json
    python tests/conformance_table.py docs/conformance.md here.json [there.json ...]

Backends that do not go into one environment have results of their own. A case returns cells, ``{(operation,
dtype): outcome}``, for what it has seen. Nothing is kept unless every case has passed, and a world in which a
case has not run is a hole, for which the second command fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest

from ignite_dist.testing.conformance.cases import PROPERTY

_HOLE = "**not run**"
_NOT_NEEDED = "–"
_INTRODUCTION = """\
# What every backend was seen to do

Written by `make conformance` from the results of `ignite_dist/testing/conformance/`, which runs with each
backend's real library; not to be edited. A column is a world: a backend and a number of ranks. A tick: the
tensor that was given holds the exact result. `TypeError`: the combination has no exact meaning, and was
refused before anything was sent.

XLA's ranks are replicas on PJRT's CPU, threads of one process. One of them proves nothing of groups, and two
no more than the whole world and a rank alone; what is between is proven by three. A dash: the test runs with
at most two ranks, because more of them add nothing to it.
"""
_World = tuple[str, int]  # the backend, and how many ranks
_Outcomes = dict[_World, set[str]]


class ResultsWriter:
    """Collects the suite's reports and writes them as JSON: of each case its world and what it has seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and report.passed and isinstance(found, dict):
            file, _, name = report.nodeid.rpartition("/")[2].partition("::")
            test = [
                file.removeprefix("test_").removesuffix(".py"),
                name.removeprefix("test_").partition("[")[0],
            ]
            most = 2 if "at_most_two_ranks" in report.keywords else None
            self._passed.append({"test": test, "most": most, **found})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.keyword:
            raise pytest.UsageError("-k leaves out cases, and --conformance-results keeps all of them.")
        if session.testsfailed:
            self._path.unlink(missing_ok=True)
        else:
            self._path.write_text(json.dumps(self._passed), encoding="utf-8")


class Table:
    """Results as Markdown: a column for each world."""

    def __init__(self, passed: Iterable[dict[str, Any]]) -> None:
        passed = list(passed)
        self._worlds: set[_World] = {tuple(one["world"]) for one in passed}
        self._cells: dict[tuple[str, str], _Outcomes] = {}
        self._tests: dict[tuple[str, str], _Outcomes] = {}
        for one in passed:
            seen = [(self._tests, tuple(one["test"]), "✓")]
            seen += [(self._cells, (operation, dtype), outcome) for operation, dtype, outcome in one["cells"]]
            for table, row, outcome in seen:
                outcomes = table.setdefault(row, {})
                outcomes.setdefault(tuple(one["world"]), set()).add(outcome)
                too_large = [world for world in self._worlds if world[1] > (one["most"] or world[1])]
                outcomes.update((world, {_NOT_NEEDED}) for world in too_large)

    def markdown(self) -> str:
        worlds = sorted(self._worlds, key=lambda world: (world[0] != "serial", world))
        text = f"{_INTRODUCTION}\n## Tensors\n\n{_head(['operation', 'dtypes'], worlds)}"
        by_operation = sorted(self._cells.items(), key=_operation)  # tests end in any order
        for operation, cells in groupby(by_operation, key=_operation):
            rows: dict[tuple[str, ...], list[str]] = {}  # dtypes with the same outcomes share a row
            for (_, dtype), outcomes in cells:
                rows.setdefault(_row(outcomes, worlds), []).append(dtype)
            for row, dtypes in rows.items():
                text += _line([f"`{operation}`", ", ".join(dtypes), *row])
        text += "\n## Everything else\n\nA row is a test of the suite, by its name.\n\n"
        text += _head(["about", "what holds"], worlds)
        for (about, name), outcomes in sorted(self._tests.items()):
            text += _line([f"`{about}`", name.replace("_", " "), *_row(outcomes, worlds)])
        return text


def _operation(cell: tuple[tuple[str, str], _Outcomes]) -> str:
    return cell[0][0]


def _row(outcomes: _Outcomes, worlds: Sequence[_World]) -> tuple[str, ...]:
    return tuple(" / ".join(sorted(outcomes.get(world, {_HOLE}))) for world in worlds)


def _head(names: list[str], worlds: Sequence[_World]) -> str:
    columns = [f"{backend} {size}" for backend, size in worlds]
    return _line([*names, *columns]) + _line(["---"] * len(names) + [":-:"] * len(columns))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main(path: str, *results: str) -> None:
    """Write the table of several runs; it may have no hole."""
    passed = chain.from_iterable(json.loads(Path(one).read_text(encoding="utf-8")) for one in results)
    text = Table(passed).markdown()
    Path(path).write_text(text, encoding="utf-8")
    if _HOLE in text:
        raise SystemExit(f"{path} has holes: not every case has run in every world.")


if __name__ == "__main__":
    main(*sys.argv[1:])
