"""Epochs and positions of loaders, with samplers and data sets as people write them."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import ignite_dist as idist
from ignite_dist.data import orders
from on_ranks import on_ranks

DATA: Any = list(range(16))


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def ordered(size: int = 10, **kwargs: Any) -> Any:
    return idist.auto_dataloader(list(range(size)), shuffle=False, **kwargs)


def position_after(loader: Any, num_batches: int) -> Any:
    batches = iter(loader)  # the loop over it has not ended
    for _ in range(num_batches):
        next(batches)
    return loader.position()


def resumed(loader: Any, position: Any) -> list[list[int]]:
    loader.resume(position, is_same_rank=True)
    return lists(loader)


class Noisy(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        for number in range(12):
            yield number + float(torch.rand(()))


def test_a_stream_that_draws_random_numbers_goes_on_with_the_same_ones(tmp_path: Path) -> None:
    def loader() -> Any:
        return idist.auto_dataloader(Noisy(), batch_size=4, shard=True)

    one = loader()
    batches = iter(one)
    next(batches)
    idist.save_checkpoint(tmp_path / "run.pt", loader=one)
    rest = [batch.tolist() for batch in batches]
    again = loader()
    idist.load_checkpoint(tmp_path / "run.pt", loader=again)
    assert lists(again) == rest


class Shuffled(IterableDataset[int]):
    """Draws its order when the pass begins, after torch has drawn the seed of the workers."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_shuffles_goes_on_in_its_order(num_workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        return idist.auto_dataloader(Shuffled(), batch_size=4, shard=True, num_workers=num_workers)

    torch.manual_seed(1)
    one = loader()
    batches = iter(one)
    next(batches)
    idist.save_checkpoint(tmp_path / "run.pt", loader=one)
    rest = [batch.tolist() for batch in batches]
    torch.manual_seed(2)
    again = loader()
    idist.load_checkpoint(tmp_path / "run.pt", loader=again)
    assert lists(again) == rest


# --- epochs ------------------------------------------------------------------------------------------


class ByEpoch(Sampler[Any]):
    """An order for each epoch that ``set_epoch`` names; as a batch sampler, more batches in later ones."""

    def __init__(self, is_of_batches: bool = False) -> None:
        self.epoch, self.is_of_batches = 0, is_of_batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + self.epoch if self.is_of_batches else len(DATA)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[i : i + 2] for i in range(len(self))] if self.is_of_batches else order)


class Growing(ByEpoch):
    """As many draws more in each epoch."""

    def __len__(self) -> int:
        return 6 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter([(3 * number + self.epoch) % len(DATA) for number in range(len(self))])


