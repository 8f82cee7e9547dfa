"""Models and optimizers beyond one backward pass per step, on every model, against a single process."""

from __future__ import annotations

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.optim import SGD, AdamW, Optimizer

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError, RankFailedError
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import has_join, on_every_rank, raises
from ignite_dist.testing.conformance.test_all_reduce import DTYPES, name_of

WIDTH = 3


class Net(Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = Linear(WIDTH, WIDTH), Linear(WIDTH, 1)
        self.double()
        if self.first.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def loss(self, x: Tensor, power: int = 2) -> Tensor:
        """A method of its own, which calls forward()."""
        return self(x).pow(power).mean()


def samples(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def adapted(seed: int = 0, make: Any = SGD, **kwargs: Any) -> tuple[Module, Optimizer]:
    model = idist.auto_model(Net(seed))
    return model, idist.auto_optim(make(model.parameters(), lr=0.5), **kwargs)


def samples_by_rank() -> list[Tensor]:
    return [samples(rank) for rank in range(idist.get_world_size())]


def mine() -> Tensor:
    return samples(idist.get_rank()).to(idist.device())


def assert_same(model: Module, other: Module) -> None:
    found = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(found, other.state_dict(), rtol=1e-9, atol=1e-12)


def of_one_process(*losses: Any) -> Net:
    """A net after one step of the mean over the ranks of these losses of (net, samples)."""
    net = Net()
    sum(loss(net, x) for x in samples_by_rank() for loss in losses).div(len(samples_by_rank())).backward()
    SGD(net.parameters(), lr=0.5).step()
    return net


# --- backward passes by hand ---------------------------------------------------------------------------


@on_every_rank
def test_two_losses_in_one_step() -> None:
    model, optimizer = adapted()
    model(mine()).pow(2).mean().backward()
    model(mine()).sin().mean().backward()
    optimizer.step()
    assert_same(
        model, of_one_process(lambda net, x: net(x).pow(2).mean(), lambda net, x: net(x).sin().mean())
    )


@on_every_rank
def test_several_forward_passes_before_a_backward_pass() -> None:
    model, optimizer = adapted()
    one, other = model(mine()), model(mine() + 1)
    (one * other).mean().backward()
    optimizer.step()
    assert_same(model, of_one_process(lambda net, x: (net(x) * net(x + 1)).mean()))


@on_every_rank
def test_two_models_and_two_optimizers_that_see_each_other_s_gradients() -> None:
    """A GAN: the generator's loss goes through the discriminator, whose gradients of it nobody wants."""
    generator, optimize_generator = adapted(seed=1)
    judge, optimize_judge = adapted(seed=0)

    def narrow(model: Module, x: Tensor) -> Tensor:
        return model(x) * torch.ones(1, WIDTH, dtype=x.dtype, device=x.device)

    alone_generator, alone_judge = Net(1), Net(0)
    steps = [SGD(net.parameters(), lr=0.5) for net in (alone_generator, alone_judge)]
    for _ in range(2):
        fake = narrow(generator, mine())
        optimize_judge.zero_grad()
        (judge(mine()).mean() - judge(fake.detach()).mean()).backward()
        optimize_judge.step()
        optimize_generator.zero_grad()
        judge(narrow(generator, mine())).mean().backward()
        optimize_generator.step()

        steps[1].zero_grad()
        losses = [
            alone_judge(x).mean() - alone_judge(narrow(alone_generator, x).detach()).mean()
            for x in samples_by_rank()
        ]
        (sum(losses) / len(losses)).backward()
        steps[1].step()
        steps[0].zero_grad()
        losses = [alone_judge(narrow(alone_generator, x)).mean() for x in samples_by_rank()]
        (sum(losses) / len(losses)).backward()
        steps[0].step()
    assert_same(generator, alone_generator)
    assert_same(judge, alone_judge)


@on_every_rank
def test_a_method_of_the_module_s_own_as_a_forward_pass() -> None:
    model, optimizer = adapted()
    idist.mark_forward_method(model, "loss")
    model.loss(mine(), power=4).backward()
    optimizer.step()
    assert_same(model, of_one_process(lambda net, x: net.loss(x, power=4)))
    assert torch.equal(model(mine()), idist.unwrap_model(model)(mine()))  # forward() is as it was
    with raises(AttributeError, "nothing_like_it"):
        idist.mark_forward_method(model, "nothing_like_it")
    with raises(ValueError, "must not be 'forward'"):
        idist.mark_forward_method(model, "forward")
    idist.unwrap_model(model).forward = lambda x: x.sum() * 7  # somebody's own
    assert model.loss(mine()).item() == pytest.approx((mine().sum() * 7).pow(2).item())
    assert model(mine()).item() == pytest.approx((mine().sum() * 7).item())


@on_every_rank
def test_gradients_that_are_dropped_stay_dropped() -> None:
    """By the model, and not by the optimizer that may be averaging them: a step that is skipped."""
    for dtype in (torch.float64, torch.bfloat16):
        for again in (False, True):
            model = idist.auto_model(Net().to(dtype))
            optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.5))
            model(mine().to(dtype)).mean().backward()
            model.zero_grad()
            if again:
                model(mine().to(dtype)).pow(2).mean().backward()
            optimizer.step()
            expected = of_one_process(lambda net, x: net(x).pow(2).mean()) if again else Net()
            if dtype is torch.float64:
                assert_same(model, expected)
            else:
                for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(one.cpu().double(), other, rtol=0.05, atol=0.05)


