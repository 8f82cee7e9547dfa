"""The launchers' environments: recorded from real runs, or transcribed from what the vendor documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ignite_dist import environments
from ignite_dist.environments import Environment, slurm
from ignite_dist.environments.base import located
from ignite_dist.errors import EnvironmentVariablesError
from recorded_jobs import FLUX, SLURM, TORCHRUN, detect, found_in, numbered_by_flux

_DATA = Path(__file__).parent
RECORDED = json.loads((_DATA / "recorded.json").read_text())
TRANSCRIBED = json.loads((_DATA / "transcribed.json").read_text())


def without(environ: Mapping[str, str], *names: str, **more: str) -> dict[str, str]:
    return {**{name: value for name, value in environ.items() if name not in names}, **more}


# --- every environment that we have ------------------------------------------------------------------


@pytest.mark.parametrize("case", [*RECORDED, *TRANSCRIBED], ids=lambda case: case["name"])
def test_an_environment(case: dict[str, Any]) -> None:
    expected = case["expected"]
    if expected is None:
        assert detect(case["environ"]) is None
    elif "error" in expected:
        with pytest.raises(EnvironmentVariablesError) as info:
            detect(case["environ"])
        for part in [expected["error"]] if isinstance(expected["error"], str) else expected["error"]:
            assert part in str(info.value)
    else:
        found = found_in(case["environ"])
        assert {name: getattr(found, name) for name in expected} == expected
        assert any(name in found.reason for name in case["environ"])


def test_there_are_enough_of_them_and_each_says_where_it_is_from() -> None:
    assert len(RECORDED) >= 40
    assert len({case["name"] for case in [*RECORDED, *TRANSCRIBED]}) == len([*RECORDED, *TRANSCRIBED])
    assert all("recorded" in case["source"] for case in RECORDED)
    assert all("https://" in case["source"] for case in TRANSCRIBED)
    launchers = {(case["expected"] or {}).get("launcher") for case in [*RECORDED, *TRANSCRIBED]}
    assert launchers >= {
        *("torchrun", "idist.spawn", "Ray Train", "Kubeflow", "RANK and WORLD_SIZE", "Lightning"),
        *("Horovod", "LSF", "Open MPI", "PMI", "Slurm", "TPU pod"),
    }


def _jobs() -> dict[str, list[dict[str, Any]]]:
    """The recorded jobs all of whose ranks were recorded, by name."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for case in RECORDED:
        name = case["name"].rpartition(", rank ")[0]
        if name:
            jobs.setdefault(name, []).append(case)
    return jobs


@pytest.mark.parametrize("name", list(_jobs()))
def test_all_ranks_of_a_job_agree(name: str) -> None:
    ranks = [found_in(case["environ"]) for case in _jobs()[name]]
    size = len(ranks)
    assert [found.rank for found in ranks] == list(range(size))
    assert {found.world_size for found in ranks} == {size}
    for fact in ("launcher", "nnodes", "main_address", "main_port", "reason"):
        assert len({getattr(found, fact) for found in ranks}) == 1, fact
    # What one rank does not know and another does would be asked for by one of them only.
    for fact in ("local_rank", "nproc_per_node", "node_rank"):
        assert len({getattr(found, fact) is None for found in ranks}) == 1, fact
    if ranks[0].nproc_per_node is not None and ranks[0].node_rank is not None:
        per_node = Counter(found.node_rank for found in ranks)
        assert all(per_node[found.node_rank] == found.nproc_per_node for found in ranks)


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
        reason="TORCHELASTIC_RUN_ID is set",
    )


def test_rank_and_world_size_alone_are_enough() -> None:
    found = found_in({"RANK": "1", "WORLD_SIZE": "2"})
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
        *({"LOCAL_WORLD_SIZE": "9"}, {"GROUP_WORLD_SIZE": "9"}),
        *({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, {"GROUP_WORLD_SIZE": "6"}),
        {"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": ""},
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
        nproc_per_node=2,
        nnodes=4,
        node_rank=1,
        main_address="gpu03",
        main_port=15000 + 4567,
        reason="SLURM_JOB_ID and SLURM_STEP_NUM_TASKS are set",
    )


def test_a_steps_variables_go_before_the_jobs() -> None:
    step = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "gpu09",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
    }
    found = found_in({**SLURM, **step})
    assert (found.rank, found.world_size, found.nnodes, found.main_address) == (1, 2, 1, "gpu09")


