"""Samplers and data loaders for each rank's share of a data set. The global random state stays as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.values.random_states import GeneratorStates, own_generators, preserved, seed_generators


class _AutoEpoch(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose epoch advances after each pass, until ``set_epoch`` is called."""

    epoch_is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order. After this call the epoch does not advance by itself."""
        self.epoch_is_set = True
        super().set_epoch(epoch)

    def advance_epoch(self) -> None:
        """Advance the epoch after a full pass over the data loader, unless ``set_epoch`` was called."""
        if not self.epoch_is_set:
            super().set_epoch(self.epoch + 1)


class EpochSampler(_AutoEpoch):
    """This rank's part of each batch that one process would draw.

    The order of an epoch depends on ``seed + epoch`` only. It is that of torch's ``RandomSampler`` with a
    generator of this seed, and of ``DistributedSampler``.

    Args:
        dataset: a data set. With ``batch_size``, its length may change between two passes, in the same way on
            every rank; ``num_samples`` keeps the first value.
        num_replicas: number of ranks; default: size of the default process group.
        rank: this rank; default: rank in the default process group.
        shuffle: False draws in the order of the data set.
        seed: the same on every rank.
        drop_last: drop the last batch if it is smaller than the others. Otherwise see :func:`part_of_batch`.
        batch_size: samples of a batch, of all ranks together, at least one per rank. The sampler is then for
            a data loader with :func:`part_size` samples per batch. None: the draws of ``DistributedSampler``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.total_batch_size = batch_size
        if batch_size is not None:
            self.num_samples = len(self)

    def __len__(self) -> int:
        if self.total_batch_size is None:
            return super().__len__()
        return _num_in_parts(len(self.dataset), self)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        size = self.total_batch_size
        if size is None:
            return super().__iter__()
        length = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(length, generator=generator) if self.shuffle else torch.arange(length)
        num_in_whole_batches = length // size * size
        own = order[:num_in_whole_batches].view(-1, size)[:, self.rank :: self.num_replicas]
        indices: list[int] = own.flatten().tolist()
        if not self.drop_last:
            indices += part_of_batch(order[num_in_whole_batches:].tolist(), self.num_replicas, self.rank)
        return iter(indices)


def length_or_none(value: Any) -> int | None:
    """``len(value)``; None if it has none. Streams and samplers may have a ``__len__`` that raises."""
    try:
        return len(value)
    except Exception:
        return None


# --- the part of a batch -----------------------------------------------------------------------------


def part_of_batch(batch: Sequence[Any], num_replicas: int, rank: int) -> list[Any]:
    """This rank's part of a batch: every ``num_replicas``-th item.

    In a batch with fewer items than ranks, ranks without an item repeat one, so that all have a batch.
    """
    if not batch:
        return []
    return list(batch[rank::num_replicas]) or [batch[rank % len(batch)]]


def part_size(batch_size: int, num_replicas: int, rank: int) -> int:
    """Number of samples of this rank in each whole batch. The ranks' numbers differ by at most one."""
    return len(range(rank, batch_size, num_replicas))


def _num_in_parts(num_draws: int, sampler: Any) -> int:
    """The samples of this rank among ``num_draws`` of all ranks."""
    place = sampler.num_replicas, sampler.rank
    size: int = sampler.total_batch_size
    num_whole, num_rest = divmod(num_draws, size)
    own_rest = 0 if sampler.drop_last else len(part_of_batch(range(num_rest), *place))
    return num_whole * part_size(size, *place) + own_rest


class _Forwarding:
    """Forwards attributes that only the object inside has, when they are read and when they are set.

    So ``loader.batch_sampler.set_epoch(...)`` and ``loader.sampler.weights = ...`` work as without this
    object. The constructor sets the object inside last.
    """

    _inside: ClassVar[str]  # the name of the attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == self._inside:
            raise AttributeError(name)
        return getattr(getattr(self, self._inside), name)

    def __setattr__(self, name: str, value: Any) -> None:
        inside = vars(self).get(self._inside)
        is_own = inside is None or name in vars(self) or hasattr(type(self), name) or name.startswith("_")
        if is_own or not hasattr(inside, name):
            super().__setattr__(name, value)
        else:
            setattr(inside, name, value)


