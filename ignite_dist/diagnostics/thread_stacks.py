"""The stacks of this process's threads as text: what a thread does, without its frames.

The frames of a thread that runs are not safe to walk. On Python 3.11.2, ``frame.f_back`` of a frame that had
ended was another object, or ended the process (SIGSEGV). So each look of the watchdog reads text, and takes
the frames of those threads that have waited in one place for a while. A report takes those of all threads.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ignite_dist.comp_models.work import marked_as_waiting
from ignite_dist.internals.call_sites import is_library_path

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Line(NamedTuple):
    """A line of a stack."""

    path: str
    number: str
    function: str


_UNKNOWN = Line("?", "?", "?")
_MOST_THREADS = 100  # of faulthandler


def stacks_of_threads() -> dict[int, list[Line]]:
    """The stack of each thread, the innermost line first, by the thread's identity.

    At most 100 lines of at most 100 threads: those that have started last. Empty if no file can be opened.
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


def part_that_waits(
    stacks: Mapping[int, list[Line]], thread: int, waiting_modules: Collection[str]
) -> tuple[Line, ...]:
    """The lines from the function that waits for other ranks outwards. Empty if the thread does not wait.

    Args:
        stacks: the result of :func:`stacks_of_threads`. If it lacks threads, those may wait.
        thread: the identity of the thread.
        waiting_modules: names of modules all of whose functions wait, beside the marked functions.
    """
    stack = stacks.get(thread, [])
    if not stack and (not stacks or len(stacks) >= _MOST_THREADS):
        return (_UNKNOWN,)
    loaded = (sys.modules.get(name) for name in waiting_modules)
    paths = {getattr(module, "__file__", None) for module in loaded}
    marked = marked_as_waiting()
    for position, (path, _, function) in enumerate(stack):
        if not is_library_path(path):
            break
        if path in paths or (path, function) in marked:
            return tuple(stack[position:])
    return ()


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
