"""auto_model, auto_optim and auto_dataloader on the real XLA, with replicas on PJRT's CPU.

Most tests of an optimizer run one function twice: on two replicas with half of the data each, and in this
very process, without a context, with all of the data. Both have to end up with the same numbers.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Buffer, Linear, Module, Parameter, ParameterList, ReLU, Sequential
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import ignite_dist as idist
from ignite_dist.samplers import DistributedProxySampler, EpochSampler

pytestmark = pytest.mark.xla

SIZE = 12
STEPS = 3
SECONDS = 60


import time
_T=time.time
@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


def spawn(function: Callable[..., Any], *args: Any, nproc_per_node: int = 2) -> list[Any]:
    """What ``function(local_rank, *args)`` returned on each replica. A hang fails, and is ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", str(nproc_per_node))
        workers = idist.spawn("xla-tpu", function, args, nproc_per_node=nproc_per_node, join=False)
    try:
        results: list[Any] | None = workers.join(SECONDS)
        assert results is not None, f"no end within {SECONDS} s"
        return results
    finally:
        workers.terminate()


def equal_those_of_a_single_process(
    function: Callable[..., Any],
    *cases: tuple[Any, ...],
    rtol: float = 1e-12,
    atol: float = 1e-13,
    nproc_per_node: int = 2,
) -> None:
    """Compare what ``function(*case)`` returns on each replica, for each case, with what it returns here."""
    alone = _each(0, function, cases or ((),))
    found = spawn(_each, function, cases or ((),), nproc_per_node=nproc_per_node)
    for one in found:
        torch.testing.assert_close(one, alone, rtol=rtol, atol=atol)
        same_bits(one, found[0])


def same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def _each(_: int, function: Callable[..., Any], cases: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
    return {repr(case): function(*case) for case in cases}


def _together(_: int, functions: tuple[Callable[[], Any], ...]) -> list[Any]:
    """Several tests' work in one launch."""
    o=[]
    for f in functions:
        t=_T(); o.append(f()); print(f.__name__, _T()-t, flush=True)
    return o


def _here(values: Any) -> Any:
    """Copies of the tensors on the CPU, in the order and the containers that they come in."""
    if "torch_xla" in sys.modules:  # one graph for all of them: each would be compiled by itself
        sys.modules["torch_xla"].sync()
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), values)


def _values(model: Module) -> list[Tensor]:
    found: list[Tensor] = _here(list(model.parameters()))
    return found


def _state(optimizer: Optimizer) -> list[Any]:
    """Its state dict, as something that assert_close takes: it knows no strings."""
    state = optimizer.state_dict()
    groups = [
        {name: repr(one).encode() if isinstance(one, str | list) else one for name, one in group.items()}
        for group in state["param_groups"]
    ]
    return [_here(sorted(state["state"].items())), groups]


def _net(dtype: torch.dtype = torch.float64) -> Sequential:
    """A model that starts differently on each replica. They draw in turn: the random state is one for all."""
    for rank in range(idist.get_world_size()):
        if rank == idist.get_rank():
            generator = torch.Generator().manual_seed(3 + rank)
            net = Sequential(Linear(5, 8), ReLU(), Linear(8, 4), ReLU(), Linear(4, 2)).to(dtype)
            with torch.no_grad():
                for parameter in net.parameters():
                    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(drawn / 2)
    return net


