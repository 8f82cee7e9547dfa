"""What ``gather`` and ``scatter`` promise, on every model."""

from __future__ import annotations

import pytest
import torch

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.context.live import current_model
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


@on_every_rank
def test_tensors_of_every_dtype_are_gathered_on_one_rank() -> dict[tuple[str, str], str]:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for dtype in DTYPES:
        tensor = on_device(contribution(rank, dtype))
        result = idist.gather(tensor, dst=last)
        if rank != last:
            assert result is None
            continue
        assert result is not None and result.device == tensor.device and result.dtype == dtype
        wanted = torch.cat([c.view(torch.uint8) for c in everyone(lambda rank: contribution(rank, dtype))])  # noqa: B023
        assert torch.equal(here(result).view(torch.uint8), wanted)
    return {("gather", name_of(dtype)): "✓" for dtype in DTYPES}


@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 0), (2, 3, 4), (400_000,)])
@on_every_rank
def test_shapes_that_are_gathered_on_one_rank(shape: tuple[int, ...]) -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    result = idist.gather(torch.full(shape, rank, device=idist.device()))
    wanted = torch.cat([torch.full(shape or (1,), other) for other in range(world_size)])
    assert result is None if rank else torch.equal(here(result), wanted)


@on_every_rank
def test_empty_tensors_with_a_stride_of_0() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    empty = torch.tensor(1.0, device=idist.device()).expand(0)
    gathered = idist.gather(empty)
    scattered = idist.scatter(None if rank else [empty] * world_size)
    for result in (gathered, scattered, *idist.all_to_all([empty] * world_size)):
        assert result is None or here(result).shape == (0,)


@on_every_rank
def test_other_ranks_neither_receive_nor_hold_what_is_gathered() -> None:
    """Seen at the transport, where parts may have any size. XLA's ranks get zeros instead."""
    transport, world_size = current_model().transport, idist.get_world_size()
    if not transport.supports("all_to_all", None, torch.uint8, torch.device("cpu")) or world_size == 1:
        return
    received: list[int] = []
    exchange = transport.all_to_all

    def seen(tensor, group, out, sizes):  # type: ignore[no-untyped-def]
        received.append(out.nbytes)
        return exchange(tensor, group, out, sizes)

    transport.all_to_all = seen  # type: ignore[method-assign]
    try:
        idist.gather(torch.ones(1000))
        idist.gather("x" * 100_000)
    finally:
        del transport.all_to_all
    tensor, header, text = received
    assert (tensor > 0) is (text > 0) is (idist.get_rank() == 0) and header == 512 * world_size


@on_every_rank
def test_objects_are_gathered_on_one_rank() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for size, most in ((10, 1), (100_000, 2)):
        with count_collectives() as counted:
            result = idist.gather({"rank": rank, "text": "x" * size * rank}, dst=0)
        wanted = [{"rank": other, "text": "x" * size * other} for other in range(world_size)]
        assert result == (None if rank else wanted)
        if idist.model_name() in ("native-dist", "horovod-dist"):
            assert counted.count == (most if world_size > 1 else 0)
    assert idist.gather(None) == (None if rank else [None] * world_size)


@on_every_rank
def test_entries_of_every_dtype_are_scattered() -> dict[tuple[str, str], str]:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for dtype in DTYPES:
        for moved in (on_device, lambda tensor: tensor):
            entries = [moved(contribution(other, dtype)) for other in range(world_size)]
            result = idist.scatter(entries if rank == 0 else None)
            assert result.device == entries[0].device and result.dtype == dtype
            assert same_bits(here(result), contribution(rank, dtype)), dtype
    return {("scatter", name_of(dtype)): "✓" for dtype in DTYPES}


