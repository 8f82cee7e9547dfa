"""The options of the suite. pytest loads this plugin if its command line names the suite."""

from __future__ import annotations

import pytest

from ignite_dist.testing.conformance import ranks, suite
from ignite_dist.testing.conformance.worlds import LaunchedWorld, SpawnedWorld


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("conformance suite of ignite_dist")
    backend = "the backend to test, for example gloo; module:backend imports the module that registers it"
    group.addoption("--backend", metavar="NAME", help=backend)
    group.addoption("--ranks", metavar="2,3", default="2", help="numbers of ranks, 2 by default")
    launcher = 'the command that starts the ranks, instead of idist.spawn: "mpirun -np {ranks}"'
    group.addoption("--launcher", metavar="COMMAND", help=launcher)


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite with the worlds that the options name."""
    if config.option.help or config.option.markers:
        return
    worlds = worlds_of(*map(config.getoption, ("--backend", "--ranks", "--launcher")))
    suite.register(config, [pytest.param(world, id=world.name) for world in worlds])


def worlds_of(backend: str | None, sizes: str, command: str | None) -> list[SpawnedWorld]:
    """The worlds that the options name. Nothing is started.

    Raises:
        pytest.UsageError: the options are wrong.
    """
    if backend is None:
        raise pytest.UsageError("The conformance suite needs the backend to test: --backend NAME.")
    words = sizes.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise pytest.UsageError(
            f"--ranks takes numbers of ranks, at least 1, with commas between them: 2,3. Got {sizes!r}."
        )
    try:
        model = ranks.model_of(backend)
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(f"--backend {backend}: {error}") from None
    numbers = list(dict.fromkeys(map(int, words)))
    if command is not None:
        if "{ranks}" not in command:
            raise pytest.UsageError(
                "--launcher is a command with {ranks} in the place of the number of ranks: "
                f"'mpirun -np {{ranks}}'. Got {command!r}."
            )
        return [LaunchedWorld(backend, number, command) for number in numbers]
    if "join" not in model.launcher.options():
        raise pytest.UsageError(
            f"--backend {backend}: idist.spawn(..., join=False) starts no workers of this backend. Name the "
            "launcher of its ranks, for example --launcher 'mpirun -np {ranks}'."
        )
    return [SpawnedWorld(backend, number) for number in numbers]
