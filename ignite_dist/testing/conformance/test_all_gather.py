"""What ``all_gather`` and its relatives promise, on every model."""

from __future__ import annotations

import threading
from pathlib import PurePosixPath

import pytest
import torch

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises
from ignite_dist.testing.conformance.test_all_reduce import (
    DTYPES,
    contribution,
    everyone,
    here,
    name_of,
    on_device,
    same_bits,
)
from ignite_dist.values import message_header, serialization


@on_every_rank
def test_tensors_of_every_dtype() -> dict[tuple[str, str], str]:
    for dtype in DTYPES:
        tensor = on_device(contribution(idist.get_rank(), dtype))
        result = idist.all_gather(tensor)
        wanted = torch.cat([c.view(torch.uint8) for c in everyone(lambda rank: contribution(rank, dtype))])  # noqa: B023
        assert result.device == tensor.device and result.dtype == dtype
        assert result.shape == (2 * idist.get_world_size(), 3)
        assert torch.equal(here(result).view(torch.uint8), wanted)
    return {("all_gather", name_of(dtype)): "✓" for dtype in DTYPES}


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (0, 3), (3, 0), (2, 3, 4), (400_000,)])
@on_every_rank
def test_shapes(shape: tuple[int, ...]) -> None:
    world_size = idist.get_world_size()
    result = idist.all_gather(torch.full(shape, idist.get_rank(), device=idist.device()))
    wanted = torch.cat([torch.full(shape or (1,), rank) for rank in range(world_size)])
    assert result.shape == wanted.shape and torch.equal(result.cpu(), wanted)


@on_every_rank
def test_strided_tensors_and_graphs() -> None:
    tensor = torch.arange(6.0, device=idist.device(), requires_grad=True).view(2, 3).t()
    result = idist.all_gather(tensor)
    assert result.tolist() == [[0, 3], [1, 4], [2, 5]] * idist.get_world_size()
    assert not result.requires_grad
    result.zero_()
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]], "the result has memory of its own"


@on_every_rank
def test_bits_survive() -> None:
    payload_nan = torch.tensor([0x7FC00001, 0x7F800002], dtype=torch.int32, device=idist.device()).view(
        torch.float32
    )
    for row in idist.all_gather(payload_nan).view(-1, 2):
        assert same_bits(row, payload_nan)


@on_every_rank
def test_into_a_buffer() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for dtype in (torch.float32, torch.int16, torch.bool):
        for numel in (3, 300_000):
            out = torch.zeros(world_size * numel, dtype=dtype, device=idist.device())
            address = out.data_ptr()
            given = torch.full((numel,), rank % 2, dtype=dtype, device=idist.device())
            assert idist.all_gather(given, out=out) is out and out.data_ptr() == address
            wanted = torch.cat([torch.full((numel,), r % 2, dtype=dtype) for r in range(world_size)])
            assert torch.equal(out.cpu(), wanted)
    tensor = torch.ones(2, 3, device=idist.device())
    unfit = [
        torch.empty(world_size * 2, 2),
        torch.empty(world_size * 2, 3, dtype=torch.float64),
        torch.empty(world_size, 2, 3),
    ]
    if idist.device().type != "xla":  # which has no memory layout: there every tensor is contiguous
        unfit.append(torch.empty(3, world_size * 2).t())
    for wrong in unfit:
        with raises(ValueError, "out="):
            idist.all_gather(tensor, out=wrong.to(idist.device()))
    with raises(TypeError, "out="):
        idist.all_gather("text", out=tensor)
    assert idist.all_gather(rank) == list(range(world_size))


OBJECTS = [
    1,
    2**70,
    0.1,
    True,
    None,
    "",
    "żółć 日本語 🚀",
    b"\x00\xff",
    PurePosixPath("a/b"),
    {"nested": [1, (2, {"x": None})]},
    {"tensor": 1.5},
    "x" * 5_000,
]


