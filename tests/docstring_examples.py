"""The examples of the package's docstrings, and how they are run.

An example is an indented block after ``::``. It continues ``docstring_names.py``, which defines the names
that the examples assume. A comment after an expression says what it gives::

    idist.split_by_rank(["a", "b", "c"])  # on two ranks: ["a", "b"] on rank 0, ["c"] on rank 1

Places are ``on both``, ``on every rank``, ``on rank 0``, ``on ranks 0 and 2``, ``on node 1`` and
``elsewhere``. A comment without one of them is not compared.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ignite_dist as idist
from helpers import ROOT, TESTS

PACKAGE = ROOT / "ignite_dist"
NAMES = TESTS / "docstring_names.py"

_BLOCK = re.compile(r"^(?P<indent> *)\S.*::\n\n(?P<code>(?:(?P=indent) {4}.*\n|\n)+)", re.MULTILINE)
_PLACE = r"on both|on every rank|on ranks? \d+(?: and \d+)*|on node \d+|elsewhere"
_SHOWN = re.compile(rf"(.+?) ({_PLACE})(?:, |$)")
_COMPARE = "compare_with_comment"


class Example(NamedTuple):
    """An example. ``line`` is that of its first line in the file, from 1."""

    path: Path
    line: int
    code: str

    @property
    def num_ranks(self) -> int:
        """On how many ranks it runs; 1 if it starts its own."""
        if re.search(r"idist\.(spawn|Parallel)\(", self.code):
            return 1
        return 4 if re.search("on (four ranks|two nodes of two ranks)", self.code) else 2

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def find() -> list[Example]:
    """Every example of the package."""
    return [one for path in sorted(PACKAGE.rglob("*.py")) for one in _of_file(path)]


def _of_file(path: Path) -> Iterator[Example]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)) if "::\n" in source else ():
        if isinstance(node, documented) and (text := ast.get_docstring(node, clean=False)):
            found = list(_BLOCK.finditer(text + "\n"))
            assert len(found) == len(re.findall(r"::$", text, re.MULTILINE)), f"{path}: a block has no code"
            for block in found:
                line = node.body[0].lineno + text.count("\n", 0, block.start("code"))
                yield Example(path, line, textwrap.dedent(block["code"]).strip("\n") + "\n")


def run_all(local_rank: int, examples: list[Example], folder: Path) -> None:
    """Run the examples on this rank, one after the other."""
    for example in examples:
        run(example, folder)


def run_all_in_a_context(examples: list[Example], folder: Path) -> None:
    """Run the examples on this rank, which torchrun's variables describe."""
    idist.initialize("gloo")
    run_all(idist.get_local_rank(), examples, folder)
    idist.finalize()


def run(example: Example, folder: Path) -> None:
    """Run an example on this rank. The examples of a file share a working directory in ``folder``.

    Raises:
        AssertionError: an expression gives something else than its comment says. Other errors are those of
            the example.
    """
    (folder / example.path.stem).mkdir(exist_ok=True)
    os.chdir(folder / example.path.stem)
    module = ModuleType("example_of_a_docstring")
    if idist.get_world_size() > 1:  # its classes are sent by name; to workers of its own they go by value
        sys.modules[module.__name__] = module
    names = module.__dict__
    exec(compile(NAMES.read_text(encoding="utf-8"), NAMES, "exec"), names)
    compared = []

    def compare(value: Any, shown: str) -> Any:
        expected = eval(_of_this_rank(shown), names)
        assert repr(value) == repr(expected), f"{example.place}: got {value!r}, but the comment is: {shown}"
        compared.append(shown)

    names[_COMPARE] = compare
    comparing = _Comparing(example.code)
    tree = comparing.visit(ast.parse(example.code))
    ast.increment_lineno(ast.fix_missing_locations(tree), example.line - 1)
    exec(compile(tree, example.path, "exec"), names)
    for name in re.findall(r"^def (test_\w+)", example.code, re.MULTILINE):
        names[name]()
    assert compared == comparing.shown, f"{example.place}: not all of it was run"


class _Comparing(ast.NodeTransformer):
    """Compares each expression with the comment after it, if that says what the expression gives."""

    def __init__(self, code: str) -> None:
        self.shown: list[str] = []
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        self._comments = {one.start[0]: one.string[2:] for one in tokens if one.type == tokenize.COMMENT}

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        comment = self._comments.get(node.end_lineno or 0, "")
        if not re.search(_PLACE, comment):
            return node
        self.shown.append(re.sub(r"^on (two|four) ranks: |^on two nodes of two ranks: ", "", comment))
        arguments = [node.value, ast.Constant(self.shown[-1])]
        call = ast.Call(ast.Name(_COMPARE, ast.Load()), arguments, [])
        return ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)


def _of_this_rank(shown: str) -> str:
    """The value that a comment shows for this rank."""
    rank, node_rank = idist.get_rank(), idist.get_node_rank()
    assert re.fullmatch(f"({_SHOWN.pattern})+", shown), f"not values and their places: {shown}"
    for value, place in _SHOWN.findall(shown):
        numbers = map(int, re.findall(r"\d+", place))
        if (node_rank if "node" in place else rank) in numbers or not re.search(r"\d", place):
            return value
    raise AssertionError(f"no value for rank {rank}: {shown}")
