"""``all_reduce`` of trees with ``inplace=True`` fills their tensors, on every model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises

MEGABYTE = 1 << 18  # in elements of float32


def tensor_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, idist.get_rank() + 1, dtype=dtype, device=idist.device())


def total() -> int:
    return sum(range(1, idist.get_world_size() + 1))


def assert_filled(tensor: Tensor, value: float) -> None:
    assert tensor.eq(value).all().item()


# Together they are sent with the comparison of the trees, in one bucket, or in buckets of their own.
SIZES = {
    "inline": [1, 2, 3],
    "one bucket": [3, 40_000, 0, 200_000],
    "several": [9 * MEGABYTE, 3, 17 * MEGABYTE, 9 * MEGABYTE],
}


@pytest.mark.parametrize("sizes", SIZES)
@on_every_rank
def test_the_tensors_of_a_list_hold_the_results(sizes: str) -> None:
    tensors = [tensor_of(size) for size in SIZES[sizes]]
    kept, versions = list(tensors), [tensor._version for tensor in tensors]
    assert idist.all_reduce(tensors, inplace=True) is tensors
    for tensor, same, version in zip(tensors, kept, versions, strict=True):
        assert tensor is same
        assert_filled(tensor, total())
        assert tensor._version > version or not tensor.numel()


@on_every_rank
def test_trees_of_every_kind_dtype_and_layout() -> None:
    for op, wanted in (("SUM", total()), ("MAX", idist.get_world_size()), ("MIN", 1)):
        turned, strided = tensor_of(4, 3).t(), tensor_of(6)[::2]
        tree = {
            "a": [tensor_of(2), (tensor_of(3, 3, dtype=torch.float64), turned)],
            "b": {"c": tensor_of(20_000, dtype=torch.int64), "d": tensor_of(2, dtype=torch.bfloat16)},
            "e": strided,
            "f": tensor_of(),
        }
        assert idist.all_reduce(tree, op, inplace=True) is tree
        leaves: list[Any] = [*tree["a"][:1], *tree["a"][1], *tree["b"].values(), tree["e"], tree["f"]]
        for leaf in leaves:
            assert_filled(leaf, wanted)
        assert tree["e"] is strided and tree["a"][1][1] is turned


@on_every_rank
def test_what_is_between_the_elements_of_a_strided_tensor_stays() -> None:
    for size in (3, 40_000):
        base = tensor_of(size, 2)
        idist.all_reduce([base[:, 0], tensor_of(3)], inplace=True)
        assert_filled(base[:, 0], total())
        assert_filled(base[:, 1], idist.get_rank() + 1)


@on_every_rank
def test_parameters_and_their_gradients() -> None:
    """mmengine's ``all_reduce_params``."""
    model = torch.nn.Linear(300, 100).to(idist.device())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, idist.get_rank())
        with torch.no_grad():
            parameter.fill_(idist.get_rank())
    mean = (idist.get_world_size() - 1) / 2
    parameters = list(model.parameters())
    idist.all_reduce(parameters, "AVERAGE", inplace=True)
    idist.all_reduce([parameter.grad for parameter in parameters], "AVERAGE", inplace=True)
    for parameter in parameters:
        assert_filled(parameter, mean)
        assert parameter.grad is not None and parameter.is_leaf and parameter.requires_grad
        assert_filled(parameter.grad, mean)


@on_every_rank
def test_a_tensor_that_occurs_twice_is_reduced_once() -> None:
    for size in (3, 17 * MEGABYTE):
        tensor = tensor_of(size)
        other = tensor if tensor.device.type == "xla" else tensor.detach()  # as tied weights in a state_dict
        idist.all_reduce([tensor, tensor_of(2), other, tensor], inplace=True)
        assert_filled(tensor, total())