class Augmented(Dataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


BY_EPOCH: dict[str, Callable[[], Any]] = {
    "sampler": lambda: idist.auto_dataloader(DATA, sampler=ByEpoch(), batch_size=4),
    "growing sampler": lambda: idist.auto_dataloader(DATA, sampler=Growing(), batch_size=4),
    "batch sampler": lambda: idist.auto_dataloader(DATA, batch_sampler=ByEpoch(True)),
    "sampler of a batch sampler": lambda: idist.auto_dataloader(
        DATA, batch_sampler=BatchSampler(ByEpoch(), 4, False)
    ),
    "distributed sampler of a batch sampler": lambda: idist.auto_dataloader(
        DATA,
        batch_sampler=BatchSampler(DistributedSampler(DATA, **idist.sampler_kwargs()), 4, False),
    ),
    "data set": lambda: idist.auto_dataloader(Augmented(), batch_size=4),
}


def epochs(_: int, kind: str, sets: bool) -> tuple[list[Any], list[Any]]:
    """The batches after two whole epochs and one batch: of the run, and of one that is resumed there."""
    loader = BY_EPOCH[kind]()
    passes = []
    for epoch in range(2):
        if sets:
            loader.set_epoch(epoch + 3)
        passes.append(lists(loader))
    assert (passes[0] != passes[1]) is sets
    if sets:
        loader.set_epoch(5)
    num_batches = sum(1 for _ in islice(loader, 1_000))
    batches = iter(loader)
    for _ in range(num_batches - 1):
        next(batches)
    position = loader.position()
    return lists(batches), resumed(BY_EPOCH[kind](), position)


@pytest.mark.parametrize("sets", [True, False], ids=["set_epoch", "not set"])
@pytest.mark.parametrize("kind", BY_EPOCH)
def test_set_epoch_reaches_what_has_it_and_is_called_again_only_if_the_script_did(
    kind: str, sets: bool
) -> None:
    for rest, of_resumed in [epochs(0, kind, sets), *on_ranks(epochs, kind, sets)]:
        assert rest == of_resumed != []


@pytest.mark.parametrize("persists", [False, True])
def test_set_epoch_reaches_the_data_set_of_workers(persists: bool) -> None:
    loader = idist.auto_dataloader(Augmented(), batch_size=16, num_workers=1, persistent_workers=persists)
    found = []
    for epoch in (0, 3, 5):
        loader.set_epoch(epoch)
        found.append(min(min(batch) for batch in lists(loader)))
    assert found == [0, 300, 500]


AROUND: dict[str, Callable[[Any], Any]] = {
    "loader": lambda loader: loader,
    "iter": iter,
    "map": lambda loader: map(idist.to_device, loader),
    "bar": idist.progress_bar,
    "bar around a map": lambda loader: idist.progress_bar(map(idist.to_device, loader), disable=True),
    "slice": lambda loader: islice(loader, 3),
    "generator": lambda loader: (batch for batch in loader),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_gradients_are_accumulated_around_any_iterable(around: str, num_batches: int) -> None:
    loader, model = ordered(12, batch_size=4), torch.nn.Linear(1, 1)
    microbatches = idist.accumulate_gradients(AROUND[around](loader), model, steps=1)
    for number, (_, sync) in enumerate(microbatches, 1):
        with sync:
            pass
        if number == num_batches:
            break
    assert loader.position()["batches"] == num_batches


class Breaks(Dataset[int]):
    fails = True

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> int:
        if index == 6 and self.fails:
            raise KeyboardInterrupt
        return index


def test_an_interrupt_of_the_look_ahead_loses_no_batch() -> None:
    loader = idist.auto_dataloader(Breaks(), batch_size=1, shuffle=False)
    received = []
    with pytest.raises(KeyboardInterrupt):
        for batch, sync in idist.accumulate_gradients(loader, torch.nn.Linear(1, 1), steps=2):
            with sync:
                received += batch.tolist()
    assert received == [0, 1, 2, 3, 4] and loader.position()["batches"] == 5


def test_one_look_ahead_inside_of_another() -> None:
    loader, model = ordered(12, batch_size=2), torch.nn.Linear(1, 1)

    def inner() -> Iterator[Any]:
        for batch, sync in idist.accumulate_gradients(loader, model, steps=1):
            with sync:
                yield batch

    for number, (_, sync) in enumerate(idist.accumulate_gradients(inner(), model, steps=1), 1):
        with sync:
            pass
        if number == 3:
            break
    assert loader.position()["batches"] == 3


def epoch_of_a_running_pass(_: int) -> list[Any]:
    def loader() -> Any:
        return idist.auto_dataloader(DATA, batch_size=4, shuffle=True, seed=0)

    first, second = loader(), loader()
    batches = iter(first)
    first.set_epoch(1)  # for the next pass
    found: list[Any] = [lists(batches) == lists(second)]
    batches = iter(second)
    next(batches)
    second.set_epoch(7)
    found.append((second.position()["epoch"], second.position()["batches"]))
    next(batches)
    found.append((second.position()["epoch"], second.position()["batches"]))
    return found


def test_a_pass_keeps_the_epoch_that_it_began_with() -> None:
    for found in [epoch_of_a_running_pass(0), *on_ranks(epoch_of_a_running_pass)]:
        assert found == [True, (7, 0), (1, 2)]


# --- passes whose last batch is received and that are not asked for another ------------------------------


def _zipped(loader: Any) -> list[Any]:
    return [batch for _, batch in zip(range(len(loader)), loader, strict=False)]


def _broken(loader: Any) -> list[Any]:
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == len(loader):
            break
    return batches


def _nexts(loader: Any) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(len(loader))]


WHOLE_PASSES = [_zipped, _broken, _nexts, lambda loader: list(islice(loader, len(loader)))]


@pytest.mark.parametrize("whole_pass", WHOLE_PASSES)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["", "workers"])
def test_a_pass_ends_with_its_last_batch(
    whole_pass: Callable[[Any], list[Any]], options: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """As one whose end was seen: the next pass has the order of the next epoch."""
    orders = []
    for one_pass in (list, whole_pass):
        loader = idist.auto_dataloader(range(12), batch_size=4, shuffle=True, seed=3, **options)
        orders.append([[batch.tolist() for batch in one_pass(loader)] for _ in range(3)])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]
    assert not recwarn.list


