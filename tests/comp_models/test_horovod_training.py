"""auto_model and auto_optim on the real Horovod.

Most tests run one function twice: on two ranks with half of the data each, and in this very process, where
both are what they are given, with all of the data. Both have to end up with the same numbers.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Buffer, Linear, Module, Parameter, ReLU, Sequential
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import ignite_dist as idist

pytestmark = pytest.mark.horovod

SIZE = 12
STEPS = 4


def spawn(function: Callable[..., Any], *args: Any, nproc_per_node: int = 2) -> list[Any]:
    results: list[Any] = idist.spawn("horovod", function, args, nproc_per_node=nproc_per_node)
    return results


def equal_those_of_a_single_process(
    function: Callable[..., Any], *cases: tuple[Any, ...], nproc_per_node: int = 2
) -> None:
    """Compare what ``function(*case)`` returns on each rank, for each case, with what it returns here."""
    alone = _each(0, function, cases or ((),))
    for found in spawn(_each, function, cases or ((),), nproc_per_node=nproc_per_node):
        equal(found, alone)


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def _each(_: int, function: Callable[..., Any], cases: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
    return {repr(case): function(*case) for case in cases}


def _net() -> Sequential:
    """A model that starts differently on each rank."""
    torch.manual_seed(3 + idist.get_rank())
    return Sequential(Linear(5, 8), ReLU(), Linear(8, 4), ReLU(), Linear(4, 2)).double()


def _data(number: int = 0) -> tuple[Tensor, Tensor]:
    """The samples of a step: this rank's share of all ranks' samples."""
    generator = torch.Generator().manual_seed(4 + number)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(SIZE, 2, generator=generator, dtype=torch.float64)
    mine = slice(idist.get_rank(), None, idist.get_world_size())
    return x[mine], y[mine]


def _backward(model: Module, number: int = 0) -> Tensor:
    x, y = _data(number)
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss


def _go(model: Module, optimizer: Optimizer, first: int, last: int) -> list[list[Tensor]]:
    """Steps ``first`` to ``last`` of training: the parameters after each."""
    after = []
    for number in range(first, last):
        optimizer.zero_grad()
        _backward(model, number)
        optimizer.step()
        after.append(_values(model))
    return after


def _values(model: Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _state(state: dict[str, Any]) -> list[Any]:
    """A state dict of an optimizer, as something that assert_close takes: it knows no strings."""
    groups = [
        {
            name: repr(value).encode() if isinstance(value, str | list) else value
            for name, value in one.items()
        }
        for one in state["param_groups"]
    ]
    return [sorted(state["state"].items()), groups]


# --- auto_model: what every rank has afterwards -------------------------------------------------------


class Everything(Module):
    """Parameters and buffers of many kinds. Each value is another on each rank, but for the empty ones."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.doubles = Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.flag = Buffer(torch.tensor(rank == 0))  # one byte: what comes after it is at an odd place
        self.transposed = Parameter(torch.randn(4, 3).t())
        self.images = Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.strided = Buffer(torch.randn(6, 6, dtype=torch.float64)[::2, 1::2])
        self.scalar = Parameter(torch.randn(()))
        self.brain = Parameter(torch.randn(7).bfloat16())
        self.halves = Buffer(torch.randn(3).half(), persistent=False)
        self.complex = Parameter(torch.randn(3, dtype=torch.complex64))
        self.conjugated = Buffer(torch.randn(3, dtype=torch.complex128).conj())
        self.mask = Buffer(torch.rand(11) < 0.5)
        self.octets = Buffer(torch.randint(0, 256, (5,), dtype=torch.uint8), persistent=False)
        self.counter = Buffer(torch.tensor(2**62 + rank))
        self.integers = Buffer(torch.randint(-9, 9, (2, 2), dtype=torch.int32))
        self.no_parameters = Parameter(torch.empty(0, 3))
        self.no_buffers = Buffer(torch.empty(2, 0, dtype=torch.int64))
        self.special = Buffer(torch.tensor([-0.0, float("nan"), float("inf"), float(rank)]))
        self.frozen = Parameter(torch.randn(3), requires_grad=False)
        self.tied = self.doubles
        self.norm = BatchNorm1d(4)
        self.norm(torch.randn(8, 4) + rank)
        self.norm.num_batches_tracked += rank
        for parameter in self.norm.parameters():
            torch.nn.init.normal_(parameter)


