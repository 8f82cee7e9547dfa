"""The plugin that gives the cases their worlds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ignite_dist.testing.conformance.cases import BACKENDS_OF_TORCH

_worlds: pytest.StashKey[Sequence[Any]] = pytest.StashKey()


def register(config: pytest.Config, worlds: Sequence[Any]) -> None:
    """Register this plugin: each case runs in each world.

    Args:
        config: of pytest.
        worlds: ``pytest.param(world, id=..., marks=...)`` for each.
    """
    config.addinivalue_line("markers", "at_most_two_ranks: not in larger worlds of the conformance suite")
    config.addinivalue_line("markers", "all_functions: takes a minute where Inductor compiles them")
    config.addinivalue_line("markers", "same_on_every_backend: with torch's backends only")
    config.stash[_worlds] = worlds
    config.pluginmanager.register(sys.modules[__name__])


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case and each world."""
    if "world" in metafunc.fixturenames:
        # One world at a time: by the scope, pytest runs its cases together and then ends its workers.
        # Those of Horovod are never idle.
        worlds = metafunc.config.stash[_worlds]
        metafunc.parametrize("world", worlds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world to run a case in. The next case gets the same workers."""
    yield request.param
    request.param.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the worlds that a case does not need."""
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item)]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the workers of the last world before other tests run beside them."""
    is_last = "world" not in getattr(nextitem, "fixturenames", ())
    world: Any = item.funcargs.get("world") if isinstance(item, pytest.Function) else None
    if is_last and world is not None:
        world.close()


def _is_left_out(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    most_two, only_torch = map(item.get_closest_marker, ("at_most_two_ranks", "same_on_every_backend"))
    if most_two is None and only_torch is None:
        return False
    world: Any = item.callspec.params["world"]
    is_of_torch = world.name.partition("-")[0] in ("serial", *BACKENDS_OF_TORCH)
    return (most_two is not None and world.size > 2) or (only_torch is not None and not is_of_torch)