@pytest.mark.parametrize("whole_pass", WHOLE_PASSES)
def test_a_run_goes_on_with_the_next_epoch_after_it(
    whole_pass: Callable[[Any], list[Any]], tmp_path: Path
) -> None:
    def loaders() -> list[Any]:
        return [idist.auto_dataloader(range(12), batch_size=4, shuffle=True, seed=seed) for seed in (1, 2)]

    def epoch(one: Any, other: Any) -> list[Any]:
        paired = [[x.tolist(), y.tolist()] for x, y in zip(one, other, strict=False)]
        return [*paired, *(batch.tolist() for batch in whole_pass(other))]

    run, resumed = loaders(), loaders()
    epoch(*run)
    idist.save_checkpoint(tmp_path / "checkpoint.pt", loader=run)
    idist.load_checkpoint(tmp_path / "checkpoint.pt", loader=resumed)
    expected = epoch(*run)
    assert epoch(*resumed) == expected and len(expected) == 6


def test_the_position_in_the_loop_of_the_last_batch_is_the_end(tmp_path: Path) -> None:
    loader, resumed = (idist.auto_dataloader(range(12), batch_size=4, seed=1) for _ in range(2))
    for number, _ in enumerate(loader, start=1):
        if number == len(loader):
            idist.save_checkpoint(tmp_path / "checkpoint.pt", loader=loader)
    idist.load_checkpoint(tmp_path / "checkpoint.pt", loader=resumed)
    assert [len(list(resumed)) for _ in range(2)] == [0, 3]


# --- positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 6])
def test_behind_the_last_batch_any_batch_size_goes_on(batch_size: int) -> None:
    position = position_after(ordered(batch_size=4), 3)
    assert resumed(ordered(batch_size=batch_size), position) == []


def test_a_share_of_a_rank_is_refused_on_another_number_of_ranks() -> None:
    def loader(num_ranks: int) -> Any:
        sampler = DistributedSampler(DATA, num_ranks, 0)
        return idist.auto_dataloader(DATA, batch_sampler=BatchSampler(sampler, 2, False))

    position = position_after(loader(1), 2)
    assert resumed(loader(1), position) == lists(loader(1))[2:]
    with pytest.raises(ValueError, match=r"one of 2 ranks.* one of 1"):
        loader(1).resume({**position, "num_ranks": 2}, is_same_rank=False)
    loader(1).resume({**position, "num_ranks": 2, "batches": 0}, is_same_rank=False)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 9


