"""Private names of Python, torch, Horovod and torch_xla: each is in one file, and the library has it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ignite_dist
from ignite_dist.comp_models.horovod import _horovod
from ignite_dist.comp_models.xla import _torch_xla
from ignite_dist.internals import _python, _torch
from ignite_dist.internals.private_names import PrivateName

PACKAGE = Path(ignite_dist.__file__).parent
TABLES = {
    "internals/_python.py": _python.PRIVATE_NAMES,
    "internals/_torch.py": _torch.PRIVATE_NAMES,
    "comp_models/horovod/_horovod.py": _horovod.PRIVATE_NAMES,
    "comp_models/xla/_torch_xla.py": _torch_xla.PRIVATE_NAMES,
}
# What Python documents: of named tuples, of enums, and of modules.
OF_PYTHON = {"_asdict", "_fields", "_replace", "_name_", "_value_", "_current_frames", "_exit", "_getframe"}
# Those of other libraries, by the one file that uses them: pytorch-ignite's, and pytest's.
OF_OTHERS = {
    "context/ignite_bridge.py": {"_NativeDistModel", "_SerialModel", "_set_model"},
    "testing/plugin.py": {"_setupstate", "_tmp_path_factory"},
}
# In torch's objects, and in the code of nobody else.
OWN_MARK = re.compile(r"_ignite_dist_\w+")

PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOTTED = re.compile(r"\w+(\.\w+)*")


# --- the libraries that are installed ---


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_each_name_is_there_once_and_has_its_reasons(table: tuple[PrivateName, ...]) -> None:
    assert len({one.name for one in table}) == len(table)
    for one in table:
        assert any(map(PRIVATE.fullmatch, one.name.split("."))), one
        assert len(one.why) > 20, one
        assert re.match(r"\d+\.\d+", one.since), one
        assert one.fallback, one


def test_torch_and_this_python_have_all() -> None:
    assert _torch.check() == []
    assert _python.check() == []


@pytest.mark.horovod
def test_horovod_has_all() -> None:
    assert _horovod.check() == []


@pytest.mark.xla
def test_torch_xla_has_all() -> None:
    assert _torch_xla.check() == []


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.distributed_c10d._no_such_function",
        "torch.distributed._no_such_module",
        "torch.nn.parallel.DistributedDataParallel._no_such_attribute",
        "torch.Tensor._no_such_attribute",
        "torch._no_such_module.function",
    ],
)
def test_what_is_not_there_is_missing(name: str) -> None:
    absent = PrivateName(name, "", "", "")
    assert _torch.missing([absent, _torch.PRIVATE_NAMES[0]]) == [absent]


# --- the package ---


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The files of the package, without the tests of the conformance suite."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.name.startswith("test_")
    }


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a tree defines: functions, classes, variables, parameters, own attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return set(filter(PRIVATE.fullmatch, names))


def is_own(value: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def libraries_in(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a file comes from: the first part of the module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[(one.asname or one.name).partition(".")[0]] = one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            assert node.module
            for one in node.names:
                found[one.asname or one.name] = node.module.partition(".")[0]
    return found


def root_of(node: ast.expr) -> str:
    """The variable that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_parts(table: tuple[PrivateName, ...]) -> set[str]:
    return {part for one in table for part in one.name.split(".") if PRIVATE.fullmatch(part)}


LISTED = set().union(*map(private_parts, TABLES.values()))


