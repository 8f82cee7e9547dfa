"""The launcher's configuration of ``logging``, for its workers."""

from __future__ import annotations

import logging
import pickle
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogSettings:
    """Levels of the launcher's root logger and of its first handler for the terminal, and the format.

    Attributes:
        root_level: level of the root logger.
        handler_level: level of the handler; None if there is no such handler.
        formatter: the pickled formatter; empty if it cannot be pickled.
        to_stdout: True if the handler writes to the standard output, not to the standard error.
    """

    root_level: int
    handler_level: int | None = None
    formatter: bytes = b""
    to_stdout: bool = False

    @classmethod
    def of_this_process(cls) -> LogSettings:
        """The settings of the launcher."""
        root = logging.getLogger()
        for handler in root.handlers:
            stream = getattr(handler, "stream", None)
            is_stdout = stream in (sys.stdout, sys.__stdout__)
            if isinstance(handler, logging.StreamHandler) and (
                is_stdout or stream in (sys.stderr, sys.__stderr__)
            ):
                return cls(root.level, handler.level, _pickled(handler.formatter), is_stdout)
        return cls(root.level)

    def apply(self) -> None:
        """Log as the launcher does, unless this worker has configured ``logging`` itself.

        The handler replaces ``logging.lastResort``, which handles what no other handler does. So a worker
        may still call ``logging.basicConfig``, which has no effect if the root logger has a handler.
        """
        root = logging.getLogger()
        if root.handlers:
            return
        root.setLevel(self.root_level)
        if self.handler_level is None:
            return
        handler = logging.StreamHandler(sys.stdout if self.to_stdout else sys.stderr)
        handler.setLevel(self.handler_level)
        handler.setFormatter(self._formatter())
        logging.lastResort = handler

    def _formatter(self) -> logging.Formatter | None:
        try:
            found: logging.Formatter | None = pickle.loads(self.formatter)
        except Exception:  # it could not be pickled, or its class cannot be imported here
            return None
        return found


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # of a user's class
        return b""