class WithoutLength(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


def at_the_ragged_end(_: int, position: Any) -> list[list[int]]:
    return resumed(idist.auto_dataloader(Stream(), shard=True, batch_size=4), position)


def test_a_stream_is_resumed_at_its_ragged_end_on_every_rank() -> None:
    position = position_after(idist.auto_dataloader(Stream(), shard=True, batch_size=4), 3)
    assert on_ranks(at_the_ragged_end, {**position, "states": None}) == [[], []]


def test_a_stream_whose_length_raises() -> None:
    def loader() -> Any:
        return idist.auto_dataloader(WithoutLength(), shard=True, batch_size=4)

    position = position_after(loader(), 1)
    again = loader()
    again.resume(position, is_same_rank=True)
    assert [batch.tolist() for batch in iter(again)] == [[4, 5, 6, 7], [8]]


def test_a_stream_with_workers_that_persist_is_resumed_in_the_same_process() -> None:
    loader = idist.auto_dataloader(
        Stream(),
        shard=True,
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    whole = lists(loader)
    position = position_after(loader, 3)
    assert resumed(loader, position) == whole[3:]
    assert lists(loader) == whole


def test_workers_that_persist_end_with_their_loader() -> None:
    others = multiprocessing.active_children()
    gc.disable()
    try:
        loader = idist.auto_dataloader(
            DATA, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        lists(loader)
        assert len(multiprocessing.active_children()) == len(others) + 2
        del loader
        assert multiprocessing.active_children() == others
    finally:
        gc.enable()


def test_a_collate_fn_of_none_is_torchs_default() -> None:
    loader = idist.auto_dataloader(Stream(), shard=True, batch_size=4, collate_fn=None)
    assert lists(loader) == lists(DataLoader(Stream(), batch_size=4, collate_fn=None))


# --- samplers ----------------------------------------------------------------------------------------


class Adaptive(Sampler[int]):
    """Draws what the script has last said."""

    wanted = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield self.wanted


def test_draws_may_depend_on_the_training() -> None:
    sampler = Adaptive()
    found = []
    for batch in idist.auto_dataloader(DATA, batch_size=2, sampler=sampler):
        found.append(batch.tolist())
        sampler.wanted += 1
    assert found == [[0, 0], [1, 1], [2, 2], [3, 3]]


class InASlot:
    __slots__ = ("rank_", "rng")

    def __init__(self) -> None:
        self.rng = random.Random()

    @property
    def rank(self) -> int:
        raise RuntimeError("not initialised")

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(DATA, 16))


class InAList(InASlot):
    __slots__ = ("rngs",)

    def __init__(self) -> None:
        self.rngs = [random.Random()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.rngs[0].sample(DATA, 16))


class OfSeveral(Sampler[int]):
    def __init__(self) -> None:
        self.samplers = [RandomSampler(DATA, generator=torch.Generator().manual_seed(idist.get_rank()))]
        self.entropy = random.SystemRandom()

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        for one in self.samplers:
            yield from one


def drawn_from(_: int, kind: type) -> list[list[int]]:
    return lists(idist.auto_dataloader(DATA, sampler=kind(), batch_size=4, seed=2))


@pytest.mark.parametrize("kind", [InASlot, InAList, OfSeveral])
def test_generators_that_are_no_plain_attributes_are_seeded_too(kind: type) -> None:
    whole = [sorted(batch) for batch in drawn_from(0, kind)]
    parts = on_ranks(drawn_from, kind)
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == whole


class WithOwn(Sampler[int]):
    def __init__(self, own: Any) -> None:
        self.own = own

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        draw = getattr(self.own, "integers", None) or getattr(self.own, "randint", None)
        for _ in range(40):
            if draw is None:
                yield int(torch.randint(16, (), generator=self.own))
            else:
                yield int(draw(0, 15))


@pytest.mark.parametrize(
    "make",
    [lambda: random.Random(1), np.random.default_rng, np.random.RandomState, torch.Generator],
    ids=["random", "numpy", "numpy's old one", "torch"],
)
def test_two_passes_at_once_and_the_script_itself_draw_from_a_samplers_generator(make: Any) -> None:
    def loader(own: Any) -> Any:
        return idist.auto_dataloader(DATA, batch_size=4, sampler=WithOwn(own), seed=1)

    whole, own = lists(loader(make())), make()
    both = loader(own)
    first, second = iter(both), iter(both)
    found: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(10):
        found[0].append(next(first).tolist())
        found[1].append(next(second).tolist())
        next(iter(WithOwn(own)))
    assert found == (whole, whole)


TAKEN_OVER: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "some, in order": lambda: DataLoader(DATA, batch_size=4, sampler=SequentialSampler(range(6))),
    "its sampler's generator": lambda: DataLoader(
        DATA, batch_size=4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    ),
    "its generator": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


def taken_over(_: int, kind: str) -> list[list[int]]:
    torch.manual_seed(1 + idist.get_rank())
    return lists(idist.auto_dataloader(TAKEN_OVER[kind]()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", TAKEN_OVER)
def test_a_loader_that_is_taken_over_draws_what_it_would_alone(kind: str) -> None:
    whole = [sorted(batch) for batch in taken_over(0, kind)]
    assert len(whole) == len(TAKEN_OVER[kind]())
    parts = on_ranks(taken_over, kind)
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == whole
    if kind == "its sampler's generator":
        torch.manual_seed(99)
        assert [sorted(batch) for batch in lists(idist.auto_dataloader(TAKEN_OVER[kind]()))] == whole


def of_a_rank(_: int) -> tuple[int, int]:
    made = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, **idist.sampler_kwargs()))
    return len(made), len(idist.auto_dataloader(made))


def test_the_batch_size_of_a_rank_stays() -> None:
    assert on_ranks(of_a_rank) == [(2, 2), (2, 2)]


def of_rank_0(_: int) -> str:
    with pytest.raises(ValueError, match="was made for rank 0 of 2, but this is rank 1") as info:
        idist.auto_dataloader(DATA, sampler=DistributedSampler(DATA, 2, 0), batch_size=4)
    return str(info.value)


def test_the_sampler_of_another_rank_is_an_error_on_every_rank() -> None:
    first, second = on_ranks(of_rank_0)
    assert first == f"On rank 1: {second}"


# --- what the ranks compare --------------------------------------------------------------------------


class Drawn(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("drawn from")


def digest(dataset: Any) -> tuple[str | None, dict[str, str]]:
    return orders._digests(dataset)


class Named(NamedTuple):
    number: int
    name: str


@dataclasses.dataclass
class Record:
    number: int
    lock: Any = None
    words: Any = None
    place: int = dataclasses.field(default=0, compare=False)


def table(order: list[int]) -> Any:
    import pandas

    return pandas.DataFrame({"x": [0, 0, 0], "name": ["a", "a", "a"]}, index=order)


def frame(text: str) -> Any:
    return np.array([[number, "".join(text)] for number in range(9)], dtype=object)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: frame("item"), lambda: frame("text")),
        (lambda: table([3, 1, 2]), lambda: table([3, 2, 1])),
        (lambda: [{"x": 1.0}], lambda: [{"x": 2.0}]),
        (lambda: [{"a": 1}, {"b": 1}, {"c": 1}], lambda: [{"b": 1}, {"a": 1}, {"c": 1}]),
        (lambda: [{"inner": {"x": [1]}}], lambda: [{"inner": {"x": [2]}}]),
        (lambda: [{"text": "one </s>"}], lambda: [{"text": "two </s>"}]),
        (lambda: [Named(1, "a")], lambda: [Named(1, "b")]),
        (lambda: [Record(1)], lambda: [Record(2)]),
        (lambda: [(1, Record(1))], lambda: [(1, Record(2))]),
        (lambda: np.zeros(3), lambda: np.ones(3)),
        (lambda: [torch.zeros(1 << 20)], lambda: [torch.ones(1 << 20)]),
        (lambda: TensorDataset(torch.ones(3, 2).cfloat().conj()), lambda: TensorDataset(torch.zeros(3, 2))),
        (lambda: ["a" * 9000], lambda: ["b" * 9000]),
        (lambda: Subset(DATA, [1, 2, 3]), lambda: Subset(DATA, [1, 3, 2])),
        (lambda: Subset({"a": 1}, ["a"]), lambda: Subset({"a": 1}, ["b"])),  # type: ignore[arg-type]
        (lambda: Subset(DATA, torch.arange(3)), lambda: Subset(DATA, torch.arange(4))),  # type: ignore[arg-type]
    ],
    ids=[
        *(
            "objects",
            "frames",
            "dicts",
            "dicts of different keys",
            "dicts inside",
            "sentences",
            "named tuples",
        ),
        *("data classes", "data classes inside", "arrays", "tensors", "conjugates", "texts"),
        *("indices", "names", "tensors of indices"),
    ],
)
def test_equal_data_has_equal_digests_and_other_data_others(one: Any, other: Any) -> None:
    assert digest(one()) == digest(one()) != digest(other())


