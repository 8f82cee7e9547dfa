"""The tables of docs/coming_from: a line of another library, our line, and what differs.

The lines of a table run one after the other. The first ``python`` block of the page comes before them.
Each further table has the names that the first table has left, and those of the second block. A cell without
code, or with more than one piece of it, is text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

import helpers
from pages import blocks

FOLDER = helpers.ROOT / "docs" / "coming_from"
# The lines of this table come first.
START = "Start"
# Each line of this table starts processes, so it has a process of its own.
WORKERS = "Start workers"
# Each line of this table finds the values of the second block again, which differ between ranks.
COLLECTIVES = "Collectives"
OPAQUE = "an object that is not compared"
# The names of each table and script, for the life of the process.
_kept: list[dict[str, Any]] = []
# What the lines of the left column need besides the imports of the page.
NAMES = {
    "accelerate.md": "from accelerate import Accelerator, notebook_launcher\n"
    "from accelerate.utils import broadcast, broadcast_object_list, gather_object, set_seed",
    "fabric.md": "from lightning_fabric import Fabric",
    "ignite.md": "import ignite.distributed as idist",
    "mmengine.md": "",
    "torch.md": "",
}


class Row(NamedTuple):
    """The lines of a row; empty if the cell is text."""

    theirs: str
    ours: str


class Result(NamedTuple):
    """The value of a line, None for a statement; and the values of the session's names after it."""

    value: Any
    names: dict[str, Any]


def tables(page: str) -> dict[str, list[Row]]:
    """The tables of a page by the title above them."""
    found: dict[str, list[Row]] = {}
    text = (FOLDER / page).read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if rows := list(_rows(section)):
            found[section.partition("\n")[0]] = rows
    return found


def _rows(section: str) -> Iterator[Row]:
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    for line in lines[1:]:  # the first has the titles of the columns
        left, right = line.removeprefix("| ").split(" | ")[:2]
        yield Row(_code(left), _code(left if right == "the same" else right))


def _code(cell: str) -> str:
    found = re.fullmatch(r"`([^`]+)`", cell)
    return found[1] if found else ""


def imports(page: str, column: str) -> str:
    """The code in front of the lines of a column."""
    return _python(page)[0] + (NAMES[page] if column == "theirs" else "")


def _python(page: str) -> list[str]:
    """The first two ``python`` blocks of a page: its imports, and what each table begins with."""
    found = blocks((FOLDER / page).read_text(encoding="utf-8"))
    return [block.text for block in found if block.language == "python" and not block.title][:2]


def run_page(page: str, column: str, folder: Path, num_ranks: int) -> dict[str, list[Result]]:
    """The results of a column by the titles of the tables: see the start of this file.

    The process that runs this ends afterwards, so what the lines leave behind does not matter. Their names
    are kept: torch may hang when it frees a group of gloo (see ``NativeModel.close``).
    """
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("ignore")
    session: dict[str, Any] = {"__name__": "__main__", "n": num_ranks}
    exec(imports(page, column), session)
    lines = {title: [getattr(row, column) for row in rows] for title, rows in tables(page).items()}
    lines.pop(WORKERS, None)
    found = {START: [_run(line, session) for line in lines.pop(START)]}
    for title in lines:
        names, found[title] = dict(session), []
        _kept.append(names)
        for number, line in enumerate(lines[title]):
            if number == 0 or title == COLLECTIVES:
                exec(_python(page)[1], names)
            found[title].append(_run(line, names))
    return found


def run_script(text: str, folder: Path) -> str:
    """What a script prints in this process, which keeps the script's names as :func:`run_page` does."""
    os.chdir(folder)
    output = io.StringIO()
    _kept.append({"__name__": "__main__"})
    with contextlib.redirect_stdout(output):
        exec(compile(text, "script", "exec"), _kept[-1])
    return output.getvalue()


def _run(line: str, session: dict[str, Any]) -> Result:
    try:
        try:
            code = compile(line or "None", line, "eval")
        except SyntaxError:
            code = compile(line, line, "exec")
        value = _facts(eval(code, session))
    except Exception as error:
        error.args = (f"in the line {line}: {error}",)
        raise
    names = {name: _facts(one) for name, one in session.items() if not name.startswith("_")}
    return Result(value, {name: fact for name, fact in names.items() if fact is not OPAQUE})


def _facts(value: Any) -> Any:
    """What can be compared of a value; equal for a list of tensors and a tensor with these rows."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [_facts(one) for one in value]
    if isinstance(value, dict):
        return {key: _facts(one) for key, one in value.items()}
    if isinstance(value, torch.nn.Module):
        return [[_facts(one), _facts(one.grad)] for one in value.parameters()]
    return OPAQUE


def differences(rows: list[Row], theirs: list[Result], ours: list[Result]) -> list[str]:
    """The lines whose results differ, or that leave other values of the session. None is no value."""
    found = []
    for row, left, right in zip(rows, theirs, ours, strict=True):
        pairs = {"value": (left.value, right.value)}
        pairs |= {name: (left.names[name], right.names[name]) for name in left.names.keys() & right.names}
        for name, pair in pairs.items():
            if pair[0] != pair[1] and None not in pair and OPAQUE not in pair:
                found.append(f"{row.theirs} | {row.ours}: {name} {pair[0]} != {pair[1]}")
    return found
