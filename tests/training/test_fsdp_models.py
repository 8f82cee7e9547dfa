"""Models of unusual make, sharded by FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import BatchNorm1d, Linear, Module, Sequential

import ignite_dist as idist
from ignite_dist import RankFailedError
from on_ranks import warned

WIDTH = 3


class Twice(Module):
    """Modules registered twice, a parameter in two modules, and extra state."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.first = Linear(WIDTH, WIDTH)
        self.inner = Sequential(self.first, BatchNorm1d(WIDTH))
        self.again = self.inner
        self.tied = Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.count = fill
        with torch.no_grad():
            for value in [*self.parameters(), *self.buffers()]:
                value.fill_(fill)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.again(self.inner(self.first(x))))

    def get_extra_state(self) -> float:
        return self.count

    def set_extra_state(self, state: float) -> None:
        self.count = state


def numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}


def _twice(rank: int, was_evaluated: bool) -> dict[str, Any]:
    model: Any = idist.auto_model(Twice(1.0 + rank), strategy="fsdp")
    if was_evaluated:  # FSDP2 leaves the outermost module's parameters whole
        with torch.no_grad():
            model.eval()(torch.ones(2, WIDTH))
    idist.load_model_state(model, Twice(7.0).state_dict() if rank == 0 else None)
    assert model.count == 7
    assert model.first.weight is model.again[0].weight is model.tied.weight
    return numbers(idist.model_state(model))


@pytest.mark.parametrize("was_evaluated", [False, True])
def test_a_module_registered_twice_has_one_state(was_evaluated: bool) -> None:
    states = idist.spawn("gloo", _twice, (was_evaluated,), nproc_per_node=2)
    assert states == [numbers(Twice(7.0).state_dict()), {}]


def _load_after_an_evaluation(rank: int, path: Path) -> dict[str, Any]:
    model: Any = idist.auto_model(Twice(7.0), strategy="fsdp")
    idist.save_checkpoint(path, model=model)
    model.register_buffer("cache", torch.zeros(1 + rank), persistent=False)  # of this rank
    for load in (
        lambda: idist.load_checkpoint(path, model=model),
        lambda: idist.load_model_state(model, Twice(7.0).state_dict()),
    ):
        with torch.no_grad():
            model.eval()(torch.ones(2, WIDTH))  # afterwards the outermost module's parameters are whole
        if rank == 0:
            model.state_dict()  # shards them again, on this rank only
        load()
    return numbers(idist.model_state(model))


def test_a_state_is_loaded_after_an_evaluation(tmp_path: Path) -> None:
    states = idist.spawn("gloo", _load_after_an_evaluation, (tmp_path / "run.pt",), nproc_per_node=2)
    assert states == [numbers(Twice(7.0).state_dict()), {}]


def _refused(rank: int) -> str:
    model = idist.auto_model(Twice(1.0), strategy="fsdp")
    kind = RuntimeError if rank == 0 else RankFailedError
    with pytest.raises(kind, match="is a shard"):  # as of model.state_dict(), where model_state is meant
        idist.load_model_state(model, model.state_dict())
    return "done"


def test_a_state_of_shards_is_refused_on_every_rank() -> None:
    assert idist.spawn("gloo", _refused, nproc_per_node=2) == ["done"] * 2


def _of_one_rank(_: int) -> dict[str, Any]:
    model = fully_shard(Twice(1.0))
    idist.load_model_state(model, Twice(7.0).state_dict())
    return numbers(idist.model_state(model))


def test_shards_of_a_single_rank_are_loaded() -> None:
    assert idist.spawn("gloo", _of_one_rank, nproc_per_node=1) == [numbers(Twice(7.0).state_dict())]


def on_meta(fill: float = 0.0) -> Module:
    with torch.device("meta"):
        return Twice(fill)


