"""Passes over a data loader: their order, their position, and passes that begin at a saved position."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_dist.data.samplers import (
    ExactSampler,
    Shard,
    ShardLoader,
    length_or_none,
    seeded_draws,
    with_inner,
)
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.values.random_states import RandomStates, preserved, seed_of_rank


@dataclass
class Order:
    """What determines the batches of a loader, beside its sampler. Equal on the ranks that share the data.

    Attributes:
        seed: of random orders. None if the sampler needs none, or if the user's own sampler knows its rank.
        batch_size: samples of a batch, of all ranks together. None for the batches of a batch sampler, and of
            samplers and streams that the user splits.
        is_batched: False if ``batch_size`` was left out: it is then the number of ranks.
        source: what one process would draw from, whose length is the number of samples of the present epoch.
        num_ranks_of_sampler: number of ranks that the script's own sampler was made for. None for others.
        facts: what the ranks have compared, by name. A checkpoint is of another data set if they differ.
    """

    seed: int | None = None
    batch_size: int | None = None
    is_batched: bool = True
    source: Any = None
    num_ranks_of_sampler: int | None = None
    facts: dict[str, Any] | None = None


class OrderedLoader(DataLoader[Any]):
    """A data loader whose sampler draws from generators with the seed of ``order``, from a batch on."""

    order = Order()
    number = 0  # of this rank among those that share the data
    _epoch = 0
    _num_skipped = 0

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators draw from: indices, or lists of them."""
        return _Draws(self, _torch.index_sampler(self))

    def batches_of(self, loader: DataLoader[Any]) -> Any:
        """The batches of one pass over ``loader``, this loader. A backend's loader is around another one."""
        return super().__iter__()


class _Draws:
    """The draws of a loader's sampler in its present epoch, from the position on."""

    def __init__(self, loader: OrderedLoader, sampler: Any) -> None:
        # Persistent workers end with the loader: the iterator that has them keeps this object.
        self._loader, self._sampler = weakref.ref(loader), sampler

    def __iter__(self) -> Iterator[Any]:
        loader, sampler = self._loader(), self._sampler
        assert loader is not None  # it is making the iterator
        seed, num_skipped = loader.order.seed, loader._num_skipped
        if seed is not None and not isinstance(loader.sampler, DistributedSampler):
            draws = seeded_draws(sampler, seed + loader._epoch)
        else:
            draws = iter(sampler)
        draws = islice(draws, num_skipped, None)
        # Draw once now: the sampler reads the epoch of this pass then.
        return chain(list(islice(draws, 1)), draws)

    def __len__(self) -> int:
        return len(self._sampler)


class OrderedShardLoader(OrderedLoader, ShardLoader):
    """An ordered loader of a :class:`Shard`."""


# --- passes ------------------------------------------------------------------------------------------


class Progress:
    """How far a pass has come.

    Attributes:
        epoch: of the pass.
        batches: number of batches of the epoch that the caller has received, with those before the pass.
        ahead: the numbers of batches that look-aheads have read and not yet given to the training loop; 0 is
            the end of the pass. See :class:`LookAhead`.
        num_batches: of the epoch; None if it is not known.
        is_exhausted: True if the pass has ended: the caller has received the last batch, and has asked for
            another, begun the next pass or dropped this one.
        is_left: True if the script has set the loader's epoch after the last batch that it has received.
        states: the random states before the first batch, for a stream.
        has_workers: True if persistent workers had their seed before the pass began.
        microbatch: which of a step's microbatches the last batch is, after which more follow, with its
            position; None if the step ends with this batch. See :meth:`LookAhead.note_microbatch`.
    """

    def __init__(self, epoch: int, batches: int, states: RandomStates | None, has_workers: bool) -> None:
        self.epoch, self.batches, self.states, self.has_workers = epoch, batches, states, has_workers
        self._num_before = batches
        self.num_batches: int | None = None
        self.is_exhausted = self.is_left = False
        self.ahead: list[int] = []
        self.microbatch: tuple[int, str] | None = None

    @property
    def is_read_ahead(self) -> bool:
        """True while batches, or the end, have been read and not yet given to the training loop."""
        return bool(self.ahead)

    def is_counted(self) -> bool:
        """True if the position may be in this pass. A pass that has ended is in the epoch before."""
        return self.is_read_ahead or not self.is_exhausted

    def is_complete(self) -> bool:
        """True if the caller has received the last batch in this pass, and may not have asked for another."""
        return self.batches == self.num_batches != self._num_before and not self.is_read_ahead

    def position(self) -> int:
        """The number of batches of the epoch that the training loop has received."""
        return self.batches - sum(self.ahead)

    def num_received(self) -> int:
        """The number of batches of this pass that the training loop has received."""
        return self.position() - self._num_before


