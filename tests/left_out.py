"""The line at the end of a run that says which tests it has left out, and which command runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

# The marker of a test, and the command that runs those tests.
COMMANDS = {
    "gpu": "make test-gpu",
    "xla": "make test-xla",
    "horovod": "make test-horovod",
    "mpi4py": "make test-mpi4py",
    "launchers": "make test-launchers",
    "dist": "make dist",
    "long": "make test-long",
}


class LeftOut:
    """A plugin that counts the tests that ``-m`` leaves out. With ``-k`` it prints nothing."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count each test once, under the first of its markers."""
        for item in items:
            marker = next((name for name in COMMANDS if item.get_closest_marker(name)), None)
            if marker is not None:
                self._counts[marker] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the counts from a process of pytest-xdist."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self._counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the counts of one process: all collect the same tests."""
        self._counts = Counter(getattr(node, "workeroutput", {}).get("left_out", self._counts))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the line."""
        if self._counts and config.option.markexpr and not config.option.keyword:
            kinds = [f"{count:,} {name} ({COMMANDS[name]})" for name, count in self._counts.most_common()]
            terminalreporter.write_line(
                f"Left out: {', '.join(kinds)}. `make test-all` runs all that can run here."
            )
