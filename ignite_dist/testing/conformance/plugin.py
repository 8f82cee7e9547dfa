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
    backend, command = config.getoption("--backend"), config.getoption("--launcher")
    _check(backend, command)
    worlds = [
        SpawnedWorld(backend, size) if command is None else LaunchedWorld(backend, size, command)
        for size in _sizes(config.getoption("--ranks"))
    ]
    suite.register(config, [pytest.param(world, id=world.name) for world in worlds])


def _sizes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise pytest.UsageError(
            f"--ranks takes numbers of ranks, at least 1, with commas between them: 2,3. Got {text!r}."
        )
    return list(dict.fromkeys(map(int, words)))


def _check(backend: str | None, command: str | None) -> None:
    if backend is None:
        raise pytest.UsageError("The conformance suite needs the backend to test: --backend NAME.")
    if command is not None and "{ranks}" not in command:
        raise pytest.UsageError(
            f"--launcher is a command with {{ranks}} in the place of the number of ranks: "
            f"'mpirun -np {{ranks}}'. Got {command!r}."
        )
    try:
        model = ranks.model_of(backend)
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(f"--backend {backend}: {error}") from None
    if command is None and "join" not in model.launcher.options():
        raise pytest.UsageError(
            f"--backend {backend}: idist.spawn(..., join=False) starts no workers of this backend. Name the "
            "launcher of its ranks, for example --launcher 'mpirun -np {ranks}'."
        )
