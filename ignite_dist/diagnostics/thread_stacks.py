"""The stacks of this process's threads as text: what a thread does, without its frames.

The frames of a thread that runs are not safe to walk. On Python 3.11.2, ``frame.f_back`` of a frame that had
ended was another object, or ended the process (SIGSEGV). So each look of the watchdog reads text, and takes
the frames of those threads that have waited in one place for a while. A report takes those of all threads.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from typing import Any, NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Line(NamedTuple):
    """The place of one function call on a stack."""

    path: str
    number: str
    function: str


MOST_THREADS = 100
"""How many threads faulthandler writes of."""


def stacks_of_threads() -> dict[int, list[Line]]:
    """The stack of each thread, the innermost line first, by the thread's identity.

    At most 100 lines of at most ``MOST_THREADS`` threads: of those that have started last. Empty if no file
    can be opened.
    """
    try:
        with _open_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)  # one call in C: no thread runs meanwhile
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:
        return {}
    stacks: dict[int, list[Line]] = {}
    stack: list[Line] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stack = stacks.setdefault(int(thread[1], 16), [])
        elif found := _LINE.match(line):
            path, number, function = found.groups()
            stack.append(Line(_unescaped(path), number, function))
    return stacks


def _open_file() -> Any:
    memory = getattr(os, "memfd_create", None)  # Linux
    if memory is None:
        return tempfile.TemporaryFile(buffering=0)
    return os.fdopen(memory("stacks"), "w+b", buffering=0)


def _unescaped(path: str) -> str:
    r"""``path`` without the escapes that faulthandler writes, such as ``\xe9``."""
    return re.sub(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})", _character, path)


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[escape.lastindex or 0], 16))
