"""Parallel: in one process, over processes of its own, and under a launcher."""

from __future__ import annotations

import inspect
import os
import subprocess
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist
from spawned import FAILURE_SECONDS, is_daemon, spawn, within

# --- Parallel ----------------------------------------------------------------------------------------


def _add(local_rank: int, a: int, *, b: int) -> list[int]:
    return [local_rank + a + b, idist.get_world_size()]


def test_parallel_without_a_backend_runs_here() -> None:
    with idist.Parallel() as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 1]
        assert idist.model_name() == "serial"


def test_parallel_starts_processes() -> None:
    with idist.Parallel("gloo", nproc_per_node=2) as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 2]
        assert parallel.run(_add, 2, b=2) == [4, 2]
        assert idist.model_name() == "serial"


def test_parallel_alone_is_a_world_of_one() -> None:
    before = dict(os.environ)
    with idist.Parallel("gloo") as parallel:
        assert idist.model_name() == "native-dist"
        assert parallel.run(_add, 1, b=2) == [3, 1]
    assert idist.model_name() == "serial"
    assert dict(os.environ) == before


def _joined() -> Any:
    with idist.Parallel(backend="gloo", nproc_per_node=None) as parallel:
        result = parallel.run(_add, 1, b=2)
    assert idist.model_name() == "serial"
    return result


def test_parallel_joins_the_processes_of_a_launcher() -> None:
    assert helpers.run_ranks(_joined) == [[3, 2], [4, 2]]


def _joined_by_file(method: str) -> Any:
    with idist.Parallel(backend="gloo", init_method=method) as parallel:
        return parallel.run(_add, 1, b=2)


def test_parallel_joins_over_a_file(tmp_path: Path) -> None:
    assert helpers.run_ranks(_joined_by_file, f"file://{tmp_path}/meet") == [[3, 2], [4, 2]]


def test_parallel_hands_its_keywords_to_spawn(tmp_path: Path) -> None:
    keywords = {"start_method": "fork", "daemon": True, "init_method": f"file://{tmp_path}/meet"}
    with idist.Parallel("gloo", nproc_per_node=2, **keywords) as parallel:
        assert parallel.run(is_daemon) is True


def test_parallel_with_join_false_gives_the_handle() -> None:
    with idist.Parallel("gloo", nproc_per_node=2, join=False) as parallel:
        handle = parallel.run(_add, 1, b=2)
    assert handle.join() == [[3, 2], [4, 2]]


def _lives_on(world_size: int) -> bool:
    """Whether the context is still there, and still works."""
    return idist.get_world_size() == dist.get_world_size() == idist.all_reduce(1) == world_size


def _inside_of_anothers_context(backend: str) -> Any:
    dist.init_process_group(backend)
    before = dict(os.environ)
    with idist.Parallel(backend="gloo") as parallel:
        result = parallel.run(_add, 1, b=2)
    kept = _lives_on(2)
    with suppress(LookupError), idist.Parallel(backend="gloo"):
        raise LookupError("every rank has no data")
    assert dict(os.environ) == before
    return result, kept, _lives_on(2)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_parallel_uses_a_live_context_and_leaves_it_to_its_owner(backend: str) -> None:
    assert helpers.run_ranks(_inside_of_anothers_context, backend) == [
        ([3, 2], True, True),
        ([4, 2], True, True),
    ]


def _inside_of_a_worker(local_rank: int) -> Any:
    with idist.Parallel(backend="gloo") as parallel:
        result = parallel.run(_add, 1, b=2)
    return result, _lives_on(2)


def test_a_script_that_uses_parallel_can_be_spawned() -> None:
    assert spawn(_inside_of_a_worker) == [([3, 2], True), ([4, 2], True)]


def test_parallel_refuses_a_live_context_of_another_backend() -> None:
    idist.initialize("gloo")
    try:
        with pytest.raises(RuntimeError, match="backend 'gloo' exists already"), idist.Parallel("cpu:gloo"):
            pytest.fail("it was entered")
        assert _lives_on(1)
    finally:
        idist.finalize()


def test_parallel_says_which_keywords_come_too_late_for_a_live_context() -> None:
    idist.initialize("gloo")
    try:
        keywords = {"timeout": timedelta(seconds=9), "init_method": "env://"}
        with pytest.warns(UserWarning, match="ignores timeout"), idist.Parallel("gloo", **keywords):
            assert _lives_on(1)
    finally:
        idist.finalize()


def test_parallel_can_be_entered_again() -> None:
    parallel = idist.Parallel("gloo")
    for _ in range(2):
        with parallel:
            assert idist.model_name() == "native-dist"
        assert idist.model_name() == "serial"


def _raises_in_the_block(where: str) -> None:
    with idist.Parallel(backend="gloo") as parallel:
        if where == "before":
            idist.barrier()
            if idist.get_rank() == 0:
                raise LookupError("rank 0 has no data")
        parallel.run(_raises_in_the_function, where)


def _raises_in_the_function(local_rank: int, where: str) -> None:
    idist.barrier()
    if where == "inside" and local_rank == 0:
        raise LookupError("rank 0 has no data")
    idist.all_reduce(torch.ones(2))
    idist.barrier()


@pytest.mark.parametrize("where", ["before", "inside"])
def test_an_exception_in_the_block_reaches_the_user_and_ends_the_wait_of_the_others(where: str) -> None:
    failed, waiting = helpers.end_of_ranks(_raises_in_the_block, where, seconds=120)
    assert failed.error.strip().endswith("LookupError: rank 0 has no data")
    assert "During handling" not in failed.error
    assert waiting.error, "the other rank cannot have come through"
    assert "RuntimeError" in waiting.error or "DistBackendError" in waiting.error
    assert abs(waiting.seconds - failed.seconds) < 20


