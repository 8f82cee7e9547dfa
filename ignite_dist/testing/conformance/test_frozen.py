"""Parameters that were frozen when auto_model saw them: later they are averaged, or it is an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import on_every_rank, raises

WIDTH = 3


def make(seed: int = 0) -> Sequential:
    model = Sequential(Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, 1)).double()
    generator = torch.Generator().manual_seed(seed)  # the global one is shared by ranks that are threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def samples(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def mine() -> Tensor:
    return samples(idist.get_rank()).to(idist.device())


def step(model: Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(mine()).pow(2).mean().backward()
    optimizer.step()


def assert_trained_as_one_process(model: Module, alone: Module, steps: int = 1) -> None:
    """``model`` after ``steps`` of all its parameters, that of rank 0 having begun as ``alone``."""
    sgd = SGD(alone.parameters(), lr=0.5)
    for _ in range(steps):
        sgd.zero_grad()
        losses = [alone(samples(rank)).pow(2).mean() for rank in range(idist.get_world_size())]
        torch.stack(losses).mean().backward()
        sgd.step()
    found = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(found, alone.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adapted", [True, False])
@on_every_rank
def test_a_model_unfrozen_later_is_refused_and_can_be_adapted_again(adapted: bool) -> None:
    """Each rank has other parameters; whether auto_optim or nobody has seen the optimizer is all the same."""
    net = idist.auto_model(make(seed=idist.get_rank()).requires_grad_(False))
    net.requires_grad_(True)
    plain = SGD(net.parameters(), lr=0.5)
    optimizer = idist.auto_optim(plain) if adapted else plain
    if idist.get_world_size() > 1:
        with raises(RuntimeError, "frozen when auto_model") as info:
            step(net, optimizer)
        assert "auto_model(idist.unwrap_model(model))" in str(info.value)
        net.zero_grad()

    model = idist.auto_model(idist.unwrap_model(net))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.5))
    step(model, optimizer)
    step(model, optimizer)
    assert_trained_as_one_process(model, make(seed=0), steps=2)


@on_every_rank
def test_a_part_unfrozen_later_is_averaged_or_refused() -> None:
    def half() -> Module:
        net = make(seed=idist.get_rank())
        net[0].requires_grad_(False)
        model = idist.auto_model(net)
        idist.unwrap_model(model)[0].requires_grad_(True)
        return model

    model = half()
    if idist.unwrap_model(model) is not model:
        refused = half()
        with raises(RuntimeError, "frozen when auto_model"):
            step(refused, SGD(refused.parameters(), lr=0.5))
        model = idist.auto_model(idist.unwrap_model(model))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.5))
    step(model, optimizer)
    assert_trained_as_one_process(model, make(seed=0))


@on_every_rank
def test_the_strategy_that_averages_whatever_there_is_takes_it() -> None:
    net = make()
    net[0].requires_grad_(False)
    model = idist.auto_model(net)
    idist.unwrap_model(model)[0].requires_grad_(True)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.5))
    with idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC):
        model(mine()).pow(2).mean().backward()
    optimizer.step()
    assert_trained_as_one_process(model, make())


@on_every_rank
def test_a_frozen_model_stays_silent_and_as_it_is() -> None:
    """Gradients go through a teacher, and a user may take its parameters' own."""
    teacher = idist.auto_model(make().requires_grad_(False))
    student = idist.auto_model(Linear(WIDTH, WIDTH).double())
    optimizer = idist.auto_optim(SGD(student.parameters(), lr=0.5))
    before = copy.deepcopy([one.tolist() for one in teacher.parameters()])
    teacher(student(mine())).pow(2).mean().backward()
    optimizer.step()
    assert not any(one.requires_grad or one.grad is not None for one in teacher.parameters())
    assert [one.tolist() for one in teacher.parameters()] == before
    for one in teacher.parameters():
        one.requires_grad_(True)
    own = torch.autograd.grad(teacher(mine()).mean(), list(teacher.parameters()))
    assert len(own) == 4

    learning = copy.deepcopy(teacher)  # another model, which auto_model has not seen
    learning(mine()).mean().backward()
    assert all(one.grad is not None for one in learning.parameters())
    assert current_model().get_world_size() == idist.all_reduce(1)


@on_every_rank
def test_parameters_that_can_never_be_trained_are_left_alone() -> None:
    net = make().requires_grad_(False)
    net.table = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    assert idist.auto_model(net).table.tolist() == [0, 1, 2]
