from __future__ import annotations

from collections.abc import Iterator

import pytest

from xla_replicas import Replicas


@pytest.fixture(scope="session")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas of XLA, kept from test to test."""
    two = Replicas(tmp_path_factory.mktemp("replicas"))
    yield two
    two.close()
