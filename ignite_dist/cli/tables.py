"""Tables of the commands: plain text in aligned columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """How a table shows one column.

    Attributes:
        heading: the text above the column. If all headings are empty, the table has no line of headings.
        is_number: True to align the column to the right.
    """

    heading: str = ""
    is_number: bool = False


@dataclass
class Table:
    """A table. A row has one cell per column; a row without cells is a gap between two sections."""

    columns: Sequence[Column]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        headings = [column.heading for column in self.columns]
        rows = [headings, *self.rows] if any(headings) else self.rows
        widths = [max(map(len, cells)) for cells in zip(*filter(None, rows), strict=True)]
        indent = ""
        if self.title:
            yield self.title
            indent = _GAP
        for row in rows:
            line = _GAP.join(
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for cell, width, column in zip(row, widths, self.columns, strict=False)
            )
            yield f"{indent}{line}".rstrip()
            if row is headings:
                yield indent + _GAP.join("-" * width for width in widths)


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """A table of names and values."""
    return Table((Column(), Column()), [(name, str(value)) for name, value in rows.items()], title)