@on_every_rank
def test_objects() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for value in OBJECTS:
        result = idist.all_gather(value)
        assert type(result) is list and result == [value] * world_size
    assert idist.all_gather((rank, "é" * rank)) == [(r, "é" * r) for r in range(world_size)]
    tensors = idist.all_gather({"t": torch.full((2,), rank)})
    assert [one["t"].tolist() for one in tensors] == [[r, r] for r in range(world_size)]


@on_every_rank
def test_objects_of_very_different_sizes() -> None:
    world_size, last = idist.get_world_size(), idist.get_world_size() - 1
    value = "y" * 3_000_000 if idist.get_rank() == last else idist.get_rank()
    assert idist.all_gather(value) == [*range(last), "y" * 3_000_000]
    rank = idist.get_rank()
    batch = torch.arange(300_000.0 * (1 + rank)).view(-1, 1000)
    for number, rows in enumerate(idist.all_gather(list(batch[::2]))):
        assert torch.equal(torch.stack(rows), torch.arange(300_000.0 * (1 + number)).view(-1, 1000)[::2])
    overhead = len(serialization.encode("x" * 100)) - 100
    for extra in (-1, 0, 1):
        text = "x" * (message_header.INLINE_BYTES - overhead + extra)
        assert idist.all_gather(text) == [text] * world_size


@on_every_rank
def test_a_small_object_costs_one_collective_and_a_large_one_two() -> None:
    for value, collectives in (("short", 1), ({"loss": 0.25, "epoch": 3}, 1), (12, 1), ("x" * 1_000, 2)):
        with count_collectives() as counted:
            idist.all_gather(value)
        if idist.get_world_size() > 1:
            assert counted.count == collectives, value


@on_every_rank
def test_functions_by_value() -> None:
    rank = idist.get_rank()
    functions = idist.all_gather(lambda: rank)
    assert [function() for function in functions] == list(range(idist.get_world_size()))


@on_every_rank
def test_what_cannot_be_pickled_sends_nothing() -> None:
    if idist.get_world_size() > 1 and idist.get_rank() == 0:
        with raises(TypeError, "cannot be sent"):
            idist.all_gather(threading.Lock())
    assert idist.all_gather("after") == ["after"] * idist.get_world_size()


@on_every_rank
def test_ragged() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()

    def share(r: int) -> torch.Tensor:
        return torch.full([(3, 2), (0,), (), (1, 2, 2)][r % 4], r, dtype=torch.int16)

    result = idist.all_gather_ragged(share(rank).to(idist.device()))
    assert len(result) == world_size
    for r, tensor in enumerate(result):
        assert tensor.dtype == torch.int16 and tensor.device == idist.device()
        assert tensor.shape == share(r).shape and torch.equal(tensor.cpu(), share(r))
    empty = idist.all_gather_ragged(torch.empty(0, 5, device=idist.device()))
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 5)] * world_size
    for wrong in ([1, 2], "text", None):
        with raises(TypeError, "all_gather_ragged"):
            idist.all_gather_ragged(wrong)


@on_every_rank
def test_ragged_dtypes_that_differ_are_noticed_on_every_rank() -> None:
    if idist.get_world_size() == 1:
        return
    dtype = torch.float32 if idist.get_rank() == 0 else torch.float64
    with raises(CollectiveMismatchError, "rank 1: torch.float64"):
        idist.all_gather_ragged(torch.ones(2, dtype=dtype, device=idist.device()))
    assert len(idist.all_gather(1)) == idist.get_world_size()


@on_every_rank
def test_with_known_shapes() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    shapes = [[r + 1, 2] for r in range(world_size)]
    tensor = torch.full((rank + 1, 2), rank, device=idist.device())
    with count_collectives() as counted:
        result = idist.all_gather_tensors_with_shapes(tensor, shapes)
    assert counted.count == 1 or world_size == 1
    assert [one.tolist() for one in result] == [[[r, r]] * (r + 1) for r in range(world_size)]
    with raises(ValueError, "one shape per rank"):
        idist.all_gather_tensors_with_shapes(tensor, [*shapes, [1, 2]])
    with raises(ValueError, "for this rank"):
        idist.all_gather_tensors_with_shapes(tensor[:, :1], shapes)
