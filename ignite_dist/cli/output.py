"""The output of a command: results on the standard output, messages on the standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from ignite_dist.cli.tables import Table


class Output:
    """The standard output for results, and the standard error for messages.

    Args:
        stream: the stream for results.
        as_json: True to write results as JSON, not as tables.
    """

    def __init__(self, stream: IO[str], as_json: bool) -> None:
        self.as_json = as_json
        self._stream = stream

    def json(self, value: Any) -> None:
        """Write ``value`` as JSON."""
        self._stream.write(json.dumps(value, indent=1) + "\n")
        self._stream.flush()

    def show(self, *blocks: Table | str) -> None:
        """Write tables and texts to the results."""
        self._stream.writelines(f"{block}\n" for block in blocks)
        self._stream.flush()

    def log(self, text: str) -> None:
        """Write a line to the standard error."""
        sys.stderr.write(f"{text}\n")


@contextmanager
def results_on_stdout(as_json: bool, redirects: bool = True) -> Iterator[Output]:
    """Context manager: an :class:`Output` whose standard output gets only results.

    Workers and threads of backends also write to the standard output. In the block, their output goes to the
    standard error, unless ``redirects`` is False.
    """
    if not redirects:
        yield Output(sys.stdout, as_json)
        return
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