SCRIPT_THAT_FAILS = """
    import torch
    import ignite_dist as idist

    def train(local_rank):
        idist.barrier()
        if local_rank == 0:
            raise LookupError("rank 0 has no data")
        idist.all_reduce(torch.ones(2))
        idist.barrier()

    if __name__ == "__main__":
        with idist.Parallel(backend="gloo") as parallel:
            parallel.run(train)
"""


def test_scripts_under_a_launcher_end_with_an_error_within_seconds(tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, SCRIPT_THAT_FAILS)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [helpers.python_that_forks(), str(script)],
            env=helpers.plain_environ(**helpers.loopback(), **environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in helpers.torchrun_environs(2, agent.port)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert outputs[0].strip().splitlines()[-1] == "LookupError: rank 0 has no data"


def test_parallel_that_spawned_raises_what_spawn_raises() -> None:
    with (
        within(FAILURE_SECONDS),
        pytest.raises(idist.WorkerRaisedError) as info,
        idist.Parallel("gloo", nproc_per_node=2) as parallel,
    ):
        parallel.run(_raises_in_the_function, "inside")
    assert (info.value.rank, info.value.error_type) == (0, "LookupError")


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"backend": "ncl"}, ValueError, ["Unknown backend 'ncl'", "'gloo'"]),
        ({"backend": None, "nproc_per_node": 2}, ValueError, ["nproc_per_node", "None"]),
        ({"backend": None, "nnodes": 2}, ValueError, ["nnodes", "None"]),
        ({"backend": None, "node_rank": 0}, ValueError, ["node_rank", "None"]),
        ({"backend": None, "master_addr": "h"}, ValueError, ["master_addr", "None"]),
        ({"backend": None, "master_port": 1}, ValueError, ["master_port", "None"]),
        ({"nproc_per_node": 0}, ValueError, ["nproc_per_node", "0"]),
        ({"nproc_per_node": -1}, ValueError, ["nproc_per_node", "-1"]),
        ({"nproc_per_node": 1, "nnodes": 0}, ValueError, ["nnodes", "0"]),
        ({"nproc_per_node": 1, "nnodes": 2}, ValueError, ["nnodes=2", "node_rank"]),
        ({"nproc_per_node": 1, "nnodes": 2, "node_rank": 2}, ValueError, ["node_rank", "2"]),
        ({"nproc_per_node": 1, "nnodes": 2, "node_rank": -1}, ValueError, ["node_rank", "-1"]),
        ({"nproc_per_node": 1, "node_rank": 1}, ValueError, ["node_rank", "1"]),
        (
            {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0},
            ValueError,
            ["master_addr", "master_port", "init_method"],
        ),
        (
            {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "master_addr": "h"},
            ValueError,
            ["master_port", "init_method"],
        ),
        (
            {"nproc_per_node": 2, "start_metod": "fork"},
            TypeError,
            ["start_metod", "Did you mean 'start_method'?"],
        ),
    ],
    ids=str,
)
def test_wrong_arguments_of_parallel(
    kwargs: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    """All of them when it is made, not when it runs something."""
    with pytest.raises(error) as info:
        idist.Parallel(**{"backend": "gloo", **kwargs})
    for text in texts:
        assert text in str(info.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"backend": None, "start_method": "fork"},
        {
            "backend": "gloo",
            "nproc_per_node": None,
            "nnodes": None,
            "node_rank": None,
            "start_method": "fork",
        },
        {"backend": "gloo", "nproc_per_node": None, "nnodes": 1, "node_rank": 0},
    ],
    ids=str,
)
def test_what_scripts_pass_that_may_or_may_not_spawn(kwargs: dict[str, Any]) -> None:
    """One set of keywords for ``python`` and for ``torchrun``: what only spawning needs is not an error."""
    with idist.Parallel(**kwargs) as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 1]


def test_the_signature_names_every_argument() -> None:
    assert list(inspect.signature(idist.Parallel).parameters) == [
        *("backend", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "init_method"),
        "spawn_kwargs",
    ]


# --- a launcher and nproc_per_node ----------------------------------------------------------------------


def test_several_machines_without_processes_to_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nnodes=2 without nproc_per_node"):
        idist.Parallel(backend="gloo", nnodes=2, node_rank=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    idist.Parallel(backend="gloo", nnodes=2, node_rank=0)  # its launcher's


def test_the_processes_of_a_launcher_are_joined_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    for number in (2, "auto", None):
        idist.Parallel("gloo", nproc_per_node=number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torchrun has started 2 processes .* nproc_per_node=3"):
        idist.Parallel("gloo", nproc_per_node=3)


def test_one_process_of_a_launcher_on_each_node_may_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    variables |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    variables |= {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "host[1-2]"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert idist.environment().launcher == "Slurm"
    idist.Parallel("gloo", 3, nnodes=2, node_rank=0, master_addr="host1", master_port=29500)
    with pytest.raises(ValueError, match="Slurm has started 1 process on this machine"):
        idist.Parallel("gloo", nproc_per_node=3)


def _in_a_live_context(local_rank: int) -> tuple[str | None, int]:
    with idist.Parallel("auto", nproc_per_node="auto") as parallel:
        return parallel.run(lambda _: (idist.backend(), idist.get_world_size()))


def test_auto_uses_the_live_context_of_a_worker() -> None:
    assert idist.spawn("gloo", _in_a_live_context, nproc_per_node=2) == [("gloo", 2)] * 2


def test_auto_with_contradictory_variables_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script that forgets srun: the job's other tasks would be idle."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(idist.EnvironmentVariablesError, match="Start the script with srun"):
        idist.Parallel("gloo", nproc_per_node="auto").__enter__()
    idist.Parallel("gloo", nproc_per_node=2)  # it says what it wants