@on_every_rank
def test_weights_that_one_rank_alone_has_loaded_are_told() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    model = idist.auto_model(Net())
    own = Linear(WIDTH, 1, device=idist.device())  # no model of auto_model
    torch.nn.init.constant_(own.weight, rank)

    def told() -> list[str]:
        """The warnings of rank 0. Only rank 0 records them, because replicas of XLA share one recorder."""
        with warnings.catch_warnings(record=True) if rank == 0 else nullcontext([]) as caught:
            if rank == 0:
                warnings.simplefilter("always")
            idist.auto_optim(SGD([*model.parameters(), *own.parameters()], lr=0.5))
        idist.barrier()
        return [str(one.message) for one in caught if "differ from those" in str(one.message)]

    assert told() == []
    if rank == size - 1:
        idist.unwrap_model(model).load_state_dict(Net(seed=1).state_dict())
    found = told()
    if rank == 0 and size > 1:
        assert len(found) == 1, found
        assert f"of rank {size - 1} differ from those of rank 0, for example 'first.weight'" in found[0]
        assert "loaded weights after auto_model" in found[0]
    else:
        assert found == []
    idist.load_model_state(model, Net(seed=1).state_dict() if rank == 0 else None)
    assert told() == []


# --- what is not there everywhere ------------------------------------------------------------------------


@on_every_rank
def test_shards_are_torch_distributed_s_or_nobody_s() -> None:
    live = current_model()
    alone = live.get_world_size() == 1
    if live.name == "native-dist":
        return
    net = Net()
    if alone:
        assert idist.auto_model(net, strategy="fsdp", wrap=[Linear]) is net
        optimizer = SGD(net.parameters(), lr=1)
        assert idist.auto_optim(optimizer, zero=True) is optimizer
        return
    with raises(ValueError, "needs torch.distributed"):
        idist.auto_model(net, strategy="fsdp")
    model = idist.auto_model(net)
    with raises(ValueError, "needs torch.distributed"):
        idist.auto_optim(SGD(model.parameters(), lr=1), zero=True)


@on_every_rank
def test_arguments_of_auto_model_that_are_none() -> None:
    for wrong, text in {
        ("strategy", "zero3"): "'ddp' or 'fsdp'",
        ("comm_hook", "int4"): "powersgd",
        ("wrap", (Linear,)): "strategy='fsdp'",
    }.items():
        with raises(ValueError, text):
            idist.auto_model(Net(), **{wrong[0]: wrong[1]})
    with raises(ValueError, "comm_hook"):
        idist.auto_model(Net(), strategy="fsdp", comm_hook="fp16")


