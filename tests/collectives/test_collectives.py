"""What is easier to see from outside than in a conformance case: what one call leaves behind for the next."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch

import ignite_dist as idist
from on_ranks import on_ranks


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    results: list[Any] = idist.spawn("gloo", function, args, nproc_per_node=2, timeout=timedelta(seconds=20))
    return results


def _reduced(tensor: torch.Tensor) -> list[list[float]]:
    rank = idist.get_rank()
    results = [
        idist.all_reduce(tensor + rank),
        idist.all_reduce(tensor + rank, "MAX"),
        idist.all_reduce(tensor + rank, "AVERAGE"),
        idist.all_reduce(tensor + rank, inplace=False),
        idist.all_reduce({"x": tensor + rank, "n": 1})["x"],
        idist.all_gather(tensor + rank),
        idist.broadcast(tensor + rank),
    ]
    return [result.tolist() for result in results]


def _inference_mode(size: int) -> list[Any]:
    with torch.inference_mode():
        found = [_reduced(torch.zeros(size))]
    found.append(_reduced(torch.zeros(size)))
    with torch.inference_mode():
        found.append(_reduced(torch.zeros(size)))
    return found


def _evaluated_in_inference_mode(_: int) -> list[list[Any]]:
    return [_inference_mode(size) for size in (1, 7, 70_000)]


def test_an_evaluation_in_inference_mode_leaves_nothing_behind() -> None:
    """Not even a buffer that the training after it could not write to."""
    for found in on_two_ranks(_evaluated_in_inference_mode):
        for size, (first, outside, second) in zip((1, 7, 70_000), found, strict=True):
            expected = [1.0, 1.0, 0.5, 1.0, 1.0, None, 0.0]
            assert first == outside == second
            for values, value in zip(first, expected, strict=True):
                assert values == ([0.0] * size + [1.0] * size if value is None else [value] * size)


def _changed_in_place(_: int) -> list[float]:
    """What a call returns can be changed in place, and autograd sees each tensor as one of its own."""
    weight = torch.ones(2, requires_grad=True)
    tree = idist.all_reduce({"a": torch.ones(2), "b": torch.ones(2)})
    rows = idist.all_gather_ragged(torch.ones(2))
    gradients = []
    for first, second in (tree.values(), rows):
        loss = (weight * first).sum()
        second.add_(1)
        loss.backward()
        second += weight
        gradients.append(float(weight.grad.sum()))  # type: ignore[union-attr]
    return gradients


def test_results_of_several_tensors_are_changed_in_place() -> None:
    assert on_two_ranks(_changed_in_place) == [[4.0, 6.0]] * 2


def _made_in_inference_mode(_: int) -> list[Any]:
    rank = idist.get_rank()
    found = []
    for op in ("SUM", "AVERAGE", "MAX"):
        for size in (1, 7, 300_000):
            with torch.inference_mode():
                tensor = torch.full((size,), float(rank + 1))
            assert idist.all_reduce(tensor, op) is tensor
            found.append((op, tensor.unique().tolist()))
    return found


def test_a_tensor_made_in_inference_mode_is_reduced_outside_of_it() -> None:
    """As raw torch.distributed does: metrics of an evaluation are like that."""
    for found in on_two_ranks(_made_in_inference_mode):
        assert found == [
            (op, [value]) for op, value in (("SUM", 3.0), ("AVERAGE", 1.5), ("MAX", 2.0)) for _ in range(3)
        ]


def _overlapping_result(_: int) -> list[float]:
    result = idist.one_rank_only(broadcast=True)(lambda: torch.ones(1).expand(3))()
    return list(result.tolist())


def test_the_result_of_one_rank_may_share_memory_with_itself() -> None:
    assert on_two_ranks(_overlapping_result) == [[1.0] * 3] * 2


def _sparse_result(_: int) -> str:
    try:
        idist.one_rank_only(broadcast=True)(lambda: torch.eye(2).to_sparse())()
    except (TypeError, idist.RankFailedError) as error:
        return f"{type(error).__name__}: {getattr(error, 'error_type', '')}"
    return "no error"


@pytest.mark.timeout(180)
def test_a_result_of_one_rank_that_cannot_be_sent_fails_on_every_rank() -> None:
    assert on_two_ranks(_sparse_result) == ["TypeError: ", "RankFailedError: TypeError"]


def _conjugated(_: int) -> list[Any]:
    value = torch.tensor([1 + 2j, 3j]).conj()
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    assert value.is_conj()
    assert negative.is_neg()
    return [
        idist.all_gather(value).tolist(),
        idist.all_reduce(value.clone().conj(), inplace=False).tolist(),
        idist.broadcast(value).tolist(),
        idist.all_gather(negative).tolist(),
        idist.all_reduce(negative).tolist(),
    ]


def test_a_tensor_that_is_conjugated_or_negated_lazily_is_sent_as_the_value_that_it_is() -> None:
    for found in on_two_ranks(_conjugated):
        assert found == [[1 - 2j, -3j] * 2, [2 + 4j, 6j], [1 - 2j, -3j], [-1.0, -2.0] * 2, [-2.0, -4.0]]


def _default_device(_: int) -> list[Any]:
    rank, found = idist.get_rank(), []
    tensors = [torch.zeros(size) for size in (1, 7, 70_000)]
    group = torch.full((7,), 5.0)
    with torch.device("meta"):  # as torch.set_default_device("cuda") does in scripts
        found += [idist.all_reduce(tensor.add(rank)) for tensor in tensors]
        found += [idist.all_reduce(tensor.add(rank), "MAX") for tensor in tensors]
        found += [idist.all_gather(tensor.add(rank)) for tensor in tensors]
        found += [idist.all_reduce(group, group=[rank]), idist.all_reduce({"x": tensors[1], "n": 1})["x"]]
        objects = [idist.all_gather("x"), idist.all_gather("y" * 2000), idist.all_reduce(1.5)]
    found.append(idist.all_reduce(tensors[1].add(rank)))
    assert objects == [["x"] * 2, ["y" * 2000] * 2, 3.0]
    assert {tensor.device.type for tensor in found} == {"cpu"}
    return [tensor.unique().tolist() for tensor in found]


def test_a_default_device_of_the_scripts_is_not_where_we_put_our_buffers() -> None:
    for found in on_two_ranks(_default_device):
        assert found == [[1.0]] * 6 + [[0.0, 1.0]] * 3 + [[5.0], [0.0], [1.0]]


def _reduce_scatter_out_of_inference_mode(rank: int, dtype: torch.dtype, op: str) -> list[float]:
    with torch.inference_mode():
        works = [idist.reduce_scatter(torch.full((4,), rank + 1).to(dtype), op, async_op=True)]
    works.append(idist.reduce_scatter(torch.full((4,), rank + 1).to(dtype), op, async_op=True))
    return [float(work.wait().sum()) for work in works]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
def test_a_work_of_inference_mode_is_waited_for_outside(dtype: torch.dtype) -> None:
    ops = {"SUM": 6.0} if dtype is torch.int16 else {"SUM": 6.0, "AVERAGE": 3.0, "MAX": 4.0}
    for op, total in ops.items():
        assert on_two_ranks(_reduce_scatter_out_of_inference_mode, dtype, op) == [[total, total]] * 2


# --- MIN and MAX of floats -----------------------------------------------------------------------------


def _extremes(rank: int, dtype: torch.dtype, sizes: list[int]) -> None:
    world_size = idist.get_world_size()
    for size, op in product(sizes, ("MIN", "MAX")):
        tensor = torch.zeros(size)
        tensor[0] = -0.0 if rank == 1 else 0.0
        tensor[1:-1] = rank - 0.5
        tensor[-1] = float("nan") if rank == 0 else 1.0
        tensor = tensor.to(dtype)
        for found in (
            idist.all_reduce(tensor.clone(), op),
            idist.all_reduce(tensor.clone(), op, async_op=True).wait(),
            idist.all_reduce({"x": tensor.clone()}, op)["x"],
            idist.reduce_scatter(torch.cat([tensor] * world_size), op),
        ):
            assert found.dtype is dtype
            assert bool(found[0].float().signbit()) == (op == "MIN"), "-0.0 is less than 0.0"
            assert (found[1:-1].float() == (-0.5 if op == "MIN" else world_size - 1.5)).all()
            assert found[-1].isnan()


@pytest.mark.parametrize("shared_memory", ["0", "1"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_extremes_are_the_same_in_all_ways(
    dtype: torch.dtype, world_size: int, shared_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", shared_memory)
    # Over gloo in one round and as ints, and over shared memory as a whole and in chunks.
    sizes = [3, 40_000, 1_200_001]
    idist.spawn("gloo", _extremes, (dtype, sizes), nproc_per_node=world_size)


@idist.one_rank_only(broadcast=True)
def _inner() -> str:
    return f"inner on {idist.get_rank()}"


@idist.one_rank_only(with_barrier=True)
def _inner_with_barrier() -> str:
    return _inner()


def _calls_another(_: int) -> tuple[Any, ...]:
    outer = idist.one_rank_only(broadcast=True)(lambda: f"outer of {_inner()}")
    before = outer(), idist.one_rank_only()(_inner)(), _inner_with_barrier(), _inner()
    for_another = idist.one_rank_only(rank=1, broadcast=True)(_inner)
    with pytest.raises((RuntimeError, idist.RankFailedError), match="Rank 1 alone runs a function"):
        for_another()
    return *before, _inner()


def test_a_function_of_one_rank_calls_another() -> None:
    first, second = on_ranks(_calls_another)
    assert first == ("outer of inner on 0", "inner on 0", "inner on 0", "inner on 0", "inner on 0")
    assert second == ("outer of inner on 0", None, None, "inner on 0", "inner on 0")


def _calls_in_groups(rank: int) -> tuple[Any, ...]:
    first, ends, last = [0, 1], [0, 2], [1, 2]
    nobodys = idist.one_rank_only(broadcast=True)(
        lambda: ("outer", idist.one_rank_only(broadcast=True, group=last)(_inner)())
    )
    sums = idist.one_rank_only(broadcast=True, group=first)(
        lambda: [idist.all_reduce(number, group=ends) for number in (1, 2)]
    )
    for group in (first, ends, last):
        idist.all_reduce(0, group=group)
    found = sums() if rank < 2 else [idist.all_reduce(number, group=ends) for number in (1, 2)]
    return found, nobodys(), idist.all_reduce(rank)


def test_a_function_of_one_rank_makes_calls_of_other_groups() -> None:
    assert on_ranks(_calls_in_groups, world_size=3) == [([2, 4], ("outer", None), 3)] * 3
