"""Many tensors in few collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_dist.collectives.buckets import average_tensors
from ignite_dist.context.live import current_model


class Recorded(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_fills_a_bucket_is_averaged_in_place() -> None:
    model = current_model()
    large, turned = torch.ones(8 << 20), torch.ones(4, 5).t()
    for tensors, copies in (([large], False), ([torch.ones(3), torch.ones(3)], True), ([turned], True)):
        version = tensors[0]._version
        with Recorded() as recorded:
            average_tensors(model, tensors, model.groups.world)
        assert any(name in ("cat", "clone") for name in recorded.names) is copies, recorded.names
        assert tensors[0].eq(1).all() and tensors[0]._version > version
