"""Tests that run on ranks: what users write, and what pytest then reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import helpers
from their_tests import IMPORTS, Runner, run_folder, run_pytest


def test_a_test_runs_on_every_rank_of_every_world(run: Runner) -> None:
    found, output = run("""
        @pytest.mark.ranks(1, 3)
        def test_sum(rank, world_size):
            assert idist.all_reduce(rank) == sum(range(world_size))

        def test_alone():
            assert idist.get_world_size() == 1

        @pytest.mark.ranks(2)
        class TestGroup:
            @pytest.mark.parametrize("value", [1, 2])
            def test_method(self, value):
                assert idist.all_gather(value) == [value] * 2
    """)
    names = ["test_sum[gloo-1]", "test_sum[gloo-3]", "test_alone"]
    names += ["test_method[gloo-2-1]", "test_method[gloo-2-2]"]
    assert {re.sub("1-gloo-2|2-gloo-2", lambda one: f"gloo-2-{one[0][0]}", name) for name in found} == set(
        names
    )
    assert set(found.values()) == {"passed"}, output


@pytest.mark.long
def test_what_pytest_offers_works_on_ranks(run: Runner) -> None:
    found, output = run(
        """
        @pytest.fixture(scope="module")
        def everybody():
            yield idist.all_gather(idist.get_rank())
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_folders(everybody, tmp_path, rank_tmp_path, rank):
            (tmp_path / f"{rank}.txt").touch()
            (rank_tmp_path / "own.txt").touch()
            idist.barrier()
            assert len(list(tmp_path.rglob("*.txt"))) == 4 and everybody == [0, 1]

        @pytest.mark.ranks(2)
        def test_other_fixtures(everybody, monkeypatch, capsys, caplog, rank):
            monkeypatch.setenv("RANK_OF_TEST", str(rank))
            print("printed", os.environ["RANK_OF_TEST"])
            assert capsys.readouterr().out == f"printed {rank}\\n"
            with pytest.raises(ValueError, match="NO"):
                idist.all_reduce(1, "NO")

        @pytest.mark.ranks(2)
        def test_skipped():
            pytest.skip("not today")

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(strict=True)
        def test_expected_on_one_rank(rank):
            assert rank == 0

        @pytest.mark.ranks(2)
        def test_warns():
            warnings.warn("be careful")
    """,
        "-rA",
    )
    skipped = {"test_skipped[gloo-2]", "test_expected_on_one_rank[gloo-2]"}
    assert {name for name, outcome in found.items() if outcome == "skipped"} == skipped, output
    assert len(found) == 5 and set(found.values()) == {"passed", "skipped"}, output
    assert "not today" in output and "1 xfailed" in output
    assert output.count("UserWarning: be careful") == 1, output


def test_a_failure_names_the_rank_and_costs_only_its_world(run: Runner) -> None:
    found, output = run("""
        @pytest.mark.ranks(2)
        def test_one_fails(rank):
            print("hello from", rank)
            assert rank == 0 or [1, 2, rank] == [1, 2, 3]
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_later():
            idist.barrier()
    """)
    assert found == {"test_one_fails[gloo-2]": "failure", "test_later[gloo-2]": "passed"}, output
    assert "test_one_fails[gloo-2]: rank 1 failed first" in output
    assert "At index 2 diff: 1 != 3" in output  # a rewritten assertion
    assert "Captured stdout call (rank 1)" in output and "hello from 1" in output
    assert "rank 0 had not finished the test after" in output and "in barrier" in output, output


@pytest.mark.long
def test_a_rank_that_fails_while_another_is_not_at_the_test_yet(run: Runner) -> None:
    found, output = run("""
        if idist.get_rank() == 1:
            time.sleep(3)  # the import of this file takes longer than a rank has after the failure of another

        @pytest.fixture
        def stuck(rank):
            if rank == 1:
                threading.Event().wait()

        @pytest.mark.ranks(2)
        def test_everywhere():
            assert False

        @pytest.mark.ranks(2)
        def test_stuck(stuck):
            assert False, "what rank 0 says"
    """)
    assert found == {"test_everywhere[gloo-2]": "failure", "test_stuck[gloo-2]": "error"}, output
    assert "test_everywhere[gloo-2]: rank 0 failed first" in output and "rank 1 failed too" in output, output
    assert "Rank 1 had not finished the test after" in output and "in stuck" in output, output
    assert "test_stuck[gloo-2]: rank 0 failed first" in output and "what rank 0 says" in output, output


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "timeout", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, "Rank 1 ended during the test (SIGKILL)."),
        ("os._exit(3)", 60, "Rank 1 ended during the test (exit code 3)."),
        ("threading.Event().wait()", 5, "Rank 1 had not finished the test after"),
    ],
)
def test_a_rank_that_ends_or_hangs(run: Runner, body: str, timeout: int, expected: str) -> None:
    found, output = run(f"""
        @pytest.mark.ranks(2, timeout={timeout})
        def test_broken(rank):
            if rank == 1:
                {body}
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_later():
            idist.barrier()
    """)
    assert found == {"test_broken[gloo-2]": "failure", "test_later[gloo-2]": "passed"}, output
    assert expected in output, output


def test_failures_before_and_after_the_test(run: Runner) -> None:
    found, output = run("""
        @pytest.fixture
        def broken(rank):
            assert rank == 0

        @pytest.fixture
        def breaks_later(rank):
            yield
            assert rank == 1

        @pytest.mark.ranks(2)
        def test_setup(broken):
            pass

        @pytest.mark.ranks(2)
        def test_teardown(breaks_later):
            pass

        @pytest.mark.ranks(2)
        def test_ends_its_context():
            idist.finalize()

        @pytest.mark.ranks(2, timeout=5)
        def test_sends_what_nobody_receives(rank):
            if rank == 0:
                idist.broadcast(1)

        @pytest.mark.ranks(2)
        def test_later(rank):
            assert idist.all_gather(rank) == [0, 1]
    """)
    failed = {name for name, outcome in found.items() if outcome == "error"}
    assert failed == {"test_setup[gloo-2]", "test_teardown[gloo-2]"}, output
    assert found["test_later[gloo-2]"] == "passed", output
    assert "test_setup[gloo-2]: rank 1" in output and "test_teardown[gloo-2]: rank 0" in output


def test_a_backend_that_is_not_there(run: Runner) -> None:
    found, output = run("""
        @pytest.mark.ranks(2, backends=["nope", "gloo"])
        def test_sum():
            idist.barrier()
    """)
    assert found == {"test_sum[nope-2]": "error", "test_sum[gloo-2]": "passed"}, output
    assert "nope" in output


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("ranks()", "ranks() needs the number of ranks"),
        ("ranks('2')", "got '2'"),
        ("ranks(0)", "got 0"),
        ("ranks(2, timeout=0)", "got 0"),
        ("ranks(2, backend='gloo')", "no keyword backend"),
    ],
)
def test_wrong_arguments(tmp_path: Path, marker: str, message: str) -> None:
    (tmp_path / "test_theirs.py").write_text(f"{IMPORTS}@pytest.mark.{marker}\ndef test_it(): pass\n")
    ended = run_pytest(tmp_path)
    assert ended.returncode != 0 and message in ended.stdout, ended.stdout


def test_a_class_of_unittest_is_refused(tmp_path: Path) -> None:
    text = "@pytest.mark.ranks(2)\nclass TestIt(unittest.TestCase):\n    def test_it(self): pass\n"
    (tmp_path / "test_theirs.py").write_text(f"{IMPORTS}import unittest\n{text}")
    ended = run_pytest(tmp_path)
    assert ended.returncode != 0 and "not with unittest.TestCase" in ended.stdout, ended.stdout


@pytest.mark.long
def test_options_of_the_command_line(tmp_path: Path) -> None:
    """Selections, -x, options of a conftest, and several processes of pytest-xdist."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--theirs', default='unset')\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        IMPORTS
        + "@pytest.mark.ranks(2)\n"
        + "def test_option(request):\n    assert request.config.getoption('--theirs') == 'set'\n"
        + "@pytest.mark.ranks(2)\ndef test_other(): assert False\n"
        + "@pytest.mark.ranks(2)\ndef test_third(): assert False\n"
    )
    found, output = run_folder(tmp_path, "--theirs=set", "-k", "option or other")
    assert found == {"test_option[gloo-2]": "passed", "test_other[gloo-2]": "failure"}, output
    found, output = run_folder(tmp_path, "--theirs=unset", "-x")
    assert found == {"test_option[gloo-2]": "failure"}, output
    found, output = run_folder(tmp_path, "--theirs=set", "-n", "2")
    assert list(found.values()).count("failure") == 2 and len(found) == 3, output


