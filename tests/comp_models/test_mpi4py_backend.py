"""The example of a third party's backend under mpirun; the conformance suite has it as a world, too."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, plain_environ, run_new_python, run_python, write_script

MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
EXAMPLES = ROOT / "examples"


def mpirun(script: Path, *arguments: Any, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    """How two ranks of ``script`` have ended."""
    environ = plain_environ(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environ["PYTHONPATH"] = f"{EXAMPLES}:{environ['PYTHONPATH']}"
    return run_new_python(script, *arguments, seconds=seconds, prefix=MPIRUN, env=environ)


def test_it_can_be_read_in_one_sitting() -> None:
    assert len((EXAMPLES / "mpi4py_backend.py").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.mpi4py
def test_contexts_follow_one_another(tmp_path: Path) -> None:
    """A communicator that is left behind by each would be the last of them, at some point."""
    script = write_script(
        tmp_path,
        """
        import mpi4py_backend
        import ignite_dist as idist

        assert idist.get_world_size() == 1
        for _ in range(3):
            idist.initialize("mpi4py")
            assert idist.get_world_size() == idist.get_nproc_per_node() == 2
            handle = idist.new_group([1])
            assert idist.all_reduce(1) == 2
            assert idist.all_reduce(1, group=handle) == 1
            idist.finalize()
            assert idist.get_world_size() == 1
        from mpi4py import MPI
        print("ended", MPI.COMM_WORLD.allreduce(1))  # MPI itself goes on
        """,
    )
    ended = mpirun(script)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.split() == ["ended", "2", "ended", "2"]


@pytest.mark.mpi4py
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """The other waits for it in a collective, and MPI_Finalize would wait for both."""
    script = write_script(
        tmp_path,
        """
        import mpi4py_backend
        import ignite_dist as idist

        def train(local_rank):
            if idist.get_rank() == 1:
                raise LookupError("this rank has no data")
            idist.all_reduce(1)

        with idist.Parallel("mpi4py") as parallel:
            parallel.run(train)
        """,
    )
    ended = mpirun(script, seconds=120)
    assert ended.returncode != 0
    assert "LookupError: this rank has no data" in ended.stdout, ended.stdout


@pytest.mark.mpi4py
def test_a_process_that_has_started_mpi_by_itself_is_no_rank(tmp_path: Path) -> None:
    """Lightning Fabric's import does so; the workers of its ``spawn`` inherit MPI's variables."""
    script = write_script(
        tmp_path,
        """
        import multiprocessing
        import os
        import ignite_dist as idist

        def ask(results):
            results.put((os.environ.get("PMIX_RANK"), idist.environment().launcher, idist.get_world_size()))

        if __name__ == "__main__":
            from mpi4py import MPI

            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            child = context.Process(target=ask, args=(results,))
            child.start()
            print(results.get())
            child.join()
        """,
    )
    ended = run_python(script, env=plain_environ())
    assert ended.stdout.splitlines()[-1:] == ["('0', 'none', 1)"], ended.stdout
