"""Gradients between the backward pass and the step, on the real Horovod.

Each function runs on every rank, with that rank's loss, and once in this very process, with the mean of the
losses of all ranks. All have to end up with the same numbers.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.optim import SGD, Adam, SparseAdam
from torch.utils.checkpoint import checkpoint

import ignite_dist as idist

pytestmark = pytest.mark.horovod

Function = Callable[..., Any]


def same_as_one_process(function: Function, *cases: tuple[Any, ...], num_ranks: int = 2) -> None:
    alone = _each(0, function, cases or ((),), num_ranks)
    for found in idist.spawn(
        "horovod", _each, (function, cases or ((),), num_ranks), nproc_per_node=num_ranks
    ):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12, equal_nan=True)


def _each(_: int, function: Function, cases: tuple[tuple[Any, ...], ...], num_ranks: int) -> dict[str, Any]:
    return {repr(case): function(num_ranks, *case) for case in cases}


def ranks(num_ranks: int) -> list[int]:
    """Whose losses this process has to do with."""
    return [idist.get_rank()] if idist.get_world_size() > 1 else list(range(num_ranks))


def backward(num_ranks: int, loss: Callable[[int], Tensor | None]) -> None:
    """A backward pass of the loss of this rank; of the mean of all, where there is only this process."""
    losses = [loss(rank) for rank in ranks(num_ranks)]
    there = [one for one in losses if one is not None]
    if there:
        (torch.stack(there).sum() / len(losses)).backward()


class Net(Module):
    """Layers that a pass names."""

    def __init__(self, layers: str = "abc") -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in layers:
            setattr(self, name, Linear(4, 4).double())

    def forward(self, x: Tensor, layers: str) -> Tensor:
        for name in layers:
            x = getattr(self, name)(x).tanh()
        return x.square().mean()


def data(rank: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def values(*models: Module) -> list[Tensor | None]:
    """The parameters and their gradients."""
    own = [parameter for model in models for parameter in model.parameters()]
    return [*(one.detach().clone() for one in own), *(_copy(one.grad) for one in own)]


def _copy(gradient: Tensor | None) -> Tensor:
    return torch.tensor(torch.nan) if gradient is None else gradient.to_dense().clone()


@pytest.fixture(params=[2, 3])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# --- who reads and writes gradients between the backward pass and the step ---------------------------------


class Large(Module):
    """Enough to be still under way when the backward pass has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.several = torch.nn.ParameterList(torch.zeros(400_000) for _ in range(12))

    def forward(self, factor: float) -> Tensor:
        return torch.stack([(factor * (1 + one)).sum() for one in self.several]).sum() / 1024


def _large_values(model: Large) -> list[list[float]]:
    return [one.double().aminmax() for one in model.several]  # type: ignore[misc]


def _scaled(num_ranks: int, between: str) -> list[Any]:
    model = idist.auto_model(Large())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[Any] = []
    for number in range(6):
        backward(num_ranks, lambda rank, number=number: scaler.scale(model(6.0 * (1 + rank + number))))
        if between == "unscale":
            scaler.unscale_(optimizer)
        elif between == "clip":
            scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).double())
        elif between == "clip value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 4.0)
        elif between == "foreach":
            torch._foreach_mul_([one.grad for one in model.parameters()], 0.25)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), *_large_values(model)]
        model.zero_grad(set_to_none=number % 2 == 0)
    return seen


@pytest.mark.parametrize("between", ["nothing", "unscale", "clip", "clip value", "foreach"])
def test_what_works_on_gradients_before_the_step_has_their_averages(between: str) -> None:
    _close_enough(_scaled, (between,))


