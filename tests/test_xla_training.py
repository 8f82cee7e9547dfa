"""auto_model, auto_optim and auto_dataloader on the real XLA, with replicas on PJRT's CPU.

Most tests of an optimizer run one function twice: on two replicas with half of the data each, and in this
very process, without a context, with all of the data. Both have to end up with the same numbers.
"""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    Buffer,
    Linear,
    Module,
    ModuleList,
    Parameter,
    ParameterList,
    ReLU,
    Sequential,
)
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils._pytree import tree_flatten, tree_map_only
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
from ignite_dist.samplers import DistributedProxySampler

pytestmark = pytest.mark.xla

SIZE = 12
STEPS = 3
SECONDS = 90.0


# --- where the tests run -----------------------------------------------------------------------------


def launch(function: Callable[..., Any], *args: Any, nproc_per_node: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("CPU_NUM_DEVICES", str(nproc_per_node))
        # What takes time here is compiling, and what is compiled runs a few times.
        patch.setenv(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
        return idist.spawn("xla-tpu", function, args, nproc_per_node=nproc_per_node, join=False)


def spawn(*functions: Callable[[], Any], nproc_per_node: int) -> list[list[Any]]:
    """What the functions returned on each of new replicas."""
    workers = launch(_each, functions, nproc_per_node=nproc_per_node)
    try:
        results: list[list[Any]] | None = workers.join(SECONDS)
        assert results is not None, f"no end within {SECONDS} s"
        return results
    finally:
        workers.terminate()


def _each(_: int, functions: tuple[Callable[[], Any], ...]) -> list[Any]:
    return [function() for function in functions]


class Replicas:
    """Two replicas that are kept from test to test. A test that fails in them, or hangs, costs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connections: list[Connection] = []
        self._workers: Any = None

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """What ``function(*args)`` returned on each of them."""
        if self._workers is None:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (ready := wait(list(waiting), seconds)):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = ("it died", None)
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in sorted(answers.items()) if text]
        failed += [f"rank {rank}: no answer within {seconds} s" for rank in waiting.values()]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [result for _, (_, result) in sorted(answers.items())]

    def _start(self) -> None:
        with Listener(str(self._folder / "functions"), "AF_UNIX") as listener:
            self._workers = launch(_serve, listener.address, nproc_per_node=2)
            accepted = [listener.accept() for _ in range(2)]
        by_rank = {connection.recv(): connection for connection in accepted}
        self._connections = [by_rank[rank] for rank in range(2)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._workers is not None:
            self._workers.terminate()
        self._connections, self._workers = [], None


def _serve(_: int, address: str) -> None:
    with Client(address, "AF_UNIX") as connection:
        connection.send(idist.get_rank())
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                return
            try:
                answer = ("", function(*args))
            except BaseException:
                answer = (traceback.format_exc(), None)
            connection.send_bytes(pickle.dumps(answer))  # not send(), which would share a tensor's memory


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    two = Replicas(tmp_path_factory.mktemp("replicas"))
    yield two
    two.close()


def equal_those_of_a_single_process(
    replicas: Replicas,
    function: Callable[..., Any],
    *cases: tuple[Any, ...],
    rtol: float = 1e-12,
    atol: float = 1e-13,
) -> None:
    """Compare what ``function(*case)`` returns on each replica, for each case, with what it returns here."""
    for case in cases or ((),):
        alone = function(*case)
        first, second = replicas.run(function, *case)
        torch.testing.assert_close(first, alone, rtol=rtol, atol=atol)
        same_bits(second, first)


def same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# --- models and data ---------------------------------------------------------------------------------


def _here(values: Any) -> Any:
    """Copies of the tensors on the CPU, in the containers that they come in."""
    if any(isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in tree_flatten(values)[0]):
        sys.modules["torch_xla"].sync()  # one graph for all of them; else each would be compiled by itself
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


def _different(model: Module) -> Module:
    """Let it start differently on each replica."""
    # From a generator of its own: the global one is shared by all replicas of a process.
    generator = torch.Generator().manual_seed(3 + idist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def _net(dtype: torch.dtype = torch.float64) -> Sequential:
    net = _different(Sequential(Linear(5, 8), ReLU(), Linear(8, 2)).to(dtype))
    assert isinstance(net, Sequential)
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
    """Parameters and buffers of many kinds. Each value is another on each replica, but for the empty one."""

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
        self.empty = Parameter(torch.empty(0, 3))
        self.special = Buffer(torch.tensor([-0.0, float("nan"), float("inf"), 1e-40, float(rank)]))
        self.frozen = Parameter(randn(3).float(), requires_grad=False)
        self.norm = BatchNorm1d(4)
        self.norm(randn(8, 4).float() + rank)
        self.brain_norm = BatchNorm1d(3).bfloat16()
        with torch.no_grad():
            self.norm.num_batches_tracked += rank
            for one in (*self.norm.parameters(), *self.brain_norm.parameters(), *self.brain_norm.buffers()):
                one += rank


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _contents(model: Module) -> dict[str, tuple[Any, ...]]:
    copies = _here(_tensors(model))
    return {
        name: (one.dtype, tuple(one.shape), one.requires_grad, _bytes(copies[name]))
        for name, one in _tensors(model).items()
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _everything() -> dict[str, Any]:
    model = Everything(idist.get_rank())
    before = _contents(model)
    adapted = idist.auto_model(model, find_unused_parameters=True)
    return {
        "same": adapted is model and model.training,
        "devices": {one.device == idist.device() for one in _tensors(model).values()},
        "before": before,
        "after": _contents(model),
    }


def test_every_replica_has_the_parameters_and_buffers_of_rank_zero_bit_for_bit(replicas: Replicas) -> None:
    first, second = replicas.run(_everything)
    assert {name for name, one in first["before"].items() if one == second["before"][name]} == {"empty"}
    for found in (first, second):
        assert found["same"] and found["devices"] == {True}
        assert found["after"] == first["before"]


def _several_buckets() -> list[bool]:
    """The first parameter alone is more than 16 MB, and the others together are two times that."""
    sizes = [int(megabytes * (1 << 18)) for megabytes in (17, 7, 7, 15.5, 0.5, 1e-5)]
    starts = [torch.arange(size, dtype=torch.float32) + 100 * number for number, size in enumerate(sizes)]
    model = Module()
    model.several = ParameterList(one + idist.get_rank() for one in starts)
    idist.auto_model(model)
    return [torch.equal(one, start) for one, start in zip(_values(model), starts, strict=True)]


def test_a_model_of_several_buckets(replicas: Replicas) -> None:
    assert replicas.run(_several_buckets) == [[True] * 6] * 2


def _only_moved() -> dict[str, Any]:
    if idist.get_rank() != 0:  # by one replica alone: nothing is sent
        return {}
    frozen = Sequential(Linear(5, 8), BatchNorm1d(8)).requires_grad_(False)
    frozen[0].weight.fill_(0.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        adapted = idist.auto_model(frozen, sync_bn=True)
    empty = ReLU()
    return {
        "same": adapted is frozen and idist.auto_model(empty) is empty,
        "moved": {one.device == idist.device() for one in _tensors(frozen).values()},
        "values": frozen[0].weight.unique().tolist(),
        "said": [(one.filename.rpartition("/")[2], one.lineno - line, str(one.message)) for one in caught],
    }


def test_a_model_without_anything_to_train_is_only_moved_and_sync_bn_warns(replicas: Replicas) -> None:
    found, _ = replicas.run(_only_moved)
    assert found["same"] and found["moved"] == {True} and found["values"] == [0.25]
    ((filename, lines_off, message),) = found["said"]
    assert (filename, lines_off) == ("test_xla_training.py", 0)
    assert "sync_bn=True" in message


class Tied(Module):
    """An encoder and a decoder that have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Linear(5, 2, bias=False).double(), Linear(5, 2, bias=False).double()
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x) - self.decoder(x.square())
        return result


def _tied() -> list[Any]:
    model = idist.auto_model(_different(Tied()))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    _backward(model)
    optimizer.step()
    return [model.decoder.weight is model.encoder.weight, _values(model)]


def test_parameters_that_are_tied_stay_tied(replicas: Replicas) -> None:
    """Moving to XLA makes new parameters, one for each place that holds the old one."""
    equal_those_of_a_single_process(replicas, _tied)


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


def _stepped(how: str, optimizer: Optimizer, closure: Callable[[], Tensor]) -> Tensor:
    """A step, and its loss: of this replica alone, or what the step returns."""
    if how == "closure":
        return optimizer.step(closure)
    if how == "keyword":
        return optimizer.step(closure=closure)
    loss = closure()
    assert optimizer.step() is None
    return idist.all_reduce(loss.detach(), "AVERAGE")


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
    model = idist.auto_model(_net(dtype))
    plain = OPTIMIZERS[name](model)
    optimizer = idist.auto_optim(plain)
    assert optimizer is plain and isinstance(optimizer, type(plain))
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    seen: dict[str, list[Any]] = {"values": [], "gradients": [], "losses": [], "rates": []}
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            return _backward(model, number)

        seen["losses"].append(_here(_stepped(how, optimizer, closure)))
        if scheduler is not None:
            scheduler.step()
        seen["values"].append(_values(model))
        seen["gradients"].append(_here([parameter.grad for parameter in model.parameters()]))
        names = [name for name in ("lr", "momentum", "betas") if name in optimizer.param_groups[0]]
        seen["rates"].append([[group[name] for name in names] for group in optimizer.param_groups])
    return {**seen, "state": _state(optimizer)}


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
    after, means = _here(parameters), _here(objects)
    optimizer.zero_grad()
    optimizer.step()  # with no gradient at all
    return {
        "after": after,
        "again": _here(parameters),
        "means": means,
        "same": same,
        "without": _here(without),
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
    model = idist.auto_model(_different(Branches()))
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


@pytest.mark.parametrize("used", [([0], [1]), ([0, 1], [0])], ids=["one-each", "one-more"])
def test_parameters_that_one_replica_does_not_use(
    used: tuple[list[int], list[int]], replicas: Replicas
) -> None:
    equal_those_of_a_single_process(replicas, _branched, used)


def _without_a_loss() -> list[Tensor]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    assert optimizer.step(lambda: _backward(model) and None) is None
    return _values(model)


def test_a_closure_that_returns_nothing(replicas: Replicas) -> None:
    """SGD, for one, has no use for what it returns."""
    equal_those_of_a_single_process(replicas, _without_a_loss)


def _quasi_newton(line_search: str | None) -> list[Any]:
    model = idist.auto_model(_different(Linear(5, 2).double()))
    optimizer = idist.auto_optim(
        LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=2, line_search_fn=line_search)
    )
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        return _backward(model)

    loss = optimizer.step(closure)
    return [evaluations, _here(loss), _values(model)]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_looks_at_the_loss(line_search: str | None, replicas: Replicas) -> None:
    """And calls its closure as often as that tells it to."""
    equal_those_of_a_single_process(replicas, _quasi_newton, (line_search,), rtol=1e-9, atol=1e-10)


# --- auto_optim: it is the optimizer ------------------------------------------------------------------


def _zeroed() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    found = []
    for args, kwargs in [((), {}), ((True,), {}), ((False,), {}), ((), {"set_to_none": False})]:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        gradients = _here([parameter.grad for parameter in model.parameters()])
        found.append([-1 if one is None else one.count_nonzero().item() for one in gradients])
    return found


def _unfrozen() -> dict[str, Any]:
    """The last layer alone, then all of them, one parameter of which is still frozen."""
    model = _net()
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
        _backward(model, number)
        optimizer.step()
        seen.append(_values(model))
    return {"seen": seen, "state": _state(optimizer)}


def _resumed() -> list[Any]:
    """Two steps, then one more from what was saved: in this optimizer, in another, and in this one again."""
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(Adam(model.parameters(), lr=0.01))
    for number in range(2):
        optimizer.zero_grad()
        _backward(model, number)
        optimizer.step()
    weights, state = _here(model.state_dict()), _here(optimizer.state_dict())
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
    return ends[0]


def _two_optimizers() -> list[Any]:
    model = idist.auto_model(_net())
    optimizers = [idist.auto_optim(SGD(half.parameters(), lr=0.1)) for half in (model[:1], model[2:])]
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
    plain = SGD(model.parameters(), lr=0.1)
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
    return {"calls": calls, "gradients": gradients, "values": _values(model)}


@pytest.mark.parametrize("function", [_zeroed, _unfrozen, _resumed, _two_optimizers])
def test_it_is_used_as_before(function: Callable[[], Any], replicas: Replicas) -> None:
    equal_those_of_a_single_process(replicas, function)


def test_the_hooks_of_a_step_run_once_and_see_the_averaged_gradients(replicas: Replicas) -> None:
    assert _hooked()["calls"] == [1, 2, 3, 4] * 3
    equal_those_of_a_single_process(replicas, _hooked)


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


def _indices(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def _attributes() -> dict[str, Any]:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    data = Numbers(13)
    loader = idist.auto_dataloader(data, batch_size=6, num_workers=0, drop_last=True, shuffle=False)
    one_pass = iter(loader)
    batches = list(one_pass)
    return {
        "class": isinstance(loader, MpDeviceLoader),
        "dataset": loader.dataset is data,
        "values": (loader.batch_size, loader.drop_last, loader.num_workers, loader.pin_memory),
        "sampler": (type(loader.sampler).__name__, len(loader.batch_sampler), hasattr(loader, "nothing")),
        "lengths": (len(loader), len(one_pass), len(batches)),
        "devices": {batch.device == idist.device() for batch in batches},
        "batches": [batch.tolist() for batch in batches],
        "over": (next(one_pass, "over"), next(one_pass, "over")),
    }


def test_a_loader_has_the_attributes_of_its_data_loader(replicas: Replicas) -> None:
    for rank, found in enumerate(replicas.run(_attributes)):
        mine = list(range(rank, SIZE, 2))
        assert found == {
            "class": True,
            "dataset": True,
            "values": (3, True, 0, False),
            "sampler": ("EpochSampler", 2, False),
            "lengths": (2, 2, 2),
            "devices": {True},
            "batches": [mine[:3], mine[3:]],
            "over": ("over", "over"),
        }


def _nested() -> Any:
    loader = idist.auto_dataloader(Named(), batch_size=4, shuffle=False)
    fields, (integers, halves) = next(iter(loader))
    tensors = (fields["x"], integers, halves)
    on_device = {one.device == idist.device() for one in tensors}
    return on_device, fields["name"], [(one.dtype, one.tolist()) for one in tensors]


def test_batches_of_several_things_are_on_the_device(replicas: Replicas) -> None:
    for rank, (on_device, names, values) in enumerate(replicas.run(_nested)):
        assert on_device == {True}
        assert names == [f"n{rank}", f"n{rank + 2}"]
        assert values == [
            (torch.float64, [[rank, rank], [rank + 2, rank + 2]]),
            (torch.int64, [rank, rank + 2]),
            (torch.float64, [rank / 2, rank / 2 + 1]),
        ]


def _epochs(num_workers: int, own_sampler: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"batch_size": 4, "num_workers": 2 * num_workers}
    if own_sampler:
        kwargs["sampler"] = SubsetRandomSampler(range(SIZE))
    loader = idist.auto_dataloader(Numbers(), **kwargs)
    sampler, epochs = loader.sampler, [loader.sampler.epoch]
    if idist.get_rank() == 0:
        next(iter(loader))  # a preview: what fetches ahead has emptied the sampler
        for batch in loader:
            assert len(batch) == 2
            break
        for _batch, _step in zip(loader, range(2), strict=False):  # all batches, and not a look further
            pass
    epochs.append(sampler.epoch)
    passes = [_indices(loader)]
    epochs.append(sampler.epoch)
    passes.append(_indices(loader))
    epochs.append(sampler.epoch)
    sampler.set_epoch(0)
    passes += [_indices(loader), _indices(loader)]
    epochs.append(sampler.epoch)
    return {
        "passes": passes,
        "epochs": epochs,
        "loader": (loader.num_workers, type(sampler).__name__),
    }


@pytest.mark.parametrize(
    ("num_workers", "own_sampler"),
    [(0, False), (0, True), (1, False)],
    ids=["no-workers", "own-sampler", "workers"],
)
def test_a_pass_over_the_loader_is_an_epoch_and_a_preview_is_not(
    num_workers: int, own_sampler: bool, replicas: Replicas
) -> None:
    first, second = replicas.run(_epochs, num_workers, own_sampler)
    for found in (first, second):
        assert found["loader"] == (
            num_workers,
            "DistributedProxySampler" if own_sampler else "EpochSampler",
        )
        assert found["epochs"] == [0, 0, 1, 2, 0]
        passes = found["passes"]
        assert passes[0] != passes[1]
        assert passes[0] == passes[2] == passes[3]  # epoch 0 again, and it stays
    for one, other in zip(first["passes"], second["passes"], strict=True):
        assert sorted(one + other) == list(range(SIZE))


def _broken_off() -> list[int]:
    """Of many more batches than are fetched ahead, so that the loader is in the midst of them."""
    loader = idist.auto_dataloader(Numbers(400), batch_size=4, shuffle=False)
    for _ in range(3):
        for _batch in loader:
            break
    return _indices(loader)


def test_a_pass_that_was_broken_off_leaves_nothing_behind(replicas: Replicas) -> None:
    assert replicas.run(_broken_off) == [list(range(0, 400, 2)), list(range(1, 400, 2))]


class WhereAmI(Numbers):
    """Each sample says on which replica it was made."""

    def __getitem__(self, index: int) -> int:
        return idist.get_rank()


class Stream(IterableDataset[int]):
    """Other data on each replica, which it sees to itself."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * idist.get_rank(), 4 * idist.get_rank() + 4))


def _ranks_of_samples(num_workers: int) -> list[list[int]]:
    kwargs = {"batch_size": 4, "num_workers": 2 * num_workers}
    loaders = [
        idist.auto_dataloader(WhereAmI(), **kwargs),
        idist.auto_dataloader(
            Numbers(2), collate_fn=lambda _: torch.tensor([10 + idist.get_rank()]), **kwargs
        ),
        idist.auto_dataloader(Stream(), **kwargs),
    ]
    return [_indices(loader) for loader in loaders]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_knows_its_rank_wherever_the_loader_runs_it(num_workers: int, replicas: Replicas) -> None:
    for rank, found in enumerate(replicas.run(_ranks_of_samples, num_workers)):
        assert found == [[rank] * 6, [10 + rank], list(range(4 * rank, 4 * rank + 4))]


# --- auto_dataloader: one random state for all replicas of a process ----------------------------------


class Augmented(Numbers):
    """Draws from the global random state, as augmentations do."""

    def __getitem__(self, index: int) -> int:
        return index + 0 * int(torch.randint(9, ()))


class OneByOne(Sampler[int]):
    """Draws from the global random state, one after the other, without replacement."""

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
    "one-by-one": lambda: OneByOne(MANY),
}


def _drawn(name: str, data: Dataset[int]) -> list[list[int]]:
    loader = idist.auto_dataloader(data, batch_size=32, sampler=SAMPLERS[name]())
    return [_indices(loader) for _ in range(PASSES)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("subset", Numbers(MANY)),
        ("subset", Augmented(MANY)),
        ("random", Augmented(MANY)),
        ("one-by-one", Numbers(MANY)),  # Augmented would draw from the same random state: documented
    ],
)
def test_shares_of_a_sampler_whatever_other_replicas_draw_meanwhile(
    name: str, data: Dataset[int], replicas: Replicas
) -> None:
    for rank, found in enumerate(replicas.run(_drawn, name, data)):
        sampler = DistributedProxySampler(SAMPLERS[name](), num_replicas=2, rank=rank)
        wrong = []
        for epoch, drawn in enumerate(found):
            sampler.set_epoch(epoch)
            if drawn != list(sampler):
                wrong.append(epoch)
        assert not wrong, f"rank {rank} drew its own in these of {PASSES} epochs: {wrong}"


# --- auto_dataloader: failures ------------------------------------------------------------------------


class Spoilt(Numbers):
    """Fails in rank 1's second batch, until it is mended."""

    mended = False

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.mended:
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
    loader = idist.auto_dataloader(data, batch_size=4, shuffle=False, num_workers=2 * num_workers)
    found = _seen_until_it_failed(loader)
    epoch = loader.sampler.epoch
    data.mended = True
    return found, epoch, _indices(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_in_the_data_set_reaches_the_loop(num_workers: int, replicas: Replicas) -> None:
    first, second = replicas.run(_spoilt, num_workers)
    evens, odds = list(range(0, SIZE, 2)), list(range(1, SIZE, 2))
    assert first == ((evens, "nothing was raised"), 1, evens)
    assert second == (([1, 3], "sample 7 is spoilt"), 0, odds)


def _no_stream() -> tuple[list[int], str]:
    return _seen_until_it_failed(idist.auto_dataloader(NoStream(), batch_size=4))


def test_an_exception_before_the_first_sample_reaches_the_loop(replicas: Replicas) -> None:
    assert replicas.run(_no_stream, seconds=10) == [([], "no stream")] * 2


# --- one replica, and none any more -------------------------------------------------------------------


def _own_steps(optimizer: Optimizer, model: Module) -> list[Any]:
    """A step with a closure and one without, on the same data wherever this is."""
    device = next(model.parameters()).device
    x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure), closure()]
    optimizer.step()
    return [_here(losses), _values(model), _state(optimizer)]


def _after_the_end() -> list[Any]:
    model = idist.auto_model(_net())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9))
    _backward(model)
    optimizer.step()
    rank = idist.get_rank()
    idist.finalize()
    assert idist.get_world_size() == 1
    return _own_steps(optimizer, model) if rank == 0 else []  # so the first steps alone


