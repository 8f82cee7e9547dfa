"""What all ranks agree on: a decision, a seed, who is the first; on every model."""

from __future__ import annotations

import random

import numpy
import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


@on_every_rank
def test_a_decision_that_all_ranks_share() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for true_on in ([], [0], [world_size - 1], list(range(world_size))):
        flag = rank in true_on
        with count_collectives() as counted:
            assert idist.any_true(flag) is bool(true_on)
        assert counted.count <= 1
        assert idist.all_true(flag) is (len(true_on) == world_size)
    assert idist.any_true(torch.tensor(rank == 0, device=idist.device())) is True
    assert idist.all_true(torch.tensor([rank], device=idist.device()) >= 0) is True
    assert idist.any_true(rank == 0, group=[world_size - 1]) is (rank == 0)
    with raises(RuntimeError, "ambiguous"):
        idist.any_true(torch.ones(2))


@on_every_rank
def test_who_is_the_first() -> None:
    first = [True, *[False] * (idist.get_world_size() - 1)]
    assert idist.all_gather(idist.is_global_zero()) == first
    assert idist.all_gather(idist.is_local_zero()) == first  # here all ranks are on one node


@on_every_rank
def test_the_handle_of_the_world_is_a_group() -> None:
    handle = idist.world_group()
    assert idist.all_reduce(1, group=handle) == idist.get_world_size()
    assert idist.all_gather(idist.get_rank(), group=handle) == list(range(idist.get_world_size()))
    idist.barrier(group=handle)


@on_every_rank
def test_a_fresh_seed_that_is_the_same_on_every_rank() -> None:
    before = torch.random.get_rng_state(), random.getstate()
    one, other = idist.shared_seed(), idist.shared_seed()
    assert idist.all_gather(one) == [one] * idist.get_world_size()
    assert one != other and 0 <= one < 1 << 32
    numpy.random.RandomState(one)  # which takes no more bits
    if current_model().ranks_in_process() == 1:
        assert torch.random.get_rng_state().equal(before[0]) and random.getstate() == before[1]


def draws() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), numpy.random.random()


@on_every_rank
def test_ranks_draw_different_numbers_and_the_same_again() -> None:
    world_size = idist.get_world_size()
    if current_model().ranks_in_process() > 1:
        with raises(RuntimeError, r"torch.Generator"):
            idist.seed_everything(7)
        return
    assert idist.seed_everything(7) == 7
    drawn = draws()
    for of_one_generator in zip(*idist.all_gather(drawn), strict=True):
        assert len(set(of_one_generator)) == world_size
    idist.seed_everything(7)
    assert draws() == drawn
    seed = idist.seed_everything()
    assert idist.all_gather(seed) == [seed] * world_size and draws() != drawn
    if idist.get_rank() == 0:  # draws what a single process would
        torch.manual_seed(7)
        assert torch.rand(1).item() == drawn[0]


@on_every_rank
def test_ranks_draw_the_same_numbers_where_they_are_told_to() -> None:
    assert idist.seed_everything(7, per_rank=False) == 7
    if current_model().ranks_in_process() > 1:  # one random state, that all have seeded before any goes on
        assert torch.initial_seed() == 7
        return
    drawn = draws()
    assert idist.all_gather(drawn) == [drawn] * idist.get_world_size()


@on_every_rank
def test_a_seed_that_is_none_is_refused() -> None:
    for seed in (-1, 1 << 63, 0.5, True, "7"):
        with raises(ValueError, "seed must be an int in"):
            idist.seed_everything(seed)
