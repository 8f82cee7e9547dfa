"""Coverage of the code that runs in workers. pytest-cov combines the files with its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

# The launching pytest gives these warnings.
_WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured"]


class LineCoverage:
    """Measures this process as the options of pytest-cov say. A plugin of the worker's pytest."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from coverage import Coverage  # of pytest-cov

        sources = options["cov_source"]  # has True for --cov without a value
        self._coverage = Coverage(
            source=None if True in sources else sources,
            branch=options["cov_branch"],
            data_suffix=True,
            config_file=options["cov_config"],
        )
        self._coverage.set_option("run:disable_warnings", _WARNINGS)
        self._has_contexts = options["cov_context"] == "test"
        self._coverage.start()

    @classmethod
    def plugins(cls, options: Mapping[str, Any]) -> list[LineCoverage]:
        """Start to measure, if the launching pytest does."""
        return [cls(options)] if options.get("cov_source") and not options["no_cov"] else []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Name the context as pytest-cov does."""
        self._switch_context(item, "setup")

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Name the context as pytest-cov does."""
        self._switch_context(item, "run")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Name the context as pytest-cov does."""
        self._switch_context(item, "teardown")

    def pytest_runtest_logfinish(self) -> None:
        """Save after each test: the launching pytest may end this process at any time."""
        self._coverage.save()

    def _switch_context(self, item: pytest.Item, phase: str) -> None:
        if self._has_contexts:
            self._coverage.switch_context(f"{item.nodeid}|{phase}")
