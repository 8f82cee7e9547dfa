"""What ``reduce_scatter`` and ``reduce`` promise, on every model."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import on_every_rank, raises
from ignite_dist.testing.conformance.test_all_reduce import (
    DTYPES,
    contribution,
    everyone,
    expected,
    here,
    legal,
    name_of,
    on_device,
    same_bits,
)

OPS = ["SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR"]


@pytest.mark.parametrize("op", OPS)
@on_every_rank
def test_each_rank_gets_its_part_of_the_reduction(op: str) -> dict[tuple[str, str], str]:
    """The part of rank i is the row i of what ``all_reduce`` gives."""
    cells, rank, world_size = {}, idist.get_rank(), idist.get_world_size()
    for dtype in DTYPES:
        cell = f"reduce_scatter {op}", name_of(dtype)
        rows = on_device(torch.cat([contribution(rank, dtype).view(torch.uint8)] * world_size).view(dtype))
        before = here(rows).clone()
        if not legal(op, dtype):
            with raises(TypeError, str(dtype)):
                idist.reduce_scatter(rows, op)
            cells[cell] = "`TypeError`"
            continue
        result = idist.reduce_scatter(rows, op)
        wanted = expected(op, everyone(lambda rank: contribution(rank, dtype)))  # noqa: B023
        assert same_bits(here(result), wanted), (op, dtype, here(result), wanted)
        assert result.device == rows.device and same_bits(here(rows), before)
        cells[cell] = "✓"
    return cells


@pytest.mark.parametrize("op", OPS)
@on_every_rank
def test_one_rank_gets_the_reduction(op: str) -> dict[tuple[str, str], str]:
    cells, rank, last = {}, idist.get_rank(), idist.get_world_size() - 1
    for dtype in DTYPES:
        cell, tensor = (f"reduce {op}", name_of(dtype)), on_device(contribution(rank, dtype))
        if not legal(op, dtype):
            with raises(TypeError, str(dtype)):
                idist.reduce(tensor, last, op)
            cells[cell] = "`TypeError`"
            continue
        result = idist.reduce(tensor, last, op)
        wanted = expected(op, everyone(lambda rank: contribution(rank, dtype)))  # noqa: B023
        assert result is (tensor if rank == last else None)
        assert same_bits(here(tensor), wanted if rank == last else contribution(rank, dtype)), (op, dtype)
        cells[cell] = "✓"
    return cells


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (2, 0, 3), (200_000,)])
@on_every_rank
def test_shapes_of_reduced_parts(shape: tuple[int, ...]) -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    total = sum(range(1, world_size + 1))
    x = torch.cat(
        [torch.full(shape, (rank + 1) * other, device=idist.device()) for other in range(world_size)]
    )
    assert torch.equal(here(idist.reduce_scatter(x)), torch.full(shape, rank * total))
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    assert idist.reduce_scatter(x, out=out) is out and torch.equal(here(out), torch.full(shape, rank * total))
    strided = x.t().contiguous().t() if x.dim() == 2 else x
    assert torch.equal(here(idist.reduce_scatter(strided)), torch.full(shape, rank * total))


@on_every_rank
def test_a_list_of_tensors_is_reduced_one_for_each_rank() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    tensors = [
        torch.full((other + 1, 2), float(rank + 1), device=idist.device()) for other in range(world_size)
    ]
    total = float(sum(range(1, world_size + 1)))
    result = idist.reduce_scatter(tensors)
    assert result.shape == (rank + 1, 2) and here(result).unique().tolist() == [total]
    out = torch.empty(rank + 1, 2, device=idist.device())
    assert idist.reduce_scatter(tensors, "AVERAGE", out=out) is out
    assert here(out).unique().tolist() == [total / world_size]
    equal = idist.reduce_scatter([torch.tensor(float(rank), device=idist.device())] * world_size, "MAX")
    assert equal.shape == () and equal.item() == world_size - 1


@on_every_rank
def test_a_nan_on_any_rank_is_in_the_part() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    x = torch.full((world_size,), nan if rank == world_size - 1 else 1.0, device=idist.device())
    for op in ("MIN", "MAX", "SUM"):
        assert idist.reduce_scatter(x, op).isnan().all()


@on_every_rank
def test_numbers_and_trees_are_reduced_on_one_rank() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    total = sum(range(world_size))
    assert idist.reduce(rank) == (None if rank else total)
    tree = {"n": rank, "x": torch.full((2,), float(rank), device=idist.device())}
    result = idist.reduce(tree, world_size - 1)
    assert tree["x"].tolist() == [rank] * 2
    if rank == world_size - 1:
        assert result["n"] == total and result["x"].tolist() == [total] * 2
    else:
        assert result is None


@on_every_rank
def test_reductions_to_ranks_of_a_group() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    some = [0, world_size - 1] if world_size > 1 else [0]
    x = torch.arange(float(len(some)), device=idist.device()) + rank
    part: Any = idist.reduce_scatter(x, group=some)
    if rank in some:
        assert part.tolist() == [sum(some) + len(some) * some.index(rank)]
    else:
        assert part is x
    reduced = idist.reduce(x, some[-1], group=some)
    wanted = [sum(some) + len(some) * column for column in range(len(some))]
    assert (reduced.tolist() == wanted) if rank == some[-1] else reduced is None
    assert idist.reduce_scatter(x, group=[]) is x and idist.reduce(x, group=[]) is None


@on_every_rank
def test_reductions_to_ranks_while_the_rank_computes() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    rows = torch.full((1000 * world_size,), float(rank), device=idist.device())
    whole = torch.full((1000,), float(rank), device=idist.device())
    works = [
        idist.reduce_scatter(rows, async_op=True),
        idist.reduce(whole, async_op=True),
        idist.reduce({"n": rank}, async_op=True),
    ]
    part, reduced, tree = (work.wait() for work in works)
    total = sum(range(world_size))
    assert here(part).unique().tolist() == [total]
    assert (reduced is None and tree is None) if rank else tree == {"n": total}
    assert here(whole).unique().tolist() == [rank if rank else total]


@on_every_rank
def test_wrong_arguments_of_reductions_to_ranks() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    x = torch.ones(2 * world_size, device=idist.device())
    with raises(ValueError, "Unknown reduction"):
        idist.reduce_scatter(x, "MEAN")
    with raises(ValueError, "ADASUM"):
        idist.reduce_scatter(x, "ADASUM")
    with raises(ValueError, "dst must be a global rank"):
        idist.reduce(x, world_size)
    if world_size > 1:
        with raises(ValueError, "equal parts"):
            idist.reduce_scatter(x[1:])
        with raises(ValueError, "share memory"):
            idist.reduce(torch.ones(1, device=x.device).expand(2))
    with raises(ValueError, "one entry per rank"):
        idist.reduce_scatter([x] * (world_size + 1))
    with raises(TypeError, "a tensor or a list"):
        idist.reduce_scatter(1.0)  # type: ignore[call-overload]
    with raises(TypeError, "takes a tensor"):
        idist.reduce_scatter(["text"] * world_size)
    with raises(ValueError, "out= must be"):
        idist.reduce_scatter(x, out=torch.empty(3, device=x.device))
    with raises(ValueError, "SUM and AVERAGE"):
        idist.reduce_scatter(x, "MAX", sync_grads=True)
    assert idist.all_reduce(1) == world_size and rank < world_size


@on_every_rank
def test_gradients_of_reduced_parts() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for op, scale in (("SUM", 1.0), ("AVERAGE", 1.0 / world_size)):
        x = torch.ones(2 * world_size, dtype=torch.float64, device=idist.device(), requires_grad=True)
        part = idist.reduce_scatter(x, op, sync_grads=True)
        (part.sum() * (rank + 1)).backward()
        wanted = [(other + 1) * scale for other in range(world_size) for _ in (0, 1)]
        assert x.grad is not None and x.grad.tolist() == pytest.approx(wanted)
