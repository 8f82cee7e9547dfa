"""auto_model and auto_optim on the real Horovod.

Most tests run one function twice: on two ranks with half of the data each, and in this very process, where
both are what they are given, with all of the data. Both have to end up with the same numbers.
"""

from __future__ import annotations

import hashlib
import io
import sys
import warnings
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
STEPS = 5


def spawn(function: Callable[..., Any], *args: Any, nproc_per_node: int = 2) -> list[Any]:
    results: list[Any] = idist.spawn("horovod", function, args, nproc_per_node=nproc_per_node)
    return results


def equal_those_of_a_single_process(
    function: Callable[..., Any], *args: Any, nproc_per_node: int = 2
) -> None:
    """Compare what ``function(local_rank, *args)`` returns on each rank with what it returns here."""
    alone = function(0, *args)
    for found in spawn(function, *args, nproc_per_node=nproc_per_node):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


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


def _tensors_of(optimizer: Optimizer) -> list[Any]:
    """Everything in the optimizer's state, in the order of its parameters."""
    state = optimizer.state_dict()
    groups = [{name: value for name, value in one.items()} for one in state["param_groups"]]
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
        self.half = Buffer(torch.randn(3).half(), persistent=False)
        self.complex = Parameter(torch.randn(3, dtype=torch.complex64))
        self.conjugated = Buffer(torch.randn(3, dtype=torch.complex128).conj())
        self.mask = Buffer(torch.rand(11) < 0.5)
        self.bytes = Buffer(torch.randint(0, 256, (5,), dtype=torch.uint8), persistent=False)
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


def _left_alone(_: int) -> tuple[float, bool]:
    value = float(idist.get_rank())
    frozen, empty = Linear(1, 1).requires_grad_(False), ReLU()
    frozen.weight.fill_(value)
    if idist.get_rank() == 0:  # by this rank alone: nothing is sent
        assert idist.auto_model(frozen) is frozen
    return frozen.weight.item(), idist.auto_model(empty) is empty


def test_a_model_without_anything_to_train_is_left_alone() -> None:
    assert spawn(_left_alone) == [(0.0, True), (1.0, True)]


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
        assert "horovod.torch.SyncBatchNorm" in message
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
    _: int,
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
        seen["losses"].append(idist.all_reduce(loss.detach(), op="AVERAGE"))
        seen["parameters"].append(_values(model))
        seen["gradients"].append([parameter.grad.clone() for parameter in model.parameters()])
        names = [name for name in ("lr", "momentum", "betas") if name in optimizer.param_groups[0]]
        seen["rates"].append([[group[name] for name in names] for group in optimizer.param_groups])
    return {**seen, "state": _tensors_of(optimizer)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_make_the_steps_of_one_process(optimizer: str) -> None:
    equal_those_of_a_single_process(_trained, optimizer)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd-groups", "adam"])
def test_schedulers(optimizer: str, scheduler: str) -> None:
    equal_those_of_a_single_process(_trained, optimizer, scheduler)


@pytest.mark.parametrize("closures", ["closures", "mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam-groups"])
def test_closures(optimizer: str, closures: str) -> None:
    equal_those_of_a_single_process(_trained, optimizer, "step", closures)


@pytest.mark.parametrize("closures", ["plain", "mixed"])
def test_gradients_that_are_zeroed_and_not_forgotten(closures: str) -> None:
    equal_those_of_a_single_process(_trained, "adam", None, closures, False)


def test_gradients_that_are_reduced_in_groups() -> None:
    equal_those_of_a_single_process(_trained, "sgd-groups", None, "mixed", True, {"groups": 2})


def _quasi_newton(_: int, line_search: str | None) -> list[Any]:
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
    return [*seen, _tensors_of(optimizer)]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_calls_its_closure_several_times(line_search: str | None) -> None:
    """On the same data everywhere: LBFGS looks at the loss as well, and that is each rank's own."""
    equal_those_of_a_single_process(_quasi_newton, line_search)


def _zeroed(_: int) -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    found = []
    for args, kwargs in [((), {}), ((True,), {}), ((False,), {}), ((), {"set_to_none": False})]:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        found.append([None if one.grad is None else one.grad.count_nonzero() for one in model.parameters()])
    if idist.get_world_size() > 1:  # Horovod writes into the gradients from a thread of its own
        _backward(model)
        with pytest.raises(AssertionError, match="race condition"):
            optimizer.zero_grad()
        optimizer.step()
    return found


def test_zero_grad_forgets_or_zeroes_as_it_is_told() -> None:
    equal_those_of_a_single_process(_zeroed)


# --- auto_optim: what a step is made of ---------------------------------------------------------------


def _unfrozen(_: int, kwargs: dict[str, Any]) -> dict[str, Any]:
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
    return {"seen": seen, "state": _tensors_of(optimizer)}


@pytest.mark.parametrize("kwargs", [{}, {"backward_passes_per_step": 2}, {"groups": 1}], ids=str)
def test_layers_that_are_unfrozen_later(kwargs: dict[str, Any]) -> None:
    equal_those_of_a_single_process(_unfrozen, kwargs)


def _accumulated(_: int) -> list[Any]:
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


def _clipped(_: int) -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0, momentum=0.9))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(STEPS):
            optimizer.zero_grad()
            _backward(model, number)
            if number == 3:  # one step without
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
    assert all(norm > 0.1 for norm in _clipped(0)[::2] if isinstance(norm, Tensor))
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


