from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worlds import MpiWorld, SerialWorld, SpawnedWorld, XlaWorld

_FACTORIES = {
    "serial": SerialWorld,
    "gloo-2": lambda: SpawnedWorld("gloo", 2),
    "gloo-3": lambda: SpawnedWorld("gloo", 3),
    "gloo-4": lambda: SpawnedWorld("gloo", 4),
    "horovod-2": lambda: SpawnedWorld("horovod", 2),
    "horovod-3": lambda: SpawnedWorld("horovod", 3),
    "xla-1": lambda: XlaWorld(1),
    "xla-2": lambda: XlaWorld(2),
    "xla-3": lambda: XlaWorld(3),
    # A backend of a third party: examples/mpi4py_backend.py
    "mpi4py-2": lambda: MpiWorld(2),
    "mpi4py-3": lambda: MpiWorld(3),
    # On one GPU: NCCL takes a world of one, gloo carries CUDA tensors between two ranks that share it.
    "nccl-1": lambda: SpawnedWorld("nccl", 1),
    "gloo-cuda-2": lambda: SpawnedWorld("gloo", 2),
}
_ON_A_GPU = ("nccl-1", "gloo-cuda-2")


def _marks(name: str) -> list[Any]:
    if name in _ON_A_GPU:
        skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
        return [pytest.mark.gpu, skip]
    return [getattr(pytest.mark, one) for one in ("horovod", "mpi4py", "xla") if name.startswith(one)]


# One world at a time: pytest runs its cases together and then ends its workers. Horovod's are never idle.
@pytest.fixture(scope="session", params=[pytest.param(name, marks=_marks(name)) for name in _FACTORIES])
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world to run a case in; its workers are shared with the other cases."""
    one = _FACTORIES[request.param]()
    yield one
    one.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out larger worlds where a test says so."""
    left_out = [item for item in items if _is_too_large(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_too_large(item: pytest.Item) -> bool:
    if item.get_closest_marker("at_most_two_ranks") is None or not isinstance(item, pytest.Function):
        return False
    return item.callspec.params["world"].endswith(("-3", "-4"))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the last world's workers before other tests run beside them."""
    is_last = "world" not in getattr(nextitem, "fixturenames", ())
    world = item.funcargs.get("world") if isinstance(item, pytest.Function) else None
    if is_last and world is not None:
        world.close()