def _all_tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _contents(model: Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (one.dtype, one.shape, one.stride(), one.requires_grad, _bytes(one))
        for name, one in _all_tensors(model).items()
    }


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def _everything(_: int) -> dict[str, Any]:
    model = Everything(idist.get_rank())
    before, objects = _contents(model), _all_tensors(model)
    model.doubles.grad = torch.ones_like(model.doubles)
    adapted = idist.auto_model(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    after = _all_tensors(model)
    return {
        "same": adapted is model and all(after[name] is one for name, one in objects.items()),
        "tied": model.tied is model.doubles,
        "before": before,
        "after": _contents(model),
        "grad": model.doubles.grad.unique().tolist(),
        "training": model.training,
    }


def test_every_rank_has_the_parameters_and_buffers_of_rank_zero_bit_for_bit() -> None:
    first, second = spawn(_everything)
    empty = {"no_parameters", "no_buffers"}
    assert {name for name, one in first["before"].items() if one == second["before"][name]} == empty
    for found in (first, second):
        assert found["same"] and found["tied"] and found["training"]
        assert found["after"] == first["before"]
        assert found["grad"] == [1.0]


def _several_buckets(_: int) -> list[str]:
    torch.manual_seed(idist.get_rank())
    megabyte = (1 << 20) // 4
    sizes = (20, 7, 7, 7, 15.5, 0.5, 1e-5)  # the first alone is more than a bucket
    model = Module()
    model.several = torch.nn.ParameterList(torch.randn(int(size * megabyte)) for size in sizes)
    idist.auto_model(model)
    return [hashlib.sha256(_bytes(one)).hexdigest() for one in model.parameters()]


def test_a_model_of_several_buckets() -> None:
    torch.manual_seed(0)
    first, second = spawn(_several_buckets)
    assert first == second == _several_buckets(0)


def _not_trained(_: int) -> tuple[float, bool]:
    frozen, empty = Linear(1, 1).requires_grad_(False), ReLU()
    frozen.weight.fill_(float(idist.get_rank() + 3))
    assert idist.auto_model(frozen) is frozen
    return frozen.weight.item(), idist.auto_model(empty) is empty


def test_a_model_without_anything_to_train_becomes_equal_too() -> None:
    assert spawn(_not_trained) == [(3.0, True), (3.0, True)]


def _sync_bn(_: int) -> tuple[list[tuple[str, int, str]], int, bool]:
    model = Sequential(Linear(5, 8), BatchNorm1d(8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        adapted = idist.auto_model(model, sync_bn=True)
    said = [(one.filename.rpartition("/")[2], one.lineno, str(one.message)) for one in caught]
    return said, line, adapted is model and type(model[1]) is BatchNorm1d


def test_sync_bn_warns_at_the_callers_line() -> None:
    for said, line, is_itself in spawn(_sync_bn):
        ((filename, number, message),) = said
        assert "Horovod's SyncBatchNorm needs a GPU" in message
        assert (filename, number) == ("test_horovod_training.py", line)
        assert is_itself


# --- auto_optim: two ranks make the steps of one ------------------------------------------------------


def _groups(model: Sequential) -> list[dict[str, Any]]:
    """One parameter group with the default learning rate, and two with their own."""
    return [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.0},
        {"params": [model[4].bias, model[4].weight], "lr": 0.005},
    ]


OPTIMIZERS: dict[str, Callable[[Sequential], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: Adam(model.parameters(), lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95)),
    "sgd-groups": lambda model: SGD(_groups(model), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam-groups": lambda model: Adam(_groups(model), lr=0.01),
    "named": lambda model: Adam(model.named_parameters(), lr=0.01),
    "foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "fused": lambda model: Adam(model.parameters(), lr=0.01, fused=True),
    "tensor-lr": lambda model: Adam(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),  # has state from the start
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
}
# Which steps are made with a closure.
CLOSURES: dict[str, Callable[[int], bool]] = {
    "plain": lambda number: False,
    "closures": lambda number: True,
    "mixed": lambda number: number % 2 == 1,
}


def _trained(
    optimizer_name: str,
    scheduler_name: str | None = None,
    closures: str = "plain",
    set_to_none: bool = True,
    kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A training and what it was like after every step."""
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(OPTIMIZERS[optimizer_name](model), **(kwargs or {}))
    scheduler = SCHEDULERS[scheduler_name](optimizer) if scheduler_name else None
    seen: dict[str, list[Any]] = {"parameters": [], "gradients": [], "rates": [], "losses": []}

    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            return _backward(model, number)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if CLOSURES[closures](number):
                loss = optimizer.step(closure)
            else:
                loss = closure()
                assert optimizer.step() is None
            if scheduler is not None:
                scheduler.step()
        seen["losses"].append(loss.detach())
        seen["parameters"].append(_values(model))
        seen["gradients"].append([parameter.grad.clone() for parameter in model.parameters()])
        names = [name for name in ("lr", "momentum", "betas") if name in optimizer.param_groups[0]]
        seen["rates"].append([[group[name] for name in names] for group in optimizer.param_groups])
    losses = idist.all_reduce(torch.stack(seen["losses"]), op="AVERAGE")
    return {**seen, "losses": losses, "state": _state(optimizer.state_dict())}


def test_two_ranks_make_the_steps_of_one_process() -> None:
    equal_those_of_a_single_process(_trained, *((name,) for name in OPTIMIZERS))


def test_schedulers() -> None:
    cases = [(name, scheduler) for name in ("sgd-groups", "adam") for scheduler in SCHEDULERS]
    equal_those_of_a_single_process(_trained, *cases)


def test_closures_and_steps_without() -> None:
    cases = [(name, "step", closures) for name in ("sgd", "adam-groups") for closures in CLOSURES]
    equal_those_of_a_single_process(_trained, *cases)


def test_gradients_that_are_zeroed_and_not_forgotten() -> None:
    equal_those_of_a_single_process(_trained, *(("adam", None, closures, False) for closures in CLOSURES))


def test_gradients_that_are_reduced_in_groups() -> None:
    equal_those_of_a_single_process(_trained, ("sgd-groups", None, "mixed", True, {"groups": 2}))


def _quasi_newton(line_search: str | None) -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(
        LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn=line_search)
    )
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64)
    evaluations, seen = 0, []

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = mse_loss(model(x), x[:, :2])
        loss.backward()
        return loss

    for _step in range(3):
        loss = optimizer.step(closure)
        seen.append((evaluations, loss.detach(), _values(model)))
    return [*seen, _state(optimizer.state_dict())]


def test_an_optimizer_that_calls_its_closure_several_times() -> None:
    """On the same data everywhere: LBFGS looks at the loss as well, and that is each rank's own."""
    equal_those_of_a_single_process(_quasi_newton, (None,), ("strong_wolfe",))


def _zeroed() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    found = []
    for args, kwargs in [((), {}), ((True,), {}), ((False,), {}), ((), {"set_to_none": False})]:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        found.append([None if one.grad is None else one.grad.count_nonzero() for one in model.parameters()])
    _backward(model)  # Horovod still writes into these gradients, from a thread of its own
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())
    optimizer.step()
    return [*found, _values(model)]


def test_zero_grad_forgets_or_zeroes_as_it_is_told() -> None:
    equal_those_of_a_single_process(_zeroed)


# --- auto_optim: what a step is made of ---------------------------------------------------------------


def _unfrozen(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The last layer alone, then one more, then all of them."""
    passes = kwargs.get("backward_passes_per_step", 1)
    model = _net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(Adam(model[4].parameters(), lr=0.01, weight_decay=0.01), **kwargs)
    seen = []
    for number in range(7):
        if number == 2:
            optimizer.add_param_group({"params": model[2].requires_grad_(True).parameters(), "lr": 0.03})
        if number == 4:  # one that is still frozen is no harm either
            optimizer.add_param_group({"params": [model[0].weight.requires_grad_(True), model[0].bias]})
        optimizer.zero_grad()
        for one in range(passes):
            _backward(model, number * passes + one)
        optimizer.step()
        seen.append(_values(model))
    return {"seen": seen, "state": _state(optimizer.state_dict())}


def test_layers_that_are_unfrozen_later() -> None:
    cases: list[dict[str, Any]] = [{}, {"backward_passes_per_step": 2}, {"groups": 1}]
    equal_those_of_a_single_process(_unfrozen, *((kwargs,) for kwargs in cases))


def _accumulated() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9), backward_passes_per_step=2)

    def two_passes(number: int) -> Tensor:
        optimizer.zero_grad()
        return _backward(model, 2 * number) + _backward(model, 2 * number + 1)

    seen = []
    for number in range(STEPS):
        if number % 2:
            optimizer.step(lambda number=number: two_passes(number))
        else:
            two_passes(number)
            optimizer.step()
        seen.append(_values(model))
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()  # the last batches of an epoch may be fewer
    return [*seen, _values(model)]


def test_gradients_of_several_passes() -> None:
    equal_those_of_a_single_process(_accumulated)


def _clipped() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0, momentum=0.9))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(STEPS):
            optimizer.zero_grad()
            _backward(model, number)
            if number == 2:  # one step without
                optimizer.step()
            elif hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
                seen.append(clip_grad_norm_(model.parameters(), 0.1))
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                seen.append(clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
            seen.append(_values(model))
    return seen


def test_gradients_that_are_clipped() -> None:
    assert all(norm > 0.1 for norm in _clipped()[::2] if isinstance(norm, Tensor))
    equal_those_of_a_single_process(_clipped)


class Branches(Module):
    """Two layers on the way to the same result, of which a rank may use only the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.sometimes = Linear(5, 2).double(), Linear(5, 2).double()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        result: Tensor = self.always(x)
        return result + self.sometimes(x) if both else result


def _branched(set_to_none: bool) -> list[Any]:
    model = idist.auto_model(Branches())
    optimizer = idist.auto_optim(Adam(model.parameters(), lr=0.01))
    seen = []
    ranks = [idist.get_rank()] if idist.get_world_size() > 1 else [0, 1]
    generator = torch.Generator().manual_seed(4)
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none)
        x = torch.randn(2, SIZE, 5, generator=generator, dtype=torch.float64)
        for rank in ranks:  # alone: the work of both ranks
            both = rank == number % 2
            (mse_loss(model(x[rank], both), x[rank, :, :2]) / len(ranks)).backward()
        optimizer.step()
        seen.append(_values(model))
    return seen


def test_parameters_that_one_rank_does_not_use() -> None:
    equal_those_of_a_single_process(_branched, (True,), (False,))


def _two_optimizers(with_names: bool) -> list[Any]:
    model = idist.auto_model(_net())
    halves = [model[:2], model[2:]]
    optimizers = []
    for number, half in enumerate(halves):
        named = [(f"{number}.{name}", one) for name, one in half.named_parameters()]
        kwargs = {"named_parameters": named} if with_names else {}
        optimizers.append(idist.auto_optim(SGD(half.parameters(), lr=0.1), **kwargs))
    for number in range(3):
        for one in optimizers:
            one.zero_grad()
        _backward(model, number)
        for one in optimizers:
            one.step()
    return _values(model)


@pytest.mark.parametrize("with_names", [True, False])
def test_two_optimizers_of_one_model(with_names: bool) -> None:
    equal_those_of_a_single_process(_two_optimizers, (with_names,))


def _rows_of_an_embedding() -> list[Any]:
    torch.manual_seed(3)
    table = idist.auto_model(torch.nn.Embedding(6, 2, sparse=True).double())
    optimizer = idist.auto_optim(SGD(table.parameters(), lr=0.1))
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        mine = torch.tensor([number, 3, 5, number + 1])[idist.get_rank() :: idist.get_world_size()]
        table(mine).square().mean().backward()
        optimizer.step()
        seen.append(_values(table))
    return seen


def test_sparse_gradients() -> None:
    equal_those_of_a_single_process(_rows_of_an_embedding)


# --- auto_optim: hooks --------------------------------------------------------------------------------


def _hooked(_: int) -> dict[str, Any]:
    model = idist.auto_model(_net())
    calls: list[str] = []
    gradients: list[list[Tensor]] = []
    plain = Adam(model.parameters(), lr=0.01)
    plain.register_step_pre_hook(lambda *_: calls.append("pre, early"))
    plain.register_step_post_hook(lambda *_: calls.append("post, early"))
    removed = plain.register_step_pre_hook(lambda *_: calls.append("removed"))
    optimizer = idist.auto_optim(plain)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre, late"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post, late"))
    looking = optimizer.register_step_pre_hook(
        lambda *_: gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    )
    removed.remove()
    StepLR(optimizer, 1)  # this one replaces `step` as well

    found = {}
    _backward(model)
    optimizer.step()
    found["step"] = calls.copy()
    looking.remove()
    calls.clear()
    optimizer.step(lambda: (optimizer.zero_grad(), _backward(model))[1])
    found["closure"] = calls.copy()
    calls.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    _backward_again(model, optimizer)
    found["after load_state_dict"] = calls.copy()
    return {"calls": found, "gradients": gradients}


def _backward_again(model: Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()


@pytest.mark.parametrize("nproc_per_node", [1, 2])
def test_the_hooks_of_a_step_run_once_and_see_the_averaged_gradients(nproc_per_node: int) -> None:
    alone = _hooked(0)
    assert alone["calls"]["step"] == ["pre, early", "pre, late", "post, early", "post, late"]
    for found in spawn(_hooked, nproc_per_node=nproc_per_node):
        assert found["calls"] == alone["calls"]
        equal(found["gradients"], alone["gradients"])


def _kept(_: int) -> list[bool]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    _backward(model)
    gradients = [weakref.ref(one.grad) for one in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [gradient() is None for gradient in gradients]


def test_gradients_are_given_up_after_the_step() -> None:
    for rank in spawn(_kept):
        assert all(rank)
