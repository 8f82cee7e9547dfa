"""Gradients between the backward pass and the step, on the real Horovod.

Each function runs on every rank, with that rank's loss, and once in this very process, with the mean of the
losses of all ranks. All have to end up with the same numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Adam

import ignite_dist as idist
from horovod_training import Net, backward, data, ranks, same_as_one_process, values

pytestmark = pytest.mark.horovod


# --- who reads and writes gradients between the backward pass and the step ---------------------------------


class Large(Module):
    """Enough to be still under way when the backward pass has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.several = torch.nn.ParameterList(torch.zeros(400_000) for _ in range(12))

    def forward(self, factor: float) -> Tensor:
        return torch.stack([(factor * (1 + one)).sum() for one in self.several]).sum() / 1024


def _large_values(model: Large) -> list[Any]:
    return [tuple(one.detach().double().aminmax()) for one in model.several]


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
    same_as_one_process(_scaled, (between,), rtol=1e-4, atol=1e-4)  # it is float32


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
