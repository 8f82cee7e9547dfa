"""The launchers' environments: recorded from real runs, or transcribed from what the vendor documents."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

import helpers
import ignite_dist as idist
from ignite_dist import environments
from ignite_dist.environments import Environment, slurm, torchrun, variables
from ignite_dist.environments.base import located, numbered
from ignite_dist.environments.registry import Registry
from ignite_dist.errors import EnvironmentVariablesError

_DATA = Path(__file__).parent / "environments"
RECORDED = json.loads((_DATA / "recorded.json").read_text())
TRANSCRIBED = json.loads((_DATA / "transcribed.json").read_text())

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
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NODEID": "1",
}


def detect(environ: Mapping[str, str]) -> Environment | None:
    return environments.detect(MappingProxyType(dict(environ)))  # it cannot be written to


def found_in(environ: Mapping[str, str]) -> Environment:
    found = detect(environ)
    assert found is not None
    return found


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

# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
FLUX = {
    **{"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"},
    **{"FLUX_JOB_NNODES": "2", "FLUX_JOB_ID": "ƒ2oLkTLb"},
}
FLUX_NAMES = {
    "rank": "FLUX_TASK_RANK",
    "world_size": "FLUX_JOB_SIZE",
    "local_rank": "FLUX_TASK_LOCAL_ID",
    "nnodes": "FLUX_JOB_NNODES",
}


def _numbered(environ: Mapping[str, str], *attributes: str) -> Environment:
    names = {attribute: FLUX_NAMES[attribute] for attribute in ("rank", "world_size", *attributes)}
    return numbered(environ, "Flux", "flux run", names, job=environ["FLUX_JOB_ID"], first_host="node7")


@pytest.mark.parametrize(
    ("attributes", "local_rank", "nnodes"),
    [((), None, None), (("local_rank",), 1, None), (("nnodes",), None, 2), (("local_rank", "nnodes"), 1, 2)],
    ids=str,
)
def test_a_launcher_may_set_any_number_of_variables(
    attributes: tuple[str, ...], local_rank: int | None, nnodes: int | None
) -> None:
    found = _numbered(FLUX, *attributes)
    assert (found.launcher, found.rank, found.world_size) == ("Flux", 1, 4)
    assert (found.local_rank, found.nproc_per_node, found.nnodes) == (local_rank, None, nnodes)
    assert (found.node_rank, found.main_address) == (None, "node7")
    assert found.reason == "FLUX_TASK_RANK and FLUX_JOB_SIZE are set"


def test_a_variable_that_was_named_and_is_missing_is_told() -> None:
    with pytest.raises(EnvironmentVariablesError, match=r"flux run: .*FLUX_TASK_LOCAL_ID missing"):
        _numbered(without(FLUX, "FLUX_TASK_LOCAL_ID"), "local_rank")


def test_one_node_is_this_node() -> None:
    found = _numbered({**FLUX, "FLUX_JOB_NNODES": "1"}, "local_rank", "nnodes")
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


# --- launchers of other packages -----------------------------------------------------------------------


def _flux(environ: Mapping[str, str]) -> Environment | None:
    return _numbered(environ, "local_rank", "nnodes") if "FLUX_JOB_ID" in environ else None


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry with the built-in launchers alone, to which a test may add others."""
    built_in = environments._launchers
    mine = Registry(built_in._first, built_in._last)
    monkeypatch.setattr(environments, "_launchers", mine)
    yield mine


