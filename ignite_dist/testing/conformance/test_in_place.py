"""A result in place is one for autograd too; and where it goes may look like anything, on every model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.collectives.buckets import average_tensors, broadcast_tensors
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises
from ignite_dist.testing.conformance.test_all_reduce import here, on_device

SIZES = [1, 2, 3, 1_000, 600_000, 1_000_000]  # 4 bytes to 4 MB


def saved(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that its own backward pass needs as it is."""
    x = torch.ones(numel, dtype=dtype, device=idist.device(), requires_grad=True)
    return x.exp()


@pytest.mark.parametrize("numel", SIZES)
@on_every_rank
def test_autograd_notices_a_reduction_in_place(numel: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for op in ("SUM", "AVERAGE", "MAX"):
            for exact in (True, False):
                y = saved(numel, dtype)
                idist.all_reduce(y, op, exact=exact)
                with raises(RuntimeError, "modified by an inplace operation"):
                    y.sum().backward()


@pytest.mark.parametrize("numel", SIZES)
@on_every_rank
def test_autograd_notices_a_broadcast_and_a_gather_in_place(numel: int) -> None:
    world_size, last = idist.get_world_size(), idist.get_world_size() - 1
    for safe_mode in (False, True):
        y = saved(numel)
        assert idist.broadcast(y, src=last, safe_mode=safe_mode) is y
        with raises(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()
    y = saved(numel * world_size)
    assert idist.all_gather(torch.ones(numel, device=idist.device()), out=y) is y
    with raises(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()


@on_every_rank
def test_a_view_is_changed_with_its_base_and_a_parameter_by_its_tensors() -> None:
    model = current_model()
    for numel in (3, 600_000):
        for change in (
            lambda view: idist.all_reduce(view),
            lambda view: idist.broadcast(view),
            lambda view: idist.all_reduce(view[::2]),
            lambda view: idist.all_reduce(view.detach()),
            lambda view: average_tensors(model, [view], model.groups.world),
            lambda view: broadcast_tensors(model, [view], 0, model.groups.world),
        ):
            y = saved(numel + 2)
            with torch.no_grad():
                change(y[2:])
            with raises(RuntimeError, "modified by an inplace operation"):
                y.sum().backward()


@on_every_rank
def test_what_is_not_in_place_is_not_noted() -> None:
    for numel in (3, 600_000):
        y = saved(numel)
        before = y._version
        idist.all_reduce(y, inplace=False)
        idist.all_reduce({"y": y, "z": 1})
        idist.all_reduce(y, sync_grads=True)
        idist.all_gather(y)
        if idist.get_world_size() > 1:
            outside = (idist.get_rank() + 1) % idist.get_world_size()
            for rank in range(idist.get_world_size()):
                idist.all_reduce(
                    y if rank == outside else torch.ones(numel, device=idist.device()), group=[rank]
                )
        assert y._version == before
        y.sum().backward()


@on_every_rank
def test_results_of_inference_mode() -> None:
    world_size = idist.get_world_size()
    for numel in (3, 400_000):
        ordinary = torch.ones(numel, device=idist.device())
        with torch.inference_mode():
            made = torch.ones(numel, device=idist.device())
            buffer = torch.zeros(numel * world_size, device=idist.device())
            idist.all_reduce(ordinary)
            idist.all_reduce(made)
        assert (made == world_size).all() and (ordinary == world_size).all()
        assert idist.broadcast(made) is made and idist.all_reduce(made) is made
        assert idist.all_gather(made, out=buffer) is buffer and (buffer == world_size**2).all()


@on_every_rank
def test_a_buffer_that_is_conjugated_or_negated_lazily() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for numel in (3, 300_000):
        given = on_device(torch.full((numel,), complex(rank, 2)))
        storage = on_device(torch.zeros(numel * world_size, dtype=torch.complex64))
        out = storage.conj()
        assert idist.all_gather(given, out=out) is out
        wanted = [complex(one, 2) for one in range(world_size)]
        assert here(out.resolve_conj().clone()).view(world_size, -1)[:, -1].tolist() == wanted
        negated = torch._neg_view(torch.zeros(numel * world_size, device=idist.device()))
        assert (
            idist.all_gather(torch.full((numel,), rank + 1.0, device=idist.device()), out=negated) is negated
        )
        assert negated.view(world_size, -1)[:, -1].tolist() == [one + 1.0 for one in range(world_size)]
        for op in ("SUM", "AVERAGE"):
            lazily = on_device(torch.full((numel,), 1 + 2j)).conj()
            idist.all_reduce(lazily, op)
            factor = world_size if op == "SUM" else 1
            assert here(lazily.resolve_conj().clone())[-1].item() == factor * (1 - 2j)
            imaginary = lazily.imag
            before = imaginary[-1].item()
            idist.all_reduce(imaginary, op)
            assert imaginary[-1].item() == before * factor
        sent = on_device(torch.full((numel,), complex(rank, 1))).conj()
        idist.broadcast(sent, src=world_size - 1)
        assert here(sent.resolve_conj().clone())[-1].item() == complex(world_size - 1, -1)


@pytest.mark.parametrize("numel", [3, 1_000, 300_000])
@on_every_rank
def test_a_buffer_may_hold_what_is_gathered(numel: int) -> None:
    """A rank's own place, another rank's, or across two places."""
    world_size, rank = idist.get_world_size(), idist.get_rank()
    wanted = [float(one) for one in range(world_size) for _ in range(2)]
    for start in (rank * numel, 0, (world_size - 1) * numel, (world_size - 1) * numel // 2):
        for dtype in (torch.float32, torch.float8_e5m2):
            out = torch.zeros(world_size * numel).to(dtype)
            own = out[start : start + numel]
            own.fill_(rank)
            assert idist.all_gather(own, out=out) is out
            found = out.float().view(world_size, numel)
            assert found[:, [0, -1]].flatten().tolist() == wanted, (start, dtype)
            assert (found == found[:, :1]).all()


OVERLAPPING = {
    "windows": lambda: torch.arange(4.0).unfold(0, 2, 1),
    "some windows": lambda: torch.arange(100.0).unfold(0, 2, 1)[:3],
    "crossing": lambda: torch.arange(20.0).as_strided((3, 3), (4, 2)),
    "expanded": lambda: torch.ones(2, 1).expand(2, 3),
}
APART = {
    "interleaved": lambda: torch.arange(20.0).as_strided((2, 3), (3, 2)),
    "windows apart": lambda: torch.arange(10.0).unfold(0, 2, 3),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "every other": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[::2],
    "one of a dimension": lambda: torch.arange(4.0).as_strided((4, 1), (1, 0)),
    "none": lambda: torch.arange(4.0).as_strided((0, 3), (1, 1)),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@on_every_rank
def test_elements_that_share_memory_cannot_hold_a_result() -> None:
    """(On the CPU: on an XLA device a view has no strides.)"""
    for name, make in OVERLAPPING.items():
        tensor = make()
        before = tensor.clone()
        with count_collectives() as counted:
            for call in (
                idist.all_reduce,
                idist.broadcast,
                lambda one: idist.broadcast(one, safe_mode=False),
            ):
                with raises(ValueError, "clone()"):
                    call(tensor)
        assert counted.count == 0 and (tensor == before).all(), name
        wanted = before * idist.get_world_size()
        assert (idist.all_reduce(tensor, inplace=False) == wanted).all(), name
        assert (idist.all_reduce([tensor, tensor])[1] == wanted).all(), name
    for name, make in APART.items():
        tensor = make()
        wanted = tensor * idist.get_world_size()
        assert idist.all_reduce(tensor) is tensor and (tensor == wanted).all(), name
        tensor += idist.get_rank()
        assert idist.broadcast(tensor) is tensor and (tensor == wanted).all(), name
    on_its_device = torch.arange(4.0, device=idist.device()).unfold(0, 2, 1)
    with raises(ValueError, "clone()"):
        idist.broadcast(on_its_device)


@on_every_rank
def test_a_tree_may_hold_one_tensor_twice_and_views_of_one_another() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    base = torch.arange(6.0, device=idist.device())
    result = idist.all_reduce({"base": base, "again": base, "part": base[2:], "strided": base[::2]})
    wanted = torch.arange(6.0) * world_size
    assert base.tolist() == list(range(6))
    assert result["base"].tolist() == result["again"].tolist() == wanted.tolist()
    assert result["part"].tolist() == wanted[2:].tolist()
    assert result["strided"].tolist() == wanted[::2].tolist()
    model = current_model()
    shared = torch.full((6,), float(rank), device=idist.device())
    broadcast_tensors(model, [shared, shared[2:], shared[:3]], world_size - 1, model.groups.world)
    assert shared.tolist() == [world_size - 1] * 6
    averaged = torch.full((6,), float(rank), device=idist.device())
    average_tensors(model, [averaged, averaged[2:], averaged[:3]], model.groups.world)
    assert averaged.tolist() == [(world_size - 1) / 2] * 6