def _close_enough(function: Function, *cases: tuple[Any, ...], num_ranks: int = 2) -> None:
    """In float32."""
    alone = _each(0, function, cases, num_ranks)
    for found in idist.spawn("horovod", _each, (function, cases, num_ranks), nproc_per_node=num_ranks):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def _overflowing(num_ranks: int) -> list[Any]:
    """A gradient that is infinite on one rank only: no rank makes the step."""
    net = idist.auto_model(Net("a"))
    optimizer = idist.auto_optim(Adam(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    seen: list[Any] = []
    for number in range(5):
        optimizer.zero_grad()

        def loss(rank: int, number: int = number) -> Tensor:
            own = net(data(rank, number), "a")
            return scaler.scale(own * float("inf") if (rank, number) == (1, 1) else own)

        backward(num_ranks, loss)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), *values(net)[:2]]
    return seen


def test_a_scaler_that_skips_the_step_does_so_on_every_rank(num_ranks: int) -> None:
    same_as_one_process(_overflowing, num_ranks=num_ranks)


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def _read_at_once(num_ranks: int, hook: bool) -> list[Any]:
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.1, momentum=0.9))
    if hook:  # of the user's, later than Horovod's
        net.a.weight.register_post_accumulate_grad_hook(_triple)
    flat = torch.zeros(20, dtype=torch.float64)  # gradients that are views of one buffer
    net.b.weight.grad, net.b.bias.grad = flat[:16].view(4, 4), flat[16:]
    seen: list[Any] = []
    for number in range(3):
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab"))
        seen += values(net)
        seen.append(flat.clone())
        for one in net.parameters():
            if one.grad is not None:
                one.grad = one.grad * 0.5 if number == 0 else one.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        flat = torch.cat([net.b.weight.grad.flatten(), net.b.bias.grad])
        net.b.weight.grad, net.b.bias.grad = flat[:16].view(4, 4), flat[16:]
        model_grads = [one.grad for one in net.parameters() if one.grad is not None]
        torch._foreach_zero_(model_grads)
    return [*seen, *values(net)]


def test_a_gradient_is_the_average_as_soon_as_the_backward_pass_has_ended(num_ranks: int) -> None:
    same_as_one_process(_read_at_once, (False,), (True,), num_ranks=num_ranks)


def _put_there(num_ranks: int, in_place: bool) -> list[Any]:
    """Gradients that no backward pass has made, after one step with one and before another."""
    net = idist.auto_model(Net("a"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.1))
    seen = []
    for number in range(4):
        losses = [net(data(rank, number), "a") for rank in ranks(num_ranks)]
        mean = torch.stack(losses).mean()
        if number % 2:
            mean.backward()
        else:
            found = torch.autograd.grad(mean, list(net.parameters()))
            for one, gradient in zip(net.parameters(), found, strict=True):
                assert one.grad is None or in_place
                if one.grad is None:
                    one.grad = gradient
                else:
                    one.grad.copy_(gradient)
        optimizer.step()
        seen += values(net)
        net.zero_grad(set_to_none=not in_place)
    return seen


def test_gradients_that_no_backward_pass_has_made_are_averaged_in_the_step() -> None:
    same_as_one_process(_put_there, (False,), (True,), num_ranks=2)


def _penalty(num_ranks: int) -> list[Any]:
    """torch.autograd.grad is each rank's own; what is made of it is averaged."""
    net = idist.auto_model(Net("a"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.1))

    def loss(rank: int) -> Tensor:
        own = net(data(rank), "a")
        gradients = torch.autograd.grad(own, list(net.parameters()), create_graph=True)
        return own + sum(one.square().sum() for one in gradients)

    backward(num_ranks, loss)
    optimizer.step()
    return values(net)


def test_a_gradient_penalty() -> None:
    same_as_one_process(_penalty)


