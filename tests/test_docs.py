"""The site: every public name and every page has its place."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

import ignite_dist as idist
from helpers import ROOT
from pages import blocks

DOCS = ROOT / "docs"


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md")]
    names = Counter(re.findall(r"^::: ignite_dist\.(\w+)$", "\n".join(pages), re.MULTILINE))
    assert names == Counter(["print", *idist.__all__])


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_every_name_of_the_reference_is_in_code_that_is_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"^::: ignite_dist\.(?:testing\.)?([\w.]+)$", text, re.MULTILINE)
    code = "\n".join(block.text for block in blocks(text))
    used = set(re.findall(r"(?:idist\.)?((?:faults\.)?\w+)", code))
    assert set(names) <= used, set(names) - used


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_a_page_shows_the_cells_of_the_notebook_and_their_outputs() -> None:
    page = (DOCS / "recipes" / "notebooks.md").read_text(encoding="utf-8")
    shown = runpy.run_path(str(DOCS / "notebook_cells.py"))["on_page_markdown"](page)
    assert "<!--" not in shown and "\x1b" not in shown
    assert "```python\ndef load_data():" in shown and "```text\ntest accuracy: " in shown
    assert "](data:image/png;base64," in shown and "ValueError: the loss of rank 1 is NaN\n" in shown


def test_the_first_page_has_the_script_of_the_readme() -> None:
    readme, index = (
        (folder / name).read_text() for folder, name in ((ROOT, "README.md"), (DOCS, "index.md"))
    )
    (script,) = re.findall(r"```python title=.train.py.\n.*?```\n\n```console\n.*?```", index, re.DOTALL)
    assert script in readme
