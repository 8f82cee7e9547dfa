"""One training script under real launchers; ``make test-launchers`` installs them."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import helpers
import job
from commands import documented, open_mpi
from slurm import slurm

SCRIPT = "python script.py"  # as in README
JOB = str(Path(job.__file__))
LAUNCH_JOB = str(Path(job.__file__).with_name("launch_job.py"))
FAILURE_SECONDS = 150  # Ray takes a few to stop on a machine that is idle

# launcher, as idist calls it; what its reason names; the command before the script's arguments
TORCHRUN = ("torchrun", "TORCHELASTIC_RUN_ID", documented("torchrun --nproc-per-node 2 script.py"))
OPEN_MPI = ("Open MPI", "OMPI_COMM_WORLD_RANK", documented("mpirun -np 2 python script.py"))
HYDRA = ("PMI", "PMI_RANK", documented("mpiexec.hydra -n 2 python script.py"))
ACCELERATE = (
    "torchrun",
    "TORCHELASTIC_RUN_ID",
    f"{documented('accelerate launch')} --multi_gpu --num_processes=2 --main_process_port=0 script.py",
)
SRUN = ("Slurm", "SLURM_STEP_NUM_TASKS", documented("srun -n 2 python script.py"))
RUN = ("ignite-dist run", "IGNITE_DIST_RUN", documented("ignite-dist run --nproc-per-node 2 script.py"))
HOROVODRUN = ("Horovod", "HOROVOD_RANK", documented("horovodrun -np 2 python script.py"))
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "mpirun": OPEN_MPI,
    "mpiexec.hydra": HYDRA,
    "srun": SRUN,
    "accelerate": ACCELERATE,
    "ray": ("Ray Train", "RAY_JOB_ID", f"python {LAUNCH_JOB} ray"),
    "fabric": ("Lightning", "LOCAL_RANK", f"python {LAUNCH_JOB} fabric"),
    "fabric_spawn": ("none", "", f"python {LAUNCH_JOB} fabric_spawn"),
    "spawn": ("idist.spawn", "IGNITE_DIST_SPAWNED", f"python {LAUNCH_JOB} spawn"),
}
ROWS = [pytest.param(*row, id=name, marks=pytest.mark.launchers) for name, row in LAUNCHERS.items()]
ROWS += [
    pytest.param(*HOROVODRUN, id="horovodrun", marks=pytest.mark.horovod),
    pytest.param(*RUN, id="ignite-dist run"),
]
launchers = pytest.mark.parametrize(("launcher", "variable", "command"), ROWS)


class Run(NamedTuple):
    """How a launcher ended, what was to be read until then, and what each rank has found.

    ``seconds`` passed between the failure of a rank and the end.
    """

    returncode: int
    output: str
    ranks: list[dict[str, Any]]
    seconds: float | None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """What a user's shell would have, and a mark by which everything that comes of it is found again."""
    more = {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "ACCELERATE_USE_CPU": "true"}
    return helpers.plain_environ(IGNITE_DIST_TEST=uuid.uuid4().hex, **more, **open_mpi(tmp_path))