def _creates_graph(_: int) -> str:
    net = idist.auto_model(Net("a"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="create_graph") as caught:
        net(data(0), "a").backward(create_graph=True)
    del optimizer
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_are_refused() -> None:
    first, second = idist.spawn("horovod", _creates_graph, nproc_per_node=2)
    assert first == second


def _in_backward(num_ranks: int) -> list[Any]:
    """An optimizer for each parameter, which makes its step in the backward pass."""
    net = idist.auto_model(Net("ab"))
    optimizers = {}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in net.parameters():
        optimizers[one] = idist.auto_optim(Adam([one], lr=0.01))
        one.register_post_accumulate_grad_hook(step)
    for number in range(3):
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab"))
    return values(net)


def test_a_step_within_the_backward_pass() -> None:
    same_as_one_process(_in_backward)


# --- ranks that use different parameters ---------------------------------------------------------------


def _two_passes(num_ranks: int, which: str, kwargs: dict[str, Any]) -> list[Any]:
    """Each rank uses other parameters in the second pass: some of the first, all, none."""
    net = idist.auto_model(Net())
    if "groups" in kwargs and kwargs["groups"] == "by layer":
        kwargs = {**kwargs, "groups": [list(net.a.parameters()), list(net.b.parameters())]}
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5, weight_decay=0.1), **kwargs)
    layers = {
        "one skips": lambda rank, number: "abc" if (rank + number) % 2 else "a",
        "others": lambda rank, number: "abc"[(rank + number) % 3],
        "all": lambda rank, number: "abc",
        "c never": lambda rank, number: "ab" if rank else "b",
        "none": lambda rank, number: "ab" if rank == 0 else "",
    }[which]
    seen: list[Any] = []
    for number in range(4):

        def loss(rank: int, second: int, number: int = number) -> Tensor | None:
            used = layers(rank, number) if second else "ab"
            return net(data(rank, 2 * number + second), used) if used else None

        backward(num_ranks, lambda rank: loss(rank, 0))
        backward(num_ranks, lambda rank: loss(rank, 1))
        optimizer.step()
        seen += values(net)
        optimizer.zero_grad(set_to_none=number != 2)
    return seen


USES = ["one skips", "others", "all", "c never"]


