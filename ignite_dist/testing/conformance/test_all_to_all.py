"""What ``all_to_all`` promises, on every model."""

from __future__ import annotations

import pytest
import torch

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises
from ignite_dist.testing.conformance.test_all_reduce import (
    DTYPES,
    contribution,
    here,
    name_of,
    on_device,
    same_bits,
)


@on_every_rank
def test_rows_of_every_dtype_are_exchanged() -> dict[tuple[str, str], str]:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for dtype in DTYPES:
        rows = torch.cat(
            [contribution((rank + other) % 3, dtype).view(torch.uint8) for other in range(world_size)]
        )
        tensor = on_device(rows.view(dtype))
        before = here(tensor).clone()
        result = idist.all_to_all(tensor)
        assert result.device == tensor.device and result.dtype == dtype and result.shape == tensor.shape
        assert same_bits(here(result), before), dtype  # the rows of two ranks for each other are equal
        assert same_bits(here(tensor), before) and result is not tensor
    return {("all_to_all", name_of(dtype)): "✓" for dtype in DTYPES}


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (2, 0, 3), (200_000,)])
@on_every_rank
def test_shapes_of_rows_that_are_exchanged(shape: tuple[int, ...]) -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    rows = [torch.full(shape, 10 * rank + other, device=idist.device()) for other in range(world_size)]
    wanted = torch.cat([torch.full(shape, 10 * other + rank) for other in range(world_size)])
    with count_collectives() as counted:
        result = idist.all_to_all(torch.cat(rows))
    assert counted.count <= 1
    assert torch.equal(here(result), wanted)
    strided = torch.stack(rows, -1).movedim(-1, 0).flatten(0, 1) if len(shape) == 1 else torch.cat(rows)
    assert torch.equal(here(idist.all_to_all(strided)), wanted)


@on_every_rank
def test_exchanged_rows_in_a_buffer() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    x = torch.arange(2.0 * world_size, device=idist.device()) + 100 * rank
    out = torch.empty_like(x)
    wanted = [100.0 * other + 2 * rank + column for other in range(world_size) for column in (0, 1)]
    version = out._version
    assert idist.all_to_all(x, out=out) is out and out.tolist() == wanted and out._version > version
    assert idist.all_to_all(x, out=x) is x and x.tolist() == wanted  # the same memory
    for wrong in (torch.empty(3), torch.empty(2 * world_size, dtype=torch.int64)):
        with raises(ValueError, "out= must be"):
            idist.all_to_all(x, out=wrong.to(idist.device()))
    with raises(TypeError, "out= is for tensors"):
        idist.all_to_all([1] * world_size, out=out)  # type: ignore[call-overload]


@on_every_rank
def test_lists_of_anything_are_exchanged() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    assert idist.all_to_all([f"{rank} {other}" for other in range(world_size)]) == [
        f"{other} {rank}" for other in range(world_size)
    ]
    sent = [
        torch.full((100 * other + 1000 * rank,), float(rank), device=idist.device())
        for other in range(world_size)
    ]
    for other, received in enumerate(idist.all_to_all(sent)):
        assert received.device == sent[0].device
        assert here(received).tolist() == [float(other)] * (100 * rank + 1000 * other)
    mixed = ["x" * 10_000 if (rank + other) % 2 else torch.ones(2, 3) for other in range(world_size)]
    for other, got in enumerate(idist.all_to_all(mixed)):
        assert got == "x" * 10_000 if (rank + other) % 2 else got.shape == (2, 3)
    unequal = idist.all_to_all(
        [b"x" * 600 if rank == 0 and other == 0 else b"" for other in range(world_size)]
    )
    assert [len(one) for one in unequal] == [600 if rank == other == 0 else 0 for other in range(world_size)]


@on_every_rank
def test_an_exchange_in_a_group() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    some = [0, world_size - 1] if world_size > 1 else [0]
    x = torch.arange(float(len(some)), device=idist.device()) + 10 * rank
    result = idist.all_to_all(x, some)
    if rank in some:
        assert result.tolist() == [10.0 * other + some.index(rank) for other in some]
    else:
        assert result is x
    entries = [[rank, other] for other in some]
    assert idist.all_to_all(entries, some) == ([[other, rank] for other in some] if rank in some else entries)
    assert idist.all_to_all(x, []) is x


@on_every_rank
def test_an_exchange_while_the_rank_computes() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    x = torch.full((1000 * world_size,), float(rank), device=idist.device())
    works = idist.all_to_all(x, async_op=True), idist.all_to_all([rank] * world_size, async_op=True)
    rows, numbers = (work.wait() for work in works)
    assert here(rows).view(world_size, -1)[:, 0].tolist() == numbers == list(range(world_size))


@on_every_rank
def test_wrong_arguments_of_an_exchange() -> None:
    world_size = idist.get_world_size()
    if world_size > 1:
        with raises(ValueError, "equal parts"):
            idist.all_to_all(torch.ones(world_size + 1))
    with raises(ValueError, "equal parts"):
        idist.all_to_all(torch.tensor(1.0))
    with raises(ValueError, "one entry per rank"):
        idist.all_to_all([1] * (world_size + 1))
    with raises(TypeError, "a tensor or a list"):
        idist.all_to_all("text" * world_size)
    with raises(TypeError, "floating-point"):
        idist.all_to_all(torch.ones(world_size, dtype=torch.int64), sync_grads=True)
    with raises(ValueError, "async_op"):
        idist.all_to_all(torch.ones(world_size), sync_grads=True, async_op=True)
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_gradients_go_back_to_the_rank_that_sent_the_row() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    x = torch.arange(2.0 * world_size, dtype=torch.float64, device=idist.device(), requires_grad=True)
    (idist.all_to_all(x, sync_grads=True).pow(2) * (rank + 1)).sum().backward()
    weight = torch.arange(1, world_size + 1).repeat_interleave(2)  # of the loss that got the row
    assert x.grad is not None and x.grad.tolist() == (2 * here(x.detach()) * weight).tolist()
    parts = [
        torch.full((other + 1,), 2.0, dtype=torch.float64, device=idist.device(), requires_grad=True)
        for other in range(world_size)
    ]
    loss = sum(part.pow(3).sum() for part in idist.all_to_all(parts, sync_grads=True))
    (first,) = torch.autograd.grad(loss, parts[:1], create_graph=True)
    assert first.tolist() == [12.0]
    first.sum().backward()  # twice
    assert parts[0].grad is not None and parts[0].grad.tolist() == [12.0]
