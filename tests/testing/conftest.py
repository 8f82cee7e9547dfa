"""Fixtures of the tests of the plugin for pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

import helpers
from their_tests import IMPORTS, Runner, run_folder


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """``run(text, *arguments)``: run a file of tests. Returns the outcome of each, and the output."""

    def run_file(text: str, *arguments: str) -> tuple[dict[str, str], str]:
        helpers.write_script(tmp_path, text, "test_theirs.py")
        file = tmp_path / "test_theirs.py"
        file.write_text(IMPORTS + file.read_text())
        return run_folder(tmp_path, *arguments)

    return run_file