class LookAhead:
    """Reads one item ahead of the training loop. The item may come from any iterators around passes.

    To make an item, the iterators may read batches from passes. These batches count as ahead of the training
    loop until the next item is read.
    """

    def __init__(self) -> None:
        self._advanced: list[tuple[Pass, int]] = []  # and by how many batches
        self._received: list[Pass] = []  # the training loop is at a batch of these: they have not ended
        self._in_step: list[Progress] = []  # of the passes with batches of an unfinished step

    def next(self, items: Iterator[Any], default: Any) -> Any:
        """``next(items, default)``. If it raises, the batches read so far stay ahead of the training loop."""
        received = len(self._advanced)
        outer = _reading.look_aheads
        _reading.look_aheads = (*outer, self._advanced)
        try:
            item = next(items, default)
        finally:
            _reading.look_aheads = outer
        self._give(received)
        return item

    def note_microbatch(self, text: str) -> None:
        """Note in the passes which microbatch the last item is; an empty ``text`` for the last of a step."""
        received = [one.progress for one in self._received]
        self._in_step += received
        if text:
            for progress in received:
                progress.microbatch = progress.position(), text
            return
        for progress in self._in_step:
            progress.microbatch = None
        self._in_step.clear()

    def end(self) -> None:
        """Note that the training loop has received what was read."""
        self._give(len(self._advanced))

    def _give(self, count: int) -> None:
        self._received = [one for one, _ in self._advanced[:count]]
        for one, num_batches in self._advanced[:count]:
            one.progress.ahead.remove(num_batches)
        del self._advanced[:count]


class _Reading(threading.local):
    look_aheads: tuple[list[tuple[Pass, int]], ...] = ()  # of this thread, the innermost last


_reading = _Reading()


class Pass:
    """One pass over a data loader: an iterator with a length, like torch's.

    It reports the beginning and the end of the pass to the sampler, and counts the batches. The sampler
    cannot do this itself: workers fetch ahead, so the first batch may exhaust it.
    """

    def __init__(self, batches: Any, loader: Resumable, progress: Progress) -> None:
        self._batches = batches
        self._loader = loader
        self._sampler: Any = loader.host_loader().sampler
        self._num_before = progress.batches
        self._has_begun = False
        self.progress = progress
        # torch's iterators of streams have no length.
        is_shard = isinstance(loader.host_loader().dataset, Shard)
        progress.num_batches = length_or_none(loader.host_loader() if is_shard else batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._num_before)

    def __next__(self) -> Any:
        progress = self.progress
        if not self._has_begun:
            self._has_begun = True
            if getattr(self._sampler, "on_begin", None) is not None:
                self._sampler.begin_pass()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not progress.is_exhausted:
                self._note_look_ahead(0)
                self._loader.end_pass(progress)
            raise
        progress.batches += 1
        self._loader.note_batch(progress)
        progress.is_left = False
        self._note_look_ahead(1)
        return batch

    def _note_look_ahead(self, num_batches: int) -> None:
        for advanced in _reading.look_aheads:
            advanced.append((self, num_batches))
            self.progress.ahead.append(num_batches)