@pytest.mark.parametrize(
    ("tasks", "node_rank", "here"),
    [("2(x4)", 3, 2), ("3,2(x2),1", 0, 3), ("3,2(x2),1", 2, 2), ("3,2(x2),1", 3, 1), ("5(x1),1(x3)", 0, 5)],
)
def test_the_tasks_of_each_node_may_differ(tasks: str, node_rank: int, here: int) -> None:
    found = found_in(
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node_rank), "SLURM_LOCALID": "0"}
    )
    assert (found.nproc_per_node, found.node_rank) == (here, node_rank)


@pytest.mark.parametrize("tasks", ["2(x3)", "8", "2(x5)", "4,4"])
def test_tasks_per_node_that_do_not_fit_the_step_contradict_it(tasks: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match="contradict") as info:
        detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "3"})
    assert "SLURM_STEP_TASKS_PER_NODE" in str(info.value)
    assert "SLURM_STEP_NUM_TASKS=8" in str(info.value)


@pytest.mark.parametrize("tasks", ["2x4", "(x4)", "2(x)", "two", "2,,2"])
def test_what_is_no_list_of_tasks_is_an_error(tasks: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match="SLURM_STEP_TASKS_PER_NODE must be a list like"):
        detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})


@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ({}, False),
        ({"SLURM_NTASKS_PER_GPU": "1"}, True),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu:4"}, False),
        ({"SLURM_GPUS_ON_NODE": "4"}, False),
    ],
    ids=str,
)
def test_gpus_counted_by_task_are_shown_to_that_task_alone(variables: dict[str, str], bound: bool) -> None:
    assert found_in({**SLURM, **variables}).has_own_devices is bound


