"""Fixtures of tests that run on ranks. Only the pytest of a worker has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ignite_dist.context import identity

FOLDER_KEY: pytest.StashKey[Path] = pytest.StashKey()
"""The folder of the current test, equal on all ranks. Only the pytest of a worker has this key."""


@pytest.fixture
def rank() -> int:
    """This rank."""
    return identity.get_rank()


@pytest.fixture
def world_size() -> int:
    """Number of ranks."""
    return identity.get_world_size()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Path:
    """An empty folder, the same on all ranks."""
    folder = request.config.stash[FOLDER_KEY]
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def rank_tmp_path(tmp_path: Path) -> Path:
    """An empty folder of this rank alone."""
    folder = tmp_path / f"rank-{identity.get_rank()}"
    folder.mkdir()
    return folder
