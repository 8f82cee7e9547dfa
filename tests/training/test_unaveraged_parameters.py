"""Parameters that an optimizer trains, but that are in no model of ``auto_model``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter, ParameterList
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer

import ignite_dist as idist
from on_ranks import on_ranks


def warned_in(steps: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    assert all(one.filename == __file__ for one in caught), "it points at the script"
    return [str(one.message) for one in caught if "no model of auto_model" in str(one.message)]


def train(optimizer: Optimizer, loss: Callable[[], Tensor], num_steps: int = 2) -> Callable[[], None]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        computed = loss()
        computed.backward()
        return computed

    def steps() -> None:
        for _ in range(num_steps):
            if isinstance(optimizer, LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    return steps


def _temperature(_: int, kind: type[Any]) -> None:
    model, temperature = idist.auto_model(Linear(3, 1)), Parameter(torch.ones(7))
    optimizer = idist.auto_optim(kind([*model.parameters(), temperature], lr=0.1))
    steps = train(optimizer, lambda: (model(torch.ones(2, 3)).mean() * temperature).sum())
    (text,) = warned_in(steps)
    assert f"This {kind.__name__} trains parameters" in text and "shapes: (7,). To average" in text
    assert warned_in(steps) == [], "once"


def _advice(rank: int) -> None:
    temperature = Parameter(torch.ones(()))
    shared = idist.auto_model(ParameterList([temperature]))
    optimizer = idist.auto_optim(SGD([temperature], lr=0.1))
    assert warned_in(train(optimizer, lambda: temperature * 10 * (rank + 1), 1)) == []
    assert temperature.grad == 15
    del shared


@pytest.mark.parametrize("kind", [SGD, LBFGS])
def test_the_first_step_warns_once(kind: type[Any]) -> None:
    on_ranks(_temperature, kind, world_size=2)


def test_its_advice_averages_the_gradient() -> None:
    on_ranks(_advice, world_size=2)


class Own(DistributedDataParallel):
    pass


def _averaged(_: int, how: str) -> None:
    def loss_of(*models: Any) -> Callable[[], Tensor]:
        return lambda: sum(model(torch.ones(2, 3)).mean() for model in models)  # type: ignore[return-value]

    if how == "several models, one frozen":
        models = [idist.auto_model(Linear(3, 1)), idist.auto_model(Linear(3, 2))]
        models.append(idist.auto_model(Linear(3, 1).requires_grad_(False)))
    elif how == "the script's wrapper":
        models = [DistributedDataParallel(Linear(3, 1)), Own(Linear(3, 1))]
    elif how == "fsdp":
        models = [idist.auto_model(Linear(3, 2), strategy="fsdp")]
    else:
        models = [Linear(3, 1)]
    optimizer = idist.auto_optim(SGD([one for model in models for one in model.parameters()], lr=0.1))
    optimizer = idist.auto_optim(optimizer)  # a second call changes nothing
    steps = train(optimizer, loss_of(*models))
    if how == "no gradient":
        steps = train(idist.auto_optim(SGD(Linear(3, 1).parameters(), lr=0.1)), loss_of(*models), 1)
    assert warned_in(steps) == []


@pytest.mark.parametrize("how", ["several models, one frozen", "the script's wrapper", "fsdp", "no gradient"])
def test_what_is_averaged_gets_no_warning(how: str) -> None:
    on_ranks(_averaged, how, world_size=2)


def test_one_process_gets_none() -> None:
    model = Linear(3, 1)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    assert warned_in(train(optimizer, lambda: model(torch.ones(2, 3)).mean())) == []
