"""pytest's entry to ``ignite_dist.testing``. Imports the package, and so torch, if a test runs on ranks."""

from __future__ import annotations

import pytest

_CONFORMANCE = "ignite_dist.testing.conformance"


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the options of the conformance suite if the command line names it: others may use their names."""
    given = early_config.known_args_namespace
    if given.pyargs and any(name.startswith(_CONFORMANCE) for name in given.file_or_dir):
        early_config.pluginmanager.import_plugin(f"{_CONFORMANCE}.plugin")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, backends='gloo', timeout=60): run the test on every rank of each world size and "
        "backend (ignite_dist.testing)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world that the marker names."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None:
        from ignite_dist.testing import plugin

        plugin.parametrize(metafunc, marker)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse the marker where pytest makes no parameters: the test would run in one process alone."""
    has_marker = isinstance(item, pytest.Function) and item.get_closest_marker("ranks") is not None
    if has_marker and not hasattr(item, "callspec"):
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.ranks works with functions and methods of plain classes, not with "
            "unittest.TestCase."
        )
