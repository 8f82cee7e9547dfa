"""What ``broadcast`` promises, on every model."""

from __future__ import annotations

import threading

import torch

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises
from ignite_dist.testing.conformance.test_all_gather import OBJECTS
from ignite_dist.testing.conformance.test_all_reduce import (
    DTYPES,
    contribution,
    here,
    name_of,
    on_device,
    same_bits,
)


@on_every_rank
def test_tensors_of_every_dtype_from_every_rank() -> dict[tuple[str, str], str]:
    for src in range(idist.get_world_size()):
        for dtype in DTYPES:
            tensor = on_device(contribution(idist.get_rank(), dtype))
            assert idist.broadcast(tensor, src=src) is tensor
            assert same_bits(here(tensor), contribution(src, dtype))
            elsewhere = contribution(idist.get_rank(), dtype)
            assert same_bits(idist.broadcast(elsewhere, src=src), contribution(src, dtype))
    return {("broadcast", name_of(dtype)): "✓" for dtype in DTYPES}


@on_every_rank
def test_strided_empty_and_large_tensors() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    storage = torch.full((4, 4), rank, device=idist.device())
    view = storage[:, ::2]
    assert idist.broadcast(view, src=last) is view
    assert (view == last).all() and (storage[:, 1::2] == rank).all()
    assert idist.broadcast(torch.empty(0, 2, device=idist.device())).shape == (0, 2)
    assert idist.broadcast(torch.tensor(rank, device=idist.device()), src=last).item() == last
    large = torch.full((500_000,), float(rank), device=idist.device())
    assert (idist.broadcast(large, src=last) == last).all()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank), device=idist.device()))
    assert idist.broadcast(parameter, src=last) is parameter and parameter.is_leaf
    assert parameter.tolist() == [last] * 3
    with raises(ValueError, "clone()"):
        idist.broadcast(torch.ones(1, device=idist.device()).expand(4))


@on_every_rank
def test_objects() -> None:
    rank = idist.get_rank()
    for src in range(idist.get_world_size()):
        for value in OBJECTS:
            if value is not None:
                assert idist.broadcast(value if rank == src else "anything", src=src) == value
    assert idist.broadcast((rank, "z" * 2_000_000), src=0) == (0, "z" * 2_000_000)


@on_every_rank
def test_safe_mode_needs_no_placeholder() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for value in OBJECTS:
        if value is not None:
            assert idist.broadcast(value if rank == last else None, src=last, safe_mode=True) == value
    for dtype in DTYPES:
        sent = on_device(contribution(last, dtype))
        given = sent if rank == last else [None, "text", 3.5, torch.ones(9)][rank % 4]
        result = idist.broadcast(given, src=last, safe_mode=True)
        assert same_bits(here(result), here(sent)) and result.device == sent.device
        assert (result is sent) == (rank == last)


@on_every_rank
def test_safe_mode_fills_a_tensor_that_fits() -> None:
    rank = idist.get_rank()
    tensor = torch.full((3, 2), float(rank), device=idist.device())
    assert idist.broadcast(tensor, safe_mode=True) is tensor
    assert (tensor == 0).all()
    other_shape = torch.full((2, 3), 7.0, device=idist.device())
    result = idist.broadcast(tensor if rank == 0 else other_shape, safe_mode=True)
    assert result.shape == (3, 2) and (other_shape == 7).all()


@on_every_rank
def test_safe_mode_takes_tensors_whose_elements_share_memory() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for shared in (torch.full((1,), rank).expand(3), (torch.arange(4.0) + rank).unfold(0, 2, 1)):
        before = shared.clone()
        for sent in (shared, torch.ones(shared.shape), "text"):
            received = idist.broadcast(sent if rank == last else shared, src=last, safe_mode=True)
            if isinstance(sent, str):
                assert received == sent
            else:
                assert torch.equal(received, before - rank + last if sent is shared else sent)
            assert torch.equal(shared, before)


@on_every_rank
def test_the_cost() -> None:
    for value, safe_mode, collectives in (
        (torch.ones(3), False, 1),
        (torch.ones(3), True, 2),
        ("short", False, 1),
        ("short", True, 1),
        ("x" * 1_000, False, 2),
    ):
        with count_collectives() as counted:
            idist.broadcast(value, safe_mode=safe_mode)
        if idist.get_world_size() > 1:
            assert counted.count == collectives, (value, safe_mode)


@on_every_rank
def test_none() -> None:
    rank = idist.get_rank()
    with raises(ValueError, "None"):
        idist.broadcast(None)
    with raises(ValueError, "source"):
        idist.broadcast(None, src=rank, safe_mode=True)
    assert idist.broadcast("after") == "after"


@on_every_rank
def test_wrong_arguments_on_one_rank_send_nothing() -> None:
    world_size = idist.get_world_size()
    if idist.get_rank() == world_size - 1:
        for wrong in (-1, world_size, 99):
            with raises(ValueError, "src"):
                idist.broadcast("text", src=wrong)
        with raises(TypeError, "to_dense"):
            idist.broadcast(torch.ones(2, 2).to_sparse())
        if world_size > 1:
            with raises(TypeError, "cannot be sent"):
                idist.broadcast(threading.Lock(), src=world_size - 1)
    assert idist.broadcast(idist.get_rank(), src=world_size - 1) == world_size - 1
