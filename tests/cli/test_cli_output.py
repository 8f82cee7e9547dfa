"""The command line's output with rich and without it."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from command_line import run_command
from helpers import (
    plain_environ,
    run_new_python,
    write_script,
)
from ignite_dist.cli import network
from ignite_dist.cli.check import PER_DTYPE, Cell, CheckReport, short
from ignite_dist.cli.output import Output
from ignite_dist.cli.plain_text import PlainPrinter
from ignite_dist.cli.show_check import show_check
from ignite_dist.cli.tables import Column, Table, Text
from ignite_dist.cli.values import DTYPES

# --- with rich, and without it -----------------------------------------------------------------------------


def test_only_the_command_line_imports_rich() -> None:
    ended = run_new_python("-c", "import sys, ignite_dist; print('rich' in sys.modules)")
    assert ended.stdout == "False\n"


ANSI = re.compile(r"\x1b\[[0-9;]*m")


def facts_in(output: str) -> str:
    """What ``output`` says: without colours, rules, spaces and ends of lines."""
    lines = [
        line
        for line in ANSI.sub("", output).splitlines()
        if line.strip(" -\N{BOX DRAWINGS LIGHT HORIZONTAL}")
    ]
    return "".join("".join(lines).split())


@pytest.fixture
def no_rich(tmp_path: Path) -> dict[str, str]:
    """Variables of a process, and of its workers, in which ``import rich`` fails."""
    write_script(tmp_path, "raise ModuleNotFoundError('hidden by a test', name='rich')", "rich.py")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), plain_environ()["PYTHONPATH"]])}


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "env",
        "check --nproc-per-node 1",
        "bench --nproc-per-node 1 --sizes 4,1K --collectives broadcast,barrier",
    ],
)
def test_without_rich_a_command_prints_the_same_facts(command: str, no_rich: dict[str, str]) -> None:
    outputs, messages = [], []
    for environ in ({}, no_rich):
        status, output, said = run_command(*command.split(), FORCE_COLOR="1", COLUMNS="80", **environ)
        assert status == 0, said
        outputs.append(output)
        messages.append(ANSI.sub("", said))
    with_rich, plain = outputs
    assert "\x1b" in with_rich
    assert "\x1b" not in plain
    if command.startswith("bench"):  # its figures are others each time
        outputs = [re.sub(r"[0-9][0-9,.]*", "0", ANSI.sub("", output)) for output in outputs]
    assert len(facts_in(plain)) > 100
    assert facts_in(outputs[0]) == facts_in(outputs[1])
    assert messages[0] == messages[1]


@pytest.mark.long
def test_without_rich_a_table_has_aligned_columns(no_rich: dict[str, str]) -> None:
    status, output, said = run_command("check", "--nproc-per-node", "1", **no_rich)
    assert status == 0, said
    lines = output.splitlines()
    (position,) = [position for position, line in enumerate(lines) if line.startswith("dtype ")]
    table = lines[position : position + 2 + len(DTYPES)]
    starts = [match.start() for match in re.finditer(r"\S+", table[0])]
    assert set(table[1]) == {"-", " "}
    for line in table[1:]:
        assert [match.start() for match in re.finditer(r"\S+", line)] == starts
    assert max(map(len, table)) <= 80


@pytest.mark.long
def test_without_rich_results_as_json_and_wrong_arguments_are_the_same(no_rich: dict[str, str]) -> None:
    for arguments in (["env", "--json"], ["check", "--backend", "ncl"], ["--help"]):
        assert run_command(*arguments) == run_command(*arguments, **no_rich)


def _failed_report() -> CheckReport:
    """Of three hosts, one of which is slow. A failure's text has what rich would take for markup."""
    cells = [
        Cell(operation, short(dtype), "failed", "got [1.0], expected [bold]", 1)
        if (operation, dtype) == ("broadcast", torch.int8)
        else Cell(operation, short(dtype), "carried", "gather")
        for operation in PER_DTYPE
        for dtype in DTYPES
    ]
    hosts = ["node-a", "node-b", "node-c"]
    links = [
        network.Link((hosts[0], hosts[1]), (0, 1), 1e-4, 0.01),
        network.Link((hosts[1], hosts[2]), (1, 2), 1e-2, 1.0),
        network.Link((hosts[2], hosts[0]), (2, 0), 1e-2, 1.0),
    ]
    return CheckReport("gloo", "cpu", 3, hosts, [*cells, Cell("barrier", "", "passed")], links, ["node-c"])


def test_failures_and_links_are_shown_with_rich_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for has_rich in (True, False):
        if not has_rich:
            monkeypatch.setitem(sys.modules, "rich", None)
            monkeypatch.delitem(sys.modules, "ignite_dist.cli.rich_text")
        stream = io.StringIO()
        show_check(_failed_report(), Output(stream, as_json=False))
        outputs.append(stream.getvalue())
    for output in outputs:
        words = " ".join(output.split())
        for text in (
            "gloo, 3 processes on 3 hosts, device cpu",
            "FAILED: broadcast of int8, on rank 1 (node-b): got [1.0], expected [bold]",
            "SLOW: every link of node-c takes more than 3 times as long as usual.",
            "1 failed: 1 passed, 169 carried through another dtype, 0 refused.",
            "node-a - node-b 100 us 105 MB/s",
            "node-b - node-c 10,000 us 1.05 MB/s",
        ):
            assert text in words
    assert facts_in(outputs[0]) == facts_in(outputs[1])
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in outputs[0]
    assert outputs[1].isascii()


def test_a_table_as_plain_text() -> None:
    table = Table([Column("name"), Column("size", is_number=True)], title="Sizes")
    table.rows += [("a", "1 KiB"), (), (Text(("long name", "cyan"), "!"), "")]
    stream = io.StringIO()
    PlainPrinter(stream).print(table)
    lines = [
        "Sizes",
        "  name         size",
        "  ----------  -----",
        "  a           1 KiB",
        "",
        "  long name!",
        "",
    ]
    assert stream.getvalue() == "\n".join(lines)