# --- the whole state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [False, True])
@on_every_rank
def test_a_state_of_any_world_goes_on_alone_and_back(zero: bool) -> None:
    live = current_model()
    zero = zero and (live.name == "native-dist" or live.get_world_size() == 1)
    model, optimizer = adapted(make=AdamW, zero=zero)
    alone = Net()
    adam = AdamW(alone.parameters(), lr=0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(mine()).pow(2).mean().backward()
        optimizer.step()

    def step_alone() -> None:
        adam.zero_grad()
        (sum(alone(x).pow(2).mean() for x in samples_by_rank()) / len(samples_by_rank())).backward()
        adam.step()

    step()
    step_alone()
    weights, moments = idist.model_state(model), idist.optimizer_state(optimizer)
    if idist.get_rank() == 0:
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-9, atol=1e-12)
        wanted = adam.state_dict()["state"]
        assert moments["state"].keys() == wanted.keys()
        for number, values in wanted.items():
            torch.testing.assert_close(moments["state"][number], values, rtol=1e-9, atol=1e-12)
            assert all(value.device.type == "cpu" for value in moments["state"][number].values())
    else:
        assert weights == {} and moments == {}
    kept = copy.deepcopy((weights, moments))
    step()  # somewhere else
    if idist.get_rank() == 0:
        torch.testing.assert_close((weights, moments["state"]), (kept[0], kept[1]["state"]))  # copies
    idist.load_model_state(model, weights or None)
    idist.load_optimizer_state(optimizer, moments or None)
    step()
    step_alone()
    assert_same(model, alone)


@on_every_rank
def test_a_state_that_does_not_fit_raises_on_every_rank() -> None:
    model, optimizer = adapted()
    state = idist.model_state(model)
    before = copy.deepcopy(state)
    if idist.get_rank() == 0:
        state["more"] = state.pop("first.bias")
    with raises(RuntimeError if idist.get_rank() == 0 else RankFailedError, "missing first.bias"):
        idist.load_model_state(model, state)
    for wrong in (
        {"state": {}, "param_groups": []},
        None,
        {"state": {9: {}}, "param_groups": [{"params": [0, 1, 2, 3]}]},
    ):
        with raises(ValueError, "state"):
            idist.load_optimizer_state(optimizer, wrong)
    with raises(Exception if idist.get_rank() == 0 else RankFailedError, "pickle"):
        idist.load_optimizer_state(optimizer, {"state": lambda: 0})
    after = idist.model_state(model)
    if idist.get_rank() == 0:
        torch.testing.assert_close(after, before)


class Counting(Net):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        if state < 0:
            raise RuntimeError("no such count")
        self.count = state


