from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from ignite_dist import environments
from ignite_dist.environments import Environment, slurm
from ignite_dist.errors import EnvironmentVariablesError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODEID": "1",
}


def detect(environ: Mapping[str, str]) -> Environment | None:
    return environments.detect(MappingProxyType(dict(environ)))  # it cannot be written to


def without(environ: Mapping[str, str], *names: str, **more: str) -> dict[str, str]:
    return {**{name: value for name, value in environ.items() if name not in names}, **more}


# --- torchrun and everything else that sets RANK and WORLD_SIZE ---------------------------------------


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Environment(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        nproc_per_node=4,
        nnodes=2,
        node_rank=1,
        main_address="node0",
        main_port=29500,
    )


def test_rank_and_world_size_alone_are_enough() -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "2"})
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.nnodes) == (1, 2, None, None)
    assert found.launcher != "torchrun"
    assert (found.main_address, found.main_port) == ("127.0.0.1", 15000)


@pytest.mark.parametrize(
    "environ", [{}, {"PATH": "/bin"}, {"RANK": "", "WORLD_SIZE": ""}, {"MASTER_ADDR": "node0"}]
)
def test_nobody_has_started_this_process(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "LOCAL_RANK": "0"}])
def test_half_set_variables_say_what_came_and_what_to_do(environ: dict[str, str]) -> None:
    with pytest.raises(EnvironmentVariablesError) as info:
        detect(environ)
    for name in ("RANK", "WORLD_SIZE", "unset", *environ):
        assert name in str(info.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["two", "1.5", "0x1", "1_0", "٣", "12345678901"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match=rf"{name} .*{value}"):
        detect({**TORCHRUN, name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        *({"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "4"}, {"GROUP_RANK": "2"}),
        *({"WORLD_SIZE": "-1", "RANK": "-2"}, {"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": ""}),
    ],
    ids=str,
)
def test_ranks_outside_their_sizes_contradict_them(wrong: dict[str, str]) -> None:
    with pytest.raises(EnvironmentVariablesError, match="contradict") as info:
        detect({**TORCHRUN, **wrong})
    assert next(iter(wrong.values())) in str(info.value)


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999"])
@pytest.mark.parametrize("launcher", ["torchrun", "Slurm"])
def test_a_port_is_one_that_there_is(launcher: str, port: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match=rf"MASTER_PORT .*\[1, 65535\], got {port}"):
        detect({**(TORCHRUN if launcher == "torchrun" else SLURM), "MASTER_PORT": port})


# --- Slurm -------------------------------------------------------------------------------------------


def test_slurm() -> None:
    assert detect(SLURM) == Environment(
        launcher="Slurm",
        rank=5,
        world_size=8,
        local_rank=1,
        nproc_per_node=None,  # may differ between the nodes
        nnodes=4,
        node_rank=1,
        main_address="gpu03",
        main_port=15000 + 4567,
    )


def test_a_steps_variables_go_before_the_jobs() -> None:
    step = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu09",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
    }
    found = detect({**SLURM, **step})
    assert found is not None
    assert (found.rank, found.world_size, found.nnodes, found.main_address) == (1, 2, 1, "gpu09")


def test_a_users_own_address_and_port_go_before_slurms() -> None:
    found = detect({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"})
    assert found is not None
    assert (found.main_address, found.main_port) == ("10.0.0.1", 4242)


def test_every_task_finds_the_same_port_and_other_jobs_another() -> None:
    ports = {detect({**SLURM, "SLURM_PROCID": str(rank)}).main_port for rank in range(8)}  # type: ignore[union-attr]
    assert len(ports) == 1
    other = detect({**SLURM, "SLURM_JOB_ID": "1234568"})
    assert other is not None
    assert other.main_port not in ports


@pytest.mark.parametrize(("job", "port"), [("7", 15007), ("42", 15042), ("1234567", 19567), ("20000", 15000)])
def test_the_port_of_a_job_of_any_number(job: str, port: int) -> None:
    found = detect({**SLURM, "SLURM_JOB_ID": job})
    assert found is not None
    assert found.main_port == port


def test_an_empty_job_id_is_no_job() -> None:
    assert detect({**SLURM, "SLURM_JOB_ID": ""}) is None


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"])
def test_a_slurm_job_without_srun_says_so_and_names_what_is_missing(name: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match="srun") as info:
        detect(without(SLURM, name))
    assert name in str(info.value)
    for other in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"):
        assert (other in str(info.value)) == (other == name)


def test_of_a_step_only_what_is_missing_is_named() -> None:
    environ = without(SLURM, "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST")
    with pytest.raises(EnvironmentVariablesError, match="SLURM_PROCID") as info:
        detect({**environ, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu1"})
    assert "SLURM_NTASKS" not in str(info.value)
    assert "SLURM_JOB_NODELIST" not in str(info.value)


@pytest.mark.parametrize(
    "wrong",
    [{"SLURM_PROCID": "8"}, {"SLURM_PROCID": "x"}, {"SLURM_NODEID": "4"}, {"SLURM_JOB_ID": "abc"}],
    ids=str,
)
def test_slurm_variables_that_cannot_be(wrong: dict[str, str]) -> None:
    with pytest.raises(EnvironmentVariablesError):
        detect({**SLURM, **wrong})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("login,gpu[03-05]", "login"),
        ("gpu[003]", "gpu003"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("gpu-a[10-12].example.org", "gpu-a10.example.org"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("rack[1,3]node[03-04],login", "rack1node03"),
        (" gpu1 , gpu2", "gpu1"),
        ("[1-3]", "1"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["[", "gpu[", "gpu[1-2", "gpu]", "gpu[]", "gpu[a]", ",gpu", " ", "a b"])
def test_what_is_no_slurm_list_is_an_error_unless_the_address_is_given(nodes: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match="MASTER_ADDR"):
        detect({**SLURM, "SLURM_JOB_NODELIST": nodes})
    found = detect({**SLURM, "SLURM_JOB_NODELIST": nodes, "MASTER_ADDR": "10.0.0.1"})
    assert found is not None
    assert found.main_address == "10.0.0.1"


# --- several launchers at once -----------------------------------------------------------------------


def test_torchrun_under_srun_is_torchrun() -> None:
    found = detect({**SLURM, **TORCHRUN, "RANK": "6", "SLURM_PROCID": "0"})
    assert found is not None
    assert (found.launcher, found.rank, found.main_address) == ("torchrun", 6, "node0")


def test_half_set_torchrun_variables_do_not_hide_slurm() -> None:
    found = detect({**SLURM, "LOCAL_RANK": "1"})
    assert found is not None
    assert found.launcher == "Slurm"
