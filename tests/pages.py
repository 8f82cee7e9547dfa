"""The pages of the site and the README, and their code blocks.

A test runs each page as a reader would, from the top to the bottom:

- a block with a title is a file of this name;
- the ``python`` blocks of a page run in one Python session, as in a notebook;
- so do its ``pycon`` blocks, and their results are compared;
- the commands of a ``console`` or ``bash`` block run in the folder of the files. Output in a ``console``
  block is compared: ``...`` stands for any text, and numbers with a point may differ a little.

Commands that have a test of their own are left out, see :mod:`commands`. A page whose front matter says
``needs: horovod`` (or ``xla``, ``launchers``) runs where these are installed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"\A---\n(?:.*\n)*?needs: (\w+)\n(?:.*\n)*?---\n")


class Block(NamedTuple):
    """A code block. ``line`` is that of its first line of code in the page, from 1."""

    language: str
    title: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """The code blocks of a page, in order."""
    found = _BLOCK.finditer(text)
    return [Block(one[1], one[2] or "", one[3], text.count("\n", 0, one.start(3)) + 1) for one in found]


def without_blocks(text: str) -> str:
    """The text between the code blocks."""
    return _BLOCK.sub("", text)


def needs(text: str) -> str:
    """The marker of the page's test; empty for a page that runs everywhere."""
    found = _NEEDS.match(text)
    return found[1] if found else ""


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a block, each with its lines of output; none in a block of another kind."""
    found: list[tuple[str, list[str]]] = []
    if block.language not in ("bash", "console") or block.title:
        return found
    for line in block.text.replace("\\\n", "").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            found[-1][1].append(line)
        elif line.strip() and not line.startswith("#"):
            found.append((without_comment(line.removeprefix("$ ")), []))
    return found


def without_comment(line: str) -> str:
    """The command of a line, without the comment at its end."""
    return re.sub(r"(^|\s+)#.*", "", line).strip()
