"""Each page of the site is run, see :mod:`pages`. ``test_readme.py`` runs the README and the first page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import commands
import test_commands
from helpers import ROOT, plain_environ, run_python
from page_session import is_as_shown
from pages import PAGES, blocks, needs
from slurm import slurm

pytestmark = pytest.mark.long

# The commands that have a test of their own, or a reason why none runs them.
LEFT_OUT = {*test_commands.RUN_BY_CI, *test_commands.NOT_RUN, *commands.with_test()}
OF_TEST_README = (ROOT / "README.md", ROOT / "docs" / "index.md")


def _with_marker(page: Path) -> Any:
    marker = needs(page.read_text(encoding="utf-8"))
    return pytest.param(page, marks=[getattr(pytest.mark, marker)] if marker else [])


def _has_code(page: Path) -> bool:
    return page not in OF_TEST_README and any(
        block.language for block in blocks(page.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize(
    "page",
    [_with_marker(page) for page in PAGES if _has_code(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_shows_what_happens(page: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environ = plain_environ(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{environ['PYTHONPATH']}"
    with _launchers(page, tmp_path_factory) as of_commands:
        arguments = f"pathlib.Path({str(page)!r}), {LEFT_OUT!r}, {of_commands!r}"
        run = f"import pathlib, page_session; page_session.run({arguments})"
        ended = run_python("-c", run, cwd=tmp_path_factory.mktemp("page"), env=environ)
    assert ended.returncode == 0, ended.stdout


@contextmanager
def _launchers(page: Path, folders: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which the commands of ``page`` find Open MPI and Slurm, if it is about launchers."""
    text = page.read_text(encoding="utf-8")
    if needs(text) != "launchers":
        yield {}
        return
    cluster = slurm(folders.mktemp("slurm")) if "$ srun" in text else nullcontext({})
    with cluster as of_slurm:
        yield {**commands.open_mpi(folders.mktemp("open_mpi")), **of_slurm}


def test_each_block_says_its_language() -> None:
    """Only a text without a language is not run."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = blocks(text)
        # A file of the examples is shown in an indented block.
        num_included = len(re.findall(r'^    ```python\n    --8<-- "examples/', text, re.MULTILINE))
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * (len(found) + num_included), page
        untitled = {block.language for block in found if not block.title}
        assert untitled <= {"bash", "console", "pycon", "python", ""}, page


@pytest.mark.parametrize(
    ("line", "shown", "is_same"),
    [
        ("loss 0.5012 on 2 ranks", "loss 0.500 on 2 ranks", True),
        ("loss 0.5012 on 2 ranks", "loss 0.500 on 3 ranks", False),
        ("loss 0.9 on 2 ranks", "loss 0.500 on 2 ranks", False),
        ("1 passed in 0.31s", "1 passed in ...", True),
        ("a [b] (c)", "a [b] (c)", True),
        ("a\nb\nc", "a\n...\nc", True),
        ("a\nb", "a", False),
    ],
)
def test_shown_output_is_compared(line: str, shown: str, is_same: bool) -> None:
    assert is_as_shown(line.splitlines(), shown.splitlines()) is is_same