class Other(Net):
    """A model that differs from ``Net`` in more than values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "order":
            self.first = self._modules.pop("first")
        elif what == "names":
            self.third = self._modules.pop("second")
        elif what == "shapes":
            self.second = Linear(WIDTH, 2).double()
        elif what == "dtypes":
            self.second.float()
        elif what == "buffers":
            self.register_buffer("more", torch.zeros(2))


@pytest.mark.parametrize("what", ["order", "names", "shapes", "dtypes", "buffers", "extra states"])
@on_every_rank
def test_a_state_for_models_that_differ_raises_on_every_rank(what: str) -> None:
    if idist.get_world_size() == 1:
        return
    other = Counting() if what == "extra states" else Other(what)
    net = (Net() if idist.get_rank() == 0 else other).to(idist.device())
    before = copy.deepcopy(net.state_dict())
    with raises(CollectiveMismatchError, "load_model_state needs the same model on every rank"):
        idist.load_model_state(net, Net(7).state_dict())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_an_optimizer_state_that_does_not_fit_on_one_rank_raises_on_every_rank() -> None:
    _model, optimizer = adapted()
    state = idist.optimizer_state(optimizer)
    if idist.get_rank() == 0:
        optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    with raises(ValueError, "The state does not fit this optimizer"):
        idist.load_optimizer_state(optimizer, state)
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_extra_state_belongs_to_the_state() -> None:
    model = idist.auto_model(Counting())
    inner = idist.unwrap_model(model)
    state = idist.model_state(model)
    if idist.get_rank() == 0:
        state["_extra_state"] = 7
    idist.load_model_state(model, state)
    assert inner.count == 7
    if idist.get_rank() == 0:
        state["_extra_state"] = -1
    with raises(RuntimeError if idist.get_rank() == 0 else RankFailedError, "no such count"):
        idist.load_model_state(model, state)


@on_every_rank
def test_buffers_belong_to_the_state() -> None:
    model = idist.auto_model(Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH)))
    model(mine().float())
    state = idist.model_state(model)
    if idist.get_rank() == 0:
        state["1.running_mean"].fill_(7)
        state["1.num_batches_tracked"].fill_(9)
    idist.load_model_state(model, state)
    norm = idist.unwrap_model(model)[1]
    assert norm.running_mean.tolist() == [7] * WIDTH and norm.num_batches_tracked.item() == 9


# --- ranks that run out of data --------------------------------------------------------------------------


@on_every_rank
def test_ranks_with_different_numbers_of_steps() -> None:
    """The convention of torch and Horovod: the sum of the gradients of those with data, over all ranks."""
    world_size = idist.get_world_size()
    model, optimizer = adapted()
    if not has_join():
        with raises(ValueError, "take part in every step"), idist.uneven_inputs(model, optimizer):
            pass
        return
    with idist.uneven_inputs(model, optimizer):
        for _ in range(idist.get_rank() + 1):
            optimizer.zero_grad()
            model(mine()).pow(2).mean().backward()
            optimizer.step()
        for function in (
            lambda: idist.all_reduce(1),
            lambda: idist.auto_model(Net()),
            lambda: idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC).__enter__(),
            lambda: idist.uneven_inputs(model).__enter__(),
        ):
            if world_size > 1:
                with raises(RuntimeError, "Make collectives after the block"):
                    function()
    alone = Net()
    sgd = SGD(alone.parameters(), lr=0.5)
    for number in range(world_size):
        sgd.zero_grad()
        losses = [alone(x).pow(2).mean() for rank, x in enumerate(samples_by_rank()) if rank >= number]
        (sum(losses) / world_size).backward()
        sgd.step()
    assert_same(model, alone)
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_the_ways_to_join() -> None:
    live = current_model()
    model, optimizer = adapted()
    if live.name == "horovod-dist":
        for option in ({"divide_by_initial_world_size": False}, {"throw_on_early_termination": True}):
            with raises(ValueError, "Horovod's join()"), idist.uneven_inputs(model, optimizer, **option):
                pass
    if live.name != "native-dist":
        return

    def train(steps: int, **options: bool) -> None:
        with idist.uneven_inputs(model, optimizer, **options):
            for _ in range(steps):
                model(mine()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    train(idist.get_rank() + 1, divide_by_initial_world_size=False)
    alone = Net()
    sgd = SGD(alone.parameters(), lr=0.5)
    for number in range(idist.get_world_size()):
        sgd.zero_grad()
        losses = [alone(x).mean() for x in samples_by_rank()[number:]]
        (sum(losses) / len(losses)).backward()
        sgd.step()
    assert_same(model, alone)
    model, optimizer = adapted(zero=True)
    train(idist.get_rank() + 1)
    with raises(RuntimeError, "exhausted") if idist.get_world_size() > 1 else nullcontext():
        train(idist.get_rank() + 1, throw_on_early_termination=True)
    weights = [one.detach().tolist() for one in model.parameters()]
    assert idist.all_gather(weights) == [weights] * idist.get_world_size()


@on_every_rank
def test_a_model_on_the_meta_device_gets_values() -> None:
    """From reset_parameters() of its modules, or a state of rank 0: equal on every rank."""
    device, world_size = idist.device(), idist.get_world_size()
    state = {f"0.{name}": one for name, one in Net().state_dict().items()} if idist.get_rank() == 0 else {}
    with torch.device("meta"):
        empty, from_state = Linear(WIDTH, 2), Sequential(Net())
    models = idist.auto_model(empty), idist.auto_model(from_state, state=state)
    for model in models:
        assert all(one.device == device for one in model.parameters())
        values = {name: one.tolist() for name, one in idist.unwrap_model(model).state_dict().items()}
        assert idist.all_gather(values) == [values] * world_size
        if model is models[0]:
            assert len({*values["bias"], *values["weight"][0], *values["weight"][1]}) == 2 * WIDTH + 2
        else:
            assert values["0.first.weight"] == Net().first.weight.tolist()


class WithBuffers(Net):
    """A net with a buffer of each dtype, which differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in DTYPES:
            value = torch.full((3,), 1 + idist.get_rank() % 2, dtype=torch.int64)
            self.register_buffer(f"of_{name_of(dtype)}", value.to(dtype))


@on_every_rank
def test_buffers_of_every_dtype_become_those_of_the_first_rank() -> None:
    model = idist.auto_model(WithBuffers())
    model(samples(0).to(idist.device())).sum().backward()
    for name, buffer in idist.unwrap_model(model).named_buffers():
        assert buffer.cpu().to(torch.complex128).real.tolist() == [1.0] * 3, name