def _data(number: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The samples of a step: this replica's share of all samples."""
    generator = torch.Generator().manual_seed(4 + number)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(SIZE, 2, generator=generator, dtype=torch.float64).to(dtype)
    mine = slice(idist.get_rank(), None, idist.get_world_size())
    return x[mine].to(idist.device()), y[mine].to(idist.device())


def _backward(model: Module, number: int = 0) -> Tensor:
    x, y = _data(number, next(model.parameters()).dtype)
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss


# --- auto_model --------------------------------------------------------------------------------------


class Everything(Module):
    """Parameters and buffers of many kinds. Each value is another on each replica, but for the empty ones."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.doubles = Parameter(randn(3, 5))
        self.flag = Buffer(torch.tensor(rank == 0))  # one byte: what comes after it is at an odd place
        self.floats = Parameter(randn(4, 3).float())
        self.transposed = Parameter(randn(4, 3).float().t())
        self.scalar = Parameter(randn().float())
        self.brain = Parameter(randn(7).bfloat16())
        self.halves = Buffer(randn(3).half(), persistent=False)
        self.complex = Parameter(torch.complex(randn(3), randn(3)).to(torch.complex64))
        self.mask = Buffer(torch.arange(11) % 3 == rank)
        self.octets = Buffer(torch.tensor([255, rank], dtype=torch.uint8), persistent=False)
        self.counter = Buffer(torch.tensor(2**62 + rank))
        self.no_parameters = Parameter(torch.empty(0, 3))
        self.special = Buffer(torch.tensor([-0.0, float("nan"), float("inf"), 1e-40, float(rank)]))
        self.frozen = Parameter(randn(3).float(), requires_grad=False)
        self.norm = BatchNorm1d(4)
        self.norm(randn(8, 4).float() + rank)
        self.norm.num_batches_tracked += rank
        self.brain_norm = BatchNorm1d(3).bfloat16()
        self.brain_norm.running_var += rank
        with torch.no_grad():
            for parameter in (*self.norm.parameters(), *self.brain_norm.parameters()):
                parameter += rank
            self.brain_norm.running_mean += rank
            self.brain_norm.num_batches_tracked += rank


def _contents(model: Module) -> dict[str, tuple[Any, ...]]:
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    return {
        name: (one.dtype, tuple(one.shape), tensors[name].requires_grad, _bytes(one))
        for name, one in _here(tensors).items()
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _everything() -> dict[str, Any]:
    model = Everything(idist.get_rank())
    before = _contents(model)
    adapted = idist.auto_model(model, find_unused_parameters=True)
    return {
        "same": adapted is model and model.training,
        "devices": {one.device == idist.device() for one in (*model.parameters(), *model.buffers())},
        "before": before,
        "after": _contents(model),
    }


def _several_buckets() -> bool:
    """Of which one parameter alone is more than 16 MB, and the others are not."""
    megabyte = (1 << 20) // 4
    sizes = (17, 7, 7, 15.5, 0.5, 1e-5)
    model = Module()
    model.several = ParameterList(
        torch.arange(int(size * megabyte), dtype=torch.float32) + 100 * number + idist.get_rank()
        for number, size in enumerate(sizes)
    )
    idist.auto_model(model)
    expected = [torch.arange(one.numel()) + 100 * number for number, one in enumerate(model.several)]
    return all(torch.equal(one, expected[number]) for number, one in enumerate(_values(model)))


def _only_moved() -> dict[str, Any]:
    """By rank 0 alone: nothing is sent."""
    if idist.get_rank() != 0:
        return {}
    frozen = Sequential(Linear(5, 8), BatchNorm1d(8)).requires_grad_(False)
    with torch.no_grad():
        frozen[0].weight.fill_(0.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        adapted = idist.auto_model(frozen, sync_bn=True)
    said = [(one.filename.rpartition("/")[2], one.lineno - line, str(one.message)) for one in caught]
    empty = ReLU()
    return {
        "same": adapted is frozen and idist.auto_model(empty) is empty,
        "moved": all(one.device == idist.device() for one in (*frozen.parameters(), *frozen.buffers())),
        "values": frozen[0].weight.unique().tolist(),
        "said": said,
    }


def test_every_replica_has_the_parameters_and_buffers_of_rank_zero_bit_for_bit() -> None:
    results = spawn(_together, (_only_moved, _everything, _several_buckets))
    (alone, first, buckets), (_, second, more_buckets) = results
    same = {name for name, one in first["before"].items() if one == second["before"][name]}
    assert same == {"no_parameters"}
    for found in (first, second):
        assert found["same"] and found["devices"] == {True}
        for name, value in first["before"].items():
            assert found["after"][name] == value, name
    assert buckets and more_buckets
    ((filename, lines_off, message),) = alone.pop("said")
    assert alone == {"same": True, "moved": True, "values": [0.25]}
    assert (filename, lines_off) == ("test_xla_training.py", 0)
    assert "sync_bn=True" in message


class Tied(Module):
    """An encoder and a decoder with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Linear(4, 4, bias=False), Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight


def _tied() -> tuple[bool, int]:
    model = Tied()
    idist.auto_model(model)
    return model.decoder.weight is model.encoder.weight, len(list(model.parameters()))


def test_parameters_that_are_tied_stay_tied() -> None:
    """A move to XLA gives a module new parameters, and each place that holds one gets its own."""
    assert spawn(_together, (_tied,), nproc_per_node=1) == [[(True, 1)]]


# --- auto_optim: two replicas make the steps of one process -------------------------------------------


def _groups(model: Sequential) -> list[dict[str, Any]]:
    """One parameter group with the default learning rate, and two with their own."""
    return [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.0},
        {"params": [model[4].bias, model[4].weight], "lr": 0.005},
    ]