class Resumable:
    """Mixin for loaders: their position in the epoch, and passes that begin at a saved position.

    The class behind it has the method ``batches_of(loader)``: the batches of one pass over torch's loader.
    """

    batches_of: Any
    _latest: Progress | None = None
    _latest_pass: weakref.ref[Pass] | None = None
    _furthest: Progress | None = None  # of the passes before the latest one, in this epoch
    _start: Progress | None = None  # the loaded position
    _has_workers = False  # persistent workers have their seed, perhaps those of the process before
    _keeps_workers = False  # persistent workers have the data set as it was at their start
    _epoch_is_set = False
    _num_left_at_once = 0  # passes in a row that were left after one batch, while no other pass went on
    _has_warned = False

    def __iter__(self) -> Any:
        return self.begin_pass()

    def host_loader(self) -> OrderedLoader:
        """The loader of torch, which has the sampler."""
        assert isinstance(self, OrderedLoader)
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: the number of passes before it, unless ``set_epoch`` was called."""
        loader = self.host_loader()
        return loader.sampler.epoch if isinstance(loader.sampler, DistributedSampler) else loader._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` with the next pass. After this call epochs do not advance by themselves.

        The same as ``loader.sampler.set_epoch`` with more than one rank. A sampler in the loader's, a batch
        sampler and a data set that have a method ``set_epoch`` get the epoch too.
        """
        loader = self.host_loader()
        self._epoch_is_set, loader._epoch = True, epoch
        for one in (*with_inner(loader.sampler), *with_inner(loader.batch_sampler), loader.dataset):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
                if one is loader.dataset and self._keeps_workers:  # they have a copy of the data set
                    _torch.forget_workers(loader)
                    self._has_workers = self._keeps_workers = False
        for progress in (self._latest, self._furthest):
            if progress is not None:
                progress.is_left = True

    def _go_to_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` with the next pass, as if the passes before it had been made."""
        loader = self.host_loader()
        loader._epoch = epoch
        if isinstance(loader.sampler, DistributedSampler):
            DistributedSampler.set_epoch(loader.sampler, epoch)  # a subclass would take it for the script's

    def _has_set_epoch(self) -> bool:
        return self._epoch_is_set or getattr(self.host_loader().sampler, "epoch_is_set", False)

    def end_pass(self, progress: Progress) -> None:
        """Note the end of a pass. The next pass is in the next epoch."""
        loader = self.host_loader()
        progress.is_exhausted = True
        self._start = self._furthest = None
        if hasattr(loader.sampler, "advance_epoch"):
            loader.sampler.advance_epoch()
        elif not self._epoch_is_set:
            loader._epoch += 1

    def begin_pass(self) -> Pass:
        """Begin a pass, at the position of the loaded checkpoint if there is one."""
        self._end_complete_pass()
        loader, epoch = self.host_loader(), self.epoch
        self._keep_furthest(epoch)
        start = self._start if self._start is not None and self._start.epoch == epoch else None
        num_skipped = 0 if start is None else start.batches
        has_workers = self._has_workers if start is None else start.has_workers
        is_stream = isinstance(loader.dataset, IterableDataset)
        states = (start.states if start is not None else RandomStates.now()) if is_stream else None
        progress = Progress(epoch, num_skipped, states, has_workers)
        saved = states if start is not None else None
        # The saved random states of a stream are those before torch drew the seed of the workers.
        has_seed = has_workers if saved is not None else num_skipped or self._has_workers
        with self._worker_seed(loader, is_own=bool(has_seed)):
            if is_stream:
                batches = self._rest_of_stream(loader, num_skipped, saved)
            else:
                loader._num_skipped = num_skipped
                batches = self.batches_of(loader)
                # Workers fetch the first batches now; without workers, torch draws when it is asked.
        self._has_workers = self._keeps_workers = loader.persistent_workers
        begun = Pass(batches, self, progress)
        self._latest, self._latest_pass = progress, weakref.ref(begun)
        return begun

    def note_batch(self, progress: Progress) -> None:
        """Note that a pass has given a batch."""
        if progress is not self._latest:  # a loop goes on: the latest pass is only a look
            self._num_left_at_once = -1  # not counting the latest one

    def _end_complete_pass(self) -> None:
        """End the latest pass if its last batch was received: ``zip`` and ``islice`` may ask for no other."""
        latest = self._latest
        if latest and latest.is_complete() and not latest.is_exhausted and latest.epoch == self.epoch:
            self.end_pass(latest)

    def _rest_of_stream(self, loader: OrderedLoader, num_skipped: int, states: RandomStates | None) -> Any:
        with preserved() if states is not None else nullcontext():
            if states is not None:
                states.restore()
            if isinstance(loader.dataset, Shard) and loader.num_workers and not self._keeps_workers:
                loader.dataset.leave_out(num_skipped)  # each worker skips its own batches
                return self.batches_of(loader)
            batches = self.batches_of(loader)
            deque(islice(batches, num_skipped), maxlen=0)
        return batches

    def _keep_furthest(self, epoch: int) -> None:
        """Remember the latest pass if it has come further than those before it. Warn of one that was left."""
        latest, furthest = self._latest, self._furthest
        if furthest is not None and furthest.epoch != epoch:
            furthest = None
        if latest is None or latest.epoch != epoch or not latest.is_counted():
            self._furthest, self._num_left_at_once = furthest, 0
            return
        received = latest.num_received()
        self._num_left_at_once = self._num_left_at_once + 1 if received == 1 else 0
        may_go_on = self._latest_pass is not None and self._latest_pass() is not None
        is_repeated = received > 1 or self._num_left_at_once - may_go_on > 2  # one or two may be looks
        if is_repeated and not self._has_warned and self.host_loader().order.seed is not None:
            self._has_warned = True
            warn_user(
                f"This pass begins with the batches of the pass before it, which was left after {received} "
                f"batch{'es' * (received > 1)}: the order depends on the epoch, and epoch {epoch} has not "
                "ended. For other batches go on with one iterator: batches = iter(loader) once, then "
                "next(batches) in each step. Or call loader.set_epoch(number) before the pass."
            )
        self._furthest = latest if furthest is None or latest.batches >= furthest.batches else furthest

    @contextmanager
    def _worker_seed(self, loader: OrderedLoader, is_own: bool) -> Iterator[None]:
        """Let torch draw the seed of workers that start in the block.

        A generator that the loader was made with is the same on all ranks. It is drawn from as torch does, so
        it stays the same, but the seed differs by rank: as in ``seed_everything``.

        Args:
            loader: which starts the workers.
            is_own: True if no state may change because of the seed.
        """
        generator = drawn_from = loader.generator
        if is_own:
            drawn_from = torch.Generator()
            drawn_from.set_state(torch.get_rng_state() if generator is None else generator.get_state())
        if generator is not None and loader.number:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn_from))
            drawn_from = torch.Generator().manual_seed(seed_of_rank(seed, loader.number))
        loader.generator = drawn_from
        try:
            yield
        finally:
            loader.generator = generator

    def _counted(self) -> Progress | None:
        """The pass whose position counts; None before the first batch of an epoch.

        Of several passes in one epoch (a look at the first batch, say) the one that has come furthest counts.
        """
        if self._latest_pass is not None and self._latest_pass() is None:  # the loop over it has ended
            self._end_complete_pass()
        found = [one for one in (self._furthest, self._latest) if one is not None and one.is_counted()]
        found = [one for one in found if one.epoch == self.epoch or one.is_read_ahead or not one.is_left]
        if not found and self._start is not None and self._start.epoch == self.epoch:
            found = [self._start]
        return max(found, key=Progress.position, default=None)

    def unfinished_step(self) -> str:
        """Which microbatch of a step the last batch is, if more follow before the step; else empty."""
        best = self._counted()
        if best is None or best.microbatch is None:
            return ""
        position, text = best.microbatch
        return text if position == best.position() else ""

    def position(self) -> dict[str, Any]:
        """The position in the epoch, as plain values for :meth:`resume`.

        It is the number of batches that the training loop has received.
        """
        best, loader = self._counted(), self.host_loader()
        batches = 0 if best is None else best.position()
        order = loader.order
        samples = None if order.batch_size is None else batches * order.batch_size
        num_samples = None if samples is None else length_or_none(order.source)
        return {
            "epoch": self.epoch if best is None or not batches else best.epoch,
            "has_set_epoch": self._has_set_epoch(),
            "batches": batches,
            "samples": samples,
            "is_at_end": samples is not None and num_samples is not None and samples >= num_samples,
            "seed": order.seed,
            "num_ranks": order.num_ranks_of_sampler,
            "facts": order.facts,
            "states": best.states.plain() if best is not None and batches and best.states else None,
            "has_workers": best.has_workers if best is not None and batches else self._has_workers,
        }

    def check_position(self, position: dict[str, Any]) -> int:
        """The number of this loader's batches before ``position``, which may be of another number of ranks.

        Raises:
            ValueError: it is of another data set or sampler, or behind the end.
        """
        loader = self.host_loader()
        saved, own = position.get("facts") or {}, loader.order.facts or {}
        different = [name for name in saved if name in own and saved[name] != own[name]]
        if different:
            name = different[0]
            raise ValueError(
                f"The checkpoint is of a loader of another data set or sampler: its {name} is "
                f"{saved[name]!r}, and that of this loader is {own[name]!r}."
            )
        batches: int = position["batches"]
        order, samples = loader.order, position["samples"]
        saved_ranks, num_ranks = position.get("num_ranks"), order.num_ranks_of_sampler
        if batches and None not in (saved_ranks, num_ranks) and saved_ranks != num_ranks:
            raise ValueError(
                "The checkpoint was saved in the middle of an epoch whose sampler drew the share of one of "
                f"{saved_ranks} ranks, and that of this loader is one of {num_ranks}. Use as many ranks, "
                "or a sampler that draws from the whole data set: the loader splits its draws."
            )
        if samples is not None and order.batch_size is not None:
            batches, rest = divmod(samples, order.batch_size)
            if rest and position.get("is_at_end"):
                batches += 1
            elif rest and order.is_batched:
                raise ValueError(
                    f"The checkpoint was saved after {samples} samples of an epoch, which are no whole "
                    f"number of batches of batch_size={order.batch_size}. Use that of the saved run."
                )
        # A run that sets the epoch may have other numbers of batches in each.
        num_batches = None if position.get("has_set_epoch") else self._num_batches()
        if num_batches is not None and batches > num_batches and not position.get("is_at_end"):
            raise ValueError(
                f"The checkpoint was saved after {batches} batches of an epoch, and an epoch of this loader "
                f"has {num_batches}."
            )
        return batches

    def _num_batches(self) -> int | None:
        """The number of batches of an epoch, equal on all ranks; None if it is not known."""
        loader = self.host_loader()
        if isinstance(loader.dataset, Shard):  # rank 0 has the most
            has_length = length_or_none(loader.dataset.dataset) is not None
            return loader.dataset.num_batches(rank=0) if has_length else None
        return length_or_none(loader)

    def resume(self, position: dict[str, Any], is_same_rank: bool) -> None:
        """Let the next pass begin at ``position``, in the order of the saved run.

        Args:
            position: a result of :meth:`position`, on this rank or on another one.
            is_same_rank: True if it is of this rank, in a world of the same size.
        """
        loader = self.host_loader()
        batches = self.check_position(position)
        seed = position.get("seed")
        if seed is not None and loader.order.seed is not None:
            loader.order.seed = seed
            sampler: Any = loader.sampler
            if hasattr(sampler, "advance_epoch"):
                sampler.seed = seed
        elif batches and "seed" not in position and loader.order.seed is not None:
            warn_user(
                "The checkpoint was saved by ignite_dist 0.1.0, whose order of samples was another one. The "
                "pass goes on at the same number of samples: some come twice in this epoch, others never."
            )
        if position.get("has_set_epoch", self._has_set_epoch()):
            self.set_epoch(position["epoch"])
        else:
            self._go_to_epoch(position["epoch"])
        saved = position["states"] if is_same_rank else None
        states = None if saved is None else RandomStates.of_plain(saved)
        has_workers = self._has_workers = loader.persistent_workers and position["has_workers"]
        self._latest = self._latest_pass = self._furthest = None
        self._start = Progress(self.epoch, batches, states, has_workers) if batches else None


class EpochLoader(Resumable, OrderedLoader):
    """The data loader of ``auto_dataloader``."""


class EpochShardLoader(Resumable, OrderedShardLoader):
    """The data loader of ``auto_dataloader`` for a :class:`Shard`."""


class _DeviceEpochLoader(Resumable):
    """Mixin for a backend's loader around torch's: passes, with the attributes of ``DataLoader``."""

    def __init__(self, loader: OrderedLoader, device: torch.device) -> None:
        self._host_loader = loader
        super().__init__(loader, device)  # type: ignore[call-arg]  # of the backend's class

    def host_loader(self) -> OrderedLoader:
        return self._host_loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # an attribute that __init__ has not set yet, or a private name of torch
            raise AttributeError(name)
        return getattr(self._host_loader, name)


@cache
def _device_loader_class(kind: Any) -> type[_DeviceEpochLoader]:
    """``kind``, the loader of a backend, with passes."""
    return type(kind.__name__, (_DeviceEpochLoader, kind), {})


def make_loader(
    dataset: Dataset[Any],
    order: Order,
    number: int,
    device_loader: Any,
    device: torch.device,
    /,
    **kwargs: Any,
) -> Any:
    """The loader of ``auto_dataloader``.

    Args:
        dataset: of this rank.
        order: what determines the batches.
        number: of this rank among those that share the data.
        device_loader: the class of the backend's loader; None if batches stay on the host.
        device: where the backend's loader copies the batches.
        kwargs: of ``DataLoader``.
    """
    is_shard = isinstance(dataset, Shard)
    loader: Any
    if device_loader is None:
        loader = (EpochShardLoader if is_shard else EpochLoader)(dataset, **kwargs)
    else:
        inner = (OrderedShardLoader if is_shard else OrderedLoader)(dataset, **kwargs)
        loader = _device_loader_class(device_loader)(inner, device)
    loader.host_loader().order, loader.host_loader().number = order, number
    return loader


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
