"""Tests on ranks beside pytest-cov, pytest-timeout and pytest-xdist, and the wider fixtures of pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import helpers
from their_tests import IMPORTS, Runner, run_folder

PACKAGE = """
def on_rank(rank):
    if rank == 0:
        return "zero"
    if rank == 1:
        return "one"
    return "another"

def in_one_process():
    return "here"
"""
TESTS = """
from theirs import code

@pytest.mark.ranks(2)
def test_on_ranks(rank):
    code.on_rank(rank)
    idist.barrier()

@pytest.mark.ranks(2)
def test_broken(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()

def test_here():
    code.in_one_process()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [["--cov=theirs"], ["--cov", "-n", "2", "--cov-context=test"]], ids=" ".join
)
def test_coverage_counts_the_lines_of_workers(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()
    (tmp_path / "theirs" / "code.py").write_text(PACKAGE)
    (tmp_path / "test_theirs.py").write_text(IMPORTS + TESTS)
    found, output = run_folder(tmp_path, "--cov-report=json:lines.json", *arguments)
    assert found["test_on_ranks[gloo-2]"] == found["test_here"] == "passed", output
    lines = json.loads((tmp_path / "lines.json").read_text())["files"]["theirs/code.py"]
    assert lines["missing_lines"] == [PACKAGE.splitlines().index('    return "another"') + 1], output
    assert "failed to return coverage data" not in output, output
    assert not list(tmp_path.glob(".coverage.*"))
    if "--cov-context=test" in arguments:
        ended = helpers.run_python("-c", CONTEXTS, cwd=tmp_path)
        assert "test_theirs.py::test_on_ranks[gloo-2]|run" in ended.stdout.splitlines(), ended.stdout


CONTEXTS = """
import coverage
data = coverage.CoverageData()
data.read()
print(*data.measured_contexts(), sep="\\n")
"""


@pytest.mark.long
def test_nothing_is_measured_with_no_cov(run: Runner, tmp_path: Path) -> None:
    found, output = run(
        """
        import sys

        @pytest.mark.ranks(2)
        def test_it():
            assert "coverage" not in sys.modules
        """,
        "--cov",
        "--no-cov",
    )
    assert found == {"test_it[gloo-2]": "passed"}, output


@pytest.mark.long
@pytest.mark.parametrize("method", ["signal", "thread"])
def test_the_limit_of_pytest_timeout(run: Runner, method: str) -> None:
    found, output = run(
        """
        @pytest.mark.ranks(2)
        @pytest.mark.timeout(2)
        def test_hangs(rank):
            if rank == 1:
                threading.Event().wait()
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_later():
            idist.barrier()
        """,
        f"--timeout-method={method}",
    )
    assert found == {"test_hangs[gloo-2]": "failure", "test_later[gloo-2]": "passed"}, output
    for rank, frame in ((0, "in barrier"), (1, "in wait")):
        _, _, stacks = output.partition(f"rank {rank} had not finished the test after 2 s")
        assert frame in stacks, output


@pytest.mark.long
def test_folders_of_the_session_are_the_same_on_all_ranks(run: Runner) -> None:
    found, output = run("""
        @pytest.fixture(scope="session")
        def folders(tmp_path_factory):
            first, second = (tmp_path_factory.mktemp("data") for _ in range(2))
            return first, second, tmp_path_factory.mktemp("data", numbered=False)

        @pytest.mark.ranks(2)
        def test_folders(folders, rank):
            assert len(set(folders)) == 3
            for folder in folders:
                (folder / str(rank)).touch()
            idist.barrier()
            assert all(len(list(folder.iterdir())) == 2 for folder in folders)
            assert len(set(idist.all_gather(str(folders)))) == 1

        @pytest.mark.ranks(2)
        def test_wrong_names(tmp_path_factory, folders):
            with pytest.raises(ValueError, match="a/b"):
                tmp_path_factory.mktemp("a/b")
            with pytest.raises(FileExistsError, match="data"):
                tmp_path_factory.mktemp("data", numbered=False)
    """)
    assert len(found) == 2 and set(found.values()) == {"passed"}, output


@pytest.mark.long
def test_fixtures_of_a_package_serve_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "conftest.py").write_text(
            f"{IMPORTS}kept = []\n@pytest.fixture(scope='package')\n"
            "def made():\n    yield idist.all_gather(1)\n    kept.append('torn down')\n"
        )
        for number in (1, 2):
            (package / f"test_{name}_{number}.py").write_text(
                f"{IMPORTS}from {name} import conftest\n@pytest.mark.ranks(2)\n"
                f"def test_{name}_{number}(made):\n    conftest.kept.append(id(made))\n"
                "    assert len(set(conftest.kept)) == 1\n"
                + (
                    "    from one.conftest import kept\n    assert kept.pop() == 'torn down'\n"
                    * (name == "two" and number == 1)
                )
            )
    found, output = run_folder(tmp_path)
    assert len(found) == 4 and set(found.values()) == {"passed"}, output
