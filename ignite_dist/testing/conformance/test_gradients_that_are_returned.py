"""``torch.autograd.grad`` inside of ``accumulate_gradients``: its result is the caller's, and not scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

import ignite_dist as idist
from ignite_dist import DDPSyncStrategy
from ignite_dist.testing.conformance.cases import on_every_rank
from ignite_dist.testing.conformance.test_gradients import STRATEGIES, WIDTH, drawn, make_optimizer, samples

STEPS = 3


def make_model() -> Sequential:
    return drawn(Sequential(Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, 1)))  # type: ignore[return-value]


def gradients_of(model: Module, x: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    inner = idist.unwrap_model(model)
    return torch.autograd.grad(inner(x).pow(2).mean(), list(inner.parameters()), **kwargs)


def penalized(model: Module, x: Tensor) -> Tensor:
    """A loss with a penalty on the gradients of the parameters, which are part of the graph."""
    gradients = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()), create_graph=True)
    return model(x).exp().mean() + sum(one.pow(2).sum() for one in gradients)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_they_are_as_outside_of_the_block(strategy: str, weighed: bool) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))
    alone = make_model()
    data = [samples(number, rank, size=1 + number) for number in range(STEPS)]
    weight = len if weighed else None
    for x, sync in idist.accumulate_gradients(data, model, STEPS, weight, DDPSyncStrategy(strategy)):
        here = x.to(idist.device())
        with sync:
            for found, wanted in zip(gradients_of(model, here), gradients_of(alone, x), strict=True):
                torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-12)
            model(here).pow(2).mean().backward()
            for found, wanted in zip(gradients_of(model, here), gradients_of(alone, x), strict=True):
                torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-12)
    optimizer.step()
    shares = [(1 + number) / 6 if weighed else 1 / STEPS for number in range(STEPS)]
    for one in range(size):
        for number, share in enumerate(shares):
            (alone(samples(number, one, size=1 + number)).pow(2).mean() * share / size).backward()
    make_optimizer(alone.parameters()).step()
    found = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(found, alone.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("only", ["all", "inputs"])
@on_every_rank
def test_a_penalty_on_gradients(only: str) -> None:
    """``backward(inputs=...)`` adds to the gradients of these, so what it adds is scaled."""
    rank, size = idist.get_rank(), idist.get_world_size()
    # The penalty calls the model inside; with DDP two forward passes and one backward pass are refused.
    model = idist.auto_model(make_model())
    inner = idist.unwrap_model(model)
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))
    alone = make_model()
    forced = DDPSyncStrategy.FORCED_SYNC
    data = [samples(number, rank).to(idist.device()) for number in range(STEPS)]
    for x, sync in idist.accumulate_gradients(data, model, STEPS, strategy=forced):
        with sync:
            penalized(inner, x).backward(inputs=list(inner.parameters()) if only == "inputs" else None)
    optimizer.step()
    for one in range(size):
        for number in range(STEPS):
            (penalized(alone, samples(number, one)) / STEPS / size).backward()
    make_optimizer(alone.parameters()).step()
    found = {name: value.cpu() for name, value in inner.state_dict().items()}
    torch.testing.assert_close(found, alone.state_dict(), rtol=1e-9, atol=1e-12)
