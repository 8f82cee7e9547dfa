"""The launcher's configuration of ``logging``, for its workers."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler, TimedRotatingFileHandler, WatchedFileHandler
from typing import Any

from ignite_dist.values import serialization

# The handlers of files that hold the plain lines. A subclass may write something else.
_FILE_HANDLERS = (logging.FileHandler, RotatingFileHandler, TimedRotatingFileHandler, WatchedFileHandler)


@dataclass(frozen=True)
class _Handler:
    """A handler of the launcher.

    Attributes:
        target: ``"stdout"``, ``"stderr"`` or the path of a file; empty for a handler that writes nothing.
        level: level of the handler.
        encoding: encoding of the file.
        parts: the formatter and the filters, encoded.
    """

    target: str
    level: int
    encoding: str | None
    parts: bytes

    @classmethod
    def of(cls, handler: logging.Handler) -> _Handler | None:
        """The description of a handler for the terminal, a file or nothing; None for other handlers."""
        parts = _encoded(handler.formatter, handler.filters)
        if type(handler) is logging.NullHandler:  # pytest's handler is a subclass, and keeps the records
            return cls("", handler.level, None, parts)
        if type(handler) in _FILE_HANDLERS:
            assert isinstance(handler, logging.FileHandler)
            _set_append_mode(handler)
            return cls(handler.baseFilename, handler.level, handler.encoding, parts)
        for name in ("stdout", "stderr"):
            streams = getattr(sys, name), getattr(sys, f"__{name}__")
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                return cls(name, handler.level, None, parts)
        return None

    @classmethod
    def on_stderr(cls, handler: logging.Handler) -> _Handler:
        """The description of a handler of stderr in place of ``handler``."""
        return cls("stderr", handler.level, None, _encoded(handler.formatter, handler.filters))

    def make(self) -> logging.Handler:
        """The same handler, in this process."""
        formatter, filters = _decoded(self.parts)
        handler: logging.Handler
        if not self.target:
            handler = logging.NullHandler()
        elif self.target in ("stdout", "stderr"):
            handler = logging.StreamHandler(getattr(sys, self.target))
        else:
            handler = _FileOfLauncher(self.target, "a", self.encoding, delay=True)
        handler.setLevel(self.level)
        handler.setFormatter(formatter)
        handler.filters = list(filters)
        return handler


class _FileOfLauncher(WatchedFileHandler):
    """Opens the file again after the launcher has renamed it (rotation)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)


def _encoded(formatter: logging.Formatter | None, filters: Sequence[Any]) -> bytes:
    try:
        return bytes(serialization.encode((formatter, tuple(filters))))
    except TypeError:
        return bytes(serialization.encode((None, ())))


def _decoded(parts: bytes) -> tuple[logging.Formatter | None, Sequence[Any]]:
    try:
        formatter, filters = serialization.decode(parts)
    except Exception:  # a class cannot be imported here
        return None, ()
    return formatter, filters


def _set_append_mode(handler: logging.FileHandler) -> None:
    """Let this process write at the end of the file: with mode "w" it would overwrite the workers' lines."""
    if handler.stream is None:  # not open yet
        return
    with suppress(OSError, ValueError):  # closed, or not a file
        fd = handler.stream.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def _is_shown(logger: logging.Logger | None) -> bool:
    """True if records that come to ``logger`` come to a handler that workers have too."""
    while logger is not None:
        if any(_Handler.of(handler) is not None for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


@dataclass(frozen=True)
class _Logger:
    level: int
    propagate: bool
    disabled: bool
    filters: bytes
    handlers: tuple[_Handler, ...]

    @classmethod
    def of(cls, logger: logging.Logger) -> _Logger:
        handlers = tuple(found for handler in logger.handlers if (found := _Handler.of(handler)) is not None)
        if not handlers and not _is_shown(logger.parent if logger.propagate else None):
            # rich's handler, for example, cannot be sent. The records would be lost without a word.
            others = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest.")]
            handlers = tuple(map(_Handler.on_stderr, others[:1]))
        filters = _encoded(None, logger.filters)
        return cls(logger.level, logger.propagate, logger.disabled, filters, handlers)

    def apply(self, logger: logging.Logger) -> None:
        """Configure ``logger``, unless this worker has given it a handler."""
        if logger.handlers:
            return
        logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        logger.handlers = [handler.make() for handler in self.handlers]
        logger.filters = list(_decoded(self.filters)[1])


@dataclass(frozen=True)
class LogSettings:
    """Levels, formats, filters and handlers of the launcher's loggers.

    Attributes:
        root: the root logger.
        others: the other loggers that have been configured, by name.
        disabled_level: the level of ``logging.disable``.
    """

    root: _Logger
    others: dict[str, _Logger]
    disabled_level: int

    @classmethod
    def of_this_process(cls) -> LogSettings:
        """The settings of the launcher."""
        loggers: dict[str, Any] = dict(logging.Logger.manager.loggerDict)
        configured = {
            name: _Logger.of(one)
            for name, one in loggers.items()
            if isinstance(one, logging.Logger)
            and (one.level or one.handlers or one.filters or one.disabled or not one.propagate)
        }
        return cls(_Logger.of(logging.getLogger()), configured, logging.Logger.manager.disable)

    def apply(self) -> None:
        """Log as the launcher does. A logger to which this worker has added a handler stays as it is."""
        logging.disable(self.disabled_level)
        self.root.apply(logging.getLogger())
        for name, settings in self.others.items():
            settings.apply(logging.getLogger(name))
