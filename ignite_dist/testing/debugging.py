"""The debugger of pytest in the workers: one rank at a time uses the terminal of the launching pytest."""

from __future__ import annotations

import os
import pdb
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import pytest

from ignite_dist.context import identity

# Rank 0 goes first. After a failure of another rank, rank 0 has this long to fail too.
GRACE_SECONDS = 1.0


class DebuggerWanted(NamedTuple):
    """The rank waits for the terminal. The answer is True, or False if another rank has it."""


class DebuggerLeft(NamedTuple):
    """The rank no longer uses the terminal."""


class Terminal:
    """The terminal of the launching pytest, which lends it to the ranks of a world."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._holder: int | None = None
        self._waiting: dict[int, Connection] = {}
        self._seconds_left = 0.0

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """In the block, file 0 is the terminal. pytest replaces it in the launching process."""
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is None:
            yield
            return
        capture.suspend_global_capture(in_=True)
        try:
            yield
        finally:
            capture.resume_global_capture()
            capture.suspend_global_capture()  # outside of tests, pytest captures the input only

    def introduce(self, connection: Connection, pid: int) -> None:
        """Send the terminal to a worker, inside of :meth:`without_capture`."""
        has_input = sys.__stdin__ is not None  # else file 0 is something else, here and in the worker
        connection.send(has_input)
        if has_input:
            send_handle(connection, 0, pid)

    def wait(self, running: Mapping[int, Connection], deadline: float) -> list[Any]:
        """The connections that have messages. Empty after the deadline, which a debugger suspends."""
        while True:
            if self._holder is not None and self._holder not in running:
                self._holder = None
            seconds = None if self._holder is not None else max(0.0, deadline - time.monotonic())
            try:
                ready = wait(list(running.values()), seconds)
            except KeyboardInterrupt:
                if self._holder is None:
                    raise
                continue  # Ctrl-C belongs to the debugger
            if ready or not self._waiting:
                return ready
            self._lend(min(self._waiting), deadline)

    def receive(self, rank: int, connection: Connection, message: Any, deadline: float) -> float:
        """Act on a message about the debugger. Returns the new deadline."""
        now = time.monotonic()
        if isinstance(message, DebuggerLeft):
            self._holder = None
            self._config.hook.pytest_leave_pdb(config=self._config, pdb=pdb)
            return now + self._seconds_left
        self._waiting[rank] = connection
        if self._holder is not None:
            self._refuse_waiting()
        elif rank == 0:
            self._lend(rank, deadline)
        return min(deadline, now + GRACE_SECONDS)

    def end_of_test(self) -> None:
        """Forget the ranks of the test, of which some may be lost."""
        if self._holder is not None:
            self._holder = None
            self._config.hook.pytest_leave_pdb(config=self._config, pdb=pdb)
        self._waiting.clear()

    def _lend(self, rank: int, deadline: float) -> None:
        self._holder = rank
        self._seconds_left = max(GRACE_SECONDS, deadline - time.monotonic())
        # Plugins stop their clocks then, for example faulthandler_timeout.
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=pdb)
        _answer(self._waiting.pop(rank), True)
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        for connection in self._waiting.values():
            _answer(connection, False)
        self._waiting.clear()


def _answer(connection: Connection, may_use: bool) -> None:
    with suppress(OSError):  # the rank has ended, which the world finds
        connection.send(may_use)


class RankDebugger:
    """A plugin of the worker's pytest: asks for the terminal before pytest opens a debugger."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_open = False
        self._post_mortem: Any = None
        if connection.recv():
            # pytest keeps this file as the one that a debugger reads.
            handle = recv_handle(connection)
            os.dup2(handle, 0)
            os.close(handle)
            sys.stdin = os.fdopen(0, encoding=sys.stdin.encoding, closefd=False)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the place of pytest's plugin for ``--pdb``."""
        self._post_mortem = config.pluginmanager.unregister(name="pdbinvoke")
        if self._post_mortem is not None:
            # Ctrl-C at the prompt reaches all processes of the terminal. The launching pytest ends the ranks.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if identity.get_rank() != 0:
            pdb.set_trace = _warn_of_breakpoint  # pytest restores it

    def pytest_exception_interact(self, node: pytest.Item, call: Any, report: Any) -> None:
        """Open a debugger at a failure of the test."""
        if self._post_mortem is None or not isinstance(report, pytest.TestReport) or not self._enter():
            return
        manager = node.config.pluginmanager
        capture = manager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        reporter = pytest.TerminalReporter(node.config)  # workers have none
        manager.register(reporter, "terminalreporter")
        try:
            reporter.write_sep(">", f"rank {identity.get_rank()}")
            self._post_mortem.pytest_exception_interact(node=node, call=call, report=report)
        finally:
            manager.unregister(reporter)
            self.leave()

    def pytest_enter_pdb(self) -> None:
        """Wait for the terminal at ``breakpoint()`` and with ``--trace``."""
        if not self._enter():
            pytest.fail("Another rank uses the debugger. breakpoint() works on rank 0.")

    def pytest_leave_pdb(self) -> None:
        """Give the terminal back when the test continues."""
        self.leave()

    def leave(self) -> None:
        """Give the terminal back, if this rank has it."""
        if self._is_open:
            self._is_open = False
            signal.signal(signal.SIGINT, self._handler)
            self._connection.send(DebuggerLeft())

    def _enter(self) -> bool:
        if not self._is_open:
            self._connection.send(DebuggerWanted())
            self._is_open = self._connection.recv()
            if self._is_open:
                self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._is_open


def _warn_of_breakpoint(**_: Any) -> None:
    warnings.warn(
        f"breakpoint() has no effect on rank {identity.get_rank()}: the debugger opens on rank 0.",
        stacklevel=2,
    )
