from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from helpers import is_launcher_variable


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without a launcher's variables and leaves no context behind."""
    for name in list(os.environ):
        if is_launcher_variable(name):
            monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind")
