"""Every command of README.md, CONTRIBUTING.md, SECURITY.md, docs/ and the examples' docstrings has its test.

``test_pages.py`` runs those in the code blocks of the pages. Others are run by other files, which name them
as ``documented("...")``. Here are the commands of the Makefile, and the few that no test can run.
"""

from __future__ import annotations

import configparser
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import commands
import ignite_dist as idist
from commands import at_a_shell, documented
from helpers import ROOT
from installed import copy_checkout

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BUILD_HOROVOD = (ROOT / ".ci" / "build-horovod").read_text(encoding="utf-8")

# Run by .ci/run, as a target of its own or as what this target needs first.
RUN_BY_CI = {
    "make demo": "demo",
    "make dist": "dist",
    "make docs": "docs",
    "make lint": "lint",
    "make lint type": "lint type",
    "make type": "type",
    "make test": "test",
    "make horovod": "test-horovod",
    "make test-horovod": "test-horovod",
    "make test-launchers": "test-launchers",
    "make test-mpi4py": "test-mpi4py",
    "make xla": "test-xla",
    "make test-xla": "test-xla",
    "make test-long": "test-long",
    "make test-python": "test-python",
    "make test-python PYTHON_VERSION=3.14": "test-python",
    "make conformance-oldest": "conformance-oldest",
    "make conformance-newest": "conformance-newest",
    "make conformance-gloo": "conformance-gloo",
}
PREPARE_HOROVOD = (
    "pip download --no-deps --no-binary horovod --no-build-isolation horovod==0.28.1 "
    "&& tar xzf horovod-0.28.1.tar.gz",
    "sed -i.orig 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' "
    "horovod-0.28.1/{,horovod/torch/}CMakeLists.txt",
)
BUILD = (
    "env HOROVOD_WITH_{PYTORCH,GLOO}=1 HOROVOD_WITHOUT_{MPI,TENSORFLOW,MXNET}=1 "
    "pip install --no-build-isolation ./horovod-0.28.1"
)
# Not run, and why.
NOT_RUN = {
    **dict.fromkeys(
        (*PREPARE_HOROVOD, BUILD), "needs the network and 3 minutes; .ci/build-horovod does the same"
    ),
    **dict.fromkeys(
        (
            "make test-gpu",
            "python tests/gpu_cases.py --json cases.json",
            "python tests/gpu_cases.py streams objects",
        ),
        "needs a CUDA device",
    ),
    "python tests/gpu_cases.py --device cpu": "takes 4 minutes; tests/test_gpu_cases.py runs a case of it",
    "make stress": "takes 35 minutes; `make test` has the short forms of its tests",
    "make conformance": "an hour; .ci/run runs the same tests, writes the same table and compares it",
    "make test-all": "it is .ci/run",
    'make test ARGS="-k gather"': "a part of `make test`, which runs this test",
    "make bench-xla": "measures for minutes; its environment is that of `make test-xla`",
    "make bench-xla ARGS='--only XLA'": "measures for a minute; its environment is that of `make test-xla`",
    ".venv/bin/python -m twine upload dist/*": "needs an account of PyPI; `make dist` checks the archives",
    "pip install mpi4py": "`make test-mpi4py` installs it, as an extra",
    "pip install numpy": "`make test` installs it, with an extra",
    **dict.fromkeys(
        (
            "docker build --tag train .",
            "docker run --init --stop-timeout 60 --env IGNITE_DIST_GRACE_SECONDS=50 train",
            "docker run --init --network host train     ignite-dist run --nnodes 2 --node-rank 0 "
            "--master-addr 10.0.0.1 --master-port 29500 train.py",
        ),
        "needs Docker's daemon; tests/comp_models/test_shared_memory_fallback.py runs ranks in namespaces",
    ),
    # Not whole: a name, or an option of a command.
    "ignite-dist run": "a name",
    "ignite-dist run --timeline trace.json": "no script; docs/timeline.md runs it with one",
    "ignite-dist run --prefix": "no script; tests/cli/test_run.py runs it with one",
    "ignite-dist run --max-restarts 3": "no script; tests/cli/test_run.py runs it with one",
    "mpirun -x MASTER_ADDR=node0 ...": "no script, and needs several machines with Open MPI's daemons",
    "sbatch --signal=TERM@60": "no script; tests/workers/test_interrupts.py sends the signal",
}


def test_every_command_has_a_test_or_a_reason() -> None:
    tables = {*RUN_BY_CI, *NOT_RUN}
    with_test = commands.with_test()
    assert not tables & with_test
    assert tables | with_test <= commands.shown()
    assert commands.shown() - commands.in_blocks_of_pages() <= tables | with_test


def test_ci_runs_what_is_said_to_be_run_by_it() -> None:
    steps = runpy.run_path(str(ROOT / ".ci" / "steps.py"))["STEPS"]
    lines = re.findall(r"\bmake ((?:[a-z0-9-]+ ?)+)", "\n".join(step.command for step in steps))
    targets = {target for line in lines for target in line.split()}
    assert {target for line in RUN_BY_CI.values() for target in line.split()} <= targets
    assert re.search(r"^test-horovod: .*\bhorovod\)", MAKEFILE, re.MULTILINE)
    assert re.search(r"^test-xla: xla\b", MAKEFILE, re.MULTILINE)


