from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import ignite_dist as idist
from ignite_dist.data.samplers import (
    BatchSamplerPart,
    DistributedProxySampler,
    EpochSampler,
    Shard,
    seeded_draws,
)

SIZE = 11
SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(SIZE)),
    "random": lambda: RandomSampler(range(SIZE)),
    "subset": lambda: SubsetRandomSampler([3, 5, 8, 9]),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.2, 0.3, 0.4], num_samples=7),
    "shorter than the world": lambda: SequentialSampler(range(2)),
    "empty": lambda: SubsetRandomSampler([]),
}


def _shares(sampler: Sampler[Any], num_replicas: int, epoch: int = 0) -> list[list[int]]:
    shares = []
    for rank in range(num_replicas):
        proxy = DistributedProxySampler(sampler, num_replicas=num_replicas, rank=rank)
        proxy.set_epoch(epoch)
        shares.append(list(proxy))
        assert len(shares[-1]) == len(proxy)
    return shares


def _interleaved(shares: list[list[int]]) -> list[int]:
    return [index for together in zip(*shares, strict=True) for index in together]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_shares_together_are_what_the_sampler_draws(name: str, num_replicas: int) -> None:
    sampler = SAMPLERS[name]()
    drawn = _interleaved(_shares(sampler, num_replicas))
    expected: list[int] = []
    while len(expected) < len(drawn):  # filled up from further passes until it divides
        number = len(expected) // max(1, len(sampler))
        expected += seeded_draws(SAMPLERS[name](), number * 2**32)
    assert drawn == expected[: -(-len(sampler) // num_replicas) * num_replicas]


@pytest.mark.parametrize("name", ["random", "subset", "weighted"])
def test_every_epoch_has_its_order_and_the_same_one_each_time(name: str) -> None:
    sampler = SAMPLERS[name]()
    epochs = [_shares(sampler, 2, epoch) for epoch in range(4)]
    assert epochs == [_shares(sampler, 2, epoch) for epoch in range(4)]
    assert len({str(shares) for shares in epochs}) > 1


def test_samplers_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(1234)
    random.seed(1234)
    before = torch.get_rng_state(), random.getstate()
    for make in SAMPLERS.values():
        _shares(make(), 2, epoch=5)
    list(EpochSampler(range(SIZE), num_replicas=2, rank=1, shuffle=True))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_epoch_of_more_bits_than_numpy_takes() -> None:
    class Numpys(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(np.random.permutation(6).tolist())

        def __len__(self) -> int:
            return 6

    for epoch in (2**32, 2**33 + 5):
        assert sorted(_interleaved(_shares(Numpys(), 2, epoch))) == list(range(6))


def test_the_global_random_state_does_not_matter() -> None:
    shares = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        shares.append(_shares(SAMPLERS["random"](), 2))
    assert shares[0] == shares[1]


def test_the_random_state_is_restored_when_a_sampler_raises() -> None:
    class Broken(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            torch.rand(3)
            raise LookupError("no data")

        def __len__(self) -> int:
            return 3

    before = torch.get_rng_state()
    with pytest.raises(LookupError, match="no data"):
        iter(DistributedProxySampler(Broken(), num_replicas=2, rank=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_indices_need_not_be_ints() -> None:
    class Names(Sampler[str]):
        def __iter__(self) -> Iterator[str]:
            return iter("abc")

        def __len__(self) -> int:
            return 3

    assert _interleaved(_shares(Names(), 2)) == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        ([1, 2], "list"),
        (DistributedSampler(range(4), num_replicas=2, rank=0), "already"),  # type: ignore[arg-type]
        (EpochSampler(range(4), num_replicas=2, rank=0), "already"),  # type: ignore[arg-type]
        (Sampler(), "length"),
    ],
)
def test_what_cannot_be_shared_out_is_a_type_error(sampler: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        DistributedProxySampler(sampler, num_replicas=2, rank=0)


def test_the_epoch_advances_until_somebody_sets_it() -> None:
    for sampler in (
        EpochSampler(range(4), num_replicas=2, rank=0),  # type: ignore[arg-type]
        DistributedProxySampler(SequentialSampler(range(4)), num_replicas=2, rank=0),
    ):
        sampler.advance_epoch()
        sampler.advance_epoch()
        assert sampler.epoch == 2
        sampler.set_epoch(7)
        sampler.advance_epoch()
        assert sampler.epoch == 7


def test_iterating_over_a_sampler_moves_no_epoch() -> None:
    """Workers of a data loader fetch ahead, so an empty sampler says nothing about the loader."""
    sampler = EpochSampler(range(4), num_replicas=2, rank=0)  # type: ignore[arg-type]
    assert list(sampler) == list(sampler)
    assert sampler.epoch == 0


def test_the_front_door_exports_it() -> None:
    assert idist.DistributedProxySampler is DistributedProxySampler


class _Stream(IterableDataset[int]):
    first = 0
    rank = "of the script"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + 4))


def test_settings_are_changed_through_the_object_around() -> None:
    """Attributes that the outer object has itself, such as ``rank``, are not forwarded."""
    sampler = DistributedProxySampler(WeightedRandomSampler([1.0] * 8, 4), 2, 0, batch_size=2)
    sampler.weights = torch.eye(8)[5].double()
    assert (list(sampler), sampler.weights[5]) == ([5, 5], 1)
    batches = BatchSamplerPart(BatchSampler(SequentialSampler(range(8)), 2, False), 2, 1)
    batches.batch_size = 8
    assert (list(batches), batches.batch_size) == ([[1, 3, 5, 7]], 8)
    stream = Shard(_Stream(), 2, 1)
    stream.first = 100
    assert (list(stream), stream.rank, stream.dataset.rank) == ([101, 103], 1, "of the script")
    stream.rank = 0
    stream.new = 3
    assert (list(stream), stream.dataset.rank) == ([100, 102], "of the script")
    assert not hasattr(stream.dataset, "new")
