"""Numbers and ranks that are numpy's, on every model."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@on_every_rank
def test_numbers_of_numpys_are_pythons_before_they_are_sent() -> None:
    world_size = idist.get_world_size()
    for number in (
        *(np.int8(100), np.uint8(200), np.int32(2_000_000_000), np.int64(2**62), np.uint64(2**63)),
        *(np.float16(60_000), np.float32(3e38), np.float64(0.1), np.complex64(1 + 2j), np.complex128(1e300)),
    ):
        plain = number.item()
        result = idist.all_reduce(number)
        assert type(result) is type(plain) and result == sum([plain] * world_size)
        tree = idist.all_reduce({"a": [number, 1], "b": torch.ones(2, device=idist.device())})
        assert type(tree["a"][0]) is type(plain) and tree["a"] == [result, world_size]
        assert type(idist.all_reduce(number, "AVERAGE")) in (float, complex)
        if not isinstance(plain, complex):
            assert type(idist.all_reduce(number, "MAX")) is type(plain)
            assert idist.all_reduce(number, "MIN") == plain
    assert idist.all_reduce(np.uint8(200), "PRODUCT") == 200**world_size
    assert type(idist.all_reduce(Level.HIGH, "MAX")) is int


@on_every_rank
def test_bools_of_numpys_are_pythons() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    result = idist.all_reduce(np.bool_(True))
    assert result == world_size and type(result) is int
    assert idist.all_reduce(np.bool_(rank == 0), "AND") is (world_size == 1)
    assert idist.all_reduce(np.bool_(rank == 0), "OR") is True
    assert idist.any_true(np.bool_(rank == 0)) is True
    assert idist.all_true(np.array(rank == 0)) is (world_size == 1)


@on_every_rank
def test_one_rank_may_have_a_number_of_numpys_and_another_pythons() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    assert idist.all_reduce(np.int32(2**31 - 1) if rank == 0 else 1) == 2**31 - 1 + (world_size - 1)


@on_every_rank
def test_what_is_gathered_stays_what_it_is() -> None:
    gathered = idist.all_gather(np.float32(0.5))
    assert gathered == [0.5] * idist.get_world_size() and type(gathered[0]) is np.float32
    assert type(idist.broadcast(np.int8(3))) is np.int8


@on_every_rank
def test_numbers_without_an_exact_counterpart_are_refused_before_anything_is_sent() -> None:
    wrong: list[Any] = [Decimal("0.1"), np.longdouble(1), np.timedelta64(1, "s"), np.datetime64("2020-01-01")]
    with count_collectives() as counted:
        for value in [*wrong, np.str_("1"), np.ones(2), np.array(1.5)]:
            for op in ("SUM", "MAX"):
                if not isinstance(value, np.ndarray):  # which is reduced as a tensor is, but not in a tree
                    with raises(TypeError, type(value).__name__):
                        idist.all_reduce(value, op)
                with raises(TypeError, type(value).__name__):
                    idist.all_reduce({"a": [1, value]}, op)
    assert counted.count == 0
    half = Fraction(1, 2)
    assert (
        idist.all_reduce(half) == half * idist.get_world_size() and type(idist.all_reduce(half)) is Fraction
    )


@on_every_rank
def test_ranks_may_be_ints_of_numpys() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    last = np.int64(world_size - 1)
    assert idist.broadcast(rank, src=last) == last
    tensor = torch.full((3,), rank, device=idist.device())
    assert idist.broadcast(tensor, src=last).tolist() == [int(last)] * 3
    assert idist.broadcast(rank, src=np.uint8(0), safe_mode=True) == 0
    for group in ([np.int64(0), last], (np.int32(0),), [np.uint8(0), int(last)], list(np.arange(world_size))):
        ranks = sorted({int(member) for member in group})
        if len(ranks) == len(group):
            expected = len(ranks) if rank in ranks else 1
            assert idist.all_reduce(1, group=group) == idist.all_reduce(1, group=group) == expected
            assert idist.all_reduce(1, group=idist.new_group(group)) == expected
    with count_collectives() as counted:
        with idist.one_rank_first(last):
            pass
        assert idist.one_rank_only(last, broadcast=True)(lambda: rank)() == last
        assert idist.one_rank_only(last)(lambda: True)() is (True if rank == last else None)
    assert counted.count <= 4
    idist.set_local_rank(np.int64(idist.get_local_rank()))  # type: ignore[arg-type]


@on_every_rank
def test_a_group_of_numpys_ranks_is_made_once() -> None:
    model_groups = current_model().groups._by_ranks
    idist.all_reduce(1, group=[0])
    before = model_groups[(0,)]
    for _ in range(3):
        idist.all_reduce(1, group=[np.int64(0)])
    assert model_groups[(0,)] is before


@on_every_rank
def test_what_is_equal_to_a_rank_is_none() -> None:
    idist.all_reduce(1, group=[0])  # is kept, and would be found by what is equal to it
    for wrong in (0.0, False, "0", np.float64(0), np.bool_(False), None, 0j, Fraction(0)):
        with raises(ValueError, "Ranks of a group"):
            idist.all_reduce(1, group=[wrong])
        with raises(ValueError, "Ranks of a group"):
            idist.new_group([wrong])
        with raises(ValueError, "src must be a global rank"):
            idist.broadcast(1, src=wrong)  # type: ignore[arg-type]
        with raises(ValueError, "rank must be"):
            idist.one_rank_only(wrong)  # type: ignore[arg-type]
        with raises(ValueError, "rank must be"), idist.one_rank_first(wrong):  # type: ignore[arg-type]
            raise AssertionError("not reached")
        with raises(ValueError, "rank must be"), idist.one_rank_first(wrong, local=True):  # type: ignore[arg-type]
            raise AssertionError("not reached")
        with raises(ValueError, "local rank"):
            idist.set_local_rank(wrong)  # type: ignore[arg-type]
    assert idist.all_reduce(1) == idist.get_world_size()