def test_the_workflow_runs_what_ci_runs_and_nothing_else() -> None:
    """Each step is ``make`` with targets that the Makefile has."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"^ +target:\n((?: +- [\w-]+\n)+)", workflow, re.MULTILINE)
    steps = re.findall(
        r"^ +- run: make (.*) PYTHON=python(?: CONSTRAINTS=\S+ matrix.constraints \S+)?$",
        workflow,
        re.MULTILINE,
    )
    assert len(steps) == len(re.findall(r"\brun:", workflow))
    words = " ".join(steps).replace("${{ matrix.target }}", matrix.replace(" - ", " ")).split()
    assert set(words) <= set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    # It runs `make test` with each Python.
    assert set(" ".join(RUN_BY_CI.values()).split()) - {"test-python"} <= set(words)
    for name in re.findall(r"constraints: (\S+)}", workflow):
        assert (ROOT / name).is_file()
    (pythons,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert set(re.findall(r"Python :: (3\.\d+)", setup)) <= set(re.findall(r"[\d.]+", pythons))


def test_the_version_is_the_newest_of_the_changelog() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest = re.findall(r"^## (.*)$", changelog, re.MULTILINE)[:2]
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(idist.__version__)}\] - \d{{4}}-\d\d-\d\d", newest)
    assert setup["metadata"]["version"] == idist.__version__


# --- make ----------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout, where commands may change files."""
    copy_checkout(tmp_path / "checkout")
    return tmp_path / "checkout"


needs_lint = pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None, reason="needs what `make lint` installs"
)


def test_make_lists_the_targets_that_are_shown() -> None:
    listed = at_a_shell("make", ROOT).output
    targets = set(re.findall(r"^  make ([a-z0-9-]+)", listed, re.MULTILINE))
    shown = [command.partition(" ARGS")[0] for command in commands.shown() if command.startswith("make ")]
    words = {word for command in shown for word in command.split()[1:]}
    assert {word for word in words if "=" not in word} == targets - {"help", "venv"}


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        documented("make bench"),
        documented("make bench-grid"),
        documented("make latency"),
        documented("make scale"),
    ],
)
def test_a_benchmark_starts(command: str) -> None:
    """It would take minutes: its options are shown."""
    ended = at_a_shell(f"{command} ARGS=--help", ROOT, PY=sys.executable)
    assert ended.returncode == 0 and "options:" in ended.output, ended.errors


def test_a_python_that_has_no_torch_is_named(checkout: Path) -> None:
    newer = checkout / "python3.15"
    newer.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.15.0\n')
    newer.chmod(0o755)
    ended = at_a_shell(f"make test PYTHON={newer}", checkout)
    sentence = f"torch has wheels for Python 3.10 to 3.14, and `{newer}` is: Python 3.15.0."
    assert ended.returncode == 2 and ended.errors.splitlines()[0] == sentence
    assert not (checkout / ".venv").exists()


def test_clean_removes_what_tools_leave(checkout: Path) -> None:
    files = sorted(checkout.rglob("*"))
    for name in (".venv/bin", ".venv-xla", "build", "dist", ".mypy_cache", "runs", "tests/__pycache__"):
        (checkout / name).mkdir(parents=True)
    ended = at_a_shell(documented("make clean"), checkout)
    assert ended.returncode == 0, ended.errors
    assert sorted(checkout.rglob("*")) == files


@needs_lint
def test_style_formats(checkout: Path) -> None:
    path = checkout / "examples" / "digits.py"
    formatted = path.read_text(encoding="utf-8")
    path.write_text(formatted.replace("import ignite_dist as idist", "import ignite_dist  as  idist"))
    ended = at_a_shell(documented("make style"), checkout, PY=sys.executable)
    assert path.read_text(encoding="utf-8") == formatted, ended.output


@needs_lint
def test_git_runs_lint_before_a_commit(checkout: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True, timeout=60)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "bin").symlink_to(commands.BIN)
    ended = at_a_shell(documented(".venv/bin/pre-commit install"), checkout)
    assert ended.returncode == 0, ended.output + ended.errors
    assert "pre_commit" in (checkout / ".git" / "hooks" / "pre-commit").read_text(encoding="utf-8")
    hooks = re.findall(r"entry: (.*)", (checkout / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert hooks == ["make lint", "make type"]


# --- Horovod and XLA -----------------------------------------------------------------------------------


def _words(command: str) -> list[str]:
    """The words of a command, as a shell expands them."""
    return at_a_shell(f"printf '%s\\n' {command.partition(' && ')[0]}", ROOT).output.splitlines()


def test_horovod_is_built_as_in_ci() -> None:
    download, edit = map(_words, PREPARE_HOROVOD)
    script = BUILD_HOROVOD.replace("$sources/$release", "horovod-0.28.1")
    assert "release=horovod-0.28.1\n" in script and download[-1] == "horovod==0.28.1"
    in_ci = re.search(r"-m pip (download .*)", script)
    assert in_ci and set(download[1:-1]) <= set(in_ci[1].split())
    assert f"{edit[0]} {edit[1]} '{edit[2]}'" in script
    assert set(edit[3:]) == set(re.findall(r"horovod-0\.28\.1/\S*CMakeLists\.txt", script))
    flags = [word for word in _words(BUILD) if word.startswith("HOROVOD_")]
    assert set(flags) == set(re.findall(r"HOROVOD_\w+=1", script)) and len(flags) == 5


def test_xla_is_the_one_of_the_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (line,) = [command for command in commands.shown() if "python -m venv xla" in command]
    assert setup["options.extras_require"]["xla"].split() == re.findall(r"\S+==\S+", line)
