"""Passes over a data loader: the position of a pass, and a pass that begins at a saved position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.call_sites import warn_user
from ignite_dist.samplers import ExactSampler, Shard, ShardLoader
from ignite_dist.values.random_states import RandomStates, preserved


def loader_class(dataset: Dataset[Any]) -> type[DataLoader[Any]]:
    """The class of the data loader for ``dataset``."""
    return EpochShardLoader if isinstance(dataset, Shard) else EpochLoader


class Pass:
    """One pass over a data loader: an iterator with a length, like torch's.

    It reports the beginning and the end of the pass to the sampler, and counts the batches. The sampler
    cannot do this itself: workers fetch ahead, so the first batch may exhaust it.

    Attributes:
        start: where the pass began.
        num_batches: number of batches that the caller has received.
        is_read_ahead: True if the caller has asked for a batch before the training loop has: the last batch,
            or the end, does not count yet.
        is_exhausted: True if the caller has received the last batch and asked for another.
    """

    def __init__(self, batches: Any, sampler: Any, start: Start) -> None:
        self._batches = batches
        self._sampler = sampler
        self._has_begun = False
        self.start = start
        self.num_batches = 0
        self.is_read_ahead = False
        self.is_exhausted = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        if not self._has_begun:
            self._has_begun = True
            if getattr(self._sampler, "on_begin", None) is not None:
                self._sampler.begin_pass()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self.is_exhausted and hasattr(self._sampler, "advance_epoch"):
                self._sampler.advance_epoch()
            self.is_exhausted = True
            raise
        self.num_batches += 1
        return batch


@dataclass(frozen=True)
class Start:
    """The position at which a pass begins, on this rank.

    Attributes:
        batches: number of batches of the epoch before this position.
        samples: number of samples of this rank before this position; None if only batches are counted.
        epoch: the sampler's epoch; None if it has none.
        states: the random states at the beginning of the epoch, if they are known.
        has_workers: True if persistent workers had their seed before the epoch began.
    """

    batches: int = 0
    samples: int | None = 0
    epoch: int | None = None
    states: _States | None = None
    has_workers: bool = False


class Resumable:
    """Mixin for loaders: the position of the latest pass, and passes that begin at a saved position."""

    _latest_pass: ref[Pass] | None = None
    _next_start: Start | None = None  # of the next pass, after resume()
    _has_workers = False  # persistent workers have their seed, perhaps those of the process before

    def host_loader(self) -> DataLoader[Any]:
        """The loader of torch, which has the sampler."""
        assert isinstance(self, DataLoader)
        return self

    def latest_pass(self) -> Pass | None:
        """The pass that was begun last, while it exists."""
        return self._latest_pass() if self._latest_pass is not None else None

    def begin_pass(self, make: Callable[[DataLoader[Any]], Any]) -> Pass:
        """Begin a pass. ``make(loader)`` gives the batches of torch's ``loader``."""
        loader = self.host_loader()
        start, self._next_start = self._start_of_next_pass(loader), None
        if not start.batches:
            start = replace(start, states=_States.now(loader), has_workers=self._has_workers)
            with _own_seed(loader) if self._has_workers else nullcontext():
                batches = make(loader)
        elif isinstance(loader.dataset, IterableDataset):
            with _from_states(loader, start.states):
                batches = make(loader)
                deque(islice(batches, start.batches), maxlen=0)
        else:
            batches = make(_rest_of(loader, start))
        self._has_workers = loader.persistent_workers
        begun = Pass(batches, loader.sampler, start)
        self._latest_pass = ref(begun)
        return begun

    def _start_of_next_pass(self, loader: DataLoader[Any]) -> Start:
        epoch = _epoch_of(loader)
        start = self._next_start
        if start is not None and start.epoch == epoch:
            return start
        # After set_epoch() for another epoch, the saved position has no meaning.
        return Start(0, 0 if _counts_samples(loader) else None, epoch)

    def position(self) -> dict[str, Any]:
        """The position in the epoch as plain values, for :meth:`resume`.

        A pass that was left before its end (by ``break``) does not count: the next pass begins a new order.
        """
        loader = self.host_loader()
        latest = self.latest_pass()
        if latest is not None and (latest.is_read_ahead or not latest.is_exhausted):
            num_held = int(latest.is_read_ahead and not latest.is_exhausted)
            start, num_batches = latest.start, latest.num_batches - num_held
        else:
            start, num_batches = self._start_of_next_pass(loader), 0
        samples = start.samples
        if samples is not None:
            samples = samples + num_batches * (loader.batch_size or 1)
            if isinstance(loader.sampler, Sized):  # the last batch may be smaller
                samples = min(samples, len(loader.sampler))
        batches = start.batches + num_batches
        return {
            "epoch": start.epoch if batches else _epoch_of(loader),
            "batches": batches,
            "samples": None if samples is None else samples * _num_replicas(loader),
            "is_in_order": _is_in_order(loader),
            "states": start.states.plain() if batches and start.states is not None else None,
            "generator": _generator_state(loader),
            "has_workers": start.has_workers if batches else self._has_workers,
        }

    def resume(self, position: dict[str, Any], is_same_rank: bool) -> None:
        """Let the next pass begin at ``position``.

        Args:
            position: a result of :meth:`position`, on this rank or on another one.
            is_same_rank: True if it is of this rank, in a world of the same size.
        """
        loader = self.host_loader()
        saved = position["states"] if is_same_rank else None
        states = None if saved is None else _States.of_plain(saved)
        samples, batches = position["samples"], position["batches"]
        if samples is not None:
            samples //= _num_replicas(loader)
        _set_epoch(loader.sampler, position["epoch"])
        if is_same_rank:
            _set_generator_state(loader, position["generator"])
        has_order = position["epoch"] is not None and _epoch_of(loader) is not None
        if batches and not (has_order or states or (position["is_in_order"] and _is_in_order(loader))):
            warn_user(
                "The loader's order of samples is not that of the checkpoint: in a world of one the order "
                "comes from the random state. The pass goes on at the same number of samples. For the same "
                "order in any world, give the loader a DistributedSampler(dataset, **idist.sampler_kwargs())."
            )
        self._latest_pass = None
        self._has_workers = loader.persistent_workers and position["has_workers"]
        self._next_start = Start(batches, samples, _epoch_of(loader), states, self._has_workers)


