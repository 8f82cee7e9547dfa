"""Texts and tables of the commands. ``rich_text`` and ``plain_text`` print texts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Text:
    """A text of pieces, each with its own style: ``Text(("works", "green"), " (native-dist)")``.

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
        heading: the text above the column. If all headings are empty, the table has no line of headings.
        style: the style of the cells.
        is_number: True to align the column to the right.
        may_wrap: True if long cells may continue on the next line.
    """

    heading: str = ""
    style: str = ""
    is_number: bool = False
    may_wrap: bool = False


@dataclass
class Table:
    """A table. A row has one cell per column; a row without cells is a gap between two sections."""

    columns: Sequence[Column]
    rows: list[Sequence[str | Text]] = field(default_factory=list)
    title: str = ""

    @property
    def has_headings(self) -> bool:
        """True if the table has a line of headings."""
        return any(column.heading for column in self.columns)


class Printer(Protocol):
    """Prints to one stream."""

    def print(self, block: Table | Text) -> None:
        """Print a table, or a text and a newline."""
        ...


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """A table of names and values."""
    columns = (Column(style="cyan"), Column(may_wrap=True))
    cells = [(name, value if isinstance(value, Text) else str(value)) for name, value in rows.items()]
    return Table(columns, list(cells), title)
