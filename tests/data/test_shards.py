"""Shares of streams by rank and worker, and what a loader of ``auto_dataloader`` makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, default_collate

import ignite_dist as idist
from ignite_dist.data.samplers import DistributedProxySampler, Shard, ShardLoader, seeded_draws

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


def loaders(
    size: int, num_replicas: int, num_workers: int, drop_last: bool, batch_size: int | None
) -> list[ShardLoader]:
    """The loaders of all ranks, as ``auto_dataloader(shard=True)`` makes them."""
    settings: dict[str, Any] = {"num_workers": num_workers, "batch_size": None}
    if num_workers:
        settings["multiprocessing_context"] = "fork"
    if batch_size is not None:
        settings["collate_fn"] = default_collate
    shards = [
        Shard(Stream(size), num_replicas, rank, drop_last, batch_size, is_batched=batch_size is not None)
        for rank in range(num_replicas)
    ]
    return [ShardLoader(shard, **settings) for shard in shards]


def numbers_of(batches: list[Any]) -> list[list[int]]:
    return [torch.as_tensor(batch).view(-1).tolist() for batch in batches]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_each_batch_is_the_one_of_one_process_with_any_number_of_workers(
    num_workers: int, drop_last: bool
) -> None:
    for size, num_replicas, batch_size in ((0, 2, 4), (1, 2, 4), (5, 3, 3), (23, 2, 7), (24, 3, None)):
        total = batch_size or num_replicas
        wanted = [list(range(size))[start : start + total] for start in range(0, size, total)]
        if drop_last:
            wanted = [batch for batch in wanted if len(batch) == total]
        for rank, loader in enumerate(loaders(size, num_replicas, num_workers, drop_last, batch_size)):
            parts = [batch[rank::num_replicas] for batch in wanted]
            found = numbers_of(list(loader))
            assert found == [part for part in parts if part]
            assert len(loader) == len(found)
            assert len(loader.dataset) == sum(map(len, found))  # type: ignore[arg-type]


def test_whole_rounds_are_the_same_number_on_every_rank_and_draw_nothing_twice() -> None:
    for size in range(12):
        shares = [list(Shard(Stream(size), 3, rank, drop_last=True)) for rank in range(3)]
        assert sorted(chain(*shares)) == list(range(size // 3 * 3))
        assert {len(share) for share in shares} == {size // 3}


def _numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def _shared(_: int) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"batch_size": 4, "drop_last": True}
    forked = {"num_workers": 6, "multiprocessing_context": "fork"}
    stream = idist.auto_dataloader(Stream(101), shard=True, **kwargs, **forked)
    workers = {
        number: idist.auto_dataloader([1], num_workers=number).num_workers for number in (0, 1, 2, 3, 5)
    }
    with pytest.raises(ValueError, match="num_workers"):
        idist.auto_dataloader([1], num_workers=-1)
    return {
        "stream": _numbers(stream),
        "batches": len(stream),
        "data set": _numbers(idist.auto_dataloader(range(23), **kwargs)),  # type: ignore[arg-type]
        "sampler": _numbers(idist.auto_dataloader(range(23), sampler=Odd(23), **kwargs)),  # type: ignore[arg-type]
        "few": _numbers(idist.auto_dataloader(range(2), batch_size=3, drop_last=True)),  # type: ignore[arg-type]
        "empty": _numbers(idist.auto_dataloader([], shuffle=True)),  # type: ignore[arg-type]
        "workers": workers,
    }


class Odd(Sampler[int]):
    """Draws each number once, in an order of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


def test_drop_last_reaches_the_sampler() -> None:
    found = idist.spawn("gloo", _shared, nproc_per_node=3)
    for name, num_batches in {"stream": 25, "data set": 5, "sampler": 5, "few": 0}.items():
        shares = [one[name] for one in found]
        assert [len(share) for share in shares] == [num_batches] * 3, name
        for parts in zip(*shares, strict=True):
            assert sorted(len(set(part)) for part in parts) == [1, 1, 2], f"{name}: no batch of four"
    assert {one["batches"] for one in found} == {25}
    assert all(one["few"] == [] and one["empty"] == [] for one in found)
    assert [one["workers"] for one in found] == [{0: 0, 1: 1, 2: 1, 3: 1, 5: 2}] * 3


def test_without_drop_last_the_sampler_repeats_what_is_missing() -> None:
    sampler = DistributedProxySampler(Odd(5), num_replicas=2, rank=1)
    assert list(sampler) == [3, 1, 4]
    assert list(DistributedProxySampler(Odd(5), num_replicas=2, rank=1, drop_last=True)) == [3, 1]
    assert len(DistributedProxySampler(Odd(5), num_replicas=2, rank=1, drop_last=True)) == 2
    assert list(DistributedProxySampler(Odd(1), num_replicas=2, rank=0, drop_last=True)) == []


def test_alone_an_empty_data_set_is_an_empty_loader() -> None:
    for kwargs in (
        {"shuffle": True},
        {"shuffle": False},
        {},
        {"shuffle": True, "batch_size": 4, "drop_last": True},
    ):
        loader = idist.auto_dataloader([], **kwargs)  # type: ignore[arg-type]
        assert isinstance(loader, DataLoader)
        assert (len(loader), list(loader)) == (0, [])
    loader = idist.auto_dataloader([1, 2, 3], shuffle=True)  # type: ignore[arg-type]
    assert isinstance(loader.sampler, RandomSampler)

    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    assert idist.auto_dataloader(Endless(), sampler=Odd(3), batch_size=3).dataset is not None


# --- samplers that draw from the global generators -------------------------------------------------------


class Drawing(Sampler[int]):
    """Draws by one of the global generators."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[int]:
        draw = {
            "random": lambda: random.randrange(1000),
            "numpy": lambda: int(np.random.randint(1000)),
            "numpy's normal": lambda: int(1000 * np.random.standard_normal()),  # which keeps one for later
            "torch": lambda: int(torch.randint(1000, ())),
        }[self.name]
        return iter([draw() for _ in range(9)])

    def __len__(self) -> int:
        return 9


NAMES = ("random", "numpy", "numpy's normal", "torch")


def _disturb(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    np.random.standard_normal(seed % 2)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_draws_the_same_indices(name: str) -> None:
    def draw(rank: int, epoch: int) -> list[int]:
        _disturb(100 + rank)
        sampler = DistributedProxySampler(Drawing(name), num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        return list(sampler)

    for epoch in (0, 1, 2**40):
        assert draw(0, epoch) == draw(1, epoch) == draw(2, epoch)
    assert draw(0, 0) != draw(0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_global_generators_go_on_as_if_nothing_had_been_drawn(name: str) -> None:
    def after(draws: bool) -> list[float]:
        _disturb(7)
        if draws:
            list(DistributedProxySampler(Drawing(name), num_replicas=2, rank=1))
        return [random.random(), random.gauss(0, 1), *np.random.standard_normal(3), float(torch.rand(()))]

    assert after(draws=True) == after(draws=False)


def test_generators_are_restored_after_an_exception_and_others_than_numpys_usual_one_are_left_alone() -> None:
    class Broken(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            random.random(), np.random.rand(), torch.rand(2)
            raise LookupError

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.raises(LookupError):
        list(seeded_draws(Broken(), 3))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1][1].tolist()  # type: ignore[index]
    assert torch.get_rng_state().equal(before[2])
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        list(seeded_draws(Drawing("torch"), 3))
        assert np.random.rand() == np.random.Generator(np.random.PCG64(5)).random()
    finally:
        np.random.set_bit_generator(usual)