def _branched(_: int, set_to_none: bool) -> list[Any]:
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


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_that_one_rank_does_not_use(set_to_none: bool) -> None:
    equal_those_of_a_single_process(_branched, set_to_none)


def _two_optimizers(_: int, with_names: bool) -> list[Any]:
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
    equal_those_of_a_single_process(_two_optimizers, with_names)


def _rows_of_an_embedding(_: int) -> list[Any]:
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
        torch.testing.assert_close(found["gradients"], alone["gradients"], rtol=1e-12, atol=1e-14)


# --- auto_optim: state --------------------------------------------------------------------------------


def _saved(model: Module, optimizer: Optimizer) -> tuple[Any, Any]:
    """A checkpoint that went through a file."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    loaded: tuple[Any, Any] = torch.load(file, weights_only=True)
    return loaded


def _resumed(saved: tuple[Any, Any], optimizer_name: str, wrapped: bool) -> tuple[Sequential, Optimizer]:
    """A model and an optimizer with what was saved loaded after wrapping."""
    model = _net()
    model.load_state_dict(saved[0])
    optimizer = OPTIMIZERS[optimizer_name](model)
    if wrapped:
        optimizer = idist.auto_optim(optimizer)
    optimizer.load_state_dict(saved[1])
    return model, optimizer


def _round_trips(_: int, optimizer_name: str) -> dict[str, Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(OPTIMIZERS[optimizer_name](model))
    _go(model, optimizer, 0, 2)
    saved = _saved(model, optimizer)
    parts = {"expected": _go(model, optimizer, 2, 4)}
    parts["wrapped"] = _go(*_resumed(saved, optimizer_name, wrapped=True), 2, 4)

    # A plain one makes the steps of its own rank's data. So those are made equal to the averaged ones by hand.
    model, plain = _resumed(saved, optimizer_name, wrapped=False)
    parts["plain"] = _go_by_hand(model, plain, 2, 3)
    model, optimizer = _resumed(_saved(model, plain), optimizer_name, wrapped=True)
    parts["back"] = _go(model, optimizer, 3, 4)
    return {**parts, "saved": saved}


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


@pytest.mark.parametrize("optimizer", ["sgd", "adam-groups", "named"])
def test_state_goes_from_wrapped_to_plain_and_back(optimizer: str) -> None:
    alone = _round_trips(0, optimizer)
    for found in spawn(_round_trips, optimizer):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)
        expected = found["expected"]
        torch.testing.assert_close(found["wrapped"], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found["plain"] + found["back"], expected, rtol=1e-12, atol=1e-14)


def _loaded_before(_: int, optimizer_name: str, loaded_on: tuple[int, ...]) -> dict[str, Any]:
    """Wrapped after a checkpoint was loaded; one that rank 1 loads is of another training."""
    rank = idist.get_rank()
    source = _net()
    before = OPTIMIZERS[optimizer_name](source)
    _go_by_hand(source, before, 0, 3) if len(loaded_on) == idist.get_world_size() else None
    for number in range(3 + rank):
        before.zero_grad()
        _backward(source, number)
        before.step()
    for group in before.param_groups:
        group["lr"] = 0.02 + rank
    saved = _saved(source, before)

    model = _net()
    plain = OPTIMIZERS[optimizer_name](model)
    if rank in loaded_on:
        plain.load_state_dict(saved[1])
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    values, defaults = _values(model), dict(plain.defaults)
    optimizer = idist.auto_optim(plain)
    return {
        "state": _tensors_of(optimizer),
        "rank 0's": saved[1],
        "values": all(map(torch.equal, values, model.parameters())),
        "gradients": [None if one.grad is None else one.grad.unique().tolist() for one in model.parameters()],
        "defaults": optimizer.defaults == defaults,
    }


@pytest.mark.parametrize("loaded_on", [(0,), (0, 1), (1,)], ids=["on-0", "on-all", "on-1"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam-groups"])
def test_every_rank_has_the_state_of_rank_zero_and_nothing_else_changes(
    optimizer: str, loaded_on: tuple[int, ...]
) -> None:
    first, second = results = spawn(_loaded_before, optimizer, loaded_on)
    for rank, found in enumerate(results):
        assert found["values"] and found["defaults"]
        assert found["gradients"] == [None] + 5 * [[rank + 1.0]]
        torch.testing.assert_close(found["state"], first["state"], rtol=0, atol=0)
    assert first["rank 0's"]["param_groups"] != second["rank 0's"]["param_groups"]
    values, groups = first["state"]
    if 0 not in loaded_on:
        assert values == [] and groups[0]["lr"] < 0.2
        return
    expected = first["rank 0's"]
    torch.testing.assert_close(
        [values, groups], [sorted(expected["state"].items()), expected["param_groups"]], rtol=0, atol=0
    )
    assert len(values) == 6
    if optimizer == "adam-groups":
        assert {value["step"].item() for _, value in values} == {6 if len(loaded_on) == 2 else 3}


def _resumed_on_0(_: int) -> list[Any]:
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
        saved = _saved(source, before)
        model.load_state_dict(saved[0])
        plain.load_state_dict(saved[1])
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(plain)
    return [_go(model, optimizer, 0, 3), _tensors_of(optimizer)]


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


def _pulled(_: int) -> list[Any]:
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


def _counted(_: int) -> list[Any]:
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
    before = _tensors_of(plain)[0]
    return before, _tensors_of(idist.auto_optim(plain))[0]


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
        torch.testing.assert_close(found["trained"], expected, rtol=1e-12, atol=1e-14)


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
        torch.testing.assert_close(found["mean"], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found["sum"], [2 * one for one in expected], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found["halves"], expected, rtol=1e-2, atol=1e-3)


# --- a world of one -----------------------------------------------------------------------------------


def _alone(_: int) -> dict[str, Any]:
    model = _net()
    assert idist.auto_model(model, find_unused_parameters=True) is model
    return {
        "trained": [_trained(0, "adam-groups", "one-cycle", closures, False) for closures in CLOSURES],
        "clipped": _clipped(0),
        "unfrozen": _unfrozen(0, {}),
        "accumulated": _accumulated(0),
        "zeroed": _zeroed(0),
        "saved": _round_trips(0, "sgd"),
    }


def test_a_world_of_one() -> None:
    equal_those_of_a_single_process(_alone, nproc_per_node=1)
