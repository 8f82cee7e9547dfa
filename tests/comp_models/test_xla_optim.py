"""auto_optim on the real XLA, with replicas on PJRT's CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    Linear,
    Module,
    ModuleList,
    Parameter,
    Sequential,
)
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import ignite_dist as idist
from xla_replicas import (
    SIZE,
    Replicas,
    backward,
    different,
    equal_those_of_a_single_process,
    here,
    net,
    same_bits,
    state,
    stepped,
    values,
)

pytestmark = pytest.mark.xla
STEPS = 3


# --- auto_optim: two replicas make the steps of one process -------------------------------------------


def _groups(model: Sequential) -> list[dict[str, Any]]:
    """A parameter group with the default learning rate, and one with its own."""
    return [
        {"params": model[0].parameters()},
        {"params": [model[2].bias, model[2].weight], "lr": 0.02, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Sequential], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: Adam(model.parameters(), lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda model: AdamW(model.named_parameters(), lr=0.01, betas=(0.8, 0.95)),
    "groups": lambda model: SGD(_groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
}


def _trained(
    name: str,
    scheduler_name: str = "none",
    how: str = "plain",
    set_to_none: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """A training and what it was like after every step."""
    # For good: replicas are threads, and each would take back the filters of the other.
    warnings.filterwarnings("error", message=".*(lr_scheduler|overridden|optimizer.step)")
    model = idist.auto_model(net(dtype))
    plain = OPTIMIZERS[name](model)
    optimizer = idist.auto_optim(plain)
    assert optimizer is plain and isinstance(optimizer, type(plain))
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    seen: dict[str, list[Any]] = {"values": [], "gradients": [], "losses": [], "rates": []}
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            return backward(model, number)

        seen["losses"].append(here(stepped(how, optimizer, closure)))
        if scheduler is not None:
            scheduler.step()
        seen["values"].append(values(model))
        seen["gradients"].append(here([parameter.grad for parameter in model.parameters()]))
        names = [name for name in ("lr", "momentum", "betas") if name in optimizer.param_groups[0]]
        seen["rates"].append([[group[name] for name in names] for group in optimizer.param_groups])
    return {**seen, "state": state(optimizer)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas_make_the_steps_of_one_process(name: str, replicas: Replicas) -> None:
    equal_those_of_a_single_process(replicas, _trained, (name,))


def test_schedulers_closures_and_gradients_that_are_zeroed(replicas: Replicas) -> None:
    equal_those_of_a_single_process(
        replicas,
        _trained,
        ("groups", "step", "plain"),
        ("sgd", "one-cycle", "closure"),
        ("adam", "step", "keyword", False),
        ("sgd", "none", "plain", False),
    )


def test_steps_of_smaller_floats(replicas: Replicas) -> None:
    singles = [(name, "none", "closure", True, torch.float32) for name in ("sgd", "adam")]
    equal_those_of_a_single_process(replicas, _trained, *singles, rtol=1e-5, atol=1e-6)
    brain = ("sgd", "none", "closure", True, torch.bfloat16)
    equal_those_of_a_single_process(replicas, _trained, brain, rtol=0.05, atol=0.06)


def _models_of_other_dtypes() -> Any:
    model = Linear(2, 2, dtype=torch.bfloat16 if idist.get_rank() else torch.float32)
    with pytest.raises(
        idist.CollectiveMismatchError, match=r"rank 0: parameter 'weight', torch.float32 .*; rank 1: "
    ):
        idist.auto_model(model)
    return idist.all_reduce(1)


def test_models_that_differ_are_refused(replicas: Replicas) -> None:
    assert replicas.run(_models_of_other_dtypes) == [2, 2]


KINDS = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((2, 2), torch.float64),
    ((4,), torch.float16),
    ((), torch.float32),
    ((6,), torch.complex64),
    ((0, 3), torch.float32),
]


def _gradients_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in KINDS]
    on_the_cpu = torch.randn(2, generator=generator)
    return [*drawn, torch.randn(4, 3, generator=generator).t(), on_the_cpu]


def _means() -> dict[str, Any]:
    """From zero on, a step of SGD with a rate of 1 gives the negative mean."""
    device, gradients = idist.device(), _gradients_of(idist.get_rank())
    places = [device] * (len(gradients) - 1) + [torch.device("cpu")]
    parameters = [
        Parameter(torch.zeros_like(one).to(place)) for one, place in zip(gradients, places, strict=True)
    ]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.device)
    objects = [parameter.grad for parameter in parameters]
    without = [
        Parameter(torch.full((2,), 7.0, device=device)),
        Parameter(torch.full((3,), 8.0, device=device), requires_grad=False),
    ]
    groups = [{"params": [without[0], *parameters[::2]]}, {"params": [*parameters[1::2], without[1]]}]
    optimizer = idist.auto_optim(SGD(groups, lr=1.0))
    optimizer.step()
    same = all(one is parameter.grad for one, parameter in zip(objects, parameters, strict=True))
    after, means = here(parameters), here(objects)
    optimizer.zero_grad()
    optimizer.step()  # with no gradient at all
    return {
        "after": after,
        "again": here(parameters),
        "means": means,
        "same": same,
        "without": here(without),
        "none": [one.grad is None for one in (*without, *parameters)],
    }


def test_the_mean_is_exact_in_every_dtype_and_no_gradient_stays_none(replicas: Replicas) -> None:
    pairs = list(zip(_gradients_of(0), _gradients_of(1), strict=True))
    wide = [torch.complex128 if one.is_complex() else torch.float64 for one, _ in pairs]
    expected = [
        ((one.to(dtype) + two.to(dtype)) / 2).to(one.dtype)
        for dtype, (one, two) in zip(wide, pairs, strict=True)
    ]
    for found in replicas.run(_means):
        same_bits(found["means"], expected)
        same_bits(found["after"], [0 - one for one in expected])
        same_bits(found["again"], found["after"])
        same_bits(found["without"], [torch.full((2,), 7.0), torch.full((3,), 8.0)])
        assert found["same"] and all(found["none"])  # no replica had any in the second step


class Branches(Module):
    """Two layers of one size, of which a replica may use only one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ModuleList(Linear(5, 2).double() for _ in range(2))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.layers[number](x) for number in used]).sum(0)


