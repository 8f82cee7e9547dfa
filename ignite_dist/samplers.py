"""Samplers and data loaders for each rank's share of a data set. The global random state stays as it is."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

# The process has one global random state, and replicas of XLA may be threads of the process.
_random_state_lock = threading.Lock()


class _AutoEpoch(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose epoch advances after each pass, until ``set_epoch`` is called."""

    _epoch_is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order. After this call the epoch does not advance by itself."""
        self._epoch_is_set = True
        super().set_epoch(epoch)

    def advance_epoch(self) -> None:
        """Advance the epoch after a full pass over the data loader, unless ``set_epoch`` was called."""
        if not self._epoch_is_set:
            super().set_epoch(self.epoch + 1)


class EpochSampler(_AutoEpoch):
    """torch's ``DistributedSampler``. In a loader of ``auto_dataloader`` each full pass is a new epoch."""


def part(size: int, num_parts: int, number: int) -> slice:
    """Part ``number`` of a sequence of length ``size``. The parts' sizes differ by at most one."""
    least, rest = divmod(size, num_parts)
    start = number * least + min(number, rest)
    return slice(start, start + least + (number < rest))


class ExactSampler(DistributedSampler[Any]):
    """Each rank's share of a data set. All ranks together draw every sample exactly once.

    Each rank draws a contiguous part of the order. If the number of samples is not divisible by the number of
    ranks, the first ranks draw one sample more. With fewer samples than ranks, the last ranks draw none.

    Args:
        dataset: a data set of constant length.
        num_replicas: number of ranks; default: size of the default process group. See ``sampler_kwargs``.
        rank: this rank; default: rank in the default process group.
        shuffle: draw in an order that depends on ``seed`` and ``set_epoch`` only. The epoch does not advance
            by itself: ranks may begin or end different numbers of passes, but need the same order.
        seed: seed of the order, the same on every rank.
        padded: let all ranks draw equally many samples; ``gather_in_order`` drops the extra ones. FSDP2 needs
            this, because there every forward pass is a collective.
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
        self.group: Any = None  # the ranks that share the data set: the group of gather_in_order
        self.on_begin: Callable[[], None] | None = None
        self._has_begun = False

    def begin_pass(self) -> None:
        """Call ``on_begin`` before the first batch of a pass over the data loader."""
        self._has_begun = True
        if self.on_begin is not None:
            self.on_begin()

    def end_pass(self) -> None:
        """End a pass. A rank that has drawn no batch begins the pass in this call."""
        if not self._has_begun:
            self.begin_pass()
        self._has_begun = False

    def __iter__(self) -> Iterator[int]:
        self._latest_epoch = self.epoch
        order = self.order()
        share = order[part(self.total_size, self.num_replicas, self.rank)]
        drawn = list(share) if isinstance(share, range) else share.tolist()
        if len(drawn) < self.num_samples:
            drawn.append(int(order[0]))
        return iter(drawn)

    def num_drawn_by(self, rank: int) -> int:
        """Number of samples that ``rank`` draws, padding included."""
        share = part(self.total_size, self.num_replicas, 0 if self.padded else rank)
        return len(range(self.total_size)[share])

    def pass_settings(self) -> tuple[Any, ...]:
        """The values that all ranks of one pass must agree on."""
        return self.total_size, self.shuffle, self.seed, self._latest_epoch, self.padded

    def order(self) -> range | Tensor:
        """The order of all samples in the latest pass. Each rank draws a part of it."""
        if not self.shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(self.seed + self._latest_epoch)
        return torch.randperm(self.total_size, generator=generator)


class Shard(IterableDataset[Any]):
    """Each rank's share of a stream. A data loader worker takes its part of that share.

    The stream is split into rounds of ``n`` items, one item for each of ``n`` ranks. Each of the ``m``
    workers of a rank takes every ``m``-th round. For any ``m`` the ranks' shares differ by at most one item.

    Args:
        dataset: must yield the same items in the same order in every process.
        num_replicas: number of ranks.
        rank: this rank.
        drop_last: drop the last round if it has no item for some ranks. All ranks then have equally many
            items, and the k-th workers of all ranks have equally many items too.
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
            return self._iterate_whole_rounds(num_workers, number)
        first, step = number * self.num_replicas + self.rank, num_workers * self.num_replicas
        return islice(self.dataset, first, None, step)

    def _iterate_whole_rounds(self, num_workers: int, number: int) -> Iterator[Any]:
        own_item = None
        for position, item in enumerate(self.dataset):
            round_number, rank = divmod(position, self.num_replicas)
            if round_number % num_workers == number:
                own_item = item if rank == self.rank else own_item
                if rank == self.num_replicas - 1:
                    yield own_item

    def __len__(self) -> int:
        """Number of items of this rank, in all of its workers together."""
        rank = self.num_replicas - 1 if self.drop_last else self.rank
        return len(range(len(self.dataset))[rank :: self.num_replicas])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The attribute of the wrapped data set, so that ``loader.dataset.set_epoch(...)`` works."""
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class DistributedProxySampler(_AutoEpoch):
    """Each rank's share of the draws of another sampler.

    Every rank draws the same indices: the global CPU generators of torch, ``random`` and ``numpy.random`` are
    seeded by the epoch and restored afterwards. A sampler with a generator of its own (``random.Random()``,
    ``numpy.random.default_rng()``) must be seeded equally on all ranks: the ranks do not compare their draws.
    If replicas of XLA are threads of one process, a custom sampler and a data set must not both draw from the
    global random state, which the threads share.

    Args:
        sampler: any sampler of constant length that is not distributed already.
        num_replicas: number of ranks; default: size of the default process group.
        rank: this rank; default: rank in the default process group.
        drop_last: drop the last draws if the number of draws is not divisible by the number of ranks.
            Otherwise the first draws are repeated.

    Raises:
        TypeError: ``sampler`` is not a sampler, has no length, or is a ``DistributedSampler``.
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
        with _random_state_lock, _seeded(self.epoch):
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
    """Seed the global generators of torch, Python and numpy in the block, and restore them afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy_state is not None and numpy_state["bit_generator"] == "MT19937":  # seed() needs it
                numpy.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def _drawing_from(generator: torch.Generator, sampler: Any) -> Iterator[None]:
    """Let a torch sampler without a generator draw from ``generator``, which no other thread uses.

    The draws equal those from a global generator in the same state.
    """
    if getattr(sampler, "generator", sampler) is not None:
        yield
        return
    if isinstance(sampler, RandomSampler):  # it draws a seed for a second generator
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
        generator = torch.Generator().manual_seed(int(seed))
    sampler.generator = generator
    try:
        yield
    finally:
        sampler.generator = None


class ShardLoader(DataLoader[Any]):
    """A data loader of a :class:`Shard`. ``len()`` counts the batches of each worker.

    A worker batches only its own items. torch's class divides the number of all items by ``batch_size``.
    """

    def __len__(self) -> int:
        items, num_workers = range(len(self.dataset)), max(self.num_workers, 1)  # type: ignore[arg-type]
        size = self.batch_size
        if size is None:
            return len(items)
        counts = [len(items[worker::num_workers]) for worker in range(num_workers)]
        return sum(count // size if self.drop_last else -(-count // size) for count in counts)