@on_every_rank
def test_by_default_a_tree_comes_back_new() -> None:
    for options in ({}, {"inplace": None}, {"inplace": False}):
        tensors = [tensor_of(3), tensor_of(40_000)]
        reduced = idist.all_reduce(tensors, **options)
        for tensor, result in zip(tensors, reduced, strict=True):
            assert_filled(tensor, idist.get_rank() + 1)
            assert_filled(result, total())
        alone = tensor_of(3)
        assert (idist.all_reduce(alone, **options) is alone) == (options.get("inplace") is None)
    assert idist.all_reduce(2, inplace=False) == 2 * idist.get_world_size()


@on_every_rank
def test_tensors_share_buckets_of_16_mb() -> None:
    small = [tensor_of(MEGABYTE // 4) for _ in range(8)]
    large = [tensor_of(17 * MEGABYTE), tensor_of(3, dtype=torch.float64)]
    for tensors, collectives in ((small, 1), (large, 2), ([*small, *large], 3)):
        with count_collectives() as counted:
            idist.all_reduce(tensors, inplace=True)
        if idist.get_world_size() > 1:
            assert counted.count == 1 + collectives  # one compares the trees


@on_every_rank
def test_ranks_outside_keep_their_values() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for ranks in ([], [last], sorted({max(last - 1, 0), last})):
        tensors = [tensor_of(3), tensor_of(40_000), tensor_of(4 * MEGABYTE + 1)]
        assert idist.all_reduce(tensors, group=ranks, inplace=True) is tensors
        for tensor in tensors:
            assert_filled(tensor, sum(one + 1 for one in ranks) if rank in ranks else rank + 1)


@on_every_rank
def test_begun_and_waited_for() -> None:
    tensors = [tensor_of(3), tensor_of(200_000)]
    work = idist.all_reduce(tensors, inplace=True, async_op=True)
    assert work.wait() is tensors
    for tensor in tensors:
        assert_filled(tensor, total())


@on_every_rank
def test_numbers_and_what_cannot_be_filled_are_refused_before_anything_is_sent() -> None:
    one = tensor_of(1)
    with count_collectives() as counted:
        for wrong in (5, [one, 1.5], {"a": one, "b": True}, [[], (2,)]):
            with raises(ValueError, "cannot be filled"):
                idist.all_reduce(wrong, inplace=True)
        with raises(ValueError, "share memory"):
            idist.all_reduce([one, one.expand(4)], inplace=True)
        whole = torch.zeros(6, 4, device=one.device)
        if one.device.type != "xla":  # whose addresses are not known
            for shared in (
                [whole, whole.view(4, 6)],
                [whole, whole.t()],
                [whole[:4], whole[3:]],
                [whole[:, 0], whole],
            ):
                with raises(ValueError, "share memory"):
                    idist.all_reduce(shared, inplace=True)
        with raises(TypeError, "got str"):
            idist.all_reduce([one, "text"], inplace=True)
        with raises(TypeError, "generator"):
            idist.all_reduce((one for _ in range(2)), inplace=True)
    assert counted.count == 0
    assert_filled(one, idist.get_rank() + 1)
    assert idist.all_reduce([], inplace=True) == []
    columns = [whole[:, column] for column in range(4)]  # no two have an element in common
    idist.all_reduce([column.fill_(1) for column in columns], inplace=True)
    assert_filled(whole, idist.get_world_size())


@on_every_rank
def test_different_lists_raise_on_every_rank_and_fill_nothing() -> None:
    world_size = idist.get_world_size()
    if world_size == 1:
        return
    is_last = idist.get_rank() == world_size - 1
    one, other = tensor_of(20_000), tensor_of(20_000)
    for wrong in ([one], [one, other[1:]], [one, other.double()], [one, one]):
        with raises(CollectiveMismatchError, "different operations"):
            idist.all_reduce(wrong if is_last else [one, other], inplace=True)
    with raises(CollectiveMismatchError, "in place"):
        idist.all_reduce([one, other], inplace=True if is_last else None)
    assert_filled(one, idist.get_rank() + 1)
    assert idist.all_reduce(1) == world_size
