"""Launchers of other packages: registered, or found by entry points."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import helpers
import ignite_dist as idist
from ignite_dist import environments
from ignite_dist.environments import Environment, own_variables, torchrun
from ignite_dist.environments.registry import Registry
from ignite_dist.errors import EnvironmentVariablesError
from recorded_jobs import FLUX, FLUX_NAMES, SLURM, TORCHRUN, detect, found_in, numbered_by_flux

pytestmark = pytest.mark.long

# --- launchers of other packages -----------------------------------------------------------------------


def _flux(environ: Mapping[str, str]) -> Environment | None:
    return numbered_by_flux(environ, "local_rank", "nnodes") if "FLUX_JOB_ID" in environ else None


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
    ended = helpers.run_new_python("-c", source, env=complete)
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
    environ = helpers.plain_environ(**sizes, **ranks)
    environ["PYTHONPATH"] += os.pathsep + str(helpers.TESTS)
    ended = helpers.run_new_python(
        "-c",
        "import json, test_own_environments as here; print(json.dumps(here._what_is_set_and_given_back()))",
        env=environ,
        cwd=Path(__file__).parent,
    )
    found, seen, total, was_set, given_back, unchanged = json.loads(ended.stdout.splitlines()[-1])
    assert found[0] == "Open MPI"
    assert found == seen
    assert "OMPI_COMM_WORLD_RANK" in found[-1]
    assert (total, was_set, given_back, unchanged) == (1, True, True, True)


def test_without_a_launcher_the_environment_is_that_of_one_process() -> None:
    ended = helpers.run_new_python("-c", "import ignite_dist as idist; print(idist.environment())")
    assert "launcher='none', rank=0, world_size=1" in ended.stdout


def test_what_somebody_has_changed_since_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IGNITE_DIST_TEST_A", "IGNITE_DIST_TEST_B", "IGNITE_DIST_TEST_C"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IGNITE_DIST_TEST_B", "")
    monkeypatch.setenv("IGNITE_DIST_TEST_D", "theirs")
    own_variables.set_missing({f"IGNITE_DIST_TEST_{letter}": letter for letter in "ABCD"})
    os.environ["IGNITE_DIST_TEST_C"] = "mine"
    given = own_variables.given()
    assert "IGNITE_DIST_TEST_A" not in given
    assert given["IGNITE_DIST_TEST_C"] == "mine"
    own_variables.restore()
    assert "IGNITE_DIST_TEST_A" not in os.environ
    assert os.environ["IGNITE_DIST_TEST_B"] == ""
    assert os.environ["IGNITE_DIST_TEST_C"] == "mine"
    assert os.environ["IGNITE_DIST_TEST_D"] == "theirs"
