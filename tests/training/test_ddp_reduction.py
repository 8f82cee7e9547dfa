"""What DDP leaves out of its reduction and is made up for: its options, hooks, several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential

import ignite_dist as idist
from ignite_dist.values import gradients


class Net(Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(3, 3).double(), Linear(3, 3).double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 7 - number / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).tanh(), self.second(x).tanh()


def loss_of(outputs: tuple[Tensor, Tensor], only_first: bool = False) -> Tensor:
    first, second = outputs
    return first.pow(2).mean() if only_first else (first * second).mean()


def samples(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def trained(
    model: Module, steps: int, skips: Callable[[int, int], bool], call: Module | None = None, **kwargs: Any
) -> list[list[Tensor | None]]:
    """The gradients after each of ``steps`` steps of two microbatches."""
    found = []
    rank = idist.get_rank()
    for step in range(steps):
        for number in (2 * step, 2 * step + 1):
            with idist.grad_sync(model, None, number % 2 == 1):
                if not skips(number, rank):
                    loss_of((model if call is None else call)(samples(rank, number)), **kwargs).backward()
        found.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])
        model.zero_grad()
    return found


def wanted(steps: int, skips: Callable[[int, int], bool], **kwargs: Any) -> list[list[Tensor | None]]:
    found = []
    for step in range(steps):
        net = Net()
        for rank in range(idist.get_world_size()):
            for number in (2 * step, 2 * step + 1):
                if not skips(number, rank):
                    (loss_of(net(samples(rank, number)), **kwargs) / idist.get_world_size()).backward()
        found.append([one.grad for one in net.parameters()])
    return found


def assert_alike(found: list[list[Tensor | None]], expected: list[list[Tensor | None]]) -> None:
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def last_of_rank_one(number: int, rank: int) -> bool:
    return number % 2 == 1 and rank == 1


def all_of_rank_zero(number: int, rank: int) -> bool:
    return number >= 2 and rank == 0


def _options(_: int) -> None:
    for skips in (last_of_rank_one, all_of_rank_zero):
        for kwargs in (
            {},
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 1e-5},  # a bucket for each parameter
            {"comm_hook": "powersgd"},  # which starts to compress after many steps
        ):
            model = idist.auto_model(Net(), **kwargs)
            assert_alike(trained(model, 3, skips), wanted(3, skips))
    # A static graph is learnt in a first backward pass that is averaged.
    model = idist.auto_model(Net(), static_graph=True)
    with idist.grad_sync(model):
        loss_of(model(samples(idist.get_rank(), 0))).backward()
    model.zero_grad()
    for skips in (last_of_rank_one, all_of_rank_zero):
        assert_alike(trained(model, 3, skips), wanted(3, skips))


def test_options_of_ddp() -> None:
    idist.spawn("gloo", _options, nproc_per_node=2)


def _weighted(rank: int) -> list[list[float]]:
    """For each skipped microbatch the gradients of the second step, whose buckets DDP orders anew."""
    found = []
    for skipped in range(6):
        net = torch.nn.Linear(3, 1, dtype=torch.float64)
        torch.nn.init.ones_(net.weight)
        model = idist.auto_model(net)
        for number, (one, sync) in enumerate(
            idist.accumulate_gradients(range(6), model, steps=2, weight=lambda _: 1)
        ):
            with sync:
                if rank != 1 or number != skipped:
                    model(samples(rank, one)).sum().backward()
            if sync.is_final:
                if number == 3:
                    found.append(net.weight.grad.flatten().tolist())  # type: ignore[union-attr]
                model.zero_grad()
    return found


def test_a_rank_skips_any_microbatch_of_weighted_steps() -> None:
    first, second = idist.spawn("gloo", _weighted, nproc_per_node=2)
    assert first == second
    for skipped, gradient in enumerate(first):
        used = [
            samples(rank, number) for rank in (0, 1) for number in (2, 3) if (rank, number) != (1, skipped)
        ]
        wanted = torch.stack([one.sum(0) for one in used]).sum(0) / 4
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), wanted)


def _unused(_: int) -> None:
    """The loss uses one of two outputs: torch's hooks run without a gradient for the other."""
    model = idist.auto_model(Net(), find_unused_parameters=True)
    for skips in (lambda number, rank: False, last_of_rank_one, all_of_rank_zero):
        assert_alike(trained(model, 2, skips, only_first=True), wanted(2, skips, only_first=True))
    data = [samples(idist.get_rank(), number) for number in range(2)]
    for x, sync in idist.accumulate_gradients(data, model, 2):
        with sync:
            loss_of(model(x), only_first=True).backward()
    net = Net()
    for rank in range(2):
        for number in range(2):
            (loss_of(net(samples(rank, number)), only_first=True) / 4).backward()
    assert_alike([[one.grad for one in model.parameters()]], [[one.grad for one in net.parameters()]])


def test_an_output_that_the_loss_does_not_use() -> None:
    idist.spawn("gloo", _unused, nproc_per_node=2)