def test_after_the_end_of_the_context_a_step_is_each_replicas_own() -> None:
    alone = _after_the_end()
    (first,), (second,) = spawn(_after_the_end, nproc_per_node=2)
    torch.testing.assert_close(first, alone, rtol=1e-12, atol=1e-13)
    assert second == []


def _alone_with_a_loader() -> dict[str, Any]:
    loader_class: type = DataLoader
    if idist.model_name() == "xla-dist":
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        loader_class = MpDeviceLoader
    model = idist.auto_model(_net())
    plain = Adam(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(plain)
    samples = TensorDataset(*_here(_data()))
    loader = idist.auto_dataloader(samples, batch_size=4, shuffle=False)
    assert optimizer is plain
    assert isinstance(loader, loader_class)
    assert (len(loader), loader.batch_size, loader.dataset is samples) == (3, 4, True)
    losses = []
    for how, (x, y) in zip(("plain", "closure", "keyword"), loader, strict=True):
        assert x.device == y.device == idist.device()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(_here(_stepped(how, optimizer, closure)))
    return {"losses": losses, "values": _values(model), "state": _state(optimizer)}


def test_one_replica_trains_as_a_process_without_a_context() -> None:
    functions = (_alone_with_a_loader, _after_the_end)
    (found,) = spawn(*functions, nproc_per_node=1)
    torch.testing.assert_close(found, _each(0, functions), rtol=1e-12, atol=1e-13)


# --- one replica is lazy ------------------------------------------------------------------------------


def _counts() -> tuple[int, int]:
    """How many graphs have been executed and compiled."""
    from torch_xla.core import xla_model
    from torch_xla.debug import metrics

    xla_model.wait_device_ops()  # it counts them when they end
    executed = metrics.metric_data("ExecuteTime")
    return (executed[0] if executed else 0), metrics.counter_value("UncachedCompile") or 0


def _since(before: tuple[int, int]) -> tuple[int, int]:
    executed, compiled = _counts()
    return executed - before[0], compiled - before[1]


LAZY_STEPS = 8


def _counted_loop(optimizer_class: type[Optimizer], ours: bool, with_loader: bool) -> dict[str, Any]:
    """How many executions and compilations there have been after each step of a training."""
    import torch_xla

    device = torch_xla.device()
    model: Module = Sequential(Linear(5, 8), ReLU(), Linear(8, 2))
    model = idist.auto_model(model) if ours else model.to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(optimizer) if ours else optimizer
    samples = TensorDataset(torch.randn(LAZY_STEPS * 4, 5), torch.randn(LAZY_STEPS * 4, 2))
    loader = (idist.auto_dataloader if with_loader else DataLoader)(samples, batch_size=4)
    found: dict[str, Any] = {"counts": [], "losses": [], "text": ""}
    before = _counts()
    for x, y in loader:
        if with_loader:  # which has ended the step before
            found["counts"].append(_since(before))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            return loss

        loss = optimizer.step(closure) if with_loader else closure()
        total = loss.detach().clone()
        if ours:
            total = idist.all_reduce({"loss": idist.all_reduce(total), "seen": len(x)})["loss"]
        found["text"] = torch_xla._XLAC._get_xla_tensors_text([total])
        found["losses"].append((loss.detach(), total))
        if not with_loader:
            optimizer.step()
            torch_xla.sync()
            found["counts"].append(_since(before))
    if with_loader:
        found["counts"] = [*found["counts"][1:], _since(before)]
    return {**found, "losses": _here(found["losses"])}


def _lazy() -> dict[tuple[str, bool], list[dict[str, Any]]]:
    return {
        (optimizer.__name__, with_loader): [
            _counted_loop(optimizer, ours, with_loader) for ours in (with_loader, True)
        ]
        for optimizer in (SGD, Adam)
        for with_loader in (False, True)
    }


def _counted_calls() -> dict[str, int]:
    """How many executions each call takes."""
    import torch_xla

    tensor = torch.ones(3, device=torch_xla.device())
    calls: dict[str, Callable[[], Any]] = {
        "a number": lambda: idist.all_reduce(3.5),
        "numbers": lambda: idist.all_reduce({"loss": 0.5, "n": [1, 2]}, "MAX"),
        "objects": lambda: idist.all_gather({"rank": 0}),
        "text": lambda: idist.broadcast("text"),
        "ranks": lambda: (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()),
        "device": idist.device,
        "barrier": idist.barrier,
        "all_reduce": lambda: idist.all_reduce(tensor + 1),
        "average": lambda: idist.all_reduce(tensor + 1, "AVERAGE", inplace=False),
        "all_gather": lambda: idist.all_gather(tensor + 1),
        "broadcast": lambda: idist.broadcast(tensor + 1),
    }
    found = {}
    for name, call in calls.items():
        pending = tensor + 5
        before = _counts()
        kept = call()
        found[name] = _since(before)[0]
        del kept, pending
    before = _counts()
    (tensor + 7).cpu()
    return {**found, "cpu()": _since(before)[0]}


def test_a_step_of_one_replica_stays_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # else a world of one reduces nothing
    ((loops, calls),) = spawn(_lazy, _counted_calls, nproc_per_node=1)
    for (_, with_loader), (plain, ours) in loops.items():
        for found in (plain, ours):
            executed, compiled = zip(*found["counts"], strict=True)
            assert list(executed) == list(range(1, LAZY_STEPS + 1))
            assert set(compiled[2:]) == {compiled[1]}
            for loss, total in found["losses"]:
                assert torch.equal(loss, total)
        assert "all_reduce" in ours["text"] or "cross_replica_sum" in ours["text"]
        if not with_loader:
            assert "all_reduce" not in plain["text"] and "cross_replica_sum" not in plain["text"]
    assert calls.pop("cpu()") == 1
    assert set(calls.values()) == {0}, calls
