"""Files of tests as users of ``ignite_dist.testing`` write them, run by a pytest of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import helpers

IMPORTS = """
import os, signal, threading, time, warnings
import pytest
import ignite_dist as idist
"""
Runner = Callable[..., tuple[dict[str, str], str]]


def run_folder(folder: Path, *arguments: str) -> tuple[dict[str, str], str]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    ended = run_pytest(folder, "--junitxml=outcomes.xml", *arguments)
    return outcomes(folder / "outcomes.xml"), ended.stdout


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return helpers.run_python(
        *("-m", "pytest", "-p", "pytest_ignite_dist", "-p", "no:cacheprovider", *arguments), cwd=folder
    )


def outcomes(path: Path) -> dict[str, str]:
    """By test: passed, or the worst of what pytest has written: failure, error or skipped."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[case.attrib["name"]] = kinds[0] if kinds else "passed"
    return found