class Walk:
    """Finds where the files of the package use what may be a private name of a library.

    Counted are

    - an attribute of ``self``, ``cls`` or ``super()`` that neither the class nor its bases here define,
    - an attribute of what an import of another library gives,
    - an attribute of anything else that this very file does not define, or that a table lists,
    - a private part of an import from another library,
    - a private keyword that this very file does not define,
    - a string, for getattr(), vars() and sys.modules: a private name, dotted or not, which neither this very
      file defines nor, unless a table lists it, the package.
    """

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.own = set().union(*map(defined_in, trees.values()))
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.bases = {one.name: [name_of(base) for base in one.bases] for one in classes}
        self.by_class: dict[str, set[str]] = {}
        for one in classes:
            self.by_class.setdefault(one.name, set()).update(defined_in(one))

    def attributes_of(self, name: str) -> set[str]:
        """What a class of the package and its bases in the package define."""
        bases = map(self.attributes_of, self.bases.get(name, ()))
        return self.by_class.get(name, set()).union(*bases)

    def violations(self, file: str, tree: ast.Module) -> Iterator[str]:
        here, libraries = defined_in(tree), libraries_in(tree)
        class_of = {  # the innermost class comes last
            id(inside): outer.name
            for outer in ast.walk(tree)
            if isinstance(outer, ast.ClassDef)
            for inside in ast.walk(outer)
        }
        for node in ast.walk(tree):
            found: list[str] = []
            if isinstance(node, ast.Attribute):
                if not PRIVATE.fullmatch(node.attr) or OWN_MARK.fullmatch(node.attr):
                    continue
                if is_own(node.value):
                    is_ours = node.attr in self.attributes_of(class_of.get(id(node), ""))
                else:
                    is_ours = self.is_ours(node, file, here, libraries.get(root_of(node), ""))
                found = [] if is_ours else [ast.unparse(node)]
            elif isinstance(node, ast.keyword):
                found = [node.arg] if PRIVATE.fullmatch(node.arg or "") and node.arg not in here else []
            elif isinstance(node, ast.Constant):
                known = self.own - LISTED | here | OF_PYTHON
                parts = node.value.split(".") if is_dotted(node.value) else []
                found = [one for one in parts if PRIVATE.fullmatch(one) and one not in known]
                found = [one for one in found if not OWN_MARK.fullmatch(one)]
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [f"{getattr(node, 'module', '')}.{one.name}".strip(".") for one in node.names]
                found = [one for one in names if is_private_of_library(one)]
            yield from (f"{file}:{node.lineno}: {one}" for one in found)  # type: ignore[attr-defined]

    def is_ours(self, node: ast.Attribute, file: str, here: set[str], library: str) -> bool:
        if node.attr in OF_PYTHON | OF_OTHERS.get(file, set()):
            return True
        if node.attr in LISTED or library not in ("", "ignite_dist"):
            return False
        return node.attr in (self.own if library else here)


@functools.cache
def the_walk() -> Walk:
    """The walk through the package, which takes seconds to prepare."""
    return Walk(trees())


def name_of(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else root_of(base)


def is_dotted(value: object) -> bool:
    return isinstance(value, str) and DOTTED.fullmatch(value) is not None


def is_private_of_library(name: str) -> bool:
    library, *parts = name.split(".")
    return library not in ("ignite_dist", "__future__") and any(map(PRIVATE.fullmatch, parts))


def test_no_other_file_uses_a_private_name() -> None:
    files = {file: tree for file, tree in trees().items() if file not in TABLES}
    assert [one for file, tree in files.items() for one in the_walk().violations(file, tree)] == []


@pytest.mark.parametrize("file", TABLES)
def test_what_the_files_use_is_in_their_tables(file: str) -> None:
    """And the table has nothing else."""
    tree = trees()[file]
    code = [node for node in tree.body if "PRIVATE_NAMES" not in map(root_of, targets_of(node))]
    parts = {
        part
        for statement in code
        for node in ast.walk(statement)
        for part in names_used(node)
        if PRIVATE.fullmatch(part)
    }
    assert parts - defined_in(tree) <= private_parts(TABLES[file])
    lasts = {one.name.rpartition(".")[2] for one in TABLES[file]}
    assert {one for one in lasts if PRIVATE.fullmatch(one)} <= parts


def targets_of(node: ast.stmt) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def names_used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
        return node.value.split(".")
    if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ignite_dist"):
        return [*(node.module or "").split("."), *(one.name for one in node.names)]
    return [node.arg or ""] if isinstance(node, ast.keyword) else []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._dynamo.reset()",
        "import torch._dynamo",
        "from torch._dynamo import eval_frame",
        "import horovod.torch as hvd\nhvd.mpi_ops._handle_map",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "def f(tensor):\n    return tensor._version",
        "def f(tensor):\n    return getattr(tensor, '_version')",
        "def f(tensor):\n    return tensor.grad_fn._anything",
        "import sys\nsys.modules.get('torch._dynamo.eval_frame')",
        "class A(Loader):\n    def f(self):\n        return self._loader",
        "class A:\n    def f(self):\n        return self._world._get_backend()",
        "def f(g):\n    g(_stacklevel=1)",
    ],
)
def test_the_walk_finds(line: str) -> None:
    assert list(the_walk().violations("new.py", ast.parse(line)))
