"""A loader draws the same batches on any number of ranks, and goes on at the same batch."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from on_ranks import on_ranks, warned

SIZE = 23
DATA: Any = range(SIZE)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Batches(Sampler[list[int]]):
    """Buckets of different sizes, drawn from one of the global generators, at once or lazily."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own = (
            random.Random(1) if kind == "own" else np.random.default_rng(1) if kind == "numpy's own" else None
        )

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        if self.kind == "lazy":
            return self._lazily()
        order = list(range(SIZE))
        if self.kind == "eager":
            order = torch.randperm(SIZE).tolist()
        elif self.kind == "python":
            random.shuffle(order)
        elif self.kind == "numpy":
            np.random.shuffle(order)
        else:
            self.own.shuffle(order)  # type: ignore[union-attr]
        return iter([order[first : first + 4] for first in range(0, SIZE, 4)])

    def _lazily(self) -> Iterator[list[int]]:
        left = list(range(SIZE))
        while left:
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(min(4, len(left)))]


class Endless(Sampler[int]):
    """As mmengine's InfiniteSampler: has a length, and never ends."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return cycle(range(8))


class OwnShare(Sampler[int]):
    """As timm's and detectron2's samplers: draws the share of its rank."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self._rank, self._world_size = rank, num_replicas

    def __len__(self) -> int:
        return len(range(self._rank, SIZE - 1, self._world_size))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._rank, SIZE - 1, self._world_size))