class Scaled(Module):
    """A module that cannot initialise itself, around one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))


def scaled_on_meta() -> Module:
    with torch.device("meta"):
        return Scaled()


def _without_values(rank: int) -> str:
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=r"nothing gives values to: \['scale'\].*reset_parameters"):
            idist.auto_model(scaled_on_meta(), strategy=strategy)
    with pytest.raises(ValueError, match=r"meta device: \[.first\.weight"):
        idist.auto_model(Twice(1.0) if rank else on_meta(), strategy="fsdp")
    assert idist.all_reduce(1) == idist.get_world_size()  # nothing of it was sent
    return "done"


def test_a_model_without_values_is_refused_on_every_rank() -> None:
    assert idist.spawn("gloo", _without_values, nproc_per_node=2) == ["done"] * 2


def initialised(strategy: str, **options: Any) -> dict[str, Any]:
    model = idist.auto_model(on_meta(), strategy=strategy, **options)
    return numbers(idist.model_state(model))


def _initialised(rank: int, strategy: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    return initialised(strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_modules_initialise_themselves_as_in_one_process(strategy: str) -> None:
    """With the seed of rank 0, and parameters that two modules share."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = initialised(strategy)
    assert expected["first.weight"] == expected["tied.weight"] != expected["tied.bias"]
    assert len({tuple(row) for row in expected["first.weight"]}) == WIDTH
    assert expected["inner.1.running_var"] == [1.0] * WIDTH
    assert idist.spawn("gloo", _initialised, (strategy,), nproc_per_node=2) == [expected, {}]


def _from_state(rank: int, strategy: str) -> dict[str, Any]:
    return initialised(strategy, state={} if rank else Twice(7.0).state_dict())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_of_rank_0_gives_values(strategy: str) -> None:
    states = idist.spawn("gloo", _from_state, (strategy,), nproc_per_node=2)
    assert states == [numbers(Twice(7.0).state_dict()), {}]
    assert initialised(strategy, state=Twice(7.0).state_dict()) == states[0]


def _values_of_rank_0(rank: int) -> dict[str, Any]:
    net: Any = on_meta(7.0) if rank else Twice(7.0)
    model: Any = idist.auto_model(net, strategy="fsdp")
    assert model.first.weight is model.again[0].weight is model.tied.weight
    assert [value.tolist() for value in model.buffers()] == [value.tolist() for value in Twice(7.0).buffers()]
    return numbers(idist.model_state(model))


def test_rank_0_alone_needs_values() -> None:
    states = idist.spawn("gloo", _values_of_rank_0, nproc_per_node=2)
    assert states == [numbers(Twice(7.0).state_dict()), {}]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_alone_a_model_without_values_is_refused_too(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"\['scale'\].*to_empty"):
        idist.auto_model(scaled_on_meta(), strategy=strategy)


def _evaluated(rank: int) -> list[Any]:
    net = Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH), Linear(WIDTH, 1))
    model = idist.auto_model(net, strategy="fsdp", wrap=[Linear])
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))).sum().backward()
    before = model[1].running_mean.tolist()
    for _ in idist.auto_dataloader(list(range(3)), exact="padded"):
        pass
    return [before, model[1].running_mean.tolist()]


def test_an_exact_pass_takes_over_the_buffers_of_rank_0() -> None:
    first, second = idist.spawn("gloo", _evaluated, nproc_per_node=2)
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]


def _after_an_evaluation(_: int) -> str:
    """FSDP2 leaves the outermost module's parameters whole then, until the next backward pass or state."""
    model = idist.auto_model(Linear(WIDTH, 1), strategy="fsdp")
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    forced = idist.DDPSyncStrategy.FORCED_SYNC
    for function in (
        lambda: idist.accumulate_gradients([1], model, 2, strategy=forced),
        lambda: idist.grad_sync(model, strategy=forced).__enter__(),
    ):
        with pytest.raises(ValueError, match="FSDP2"):
            function()
    return "done"


def test_what_is_not_for_shards_is_refused_after_an_evaluation_too() -> None:
    assert idist.spawn("gloo", _after_an_evaluation, nproc_per_node=2) == ["done"] * 2


def _unfrozen_later(rank: int) -> list[Any]:
    def make() -> Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            return Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, 1)).requires_grad_(False)

    model = idist.auto_model(make(), strategy="fsdp")
    model(torch.ones(2, WIDTH))
    model.requires_grad_(True)
    model(torch.full((2, WIDTH), 1.0 + rank)).sum().backward()
    return [one.grad.full_tensor().tolist() for one in model.parameters()]