def _compiled(_: int) -> None:
    for skips in (last_of_rank_one, all_of_rank_zero):
        model = idist.auto_model(Net())
        compiled: Any = torch.compile(model, backend="eager")
        assert_alike(trained(model, 3, skips, call=compiled), wanted(3, skips))
        assert_alike(trained(compiled, 3, skips), wanted(3, skips))


def test_a_compiled_model() -> None:
    idist.spawn("gloo", _compiled, nproc_per_node=2)


def _hooked(_: int) -> None:
    """A rank that skips runs no hook of the model, and the model can be copied afterwards."""
    model = idist.auto_model(Net())
    calls: list[str] = []
    inner = idist.unwrap_model(model)
    inner.register_forward_hook(lambda *_: calls.append("inside"))
    model.register_forward_hook(lambda *_: calls.append("outside"))
    own = [one.register_hook(lambda gradient: gradient.clamp(-1e9, 1e9)) for one in model.parameters()]
    assert_alike(trained(model, 2, last_of_rank_one), wanted(2, last_of_rank_one))
    assert calls == ["inside", "outside"] * (2 if idist.get_rank() == 1 else 4)
    for hook in own:
        hook.remove()
    copied_ddp = copy.deepcopy(model)
    assert_alike(trained(copied_ddp, 2, last_of_rank_one), wanted(2, last_of_rank_one))
    assert list(dict(model.named_modules())) == ["", "module", "module.first", "module.second"]


def test_hooks_of_the_user() -> None:
    idist.spawn("gloo", _hooked, nproc_per_node=2)


def _several(_: int) -> None:
    """Of two models in one, which take turns, one that is not trained keeps no gradients."""
    first, second = idist.auto_model(Net()), idist.auto_model(Net())
    both = Sequential(first, second)
    rank = idist.get_rank()
    for number in range(2):
        with idist.grad_sync(both, None, number == 1):
            if not last_of_rank_one(number, rank):
                loss_of(first(samples(rank, number))).backward()
    assert all(one.grad is None for one in second.parameters())
    assert_alike([[one.grad for one in first.parameters()]], wanted(1, last_of_rank_one))
    both.zero_grad()
    with (
        pytest.raises(RuntimeError, match="does not know which"),
        idist.grad_sync(both),
    ):
        pass


def test_several_models_in_one() -> None:
    idist.spawn("gloo", _several, nproc_per_node=2)


def _frozen_later(_: int) -> str:
    model = idist.auto_model(Net())
    trained(model, 1, last_of_rank_one)
    idist.unwrap_model(model).second.requires_grad_(False)
    with (
        pytest.raises(RuntimeError, match=r"second\.weight, second\.bias\. Dist"),
        idist.grad_sync(model),
    ):
        loss_of(model(samples(0, 0)), only_first=True).backward()
    return "raised"


def test_a_layer_that_was_frozen_later_is_named_on_every_rank() -> None:
    assert idist.spawn("gloo", _frozen_later, nproc_per_node=2) == ["raised"] * 2


def _left_alone(_: int) -> None:
    """An evaluation, a block of torch's own no_sync, and a backward pass after a call before the block."""
    rank = idist.get_rank()
    model: Any = idist.auto_model(Net())
    with torch.no_grad(), idist.grad_sync(model):
        model(samples(rank, 0))
    with model.no_sync(), idist.grad_sync(model):
        pass
    assert all(one.grad is None for one in model.parameters())
    outputs = model(samples(rank, 0))
    with idist.grad_sync(model):
        loss_of(outputs).backward()
    expected = wanted(1, lambda number, rank: number == 1)
    assert_alike([[one.grad for one in model.parameters()]], expected)
    assert idist.all_reduce(1) == 2


def test_what_needs_no_reduction_makes_none() -> None:
    idist.spawn("gloo", _left_alone, nproc_per_node=2)


def _joined(_: int) -> None:
    """In uneven_inputs() a rank that skips counts as one of those that have data."""
    rank = idist.get_rank()
    model = idist.auto_model(Net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    with idist.uneven_inputs(model, optimizer):
        for number in range(2 + 2 * rank):
            with idist.grad_sync(model):
                if not (rank == 0 and number == 1):
                    loss_of(model(samples(rank, number))).backward()
            optimizer.step()
            optimizer.zero_grad()
    net = Net()
    alone = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(4):
        for one in range(2):
            if number < (1 if one == 0 else 4):
                (loss_of(net(samples(one, number))) / 2).backward()
        alone.step()
        alone.zero_grad()
    torch.testing.assert_close(idist.unwrap_model(model).state_dict(), net.state_dict())


def test_a_rank_that_skips_within_join() -> None:
    idist.spawn("gloo", _joined, nproc_per_node=2)


def test_a_backward_pass_that_fails_leaves_nothing() -> None:
    def fail(_: Any) -> None:
        raise LookupError

    weight, calls = Parameter(torch.ones(1)), []
    gradients.AfterBackward([weight], lambda: calls.append(1))
    weight.sum().backward()  # type: ignore[no-untyped-call]
    handle = weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(LookupError):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [1] and not gradients._passes
    handle.remove()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [1, 1]
