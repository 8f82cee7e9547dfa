"""Each rank's share of a data set, drawn without touching the global random state.

And the data loader that tells its sampler when a pass is over.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

__all__ = [
    "DistributedProxySampler",
    "EpochLoader",
    "EpochSampler",
    "ExactSampler",
    "Pass",
    "Shard",
    "loader_class",
    "part",
]


# The global random state is one per process, and replicas of XLA may be threads of one.
_one_at_a_time = threading.Lock()


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


def part(size: int, num_parts: int, number: int) -> slice:
    """The part ``number`` of ``size`` things in a row, cut into parts whose sizes differ by one at most."""
    least, rest = divmod(size, num_parts)
    start = number * least + min(number, rest)
    return slice(start, start + least + (number < rest))


class ExactSampler(DistributedSampler[Any]):
    """Each rank's share of a data set, every sample exactly once.

    A rank has a contiguous part of the order. Where their number does not divide the first ranks have
    one more, and with fewer samples than ranks the last have none.

    Args:
        dataset: of a constant length.
        num_replicas: number of ranks; the default process group's size if not given. See ``sampler_kwargs``.
        rank: this rank; that of the default process group if not given.
        shuffle: draw in another order, which ``seed`` and ``set_epoch`` say. It does not change by itself:
            ranks may begin or end different numbers of passes, and all have to mean the same one.
        seed: of the order, the same on every rank.
        padded: ranks that would have one sample less draw one more, which ``gather_in_order`` drops: where
            every forward pass is a collective, as with FSDP2, all ranks have to make as many.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        padded: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.total_size = len(dataset)  # type: ignore[arg-type]
        self.padded = padded
        self.num_samples = self.num_drawn_by(self.rank)
        self._latest_epoch = self.epoch

    def __iter__(self) -> Iterator[int]:
        self._latest_epoch = self.epoch
        order = self.order()
        share = order[part(self.total_size, self.num_replicas, self.rank)]
        drawn = list(share) if isinstance(share, range) else share.tolist()
        if len(drawn) < self.num_samples:
            drawn.append(int(order[0]))
        return iter(drawn)

    def num_drawn_by(self, rank: int) -> int:
        """How many samples ``rank`` draws, with what is padded."""
        share = part(self.total_size, self.num_replicas, 0 if self.padded else rank)
        return len(range(self.total_size)[share])

    def meant(self) -> tuple[Any, ...]:
        """What the ranks of one pass have in common."""
        return self.total_size, self.shuffle, self.seed, self._latest_epoch, self.padded

    def order(self) -> range | Tensor:
        """The order of all samples in the pass that was begun last, of which each rank draws its part."""
        if not self.shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(self.seed + self._latest_epoch)
        return torch.randperm(self.total_size, generator=generator)


