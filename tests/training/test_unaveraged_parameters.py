"""Gradients that nothing averages, and the warnings about them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, ParameterList
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import count_collectives
from on_ranks import on_ranks


def warned_in(steps: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    assert all(one.filename == __file__ for one in caught), "it points at the script"
    return [str(one.message) for one in caught if "may train its own" in str(one.message)]


def auto_optim_of(model: Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.auto_optim(SGD(model.parameters(), lr=0.1))
    return [str(one.message) for one in caught]


def _loaded_on_one(rank: int) -> None:
    def loaded(**kwargs: Any) -> Module:
        """Weights of each rank's own, in the second layer."""
        model = idist.auto_model(torch.nn.Sequential(Linear(2, 2), Linear(2, 1)), **kwargs)
        torch.nn.init.constant_(idist.unwrap_model(model)[1].weight, rank)
        return model

    texts = auto_optim_of(loaded())
    if rank == 0:
        assert len(texts) == 1 and "of rank 1 differ from those of rank 0, for example '1.weight'" in texts[0]
    else:
        assert texts == []
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    assert auto_optim_of(loaded(process_group=alone)) == [], "this rank averages with nobody"
    ignores: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    net = torch.nn.ModuleDict({"shared": Linear(2, 1), "own": Linear(2, 1)})
    ignores(net, ["own.weight"])
    torch.nn.init.constant_(net["own"].weight, rank)
    net["own"].bias.data.zero_()
    assert auto_optim_of(idist.auto_model(net)) == [], "each rank trains it for itself"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="differ from those") if rank == 0 else nullcontext():
            idist.auto_optim(SGD(loaded().parameters(), lr=0.1))
    assert idist.all_reduce(1) == 2
    assert auto_optim_of(idist.auto_model(Linear(2, 1), strategy="fsdp")) == [], "a shard is each rank's own"


def test_weights_that_a_rank_has_loaded_after_auto_model_are_told() -> None:
    on_ranks(_loaded_on_one)


def _one_exchange(_: int) -> None:
    model = idist.auto_model(Linear(2, 1))
    with count_collectives() as counted:
        idist.auto_optim(SGD(model.parameters(), lr=0.1))
    assert counted.count == 1


def test_weights_and_settings_are_compared_in_one_exchange() -> None:
    on_ranks(_one_exchange)


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


def _changed(_: int, how: str) -> None:
    net = Linear(3, 1)
    model = idist.auto_model(net)
    if how == "dtype":
        model.double()
    elif how == "assigned":
        net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
    else:
        net.register_parameter("scale", Parameter(torch.ones(1)))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 3, dtype=net.weight.dtype)
    steps = train(optimizer, lambda: (model(x) * getattr(net, "scale", 1)).mean())
    (text,) = warned_in(steps)
    assert "This SGD trains parameters that were changed after auto_model" in text
    shapes = "(1,). " if how == "new" else "(1, 3), (1,). "
    assert f"Their shapes: {shapes}model.to()" in text


@pytest.mark.parametrize("how", ["dtype", "assigned", "new"])
def test_parameters_that_change_after_auto_model(how: str) -> None:
    on_ranks(_changed, how)


def _passed_by(_: int, how: str) -> None:
    model = idist.auto_model(Linear(3, 1))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    weight, bias = model.parameters()

    def step() -> None:
        loss = model(torch.full((2, 3), idist.get_rank() + 1.0)).mean()
        if how == "in the pass":
            optimizers = {one: idist.auto_optim(SGD([one], lr=0.1)) for one in (weight, bias)}
            for one in optimizers:
                one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
            loss.backward()
        else:
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()

    if how == "averaged":
        x = torch.full((2, 3), idist.get_rank() + 1.0)
        with idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC):
            weight.grad, bias.grad = torch.autograd.grad(model(x).mean(), (weight, bias))
        assert weight.grad.eq(1.5).all()
        assert warned_in(optimizer.step) == []
        return
    texts = warned_in(step)
    expected = "inside of a backward pass" if how == "in the pass" else "with gradients of no backward pass"
    assert texts and all(expected in text for text in texts)


@pytest.mark.parametrize("how", ["in the pass", "torch.autograd.grad", "averaged"])
def test_steps_that_ddp_does_not_see(how: str) -> None:
    on_ranks(_passed_by, how)


def _copied(rank: int) -> list[float]:
    """Each step has two backward passes. DDP averages the gradients of one of them."""
    torch.manual_seed(0)
    model = copy.deepcopy(copy.deepcopy(idist.auto_model(Linear(2, 1))))
    pickle.dumps(idist.unwrap_model(model))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        losses = [model(torch.full((1, 2), rank + step + factor)).sum() for factor in (1.0, 2.0)]
        for loss in losses:
            loss.backward()
        assert warned_in(optimizer.step) == []
    return [round(one, 4) for one in torch.nn.utils.parameters_to_vector(model.parameters()).tolist()]


def test_a_copy_of_a_model_is_trained_like_the_model() -> None:
    first, second = on_ranks(_copied)
    assert first == second


def _frozen(_: int) -> str:
    net = torch.nn.Sequential(Linear(2, 2), Linear(2, 1))
    model = idist.auto_model(net)
    net[0].requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_a_layer_that_is_frozen_after_auto_model() -> None:
    for text in on_ranks(_frozen):
        assert text.startswith("Frozen after auto_model: 0.weight, 0.bias. DistributedDataParallel waits")
