"""The state and the options of an optimizer of ``auto_optim``, on the real Horovod."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_horovod_training import (
    CLOSURES,
    OPTIMIZERS,
    _accumulated,
    _backward,
    _backward_again,
    _clipped,
    _each,
    _go,
    _net,
    _state,
    _trained,
    _unfrozen,
    _values,
    _zeroed,
    equal,
    equal_those_of_a_single_process,
    spawn,
)
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import ignite_dist as idist

pytestmark = pytest.mark.horovod


# --- auto_optim: state --------------------------------------------------------------------------------


def _saved(model: Module, optimizer: Optimizer) -> bytes:
    """A checkpoint."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return file.getvalue()


def _resumed(file: bytes, optimizer_name: str, wrapped: bool) -> tuple[Sequential, Optimizer]:
    """A model and an optimizer with what was saved, which is loaded after wrapping."""
    parameters, state = torch.load(io.BytesIO(file), weights_only=True)
    model = _net()
    model.load_state_dict(parameters)
    optimizer = OPTIMIZERS[optimizer_name](model)
    if wrapped:
        optimizer = idist.auto_optim(optimizer)
    optimizer.load_state_dict(state)
    return model, optimizer


def _round_trips(optimizer_name: str) -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(OPTIMIZERS[optimizer_name](model))
    _go(model, optimizer, 0, 2)
    file = _saved(model, optimizer)
    expected = _go(model, optimizer, 2, 4)
    equal(_go(*_resumed(file, optimizer_name, wrapped=True), 2, 4), expected)
    model, plain = _resumed(file, optimizer_name, wrapped=False)
    equal(_go_by_hand(model, plain, 2, 3), expected[:1])
    model, optimizer = _resumed(_saved(model, plain), optimizer_name, wrapped=True)
    equal(_go(model, optimizer, 3, 4), expected[1:])
    return [expected, _state(optimizer.state_dict())]


def _go_by_hand(model: Module, optimizer: Optimizer, first: int, last: int) -> list[list[Tensor]]:
    after = []
    for number in range(first, last):
        optimizer.zero_grad()
        _backward(model, number)
        for parameter in model.parameters():
            idist.all_reduce(parameter.grad, op="AVERAGE")
        optimizer.step()
        after.append(_values(model))
    return after


def test_state_goes_from_wrapped_to_plain_and_back() -> None:
    equal_those_of_a_single_process(_round_trips, ("sgd",), ("adam-groups",), ("named",))


def _loaded_before(optimizer_name: str, loaded_on: tuple[int, ...]) -> dict[str, Any]:
    """Wrapped after a checkpoint was loaded, on each rank that of another training."""
    rank = idist.get_rank()
    source = _net()
    before = OPTIMIZERS[optimizer_name](source)
    _go(source, before, 0, 3 + rank)
    for group in before.param_groups:
        group["lr"] = 0.2 + rank
    _, state = torch.load(io.BytesIO(_saved(source, before)), weights_only=True)
    loaded = _state(copy.deepcopy(state))

    model = _net()
    plain = OPTIMIZERS[optimizer_name](model)
    if rank in loaded_on:
        plain.load_state_dict(state)
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    values, defaults, fresh = _values(model), dict(plain.defaults), _state(plain.state_dict())
    optimizer = idist.auto_optim(plain)
    found = _state(optimizer.state_dict())
    gradients = [None if one.grad is None else one.grad.unique().tolist() for one in model.parameters()]
    assert gradients == [None] + 5 * [[rank + 1.0]]
    assert all(map(torch.equal, values, model.parameters()))
    assert optimizer.defaults == defaults
    return {"found": found, "loaded": loaded, "fresh": fresh}


def test_every_rank_has_the_state_of_rank_zero_and_nothing_else_changes() -> None:
    cases = [(name, loaded) for name in ("sgd", "adam-groups") for loaded in ((0,), (0, 1), (1,))]
    first, second = spawn(_each, _loaded_before, cases)
    for name, loaded_on in cases:
        one, other = first[repr((name, loaded_on))], second[repr((name, loaded_on))]
        expected = one["loaded"] if 0 in loaded_on else one["fresh"]
        torch.testing.assert_close(one["found"], expected, rtol=0, atol=0)
        torch.testing.assert_close(other["found"], expected, rtol=0, atol=0)
        values, groups = expected
        assert len(values) == (6 if 0 in loaded_on else 0)
        assert groups[0]["lr"] == 0.2 or 0 not in loaded_on
        assert other["loaded"][1] != one["loaded"][1]
        if values and name == "adam-groups":
            assert {value["step"].item() for _, value in values} == {3}