class EpochLoader(Resumable, DataLoader[Any]):
    """The data loader of ``auto_dataloader``."""

    def __iter__(self) -> Any:
        return self.begin_pass(
            lambda loader: super(Resumable, self).__iter__() if loader is self else iter(loader)
        )


class EpochShardLoader(Resumable, ShardLoader):
    """The data loader of ``auto_dataloader`` for a :class:`Shard`."""

    def __iter__(self) -> Any:
        return self.begin_pass(lambda _: super(Resumable, self).__iter__())


# --- shared ------------------------------------------------------------------------------------------


class _Rest(Sampler[Any]):
    """The draws of ``sampler`` without the first ``num_skipped``, from the random states of ``start``."""

    def __init__(self, sampler: Any, num_skipped: int, loader: DataLoader[Any], start: Start) -> None:
        self._sampler, self._num_skipped = sampler, num_skipped
        self._loader, self._start = loader, start

    def __iter__(self) -> Iterator[Any]:
        with _from_states(self._loader, self._start.states):
            if not self._start.has_workers:
                # A loader draws its workers' seed before the sampler draws.
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            draws = iter(self._sampler)
            deque(islice(draws, self._num_skipped), maxlen=0)
        yield from draws

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._num_skipped)


_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "in_order"),
)


def _rest_of(loader: DataLoader[Any], start: Start) -> DataLoader[Any]:
    """A loader like ``loader`` for the samples from ``start`` on. It does not fetch those before."""
    settings: dict[str, Any] = {name: getattr(loader, name) for name in _SETTINGS}
    with _from_states(loader, start.states):
        settings["generator"] = _copy_of_generator(loader)
    if start.samples is None or not _counts_samples(loader):
        rest = _Rest(loader.batch_sampler, start.batches, loader, start)
        return DataLoader(loader.dataset, batch_sampler=rest, **settings)
    rest = _Rest(loader.sampler, start.samples, loader, start)
    if loader.batch_size is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=rest, **settings)
    batches = BatchSampler(rest, loader.batch_size, loader.drop_last)
    return DataLoader(loader.dataset, batch_sampler=batches, **settings)


