"""The command line's output: tables and texts."""

from __future__ import annotations

import io

import torch

from ignite_dist.cli import network
from ignite_dist.cli.check import PER_DTYPE, Cell, CheckReport, short
from ignite_dist.cli.output import Output
from ignite_dist.cli.show_check import show_check
from ignite_dist.cli.tables import Column, Table, facts
from ignite_dist.cli.values import DTYPES


def _failed_report() -> CheckReport:
    """Of three hosts, one of which is slow."""
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


def test_failures_and_links_are_shown() -> None:
    stream = io.StringIO()
    show_check(_failed_report(), Output(stream, as_json=False))
    output = stream.getvalue()
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
    assert output.isascii()


def test_a_table() -> None:
    table = Table([Column("name"), Column("size", is_number=True)], title="Sizes")
    table.rows += [("a", "1 KiB"), (), ("long name!", "")]
    lines = [
        "Sizes",
        "  name         size",
        "  ----------  -----",
        "  a           1 KiB",
        "",
        "  long name!",
    ]
    assert str(table) == "\n".join(lines)


def test_a_table_without_headings() -> None:
    assert str(facts("Devices", {"gpu": None, "threads": 2})) == "Devices\n  gpu      None\n  threads  2"