OPTIMIZERS: dict[str, Callable[[Sequential], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: Adam(model.parameters(), lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95)),
    "sgd-groups": lambda model: SGD(_groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "named": lambda model: Adam(model.named_parameters(), lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
}
# How a step gets its closure, if it has one.
STEPPED: dict[str, Callable[[Optimizer, Callable[[], Tensor], int], Tensor]] = {
    "plain": lambda optimizer, closure, number: (closure(), optimizer.step())[0],
    "closure": lambda optimizer, closure, number: optimizer.step(closure),
    "keyword": lambda optimizer, closure, number: optimizer.step(closure=closure),
    "mixed": lambda optimizer, closure, number: (
        optimizer.step(closure) if number % 2 else STEPPED["plain"](optimizer, closure, number)
    ),
}


def _trained(
    optimizer_name: str,
    scheduler_name: str | None = None,
    stepped: str = "plain",
    set_to_none: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """A training and what it was like after every step."""
    # For good: replicas are threads, and each would take back the filters of the other.
    warnings.filterwarnings("error", message=".*(lr_scheduler|overridden|optimizer.step)")
    model = idist.auto_model(_net(dtype))
    plain = OPTIMIZERS[optimizer_name](model)
    optimizer = idist.auto_optim(plain)
    assert optimizer is plain
    scheduler = SCHEDULERS[scheduler_name](optimizer) if scheduler_name else None
    seen: dict[str, list[Any]] = {"parameters": [], "gradients": [], "rates": [], "losses": []}

    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            return _backward(model, number)

        loss = STEPPED[stepped](optimizer, closure, number)
        if scheduler is not None:
            scheduler.step()
        # What step() returns is the mean already, and the mean of equal ones is the same again.
        seen["losses"].append(_here(idist.all_reduce(loss.detach(), "AVERAGE", inplace=False)))
        if stepped in ("closure", "keyword"):
            same_bits(_here(loss), seen["losses"][-1])
        seen["parameters"].append(_values(model))
        seen["gradients"].append(_here([parameter.grad for parameter in model.parameters()]))
        names = [name for name in ("lr", "momentum", "betas") if name in optimizer.param_groups[0]]
        seen["rates"].append([[group[name] for name in names] for group in optimizer.param_groups])
    return {**seen, "state": _state(optimizer)}


def test_two_replicas_make_the_steps_of_one_process() -> None:
    cases = [(name,) for name in OPTIMIZERS]
    equal_those_of_a_single_process(_trained, *cases)


def test_schedulers_closures_and_zeroed_gradients() -> None:
    cases = [
        ("sgd-groups", "step", "mixed"),
        ("sgd", "one-cycle", "closure"),
        ("adam", "step", "keyword", False),
        ("adamw", None, "plain", False),
    ]
    equal_those_of_a_single_process(_trained, *cases)


def test_steps_of_smaller_floats() -> None:
    singles = [(name, None, "mixed", True, torch.float32) for name in ("sgd", "adam")]
    equal_those_of_a_single_process(_trained, *singles, rtol=1e-4, atol=1e-5)
    brain = ("sgd", None, "mixed", True, torch.bfloat16)
    equal_those_of_a_single_process(_trained, brain, rtol=0.05, atol=0.02)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.complex64)
SHAPES = ((3, 5), (7,), (2, 2), (4,), (), (6,))


def _gradients_of(rank: int) -> list[Tensor]:
    """A gradient for each of :func:`_parameters_of_all_kinds` that has one."""
    generator = torch.Generator().manual_seed(rank)
    several = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]
    transposed = torch.randn(4, 3, generator=generator).t()
    return [*several, transposed, torch.empty(0, 3), torch.randn(2, generator=generator)]


def _means() -> dict[str, Any]:
    """A step of SGD with a rate of 1 from zero on is the negative mean."""
    device, gradients = idist.device(), _gradients_of(idist.get_rank())
    *on_device, on_cpu = (torch.zeros_like(one) for one in gradients)
    parameters = [Parameter(one.to(device)) for one in on_device] + [Parameter(on_cpu)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.device)
    objects = [parameter.grad for parameter in parameters]
    without = [
        Parameter(torch.full((2,), 7.0, device=device)),
        Parameter(torch.full((3,), 8.0, device=device), requires_grad=False),
    ]
    idle = [Parameter(torch.ones(2, device=device))]
    groups = [{"params": [without[0], *parameters[::2]]}, {"params": [*parameters[1::2], without[1]]}]
    optimizer = idist.auto_optim(SGD([*groups, {"params": idle}], lr=1.0))
    optimizer.step()
    same = all(one is parameter.grad for one, parameter in zip(objects, parameters, strict=True))
    found = {
        "after": _here(parameters),
        "gradients": _here(objects),
        "same": same,
        "without": _here(without),
        "none": [one.grad is None for one in (*without, *idle)],
    }
    optimizer.zero_grad()
    idist.auto_optim(SGD(idle, lr=1.0)).step()  # no gradient at all
    return {**found, "idle": _here(idle)}


def _no_loss() -> list[Tensor]:
    """A closure need not return anything, as far as SGD is concerned."""
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    assert optimizer.step(lambda: _backward(model) and None) is None
    return _values(model)


class Branches(Module):
    """Two layers of one size, of which a replica may use only one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(Linear(5, 2).double() for _ in range(2))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.layers[number](x) for number in used]).sum(0)


def _branched(used: list[list[int]]) -> list[Any]:
    model = idist.auto_model(Branches())
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
        seen.append(_values(model))
    return seen


def test_the_mean_is_exact_in_every_dtype_and_what_has_no_gradient_is_left_alone() -> None:
    results = spawn(_together, (_means,))
    pairs = list(zip(_gradients_of(0), _gradients_of(1), strict=True))
    wide = [torch.complex128 if one.is_complex() else torch.float64 for one, _ in pairs]
    expected = [
        ((one.to(dtype) + two.to(dtype)) / 2).to(one.dtype)
        for dtype, (one, two) in zip(wide, pairs, strict=True)
    ]
    for (found,) in results:
        same_bits(found["gradients"], expected)
        same_bits(found["after"], [-one for one in expected])
        assert found["same"] and found["none"] == [True] * 3
        same_bits(found["without"], [torch.full((2,), 7.0), torch.full((3,), 8.0)])
        same_bits(found["idle"], [torch.ones(2)])


def test_a_closure_that_returns_nothing() -> None:
    equal_those_of_a_single_process(_no_loss)


def test_parameters_that_one_replica_does_not_use() -> None:
    equal_those_of_a_single_process(_branched, ([[0], [1]],), ([[0, 1], [0]],))


def _quasi_newton(line_search: str | None) -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(
        LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn=line_search)
    )
    evaluations, seen = 0, []

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        return _backward(model)

    for _step in range(2):
        loss = optimizer.step(closure)
        seen.append((evaluations, _here(loss), _values(model)))
    return seen


def test_an_optimizer_that_looks_at_the_loss_and_calls_its_closure_several_times() -> None:
    equal_those_of_a_single_process(_quasi_newton, (None,), ("strong_wolfe",), rtol=1e-8, atol=1e-10)


# --- auto_optim: it is the optimizer ------------------------------------------------------------------


def _zeroed() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    found = []
    for args, kwargs in [((), {}), ((True,), {}), ((False,), {}), ((), {"set_to_none": False})]:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        found.append([None if one.grad is None else one.grad.abs().sum().item() for one in model.parameters()])
    return [[str(one).encode() for one in row] for row in found]


def _unfrozen() -> dict[str, Any]:
    """The last layer alone, then one more, then all of them."""
    model = _net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(Adam(model[4].parameters(), lr=0.01, weight_decay=0.01))
    seen = []
    for number in range(4):
        if number == 1:
            optimizer.add_param_group({"params": model[2].requires_grad_(True).parameters(), "lr": 0.03})
        if number == 2:  # one that is still frozen is no harm either
            optimizer.add_param_group({"params": [model[0].weight.requires_grad_(True), model[0].bias]})
        optimizer.zero_grad()
        _backward(model, number)
        optimizer.step()
        seen.append(_values(model))
    return {"seen": seen, "state": _state(optimizer)}


def _resumed() -> dict[str, Any]:
    """Two steps, then one more from what was saved: in another optimizer, and in this one, set back."""
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(Adam(model.parameters(), lr=0.01))
    for number in range(2):
        optimizer.zero_grad()
        _backward(model, number)
        optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other_model = idist.auto_model(_net())
    other = idist.auto_optim(Adam(other_model.parameters(), lr=0.5))
    ends = []
    for one_model, one in ((model, optimizer), (other_model, other), (model, optimizer)):
        one_model.load_state_dict(weights)
        one.load_state_dict(copy.deepcopy(state))  # it keeps what it is given
        one.zero_grad()
        _backward(one_model, 2)
        one.step()
        ends.append([_values(one_model), _state(one)])
    same_bits(ends[1], ends[0])
    same_bits(ends[2], ends[0])
    return {"end": ends[0]}


def _two_optimizers() -> list[Any]:
    model = idist.auto_model(_net())
    optimizers = [idist.auto_optim(SGD(half.parameters(), lr=0.1)) for half in (model[:2], model[2:])]
    for number in range(2):
        for one in optimizers:
            one.zero_grad()
        _backward(model, number)
        for one in optimizers:
            one.step()
    return _values(model)


def _hooked() -> dict[str, Any]:
    model = idist.auto_model(_net())
    calls: list[int] = []
    gradients: list[Any] = []
    plain = Adam(model.parameters(), lr=0.01)
    plain.register_step_pre_hook(lambda *_: calls.append(1))
    plain.register_step_post_hook(lambda *_: calls.append(3))
    optimizer = idist.auto_optim(plain)
    optimizer.register_step_pre_hook(lambda *_: calls.append(2))
    optimizer.register_step_post_hook(lambda *_: calls.append(4))
    looking = optimizer.register_step_pre_hook(
        lambda *_: gradients.append(_here([parameter.grad for parameter in model.parameters()]))
    )
    StepLR(optimizer, 1)  # this one replaces `step`
    _backward(model)
    optimizer.step()
    looking.remove()
    optimizer.step(lambda: (optimizer.zero_grad(), _backward(model))[1])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()
    return {"calls": calls, "gradients": gradients, "end": _values(model)}


def test_it_zeroes_grows_resumes_and_calls_its_hooks_as_before() -> None:
    functions = (_zeroed, _unfrozen, _resumed, _two_optimizers, _hooked)
    alone = _together(0, functions)
    assert alone[-1]["calls"] == [1, 2, 3, 4] * 3
    results = spawn(_together, functions)
    for found in results:
        for one, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-13)
    same_bits(results[1], results[0])


def _own_steps(optimizer: Optimizer, model: Module) -> list[Any]:
    """Steps with and without a closure, on the data of rank 0 of two, whoever this is."""
    seen = []
    for number in range(2):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            device = next(model.parameters()).device
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64).to(device)
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if number:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        seen.append([_here(loss), _values(model)])
    return seen


def _after_the_end() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9))
    _backward(model)
    optimizer.step()
    spawned = idist.model_name() == "xla-dist"
    idist.finalize()
    assert idist.get_world_size() == 1
    if spawned and next(model.parameters()).device.index:  # the other one steps alone
        return []
    return [*_own_steps(optimizer, model), _state(optimizer)]


def test_after_the_end_of_the_context_a_step_is_each_replicas_own() -> None:
    (alone,) = _together(0, (_after_the_end,))
    (first,), (second,) = spawn(_together, (_after_the_end,))
    torch.testing.assert_close(first, alone, rtol=1e-12, atol=1e-13)
    assert second == []


# --- auto_dataloader ---------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Named(Numbers):
    """Samples that are more than a tensor."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), index, dtype=torch.float64), "name": f"n{index}"}, [index, index / 2]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * idist.get_rank(), 4 * idist.get_rank() + 4))


def _indices(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def _attributes() -> dict[str, Any]:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    data = Numbers(13)
    loader = idist.auto_dataloader(data, batch_size=6, num_workers=0, drop_last=True, shuffle=False)
    passed = iter(loader)
    batches = list(passed)
    return {
        "is one": isinstance(loader, MpDeviceLoader),
        "dataset": loader.dataset is data,
        "values": (loader.batch_size, loader.drop_last, loader.num_workers, loader.pin_memory),
        "sampler": type(loader.sampler).__name__,
        "more": (loader.collate_fn is not None, loader.batch_sampler.drop_last, hasattr(loader, "nothing")),
        "len": (len(loader), len(passed), len(batches)),
        "devices": {batch.device == idist.device() for batch in batches},
        "batches": [batch.tolist() for batch in batches],
        "over": (next(passed, "over"), next(passed, "over")),
    }


def _nested() -> Any:
    loader = idist.auto_dataloader(Named(), batch_size=4, shuffle=False)
    ((fields, (integers, halves)), *_) = list(loader)
    on_device = {one.device == idist.device() for one in (fields["x"], integers, halves)}
    dtypes = (fields["x"].dtype, integers.dtype, halves.dtype)
    values = (fields["x"].tolist(), fields["name"], integers.tolist(), halves.tolist())
    return on_device, dtypes, values


def _streamed() -> list[list[int]]:
    return [_indices(idist.auto_dataloader(Stream(), batch_size=4)) for _ in range(2)]


def _epochs(num_workers: int, own_sampler: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers * idist.get_world_size()}
    if own_sampler:
        kwargs["sampler"] = SubsetRandomSampler(range(SIZE))
    loader = idist.auto_dataloader(Numbers(), **kwargs)
    sampler, seen = loader.sampler, [loader.sampler.epoch]
    if idist.get_rank() == 0:
        next(iter(loader))  # a preview: what fetches ahead has emptied the sampler
        for batch in loader:
            assert len(batch) == 2
            break
        for _batch, _step in zip(loader, range(2), strict=False):  # all batches, and no look behind them
            pass
    seen.append(sampler.epoch)
    passes = [_indices(loader)]
    seen.append(sampler.epoch)
    passes.append(_indices(loader))
    seen.append(sampler.epoch)
    sampler.set_epoch(0)
    passes += [_indices(loader), _indices(loader)]
    seen.append(sampler.epoch)
    return {"passes": passes, "epochs": seen, "workers": loader.num_workers, "sampler": type(sampler)}


def _in_processes() -> list[dict[str, Any]]:
    return [_epochs(1, False) for _ in range(2)]


def _in_threads() -> list[dict[str, Any]]:
    return [_epochs(0, False), _epochs(0, True)]


def _broken_off() -> list[int]:
    """Of many more batches than are fetched ahead, so that the loader is in the midst of it."""
    loader = idist.auto_dataloader(Numbers(400), batch_size=2 * idist.get_world_size(), shuffle=False)
    for _ in range(3):
        for _batch in loader:
            break
    return _indices(loader)


def test_each_replica_gets_its_share_on_its_device() -> None:
    functions = (_attributes, _nested, _streamed, _in_threads, _broken_off)
    for rank, found in enumerate(spawn(_together, functions)):
        attributes, nested, streamed, epochs, broken_off = found
        mine = list(range(rank, SIZE, 2))
        assert attributes == {
            "is one": True,
            "dataset": True,
            "values": (3, True, 0, False),
            "sampler": "EpochSampler",
            "more": (True, True, False),
            "len": (2, 2, 2),
            "devices": {True},
            "batches": [mine[:3], mine[3:]],
            "over": ("over", "over"),
        }
        on_device, dtypes, (x, names, integers, halves) = nested
        assert on_device == {True}
        assert dtypes == (torch.float64, torch.int64, torch.float64)
        assert integers == mine[:2] and names == [f"n{one}" for one in integers]
        assert x == [[one, one] for one in integers] and halves == [one / 2 for one in integers]
        assert streamed == [list(range(4 * rank, 4 * rank + 4))] * 2
        assert broken_off == list(range(rank, 400, 2))
        if rank == 0:
            firsts = epochs
            assert [one["sampler"] for one in epochs] == [EpochSampler, DistributedProxySampler]
            continue
        for one, other in zip(firsts, epochs, strict=True):
            _check_epochs(one, other)


def _check_epochs(first: dict[str, Any], second: dict[str, Any]) -> None:
    for found in (first, second):
        assert found["epochs"] == [0, 0, 1, 2, 0]
        passes = found["passes"]
        assert passes[0] != passes[1]
        assert passes[0] == passes[2] == passes[3]  # epoch 0 again, and it stays
    for one, other in zip(first["passes"], second["passes"], strict=True):
        assert sorted(one + other) == list(range(SIZE))


def test_workers_of_a_loader() -> None:
    """They are processes, which a thread of a replica forks."""
    (firsts,), (seconds,) = spawn(_together, (_in_processes,))
    for first, second in zip(firsts, seconds, strict=True):
        assert first["workers"] == second["workers"] == 1
        _check_epochs(first, second)


# --- auto_dataloader: one random state for all replicas of a process ----------------------------------


class Augmented(Numbers):
    """Draws from the global random state, as augmentations do."""

    def __getitem__(self, index: int) -> int:
        return index + 0 * int(torch.randint(9, ()))


class OneByOne(Sampler[int]):
    """Draws without replacement from the global random state, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        rest = list(range(self.size))
        while rest:
            yield rest.pop(int(torch.randint(len(rest), ())))


MANY, PASSES = 200, 12
SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "subset": lambda: SubsetRandomSampler(range(MANY)),
    "random": lambda: RandomSampler(range(MANY)),
    "one by one": lambda: OneByOne(MANY),
}


def _drawn(name: str, data: Dataset[int]) -> list[list[int]]:
    loader = idist.auto_dataloader(data, batch_size=16, sampler=SAMPLERS[name]())
    return [_indices(loader) for _ in range(PASSES)]


def _shares(_: int) -> dict[str, list[list[int]]]:
    return {f"{name}, {type(data).__name__}": _drawn(name, data) for name in SAMPLERS for data in DATA}


DATA = (Numbers(MANY), Augmented(MANY))


def test_the_replicas_of_a_process_draw_the_same_whatever_the_others_draw_meanwhile() -> None:
    results = spawn(_shares)
    for name in SAMPLERS:
        for rank, found in enumerate(results):
            sampler = DistributedProxySampler(SAMPLERS[name](), num_replicas=2, rank=rank)
            expected = []
            for epoch in range(PASSES):
                sampler.set_epoch(epoch)
                expected.append(list(sampler))
            for data in DATA:
                wrong = [
                    number
                    for number, drawn in enumerate(found[f"{name}, {type(data).__name__}"])
                    if drawn != expected[number]
                ]
                assert not wrong, f"passes {wrong} of {name}, {type(data).__name__}, rank {rank}"


# --- auto_dataloader: failures ------------------------------------------------------------------------


class Spoilt(Numbers):
    """Fails at a sample of rank 1's second batch."""

    def __init__(self, spoilt: bool = True) -> None:
        super().__init__()
        self.spoilt = spoilt

    def __getitem__(self, index: int) -> int:
        if self.spoilt and index == 7:
            raise LookupError("sample 7 is spoilt")
        return index


class NoStream(IterableDataset[int]):
    """Fails before there is any sample."""

    def __iter__(self) -> Iterator[int]:
        raise LookupError("no stream")


def _seen_until_it_failed(loader: Any) -> tuple[list[int], str]:
    seen: list[int] = []
    try:
        for batch in loader:
            seen += batch.tolist()
    except LookupError as error:
        return seen, str(error).rpartition("LookupError: ")[2].strip()
    return seen, "nothing was raised"


def _spoilt(num_workers: int) -> tuple[Any, ...]:
    data = Spoilt()
    loader = idist.auto_dataloader(
        data, batch_size=4, shuffle=False, num_workers=num_workers * idist.get_world_size()
    )
    found = _seen_until_it_failed(loader)
    epoch = loader.sampler.epoch
    data.spoilt = False
    return found, epoch, _indices(loader)


def _failing() -> tuple[Any, ...]:
    return _spoilt(0), _spoilt(1)


def _no_stream() -> tuple[Any, ...]:
    return _seen_until_it_failed(idist.auto_dataloader(NoStream(), batch_size=4))


def test_an_exception_in_the_data_set_reaches_the_loop() -> None:
    (first,), (second,) = spawn(_together, (_failing,))
    for found, epoch, again in first:
        assert (found, epoch) == ((list(range(0, SIZE, 2)), "nothing was raised"), 1)
        assert again == list(range(0, SIZE, 2)) or sorted(again) == sorted(range(0, SIZE, 2))
    for found, epoch, again in second:
        assert (found, epoch) == (([1, 3], "sample 7 is spoilt"), 0)
        assert again == list(range(1, SIZE, 2))


def test_an_exception_before_the_first_sample_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SECONDS", 15)
    assert spawn(_together, (_no_stream,)) == [[([], "no stream")]] * 2


# --- one replica -------------------------------------------------------------------------------------


def _alone_with_a_loader() -> dict[str, Any]:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    is_xla = idist.model_name() == "xla-dist"
    model = idist.auto_model(_net())
    plain = Adam(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(plain)
    samples = TensorDataset(*_here(_data()))
    loader = idist.auto_dataloader(samples, batch_size=4, shuffle=False)
    assert isinstance(loader, MpDeviceLoader if is_xla else DataLoader)
    assert optimizer is plain
    assert (len(loader), loader.batch_size, loader.dataset is samples) == (3, 4, True)
    losses = []
    for number, (x, y) in enumerate(loader):
        assert x.device == y.device == idist.device()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(_here(STEPPED["mixed"](optimizer, closure, number)))
    return {"losses": losses, "values": _values(model), "state": _state(optimizer)}


def _alone_after_the_end() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen = _own_steps(optimizer, model)
    idist.finalize()
    return [*seen, *_own_steps(optimizer, model), _state(optimizer)]


def test_one_replica_steps_as_a_process_without_a_context() -> None:
    functions = (_alone_with_a_loader, _alone_after_the_end)
    alone = _together(0, functions)
    (found,) = spawn(_together, functions, nproc_per_node=1)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-13)


# --- one replica is lazy ------------------------------------------------------------------------------


def _executions() -> int:
    from torch_xla.debug import metrics

    data = metrics.metric_data("ExecuteTime")
    return data[0] if data else 0


def _compilations() -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value("UncachedCompile") or 0


def _counted_loop(with_idist: bool, optimizer_class: type[Optimizer], with_loader: bool) -> dict[str, Any]:
    """How many executions and compilations each step of a training takes."""
    import torch_xla

    device = torch_xla.device()
    model: Module = Sequential(Linear(5, 8), ReLU(), Linear(8, 2))
    model = idist.auto_model(model) if with_idist else model.to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(optimizer) if with_idist else optimizer
    samples = TensorDataset(torch.randn(8 * 4, 5), torch.randn(8 * 4, 2))
    loader = idist.auto_dataloader(samples, batch_size=4) if with_loader else DataLoader(samples, batch_size=4)
    torch_xla.sync()
    counts, losses, texts = [], [], ""
    before = _executions(), _compilations()
    for x, y in loader:
        if with_loader:  # which has ended the step before
            counts.append((_executions() - before[0], _compilations() - before[1]))
        optimizer.zero_grad()
        loss = mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        total = loss.detach().clone()
        if with_idist:
            total = idist.all_reduce(total)
            mean = idist.all_reduce({"loss": total, "seen": 4}, "AVERAGE" if False else "SUM")
            total = mean["loss"]
        texts = torch_xla._XLAC._get_xla_tensors_text([total])
        losses.append((loss.detach(), total))
        optimizer.step()
        if not with_loader:
            torch_xla.sync()
            counts.append((_executions() - before[0], _compilations() - before[1]))
    after = (_executions() - before[0], _compilations() - before[1])
    return {
        "counts": counts,
        "after": after,
        "reduced": texts.count("all_reduce") + texts.count("cross_replica_sum"),
        "equal": all(one.item() == other.item() for one, other in losses),
    }


def _without_execution(_: int) -> list[tuple[str, int]]:
    """How often each call makes XLA compute something."""
    import torch_xla

    tensor = torch.ones(3, device=torch_xla.device())
    calls: dict[str, Callable[[], Any]] = {
        "number": lambda: idist.all_reduce(3.5),
        "numbers": lambda: idist.all_reduce({"loss": 0.5, "n": [1, 2]}, "MAX"),
        "objects": lambda: idist.all_gather({"rank": 0}),
        "text": lambda: idist.broadcast("text"),
        "getters": lambda: (idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.device()),
        "barrier": idist.barrier,
        "all_reduce": lambda: idist.all_reduce(tensor + 1),
        "average": lambda: idist.all_reduce(tensor + 1, "AVERAGE", inplace=False),
        "all_gather": lambda: idist.all_gather(tensor + 1),
        "broadcast": lambda: idist.broadcast(tensor + 1),
    }
    found = []
    for name, call in calls.items():
        pending = tensor + 5
        before = _executions()
        kept = call()
        found.append((name, _executions() - before))
        del kept, pending
    torch_xla.sync()
    return found


LOOPS = [(optimizer, loader) for optimizer in (SGD, Adam) for loader in (False, True)]


def _lazy(_: int) -> dict[str, Any]:
    return {
        f"{optimizer.__name__}, {'loader' if with_loader else 'sync'}, {'ours' if ours else 'plain'}": (
            _counted_loop(ours, optimizer, with_loader)
        )
        for optimizer, with_loader in LOOPS
        for ours in (False, True)
    }


def test_a_step_of_one_replica_stays_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # else a world of one reduces nothing
    (found,) = spawn(_lazy, nproc_per_node=1)
    for k,v in found.items(): print(k,v)
    assert 0
