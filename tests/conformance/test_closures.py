"""Optimizers with a closure, on every model: what decides by the loss decides alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Optimizer

import ignite_dist as idist
from worlds import on_every_rank


def make_model() -> Sequential:
    model = Sequential(Linear(3, 4), Tanh(), Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def data(rank: int) -> tuple[Tensor, Tensor]:
    """So different that a line search by one rank's own loss takes another way."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return x, (3 * rank + 1) * torch.randn(5, 2, generator=generator, dtype=torch.float64)


def loss_of_all(model: Module) -> Tensor:
    size = idist.get_world_size()
    return sum(mse_loss(model(x), y) for x, y in map(data, range(size))) / size  # type: ignore[return-value]


def train(model: Module, optimizer: Optimizer, loss_of: Any) -> tuple[list[float], list[float]]:
    """The losses that three steps returned, and each one that a closure gave."""
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of(model)
        loss.backward()
        calls.append(loss.item())
        return loss

    returned = [float(optimizer.step(closure)) for _ in range(3)]  # type: ignore[arg-type]
    return returned, calls


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@on_every_rank
def test_an_optimizer_that_decides_by_the_loss(line_search: str | None) -> None:
    alone = make_model()
    wanted, calls = train(alone, LBFGS(alone.parameters(), max_iter=6, line_search_fn=line_search), loss_of_all)
    x, y = (one.to(idist.device()) for one in data(idist.get_rank()))
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(LBFGS(model.parameters(), max_iter=6, line_search_fn=line_search))
    found, own_calls = train(model, optimizer, lambda model: mse_loss(model(x), y))
    assert len(own_calls) == len(calls)
    assert found == pytest.approx(wanted, rel=1e-5)
    after = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(after, alone.state_dict(), rtol=1e-5, atol=1e-7)
    values = [value.tolist() for value in after.values()]
    assert idist.all_gather(values) == [values] * idist.get_world_size()  # to the last bit


@pytest.mark.parametrize("kind", ["tensor", "one element", "float", "None"])
@on_every_rank
def test_the_loss_is_the_mean_whatever_a_closure_returns_it_as(kind: str) -> None:
    x, y = (one.to(idist.device()) for one in data(idist.get_rank()))
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return {"tensor": loss, "one element": loss.reshape(1), "float": loss.item(), "None": None}[kind]

    for returned in (optimizer.step(closure), optimizer.step(closure=closure)):
        alone = make_model()
        assert (returned is None) == (kind == "None")
        assert isinstance(returned, Tensor) == (kind in ("tensor", "one element"))
        if isinstance(returned, Tensor):
            assert returned.shape == ((1,) if kind == "one element" else ())
            assert not returned.requires_grad or idist.get_world_size() == 1
    first = make_model()
    wanted = SGD(first.parameters(), lr=0.1)
    losses, _ = train(first, wanted, loss_of_all)
    if kind != "None":
        assert float(returned) == pytest.approx(losses[1])
    alone = make_model()
    twice = SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        twice.zero_grad()
        loss_of_all(alone).backward()
        twice.step()
    after = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(after, alone.state_dict(), rtol=1e-9, atol=1e-12)
