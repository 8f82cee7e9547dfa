"""Samplers that give each rank its share of a data set, without touching the global random state."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["DistributedProxySampler", "EpochSampler"]


class _AutoEpoch(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose epoch goes on by itself until somebody calls ``set_epoch``."""

    _epoch_is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which the order depends on; it does not advance by itself any more."""
        self._epoch_is_set = True
        super().set_epoch(epoch)

    def advance_epoch(self) -> None:
        """Note that an iteration over the data loader was exhausted."""
        if not self._epoch_is_set:
            super().set_epoch(self.epoch + 1)


class EpochSampler(_AutoEpoch):
    """torch's ``DistributedSampler``; in a loader of ``auto_dataloader`` each full pass is another epoch."""


class DistributedProxySampler(_AutoEpoch):
    """Each rank's share of what another sampler draws.

    Every rank draws the same indices, seeded by the epoch; the global random state is left as it was. A
    sampler that draws from a generator of its own must be seeded equally on all ranks.

    Args:
        sampler: any sampler of constant length that is not distributed already.
        num_replicas: number of ranks; the default process group's size if not given.
        rank: this rank; that of the default process group if not given.

    Raises:
        TypeError: not a sampler, one without a length, or a ``DistributedSampler``.
    """

    def __init__(
        self, sampler: Sampler[Any], num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch Sampler, got {type(sampler).__name__}.")
        if isinstance(sampler, DistributedSampler):
            raise TypeError("sampler is a DistributedSampler already; pass it to the data loader as it is.")
        if not isinstance(sampler, Sized):
            raise TypeError(f"sampler must have a length, and {type(sampler).__name__} has none.")
        as_dataset: Dataset[Any] = sampler  # type: ignore[assignment]  # only its length is used
        super().__init__(as_dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.epoch)
            indices: list[Any] = []
            while len(indices) < self.total_size:
                drawn = list(self.sampler)
                if not drawn:
                    raise ValueError(f"{type(self.sampler).__name__} has a length, but draws nothing.")
                indices += drawn
        return iter(indices[self.rank : self.total_size : self.num_replicas])