def _copy_of_generator(loader: DataLoader[Any]) -> torch.Generator:
    """A generator that draws the seed of the workers, and leaves other states alone."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state() if loader.generator is None else loader.generator.get_state())
    return generator


@contextmanager
def _own_seed(loader: DataLoader[Any]) -> Iterator[None]:
    """Let workers that start in the block have a seed for which no other state changes."""
    generator = loader.generator
    loader.generator = _copy_of_generator(loader)
    try:
        yield
    finally:
        loader.generator = generator


def _counts_samples(loader: DataLoader[Any]) -> bool:
    """True if the loader's sampler draws samples. False for a stream and for a sampler of whole batches."""
    is_of_batches = loader.batch_size is None and loader.batch_sampler is not None
    return not (is_of_batches or isinstance(loader.dataset, IterableDataset))


def _num_replicas(loader: DataLoader[Any]) -> int:
    sampler = loader.sampler
    return sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1


def _is_in_order(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", None) is False


def _epoch_of(loader: DataLoader[Any]) -> int | None:
    epoch = getattr(loader.sampler, "epoch", None)
    return epoch if type(epoch) is int else None


def _set_epoch(sampler: Any, epoch: int | None) -> None:
    if epoch is None or not hasattr(sampler, "set_epoch"):
        return
    if isinstance(sampler, DistributedSampler):
        DistributedSampler.set_epoch(sampler, epoch)  # not the user's call, after which epochs do not advance
    else:
        sampler.set_epoch(epoch)


def check_resumable(loader: Any) -> Resumable:
    """``loader``, if its position can be saved.

    Raises:
        TypeError: it is not a loader of ``auto_dataloader``.
        ValueError: it is one with ``exact``.
    """
    if not isinstance(loader, Resumable):
        raise TypeError(
            f"loader must be the result of auto_dataloader, which counts the batches, got a "
            f"{type(loader).__name__}."
        )
    if isinstance(loader.host_loader().sampler, ExactSampler):
        raise ValueError(
            "loader was made with exact=True: gather_in_order needs whole passes over it. Leave out loader=, "
            "and save between two passes."
        )
    return loader


# --- random states -----------------------------------------------------------------------------------


def _generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator that the sampler draws from, if it is not the global one."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    return generator if isinstance(generator, torch.Generator) else None


class _States(NamedTuple):
    """The random states that determine a loader's draws: the global ones, and that of its own generator."""

    of_process: RandomStates
    of_generator: Tensor | None

    @classmethod
    def now(cls, loader: DataLoader[Any]) -> _States:
        return cls(RandomStates.now(), _generator_state(loader))

    def plain(self) -> dict[str, Any]:
        return {"process": self.of_process.plain(), "generator": self.of_generator}

    @classmethod
    def of_plain(cls, states: dict[str, Any]) -> _States:
        return cls(RandomStates.of_plain(states["process"]), states["generator"])


def _generator_state(loader: DataLoader[Any]) -> Tensor | None:
    generator = _generator_of(loader)
    return None if generator is None else generator.get_state()


def _set_generator_state(loader: DataLoader[Any], state: Tensor | None) -> None:
    generator = _generator_of(loader)
    if generator is not None and state is not None:
        generator.set_state(state)


@contextmanager
def _from_states(loader: DataLoader[Any], states: _States | None) -> Iterator[None]:
    """Draw from the given random states in the block, and from the present ones afterwards.

    Without ``states`` the draws change the present ones, so that the next pass has another order.
    """
    if states is None:
        yield
        return
    present = _generator_state(loader)
    with preserved():
        try:
            states.of_process.restore()
            _set_generator_state(loader, states.of_generator)
            yield
        finally:
            _set_generator_state(loader, present)
