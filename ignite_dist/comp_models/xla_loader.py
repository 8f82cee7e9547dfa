"""torch_xla's data loader, used like the one inside of it. Imported where an XLA device is in use."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from ignite_dist.samplers import Pass

__all__ = ["DeviceLoader"]


class DeviceLoader(MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no type information
    """An ``MpDeviceLoader``, which brings batches to the device ahead of use, used like its ``DataLoader``.

    Each batch that is taken ends a step of torch_xla: what has been computed lazily until then is run.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(loader, device)

    def __iter__(self) -> Pass:
        # It fetches ahead, so the pass over the loader inside ends before the one out here.
        return Pass(super().__iter__(), self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__, and what is torch's own
            raise AttributeError(name)
        return getattr(self._loader, name)
