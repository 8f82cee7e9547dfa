"""torch_xla's data loader. Imported only if an XLA device is in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

from ignite_dist.comp_models.xla import _torch_xla


class DeviceLoader(MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no type information
    """An ``MpDeviceLoader`` with :meth:`batches_of`, whose passes are independent of each other.

    Each ``next()`` ends a step of torch_xla, which runs the lazy computations.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._batch_device = device
        super().__init__(loader, device)

    def batches_of(self, loader: DataLoader[Any]) -> Any:
        """The batches of one pass. They are prefetched: ``loader`` ends before this pass does."""
        return _DeviceBatches(loader, self._batch_device)


class _DeviceBatches:
    """The batches of one pass, on the device. Each pass has its own threads, so passes are independent."""

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
        # The threads of an unfinished pass would wait forever for a reader of their batches.
        if hasattr(self, "_parallel"):  # False if __init__ failed
            self._parallel.close()


class _Source:
    """A data loader that a thread of torch_xla iterates over.

    An exception would end that thread only, so the exception is stored for ``_DeviceBatches``. A new thread
    has the rank of the process's first device, so the thread sets its device: a data set may read its rank.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        # Begun here, with the position and the epoch that the loader has now. The thread may run later.
        self._batches = iter(loader)
        self._device = device
        self.error: Exception | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        _torch_xla.use_device(self._device)
        try:
            yield from self._batches
        except Exception as error:
            self.error = error
