"""The commands that the documents show, and a shell that runs them as a reader would.

A test that runs a command names it as ``documented("...")``. ``test_commands.py`` finds these names, and
compares them with what the documents show. ``test_pages.py`` runs the other commands of the pages.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import ROOT, TESTS, loopback, plain_environ, python_that_forks, without_gloos
from pages import PAGES, blocks, commands_of, without_blocks, without_comment

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# The folder of ``python``, ``torchrun``, ``horovodrun``, ...: that of the interpreter that runs the tests.
BIN = Path(sys.executable).parent

_PROGRAM = (
    "accelerate|env|horovodrun|ignite-dist|make|mpiexec|mpirun|pip|pytest|python|salloc|sbatch|srun|torchrun"
)
_COMMAND = re.compile(rf"([A-Z_]+=\S+ )*(\S+/)?({_PROGRAM}|pre-commit)(\.\w+)? \S.*")


def documented(command: str) -> str:
    """The command, which stands like this in a document."""
    return command


def with_markers(*commands: str) -> list[Any]:
    """The commands for ``parametrize``: those with Horovod or XLA are run where these are installed."""
    marks = {"horovod": pytest.mark.horovod, "xla-tpu": pytest.mark.xla}
    return [
        pytest.param(command, marks=[mark for word, mark in marks.items() if f"--backend {word}" in command])
        for command in commands
    ]


def with_test() -> set[str]:
    """The commands that some test names as ``documented(...)``."""
    found = set()
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]
    for text in filter(lambda text: f"{documented.__name__}(" in text, texts):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == documented.__name__:
                found.add(ast.literal_eval(node.args[0]))
    return found


# --- what the documents show ---------------------------------------------------------------------------


def shown() -> set[str]:
    """Every command of the documents and of the examples' docstrings, without its comment."""
    found = set()
    for path in DOCUMENTS:
        found.update(_of_document(path.read_text(encoding="utf-8")))
    for path in EXAMPLES:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        lines = [line.strip() for line in docstring.splitlines() if line.startswith("    ")]
        found.update(filter(_COMMAND.fullmatch, [*map(without_comment, lines), *_inline(docstring)]))
    return found


def in_blocks_of_pages() -> set[str]:
    """The commands in code blocks of pages: ``test_pages.py`` runs them unless they have another test."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    return {command for text in texts for block in blocks(text) for command, _ in commands_of(block)}


def _of_document(text: str) -> Iterator[str]:
    yield from (command for block in blocks(text) for command, _ in commands_of(block))
    yield from filter(_COMMAND.fullmatch, _inline(without_blocks(text)))


def _inline(text: str) -> list[str]:
    """The code inside of the text; it may go over the end of a line."""
    codes = (re.findall(r"(?<!`)`([^`]+)`(?!`)", paragraph) for paragraph in re.split(r"\n\s*\n", text))
    return [" ".join(code.split()) for code in itertools.chain.from_iterable(codes)]


# --- the shell -----------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a command ended."""

    returncode: int
    output: str
    errors: str


def forks_on_path() -> dict[str, str]:
    """Variables of a shell whose ``python``, ``torchrun``, ... are forks of a Python that has torch."""
    forks = Path(python_that_forks()).parent
    return {
        "PATH": f"{forks}:{BIN}:{os.environ['PATH']}",
        "PYTHON_EXEC": str(forks / "python"),  # of torchrun's workers
    }


def at_a_shell(
    command: str, folder: Path, *, programs: Path | None = None, seconds: float = 280, **environ: str
) -> Ended:
    """Run lines of a shell in ``folder``, with the programs of ``programs``, on the CPU.

    Where no programs are named, those of :func:`forks_on_path`.
    """
    environment = plain_environ(CUDA_VISIBLE_DEVICES="", **loopback())
    if programs is None:
        environment.update(forks_on_path())
    else:
        environment["PATH"] = f"{programs}:{environment['PATH']}"
    ended: Any = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Ended(ended.returncode, without_gloos(ended.stdout), ended.stderr)


def open_mpi(folder: Path) -> dict[str, str]:
    """The environment in which ``mpirun`` is that of Open MPI, and starts as root and on few cores too."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "mpirun").symlink_to(shutil.which("mpirun.openmpi") or "/nowhere")
    return {
        "PATH": f"{programs}:{BIN}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMP_NUM_THREADS": "1",
    }


def with_examples(folder: Path) -> Path:
    """``folder``, where ``examples/`` is that of this checkout: what a command writes stays in the folder."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder
