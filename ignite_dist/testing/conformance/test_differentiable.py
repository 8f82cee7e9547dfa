"""Collectives with a gradient, on every model, against the gradient of one process that has all the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import on_every_rank, raises

WIDTH, BATCH = 3, 2
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def inputs() -> tuple[Tensor, Tensor]:
    """A weight that all ranks share, and the samples of all of them: ``(world_size, BATCH, WIDTH)``."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return weight, torch.randn(idist.get_world_size(), BATCH, WIDTH, generator=generator, dtype=torch.float64)


def contrastive(embedded: Tensor) -> Tensor:
    """Every sample against every other, so that no rank can compute it from its own."""
    similar = embedded @ embedded.T
    return torch.logsumexp(similar, 1).mean() - similar.diagonal().mean()


def mean_gradient(loss_here: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over the ranks of the gradients of their losses, and the weight; see :func:`inputs`."""
    weight, samples = inputs()
    here = weight.to(idist.device()).requires_grad_()
    loss_here(here, samples[idist.get_rank()].to(idist.device())).backward()
    assert here.grad is not None
    return idist.all_reduce(here.grad, "AVERAGE").cpu(), weight.requires_grad_()


@on_every_rank
def test_a_contrastive_loss_has_the_gradient_of_a_single_process() -> None:
    mean, weight = mean_gradient(
        lambda weight, samples: contrastive(idist.all_gather(samples @ weight, sync_grads=True))
    )
    _, samples = inputs()
    contrastive(samples.view(-1, WIDTH) @ weight).backward()
    torch.testing.assert_close(mean, weight.grad, **TOLERANCE)


@on_every_rank
def test_losses_that_differ_between_ranks_are_summed() -> None:
    """Rank r's loss weighs r + 1, and takes another part of what was gathered."""
    rank, world_size = idist.get_rank(), idist.get_world_size()

    def loss(weight: Tensor, samples: Tensor) -> Tensor:
        gathered = idist.all_gather(samples @ weight, sync_grads=True).view(world_size, BATCH, WIDTH)
        return (rank + 1) * gathered[(rank + 1) % world_size].pow(3).sum() + samples.sum()

    mean, weight = mean_gradient(loss)
    _, samples = inputs()
    everything = samples @ weight
    total = sum((r + 1) * everything[(r + 1) % world_size].pow(3).sum() for r in range(world_size))
    (total / world_size).backward()
    torch.testing.assert_close(mean, weight.grad, **TOLERANCE)


@pytest.mark.parametrize("op", ["SUM", "average"])
@on_every_rank
def test_all_reduce_has_the_gradient_of_a_single_process(op: str) -> None:
    world_size = idist.get_world_size()

    def loss(weight: Tensor, samples: Tensor) -> Tensor:
        embedded = (samples @ weight).mean(0)
        reduced = idist.all_reduce(embedded, op, sync_grads=True)
        assert reduced is not embedded and reduced.shape == embedded.shape
        return reduced.pow(4).sum() * (idist.get_rank() + 1)

    mean, weight = mean_gradient(loss)
    _, samples = inputs()
    embedded = (samples @ weight).mean(1)
    reduced = embedded.sum(0) if op == "SUM" else embedded.mean(0)
    total = reduced.pow(4).sum() * sum(range(1, world_size + 1))
    (total / world_size).backward()
    torch.testing.assert_close(mean, weight.grad, **TOLERANCE)


@on_every_rank
def test_a_gradient_that_is_expanded_memory_and_a_strided_tensor() -> None:
    tensor = torch.ones(2, 3, device=idist.device()).T.requires_grad_()
    idist.all_gather(
        tensor, sync_grads=True
    ).sum().backward()  # the gradient of sum() is one element, expanded
    assert tensor.grad is not None and tensor.grad.tolist() == [[idist.get_world_size()] * 2] * 3
    number = torch.ones((), device=idist.device(), requires_grad=True)
    gathered = idist.all_gather(number, sync_grads=True)
    assert gathered.shape == (idist.get_world_size(),)
    gathered.sum().backward()
    assert number.grad is not None and number.grad.item() == idist.get_world_size()


@on_every_rank
def test_it_can_be_differentiated_again() -> None:
    world_size = idist.get_world_size()
    x = torch.full((2,), float(idist.get_rank() + 1), device=idist.device(), requires_grad=True)
    (first,) = torch.autograd.grad(idist.all_reduce(x, sync_grads=True).pow(3).sum(), x, create_graph=True)
    total = sum(range(1, world_size + 1))
    assert first.tolist() == [3.0 * total**2 * world_size] * 2  # each of the losses is the same
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6.0 * total * world_size**2] * 2


@on_every_rank
def test_a_group_s_gradients_are_its_members() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for ranks in ([0], list(range(world_size)), list(range(1, world_size)) or [0]):
        x = torch.full((1,), float(rank), device=idist.device(), requires_grad=True)
        if current_model().transport.groups_need_all_ranks and 1 < len(ranks) < world_size:
            with raises(ValueError, "takes no group="):
                idist.all_reduce(x, group=ranks, sync_grads=True)
            with raises(ValueError, "takes no group="):
                idist.all_gather(x, group=ranks, sync_grads=True)
            continue
        for result in (
            idist.all_reduce(x, group=ranks, sync_grads=True),
            idist.all_gather(x, group=ranks, sync_grads=True),
        ):
            if rank not in ranks:
                assert result is x
                continue
            x.grad = None
            result.sum().backward()
            assert x.grad is not None and x.grad.item() == len(ranks)


@on_every_rank
def test_without_a_gradient_it_is_the_plain_collective() -> None:
    world_size = idist.get_world_size()
    x = torch.ones(2, device=idist.device())
    assert idist.all_reduce(x, sync_grads=True).tolist() == [world_size] * 2
    assert x.tolist() == [1, 1]
    with torch.no_grad():
        gathered = idist.all_gather(x.requires_grad_(), sync_grads=True)
    assert gathered.tolist() == [1] * 2 * world_size and not gathered.requires_grad


@on_every_rank
def test_what_has_no_gradient_is_refused() -> None:
    ones = torch.ones(2, device=idist.device())
    for op in ("MIN", "MAX", "PRODUCT", "AND"):
        with raises(ValueError, "SUM and AVERAGE"):
            idist.all_reduce(ones, op, sync_grads=True)
    for value in (ones.int(), ones.bool()):
        with raises(TypeError, "floating-point"):
            idist.all_reduce(value, sync_grads=True)
        with raises(TypeError, "floating-point"):
            idist.all_gather(value, sync_grads=True)
    for value in (1.5, {"a": ones}, "text"):
        with raises(TypeError, "takes a tensor"):
            idist.all_reduce(value, sync_grads=True)
        with raises(TypeError, "takes a tensor"):
            idist.all_gather(value, sync_grads=True)
    with raises(ValueError, "out="):
        idist.all_gather(ones, out=torch.ones(2 * idist.get_world_size()), sync_grads=True)