class Shard(IterableDataset[Any]):
    """Each rank's share of a stream, and in a data loader's worker that worker's share of it.

    The stream is dealt out in rounds of ``n`` items, one for each of ``n`` ranks. Of ``m`` workers on a rank
    each takes every ``m``-th round. So the shares of ranks differ by one item at most, whatever ``m`` is.

    Args:
        dataset: gives the same items in the same order to every process that iterates over it.
        num_replicas: number of ranks.
        rank: this rank.
        drop_last: leave the last round out if it has no item for every rank. Ranks get equally many then,
            and so do the workers of one number.
    """

    def __init__(
        self, dataset: IterableDataset[Any], num_replicas: int, rank: int, drop_last: bool = False
    ) -> None:
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        num_workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        if self.drop_last:
            return self._of_whole_rounds(num_workers, number)
        first, step = number * self.num_replicas + self.rank, num_workers * self.num_replicas
        return islice(self.dataset, first, None, step)

    def _of_whole_rounds(self, num_workers: int, number: int) -> Iterator[Any]:
        own = None
        for position, item in enumerate(self.dataset):
            turn, rank = divmod(position, self.num_replicas)
            if turn % num_workers == number:
                own = item if rank == self.rank else own
                if rank == self.num_replicas - 1:
                    yield own

    def __len__(self) -> int:
        """How many items this rank has, in all of its workers together."""
        rank = self.num_replicas - 1 if self.drop_last else self.rank
        return len(range(len(self.dataset))[rank :: self.num_replicas])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The data set's own: ``loader.dataset.set_epoch(...)``."""
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class DistributedProxySampler(_AutoEpoch):
    """Each rank's share of what another sampler draws.

    Every rank draws the same indices: torch's generator of the CPU, Python's ``random`` and the generator
    behind ``numpy.random.rand()`` and its like are seeded by the epoch, and left as they were. A sampler that
    draws from a generator of its own (``random.Random()``, ``numpy.random.default_rng()``) must be seeded
    equally on all ranks: nothing here can see it, and ranks do not compare what they have drawn. Where
    replicas of XLA are threads of one process, a sampler that is not torch's and a data set must not both
    draw from the global random state, which they share.

    Args:
        sampler: any sampler of constant length that is not distributed already.
        num_replicas: number of ranks; the default process group's size if not given.
        rank: this rank; that of the default process group if not given.
        drop_last: leave out what does not divide by the number of ranks. Else the first draws are repeated.

    Raises:
        TypeError: not a sampler, one without a length, or a ``DistributedSampler``.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch Sampler, got {type(sampler).__name__}.")
        if isinstance(sampler, DistributedSampler):
            raise TypeError("sampler is a DistributedSampler already; pass it to the data loader as it is.")
        if not isinstance(sampler, Sized):
            raise TypeError(f"sampler must have a length, and {type(sampler).__name__} has none.")
        as_dataset: Dataset[Any] = sampler  # type: ignore[assignment]  # only its length is used
        super().__init__(as_dataset, num_replicas=num_replicas, rank=rank, shuffle=False, drop_last=drop_last)
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        with _one_at_a_time, _seeded(self.epoch):
            indices: list[Any] = []
            while len(indices) < self.total_size:
                with _drawing_from(generator, self.sampler):
                    drawn = list(self.sampler)
                if not drawn:
                    raise ValueError(f"{type(self.sampler).__name__} has a length, but draws nothing.")
                indices += drawn
        return iter(indices[self.rank : self.total_size : self.num_replicas])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """In the block the global generators of torch, Python and numpy draw by ``seed``; then they go on."""
    numpy: Any = sys.modules.get("numpy")
    own = random.getstate()
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpys is not None and numpys["bit_generator"] == "MT19937":  # no other can be seeded again
                numpy.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(own)
        if numpys is not None:
            numpy.random.set_state(numpys)


@contextmanager
def _drawing_from(generator: torch.Generator, sampler: Any) -> Iterator[None]:
    """Let one of torch's samplers, if it has no generator, draw what it would from the global one.

    From this one no other thread draws.
    """
    if getattr(sampler, "generator", sampler) is not None:
        yield
        return
    if isinstance(sampler, RandomSampler):  # draws a seed, and then from a generator of its own
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
        generator = torch.Generator().manual_seed(int(seed))
    sampler.generator = generator
    try:
        yield
    finally:
        sampler.generator = None


def loader_class(dataset: Dataset[Any], sampler: Any) -> type[DataLoader[Any]]:
    """The data loader for ``dataset``, whose draws ``sampler`` makes if there is one."""
    if isinstance(dataset, Shard):
        return ShardLoader
    return EpochLoader if hasattr(sampler, "advance_epoch") else DataLoader


class ShardLoader(DataLoader[Any]):
    """A data loader of a :class:`Shard` that knows how many batches its workers make, each of its own items.

    torch's own divides the number of all items by ``batch_size``.
    """

    def __len__(self) -> int:
        items, num_workers = range(len(self.dataset)), max(self.num_workers, 1)  # type: ignore[arg-type]
        size = self.batch_size
        if size is None:
            return len(items)
        of_workers = [len(items[worker::num_workers]) for worker in range(num_workers)]
        return sum(num_items // size if self.drop_last else -(-num_items // size) for num_items in of_workers)


class EpochLoader(DataLoader[Any]):
    """A data loader that tells its sampler when a pass over it was exhausted.

    The sampler itself cannot know: workers fetch ahead, so a look at the first batch may empty it.
    """

    def __iter__(self) -> Any:
        return Pass(super().__iter__(), self.sampler)


class Pass:
    """One pass over a data loader, an iterator with a length as torch's own."""

    def __init__(self, batches: Any, sampler: Any) -> None:
        self._batches = batches
        self._sampler = sampler
        self._exhausted = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            if not self._exhausted and hasattr(self._sampler, "advance_epoch"):
                self._sampler.advance_epoch()
            self._exhausted = True
            raise