@pytest.fixture
def run(tmp_path: Path, environ: dict[str, str], request: pytest.FixtureRequest) -> Any:
    """``run(command, *arguments)``: ``script.py`` under a launcher. Nothing of it may be left at the end."""
    (tmp_path / "script.py").symlink_to(JOB)

    def launch(command: str, *arguments: str, seconds: float = 240) -> Run:
        out = tmp_path / "out"
        out.mkdir()
        if command.startswith(("srun", "sbatch", "salloc")):
            environ.update(request.getfixturevalue("cluster"))
        if command.startswith("mpiexec.hydra"):  # MPICH does not name its jobs, and another may run here
            environ["MASTER_PORT"] = str(helpers.free_port())
        ended = subprocess.run(
            [*shlex.split(command), str(out), *arguments],
            env=environ,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        failed = out / "failed"
        seconds_since = time.time() - failed.stat().st_mtime if failed.exists() else None
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
        return Run(ended.returncode, ended.stdout, ranks, seconds_since)

    yield launch
    left = helpers.end_of_processes(_marked(environ["IGNITE_DIST_TEST"]), 90)
    commands = [_end(pid) for pid in left]
    assert not commands, "these processes were left"


def _marked(mark: str) -> list[int]:
    """The processes that have inherited a test's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("IGNITE_DIST_TEST") == mark:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            pass
    return found


def _end(pid: int) -> str:
    """End the process; what it was."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        process.kill()
        return command
    return f"{pid}, ended meanwhile"


@pytest.fixture(scope="session")
def losses() -> list[float]:
    """What one process alone gets: several share each batch, and average, so they get the same."""
    return job.fit({"failing": None})


def check(
    run: Run, losses: list[float], launcher: str, variable: str, places: list[tuple[int, int, int, int]]
) -> None:
    """``places``: local rank, processes per node, node rank and number of nodes of each rank."""
    assert run.returncode == 0, run.output
    world_size = len(places)
    assert [found["rank"] for found in run.ranks] == list(range(world_size)), run.output
    for found, place in zip(run.ranks, places, strict=True):
        keys = ("local_rank", "nproc_per_node", "node_rank", "nnodes")
        assert tuple(found[key] for key in keys) == place
        assert found["world_size"] == world_size
        assert found["launcher"] == launcher
        assert variable in found["reason"]
        assert found["losses"] == pytest.approx(losses)
        assert found["sum"] == sum(range(world_size + 1))
        assert found["everyone"] == [{"rank": rank} for rank in range(world_size)]
        assert found["warnings"] == []


TWO_ON_ONE_NODE = [(0, 2, 0, 1), (1, 2, 0, 1)]


@pytest.mark.long
@launchers
def test_a_script_runs_as_it_is(
    run: Any, losses: list[float], launcher: str, variable: str, command: str
) -> None:
    check(run(command), losses, launcher, variable, TWO_ON_ONE_NODE)


@pytest.mark.long
@launchers
def test_a_rank_that_fails_ends_the_job(run: Any, launcher: str, variable: str, command: str) -> None:
    ended = run(command, "1")
    assert ended.returncode != 0
    assert ended.ranks == []
    # torch's spawn, which Fabric's is, tells of one rank that failed, of rank 0 if it looks late.
    tells_of_another = command.endswith("fabric_spawn") and "Process 0 terminated" in ended.output
    assert "LookupError: this rank has no data" in ended.output or tells_of_another, ended.output
    assert ", in fit" in ended.output  # its traceback
    assert ended.seconds is not None and ended.seconds < FAILURE_SECONDS


# --- Slurm: jobs, steps, scripts ----------------------------------------------------------------------


@pytest.mark.launchers
@pytest.mark.parametrize(
    "command",
    [
        "salloc -n 2 srun",
        "salloc -n 4 srun -n 2",
        "salloc -N 2 -n 4 srun -N 1 -n 2",
        "srun --mpi=pmi2 -n 2",
    ],
)
def test_steps_of_a_job(run: Any, losses: list[float], command: str) -> None:
    """Two ranks each, whatever the size of the job that the step belongs to."""
    check(run(f"{command} {SCRIPT}"), losses, "Slurm", "SLURM_STEP_NUM_TASKS", TWO_ON_ONE_NODE)


@pytest.mark.launchers
def test_two_nodes_of_different_sizes(run: Any, losses: list[float]) -> None:
    """Ranks go round the nodes, so those of one node are not neighbours."""
    ended = run(f"srun -N 2 -n 3 -m cyclic {SCRIPT}")
    places = [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]
    check(ended, losses, "Slurm", "SLURM_STEP_NUM_TASKS", places)


@pytest.mark.launchers
@pytest.mark.parametrize(
    ("inner", "launcher", "variable"),
    [
        ("mpirun -np 2", "Open MPI", "OMPI_COMM_WORLD_RANK"),
        ("mpiexec.hydra -n 2", "PMI", "PMI_RANK"),
    ],
    ids=["mpirun", "mpiexec.hydra"],
)
def test_another_launcher_inside_of_a_job(
    run: Any, losses: list[float], inner: str, launcher: str, variable: str
) -> None:
    check(run(f"salloc -n 2 {inner} {SCRIPT}"), losses, launcher, variable, TWO_ON_ONE_NODE)


@pytest.mark.launchers
def test_a_batch_script_with_srun(run: Any, tmp_path: Path, losses: list[float]) -> None:
    script = helpers.write_script(tmp_path, f'#!/bin/sh\nsrun {SCRIPT} "$@"\n', "batch.sh")
    ended = run(f"sbatch --wait -n 2 {script}")
    check(ended, losses, "Slurm", "SLURM_STEP_NUM_TASKS", TWO_ON_ONE_NODE)


@pytest.mark.launchers
def test_a_batch_script_that_forgets_srun_is_refused(run: Any, tmp_path: Path) -> None:
    """It is one process, and would wait for ever for the other."""
    script = helpers.write_script(tmp_path, f'#!/bin/sh\n{SCRIPT} "$@"\n', "batch.sh")
    ended = run(f"sbatch --wait -n 2 --output=batch.out {script}")
    assert ended.returncode != 0
    said = (tmp_path / "batch.out").read_text(encoding="utf-8")
    assert "EnvironmentVariablesError" in said
    assert "srun" in said.splitlines()[-2]  # the last line is the link
