"""The README's commands after ``pip install .``, and its snippets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import documented
from helpers import ROOT, write_script
from installed import Installed, copy_checkout, new_environment
from page_session import is_as_shown
from pages import blocks, commands_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
(SCRIPT,) = [block.text for block in blocks(README) if block.title == "train.py"]
SHOWN = {command: lines for block in blocks(README) for command, lines in commands_of(block)}


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = new_environment(tmp_path_factory.mktemp("environment"))
    copy_checkout(environment.checkout)
    return environment


@pytest.fixture(scope="module")
def installed(new: Installed) -> Installed:
    files = _files(new.checkout)
    ended = new.run(documented("pip install ."), folder=new.checkout)
    assert ended.returncode == 0, ended.output + ended.errors
    assert _files(new.checkout) == files  # no build/, no *.egg-info
    return new


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in found if "__pycache__" not in path.parts)


# --- installed -----------------------------------------------------------------------------------------


def test_the_package_is_the_installed_one(installed: Installed) -> None:
    ended = installed.run("python -c 'import ignite_dist; print(ignite_dist.__file__)'")
    assert Path(ended.output).is_relative_to(installed.folder / "new"), ended.errors


def test_env_prints_plain_text(installed: Installed) -> None:
    ended = installed.run(documented("ignite-dist env"), FORCE_COLOR="1")
    assert ended.returncode == 0, ended.errors
    assert "\x1b" not in ended.output
    assert re.search(r"^  gloo +works", ended.output, re.MULTILINE)


def test_the_module_is_the_program(installed: Installed) -> None:
    module = installed.run(f"{documented('python -m ignite_dist')} --help")
    assert module == installed.run("ignite-dist --help")
    assert module.returncode == 0 and "bench" in module.output


CHECKS = [documented("ignite-dist check"), documented("torchrun --nproc-per-node 2 -m ignite_dist check")]


@pytest.mark.parametrize("command", CHECKS)
def test_check(installed: Installed, command: str) -> None:
    ended = installed.run(command, folder=installed.folder)
    assert ended.returncode == 0, ended.errors
    assert "gloo, 2 processes" in ended.output
    assert ended.output.count("All is well") == 1  # of all ranks, one prints
    assert ("Starting" in ended.errors) == (not command.startswith("torchrun"))


@pytest.mark.long
def test_bench_draws_a_chart(installed: Installed, tmp_path: Path) -> None:
    command = documented("ignite-dist bench --save chart.png")
    refused = installed.run(command, folder=tmp_path)
    assert refused.returncode == 2 and "pip install matplotlib" in refused.errors
    ended = installed.run(command, "matplotlib", folder=tmp_path)
    assert ended.returncode == 0, ended.errors
    assert "42 measurements" in ended.errors
    assert max(map(len, ended.output.splitlines())) <= 95
    lines = [line.split() for line in ended.output.splitlines() if " x " in line or line.endswith(" x")]
    assert [words[:3] for words in lines[:1]] == [["all_reduce", "4", "B"]], ended.output
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


# --- the first script ----------------------------------------------------------------------------------

RUNS = [
    "python train.py",
    "ignite-dist run --nproc-per-node 2 train.py",
    "torchrun --nproc-per-node 4 train.py",
]


def test_it_is_short() -> None:
    assert len(SCRIPT.splitlines()) <= 25


@pytest.mark.parametrize("command", RUNS)
def test_the_first_script_prints_what_is_shown(installed: Installed, command: str, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT, "train.py")
    ended = installed.run(command, folder=tmp_path, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.errors
    assert is_as_shown(ended.output.splitlines(), SHOWN[command]), ended.output


# --- XLA -----------------------------------------------------------------------------------------------


@pytest.mark.xla
def test_an_environment_for_xla(tmp_path: Path) -> None:
    environment = Installed(tmp_path)
    copy_checkout(environment.checkout)
    command = documented("python -m venv xla && xla/bin/pip install torch==2.9.0 torch_xla==2.9.0 .")
    ended = environment.run(command, "torch_xla", folder=environment.checkout, under="none")
    assert ended.returncode == 0, ended.output + ended.errors
    finds = "xla/bin/python -c 'import ignite_dist as idist; print(idist.available_backends())'"
    ended = environment.run(finds, "torch_xla", folder=environment.checkout, PJRT_DEVICE="CPU")
    assert "'xla-tpu'" in ended.output, ended.errors