def _optimizers() -> dict[str, tuple[Any, Any]]:
    """By what the error says: functions that make an optimizer of a model, on rank 0 and on other ranks."""

    def stepped(model: Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model.zero_grad()
        return optimizer

    def plain(model: Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.5, momentum=0.5)

    shapes = {
        "rank 0: SGD; {others}: AdamW": (plain, lambda model: AdamW(model.parameters(), lr=0.5)),
        "rank 0: group 0: 4 parameters; {others}: group 0: 2 parameters": (
            plain,
            lambda model: SGD([{"params": one.parameters()} for one in idist.unwrap_model(model).children()]),
        ),
        "rank 0: group 0, parameter 0: shape (3, 3); {others}: group 0, parameter 0: shape (1,)": (
            plain,
            lambda model: SGD(reversed([*model.parameters()]), lr=0.5, momentum=0.5),
        ),
    }
    if current_model().training.shares_optimizers:
        return shapes
    return {
        **shapes,
        "rank 0: group 0: lr=0.5; {others}: group 0: lr=0.25": (
            plain,
            lambda model: SGD(model.parameters(), lr=torch.tensor(0.25), momentum=0.5),
        ),
        "rank 0: SGD without a state; {others}: SGD with a state": (plain, stepped),
    }


@on_every_rank
def test_optimizers_that_differ_are_refused_on_every_rank() -> None:
    size = idist.get_world_size()
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    model = idist.auto_model(Net())
    for text, (of_rank_0, of_others) in _optimizers().items() if size > 1 else ():
        made = (of_others if idist.get_rank() else of_rank_0)(model)
        with raises(CollectiveMismatchError, f"The first difference is: {text.format(others=others)}."):
            idist.auto_optim(made)


@on_every_rank
def test_models_of_other_functions_are_refused_on_every_rank() -> None:
    """Without parameters, a module changes no shape."""
    size, is_first = idist.get_world_size(), idist.get_rank() == 0
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU() if is_first else torch.nn.Tanh())
    if size > 1:
        with raises(
            CollectiveMismatchError, f"The first difference is: rank 0: ReLU '1'; {others}: Tanh '1'."
        ):
            idist.auto_model(model)


@on_every_rank
def test_what_a_rank_trains_of_its_own_is_not_compared() -> None:
    """With Horovod and XLA the optimizer averages all its parameters: no rank has any of its own in it."""
    rank, size = idist.get_rank(), idist.get_world_size()
    if not current_model().training.averages_in_backward or size == 1:
        return
    model, own = idist.auto_model(Net()), Linear(1, 1 + rank, device=idist.device())
    halves = [list(range((size + 1) // 2)), list(range((size + 1) // 2, size))]
    groups = [idist.new_group(half) for half in halves]
    half = int(rank in halves[1])
    part = idist.auto_model(Linear(1, 1).double(), process_group=groups[half])

    def all_three(own_rate: float, part_rate: float) -> SGD:
        made = SGD(
            [{"params": own.parameters(), "lr": own_rate}, {"params": [*part.parameters()], "lr": part_rate}],
            momentum=0.5,
        )
        made.add_param_group({"params": [*model.parameters()], "lr": 0.1})
        return made

    optimizer = all_three(0.1 + rank, 0.1 + half)
    if rank == 0:  # a rank may have trained its own part before
        own(torch.ones(1, 1, device=idist.device())).sum().backward()
        optimizer.step()
    assert len(idist.auto_optim(optimizer).param_groups) == 3
    if rank == 0:  # a model that no other rank has
        idist.auto_optim(SGD(own.parameters(), lr=0.5))
        for _ in idist.accumulate_gradients([1, 2], own, 2):
            break

    # A difference in one group is no wait for the ranks of the others.
    optimizer = all_three(0.1, 0.1 + (rank == 0))
    if half == 0 and len(halves[0]) > 1:
        with raises(CollectiveMismatchError, "rank 0: group 0: lr=1.1; rank 1: group 0: lr=0.1"):
            idist.auto_optim(optimizer)
    else:
        idist.auto_optim(optimizer)
    assert idist.all_reduce(1) == size


@on_every_rank
def test_whether_a_deleted_model_is_collected_changes_nothing() -> None:
    net = Net()
    net.itself = [net]  # type: ignore[assignment]  # only the collector finds this cycle
    idist.auto_model(net)
    trunk = net.first
    del net
    if idist.get_rank() == 0:
        gc.collect()
    rate = 0.5 if idist.get_rank() == 0 or current_model().training.shares_optimizers else 0.25
    if rate == 0.5 and idist.get_world_size() == 1:
        return
    with (
        nullcontext()
        if current_model().training.shares_optimizers
        else raises(CollectiveMismatchError, "lr=0.5")
    ):
        idist.auto_optim(SGD(trunk.parameters(), lr=rate))