def test_two_passes_of_which_the_second_skips_a_parameter_on_a_rank(num_ranks: int) -> None:
    same_as_one_process(_two_passes, *((which, {}) for which in USES), num_ranks=num_ranks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("groups", [{"num_groups": 2}, {"groups": 2}, {"groups": 50}, {"groups": "by layer"}])
def test_groups_of_gradients_and_two_passes(groups: dict[str, Any]) -> None:
    same_as_one_process(_two_passes, *((which, groups) for which in USES), num_ranks=2)


def test_as_many_passes_as_each_rank_likes_where_their_number_was_said(num_ranks: int) -> None:
    cases = [(which, {"backward_passes_per_step": 2, **more}) for which in (*USES, "none") for more in ({},)]
    cases.append(("none", {"backward_passes_per_step": 2, "groups": 2}))
    same_as_one_process(_two_passes, *cases, num_ranks=num_ranks)


def _uneven(_: int) -> str:
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        for number in range(2):
            net(data(0, number), "ab").backward()
            if idist.get_rank() == 0:
                net(data(1, number), "ab").backward()
            optimizer.step()
    return str(caught.value)


def test_different_numbers_of_passes_are_an_error_on_every_rank() -> None:
    for said in idist.spawn("horovod", _uneven, nproc_per_node=2):
        assert "backward_passes_per_step" in said


def _experts(num_ranks: int, reverse: bool) -> list[Any]:
    """An optimizer for each layer, of which each rank uses another one in a pass."""
    net = idist.auto_model(Net("abcd"))
    optimizers = [idist.auto_optim(Adam(getattr(net, name).parameters(), lr=0.01)) for name in "abcd"]
    seen: list[Any] = []
    for number in range(4):

        def loss(rank: int, number: int = number) -> Tensor | None:
            used = ["ab", "c", "d", "ca", ""][(rank + number) % 5]
            return net(data(rank, number), used) if used else None

        backward(num_ranks, loss)
        if number == 3:
            norms = [idist.clip_grad_norm(getattr(net, name), 1.0) for name in "abcd"]
            seen += norms
        for one in reversed(optimizers) if reverse else optimizers:
            one.step()
            one.zero_grad()
        seen += values(net)
    return seen


def test_ranks_that_use_different_optimizers(num_ranks: int) -> None:
    same_as_one_process(_experts, (False,), (True,), num_ranks=num_ranks)


def _two_losses(num_ranks: int) -> list[Any]:
    """Each with its optimizer and its step; not every rank has both."""
    net = idist.auto_model(Net("ab"))
    first, second = (idist.auto_optim(SGD(getattr(net, name).parameters(), lr=0.3)) for name in "ab")
    for number in range(4):
        first.zero_grad()
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab"))
        first.step()
        second.zero_grad()
        if number % 2 == 0:
            backward(num_ranks, lambda rank, number=number: net(data(rank, number), "b") if rank else None)
            second.step()
    return values(net)


def test_a_loss_that_some_ranks_do_not_have() -> None:
    same_as_one_process(_two_losses)


def _shared(num_ranks: int, order: list[int]) -> list[Any]:
    """The layer b belongs to two optimizers, and both make their step after each pass."""
    net = idist.auto_model(Net())
    made = [("ab", 0.1), ("bc", 0.2), ("c", 0.3)]
    optimizers = [
        idist.auto_optim(SGD([one for name in names for one in getattr(net, name).parameters()], lr=rate))
        for names, rate in made
    ]
    seen: list[Any] = []
    for number in range(4):
        net.zero_grad(set_to_none=number % 2 == 0)
        backward(
            num_ranks,
            lambda rank, number=number: net(data(rank, number), ["abc", "a", "b"][(rank + number) % 3]),
        )
        for index in order:
            optimizers[index].step()
        seen += values(net)
    return seen


def test_parameters_that_several_optimizers_share(num_ranks: int) -> None:
    same_as_one_process(_shared, ([0, 1, 2],), ([2, 1, 0],), ([1, 0],), num_ranks=num_ranks)


# --- what is frozen, and what is trained later -----------------------------------------------------------


def _unfrozen(num_ranks: int, kwargs: dict[str, Any]) -> list[Any]:
    """All layers are the optimizer's. At first c alone is trained, then a alone, then all."""
    net = Net()
    net.a.requires_grad_(False)
    net.b.requires_grad_(False)
    net = idist.auto_model(net)
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5, momentum=0.9), **kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[Any] = []
    for number in range(6):
        net.a.requires_grad_(number >= 2)
        net.b.requires_grad_(number >= 4)
        net.c.requires_grad_(number not in (2, 3))
        optimizer.zero_grad()
        backward(num_ranks, lambda rank, number=number: scaler.scale(net(data(rank, number), "abc")))
        scaler.unscale_(optimizer)
        seen += values(net)
        scaler.step(optimizer)
        scaler.update()
    return [*seen, *values(net)]


def test_a_layer_that_is_unfrozen_after_auto_optim(num_ranks: int) -> None:
    same_as_one_process(_unfrozen, ({},), ({"groups": 2},), num_ranks=num_ranks)


# --- kinds of gradients --------------------------------------------------------------------------------


def _sparse(num_ranks: int, dtype: torch.dtype, kwargs: dict[str, Any]) -> list[Any]:
    """A table that not every rank looks into, in two passes; and one that is used as a layer too."""
    torch.manual_seed(3)
    table, tied = Embedding(6, 2, sparse=True).to(dtype), Embedding(6, 2, sparse=True).to(dtype)
    model = idist.auto_model(torch.nn.ModuleList([table, tied]))
    first = idist.auto_optim(SparseAdam(table.parameters(), lr=0.1), **kwargs)
    second = idist.auto_optim(SGD(tied.parameters(), lr=0.5), **kwargs)
    seen: list[Any] = []
    for number in range(4):
        for second_pass in (0, 1) if number < 2 else (0,):

            def loss(rank: int, number: int = number, second_pass: int = second_pass) -> Tensor | None:
                if (rank + number + second_pass) % 2:
                    return tied(torch.tensor([rank, 3])).square().sum().double() if number else None
                rows = table(torch.tensor([number, 3, rank]))
                if number == 3:
                    return (rows @ tied.weight.t()).square().sum().double()
                return rows.square().mean().double()

            backward(num_ranks, loss)
        for one in (first, second):
            one.step()
        seen += [one.double() for one in values(model)]
        first.zero_grad()
        second.zero_grad()
    return seen


