"""Colours and tables with rich. Only ``output`` imports this module, because rich may not be installed."""

from __future__ import annotations

from typing import IO

import rich.table
import rich.text
from rich import box
from rich.console import Console

from ignite_dist.cli.tables import Table, Text


class RichPrinter:
    """Prints to ``stream`` with rich. A stream that is not a terminal gets no colours.

    Args:
        stream: the output stream.
        breaks_lines: True to break texts at the width of the terminal.
    """

    def __init__(self, stream: IO[str], breaks_lines: bool) -> None:
        self._console = Console(file=stream, highlight=False)
        self._breaks_lines = breaks_lines

    def print(self, block: Table | Text) -> None:
        """Print a table, or a text and a newline."""
        shown = _table(block) if isinstance(block, Table) else _text(block)
        self._console.print(shown, soft_wrap=not self._breaks_lines)


def _text(text: str | Text) -> rich.text.Text:
    """``text`` for rich. Brackets in a string are not markup."""
    return rich.text.Text(text) if isinstance(text, str) else rich.text.Text.assemble(*text.pieces)


def _table(table: Table) -> rich.table.Table:
    shown = rich.table.Table(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if table.has_headings else None,
        show_header=table.has_headings,
        pad_edge=not table.has_headings,
        padding=(0, 1, 0, 0) if table.has_headings else (0, 1),  # narrow: `check` must fit into 80 columns
    )
    for column in table.columns:
        shown.add_column(
            column.heading,
            style=column.style or None,
            justify="right" if column.is_number else "left",
            overflow="fold",
            no_wrap=not column.may_wrap,
        )
    for row in table.rows:
        if row:
            shown.add_row(*map(_text, row))
        else:
            shown.add_section()
    return shown