def _resumed_on_0() -> list[Any]:
    """The checkpoint is on rank 0 alone, as with a file on its disk."""
    model = _net()
    plain = Adam(model.parameters(), lr=0.5)
    if idist.get_rank() == 0:
        source = _net()
        before = Adam(source.parameters(), lr=0.02)
        for number in range(3):
            before.zero_grad()
            mse_loss(source(torch.ones(1, 5).double() * number), torch.ones(1, 2).double()).backward()
            before.step()
        parameters, state = torch.load(io.BytesIO(_saved(source, before)), weights_only=True)
        model.load_state_dict(parameters)
        plain.load_state_dict(state)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(plain)
    return [_go(model, optimizer, 0, 3), _state(optimizer.state_dict())]


def test_training_goes_on_from_a_checkpoint_that_rank_zero_has() -> None:
    equal_those_of_a_single_process(_resumed_on_0)


def _of_the_same_parts(_: int) -> dict[str, bool]:
    model = idist.auto_model(_net())
    plain = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = idist.auto_optim(plain)
    return {
        "groups": all(map(lambda one, other: one is other, plain.param_groups, optimizer.param_groups)),
        "state": plain.state is optimizer.state,
        "defaults": plain.defaults == optimizer.defaults,
    }


@pytest.mark.parametrize("nproc_per_node", [1, 2])
def test_it_shares_groups_state_and_defaults_with_the_plain_one(nproc_per_node: int) -> None:
    for found in spawn(_of_the_same_parts, nproc_per_node=nproc_per_node):
        assert found == {"groups": True, "state": True, "defaults": True}


def _scheduled_before(_: int) -> list[float]:
    model = idist.auto_model(_net())
    plain = SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(plain, 1, gamma=0.5)
    optimizer = idist.auto_optim(plain)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch counts the steps of the plain one
        for number in range(2):
            _go(model, optimizer, number, number + 1)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("nproc_per_node", [1, 2])
def test_a_scheduler_of_the_plain_optimizer_is_not_lost(nproc_per_node: int) -> None:
    assert spawn(_scheduled_before, nproc_per_node=nproc_per_node) == [[0.05, 0.025]] * nproc_per_node


# --- auto_optim: optimizers of the user's own ---------------------------------------------------------