def test_sparse_gradients_that_some_ranks_do_not_have(num_ranks: int) -> None:
    cases = [(torch.float64, {}), (torch.float64, {"sparse_as_dense": True}), (torch.complex128, {})]
    same_as_one_process(_sparse, *cases[:2], num_ranks=num_ranks)


def _half(num_ranks: int, dtype: torch.dtype) -> list[Any]:
    net = idist.auto_model(Net().to(dtype))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    for number in range(2):
        layers = "abc" if number else "ab"
        backward(num_ranks, lambda rank, layers=layers: net((4 * data(rank)).to(dtype), layers).double())
    seen = values(net)
    optimizer.step()
    if dtype is torch.float16:  # torch has no sum of sparse ones
        return [one.double() for one in seen]
    sparse = idist.auto_model(Embedding(6, 2, sparse=True).to(dtype))
    with torch.no_grad():
        sparse.weight.copy_(torch.arange(12).view(6, 2))
    optimizer = idist.auto_optim(SGD(sparse.parameters(), lr=0.25))
    backward(num_ranks, lambda rank: sparse(torch.tensor([rank, 3])).square().sum().double())
    optimizer.step()
    return [one.double() for one in [*seen, *values(sparse)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_few_bits(dtype: torch.dtype) -> None:
    alone = _half(2, dtype)
    for found in idist.spawn("horovod", _half_on_rank, (dtype,), nproc_per_node=2):
        torch.testing.assert_close(found, alone, rtol=0.02, atol=0.02)


def _half_on_rank(_: int, dtype: torch.dtype) -> list[Any]:
    return _half(2, dtype)


def _checkpointed(num_ranks: int, use_reentrant: bool) -> list[Any]:
    """The layer b is there twice: two passes within the pass go through it, and the outer one too."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):

        def loss(rank: int, number: int = number) -> Tensor:
            x = net.b(net.a(data(rank, number)))
            for layer in (net.b, net.c, net.b) if rank != number else (net.b, net.b):
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return net.b(x).square().mean()

        backward(num_ranks, loss)
        seen += values(net)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_gradient_checkpointing() -> None:
    same_as_one_process(_checkpointed, (False,))


def _checkpointed_alike(num_ranks: int) -> list[Any]:
    """A reentrant checkpoint is a backward pass of its own, so each rank has as many as the others."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):

        def loss(rank: int, number: int = number) -> Tensor:
            x = net.b(net.a(data(rank, number)))
            for layer in (net.b, net.c if rank else net.b, net.b):
                x = checkpoint(layer, x, use_reentrant=True)
            return net.b(x).square().mean()

        for rank in ranks(num_ranks):  # one after the other: torch takes no two reentrant graphs as one
            (loss(rank) / len(ranks(num_ranks))).backward()
        seen += values(net)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_reentrant_gradient_checkpointing(num_ranks: int) -> None:
    same_as_one_process(_checkpointed_alike, num_ranks=num_ranks)


# --- what goes wrong in between --------------------------------------------------------------------------


class Broken(Exception):
    """What a backward pass raises."""


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken


def _broken(num_ranks: int, failing: list[int], drop: str) -> list[Any]:
    """The pass of some ranks breaks off when gradients have been sent; they drop it and make another."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):
        for rank in ranks(num_ranks) if idist.get_world_size() > 1 and number == 1 else ():
            if rank in failing:
                x = Breaks.apply(net.a(data(rank, 7)))
                with pytest.raises(Broken):
                    net(x, "bc").backward()
                if drop == "optimizer":
                    optimizer.zero_grad()
                else:
                    net.zero_grad(set_to_none=drop == "model")
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab" if rank else "abc"))
        optimizer.step()
        seen += values(net)
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("drop", ["optimizer", "model", "model, zeros"])
def test_a_backward_pass_that_breaks_off_and_is_made_again(drop: str) -> None:
    for failing in ([0], [0, 1]):
        same_as_one_process(_broken, (failing, drop))


def _joined(num_ranks: int) -> list[Any]:
    """Rank 0 has two batches more; then all go on. A rank that has joined counts as one with zeros."""
    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))

    def step(number: int, few: bool) -> None:
        optimizer.zero_grad()
        backward(num_ranks, lambda rank: None if few and rank else net(data(rank, number), "ab"))
        optimizer.step()

    for number in range(3):
        step(number, False)
    if 0 in ranks(num_ranks):
        for number in (3, 4):
            step(number, True)
    if idist.get_world_size() > 1:
        import horovod.torch as hvd

        hvd.join()  # who comes early has not made those steps
        with torch.no_grad():
            for one in net.parameters():
                one.copy_(idist.broadcast(one.detach(), src=0))
    for number in range(5, 7):
        step(number, False)
    return values(net)


def test_ranks_that_have_joined() -> None:
    same_as_one_process(_joined)


# --- what scripts rely on --------------------------------------------------------------------------------


def _summed(num_ranks: int, passes: int) -> list[Any]:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    kwargs = {"op": hvd.Sum} if idist.get_world_size() > 1 else {}
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5), **kwargs, **_if_distributed(passes))
    for number in range(3):
        for one in range(passes):
            factor = 1 if idist.get_world_size() > 1 else num_ranks
            backward(
                num_ranks, lambda rank, n=2 * number + one, factor=factor: factor * net(data(rank, n), "ab")
            )
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def _if_distributed(passes: int) -> dict[str, Any]:
    return {"backward_passes_per_step": passes} if idist.get_world_size() > 1 else {}


def test_sums() -> None:
    same_as_one_process(_summed, (1,), (2,))


def _summed_twice(_: int) -> str:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5), op=hvd.Sum)
    net(data(0), "ab").backward()
    with pytest.raises(RuntimeError) as caught:
        net(data(0), "a" if idist.get_rank() else "ab").backward()
    del optimizer
    return str(caught.value)


def test_what_is_a_sum_already_is_not_summed_again() -> None:
    for said in idist.spawn("horovod", _summed_twice, nproc_per_node=2):
        assert "backward_passes_per_step" in said


def _of_some_ranks(_: int) -> tuple[bool, list[Any]]:
    import horovod.torch as hvd

    process_set = hvd.add_process_set([0, 2])
    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(
        SGD(net.parameters(), lr=0.5), process_set=process_set, named_parameters=net.named_parameters()
    )
    net(data(idist.get_rank()), "ab").backward()
    optimizer.step()
    return process_set.included(), values(net)


def test_a_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def of(*numbers: int) -> list[Any]:
        net = Net("ab")
        torch.stack([net(data(number), "ab") for number in numbers]).mean().backward()
        SGD(net.parameters(), lr=0.5).step()
        return values(net)

    found = idist.spawn("horovod", _of_some_ranks, nproc_per_node=3)
    assert [included for included, _ in found] == [True, False, True]
    for (_, one), expected in zip(found, [of(0, 2), of(1), of(0, 2)], strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def _as_horovods(_: int) -> dict[str, Any]:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    plain = SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer: Any = idist.auto_optim(
        plain,
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=2.0,
        backward_passes_per_step=2,
    )
    assert isinstance(optimizer, SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
    assert idist.auto_optim(optimizer) is optimizer
    assert (optimizer.op, optimizer.backward_passes_per_step) == (hvd.Average, 2)
    optimizer.set_backward_passes_per_step(1)
    if idist.get_rank() == 0:  # as after a resume: the others have no state, and make it by a step
        for one in net.parameters():
            optimizer.state[one]["momentum_buffer"] = torch.ones_like(one)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    momenta = [optimizer.state[one]["momentum_buffer"].sum().item() for one in net.parameters()]
    optimizer.zero_grad()
    net(data(idist.get_rank()), "ab").backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    buffer = io.BytesIO()
    torch.save(net, buffer)  # with hooks on its parameters
    copied = copy.deepcopy(net)
    copied(data(idist.get_rank()), "ab").backward()  # nobody averages this one
    wrong: list[str] = []
    for kwargs in (
        {"backward_passes_per_step": 0},
        {"groups": 0.5},
        {"groups": [[net.a.weight], [net.a.weight]]},
        {"groups": [[1]]},
        {"named_parameters": [("a", net.a.weight)]},
        {"named_parameters": [("a", one) for one in net.parameters()]},
        {"named_parameters": list(net.parameters())},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    ):
        with pytest.raises(ValueError) as caught:
            idist.auto_optim(SGD(net.parameters(), lr=1), **kwargs)
        wrong.append(str(caught.value))
    with pytest.raises(TypeError):
        idist.auto_optim(SGD(net.parameters(), lr=1), unknown=1)
    return {"momenta": momenta, "values": values(net), "saved": buffer.tell() > 0, "wrong": len(wrong)}


def test_what_scripts_of_horovod_use() -> None:
    net = Net("ab")
    plain = SGD(net.parameters(), lr=0.5, momentum=0.9)
    for one in net.parameters():
        plain.state[one]["momentum_buffer"] = torch.ones_like(one)
    torch.stack([net(data(rank), "ab") for rank in range(2)]).mean().backward()
    plain.step()
    for found in idist.spawn("horovod", _as_horovods, nproc_per_node=2):
        assert found["momenta"] == [16, 4, 16, 4]
        assert found["saved"] and found["wrong"] == 8
        torch.testing.assert_close(found["values"], values(net), rtol=1e-2, atol=1e-3)


def _collected(_: int) -> list[bool]:
    """Neither hooks nor gradients keep a model."""
    import weakref

    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    net(data(0), "ab").backward()
    optimizer.step()
    known = [weakref.ref(one) for one in (optimizer, *net.parameters())]
    del net, optimizer
    return [one() is None for one in known]


def test_a_model_goes_when_nobody_has_it() -> None:
    for found in idist.spawn("horovod", _collected, nproc_per_node=2):
        assert all(found)


def _replaced(num_ranks: int) -> list[Any]:
    """An optimizer that is replaced by another one for fewer parameters, and is still there."""
    net = idist.auto_model(Net("abc"))
    first = idist.auto_optim(SGD(net.parameters(), lr=0.5, momentum=0.9))
    backward(num_ranks, lambda rank: net(data(rank), "abc"))
    first.step()
    net.zero_grad()
    second = idist.auto_optim(SGD([*net.a.parameters(), *net.b.parameters()], lr=0.25))
    for number in range(3):
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "abc" if rank else "bc"))
        second.step()
        net.zero_grad()
    return values(net)


def test_an_optimizer_that_is_replaced() -> None:
    same_as_one_process(_replaced)


def _horovods_own(num_ranks: int) -> list[Any]:
    """An optimizer that the script has wrapped itself stays as it is, and may accumulate."""
    net = idist.auto_model(Net("ab"))
    plain = SGD(net.parameters(), lr=0.5)
    if idist.get_world_size() > 1:
        import horovod.torch as hvd

        block = idist.grad_sync(net, plain, is_final_microbatch=False)
        with pytest.raises(ValueError, match="take what auto_optim returned"), block:
            pass
        plain = hvd.DistributedOptimizer(plain)
    optimizer = idist.auto_optim(plain)
    assert optimizer is plain
    for number in range(2):
        with idist.no_sync(net):
            backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab"))
        backward(num_ranks, lambda rank, number=number: net(data(rank, number + 2), "ab"))
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def test_an_optimizer_that_the_script_has_wrapped_itself() -> None:
    same_as_one_process(_horovods_own)