class WithGenerator(Sampler[int]):
    """Has a generator as torch's samplers do: numpy's, or None for the order of the data set."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        raise NotImplementedError  # as some do that are for batches

    def __iter__(self) -> Iterator[int]:
        order = np.arange(SIZE) if self.generator is None else self.generator.permutation(SIZE)
        return iter(order.tolist())


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS: dict[str, Callable[[], Any]] = {
    "in order": lambda: idist.auto_dataloader(DATA, batch_size=6, shuffle=False),
    "shuffled": lambda: idist.auto_dataloader(DATA, batch_size=6, shuffle=True),
    "no divisor": lambda: idist.auto_dataloader(DATA, batch_size=5, shuffle=True),
    "drop_last": lambda: idist.auto_dataloader(DATA, batch_size=5, shuffle=True, drop_last=True),
    "generator": lambda: idist.auto_dataloader(DATA, batch_size=6, shuffle=True, generator=generator()),
    "seed": lambda: idist.auto_dataloader(DATA, batch_size=6, shuffle=True, seed=5),
    "sampler": lambda: idist.auto_dataloader(DATA, batch_size=6, sampler=SubsetRandomSampler(range(19))),
    "its generator": lambda: idist.auto_dataloader(
        DATA, batch_size=6, sampler=RandomSampler(DATA, generator=generator())
    ),
    "numpy's generator": lambda: idist.auto_dataloader(
        DATA, batch_size=6, sampler=WithGenerator(np.random.default_rng(1))
    ),
    "no generator": lambda: idist.auto_dataloader(DATA, batch_size=6, sampler=WithGenerator(None)),
    "weights": lambda: idist.auto_dataloader(
        DATA, batch_size=6, sampler=WeightedRandomSampler(torch.arange(1.0, SIZE + 1), 20)
    ),
    "distributed": lambda: idist.auto_dataloader(
        range(24),
        batch_size=6,
        sampler=DistributedSampler(range(24), **idist.sampler_kwargs()),  # type: ignore[arg-type]
    ),
    "batch sampler": lambda: idist.auto_dataloader(
        DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, False)
    ),
    "sampler of batches": lambda: idist.auto_dataloader(
        torch.arange(SIZE),  # type: ignore[arg-type]
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(DATA), 5, False),
    ),
    **{
        f"{kind} batches": lambda kind=kind: idist.auto_dataloader(DATA, batch_sampler=Batches(kind))  # type: ignore[misc]
        for kind in ("eager", "lazy", "python", "numpy", "own", "numpy's own")
    },
    "taken over": lambda: idist.auto_dataloader(DataLoader(DATA, batch_size=5, shuffle=True)),
    "workers": lambda: idist.auto_dataloader(
        DATA, batch_size=6, shuffle=True, num_workers=1, multiprocessing_context="fork"
    ),
    "workers that persist": lambda: idist.auto_dataloader(
        DATA,
        batch_size=6,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=True,
    ),
    "stream": lambda: idist.auto_dataloader(Stream(), batch_size=6, shard=True),
}
IN_ORDER = ("in order", "no generator", "batch sampler", "sampler of batches", "distributed", "stream")
NUM_EPOCHS = 2


def make(kind: str) -> Any:
    idist.seed_everything(3)
    return KINDS[kind]()


def batches(loader: Any) -> Iterator[list[int]]:
    return (batch.tolist() for batch in loader)


def drawn(_: int, kind: str) -> list[list[int]]:
    loader = make(kind)
    return [batch for _ in range(NUM_EPOCHS) for batch in batches(loader)]


def merged(by_rank: list[list[list[int]]]) -> list[list[int]]:
    """The batches that the ranks have drawn together. A stream has no last batch on some ranks."""
    longest = max(by_rank, key=len)
    assert all(len(longest) - len(parts) in (0, NUM_EPOCHS) for parts in by_rank)
    if any(len(parts) < len(longest) for parts in by_rank):  # a stream: no last batch on some ranks
        per_epoch = len(longest) // NUM_EPOCHS
        by_rank = [
            parts
            if len(parts) == len(longest)
            else [
                part
                for epoch in range(NUM_EPOCHS)
                for part in [*parts[epoch * (per_epoch - 1) : (epoch + 1) * (per_epoch - 1)], []]
            ]
            for parts in by_rank
        ]
    return [sorted(set(chain(*parts))) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_are_those_of_one_process(kind: str) -> None:
    alone = [sorted(set(batch)) for batch in drawn(0, kind)]
    for world_size in (2, 3):
        assert merged(on_ranks(drawn, kind, world_size=world_size)) == alone
    if kind not in IN_ORDER:
        half = len(alone) // 2
        assert alone[:half] != alone[half:], "each epoch has an order of its own"


def interrupted(_: int, kind: str, paths: dict[int, str]) -> list[list[list[int]]]:
    """For each number of batches, what a run has drawn before it stopped and wrote its checkpoint."""
    runs = []
    for num_batches, path in paths.items():
        loader, seen = make(kind), []
        for batch in chain.from_iterable(batches(loader) for _ in range(NUM_EPOCHS)):
            seen.append(batch)
            if len(seen) == num_batches:
                break
        idist.save_checkpoint(path, loader=loader)
        runs.append(seen)
    return runs


def resumed(_: int, kind: str, paths: list[str]) -> list[list[list[int]]]:
    """For each checkpoint, what a run draws from there."""
    runs = []
    for path in paths:
        idist.seed_everything(99)
        loader = KINDS[kind]()
        idist.load_checkpoint(path, loader=loader)
        runs.append([batch for _ in range(NUM_EPOCHS) for batch in batches(loader)])
    return runs


def run(function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return [function(0, *args)] if world_size == 1 else on_ranks(function, *args, world_size=world_size)


def first_of(parts: list[list[list[int]]], num_batches: int) -> list[list[int]]:
    return [sorted(set(chain(*batch))) for batch in islice(zip(*parts, strict=False), num_batches)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stream"])
def test_a_run_that_was_stopped_anywhere_goes_on_with_the_next_batch(kind: str, tmp_path: Any) -> None:
    """Stopped on 1, 2 or 3 ranks, resumed on 1, 2 or 3: by other processes, which do all runs in turn."""
    alone = [sorted(set(batch)) for batch in drawn(0, kind)]
    written: dict[int, list[tuple[int, int, str]]] = {1: [], 2: [], 3: []}  # by the ranks that go on
    for before in (1, 2, 3):
        paths = {stop: str(tmp_path / f"{before}-{stop}.pt") for stop in range(1, len(alone))}
        by_rank = run(interrupted, kind, paths, world_size=before)
        for (stop, path), *seen in zip(paths.items(), *by_rank, strict=True):
            assert first_of(seen, stop) == alone[:stop]
            written[1 + (before + stop) % 3].append((before, stop, path))
    for after, runs in written.items():
        by_rank = run(resumed, kind, [path for _, _, path in runs], world_size=after)
        for (before, stop, _), *rest in zip(runs, *by_rank, strict=True):
            found = first_of(rest, len(alone) - stop)
            assert found == alone[stop:], f"{before} ranks, {stop} batches, then {after} ranks"


def of_growing_data(_: int) -> list[tuple[int, list[list[int]]]]:
    data = list(range(8))
    loader: Any = idist.auto_dataloader(data, batch_size=4, shuffle=True, seed=0)
    found = []
    for number_of_batches in (2, 2, 4):
        found.append((len(loader), [batch.tolist() for batch in islice(loader, number_of_batches)]))
        data += range(len(data), len(data) + 4)
    return found


def test_a_data_set_may_grow_between_two_passes() -> None:
    """As a replay buffer does. The second pass is left before its end."""
    with pytest.warns(UserWarning, match="was left after 2 batches"):
        alone = of_growing_data(0)
    assert [length for length, _ in alone] == [2, 3, 4]
    for (length, wanted), *by_rank in zip(alone, *on_ranks(of_growing_data), strict=True):
        assert [one[0] for one in by_rank] == [length] * len(by_rank)
        drawn_together = [sorted(chain(*parts)) for parts in zip(*(one[1] for one in by_rank), strict=True)]
        assert drawn_together == [sorted(batch) for batch in wanted]


# --- the order -----------------------------------------------------------------------------------------


def orders(_: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seed in (1, 2):
        idist.seed_everything(seed)
        found[f"seeded {seed}"] = list(batches(idist.auto_dataloader(DATA, batch_size=SIZE, shuffle=True)))
        torch.manual_seed(100 * seed + idist.get_rank())
        found[f"by rank {seed}"] = list(batches(idist.auto_dataloader(DATA, batch_size=SIZE, shuffle=True)))
        loader = idist.auto_dataloader(DATA, batch_size=SIZE, shuffle=True, generator=generator(seed))
        found[f"generator {seed}"] = list(batches(loader))
    return found


def test_the_order_depends_on_the_seed_and_all_ranks_agree() -> None:
    alone, found = orders(0), on_ranks(orders)
    for name in alone:
        assert sorted(chain(*(one[name][0] for one in found))) == list(range(SIZE)), name
        if not name.startswith("by rank"):
            assert [list(chain(*zip(*(one[name][0][:11] for one in found), strict=True)))] == [
                alone[name][0][:22]
            ]
    for name in ("seeded", "by rank", "generator"):
        assert alone[f"{name} 1"] != alone[f"{name} 2"]
        assert found[0][f"{name} 1"] != found[0][f"{name} 2"]


def test_alone_the_types_that_scripts_look_at_are_torchs() -> None:
    assert type(idist.auto_dataloader(DATA, shuffle=True).sampler) is RandomSampler
    assert type(idist.auto_dataloader(DATA).sampler) is SequentialSampler
    own = SubsetRandomSampler([1, 2])
    assert idist.auto_dataloader(DATA, sampler=own).sampler is own


def own_shares(_: int) -> list[int]:
    loader = idist.auto_dataloader(DATA, batch_size=4, sampler=OwnShare(**idist.sampler_kwargs()))
    with pytest.raises(ValueError, match="OwnShare was made for rank 0 of 7"):
        idist.auto_dataloader(DATA, batch_size=4, sampler=OwnShare(0, 7))
    return [item for batch in batches(loader) for item in batch]


def test_a_sampler_that_draws_the_share_of_its_rank_is_not_split_again() -> None:
    assert own_shares(0) == list(range(SIZE - 1))
    assert sorted(chain(*on_ranks(own_shares))) == list(range(SIZE - 1))


def endless(_: int) -> list[list[int]]:
    return list(islice(batches(idist.auto_dataloader(range(8), batch_size=4, sampler=Endless())), 5))  # type: ignore[arg-type]


def test_a_sampler_that_never_ends_is_drawn_from_as_far_as_it_is_needed() -> None:
    assert len(endless(0)) == 5
    first, second = on_ranks(endless)
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == endless(0)


# --- what must agree -----------------------------------------------------------------------------------


def loader_of(sampler: Any, batch_size: int | None = 2) -> Any:
    return idist.auto_dataloader(list(range(8)), batch_size=batch_size, sampler=sampler)


class Transformed(Dataset[int]):
    def __init__(self, dataset: Any) -> None:
        self.inner = [dataset]

    def __len__(self) -> int:
        return len(self.inner[0])

    def __getitem__(self, index: int) -> int:
        return int(self.inner[0][index])


class Kept(Sampler[Any]):
    """A sampler or batch sampler with an order that it was given."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def differing(_: int) -> list[str]:
    rank, messages = idist.get_rank(), []
    idist.seed_everything(0)  # per rank
    first, _ = random_split(DATA, [20, 3])
    _, second = random_split(DATA, [20, 3])
    whole: list[Any] = list(range(8))
    records = [{"x": float(number), "name": "a"} for number in range(100)]
    for wrong in (
        lambda: idist.auto_dataloader(second, batch_size=2, shuffle=False),
        lambda: idist.auto_dataloader(first, batch_size=2, exact=True),
        lambda: idist.auto_dataloader(idist.split_by_rank(whole), batch_size=4, exact=True),
        lambda: idist.auto_dataloader(whole[rank:], batch_size=4, shuffle=True),
        lambda: idist.auto_dataloader(whole, batch_size=4 + 2 * rank, shuffle=True),
        lambda: idist.auto_dataloader(whole, batch_size=4, shuffle=True, seed=rank),
        lambda: idist.auto_dataloader(whole, batch_size=4, shuffle=False, exact=rank == 0),
        lambda: loader_of(SubsetRandomSampler([rank, 2, 3])),
        lambda: loader_of(SubsetRandomSampler(range(3 + rank))),
        lambda: loader_of(WeightedRandomSampler([1.0 + rank, 2.0], 4)),
        lambda: loader_of(RandomSampler(whole, replacement=rank == 0)),
        lambda: loader_of(DistributedSampler(whole, 2, rank, seed=rank)),
        lambda: loader_of(DistributedSampler(whole, 2, rank, shuffle=rank == 0)),
        lambda: loader_of(BatchSampler(SequentialSampler(whole), 2 + 2 * rank, drop_last=False), None),
        lambda: loader_of(torch.randperm(8).tolist()),
        lambda: loader_of(torch.randperm(8)),
        lambda: loader_of(Kept(torch.randperm(8).tolist())),
        lambda: loader_of(Kept(np.array([2.5, 1.5]) + rank)),
        lambda: loader_of(Kept(whole[rank::2])),
        lambda: idist.auto_dataloader(whole, batch_sampler=torch.randperm(8).view(4, 2).tolist()),
        lambda: idist.auto_dataloader(whole, batch_sampler=Kept(torch.randperm(8).view(4, 2).tolist())),
        lambda: idist.auto_dataloader(Transformed(second), batch_size=2, shuffle=False),
        lambda: idist.auto_dataloader(Transformed(Transformed(first)), batch_size=2, exact=True),
        lambda: idist.auto_dataloader(ConcatDataset([first, second]), batch_size=2, shuffle=False),
        lambda: idist.auto_dataloader(random.sample(records, 100), batch_size=10, shuffle=False),
        lambda: idist.auto_dataloader(idist.split_by_rank(records), batch_size=10, shuffle=False),
    ):
        with pytest.raises(CollectiveMismatchError) as info:
            wrong()
        messages.append(str(info.value))
    fine = idist.auto_dataloader(Subset(DATA, [1, 2, 3]), batch_size=2, shuffle=False)
    assert idist.all_reduce(sum(map(len, fine))) == 4  # of the last batch each rank has the one item
    return messages