class BatchSamplerPart(_Forwarding, Sampler[Any]):
    """This rank's part of each batch of another batch sampler, see :func:`part_of_batch`."""

    _inside = "batch_sampler"

    def __init__(self, batch_sampler: Any, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.batch_sampler:
            yield part_of_batch(
                batch if isinstance(batch, list) else list(batch), self.num_replicas, self.rank
            )

    def __len__(self) -> int:
        return len(self.batch_sampler)


def place_of(sampler: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank that a sampler, or a sampler in it, was made for; None if it has none.

    The samplers of timm, detectron2, mmengine, Accelerate, transformers and Megatron name them as below.
    """
    for one in with_all_inner(sampler):
        numbers = [_int_attribute(one, names) for names in (_NUM_REPLICAS, _RANKS)]
        if None not in numbers:
            return numbers[0], numbers[1]  # type: ignore[return-value]
    return None


_NUM_REPLICAS = (
    *("num_replicas", "world_size", "_world_size", "num_shards", "num_processes"),
    *("data_parallel_size", "dp_size", "dp_world_size"),
)
_RANKS = ("rank", "_rank", "shard_id", "process_index", "data_parallel_rank", "dp_rank")


def _int_attribute(owner: Any, names: Sequence[str]) -> int | None:
    for name in names:
        with suppress(Exception):  # of a property
            if type(value := getattr(owner, name)) is int:
                return value
    return None


def with_inner(sampler: Any) -> Iterator[Any]:
    """The sampler, the samplers that it draws from, and so on, by torch's names of such attributes."""
    return _walk(sampler, _named_inner)


def with_all_inner(sampler: Any) -> Iterator[Any]:
    """As :func:`with_inner`, and samplers in attributes of any name, which may have rules of their own."""
    return _walk(sampler, lambda one: [*_named_inner(one), *_samplers_in(one)])


def _walk(first: Any, inner_of: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [first]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += inner_of(one)


def _named_inner(sampler: Any) -> list[Any]:
    several = getattr(sampler, "samplers", None)
    named = [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return named + list(several if isinstance(several, (list, tuple)) else [])


def _samplers_in(sampler: Any) -> list[Any]:
    return [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]


# --- random orders -----------------------------------------------------------------------------------

# Their draws depend on nothing that a script changes between two of them.
_TORCHS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler)
_NUM_DRAWN_AHEAD = 1024


def seeded_draws(sampler: Iterable[Any], seed: int, num_at_once: int = 1) -> Iterator[Any]:
    """What ``sampler`` draws if all generators have this seed. Outside of the draws they keep their states.

    These are torch's, Python's and numpy's global generators, and generators that are attributes of the
    sampler. A sampler of torch's is drawn from ahead; another one ``num_at_once`` draws at a time, because
    its draws may depend on what the script has done until then.
    """
    if all(type(one) in _TORCHS for one in with_all_inner(sampler)):
        num_at_once = _NUM_DRAWN_AHEAD
    own = _generators_in(sampler)
    torchs: list[Any] = [one for one in with_all_inner(sampler) if isinstance(one, _TORCHS)]
    without_own = [one for one in torchs if getattr(one, "generator", 0) is None]
    generator = torch.Generator().manual_seed(seed)
    states: GeneratorStates | None = None
    draws: Iterator[Any] | None = None
    while True:
        with preserved(own), _in_place_of_none(generator, without_own):
            if states is None:
                seed_generators(seed, own)
                draws = iter(sampler)
            else:
                states.restore()
            items = list(islice(draws, num_at_once))  # type: ignore[arg-type]
            states = GeneratorStates(own)
        yield from items
        if len(items) < num_at_once:
            return


@contextmanager
def _in_place_of_none(generator: torch.Generator, samplers: Iterable[Any]) -> Iterator[None]:
    """Let torch's ``samplers``, which have no generator of their own, draw from this one in the block."""
    try:
        for one in samplers:
            one.generator = generator
        yield
    finally:
        for one in samplers:
            one.generator = None


def draw_seed(sampler: Any = None, generator: torch.Generator | None = None) -> int:
    """A seed for the orders of a loader, from ``generator``, else the sampler's own, else torch's default."""
    found = [generator] if generator is not None else _generators_in(sampler)
    source = found[0] if found else None
    if source is None or isinstance(source, torch.Generator):
        return int(torch.empty((), dtype=torch.int64).random_(0, 2**32, generator=source))
    draw = getattr(source, "integers", None) or source.randint
    return int(draw(0, 2**31 - 1))


def _generators_in(sampler: Any) -> list[Any]:
    return [generator for one in with_all_inner(sampler) for generator in own_generators(one)]


# --- shares of whole data sets -----------------------------------------------------------------------


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


class Shard(_Forwarding, IterableDataset[Any]):
    """This rank's part of each batch of a stream. A data loader worker makes every ``m``-th batch of ``m``.

    A data loader asks its workers in turn, so batches come in the order of the stream with any number of
    workers.

    Args:
        dataset: must yield the same items in the same order in every process.
        num_replicas: number of ranks.
        rank: this rank.
        drop_last: drop the last batch if it is smaller than the others. Otherwise a rank for which it has no
            item has no such batch.
        batch_size: number of items of a batch, of all ranks together; default: one per rank.
        is_batched: True yields this rank's part of each batch as a list, False yields the items.
    """

    _inside = "dataset"

    def __init__(
        self,
        dataset: IterableDataset[Any],
        num_replicas: int,
        rank: int,
        drop_last: bool = False,
        batch_size: int | None = None,
        is_batched: bool = False,
    ) -> None:
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.total_batch_size = num_replicas if batch_size is None else batch_size
        self.is_batched = is_batched
        self._start = 0
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        num_workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        start, self._start = self._start, 0  # workers that persist keep this object for later passes
        return self._parts(start + number, num_workers)

    def _parts(self, first: int, step: int) -> Iterator[Any]:
        size, items = self.total_batch_size, iter(self.dataset)
        num_left_out = first * size
        while True:
            deque(islice(items, num_left_out), maxlen=0)
            batch = list(islice(items, size))
            own = batch[self.rank :: self.num_replicas]
            if not own or (self.drop_last and len(batch) < size):
                return
            if self.is_batched:
                yield own
            else:
                yield from own
            num_left_out = (step - 1) * size

    def leave_out(self, num_batches: int) -> None:
        """Let the next pass begin behind this number of batches."""
        self._start = num_batches

    def num_batches(self, rank: int | None = None) -> int:
        """Number of batches of a rank, in all of its workers together; default: this rank."""
        num_whole, num_rest = divmod(len(self.dataset), self.total_batch_size)  # type: ignore[arg-type]
        return num_whole + (not self.drop_last and num_rest > (self.rank if rank is None else rank))

    def __len__(self) -> int:
        """Number of items of this rank, in all of its workers together."""
        num_items = len(self.dataset)  # type: ignore[arg-type]
        if self.drop_last:
            num_items -= num_items % self.total_batch_size
        size, place = self.total_batch_size, (self.num_replicas, self.rank)
        num_whole, num_rest = divmod(num_items, size)
        return num_whole * part_size(size, *place) + part_size(num_rest, *place)


class DistributedProxySampler(_Forwarding, _AutoEpoch):
    """Each rank's share of the draws of another sampler.

    Every rank draws the same indices: in each pass the generators that the sampler draws from are seeded with
    ``seed + epoch``, see :func:`seeded_draws`. If replicas of XLA are threads of one process, a custom
    sampler and a data set must not both draw from the global random state, which the threads share.

    Args:
        sampler: any sampler of constant length that is not distributed already.
        num_replicas: number of ranks; default: size of the default process group.
        rank: this rank; default: rank in the default process group.
        drop_last: with ``batch_size``, drop the last batch if it is incomplete. Without it, drop the last
            draws if the number of ranks does not divide their number. Otherwise the first draws are repeated.
        batch_size: as in :class:`EpochSampler`: each rank takes its part of each batch, and the sampler is
            drawn from as the batches are, and may have no length or no end.
        seed: the same on every rank.

    Raises:
        TypeError: ``sampler`` is not a sampler, has no length, or is a ``DistributedSampler``.
    """

    _inside = "sampler"

    def __init__(
        self,
        sampler: Sampler[Any] | Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(sampler, Sampler) and (batch_size is None or not isinstance(sampler, Iterable)):
            raise TypeError(f"sampler must be a torch Sampler, got {type(sampler).__name__}.")
        if isinstance(sampler, DistributedSampler):
            raise TypeError("sampler is a DistributedSampler already; pass it to the data loader as it is.")
        length = length_or_none(sampler)
        if batch_size is None and length is None:
            raise TypeError(f"sampler must have a length, and {type(sampler).__name__} has none.")
        as_dataset: Any = range(length or 0)  # only its length is used
        super().__init__(
            as_dataset, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed, drop_last=drop_last
        )
        self.total_batch_size = batch_size
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also that of ``sampler`` if it has one."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.total_batch_size is not None:
            return self._parts_of_batches(self.total_batch_size)
        indices: list[Any] = []
        number = 0
        while len(indices) < self.total_size:
            seed = self.seed + self.epoch + number * 2**32
            drawn = list(seeded_draws(self.sampler, seed, num_at_once=self.total_size))
            if not drawn:
                raise ValueError(f"{type(self.sampler).__name__} has a length, but draws nothing.")
            indices += drawn
            number += 1
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def _parts_of_batches(self, size: int) -> Iterator[Any]:
        draws = seeded_draws(self.sampler, self.seed + self.epoch, num_at_once=size)
        while batch := list(islice(draws, size)):
            if len(batch) == size or not self.drop_last:
                yield from part_of_batch(batch, self.num_replicas, self.rank)

    def __len__(self) -> int:
        if self.total_batch_size is None:
            return super().__len__()
        return _num_in_parts(len(self.sampler), self)  # type: ignore[arg-type]


class ShardLoader(DataLoader[Any]):
    """A data loader of a :class:`Shard`. ``len()`` is the number of this rank's batches."""

    def __len__(self) -> int:
        return self.dataset.num_batches()  # type: ignore[attr-defined,no-any-return]