def _branched(*used: list[int]) -> list[Any]:
    model = idist.auto_model(different(Branches()))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen = []
    ranks = [idist.get_rank()] if idist.get_world_size() > 1 else [0, 1]
    generator = torch.Generator().manual_seed(4)
    for _step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2, SIZE, 5, generator=generator, dtype=torch.float64)
        for rank in ranks:  # alone: the work of both replicas
            mine = x[rank].to(idist.device())
            (mse_loss(model(mine, used[rank]), mine[:, :2]) / len(ranks)).backward()
        optimizer.step()
        seen.append(values(model))
    return seen


@pytest.mark.parametrize("used", [([0], [1]), ([0, 1], [0])], ids=["one-each", "one-more"])
def test_parameters_that_one_replica_does_not_use(
    used: tuple[list[int], list[int]], replicas: Replicas
) -> None:
    equal_those_of_a_single_process(replicas, _branched, used)


def _without_a_loss() -> list[Tensor]:
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    assert optimizer.step(lambda: backward(model) and None) is None
    return values(model)


def test_a_closure_that_returns_nothing(replicas: Replicas) -> None:
    """SGD, for one, has no use for what it returns."""
    equal_those_of_a_single_process(replicas, _without_a_loss)


def _quasi_newton(line_search: str | None) -> list[Any]:
    model = idist.auto_model(different(Linear(5, 2).double()))
    optimizer = idist.auto_optim(
        LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=2, line_search_fn=line_search)
    )
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        return backward(model)

    loss = optimizer.step(closure)
    return [evaluations, here(loss), values(model)]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_looks_at_the_loss(line_search: str | None, replicas: Replicas) -> None:
    """And calls its closure as often as that tells it to."""
    equal_those_of_a_single_process(replicas, _quasi_newton, (line_search,), rtol=1e-9, atol=1e-10)