def test_what_differs_is_said_on_every_rank_before_anything_is_drawn() -> None:
    first, second = on_ranks(differing)
    assert first == second
    wanted = ("random_split", "random_split", "whole data set", "number of samples", "batch_size", "seed")
    wanted += ("exact", *["draws of the sampler"] * 14, *["random_split"] * 3)
    wanted += ("contents['x']", "whole data set")
    for message, text in zip(first, wanted, strict=True):
        assert text in message and "rank 0: " in message and "rank 1: " in message


class Files(Transformed):
    def __init__(self, names: Any) -> None:
        super().__init__(range(len(names)))
        self.names = names


def differing_attributes(_: int) -> list[str]:
    rank, names = idist.get_rank(), [f"{number}.png" for number in range(9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for same in ([f"/data/of/{rank}/{name}" for name in names], [(name, 1) for name in names], names):
            idist.auto_dataloader(Files(same), batch_size=3, shuffle=True)
        looked_at = Files(names)
        looked_at.place, looked_at.cache = (rank, 2), [None] * 9  # type: ignore[attr-defined]
        if rank == 0:
            looked_at.cache[0] = "a sample"  # type: ignore[attr-defined]
        idist.auto_dataloader(looked_at, batch_size=3, shuffle=True)
        assert not caught
        for others in (names[rank:] + names[:rank], [(name, rank) for name in names], torch.ones(9) * rank):
            idist.auto_dataloader(Files(others), batch_size=3, shuffle=True)
        records = [{"name": name, "cache": None, "place": object()} for name in names]
        records[0]["cache"] = [None, 1][rank]  # rank 1 has looked at this sample
        idist.auto_dataloader(Files(records), batch_size=3, shuffle=True)
        assert len(caught) == 3
        idist.auto_dataloader(Files(records[rank:] + records[:rank]), batch_size=3, shuffle=True)
    return [str(one.message) for one in caught]


def test_what_a_data_set_has_is_compared_and_a_warning() -> None:
    for found in on_ranks(differing_attributes):
        assert len(found) == 4 and all("ranks 0-1 differ in Files.names" in text for text in found)
        assert "Files.names['name']: " in found[3]


class Words(Transformed):
    """A data set of the numbers of words, with attributes that may differ by rank."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(range(5))
        self.__dict__.update(attributes)


class StreamOfWords(Stream):
    def __init__(self, words: list[str]) -> None:
        self.words = words


def words_by_rank(_: int) -> list[str]:
    rank, words = idist.get_rank(), ["cat", "dog", "owl"]
    other = words[rank:] + words[:rank]  # the order of a set in another process
    fine: list[dict[str, Any]] = [
        {"ids": {word: number for number, word in enumerate(words)}, "classes": words},
        {"of_rank": {"rank": rank, "size": 2}, "place": [rank, 1 - rank], "folders": [f"/data/{rank}", "/"]},
        {"seeds": {"seed": 1000 + rank}, "counts": {"hits": rank}, "cache": {words[rank]: "text"}},
        {"seen": words[: 1 + rank], "nothing": words if rank else [], "counter": rank, "name": words[rank]},
        {"made": dict.fromkeys(other, 1), "set": set(words), "objects": [object(), words[rank]]},
        {"texts": ["a" * 1000 + word for word in other]},
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for attributes in fine:
            idist.auto_dataloader(Words(**attributes), batch_size=2, shuffle=True)
        assert not caught, caught[0]
        for attributes in (
            {"ids": {word: number for number, word in enumerate(other)}},
            {"ids": dict(enumerate(other))},
            {"ids": other},
            {"ids": (*other, None, b"", 1.5, True)},
        ):
            idist.auto_dataloader(Transformed(Words(**attributes)), batch_size=2, shuffle=True)
        idist.auto_dataloader(StreamOfWords(other), batch_size=2, shard=True)
    return [str(one.message) for one in caught]


def test_words_in_another_order_are_a_warning_and_what_may_differ_is_none() -> None:
    for *found, of_stream in on_ranks(words_by_rank):
        assert len(found) == 4 and all("the same words in Words.ids (1), but" in text for text in found)
        assert "the same words in StreamOfWords.words, but" in of_stream and "sorted(set(" in of_stream


class Twice(Kept):
    """Each order of another sampler is for two epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch // 2)


def test_a_sampler_sets_the_epoch_of_samplers_in_its_own_attributes() -> None:
    inner = DistributedSampler(DATA, 1, 0)
    idist.auto_dataloader(DATA, batch_size=2, sampler=Twice(inner)).set_epoch(5)
    assert inner.epoch == 2


def whole_passes(_: int) -> list[Any]:
    loaders = [
        idist.auto_dataloader(range(12), batch_size=4, shuffle=True, seed=1),
        idist.auto_dataloader(Lengthy(), batch_size=4, shard=True),
    ]
    found: list[Any] = []
    for loader in loaders:
        epochs = []
        for _ in range(2):
            batches = [batch.tolist() for _, batch in zip(range(len(loader)), loader, strict=False)]
            epochs.append((batches, loader.position()["epoch"], loader.position()["batches"]))
        found.append(epochs)
    return found


class Lengthy(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return 12


def test_a_pass_of_all_batches_is_an_epoch_on_each_rank() -> None:
    for (first, second), of_stream in on_ranks(whole_passes):
        assert first[0] != second[0] and (first[1:], second[1:]) == ((1, 0), (2, 0))
        assert [position for _, *position in of_stream] == [[1, 0], [2, 0]]


class OfMegatron(Sampler[Any]):
    """Batches of this rank, whose names of the rank and of the number of ranks are its own."""

    def __init__(self, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(2 * self.data_parallel_rank, 8, 2 * self.data_parallel_size):
            yield [start, start + 1]

    def __len__(self) -> int:
        return 8 // (2 * self.data_parallel_size)


def shares(_: int) -> list[list[int]]:
    rank, whole = idist.get_rank(), list(range(8))
    inner = DistributedSampler(whole, 2, rank, shuffle=False)
    return [
        [number for batch in loader for number in batch.tolist()]
        for loader in (
            idist.auto_dataloader(whole, batch_sampler=OfMegatron(rank, 2)),
            loader_of(Kept(inner)),
        )
    ]


def test_samplers_of_a_rank_are_known_by_other_names_too() -> None:
    first, second = on_ranks(shares)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(8))


def test_batches_keep_their_order() -> None:
    with pytest.warns(UserWarning, match="in_order=False is left out"):
        loader = idist.auto_dataloader(DATA, batch_size=2, shuffle=False, num_workers=1, in_order=False)
    assert loader.in_order


def on_rank_0_only(_: int) -> str:
    with pytest.raises(CollectiveMismatchError) as info:
        if idist.get_rank() == 0:
            idist.auto_dataloader(DATA, batch_size=2, shuffle=False)
        else:
            idist.barrier()
    return str(info.value)


def test_a_loader_that_is_made_on_some_ranks_only_is_an_error_on_all() -> None:
    for message in on_ranks(on_rank_0_only):
        assert "different calls" in message


def test_other_loaders_are_told_what_to_do() -> None:
    class Mine(DataLoader[Any]):
        pass

    with pytest.raises(TypeError, match=r"Mine is another class.*Pass its data set"):
        idist.auto_dataloader(Mine(DATA))
    with pytest.raises(TypeError, match="batch_size must be left out"):
        idist.auto_dataloader(DataLoader(DATA), batch_size=3)
    with pytest.raises(ValueError, match="batch_size must be"):
        idist.auto_dataloader(DATA, batch_size=0)


# --- the gradients ---


def trained(_: int) -> list[float]:
    """Parameters after batches of 8, 8 and 7 samples, which 2 or 3 ranks do not divide."""
    torch.manual_seed(1)
    x = torch.randn(SIZE, 3, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
    model = idist.auto_model(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.1))
    for _ in range(2):
        for (x, y), sync in idist.accumulate_gradients(
            loader, model, steps=1, weight=lambda batch: len(batch[0])
        ):
            with sync:
                torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_weights_parts_of_different_sizes_train_as_one_process(world_size: int) -> None:
    alone = trained(0)
    for parameters in on_ranks(trained, world_size=world_size):
        assert parameters == pytest.approx(alone, rel=1e-9)


# --- the position --------------------------------------------------------------------------------------


def shuffled() -> Any:
    torch.manual_seed(1)
    return idist.auto_dataloader(DATA, batch_size=4, shuffle=True)


def rest_after(loader: Any) -> list[list[int]]:
    again = shuffled()
    again.resume(loader.position(), is_same_rank=True)
    return list(batches(again))


def stops(loader: Any, how: str) -> int:
    """Leave a pass in some way. Returns the number of batches that the loop has got."""
    if how == "break":
        for number, _ in enumerate(loader, 1):
            if number == 2:
                break
        return 2
    if how == "return":
        return next(number for number, _ in enumerate(loader, 1) if number == 3)
    if how == "exception":
        with pytest.raises(KeyboardInterrupt):
            for number, _ in enumerate(loader):
                if number == 1:
                    raise KeyboardInterrupt
        return 2
    if how == "next":
        next(iter(loader))
        return 1
    if how == "islice":
        return len(list(islice(loader, 3)))
    if how == "progress":
        for number, _ in enumerate(idist.progress_bar(loader, disable=True), 1):
            if number == 2:
                break
        return 2
    if how == "zip":
        return len(list(zip(range(2), loader, strict=False)))
    if how == "a look within":
        for number, _ in enumerate(loader, 1):
            next(iter(loader))
            if number == 4:
                break
        return 4
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how", ["break", "return", "exception", "next", "islice", "progress", "zip", "a look within"]
)
def test_the_position_is_the_number_of_batches_that_the_loop_has_got(how: str) -> None:
    whole = list(batches(shuffled()))
    loader = shuffled()
    num_batches = stops(loader, how)
    assert loader.position()["batches"] == num_batches
    assert rest_after(loader) == whole[num_batches:]


def test_a_look_does_not_use_up_a_loaded_position() -> None:
    whole = list(batches(shuffled()))
    loader = shuffled()
    stops(loader, "break")
    again = shuffled()
    again.resume(loader.position(), is_same_rank=True)
    assert next(batches(again)) == whole[2]
    assert again.position()["batches"] == 3
    assert list(batches(again)) == whole[2:]
    assert len(list(again)) == len(whole)  # and then a whole epoch


def test_a_pass_that_draws_the_same_batches_again_says_so_once() -> None:
    def steps() -> list[list[int]]:
        loader = shuffled()
        next(iter(loader))  # a look is none
        seen = []
        for _ in range(3):
            for number, batch in enumerate(loader, 1):  # where idist. warns
                seen.append(batch.tolist())
                if number == 2:
                    break
        return seen

    found, (message,) = warned(steps)
    assert found[:2] == found[2:4]
    assert "left after 2 batches" in message and "set_epoch" in message and "iter(loader)" in message

    def accumulated() -> None:
        loader, model = shuffled(), torch.nn.Linear(1, 1)
        for _ in range(2):
            # accumulate_gradients fetches one batch more. The warning points at the line of the loop.
            for number, _ in enumerate(idist.accumulate_gradients(loader, model, 2), 1):
                if number == 2:
                    break

    _, (message,) = warned(accumulated)
    assert "left after 2 batches" in message

    def epochs() -> list[list[int]]:
        loader = shuffled()
        seen = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            seen += list(islice(batches(loader), 2))
        return seen

    found, messages = warned(epochs)
    assert found[:2] != found[2:4] and messages == []


def test_single_batches_of_new_passes_are_the_same_batch_and_that_is_said_once() -> None:
    """As for a second loader, of unlabelled data, in each step of a loop over another one."""

    def steps(num_steps: int, loader: Any) -> list[list[int]]:
        return [next(iter(loader)).tolist() for _ in range(num_steps)]  # where idist. warns

    found, (message,) = warned(lambda: steps(5, shuffled()))
    assert all(batch == found[0] for batch in found)
    assert "left after 1 batch:" in message and "batches = iter(loader) once, then next(batches)" in message

    def kept() -> None:
        loader = shuffled()
        for _ in range(5):
            batches = iter(loader)  # idist. warns, although the last one is still there
            next(batches)

    _, (message,) = warned(kept)
    assert "left after 1 batch:" in message

    def looks() -> None:
        loader = shuffled()
        steps(2, loader)  # one for a picture, one for the first pass of lazy layers
        for _ in range(2):
            for number, _ in enumerate(loader):
                steps(1 + number % 2, loader)  # idist.: the loop goes on
        for epoch in range(2, 5):
            loader.set_epoch(epoch)
            steps(1, loader)
        batches = iter(loader)
        for _ in range(3):
            next(batches)

    _, messages = warned(looks)
    assert messages == []
    _, messages = warned(lambda: steps(3, idist.auto_dataloader(DATA, batch_size=4, shuffle=False)))
    assert messages == [], "one process draws the same batch in order too"


def loads_what_does_not_fit(_: int, path: str) -> list[str]:
    saved = idist.auto_dataloader(DATA, batch_size=4, shuffle=True, seed=1)
    deque(islice(saved, 5), maxlen=0)
    model = torch.nn.Linear(1, 1)
    idist.save_checkpoint(path, model=model, loader=saved)
    others = [
        idist.auto_dataloader(range(24), batch_size=4, shuffle=True),
        idist.auto_dataloader(Subset(DATA, range(SIZE)), batch_size=4, shuffle=True),
        idist.auto_dataloader(DATA, batch_size=4, sampler=RandomSampler(DATA)),
        idist.auto_dataloader(DATA, batch_size=3, shuffle=True),
        idist.auto_dataloader(range(8), batch_size=4, shuffle=True),
        idist.auto_dataloader(DATA, batch_size=4, shuffle=False),
    ]
    messages = []
    torch.nn.init.zeros_(model.weight)
    for other in others:
        with pytest.raises((ValueError, idist.RankFailedError)) as info:
            idist.load_checkpoint(path, model=model, loader=other)
        messages.append(str(info.value))
        assert float(model.weight) == 0 and other.position()["batches"] == 0, "nothing is changed"
    return messages


def test_a_checkpoint_of_another_loader_is_an_error_on_every_rank_that_changes_nothing(tmp_path: Any) -> None:
    first, second = on_ranks(loads_what_does_not_fit, str(tmp_path / "run.pt"))
    differ = ("number of samples", "indices", "sampler", "no whole number of batches", "number of samples")
    for message, of_rank_1, text in zip(first, second, (*differ, "shuffle"), strict=True):
        assert text in message and text in of_rank_1
