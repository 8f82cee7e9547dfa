"""Output of workers: whole lines, and prefixes that name the rank."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

_BUFFER_SIZE = 65_536

# --- in the worker -----------------------------------------------------------------------------------


class _LineWriter(io.BufferedWriter):
    """Writes all complete lines of the buffer at once, as soon as there is one."""

    def write(self, data: Any) -> int:
        """Write ``data``, and everything up to its last end of line to the file."""
        view = memoryview(data).cast("B")
        num_complete = bytes(view).rfind(b"\n") + 1
        if num_complete:
            super().write(view[:num_complete])
            super().flush()
        if num_complete < len(view):
            super().write(view[num_complete:])
        return len(view)


def write_whole_lines() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` write each line in one piece.

    Without a buffer (``PYTHONUNBUFFERED``), ``print`` writes the text and the end of the line separately, and
    a buffer of fixed size ends within a line. Lines of other workers may come in between.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # A notebook has streams of other types, for example.
        if type(stream) is not io.TextIOWrapper or stream.closed or isinstance(stream.buffer, _LineWriter):
            continue
        stream.flush()
        if stream.fileno() == fd:
            raw: Any = io.FileIO(fd, "w", closefd=False)
            raw.name = stream.name
            writer = _LineWriter(raw, _BUFFER_SIZE)
            lines = io.TextIOWrapper(writer, stream.encoding, stream.errors, write_through=True)
            setattr(sys, name, lines)


@dataclass(frozen=True)
class InheritedFile:
    """A file that a fork inherits. It has the interface of ``multiprocessing.reduction.DupFd``."""

    fd: int

    def detach(self) -> int:
        """A duplicate, which the caller owns."""
        return os.dup(self.fd)


# --- in the launcher ---------------------------------------------------------------------------------


def is_open(fd: int) -> bool:
    """True if the file descriptor is open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# An end of line, or the return to the line's start by which a progress bar replaces its text.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\n|$))")
_NUM_COLORS = 6  # the terminal's colours from red to cyan


class _Stream:
    """A pipe from a worker, and the launcher's file for its lines."""

    def __init__(self, fd: int, label: str, number: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._file = os.dup(fd)
        text = f"[{label}]"
        if os.isatty(fd) and not os.environ.get("NO_COLOR"):
            text = f"\033[{31 + number % _NUM_COLORS}m{text}\033[0m"
        self._prefix = f"{text} ".encode()
        self._incomplete = b""

    def forward(self) -> bool:
        """Write the lines that have arrived. Returns False if no more will arrive."""
        data = self._read()
        self._incomplete += data or b""
        end = 0
        for line in _LINE.finditer(self._incomplete):
            self._write(line[0] if line[0] == b"\r" else self._prefix + line[0])
            end = line.end()
        self._incomplete = self._incomplete[end:]
        return data != b""

    def _read(self) -> bytes | None:
        """What is in the pipe; None if nothing is, empty if its other end is closed."""
        try:
            return os.read(self.reader, _BUFFER_SIZE)
        except BlockingIOError:
            return None

    def finish(self) -> None:
        """Write everything that is left, and close the files."""
        while data := self._read():
            self._incomplete += data
        self.forward()
        if self._incomplete:
            self._write(self._prefix + self._incomplete + b"\n")
        os.close(self.reader)
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # nobody reads it; the worker must not wait
            while line:
                line = line[os.write(self._file, line) :]


class PrefixedOutput:
    """The output of a launch's workers. A thread of the launcher reads it, and prefixes each line.

    The workers' standard output and error are pipes, so lines of subprocesses and of C++ have the prefix too.
    A pipe keeps what a crashed worker has written.
    """

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread: threading.Thread | None = None

    def pipes_for(self, label: str, number: int) -> Mapping[int, int]:
        """New pipes for the process ``label``: the ends to write, by the files that they replace."""
        new = {fd: _Stream(fd, label, number) for fd in (1, 2) if is_open(fd)}
        self._streams += new.values()
        return {fd: stream.writer for fd, stream in new.items()}

    def start(self) -> None:
        """Forward the output from now on. All workers have been started."""
        self._thread = threading.Thread(target=self._forward, name="output of workers", daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        streams = {stream.reader: stream for stream in self._streams}
        # A worker may close its output. Whatever it has started may keep it open for ever.
        while self._stop_reader not in (ready := connection.wait([*streams, self._stop_reader])):
            for stream in [stream for reader, stream in streams.items() if reader in ready]:
                if not stream.forward():
                    streams.pop(stream.reader).finish()
        for stream in streams.values():
            stream.finish()

    def close(self) -> None:
        """Write what is left, after the end of the workers."""
        if self._stop_writer < 0:
            return
        os.close(self._stop_writer)
        self._stop_writer = -1
        if self._thread is None:
            for stream in self._streams:
                stream.finish()
        else:
            self._thread.join()
        os.close(self._stop_reader)