# --- auto_optim: it is the optimizer ------------------------------------------------------------------


def _zeroed() -> list[Any]:
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    found = []
    for args, kwargs in [((), {}), ((True,), {}), ((False,), {}), ((), {"set_to_none": False})]:
        backward(model)
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        gradients = here([parameter.grad for parameter in model.parameters()])
        found.append([-1 if one is None else one.count_nonzero().item() for one in gradients])
    return found


def _unfrozen() -> dict[str, Any]:
    """The last layer alone, then all of them, one parameter of which is still frozen."""
    model = net()
    model[0].requires_grad_(False)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(SGD(model[2].parameters(), lr=0.1, momentum=0.9))
    seen = []
    for number in range(3):
        if number == 1:
            optimizer.add_param_group(
                {"params": [model[0].weight.requires_grad_(True), model[0].bias], "lr": 0.03}
            )
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        seen.append(values(model))
    return {"seen": seen, "state": state(optimizer)}


def _resumed() -> list[Any]:
    """Two steps, then one more from what was saved: in this optimizer, in another, and in this one again."""
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(Adam(model.parameters(), lr=0.01))
    for number in range(2):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    weights, saved = here(model.state_dict()), here(optimizer.state_dict())
    other_model = idist.auto_model(net())
    other = idist.auto_optim(Adam(other_model.parameters(), lr=0.5))
    ends = []
    for one_model, one in ((model, optimizer), (other_model, other), (model, optimizer)):
        one_model.load_state_dict(weights)
        one.load_state_dict(copy.deepcopy(saved))  # it keeps what it is given
        one.zero_grad()
        backward(one_model, 2)
        one.step()
        ends.append([values(one_model), state(one)])
    same_bits(ends[1], ends[0])
    same_bits(ends[2], ends[0])
    return ends[0]


def _two_optimizers() -> list[Any]:
    model = idist.auto_model(net())
    optimizers = [idist.auto_optim(SGD(half.parameters(), lr=0.1)) for half in (model[:1], model[2:])]
    for number in range(2):
        for one in optimizers:
            one.zero_grad()
        backward(model, number)
        for one in optimizers:
            one.step()
    return values(model)


def _hooked() -> dict[str, Any]:
    model = idist.auto_model(net())
    calls: list[int] = []
    gradients: list[Any] = []
    plain = SGD(model.parameters(), lr=0.1)
    plain.register_step_pre_hook(lambda *_: calls.append(1))
    plain.register_step_post_hook(lambda *_: calls.append(3))
    optimizer = idist.auto_optim(plain)
    optimizer.register_step_pre_hook(lambda *_: calls.append(2))
    optimizer.register_step_post_hook(lambda *_: calls.append(4))
    looking = optimizer.register_step_pre_hook(
        lambda *_: gradients.append(here([parameter.grad for parameter in model.parameters()]))
    )
    StepLR(optimizer, 1)  # this one replaces `step`
    backward(model)
    optimizer.step()
    looking.remove()
    optimizer.step(lambda: (optimizer.zero_grad(), backward(model))[1])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    return {"calls": calls, "gradients": gradients, "values": values(model)}


@pytest.mark.parametrize("function", [_zeroed, _unfrozen, _resumed, _two_optimizers])
def test_it_is_used_as_before(function: Callable[[], Any], replicas: Replicas) -> None:
    equal_those_of_a_single_process(replicas, function)


def test_the_hooks_of_a_step_run_once_and_see_the_averaged_gradients(replicas: Replicas) -> None:
    assert _hooked()["calls"] == [1, 2, 3, 4] * 3
    equal_those_of_a_single_process(replicas, _hooked)