class Pull(Optimizer):
    """SGD that also pulls towards an anchor, which is no option of a group."""

    def __init__(self, params: Any, lr: float = 0.1, strength: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self.strength = strength
        self.anchor = [one.detach().clone() + 1 for group in self.param_groups for one in group["params"]]
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            for parameter, anchor in zip(group["params"], self.anchor, strict=True):
                parameter -= group["lr"] * (parameter.grad + self.strength * (parameter - anchor))
        return loss

    def distance(self) -> Tensor:
        return torch.stack(
            [
                (one - other).abs().sum()
                for one, other in zip(self.param_groups[0]["params"], self.anchor, strict=True)
            ]
        ).sum()


def _pulled() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(Pull(model.parameters(), lr=0.05, strength=0.3))
    assert isinstance(optimizer, Pull) and type(optimizer).__name__ == "Pull"
    after = _go(model, optimizer, 0, 3)
    optimizer.step(lambda: (optimizer.zero_grad(), _backward(model))[1])
    return [after, _values(model), optimizer.num_steps, optimizer.strength, optimizer.distance().detach()]


@pytest.mark.parametrize("nproc_per_node", [1, 2])
def test_an_optimizer_of_the_users_own_keeps_what_it_has(nproc_per_node: int) -> None:
    equal_those_of_a_single_process(_pulled, nproc_per_node=nproc_per_node)


class Counted(SGD):
    """As written before torch had ``set_to_none``."""

    num_zeroed = 0

    def zero_grad(self) -> None:  # type: ignore[override]
        self.num_zeroed += 1
        super().zero_grad()


def _counted() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(Counted(model.parameters(), lr=0.1))
    return [_go(model, optimizer, 0, 3), optimizer.num_zeroed]


def test_a_zero_grad_of_the_users_own() -> None:
    equal_those_of_a_single_process(_counted)


class Precise(Optimizer):
    """Counts in integers and adds up in float32 what it makes of bfloat16 parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros(parameter.shape)).add_(parameter.grad.float() / 3)
                state.setdefault("count", torch.zeros(1, dtype=torch.int64)).add_(1)


def _precise(_: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(3)
    model = Linear(2, 2).bfloat16()
    plain = Precise(model.parameters())
    model(torch.ones(1, 2).bfloat16() + idist.get_rank()).sum().backward()
    plain.step()
    before = _state(plain.state_dict())[0]
    return before, _state(idist.auto_optim(plain).state_dict())[0]


def test_wrapping_does_not_round_the_state() -> None:
    results = spawn(_precise)
    for _, after in results:
        torch.testing.assert_close(after, results[0][0], rtol=0, atol=0)


# --- auto_optim: what it takes ------------------------------------------------------------------------


def _wrapped_twice(_: int) -> dict[str, Any]:
    import horovod.torch as hvd

    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(Adam(model.parameters(), lr=0.01))
    _go(model, optimizer, 0, 2)
    again = idist.auto_optim(optimizer)
    trained = _go(model, again, 2, 4)

    own = hvd.DistributedOptimizer(SGD(_net().parameters(), lr=0.1))
    return {"same": again is optimizer and idist.auto_optim(own) is own, "trained": trained}


def test_an_optimizer_that_is_wrapped_comes_back_as_it_is() -> None:
    model = _net()
    expected = _go(model, Adam(model.parameters(), lr=0.01), 0, 4)[2:]
    for found in spawn(_wrapped_twice):
        assert found["same"]
        equal(found["trained"], expected)


def _options(_: int) -> dict[str, Any]:
    import horovod.torch as hvd

    def gradients(**kwargs: Any) -> list[Tensor]:
        model = idist.auto_model(_net())
        optimizer = idist.auto_optim(
            SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **kwargs
        )
        _backward_again(model, optimizer)
        return [parameter.grad for parameter in model.parameters()]

    model = _net()
    with pytest.raises(TypeError, match="backward_passes"):
        idist.auto_optim(SGD(model.parameters(), lr=0.1), backward_passes=2)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        idist.auto_optim(SGD(model.parameters(), lr=0.1), backward_passes_per_step=0)
    return {
        "mean": gradients(),
        "sum": gradients(op=hvd.Sum),
        "halves": gradients(compression=hvd.Compression.fp16),
    }


def test_options_are_those_of_horovod_and_others_are_refused() -> None:
    model = _net()
    _backward(model)
    expected = [parameter.grad for parameter in model.parameters()]
    for found in spawn(_options):
        equal(found["mean"], expected)
        equal(found["sum"], [2 * one for one in expected])
        torch.testing.assert_close(found["halves"], expected, rtol=1e-2, atol=1e-3)
        assert all(torch.equal(one, one.half().double()) for one in found["halves"])  # they were sent as such


# --- a world of one -----------------------------------------------------------------------------------


def _alone() -> dict[str, Any]:
    model = _net()
    assert idist.auto_model(model, find_unused_parameters=True) is model
    return {
        "trained": [_trained("adam-groups", "one-cycle", closures, False) for closures in CLOSURES],
        "clipped": _clipped(),
        "unfrozen": _unfrozen({}),
        "accumulated": _accumulated(),
        "zeroed": _zeroed(),
        "saved": _round_trips("sgd"),
    }


def test_a_world_of_one() -> None:
    equal_those_of_a_single_process(_alone, nproc_per_node=1)


HALVES = torch.tensor([[1.0, 40_000.0], [3.0, 60_032.0]])  # of each rank; with means that are halves too


def _halves(_: int) -> list[list[float]]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = idist.auto_optim(torch.optim.SGD([parameter], lr=1.0))
        (parameter * HALVES[idist.get_rank()].to(dtype)).sum().backward()
        optimizer.step()
        assert parameter.grad is not None and parameter.grad.dtype == dtype
        found.append(parameter.grad.tolist())
    return found


def test_gradients_in_halves_are_averaged_without_overflow() -> None:
    """Horovod itself refuses bfloat16, and 40,000 + 60,032 is more than float16 holds."""
    assert spawn(_halves) == [[[2.0, 49_920.0], [2.0, 50_016.0]]] * 2


def _different_data(_: int) -> list[Any]:
    generator = torch.Generator().manual_seed(idist.get_rank())
    x, y = (torch.randn(16, width, generator=generator, dtype=torch.float64) for width in (4, 1))
    parameter = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
    plain = torch.optim.LBFGS([parameter], lr=1.0, max_iter=8, line_search_fn="strong_wolfe")
    optimizer = idist.auto_optim(plain)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (x @ parameter - y).pow(2).mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    return [calls, losses, parameter.tolist()]


def test_an_optimizer_that_decides_by_the_loss_decides_the_same_everywhere() -> None:
    first, second = spawn(_different_data)
    assert first == second
    assert first[1][2] < first[1][0]


def _layouts(_: int) -> dict[str, bool]:
    found = {}
    for name, parameter in {
        "channels_last": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "transposed": torch.zeros(3, 2).t(),
        "complex": torch.zeros(3, dtype=torch.complex64),
    }.items():
        parameter = torch.nn.Parameter(parameter)
        optimizer = idist.auto_optim(torch.optim.SGD([parameter], lr=1.0))
        optimizer.state["steps"] = 7  # a key of the user's own
        weights = torch.arange(parameter.numel()).to(parameter.dtype).view(parameter.shape)
        ((idist.get_rank() + 1) * weights * parameter).real.sum().backward()
        optimizer.step()
        found[name] = torch.equal(parameter.detach(), -1.5 * weights)
    return found


def test_gradients_of_every_layout() -> None:
    assert spawn(_layouts) == [{"channels_last": True, "transposed": True, "complex": True}] * 2
