"""Plain text: tables as aligned columns, no colours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from ignite_dist.cli.tables import Table, Text

_GAP = "  "


class PlainPrinter:
    """Prints to ``stream`` without rich."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def print(self, block: Table | Text) -> None:
        """Print a table, or a text and a newline."""
        lines = _lines(block) if isinstance(block, Table) else [str(block)]
        self._stream.writelines(f"{line}\n" for line in lines)


def _lines(table: Table) -> Iterator[str]:
    headings = [[column.heading for column in table.columns]] if table.has_headings else []
    rows = [*headings, *([str(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, cells)) for cells in zip(*filter(None, rows), strict=True)]
    indent = ""
    if table.title:
        yield table.title
        indent = _GAP
    for position, row in enumerate(rows):
        line = _GAP.join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=False)
        )
        yield f"{indent}{line}".rstrip()
        if position == 0 and headings:
            yield indent + _GAP.join("-" * width for width in widths)
