from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from helpers import is_launcher_variable


def pytest_configure(config: pytest.Config) -> None:
    """In the background (``make test &``, ``nohup``) Ctrl-C is ignored, and processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
