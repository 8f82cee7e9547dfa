"""The conformance suite as a third party runs it: installed, on a backend of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

import helpers
import ignite_dist as idist
from commands import BIN, documented
from ignite_dist.testing.conformance import plugin, worlds
from ignite_dist.testing.conformance.cases import on_every_rank
from ignite_dist.testing.kept_workers import KeptWorkers
from installed import copy_checkout, new_environment

SUITE = "ignite_dist.testing.conformance"
BACKENDS = '''
import torch
from ignite_dist import register_computation_model
from ignite_dist.comp_models.native.launcher import NativeLauncher
from ignite_dist.comp_models.work import Completed
from store_model import StoreModel, StoreTransport


class MineModel(StoreModel):
    """A backend over a key-value store alone, whose ranks idist.spawn starts."""

    name = "mine-dist"
    available_backends = ("mine",)
    launcher = NativeLauncher


class WrongTransport(StoreTransport):
    """Counts the first rank twice."""

    def supports(self, kind, op, dtype, device):
        return super().supports(kind, op, dtype, device) or (kind == "all_reduce" and op == "SUM")

    def all_reduce(self, tensor, op, group):
        rows = self.all_gather(tensor.reshape(-1).view(torch.uint8), group).wait().view(tensor.dtype)
        return Completed(tensor.copy_((rows.sum(0) + rows[0]).view(tensor.shape)))


class WrongModel(MineModel):
    name = "wrong-dist"
    available_backends = ("wrong",)

    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        self.transport.__class__ = WrongTransport
'''
NUMBERS = "test_bools_of_numpys_are_pythons or test_one_rank_may_have_a_number_of_numpys_and_another_pythons"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with the backends, to be put on the path."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(helpers.TESTS / "store_model.py", folder)
    (folder / "their_backends.py").write_text(BACKENDS)
    (folder / "their_module.py").write_text(
        "import their_backends, store_model\n"
        "from ignite_dist import register_computation_model as register\n"
        "register(store_model.StoreModel)\n"
        "register(their_backends.WrongModel)\n"
    )
    return folder


def run_suite(theirs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = helpers.plain_environ()
    environ["PYTHONPATH"] = f"{theirs}:{environ['PYTHONPATH']}"
    options = ("-p", "pytest_ignite_dist", "-p", "no:cacheprovider", "-v", "--pyargs")
    return helpers.run_python("-m", "pytest", *options, *arguments, cwd=theirs.parent, env=environ)


@pytest.mark.long
def test_it_runs_on_an_installed_backend(theirs: Path, tmp_path: Path) -> None:
    new, packages = new_environment(tmp_path), ("numpy", "psutil", "pytest")
    copy_checkout(new.checkout)
    ended = new.run(documented('pip install ".[testing]"'), *packages, folder=new.checkout)
    assert ended.returncode == 0, ended.output + ended.errors
    info = theirs / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ignite_dist.computation_models]\nmine = their_backends:MineModel\n"
    )
    (tmp_path / "empty").mkdir()
    command = documented("pytest --pyargs ignite_dist.testing.conformance --backend mine --ranks 2,3")
    ended = new.run(
        f"PYTHONPATH=$PYTHONPATH:{shlex.quote(str(theirs))} python -m {command} -v -k '{NUMBERS}'",
        *packages,
        folder=tmp_path / "empty",
    )
    assert ended.returncode == 0, ended.output + ended.errors
    assert ended.output.count("[mine-2] PASSED") == ended.output.count("[mine-3] PASSED") == 2, ended.output


def test_a_wrong_backend_fails(theirs: Path) -> None:
    """Importing a module registers this one. The report has the values of each rank."""
    cases = "-k=test_not_in_place or (test_every_dtype_by_every_operation and MAX)"
    ended = run_suite(theirs, f"{SUITE}.test_all_reduce", "--backend=their_module:wrong", cases)
    assert ended.returncode == 1, ended.stdout
    assert "test_not_in_place[wrong-2] FAILED" in ended.stdout, ended.stdout
    assert "test_every_dtype_by_every_operation[wrong-2-MAX] PASSED" in ended.stdout, ended.stdout
    text = r"rank 0:\n(.*\n)*AssertionError: assert \[3.0, 3.0, 3.0\] == .*\n(.*\n)*rank 1:\n"
    assert re.search(text, ended.stdout), ended.stdout


@pytest.mark.long
def test_another_launcher_may_start_the_ranks(theirs: Path) -> None:
    options = (f"--launcher={BIN / 'torchrun'} --no-python --nproc-per-node {{ranks}}", f"-k={NUMBERS}")
    ended = run_suite(theirs, f"{SUITE}.test_numbers", "--backend=their_module:store", *options)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("[store-2] PASSED") == 2, ended.stdout


def test_a_launcher_that_fails_is_named(theirs: Path) -> None:
    options = ("--launcher=false {ranks}", "-k=test_bools_of_numpys_are_pythons")
    ended = run_suite(theirs, f"{SUITE}.test_numbers", "--backend=gloo", *options)
    assert ended.returncode == 1
    assert "The launcher has ended with 1: false 2 " in ended.stdout, ended.stdout


@pytest.mark.parametrize(
    ("backend", "sizes", "command", "message"),
    [
        (None, "2", None, "needs the backend to test: --backend NAME"),
        ("nope", "2", None, r"--backend nope: Unknown backend 'nope'\. Available: 'gloo'"),
        ("no_such_module:gloo", "2", None, "No module named 'no_such_module'"),
        ("gloo", "2,x", None, "numbers of ranks, at least 1.* Got '2,x'"),
        ("gloo", "0", None, "Got '0'"),
        ("gloo", "", None, "Got ''"),
        ("gloo", "2", "mpirun -np 2", r"{ranks} in the place of the number.* Got 'mpirun -np 2'"),
    ],
)
def test_wrong_options(backend: str | None, sizes: str, command: str | None, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        plugin.worlds_of(backend, sizes, command)


def test_the_options_name_the_worlds() -> None:
    names = [world.name for world in plugin.worlds_of("gloo", "3,1,3", None)]
    assert names == ["gloo-3", "gloo-1"]


def test_a_backend_that_spawn_does_not_start_needs_a_launcher(theirs: Path) -> None:
    ended = run_suite(theirs, SUITE, "--backend=their_module:store")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "starts no workers of this backend. Name the launcher of its ranks" in ended.stdout, ended.stdout


def test_other_suites_may_have_options_of_these_names(tmp_path: Path) -> None:
    text = "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    (tmp_path / "conftest.py").write_text(text)
    text = "def test_option(request):\n    assert request.config.getoption('--backend') == 'other'\n"
    (tmp_path / "test_theirs.py").write_text(text)
    ended = helpers.run_python("-m", "pytest", "-p", "pytest_ignite_dist", "--backend=other", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout


@on_every_rank
def returns() -> None:
    """The first case of a world, which takes longer: its ranks import what they need."""


@on_every_rank
def one_rank_hangs() -> None:
    if idist.get_rank() == 1:
        threading.Event().wait()


@on_every_rank
def one_rank_crashes() -> None:
    if idist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (one_rank_hangs, r"no answer within 5 s from ranks \[1\]\n(.*\n)*.* in one_rank_hangs\n"),
        (one_rank_crashes, r"rank 1:\nthe worker died\n(.*\n)*.*SIGSEGV(.*\n)*.* in one_rank_crashes\n"),
    ],
)
def test_a_rank_that_hangs_or_crashes_is_shown(
    case: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds.SpawnedWorld("gloo", 2)
    try:
        world.run(returns.on_rank)
        monkeypatch.setattr(worlds, "SECONDS_PER_CASE", 5)
        with pytest.raises(pytest.fail.Exception, match=expected):
            world.run(case.on_rank)
    finally:
        world.close()


def cannot_start(local_rank: int) -> None:
    raise OSError("no")


def test_workers_that_cannot_start_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    util.get_temp_dir()  # of multiprocessing, for the fork server
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(idist.DistributedError):
        KeptWorkers(lambda address: idist.spawn("gloo", cannot_start, nproc_per_node=2, join=False), 2)
    assert list(tmp_path.glob("idist-*")) == []
