"""Which leaves of trees are reduced with which, and what ranks hear whose trees differ; on every model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises
from ignite_dist.testing.conformance.enum_keys import Level, Other, Split
from ignite_dist.testing.conformance.test_all_reduce import legal


class Opaque:
    """A key of somebody's own, whose ``repr`` holds its address."""


def on_device(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=idist.device())


def turned(value: dict[Any, Any]) -> dict[Any, Any]:
    """``value``, which every other rank has filled in another order."""
    return dict(reversed(value.items())) if idist.get_rank() % 2 else value


@on_every_rank
def test_keys_pair_the_values_whatever_the_order() -> None:
    world_size = idist.get_world_size()
    keys: list[Any] = ["b", 10, 9, "9", True, Split.TEST, Split.TRAIN, Other.Split.TRAIN, Level.HIGH]
    keys += [(1, "a"), (1, (2, Split.TEST)), (), np.int64(77)]
    for make in (float, on_device):
        given = turned({key: make(position) for position, key in enumerate(keys)})
        result = idist.all_reduce(given)
        assert list(result) == list(given)
        assert {key: float(value) for key, value in result.items()} == {
            key: world_size * position for position, key in enumerate(keys)
        }


@on_every_rank
def test_equal_keys_are_one_key() -> None:
    world_size, odd = idist.get_world_size(), bool(idist.get_rank() % 2)
    for one, other in ((1, True), (2, Level.HIGH), (3, np.int32(3)), ((1, 2), (Level.LOW, np.uint8(2)))):
        result = idist.all_reduce({"a": 5, (other if odd else one): 7, Split.TEST: 1})
        assert result == {"a": 5 * world_size, one: 7 * world_size, Split.TEST: world_size}


@on_every_rank
def test_keys_that_other_ranks_do_not_know_are_refused_before_anything_is_sent() -> None:
    anything = Opaque()
    loader = idist.auto_dataloader([1] * idist.get_world_size(), batch_size=1, exact=True)
    for key in (None, 1.5, b"a", anything, (1, None), frozenset([1]), torch.float32, np.float32(1)):
        with count_collectives() as counted:
            for leaf in (1, on_device(1)):
                with raises(TypeError, "tuples of these"):
                    idist.all_reduce({key: leaf})
                with raises(TypeError, "tuples of these"):
                    idist.all_reduce([{"a": ({key: leaf, "b": leaf},)}])
            with raises(TypeError, "tuples of these"):
                idist.gather_in_order({key: [1]}, loader)
        assert counted.count == 0
    assert idist.to_device({anything: torch.ones(1), 1.5: 2})[anything].device.type == idist.device().type


def _sizes() -> tuple[int, ...]:
    """Of tensors that travel with the comparison, that share a collective, and that have one each."""
    return (1, 100, 20_000)


@pytest.mark.parametrize("size", _sizes())
@on_every_rank
def test_trees_of_tensors_with_different_keys_shapes_or_dtypes_raise_on_every_rank(size: int) -> None:
    if idist.get_world_size() == 1:
        return
    last = idist.get_rank() == idist.get_world_size() - 1
    ones, same = on_device(1).repeat(size), {"a": on_device(1).repeat(size), "b": on_device(2).repeat(size)}
    others: list[Any] = [
        {"a": ones, "c": ones},
        {"a": ones},
        [ones, ones],
        {"a": ones, Split.TEST: ones},
        {"a": ones, "b": ones.float()},
        {"a": ones, "b": ones[None]},
        {"a": ones, "b": 1.0},
        {"a": 1.0, "b": 1.0},
    ]
    for other in others:
        with raises(CollectiveMismatchError, "different operations"):
            idist.all_reduce(other if last else same)
    with raises(CollectiveMismatchError, f"rank {idist.get_world_size() - 1}: MIN of"):  # on every rank
        idist.all_reduce(same, "MIN" if last else "MAX")
    for one, another in ((Split.TEST, Other.Split.TEST), (1, "1"), (Split.TEST, "Split.TEST"), ((1,), 1)):
        with raises(CollectiveMismatchError, "different operations"):
            idist.all_reduce({(another if last else one): ones})
    assert (
        idist.all_reduce(same)["b"].tolist() == [2.0 * idist.get_world_size()] * size
    )  # nobody is out of step


@on_every_rank
def test_what_the_comparison_of_trees_costs() -> None:
    if idist.get_world_size() == 1:
        return
    device = idist.device()
    scalars = {
        f"metric {number}": torch.tensor(number, dtype=torch.float32, device=device) for number in range(30)
    }
    few = [torch.ones(3, device=device), torch.ones(3, dtype=torch.int64, device=device), {"a": 1, "b": 0.5}]
    for value, collectives in (
        (scalars, 1),  # in the header in which the ranks compare their trees
        (few, 1),
        ([torch.ones(200, device=device)], 2),
        ([torch.ones(200, device=device), 1.5], 2),
    ):
        idist.all_reduce(value)
        with count_collectives() as counted:
            idist.all_reduce(value)
        assert counted.count == collectives, value


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]
OPS = ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR")


@on_every_rank
def test_tensors_of_every_dtype_in_trees_are_reduced_as_they_are_alone() -> None:
    rank = idist.get_rank()
    for op in OPS if current_model().name != "xla-dist" else OPS[:3]:
        values = {}
        for dtype in DTYPES:
            plain = torch.tensor([[1, 2, rank % 2], [rank + 1, 1, 2]])
            value = (plain % 2).to(dtype) if dtype is torch.bool else plain.to(dtype)
            value = (
                value.to(idist.device())
                if idist.model_name() != "xla-dist" or not dtype.is_complex
                else value
            )
            if legal(op, dtype):
                values[str(dtype)] = value
        alone = {name: idist.all_reduce(value, op, inplace=False) for name, value in values.items()}
        for names in [*([name] for name in values), list(values)]:
            together = idist.all_reduce({name: values[name] for name in names}, op)
            for name in names:
                one = together[name]
                assert one.dtype is alone[name].dtype and one.device == values[name].device
                assert one.shape == values[name].shape
                assert one.cpu().to(torch.complex128).equal(alone[name].cpu().to(torch.complex128)), (
                    op,
                    name,
                )


@on_every_rank
def test_a_tree_of_tensors_in_a_group() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    group = [0, world_size - 1] if world_size > 2 else [0]
    for size in _sizes():
        given = {"a": on_device(rank + 1.0).repeat(size)}
        result = idist.all_reduce(given, group=group)
        total = sum(member + 1.0 for member in group) if rank in group else rank + 1.0
        assert result["a"].tolist() == [total] * size
        assert given["a"].tolist() == [rank + 1.0] * size