def test_a_registered_launcher_is_found(registry: Registry) -> None:
    assert detect(FLUX) is None

    @environments.register_environment
    class Flux:
        LAUNCHER = "Flux"
        VARIABLES = (*FLUX_NAMES.values(), "FLUX_JOB_ID", "FLUX_*")
        detect = staticmethod(_flux)

    assert environments.register_environment(Flux) is Flux  # a second time has no effect
    assert [launcher.LAUNCHER for launcher in registry].count("Flux") == 1
    found = found_in(FLUX)
    assert (found.launcher, found.rank, found.nnodes) == ("Flux", 1, 2)
    assert environments.is_launcher_variable("FLUX_URI")
    assert "FLUX_JOB_SIZE" in environments.launcher_variables()
    assert environments.launcher_variables().isdisjoint({"FLUX_URI", "FLUX_*"})


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (SLURM, "FLUX_TASK_RANK and FLUX_JOB_SIZE are set, before Slurm"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "FLUX_TASK_RANK and FLUX_JOB_SIZE are set, before PMI"),
        (TORCHRUN, "TORCHELASTIC_RUN_ID is set, before Flux"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, before Flux"),
    ],
    ids=["Slurm", "PMI", "torchrun", "RANK"],
)
def test_it_comes_behind_rank_and_world_size_and_before_the_others(
    registry: Registry, others: dict[str, str], reason: str
) -> None:
    registry.register(SimpleNamespace(LAUNCHER="Flux", VARIABLES=("FLUX_*",), detect=_flux))
    assert found_in({**FLUX, **others}).reason == reason


def test_ranks_by_hand_that_contradict_it_are_refused(registry: Registry) -> None:
    registry.register(SimpleNamespace(LAUNCHER="Flux", VARIABLES=("FLUX_*",), detect=_flux))
    with pytest.raises(EnvironmentVariablesError, match="but Flux says rank 1 of 4"):
        detect({**FLUX, "RANK": "0", "WORLD_SIZE": "4"})


def test_two_launchers_of_one_name_are_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"'torchrun': ignite_dist\.environments\.torchrun is") as info:
        registry.register(SimpleNamespace(LAUNCHER="torchrun", VARIABLES=(), detect=_flux))
    assert "types.SimpleNamespace is not" in str(info.value)
    assert registry.register(torchrun) is torchrun


@pytest.mark.parametrize(
    ("wrong", "lacks"),
    [
        ({"LAUNCHER": "Flux", "VARIABLES": ()}, "detect(environ), a function."),
        ({"LAUNCHER": "Flux", "detect": _flux}, "VARIABLES, a tuple of str."),
        ({"LAUNCHER": "Flux", "detect": _flux, "VARIABLES": "FLUX_*"}, "VARIABLES, a tuple of str."),
        ({"LAUNCHER": "Flux", "detect": _flux, "VARIABLES": (1,)}, "VARIABLES, a tuple of str."),
        ({"VARIABLES": (), "detect": _flux}, "LAUNCHER, a str."),
        ({}, "LAUNCHER, a str; VARIABLES, a tuple of str; detect(environ), a function."),
    ],
)
def test_what_is_no_environment_is_told_what_it_lacks(
    registry: Registry, wrong: dict[str, Any], lacks: str
) -> None:
    with pytest.raises(TypeError) as info:
        registry.register(SimpleNamespace(**wrong))
    assert str(info.value).endswith(f"lacks: {lacks}")


@pytest.mark.parametrize("answer", [{"rank": 0}, (0, 2), True])
def test_detect_returns_an_environment_or_none(registry: Registry, answer: Any) -> None:
    registry.register(SimpleNamespace(LAUNCHER="Flux", VARIABLES=(), detect=lambda environ: answer))
    with pytest.raises(TypeError, match="'Flux' returned"):
        detect({})


def test_an_environment_of_another_package_is_checked_too(registry: Registry) -> None:
    wrong = Environment("Flux", rank=2, world_size=2)
    registry.register(SimpleNamespace(LAUNCHER="Flux", VARIABLES=(), detect=lambda environ: wrong))
    with pytest.raises(EnvironmentVariablesError, match="Flux contradict each other: rank 2"):
        detect({})


# --- entry points --------------------------------------------------------------------------------------

FLUX_FILE = """
    from ignite_dist.environments.base import numbered

    LAUNCHER = "Flux"
    VARIABLES = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID", "FLUX_*")


    def detect(environ):
        if not environ.get("FLUX_JOB_ID"):
            return None
        names = {"rank": VARIABLES[0], "world_size": VARIABLES[1], "local_rank": VARIABLES[2]}
        return numbered(
            environ, LAUNCHER, "flux run", names, job=environ["FLUX_JOB_ID"], first_host=None
        )
"""