def test_a_users_own_address_and_port_go_before_slurms() -> None:
    found = found_in({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"})
    assert (found.main_address, found.main_port) == ("10.0.0.1", 4242)


def test_every_task_finds_the_same_port_and_other_jobs_another() -> None:
    ports = {found_in({**SLURM, "SLURM_PROCID": str(rank)}).main_port for rank in range(8)}
    assert len(ports) == 1
    assert found_in({**SLURM, "SLURM_JOB_ID": "1234568"}).main_port not in ports


@pytest.mark.parametrize(("job", "port"), [("7", 15007), ("42", 15042), ("1234567", 19567), ("20000", 15000)])
def test_the_port_of_a_job_of_any_number(job: str, port: int) -> None:
    assert found_in({**SLURM, "SLURM_JOB_ID": job}).main_port == port


def test_an_empty_job_id_is_no_job() -> None:
    assert detect({**SLURM, "SLURM_JOB_ID": ""}) is None


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_a_half_set_step_names_what_is_missing(name: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match=f"srun.* {name} missing"):
        detect(without(SLURM, name))


def test_a_batch_script_that_forgets_srun_is_told_of_it() -> None:
    with pytest.raises(EnvironmentVariablesError, match=r"SLURM_NTASKS=8.*Start the script with srun"):
        detect(without(SLURM, *(name for name in SLURM if "STEP" in name), SLURM_PROCID="0"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"SLURM_PROCID": "8"}, "contradict each other: rank 8 with world size 8"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number, got 'x'"),
        ({"SLURM_NODEID": "4"}, "contradict .* SLURM_NODEID=4"),
        (
            {"SLURM_NODEID": "4", "SLURM_STEP_TASKS_PER_NODE": ""},
            "contradict each other: node rank 4 with number of nodes 4",
        ),
    ],
)
def test_slurm_variables_that_cannot_be(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(EnvironmentVariablesError, match=said):
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
        detect({**SLURM, "SLURM_STEP_NODELIST": nodes})
    found = found_in({**SLURM, "SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "10.0.0.1"})
    assert found.main_address == "10.0.0.1"


# --- several launchers at once -----------------------------------------------------------------------


def test_torchrun_under_srun_is_torchrun_and_says_so() -> None:
    found = found_in({**SLURM, **TORCHRUN, "RANK": "6", "SLURM_PROCID": "0"})
    assert (found.launcher, found.rank, found.main_address) == ("torchrun", 6, "node0")
    assert found.reason == "TORCHELASTIC_RUN_ID is set, before Slurm"


def test_half_set_torchrun_variables_do_not_hide_slurm() -> None:
    assert found_in({**SLURM, "LOCAL_RANK": "1"}).launcher == "Slurm"


def test_ranks_set_once_for_the_whole_job_contradict_the_launcher() -> None:
    with pytest.raises(EnvironmentVariablesError, match="contradict") as info:
        detect({**SLURM, "RANK": "0", "WORLD_SIZE": "8"})
    for part in ("RANK=0", "WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS", "rank 5 of 8"):
        assert part in str(info.value)
    assert found_in({**SLURM, "RANK": "5", "WORLD_SIZE": "8"}).rank == 5
    assert found_in({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}).rank == 0  # a world in one of the tasks


# --- the variables that each environment declares ----------------------------------------------------


class _Read(dict[str, str]):
    """Environment variables that keep the names that somebody asks for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def _names_read() -> set[str]:
    names: set[str] = set()
    for case in [*RECORDED, *TRANSCRIBED]:
        environ = _Read(case["environ"])
        with suppress(EnvironmentVariablesError):
            environments.detect(environ)
        names |= environ.names
    return names


def test_every_variable_that_is_read_is_declared_in_full() -> None:
    names = _names_read()
    assert len(names) > 50
    assert names <= environments.launcher_variables()


def test_the_variables_of_a_launcher_are_known_and_no_others() -> None:
    names = {name for case in RECORDED for name in case["environ"]}
    # Set by the user, by Accelerate for its own use, or for every worker of Ray; none of them tells a place.
    of_others = ("ACCELERATE_", "GLOO_", "HYDI_", "MPIR_CVAR_", "RAY_")
    unknown = {name for name in names if not environments.is_launcher_variable(name)}
    assert {name for name in unknown if not name.startswith(of_others)} == set()
    for name in ("PATH", "HOME", "RANKS", "SLURM", "NCCL_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        assert not environments.is_launcher_variable(name)
    assert not any(name.endswith("*") for name in environments.launcher_variables())


# --- any number of names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "local_rank", "nnodes"),
    [((), None, None), (("local_rank",), 1, None), (("nnodes",), None, 2), (("local_rank", "nnodes"), 1, 2)],
    ids=str,
)
def test_a_launcher_may_set_any_number_of_variables(
    attributes: tuple[str, ...], local_rank: int | None, nnodes: int | None
) -> None:
    found = numbered_by_flux(FLUX, *attributes)
    assert (found.launcher, found.rank, found.world_size) == ("Flux", 1, 4)
    assert (found.local_rank, found.nproc_per_node, found.nnodes) == (local_rank, None, nnodes)
    assert (found.node_rank, found.main_address) == (None, "node7")
    assert found.reason == "FLUX_TASK_RANK and FLUX_JOB_SIZE are set"


def test_a_variable_that_was_named_and_is_missing_is_told() -> None:
    with pytest.raises(EnvironmentVariablesError, match=r"flux run: .*FLUX_TASK_LOCAL_ID missing"):
        numbered_by_flux(without(FLUX, "FLUX_TASK_LOCAL_ID"), "local_rank")


def test_one_node_is_this_node() -> None:
    found = numbered_by_flux({**FLUX, "FLUX_JOB_NNODES": "1"}, "local_rank", "nnodes")
    assert (found.nproc_per_node, found.nnodes, found.node_rank) == (4, 1, 0)
    assert found.main_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"nnodes": 1}, (4, 1, 0, "127.0.0.1")),
        ({"nproc_per_node": 4}, (4, 1, 0, "127.0.0.1")),
        ({"nproc_per_node": 4, "nnodes": 1}, (4, 1, 0, "127.0.0.1")),
        ({"nnodes": 1, "main_address": "here"}, (4, 1, 0, "here")),
        ({"nproc_per_node": 2, "nnodes": 2}, (2, 2, None, "node7")),
        ({"nnodes": 2}, (None, 2, None, "node7")),
        ({}, (None, None, None, "node7")),
    ],
    ids=str,
)
def test_what_follows_from_the_sizes(sizes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = located(Environment("Flux", 1, 4, **sizes), "node7")
    assert (found.nproc_per_node, found.nnodes, found.node_rank, found.main_address) == expected


@pytest.mark.parametrize("sizes", [{"nproc_per_node": 4, "nnodes": 2}, {"nproc_per_node": 2, "nnodes": 1}])
def test_sizes_that_contradict_each_other(sizes: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentVariablesError, match="contradict each other"):
        located(Environment("Flux", 1, 4, **sizes), "node7")