@pytest.mark.long
def test_a_pytest_without_a_standard_input(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(f"{IMPORTS}@pytest.mark.ranks(2)\ndef test_it(): pass\n")
    code = "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ended = helpers.run_python("-c", code, "-m", "pytest", "-s", "-p", "pytest_ignite_dist", cwd=tmp_path)
    assert "1 passed" in ended.stdout, ended.stdout


def test_many_tests_share_their_workers(run: Runner) -> None:
    found, output = run("""
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("number", range(50))
        def test_pids(number, request, cache=[]):
            cache.append(os.getpid())
            assert len(cache) == number + 1 and len(set(cache)) == 1
    """)
    assert len(found) == 50 and set(found.values()) == {"passed"}, output


def test_fixtures_of_the_session_serve_all_files(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"{IMPORTS}@pytest.fixture(scope='session')\ndef made(): return object()\nkept = []\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(
            f"{IMPORTS}import conftest\n@pytest.mark.ranks(2)\ndef test_{name}(made):\n"
            "    conftest.kept.append(made)\n    assert len(set(conftest.kept)) == 1\n"
        )
    found, output = run_folder(tmp_path)
    assert found == {"test_one[gloo-2]": "passed", "test_two[gloo-2]": "passed"}, output


def test_what_fails_before_the_test_is_its_only_outcome(run: Runner) -> None:
    _, output = run("""
        @pytest.fixture
        def broken(rank):
            assert rank == 0

        @pytest.mark.ranks(2)
        def test_setup(broken):
            pass
    """)
    assert "= 1 error in" in output, output


@pytest.mark.long
def test_warnings_as_errors_and_other_ways_to_use_fixtures(run: Runner) -> None:
    found, output = run(
        """
        @pytest.mark.ranks(2)
        def test_warns():
            warnings.warn("careful")

        @pytest.mark.ranks(2)
        def test_requested(request, rank):
            folder = request.getfixturevalue("tmp_path")
            (folder / str(rank)).touch()
            idist.barrier()
            assert len(list(folder.iterdir())) == 2

        @pytest.mark.ranks(2)
        @pytest.mark.xfail
        def test_passes_after_all():
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_parts(subtests, rank):
            for number in range(3):
                with subtests.test(number=number):
                    assert number != 1 or rank != 1, "part of rank 1"
        """,
        "-W",
        "error::UserWarning",
    )
    assert found["test_warns[gloo-2]"] == "failure", output
    assert found["test_requested[gloo-2]"] == "passed", output
    assert "part of rank 1" in output and "1 xpassed" in output, output


@pytest.mark.long
def test_a_conftest_that_fails_in_the_workers(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\nassert 'RANK' not in os.environ or os.environ['RANK'] == '0', 'no worker here'\n"
    )
    (tmp_path / "test_theirs.py").write_text(f"{IMPORTS}@pytest.mark.ranks(2)\ndef test_it(): pass\n")
    found, output = run_folder(tmp_path)
    assert found == {"test_it[gloo-2]": "error"}, output
    assert "pytest did not start in a worker" in output and "no worker here" in output, output


def test_nothing_is_imported_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\ndef test_modules():\n    assert not {'torch', 'ignite_dist'} & set(sys.modules)\n"
    )
    ended = helpers.run_new_python("-m", "pytest", "-p", "pytest_ignite_dist", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
