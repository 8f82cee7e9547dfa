"""Optimizers with a closure, on every model: what decides by the loss decides alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Optimizer

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import on_every_rank


def make_model() -> Linear:
    model = Linear(3, 2).double()  # small: XLA compiles each step of a line search
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


def train(model: Module, optimizer: Optimizer, loss_of: Any) -> tuple[list[float], int]:
    """The losses that two steps returned, and how often they called the closure."""
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = loss_of(model)
        loss.backward()
        return loss

    returned = [optimizer.step(closure).item() for _ in range(2)]  # type: ignore[arg-type, union-attr]
    return returned, calls


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@on_every_rank
def test_an_optimizer_that_decides_by_the_loss(line_search: str | None) -> None:
    options: dict[str, Any] = {"max_iter": 3, "history_size": 2, "line_search_fn": line_search}
    alone = make_model()
    wanted, calls = train(alone, LBFGS(alone.parameters(), **options), loss_of_all)
    x, y = (one.to(idist.device()) for one in data(idist.get_rank()))
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(LBFGS(model.parameters(), **options))
    found, own_calls = train(model, optimizer, lambda model: mse_loss(model(x), y))
    assert own_calls == calls
    assert found == pytest.approx(wanted, rel=1e-9)
    after = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(after, alone.state_dict(), rtol=1e-9, atol=1e-10)
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

    alone = make_model()
    optimizer_alone = SGD(alone.parameters(), lr=0.1)
    for returned in (optimizer.step(closure), optimizer.step(closure=closure)):
        optimizer_alone.zero_grad()
        wanted = loss_of_all(alone)
        wanted.backward()
        optimizer_alone.step()
        assert isinstance(returned, Tensor) == (kind in ("tensor", "one element"))
        assert (returned is None) == (kind == "None")
        if returned is not None:
            assert (returned.item() if isinstance(returned, Tensor) else returned) == pytest.approx(
                wanted.item(), rel=1e-9
            )
        if isinstance(returned, Tensor):
            assert returned.shape == ((1,) if kind == "one element" else ())
    after = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(after, alone.state_dict(), rtol=1e-9, atol=1e-12)
