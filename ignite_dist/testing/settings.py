"""What a test asks for with the marker ``ranks``, and what the launching pytest tells its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

PARAMETER = "world_of_ranks"
"""The name of the parameter by which the plugin gives a test its world."""

DEFAULT_TIMEOUT_SECONDS = 60.0


class WorldSettings(NamedTuple):
    """The context in which a test runs.

    Attributes:
        backend: a backend of ``idist.spawn``.
        world_size: number of ranks.
    """

    backend: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.world_size}"


class SessionSettings(NamedTuple):
    """The settings of the launching pytest, for the pytest of a worker.

    Attributes:
        directory: where pytest was started.
        module_path: ``sys.path``.
        arguments: command line of the worker's pytest.
        options: values of pytest's options, by name.
        worker_input: what pytest-xdist has told the launching pytest, for plugins that read it.
        folder: for the files of the tests.
    """

    directory: str
    module_path: list[str]
    arguments: list[str]
    options: dict[str, Any]
    worker_input: dict[str, Any]
    folder: str


class Request(NamedTuple):
    """A test that the ranks should run.

    Attributes:
        paths: the files of the test and of the next test.
        nodeid: pytest's id of the test.
        following: the id of the next test of the same world; empty if there is none.
        number: number of the test in its world.
    """

    paths: tuple[str, ...]
    nodeid: str
    following: str
    number: int


def worlds_of(marker: pytest.Mark) -> list[WorldSettings]:
    """The worlds of ``@pytest.mark.ranks(*world_sizes, backends=..., timeout=...)``.

    Raises:
        ValueError, TypeError: wrong arguments.
    """
    unknown = set(marker.kwargs) - {"backends", "timeout"}
    if unknown:
        raise TypeError(
            f"ranks() has no keyword {', '.join(sorted(unknown))}. It takes backends and timeout."
        )
    if not marker.args:
        raise TypeError("ranks() needs the number of ranks: @pytest.mark.ranks(2).")
    for size in marker.args:
        if type(size) is not int or size < 1:
            raise ValueError(f"ranks() takes numbers of ranks, which are ints of at least 1; got {size!r}.")
    timeout_of(marker)
    backends: str | Sequence[str] = marker.kwargs.get("backends", "gloo")
    names = [backends] if isinstance(backends, str) else list(backends)
    return list(dict.fromkeys(WorldSettings(backend, size) for backend in names for size in marker.args))


def timeout_of(marker: pytest.Mark) -> float:
    """How long the ranks may take for a test, in seconds.

    Raises:
        ValueError: not a positive number.
    """
    timeout = marker.kwargs.get("timeout", DEFAULT_TIMEOUT_SECONDS)
    if type(timeout) not in (int, float) or timeout <= 0:
        raise ValueError(f"ranks(timeout=) is a positive number of seconds, got {timeout!r}.")
    return float(timeout)
