"""The script of the cases on a GPU, in a dry run: what it runs, shows and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import gpu_cases  # registers the cases
from case_runner import CASES
from helpers import run_new_python

SCRIPT = Path(gpu_cases.__file__)


@pytest.mark.long
def test_a_dry_run_shows_and_writes_what_a_case_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    ended = run_new_python(SCRIPT, "--device", "cpu", "collectives", "--json", path)
    assert ended.returncode == 0, ended.stdout
    assert "1 of 1 cases as expected on the CPU" in ended.stdout
    (case,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert case["as_expected"] and re.match(r"\d+ calls of tensors", case["seen"])
    assert case["expected"] == CASES["collectives"].expected


def test_a_case_that_takes_too_long_is_ended_and_the_next_one_runs() -> None:
    ended = run_new_python(SCRIPT, "--device", "cpu", "hang", "collectives", "--seconds", "0.1")
    assert ended.returncode == 1
    assert "0 of 2 cases as expected" in ended.stdout and ended.stdout.count("no end within 0 s") == 2


def test_every_case_says_what_is_right() -> None:
    numbers = {case.number.split()[0] for case in CASES.values()}
    assert numbers == {str(number) for number in range(1, 16)}
    assert all(case.expected.endswith((".", "`.")) for case in CASES.values())