def test_what_is_unfrozen_later_is_averaged() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, 1))
    (sum(alone(torch.full((2, WIDTH), 1.0 + rank)).sum() for rank in range(2)) / 2).backward()
    for found in idist.spawn("gloo", _unfrozen_later, nproc_per_node=2):
        for gradient, parameter in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient), parameter.grad)


def batch(number: int) -> torch.Tensor:
    return torch.randn(2 + number, WIDTH, generator=torch.Generator().manual_seed(number))


def _accumulated(rank: int) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Sequential(Linear(WIDTH, WIDTH), Sequential(Linear(WIDTH, 1)))
    model = idist.auto_model(net, strategy="fsdp", wrap=[Sequential])
    own = [batch(number) for number in range(rank, 6, 2)]
    gradients = []
    for x, sync in idist.accumulate_gradients(own, model, 2, weight=len):
        with torch.no_grad():
            model(x)  # leaves parameters whole
        with sync:
            model(x).square().mean().backward()
        if sync.is_final:
            gradients.append([one.grad.full_tensor().tolist() for one in model.parameters()])
            model.zero_grad()
    return gradients


def test_accumulated_gradients_are_those_of_one_process() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, 1))
    for found in idist.spawn("gloo", _accumulated, nproc_per_node=2):
        for step, numbers_of_step in zip(found, ([0, 1, 2, 3], [4, 5]), strict=True):
            net.zero_grad()
            net(torch.cat([batch(number) for number in numbers_of_step])).square().mean().backward()
            for gradient, parameter in zip(step, net.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(gradient), parameter.grad)


def _optimizer_before(rank: int) -> str:
    net = Sequential(Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = idist.auto_model(net, strategy="fsdp")
    with pytest.raises(ValueError, match="made before auto_model") as info:
        idist.auto_optim(optimizer)
    idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    return str(info.value)


def _adapted_before(rank: int) -> None:
    net = Sequential(Linear(WIDTH, 1))
    idist.auto_optim(torch.optim.SGD(Linear(1, 1).parameters(), lr=0.1))  # of another model
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Call auto_model first"):
        idist.auto_model(net, strategy="fsdp")
    idist.auto_model(net)  # takes no parameter away
    del optimizer


def test_a_model_is_not_sharded_after_its_optimizer_was_adapted() -> None:
    idist.spawn("gloo", _adapted_before, nproc_per_node=2)


def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused() -> None:
    for message in idist.spawn("gloo", _optimizer_before, nproc_per_node=2):
        assert "then make the optimizer of model.parameters()" in message


def _experts(rank: int, folder: Path) -> list[str]:
    net = Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, 1))
    own = [*net[1].parameters()]
    model = idist.auto_model(net, strategy="fsdp", ignored_params=set(own))
    groups = [{"params": [*model[0].parameters()]}, {"params": own, "lr": 0.1 + rank}]
    optimizer = idist.auto_optim(torch.optim.SGD(groups, lr=0.5))
    for _ in range(2):
        model(torch.ones(2, WIDTH) * (1 + rank)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    biases = idist.all_gather(own[1].detach())
    assert not torch.equal(*biases)
    return warned(lambda: idist.save_checkpoint(folder / "run.pt", model=model))[1]


def test_parameters_that_fsdp_ignores_are_each_ranks_own(tmp_path: Path) -> None:
    assert idist.spawn("gloo", _experts, (tmp_path,), nproc_per_node=2) == [[], []]


def _gradient_after_zero_grad(_: int, strategy: str) -> float:
    judge = idist.auto_model(Linear(1, 1, bias=False), strategy=strategy)
    optimizer = idist.auto_optim(torch.optim.SGD(judge.parameters(), lr=0.1))
    with idist.no_sync(judge):  # of the other model's step: nobody needs these gradients
        judge(torch.full((1, 1), 100.0)).sum().backward()
    optimizer.zero_grad()
    with idist.no_sync(judge):
        judge(torch.ones(1, 1)).sum().backward()
    judge(torch.ones(1, 1)).sum().backward()
    (gradient,) = (parameter.grad for parameter in judge.parameters())
    return float(getattr(gradient, "full_tensor", lambda: gradient)())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_drops_gradients_that_no_sync_has_accumulated(strategy: str, world_size: int) -> None:
    found = idist.spawn("gloo", _gradient_after_zero_grad, (strategy,), nproc_per_node=world_size)
    assert found == [2.0] * world_size
