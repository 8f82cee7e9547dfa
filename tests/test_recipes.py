"""The recipes that need more than a shell on one machine: their commands on two machines, and on a Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import at_a_shell, documented, forks_on_path
from helpers import ROOT, free_port, without_gloos
from machines import machines, needs_namespaces
from page_session import is_as_shown
from pages import blocks, commands_of
from slurm import slurm

pytestmark = pytest.mark.long

RECIPES = ROOT / "docs" / "recipes"


def write_files(page: str, folder: Path) -> None:
    """Write the files that a recipe shows."""
    for block in blocks((RECIPES / page).read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def output_of(page: str, command: str) -> list[str]:
    """The lines that a recipe shows below a command."""
    text = (RECIPES / page).read_text(encoding="utf-8")
    (shown,) = [lines for block in blocks(text) for one, lines in commands_of(block) if one == command]
    return shown


# --- several machines ----------------------------------------------------------------------------------

TRIAL = (
    documented(
        "ignite-dist run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 "
        "--nproc-per-node 2 train.py &"
    ),
    documented(
        "ignite-dist run --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 29500 "
        "--nproc-per-node 1 train.py"
    ),
)
TWO_MACHINES = (
    documented(
        "ignite-dist run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 "
        "--nproc-per-node 2 train.py"
    ),
    documented(
        "ignite-dist run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 "
        "--nproc-per-node 1 train.py"
    ),
)


def test_two_machines_that_are_one(tmp_path: Path) -> None:
    write_files("machines.md", tmp_path)
    lines = "\n".join((*TRIAL, "wait $!")).replace("29500", str(free_port()))
    ended = at_a_shell(lines, tmp_path, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.errors
    assert is_as_shown(ended.output.splitlines(), output_of("machines.md", TRIAL[1])), ended.output


@pytest.mark.launchers
@needs_namespaces
def test_two_machines(tmp_path: Path) -> None:
    write_files("machines.md", tmp_path)
    environ = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **forks_on_path()}
    with machines(2, subnet="10.0.0") as hosts:
        jobs = [
            host.start("bash", "-c", f'cd "$0" && {command}', tmp_path, **environ)
            for host, command in zip(hosts, TWO_MACHINES, strict=True)
        ]
        (first, output), (second, other_output) = [job.end(250) for job in jobs]
    assert (first, second) == (0, 0), output + other_output
    shown = output_of("machines.md", TRIAL[1])
    assert without_gloos(output).splitlines()[-len(shown) :] == shown, output  # torch warns before that


# --- Slurm ---------------------------------------------------------------------------------------------

# In step 25 each rank waits for its own signal, where the script of the recipe sends rank 1 one.
SENDS = """\
            if steps == demonstrated_in and idist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)  # stands for the cluster
"""
WAITS = """\
            if steps == 25:
                open(f"waits.{idist.get_rank()}", "w").close()
                while not idist.any_interrupted():
                    __import__("time").sleep(0.05)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


def submit(command: str, folder: Path, cluster: dict[str, str]) -> str:
    """Run a command with ``sbatch``; the number of the job."""
    ended = at_a_shell(command, folder, OMP_NUM_THREADS="1", **cluster)
    assert is_as_shown(ended.output.splitlines(), output_of("slurm.md", command)), ended
    return ended.output.split()[-1]


@pytest.mark.launchers
def test_a_job_of_slurm_saves_and_the_next_one_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    for page in ("preemption.md", "slurm.md"):
        write_files(page, tmp_path)
    script = tmp_path / "job.py"
    text = script.read_text(encoding="utf-8")
    assert SENDS in text
    script.write_text(text.replace(SENDS, WAITS), encoding="utf-8")

    first = submit(documented("sbatch job.sh"), tmp_path, cluster)
    second = submit(documented("sbatch --dependency=singleton job.sh"), tmp_path, cluster)
    results = [tmp_path / f"digits-{job}.out" for job in (first, second)]
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("waits.*"))) < 4:
        assert time.monotonic() < deadline, results[0].read_text(encoding="utf-8")
        time.sleep(0.1)
    # As Slurm does before the time limit: to the processes of the steps, not to the shell of the script.
    at_a_shell(f"scancel --signal=TERM {first}", tmp_path, **cluster)
    at_a_shell("sbatch --wait --dependency=singleton --job-name=digits --wrap true", tmp_path, **cluster)
    found = [path.read_text(encoding="utf-8").splitlines() for path in results]
    assert found[0][-1] == "saved after step 25", found
    assert found[1][0] == "continues after step 25" and "epoch 3: loss" in found[1][-1], found


@pytest.mark.launchers
def test_the_nodes_of_slurm_are_checked(cluster: dict[str, str], tmp_path: Path) -> None:
    command = documented("srun -N 2 -n 4 ignite-dist check")
    ended = at_a_shell(command, tmp_path, OMP_NUM_THREADS="1", **cluster)
    assert ended.returncode == 0, ended
    assert "gloo, 4 processes" in ended.output and "All is well" in ended.output, ended
