"""``ignite-dist run``: a script on every rank, without code of its own for that."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from command_line import run_here
from helpers import free_port, plain_environ, run_python, write_script

SCRIPT = """
    import sys
    import beside
    import ignite_dist as idist

    def work(local_rank):
        return idist.get_world_size()

    def main():
        with idist.Parallel("gloo", nproc_per_node=2) as parallel:  # joins the command's processes
            size = parallel.run(work)
        ranks, launcher = idist.all_gather(idist.get_rank()), idist.environment().launcher
        sys.stdout.write(f"{ranks} {size} {beside.NAME} {sys.argv[1:]} {launcher}\\n")
        if "fail" in sys.argv and idist.restart_count() < 1:
            raise LookupError("no data")

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    return write_script(tmp_path, SCRIPT)


def _run(*args: Any, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environ = plain_environ(OMP_NUM_THREADS="1")
    return run_python(*launcher, "-m", "ignite_dist", "run", *args, env=environ)


def test_a_script_runs_on_every_rank(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", os.path.relpath(script), "--lr", "0.1")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout == "[0, 1] 2 beside ['--lr', '0.1'] ignite-dist run\n" * 2


@pytest.mark.long
def test_a_script_may_initialize_the_context_itself(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys
        import ignite_dist as idist

        idist.initialize("gloo")
        sys.stdout.write(f"{idist.all_reduce(1)}\\n")
        idist.finalize()
        """,
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for ended in (
        _run("--nproc-per-node", "2", script),
        _run("--nproc-per-node", "2", "--backend", "gloo", script, launcher=torchrun),
    ):
        assert ended.returncode == 0, ended.stdout
        assert ended.stdout == "2\n2\n"


@pytest.mark.long
def test_a_module_runs_as_with_python_m(script: Path) -> None:
    environ = plain_environ(OMP_NUM_THREADS="1")
    command = ("-m", "ignite_dist", "run", "--nproc-per-node", "2", "-m", "script", "--lr", "0.1")
    ended = run_python(*command, env=environ, cwd=script.parent)
    assert ended.stdout == "[0, 1] 2 beside ['--lr', '0.1'] ignite-dist run\n" * 2


@pytest.mark.long
def test_lines_have_the_rank_in_front(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", "--prefix", script)
    assert ended.returncode == 0, ended.stdout
    line = "[0, 1] 2 beside [] ignite-dist run"
    assert sorted(ended.stdout.splitlines()) == [f"[rank 0] {line}", f"[rank 1] {line}"]


@pytest.mark.long
def test_it_joins_the_processes_of_a_launcher(script: Path) -> None:
    ended = _run(script, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("[0, 1] 2 beside [] torchrun\n") == 2


def test_a_failure_shows_the_script_and_nothing_else(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", script, "fail")
    assert ended.returncode == 1
    assert "LookupError: no data" in ended.stdout
    assert "runpy" not in ended.stdout and "ignite_dist/" not in ended.stdout
    again = _run("--nproc-per-node", "2", "--max-restarts", "1", script, "fail")
    assert again.returncode == 0, again.stdout


@pytest.mark.long
def test_a_script_starts_again_on_two_nodes(script: Path) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    common = (*place, "--nproc-per-node", "2", "--max-restarts", "1")
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(_run, *common, "--node-rank", str(rank), script, "fail") for rank in (0, 1)]
    for node in nodes:
        ended = node.result()
        assert ended.returncode == 0, ended.stdout
        assert "Restart 1 of at most 1" in ended.stdout and "LookupError: no data" in ended.stdout
        # At least two in the second attempt. In the first, a rank may be ended before it prints.
        assert ended.stdout.count("[0, 1, 2, 3] 4 beside ['fail'] ignite-dist run") >= 2


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["missing.py"], "There is no script 'missing.py' in "),
        (["--nproc-per-node", "many", "missing.py"], "must be a number or 'auto', got 'many'"),
        ([], "script"),
    ],
)
def test_wrong_arguments(args: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run_here(capfd, "run", *args)
    assert (status, output) == (2, "")
    assert len(errors.splitlines()) == 1 and text in errors