@on_every_rank
def test_entries_of_any_shape_and_kind_are_scattered() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    last = world_size - 1
    kinds = ["text", torch.zeros(0), torch.tensor(3.0), {"a": 1}, torch.arange(200_000), None, "x" * 10_000]
    for start in range(len(kinds)):
        entries = [kinds[(start + other) % len(kinds)] for other in range(world_size)]
        result = idist.scatter(entries if rank == last else None, src=last)
        wanted = entries[rank]
        if isinstance(wanted, torch.Tensor):
            assert same_bits(result, wanted)
            result.zero_()  # memory of its own
        else:
            assert result == wanted
    assert kinds[4][1] == 1
    strided = torch.arange(6.0, device=idist.device()).view(2, 3).t()
    assert idist.scatter([strided] * world_size if rank == 0 else None).tolist() == strided.tolist()


@on_every_rank
def test_small_entries_take_one_collective_and_large_ones_two() -> None:
    if idist.model_name() not in ("native-dist", "horovod-dist"):  # others gather, in more steps
        return
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for entry, count in (("small", 1), (torch.ones(4), 1), ("x" * 1000, 2), (torch.ones(1000), 2)):
        with count_collectives() as counted:
            idist.scatter([entry] * world_size if rank == 0 else None)
        assert counted.count == (count if world_size > 1 else 0)


@on_every_rank
def test_gather_and_scatter_in_a_group() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    last = world_size - 1
    some = [0, last] if last else [0]
    entries = [f"for {other}" for other in some] if rank == last else None
    assert idist.gather(rank, last, some) == (some if rank == last else None)
    assert idist.scatter(entries, last, some) == (f"for {rank}" if rank in some else entries)
    gathered = idist.gather(torch.tensor([rank], device=idist.device()), 0, some)
    assert gathered is None if rank else here(gathered).tolist() == some
    alone = idist.scatter([torch.ones(2)] if rank == 0 else None, 0, [0])
    assert (alone is None) is (rank != 0)
    assert idist.gather(rank, group=[]) is None and idist.scatter(None, group=[]) is None


@on_every_rank
def test_gather_and_scatter_while_the_rank_computes() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    tensor = torch.full((1000,), float(rank), device=idist.device())
    works = [
        idist.gather(tensor, async_op=True),
        idist.gather({"rank": rank}, async_op=True),
        idist.scatter(
            [torch.ones(other + 1) for other in range(world_size)] if rank == 0 else None, async_op=True
        ),
    ]
    gathered, objects, part = (work.wait() for work in works)
    assert (gathered is None) is (objects is None) is (rank != 0)
    assert part.shape == (rank + 1,)
    if rank == 0:
        assert here(gathered).view(world_size, -1)[:, 0].tolist() == list(range(world_size))
        assert objects == [{"rank": other} for other in range(world_size)]


@on_every_rank
def test_wrong_arguments_of_gather_and_scatter() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for wrong in (world_size, -1, 0.5, "0"):
        with raises(ValueError, "dst must be a global rank"):
            idist.gather(1, dst=wrong)  # type: ignore[arg-type]
        with raises(ValueError, "src must be a global rank"):
            idist.scatter(None, src=wrong)  # type: ignore[arg-type]
    with raises(ValueError, "group"):
        idist.gather(1, group="nothing")
    if world_size > 1:
        with raises(ValueError, "dst must be a global rank of the group [0]"):
            idist.gather(1, dst=1, group=[0])
    with raises(TypeError, "sparse"):
        idist.gather(torch.ones(2).to_sparse())
    if world_size > 1:
        with raises(TypeError, "cannot be sent"):
            idist.gather(iter_that_cannot_be_sent(), dst=rank)
    with raises(ValueError if rank else TypeError, "scatter takes"):
        idist.scatter(iter("text"))  # type: ignore[arg-type]
    with raises(ValueError, "scatter takes"):
        idist.scatter([1] * (world_size + 1))
    assert idist.all_reduce(1) == world_size


def iter_that_cannot_be_sent() -> object:
    return (number for number in range(3))


@on_every_rank
def test_ranks_that_call_different_ones_of_them_raise() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    if world_size == 1 or idist.model_name() == "xla-dist":  # XLA compares the calls before
        return
    with raises(CollectiveMismatchError, "different c"):  # "collective" or "calls"
        if rank == 0:
            idist.gather("text")
        else:
            idist.all_to_all(["text"] * world_size)
    assert idist.all_reduce(1) == world_size
