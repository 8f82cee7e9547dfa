"""torch_xla's data loader, used like the one inside of it. Imported where an XLA device is in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

from ignite_dist.comp_models.xla import _torch_xla
from ignite_dist.samplers import Pass

__all__ = ["DeviceLoader"]


class DeviceLoader(MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no type information
    """An ``MpDeviceLoader``, which brings batches to the device ahead of use, used like its ``DataLoader``.

    Each batch that is taken ends a step of torch_xla: what has been computed lazily until then is run.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._batches_from, self._batches_on = loader, device
        super().__init__(loader, device)

    def __iter__(self) -> Pass:
        # It fetches ahead, so the pass over the loader inside ends before the one out here.
        return Pass(_DeviceBatches(self._batches_from, self._batches_on), self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__, and what is torch's own
            raise AttributeError(name)
        return getattr(self._batches_from, name)


class _DeviceBatches:
    """The batches of one pass, on the device, from threads of its own: passes do not disturb each other."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._source = _Source(loader, device)
        self._parallel = ParallelLoader(self._source, [device])
        self._batches = self._parallel.per_device_loader(device)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._source)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            if self._source.error is None:
                raise
        raise self._source.error

    def __del__(self) -> None:
        # The threads of a pass that was broken off wait to hand on what nobody takes any more.
        if hasattr(self, "_parallel"):  # else they could not be started
            self._parallel.close()


class _Source:
    """A data loader as torch_xla's thread reads it.

    An exception would end that thread only, so the exception is stored for the loop. In a separate thread the
    rank would be that of the process's first device, but the data set may shard itself by rank.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self.error: Exception | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        _torch_xla.use_device(self._device)
        try:
            yield from self._loader
        except Exception as error:
            self.error = error
