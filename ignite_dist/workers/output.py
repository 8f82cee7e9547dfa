"""Output of workers: whole lines, and prefixes that name the rank."""

from __future__ import annotations

import codecs
import contextvars
import io
import os
import re
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, TextIO

_BUFFER_SIZE = 65_536
_NAMES = {1: "stdout", 2: "stderr"}

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


def write_whole_lines(replaced: Collection[int] = ()) -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` write each line in one piece.

    Without a buffer (``PYTHONUNBUFFERED``), ``print`` writes the text and the end of the line separately, and
    a buffer of fixed size ends within a line. Lines of other workers may come in between.

    Args:
        replaced: the files that this launch has replaced. The streams of a fork may write elsewhere: those of
            a notebook's kernel, for example.
    """
    for fd, name in _NAMES.items():
        stream = getattr(sys, name)
        if fd not in replaced:
            if type(stream) is not io.TextIOWrapper or stream.closed or stream.fileno() != fd:
                continue
            if isinstance(stream.buffer, _LineWriter):
                continue
            stream.flush()
        raw: Any = io.FileIO(fd, "w", closefd=False)
        raw.name = getattr(stream, "name", f"<{name}>")
        encoding, errors = (getattr(stream, attribute, None) for attribute in ("encoding", "errors"))
        writer = _LineWriter(raw, _BUFFER_SIZE)
        setattr(sys, name, io.TextIOWrapper(writer, encoding or "utf-8", errors, write_through=True))


@dataclass(frozen=True)
class InheritedFile:
    """A file that a fork inherits. It has the interface of ``multiprocessing.reduction.DupFd``."""

    fd: int

    def detach(self) -> int:
        """A duplicate, which the caller owns."""
        return os.dup(self.fd)


# --- in the launcher ---------------------------------------------------------------------------------


def fill_standard_files() -> None:
    """Open ``/dev/null`` for each of stdin, stdout and stderr that is closed.

    Otherwise sockets and pipes of a launch get these numbers, which new processes use for their streams.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # as the files that a process starts with
    os.close(fd)


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


class _File:
    """Writes to a file of the launcher."""

    def __init__(self, fd: int) -> None:
        self.has_colors = os.isatty(fd) and not os.environ.get("NO_COLOR")
        self._file = os.dup(fd)

    def write(self, data: bytes) -> None:
        with suppress(OSError):  # nobody reads it; the worker must not wait
            while data:
                data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


class _Text:
    """Writes to a stream of the launcher that has no file: that of a notebook's cell, for example."""

    has_colors = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        self._write(self._decoder.decode(data))

    def close(self) -> None:
        """Write an incomplete last character. The stream belongs to the launcher."""
        self._write(self._decoder.decode(b"", final=True))

    def _write(self, text: str) -> None:
        with suppress(Exception):  # whatever the user's stream raises: the worker must not wait
            self._stream.write(text)


def _replaced_stream(fd: int) -> TextIO | None:
    """``sys.stdout`` or ``sys.stderr`` if it writes elsewhere than to ``fd``, else None.

    A notebook, ``contextlib.redirect_stdout`` and pytest's ``capsys`` replace the streams, not the files.
    """
    stream: TextIO | None = getattr(sys, _NAMES[fd])
    if stream is None or getattr(stream, "closed", False):
        return None
    try:
        return None if os.path.sameopenfile(stream.fileno(), fd) else stream
    except (AttributeError, OSError, TypeError, ValueError):  # the stream has no file
        return stream


class _Stream:
    """A pipe from a worker, and its target in the launcher."""

    def __init__(self, target: _File | _Text, label: str, number: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._target = target
        text = label and f"[{label}] "
        if text and target.has_colors:
            text = f"\033[{31 + number % _NUM_COLORS}m[{label}]\033[0m "
        self._prefix = text.encode()
        self._incomplete = b""

    def forward(self) -> bool:
        """Write what has arrived; with a prefix, whole lines. Returns False if no more will arrive."""
        data = self._read()
        self._write(data or b"")
        return data != b""

    def _write(self, data: bytes) -> None:
        if not self._prefix:
            self._target.write(data)
            return
        self._incomplete += data
        end = 0
        while line := _LINE.match(self._incomplete, end):  # finditer() takes minutes for a long line
            self._target.write(line[0] if line[0] == b"\r" else self._prefix + line[0])
            end = line.end()
        self._incomplete = self._incomplete[end:]

    def _read(self) -> bytes | None:
        """What is in the pipe; None if nothing is, empty if its other end is closed."""
        try:
            return os.read(self.reader, _BUFFER_SIZE)
        except BlockingIOError:
            return None

    def finish(self) -> None:
        """Write everything that is left, and close the files."""
        while data := self._read():
            self._write(data)
        if self._incomplete:
            self._target.write(self._prefix + self._incomplete + b"\n")
        os.close(self.reader)
        self._target.close()


class ForwardedOutput:
    """The output of a launch's workers that a thread of the launcher reads, and prefixes if asked to.

    The workers' standard output and error are pipes, so lines of subprocesses and of C++ are read too. A pipe
    keeps what a crashed worker has written.

    Args:
        has_prefix: True to put the rank before each line.
    """

    def __init__(self, has_prefix: bool) -> None:
        self._has_prefix = has_prefix
        # The streams of the call of spawn: those of a notebook's cell may be others when a worker writes.
        self._replaced = {fd: stream for fd in _NAMES if (stream := _replaced_stream(fd)) is not None}
        self._streams: list[_Stream] = []
        self._stop_reader = self._stop_writer = -1
        self._thread: threading.Thread | None = None

    def pipes_for(self, label: str, number: int) -> Mapping[int, int]:
        """New pipes for the process ``label``: the ends to write, by the files that they replace."""
        new = {}
        for fd in _NAMES:
            if fd in self._replaced:
                target: _File | _Text = _Text(self._replaced[fd])
            elif self._has_prefix and is_open(fd):
                target = _File(fd)
            else:
                continue
            new[fd] = _Stream(target, label if self._has_prefix else "", number)
        self._streams += new.values()
        return {fd: stream.writer for fd, stream in new.items()}

    def start(self) -> None:
        """Forward the output from now on. All workers have been started."""
        if not self._streams:
            return
        self._stop_reader, self._stop_writer = os.pipe()
        # ipykernel keeps the running cell in a context variable. Without it, the output would go to whichever
        # cell runs when a worker writes.
        run = partial(contextvars.copy_context().run, self._forward)
        self._thread = threading.Thread(target=run, name="output of workers", daemon=True)
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
        streams, self._streams = self._streams, []
        if self._thread is None:
            for stream in streams:
                stream.finish()
            return
        if streams:
            os.close(self._stop_writer)
            self._thread.join()
            os.close(self._stop_reader)
