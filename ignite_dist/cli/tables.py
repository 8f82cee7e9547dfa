"""Texts and tables as the commands build them. ``rich_text`` and ``plain_text`` print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Column", "Printer", "Table", "Text", "facts"]


class Text:
    """A text of pieces, each with a style of its own: ``Text(("works", "green"), " (native-dist)")``.

    Args:
        pieces: strings without a style, and pairs of a string and its style. Styles have rich's names.
    """

    def __init__(self, *pieces: str | tuple[str, str]) -> None:
        self.pieces = tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Column:
    """How a table shows one column.

    Attributes:
        heading: above the column. A table whose columns all have empty headings has no line for them.
        style: of the column's cells.
        is_number: True aligns the column to the right.
        may_wrap: True if long cells may continue on the next line.
    """

    heading: str = ""
    style: str = ""
    is_number: bool = False
    may_wrap: bool = False


@dataclass
class Table:
    """Rows of as many cells as there are columns. A row without cells is a gap between two sections."""

    columns: Sequence[Column]
    rows: list[Sequence[str | Text]] = field(default_factory=list)
    title: str = ""

    @property
    def has_headings(self) -> bool:
        """True if a line of headings is above the rows."""
        return any(column.heading for column in self.columns)


class Printer(Protocol):
    """Prints to one stream."""

    def print(self, block: Table | Text) -> None:
        """Print a table, or a text and the end of its line."""
        ...


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """A table of names and values."""
    columns = (Column(style="cyan"), Column(may_wrap=True))
    cells = [(name, value if isinstance(value, Text) else str(value)) for name, value in rows.items()]
    return Table(columns, list(cells), title)
