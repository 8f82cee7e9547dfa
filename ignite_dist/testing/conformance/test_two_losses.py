"""Steps with several backward passes: the gradient is that of one process, whatever the loop looks like."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import on_every_rank

RATE = 0.5


class TwoHeads(Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = Linear(3, 4), Linear(4, 1), Linear(4, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.to(idist.device())

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.body(x).tanh()
        return {"hidden": hidden, "first": self.first(hidden), "others": (self.second(hidden),)}


class Apart(TwoHeads):
    """Its heads share no parameters."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"first": self.first(self.body(x)), "others": (self.second(x[:, :1].expand(-1, 4)),)}


class Policy(TwoHeads):
    """Its output is an object."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        output = super().forward(x)
        return {"first": Normal(output["first"], 1.0, validate_args=False), "others": output["others"]}


def inputs(rank: int, number: int) -> Tensor:
    drawn = torch.randn(
        5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + number)
    )
    return drawn.to(idist.device())


def loss_of(output: dict[str, Any]) -> Tensor:
    return output["first"].sum() + output["others"][0].pow(2).sum()  # type: ignore[no-any-return]


def two_forward_passes(model: Module, rank: int) -> None:
    outputs = [model(inputs(rank, number)) for number in range(2)]
    for output in outputs:
        loss_of(output).backward()  # type: ignore[no-untyped-call]


def one_graph_three_times(model: Module, rank: int) -> None:
    loss = loss_of(model(inputs(rank, 0)))
    for number in range(3):
        (loss * (number + 1)).backward(retain_graph=True)  # type: ignore[no-untyped-call]


def one_loss_of_two_outputs(model: Module, rank: int) -> None:
    sum(loss_of(model(inputs(rank, number))) for number in range(2)).backward()  # type: ignore[union-attr]


def gradient_penalty(model: Module, rank: int) -> None:
    x = inputs(rank, 0).requires_grad_()
    loss = loss_of(model(x))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient.pow(2).sum() + loss).backward()  # type: ignore[no-untyped-call]


def one_pass_after_another(model: Module, rank: int) -> None:
    for number in range(3):
        loss_of(model(inputs(rank, number))).backward()  # type: ignore[no-untyped-call]


def no_sync(model: Module) -> AbstractContextManager[None]:
    return nullcontext() if getattr(model, "is_alone", False) else idist.no_sync(model)


def after_local_passes(model: Module, rank: int) -> None:
    with no_sync(model):
        loss_of(model(inputs(rank, 2))).backward()  # type: ignore[no-untyped-call]
    two_forward_passes(model, rank)


def around_the_wrapper_after_a_local_pass(model: Module, rank: int) -> None:
    with no_sync(model):
        loss_of(model(inputs(rank, 2))).backward()  # type: ignore[no-untyped-call]
    around_the_wrapper(model, rank)


def a_local_pass_in_between(model: Module, rank: int) -> None:
    loss = loss_of(model(inputs(rank, 0)))
    with no_sync(model):
        loss_of(model(inputs(rank, 2))).backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def two_graphs_of_local_passes(model: Module, rank: int) -> None:
    with no_sync(model):
        losses = [loss_of(model(inputs(rank, number))) for number in range(3)]
        (losses[0] + losses[1]).backward()
        losses[2].backward()
    around_the_wrapper(model, rank)


def heads_outside(model: Module, rank: int) -> None:
    hidden, inner = model(inputs(rank, 0))["hidden"], idist.unwrap_model(model)
    loss = inner.first(hidden).sum() + inner.second(hidden).pow(2).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)


def around_the_wrapper(model: Module, rank: int) -> None:
    two_forward_passes(idist.unwrap_model(model), rank)


def a_pass_that_fails(model: Module, rank: int) -> None:
    loss = loss_of(model(inputs(rank, 0)))
    loss.backward()  # type: ignore[no-untyped-call]
    with suppress(RuntimeError):
        loss.backward()  # type: ignore[no-untyped-call]


def one_pass_for_each_head(model: Module, rank: int) -> None:
    for number in range(2):
        output = model(inputs(rank, number))
        output["first"].sum().backward()
        output["others"][0].pow(2).sum().backward()


def in_turn_after_local_passes(model: Module, rank: int) -> None:
    with no_sync(model):
        loss_of(model(inputs(rank, 2))).backward()  # type: ignore[no-untyped-call]
    one_pass_for_each_head(model, rank)


def log_probabilities(model: Module, rank: int) -> None:
    output = model(inputs(rank, 0))
    loss = output["first"].log_prob(torch.ones((), device=idist.device())).sum() + output["others"][0].sum()
    for _ in range(2):
        loss.backward(retain_graph=True)


def in_grad_sync(model: Module, rank: int) -> None:
    with idist.grad_sync(model):
        two_forward_passes(model, rank)


def after_a_pass_that_raised(model: Module, rank: int) -> None:
    def fail(_: Tensor) -> None:
        raise LookupError

    loss = loss_of(model(inputs(rank, 0)))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    handle = idist.unwrap_model(model).body.weight.register_hook(fail)
    with suppress(LookupError):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    handle.remove()
    model.zero_grad()
    two_forward_passes(model, rank)


PASSES: dict[str, Callable[[Module, int], None]] = {
    function.__name__: function
    for function in (
        two_forward_passes,
        one_graph_three_times,
        one_loss_of_two_outputs,
        gradient_penalty,
        one_pass_after_another,
        after_local_passes,
        around_the_wrapper_after_a_local_pass,
        a_local_pass_in_between,
        two_graphs_of_local_passes,
        in_grad_sync,
        heads_outside,
        around_the_wrapper,
        a_pass_that_fails,
        one_pass_for_each_head,
        in_turn_after_local_passes,
        log_probabilities,
    )
}
KINDS = {one_pass_for_each_head: Apart, in_turn_after_local_passes: Apart, log_probabilities: Policy}


def of_one_process(passes: Callable[[Module, int], None]) -> list[Tensor]:
    """The parameters after a step with the mean over the ranks."""
    size, kind = idist.get_world_size(), KINDS.get(passes, TwoHeads)
    model = kind()
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(size):
        alone = kind()
        alone.is_alone = True
        passes(alone, rank)
        for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
            gradient += parameter.grad / size
    return [
        one.detach() - RATE * gradient for one, gradient in zip(model.parameters(), gradients, strict=True)
    ]


def check(passes: Callable[[Module, int], None], **kwargs: Any) -> None:
    wanted = of_one_process(passes if passes is not in_grad_sync else two_forward_passes)
    model = idist.auto_model(KINDS.get(passes, TwoHeads)(), **kwargs)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=RATE))
    passes(model, idist.get_rank())
    optimizer.step()
    found = [parameter.detach() for parameter in idist.unwrap_model(model).parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PASSES)
@on_every_rank
def test_the_step_is_that_of_one_process(name: str) -> None:
    check(PASSES[name])


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-5}],
    ids=lambda options: next(iter(options)),
)
@on_every_rank
def test_with_any_options_of_the_wrapper(options: dict[str, Any]) -> None:
    if idist.model_name() == "native-dist":
        for passes in (*PASSES.values(), after_a_pass_that_raised):
            # DDP finds no parameters in objects, of heads outside or of the next pass: they are "unused".
            if "find_unused_parameters" not in options or passes not in (*KINDS, heads_outside):
                check(passes, **options)


@on_every_rank
def test_a_wrapped_model_can_still_be_copied_and_pickled() -> None:
    model = idist.auto_model(TwoHeads())
    if not isinstance(model, DistributedDataParallel):
        return
    two_forward_passes(model, idist.get_rank())
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other(inputs(idist.get_rank(), 0))).backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is not None for parameter in other.parameters())


@on_every_rank
def test_a_model_is_freed_with_its_parameters() -> None:
    model = idist.auto_model(TwoHeads())
    two_forward_passes(model, idist.get_rank())
    weights = [weakref.ref(one) for one in idist.unwrap_model(model).parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)


@on_every_rank
def test_two_models_in_one_pass_are_averaged_in_the_same_order() -> None:
    rank = idist.get_rank()
    models = [idist.auto_model(Scaled()) for _ in range(2)]
    optimizer = idist.auto_optim(SGD([one for model in models for one in model.parameters()], lr=1.0))
    order = models if rank % 2 else models[::-1]
    ones = torch.ones(1, 1, dtype=torch.float64, device=idist.device())
    first, second = (idist.unwrap_model(model)(ones) for model in order)
    (first + 100 * second if rank % 2 else second + 100 * first).sum().backward()
    optimizer.step()
    assert [idist.unwrap_model(one).weight.item() for one in models] == [0.0, -99.0]


class Scaled(Linear):
    def __init__(self) -> None:
        super().__init__(1, 1, bias=False, dtype=torch.float64, device=idist.device())
        self.weight.data.fill_(1.0)


@dataclass
class Output:
    loss: Tensor


class WithLosses(TwoHeads):
    """Losses of several kinds: ``how`` they are made and returned."""

    how = "plain"
    auxiliary: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.how == "reentrant":
            return checkpoint(lambda x: loss_of(TwoHeads.forward(self, x)), x, use_reentrant=True)
        loss = loss_of(super().forward(x))
        self.auxiliary = loss * 2
        return Output(loss) if self.how == "dataclass" else loss


def local_loss(model: Module, how: str, x: Tensor) -> Tensor:
    result = model(x.requires_grad_())
    if how == "penalty":
        (gradient,) = torch.autograd.grad(result, x, create_graph=True)
        return gradient.pow(2).sum()
    if how == "auxiliary":
        loss: Tensor = idist.unwrap_model(model).auxiliary
        return loss
    return result.loss if isinstance(result, Output) else result


@pytest.mark.parametrize("how", ["plain", "reentrant", "auxiliary", "penalty", "dataclass"])
@on_every_rank
def test_a_local_forward_pass_is_local_wherever_its_backward_pass_is(how: str) -> None:
    """As in torch. The ranks make different numbers of such passes."""
    rank, model = idist.get_rank(), idist.auto_model(WithLosses())
    if not isinstance(model, DistributedDataParallel):
        return
    for _ in range(2):  # DDP rebuilds its buckets in the second pass
        local_loss(model, "plain", inputs(rank, 0)).backward()  # type: ignore[no-untyped-call]
    idist.unwrap_model(model).how = how
    for number in range(rank + 1):
        with idist.no_sync(model):
            loss = local_loss(model, how, inputs(rank, number))
        loss.backward()  # type: ignore[no-untyped-call]
    idist.unwrap_model(model).how = "plain"
    local_loss(model, "plain", inputs(rank, 0)).backward()  # type: ignore[no-untyped-call]