def _run_with_entry_points(folder: Path, source: str, *values: str, **environ: str) -> tuple[int, str]:
    helpers.write_script(folder, FLUX_FILE, "flux_environment.py")
    info = folder / "some_launcher-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-launcher\nVersion: 1.0\n")
    lines = [f"launcher-{position} = {value}" for position, value in enumerate(values)]
    (info / "entry_points.txt").write_text("\n".join(["[ignite_dist.environments]", *lines, ""]))
    complete = helpers.plain_environ(**environ)
    complete["PYTHONPATH"] = os.pathsep.join([str(folder), complete["PYTHONPATH"]])
    ended = helpers.run_python("-c", source, env=complete)
    return ended.returncode, ended.stdout


def test_a_launcher_that_another_package_declares_as_an_entry_point(tmp_path: Path) -> None:
    source = (
        "import json, sys, ignite_dist as idist; before = 'flux_environment' in sys.modules;"
        "found = idist.environment(); print(json.dumps([before, found]))"
    )
    code, output = _run_with_entry_points(tmp_path, source, "flux_environment", **FLUX)
    assert code == 0, output
    before, (launcher, rank, world_size, local_rank, *_) = json.loads(output)
    assert before is False  # importing the package loads no code of others
    assert (launcher, rank, world_size, local_rank) == ("Flux", 1, 4, 1)


# The last one fails to import, with an error that a text alone does not make.
@pytest.mark.parametrize("value", ["json:dumps", "no_such_module", "flux_environment:no_such", "not_utf_8"])
def test_a_broken_entry_point_is_named_at_every_call(value: str, tmp_path: Path) -> None:
    (tmp_path / "not_utf_8.py").write_text("b'\\xff'.decode()")
    source = (
        "import ignite_dist as idist\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        print(idist.environment())\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    code, output = _run_with_entry_points(tmp_path, source, "flux_environment", value, **FLUX)
    assert code == 0, output
    first, second = output.splitlines()
    assert first == second
    assert first.startswith(f"Entry point launcher-1 = {value}: ")


# --- what this process has set itself ----------------------------------------------------------------


def _what_is_set_and_given_back() -> tuple[Any, ...]:
    before, found = dict(os.environ), idist.environment()
    idist.initialize("gloo")
    inside, seen = dict(os.environ), idist.environment()
    idist.environment().teardown()
    after_teardown = dict(os.environ)
    total = idist.all_reduce(1)
    idist.finalize()
    return found, seen, total, inside != before, after_teardown == before, dict(os.environ) == before


def test_variables_set_by_initialize_are_no_launchers_and_teardown_gives_them_back() -> None:
    sizes = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    ended = helpers.run_python(
        "-c",
        "import json, test_environments as here; print(json.dumps(here._what_is_set_and_given_back()))",
        env=helpers.plain_environ(**sizes, **ranks),
        cwd=Path(__file__).parent,
    )
    found, seen, total, was_set, given_back, unchanged = json.loads(ended.stdout.splitlines()[-1])
    assert found[0] == "Open MPI"
    assert found == seen
    assert "OMPI_COMM_WORLD_RANK" in found[-1]
    assert (total, was_set, given_back, unchanged) == (1, True, True, True)


def test_without_a_launcher_the_environment_is_that_of_one_process() -> None:
    ended = helpers.run_python("-c", "import ignite_dist as idist; print(idist.environment())")
    assert "launcher='none', rank=0, world_size=1" in ended.stdout


def test_what_somebody_has_changed_since_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IGNITE_DIST_TEST_A", "IGNITE_DIST_TEST_B", "IGNITE_DIST_TEST_C"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IGNITE_DIST_TEST_B", "")
    monkeypatch.setenv("IGNITE_DIST_TEST_D", "theirs")
    variables.set_missing({f"IGNITE_DIST_TEST_{letter}": letter for letter in "ABCD"})
    os.environ["IGNITE_DIST_TEST_C"] = "mine"
    given = variables.given()
    assert "IGNITE_DIST_TEST_A" not in given
    assert given["IGNITE_DIST_TEST_C"] == "mine"
    variables.give_back()
    assert "IGNITE_DIST_TEST_A" not in os.environ
    assert os.environ["IGNITE_DIST_TEST_B"] == ""
    assert os.environ["IGNITE_DIST_TEST_C"] == "mine"
    assert os.environ["IGNITE_DIST_TEST_D"] == "theirs"
