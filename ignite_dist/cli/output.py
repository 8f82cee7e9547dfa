"""Where the results of a command go, and nothing else with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Output", "facts", "results_on_stdout"]


class Output:
    """The standard output, for results, and the standard error, for what is said on the way.

    Args:
        stream: where results go.
        as_json: whether they are JSON, and tables are left out.
    """

    def __init__(self, stream: IO[str], as_json: bool) -> None:
        self.as_json = as_json
        self._stream = stream
        self._results = Console(file=stream, highlight=False)
        self._messages = Console(file=sys.stderr, highlight=False, stderr=True)

    def json(self, value: Any) -> None:
        """Write ``value`` as JSON."""
        self._stream.write(json.dumps(value, indent=1) + "\n")
        self._stream.flush()

    def show(self, *renderables: RenderableType) -> None:
        """Write tables and text."""
        for renderable in renderables:
            self._results.print(renderable)
        self._stream.flush()

    def say(self, text: str, style: str = "") -> None:
        """Write a line to the standard error."""
        self._messages.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def results_on_stdout(as_json: bool) -> Iterator[Output]:
    """An :class:`Output` of which the standard output gets results alone.

    Backends' libraries write there too, from their own threads and from the workers, which inherit it: in the
    block all of that goes to the standard error.
    """
    sys.stdout.flush()
    encoding = sys.stdout.encoding or "utf-8"
    with os.fdopen(os.dup(1), "w", encoding=encoding, errors="replace") as stream:
        os.dup2(2, 1)
        try:
            yield Output(stream, as_json)
        finally:
            sys.stdout.flush()
            stream.flush()
            os.dup2(stream.fileno(), 1)


def facts(title: str, rows: dict[str, Any]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), value if isinstance(value, Text) else Text(str(value)))
    return table
