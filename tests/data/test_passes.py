"""Passes over loaders that go on where another loader has stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

import ignite_dist as idist
from ignite_dist.data.passes import check_resumable
from ignite_dist.values.random_states import RandomStates
from on_ranks import on_ranks

SIZE = 23


class Noisy(Dataset[torch.Tensor]):
    """Draws from the global generators for each sample, and remembers which were fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor([float(index), torch.rand(()).item(), random.random()])


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (number + torch.rand(()).item() for number in range(SIZE))


class Shuffled(Sampler[int]):
    """Draws from Python's generator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SIZE), SIZE))


class Pairs(Sampler[list[int]]):
    def __len__(self) -> int:
        return SIZE // 2

    def __iter__(self) -> Iterator[list[int]]:
        return ([2 * number, 2 * number + 1] for number in range(SIZE // 2))


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


KINDS: dict[str, Any] = {
    "shuffled": lambda: idist.auto_dataloader(Noisy(), batch_size=4, shuffle=True),
    "in order": lambda: idist.auto_dataloader(Noisy(), batch_size=4, drop_last=True),
    "single samples": lambda: idist.auto_dataloader(Noisy(), batch_size=None, shuffle=True),
    "generator": lambda: idist.auto_dataloader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "sampler with a generator": lambda: idist.auto_dataloader(
        Noisy(), batch_size=4, sampler=RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1))
    ),
    "own sampler": lambda: idist.auto_dataloader(Noisy(), batch_size=4, sampler=Shuffled()),
    "distributed": lambda: idist.auto_dataloader(
        Noisy(), batch_size=4, sampler=DistributedSampler(range(SIZE), 1, 0)
    ),
    "batch sampler": lambda: idist.auto_dataloader(Noisy(), batch_sampler=Pairs()),
    "stream": lambda: idist.auto_dataloader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("num_batches", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_the_pass_and_the_next_pass_are_the_same(kind: str, num_batches: int) -> None:
    """With the random numbers of the data set and of the training loop."""
    seed()
    loader = KINDS[kind]()
    list(loader)
    drawn: list[torch.Tensor] = []
    for number, batch in enumerate(loader):
        torch.rand(2), random.random()
        drawn.append(batch)
        if number + 1 == num_batches:
            position, states = loader.position(), RandomStates.now()
    drawn += [*loader, torch.rand(2)]

    seed()
    random.random()  # another process has other states
    again = KINDS[kind]()
    again.resume(position, is_same_rank=True)
    states.restore()
    found = []
    for batch in again:
        torch.rand(2), random.random()
        found.append(batch)
    found += [*again, torch.rand(2)]
    assert same(found, drawn[num_batches:])


@pytest.mark.parametrize("num_before", [0, 1])
def test_the_order_with_persistent_workers(num_before: int) -> None:
    """Workers that persist have one seed for all passes; new ones must not change the order."""

    def make() -> Any:
        return idist.auto_dataloader(
            list(range(SIZE)),  # type: ignore[arg-type]
            **{"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True},
        )

    seed()
    loader = make()
    for _ in range(num_before):
        list(loader)
    begun = iter(loader)
    next(begun)
    within, states = loader.position(), RandomStates.now()
    drawn = list(begun)
    between, states_between = loader.position(), RandomStates.now()
    later = [*loader, *loader, torch.rand(2)]

    for position, at, wanted, num_passes in (
        (within, states, [*drawn, *later], 3),
        (between, states_between, later, 2),
    ):
        random.random()
        again = make()
        again.resume(position, is_same_rank=True)
        at.restore()
        found = [batch for _ in range(num_passes) for batch in again]
        assert same([*found, torch.rand(2)], wanted)


def test_samples_before_the_position_are_not_fetched() -> None:
    loader = idist.auto_dataloader(Noisy(), batch_size=4)
    begun = iter(loader)
    next(begun), next(begun)
    again = idist.auto_dataloader(Noisy(), batch_size=4)
    again.resume(loader.position(), is_same_rank=True)
    rest = iter(again)
    assert len(rest) == len(loader) - 2
    list(rest)
    assert again.dataset.fetched == list(range(8, SIZE))


def test_batches_that_workers_have_fetched_ahead_do_not_count() -> None:
    loader = idist.auto_dataloader(range(SIZE), batch_size=4, num_workers=1, prefetch_factor=4)  # type: ignore[arg-type]
    begun = iter(loader)
    next(begun)
    assert loader.position()["samples"] == 4
    again = idist.auto_dataloader(range(SIZE), batch_size=4, num_workers=1)  # type: ignore[arg-type]
    again.resume(loader.position(), is_same_rank=True)
    assert next(iter(again)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("has_bar", [False, True])
@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_the_batch_that_accumulate_has_read_ahead_does_not_count(num_batches: int, has_bar: bool) -> None:
    model = torch.nn.Linear(1, 1)

    def loader() -> Any:
        return idist.auto_dataloader(range(12), batch_size=4)  # type: ignore[arg-type]

    def steps(batches: Any) -> Any:
        bar = idist.progress_bar(batches, disable=True) if has_bar else batches
        return idist.accumulate_gradients(bar, model, steps=2)

    saved, seen = loader(), []
    for batch, sync in steps(saved):
        with sync:
            seen.append(batch.tolist())
        if len(seen) == num_batches:
            position = saved.position()
    assert saved.position()["batches"] == 0  # of the next pass
    again = loader()
    again.resume(position, is_same_rank=True)
    assert [batch.tolist() for batch in again] == seen[num_batches:]
    assert len(list(again)) == 3


def test_behind_the_last_batch_the_pass_is_empty_and_behind_the_pass_a_new_one_begins() -> None:
    loader = idist.auto_dataloader(list(range(8)), batch_size=4)  # type: ignore[arg-type]
    for _ in loader:
        at_the_end = loader.position()
    again = idist.auto_dataloader(list(range(8)), batch_size=4)  # type: ignore[arg-type]
    again.resume(at_the_end, is_same_rank=True)
    assert [len(list(again)), len(list(again))] == [0, 2]
    again.resume(loader.position(), is_same_rank=True)
    assert len(list(again)) == 2


def test_the_position_belongs_to_its_epoch() -> None:
    def make() -> Any:
        return idist.auto_dataloader(Noisy(), batch_size=4, sampler=DistributedSampler(range(SIZE), 1, 0))

    loader = make()
    loader.sampler.set_epoch(3)
    begun = iter(loader)
    drawn = next(begun)
    for epoch, num_batches in ((3, 5), (4, 6)):
        again = make()
        again.resume(loader.position(), is_same_rank=True)
        assert again.sampler.epoch == 3
        assert again.position()["batches"] == 1
        again.sampler.set_epoch(epoch)
        assert again.position()["batches"] == (epoch == 3)
        assert len(list(again)) == num_batches
    assert len(drawn) == 4


def _first_two_of_two(_: int) -> tuple[list[int], dict[str, Any]]:
    loader = _of_all_ranks()
    begun = iter(loader)
    return [*next(begun).tolist(), *next(begun).tolist()], loader.position()


def _of_all_ranks() -> Any:
    sampler = DistributedSampler(range(24), **idist.sampler_kwargs())
    return idist.auto_dataloader(list(range(24)), batch_size=6, sampler=sampler)  # type: ignore[arg-type]


def _rest(_: int, position: dict[str, Any]) -> list[int]:
    loader = _of_all_ranks()
    loader.resume(position, is_same_rank=False)
    return [int(number) for batch in loader for number in batch]


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_another_number_of_ranks_the_samples_are_the_rest(world_size: int) -> None:
    (one, position), (other, _) = on_ranks(_first_two_of_two)
    assert position["samples"] == 12
    by_rank = [_rest(0, position)] if world_size == 1 else on_ranks(_rest, position, world_size=3)
    rest = [number for share in by_rank for number in share]
    assert sorted([*one, *other, *rest]) == list(range(24))


def test_a_position_of_another_data_set_or_sampler_or_behind_the_end_is_refused() -> None:
    (_, position), _ = on_ranks(_first_two_of_two)
    for loader, text in (
        (
            idist.auto_dataloader(list(range(24)), batch_size=6, shuffle=True),
            "sampler is 'DistributedSampler'",
        ),  # type: ignore[arg-type]
        (idist.auto_dataloader(list(range(25)), batch_size=6, sampler=_alone(25)), "samples is 24"),  # type: ignore[arg-type]
        (idist.auto_dataloader(list(range(24)), batch_size=7, sampler=_alone(24)), "no whole number"),  # type: ignore[arg-type]
    ):
        before = loader.position()
        with pytest.raises(ValueError, match=text):
            loader.resume(position, is_same_rank=False)
        assert loader.position() == before
    again = idist.auto_dataloader(list(range(24)), batch_size=6, sampler=_alone(24))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after 5 batches of an epoch, and an epoch of this loader has 4"):
        again.resume({**position, "batches": 5, "samples": 30}, is_same_rank=False)


def _alone(size: int) -> Any:
    return DistributedSampler(range(size), 1, 0)  # type: ignore[arg-type]


def test_which_loaders_have_no_position() -> None:
    with pytest.raises(TypeError, match="must be the result of auto_dataloader"):
        check_resumable(torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exact=True"):
        check_resumable(idist.auto_dataloader([1, 2], exact=True))  # type: ignore[arg-type]


# --- the numbers of workers ----------------------------------------------------------------------------


def augmented(_: int, has_generator: bool = True) -> dict[str, Any]:
    """What workers draw with the recipe of torch for the same numbers in each run."""
    idist.seed_everything(5, per_rank=False)
    generator = torch.Generator().manual_seed(0) if has_generator else None

    def make() -> Any:
        return idist.auto_dataloader(
            Noisy(),
            batch_size=2 * idist.get_world_size(),
            shuffle=True,
            num_workers=idist.get_world_size(),
            multiprocessing_context="fork",
            generator=generator,
        )

    loader = make()
    position: Any = None
    passes: list[list[torch.Tensor]] = []
    for _ in range(2):
        passes.append([])
        for batch in loader:
            passes[-1].append(batch)
            position = position or loader.position()
    state = generator.get_state().tolist() if generator is not None else None
    resumed = []
    for _ in range(2):
        again = make()
        again.resume(position, is_same_rank=True)
        if generator is not None:
            generator.manual_seed(0)
        resumed.append(list(again))
    return {
        "noise": [torch.cat(batches)[:, 1].tolist() for batches in [*passes, resumed[0]]],
        "indices": [sorted(torch.cat(batches)[:, 0].tolist()) for batches in [*passes, resumed[0]]],
        "resumed": same(*resumed),
        "state": state,
        "own": loader.generator is generator,
    }


def test_with_a_generator_the_workers_of_each_rank_draw_their_own_numbers() -> None:
    alone = augmented(0)
    first, second = on_ranks(augmented)
    for found in (first, second):
        assert found["own"] and found["resumed"]
        assert found["state"] == alone["state"], "it has changed as in one process"
    for of_first, of_second in zip(first["noise"], second["noise"], strict=True):
        assert not set(of_first) & set(of_second)
    for of_first, of_alone in zip(first["noise"], alone["noise"], strict=True):
        assert of_first == of_alone[: len(of_first)]
    for number, size in enumerate((SIZE, SIZE, SIZE - 4)):
        assert len({*first["indices"][number], *second["indices"][number]}) == size


def test_without_a_generator_the_script_decides_whether_the_workers_differ() -> None:
    first, second = on_ranks(augmented, False)
    assert [one[:4] for one in first["noise"]] == [one[:4] for one in second["noise"]]
