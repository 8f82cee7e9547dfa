"""Fixtures of tests that run on ranks. Only the pytest of a worker has them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from ignite_dist.context import identity

FOLDER_KEY: pytest.StashKey[Path] = pytest.StashKey()
"""The folder of the current test, equal on all ranks. Only the pytest of a worker has this key."""

WORLD_FOLDER_KEY: pytest.StashKey[Path] = pytest.StashKey()
"""The folder of the world, equal on all ranks. Only the pytest of a worker has this key."""


class SharedFolders:
    """pytest's ``TempPathFactory``, with the same folders on all ranks."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: set[str] = set()

    def getbasetemp(self) -> Path:
        """The folder of all folders."""
        return self._base

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        """A new folder. All ranks make the same calls, in the same order.

        Raises:
            ValueError: ``basename`` is not the name of a folder.
            FileExistsError: with ``numbered=False``, the folder has been made.
        """
        if Path(basename).name != basename:
            raise ValueError(f"mktemp() takes the name of a folder, got {basename!r}.")
        names = (f"{basename}{number}" for number in count()) if numbered else iter([basename])
        name = next((name for name in names if name not in self._made), None)
        if name is None:
            raise FileExistsError(f"mktemp({basename!r}, numbered=False): the folder has been made before.")
        self._made.add(name)
        folder = self._base / name
        folder.mkdir(exist_ok=True)
        return folder


@pytest.fixture(scope="session")
def tmp_path_factory(request: pytest.FixtureRequest) -> SharedFolders:
    """Makes folders at the same paths on all ranks."""
    base = request.config.stash[WORLD_FOLDER_KEY] / "shared"
    base.mkdir(exist_ok=True)
    return SharedFolders(base)


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
