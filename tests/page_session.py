"""The process that runs a page: see :mod:`pages`."""

from __future__ import annotations

import doctest
import linecache
import math
import re
import sys
from pathlib import Path

from commands import at_a_shell
from helpers import ROOT
from pages import Block, blocks, commands_of

# What an agent of torchrun writes if the other agent, which serves the store, has ended first.
_STORE_HAS_ENDED = re.compile(
    r"^\[W.*TCPStore\.cpp:\d+\] \[c10d\] .*\n"
    r"(?:(?:Exception raised |frame #|<omitting |\[W.*TCPStore\.cpp"
    r"|E.*/elastic/agent/server/api\.py:\d+\]).*\n|\n)*"
    r"W.* has failed to shutdown the rendezvous '.*' due to an error of type RendezvousConnectionError\.\n",
    re.MULTILINE,
)
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d+)(?![\w.])")


def run(page: Path, left_out: set[str], environ: dict[str, str]) -> None:
    """Run the blocks of ``page`` in this process, whose working directory is the page's folder.

    Args:
        page: a page.
        left_out: commands that are not run.
        environ: further variables of the commands.

    Raises:
        AssertionError: a block does something else than the page shows. Other errors are those of the code.
    """
    session = sys.modules["__main__"].__dict__
    session["__name__"] = "__main__"
    for block in blocks(page.read_text(encoding="utf-8")):
        place = f"{page.relative_to(ROOT)}:{block.line}"
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            _run_cell(block, place, session)
        elif block.language == "pycon":
            _run_examples(block, place, session)
        for command, shown in commands_of(block):
            if command not in left_out:
                _run_command(command, shown, place, environ)


def _run_cell(block: Block, place: str, session: dict[str, object]) -> None:
    linecache.cache[place] = (len(block.text), None, block.text.splitlines(keepends=True), place)
    exec(compile(block.text, place, "exec"), session)


def _run_examples(block: Block, place: str, session: dict[str, object]) -> None:
    examples = doctest.DocTestParser().get_doctest(block.text, session, place, place, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failures, _ = runner.run(examples, clear_globs=False)
    session.update(examples.globs)
    assert failures == 0, f"{place}: see above"


def _run_command(command: str, shown: list[str], place: str, environ: dict[str, str]) -> None:
    ended = at_a_shell(f"( {command}\n) 2>&1", Path.cwd(), **{"OMP_NUM_THREADS": "1", **environ})
    what = f"{place}: {command}\nended with {ended.returncode} and wrote:\n{ended.output}"
    shows_failure = any("Error" in line or "failed" in line for line in shown)
    assert ended.returncode == 0 or shows_failure, what
    lines = [line.rstrip() for line in _STORE_HAS_ENDED.sub("", ended.output).splitlines()]
    assert not shown or is_as_shown(lines, [line.rstrip() for line in shown]), what


def is_as_shown(lines: list[str], shown: list[str]) -> bool:
    """True if the lines of output are as the page shows them."""
    text, pattern = "\n".join(lines).strip("\n"), "\n".join(shown).strip("\n")
    parts = (_NUMBER.split(part) for part in pattern.split("..."))
    escaped = (
        "".join(r"(\d+\.\d+)" if number % 2 else re.escape(piece) for number, piece in enumerate(part))
        for part in parts
    )
    found = re.fullmatch(".*?".join(escaped), text, re.DOTALL)
    if found is None:
        return False
    numbers = _NUMBER.findall(pattern.replace("...", "\n"))
    return all(
        math.isclose(float(one), float(other), rel_tol=0.05, abs_tol=0.02)
        for one, other in zip(found.groups(), numbers, strict=True)
    )