def test_lists_of_other_classes_are_not_drawn_from() -> None:
    assert digest(Drawn(range(9))) == (None, {})


def test_records_with_equal_fields_have_equal_digests() -> None:
    """However they were made, and whatever is no data in them."""
    one, other = {"x": 1, "path": Path("/a/1.png")}, {"path": Path("/b/1.png"), "x": 1}
    assert digest([one]) == digest([other])
    assert digest([Record(1, object(), {"a", "b"}, 1)]) == digest([Record(1, object(), {"c"}, 2)])
    assert digest([{"x": 1, object(): 1}]) == digest([{"x": 1, object(): 2}])


def test_records_without_an_end_and_large_ones_have_digests() -> None:
    node: dict[str, Any] = {"x": 1}
    node["nodes"] = [node] * 10
    assert digest([node]) == digest([node])
    large = dict.fromkeys(range(1 << 16), 0)
    assert digest([large]) == (None, {"contents": "dict"})


def test_fields_that_may_be_caches_are_left_out() -> None:
    (_, filled), (_, empty) = digest([{"x": 1, "it": 1}, {"x": 2}]), digest([{"x": 1}, {"x": 2, "it": None}])
    assert filled == empty and list(filled) == ["contents", "contents['x']"]
    assert list(digest([{"it": 1}, {}])[1]) == ["contents"]


def _made_of_records(rank: int) -> tuple[list[str], str]:
    records = [{"number": number, "place": rank} for number in range(9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.auto_dataloader(records, batch_size=4, shuffle=False)
    with pytest.raises(idist.CollectiveMismatchError) as error:  # nothing says that the order is the same
        idist.auto_dataloader([{**one, "number": 0} for one in records], batch_size=4, shuffle=False)
    return [str(one.message) for one in caught], str(error.value)


def test_fields_of_this_rank_beside_a_number_that_shows_the_order_are_warned_of() -> None:
    for messages, error in on_ranks(_made_of_records):
        assert len(messages) == 1, messages
        assert "differ in contents['place']" in messages[0] and "contents['place']" in error
