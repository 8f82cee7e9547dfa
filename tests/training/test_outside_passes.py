"""Backward passes outside of the blocks of accumulate_gradients: which are refused, and which are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import Dropout, Linear, Module, ModuleDict, Sequential, Tanh
from torch.utils.checkpoint import checkpoint

import ignite_dist as idist
from on_ranks import on_ranks

REFUSED = "runs outside of the `with sync:` block"
STEPS = 2


def inputs(number: int = 2 * STEPS) -> list[Tensor]:
    return [torch.full((2, 3), number + 1.0) for number in range(number)]


def make_model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(3, 4), Tanh(), Dropout(0.0), Linear(4, 1))


def blocks(model: Module, number: int = STEPS) -> Iterator[tuple[Tensor, Any]]:
    return idist.accumulate_gradients(inputs(number), model, STEPS)


def gradients(model: Module) -> list[Any]:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def wanted(losses: Callable[[Module, Tensor], Tensor] = lambda model, x: model(x).mean()) -> list[Any]:
    model = make_model()
    torch.stack([losses(model, x) for x in inputs(STEPS)]).mean().backward()
    return gradients(model)


# --- refused ---------------------------------------------------------------------------------------------


class Checkpointed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def parts(model: Module, x: Tensor) -> Tensor:
    for one in model.children():
        x = one(x)
    return x


CALLS: dict[str, tuple[Callable[[], Module], Callable[[Module, Tensor], Tensor]]] = {
    "module": (make_model, lambda model, x: model(x)),
    "parts": (make_model, parts),
    "container": (lambda: ModuleDict({"net": make_model()}), lambda model, x: model["net"](x)),
    "compiled": (lambda: torch.compile(make_model(), backend="eager"), lambda model, x: model(x)),
    "checkpointed": (Checkpointed, lambda model, x: model(x)),
}


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_pass_after_its_block_is_refused(kind: str) -> None:
    make, call = CALLS[kind]
    model = idist.auto_model(make())
    for number, (x, sync) in enumerate(blocks(model, 2 * STEPS)):
        before = gradients(model)
        with sync:
            loss = call(model, x).mean()
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()
        torch.testing.assert_close(gradients(model), before)
        if number % 2:
            model.zero_grad()
    for x, sync in blocks(model):
        with sync:
            call(model, x).mean().backward()
    torch.testing.assert_close(gradients(model), wanted())


def test_a_pass_after_the_loop_is_refused() -> None:
    model, losses = make_model(), []
    for x, sync in blocks(model):
        with sync:
            losses.append(model(x).mean())
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.stack(losses).sum().backward()
    assert gradients(model) == [None] * 4
    assert not any(one._forward_hooks for one in model.modules())
    model(inputs()[0]).mean().backward()  # of no block


def test_the_second_of_two_losses_is_refused() -> None:
    model = make_model()
    for x, sync in blocks(model):
        with sync:
            output = model(x)
            output.mean().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            output.pow(2).mean().backward()
    torch.testing.assert_close(gradients(model), wanted())


def _on_two_ranks(_: int, options: dict[str, Any]) -> None:
    model = idist.auto_model(make_model(), **options)

    def whole() -> list[Tensor]:
        found: list[Any] = [one.grad for one in model.parameters()]
        return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]

    for outside in (0, 1):
        for x, sync in blocks(model):
            with sync:
                loss = model(x).mean()
                if sync.number != outside:
                    loss.backward()
            if sync.number == outside:
                with pytest.raises(RuntimeError, match=REFUSED):
                    loss.backward()
                break
        model.zero_grad()
    for x, sync in blocks(model):
        with sync:
            model(x).mean().backward()
    torch.testing.assert_close(whole(), wanted())


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "fsdp"}, {"strategy": "fsdp", "wrap": [Linear]}], ids=["ddp", "fsdp", "wrap"]
)
def test_on_two_ranks_nothing_is_left_of_the_error(options: dict[str, Any]) -> None:
    on_ranks(_on_two_ranks, options)


# --- allowed ---------------------------------------------------------------------------------------------


def test_blocks_without_a_backward_pass_and_evaluations() -> None:
    model = make_model()
    for x, sync in blocks(model):
        with sync:
            if sync.number == 0:
                model(x)  # skipped
            else:
                with torch.no_grad():
                    model(x)
                model(x).mean().backward()
    half = make_model()
    (half(inputs()[1]).mean() / STEPS).backward()
    torch.testing.assert_close(gradients(model), gradients(half))


def test_a_pass_in_a_later_block_of_the_step() -> None:
    """One loss of all microbatches, as a contrastive loss."""
    model, outputs = make_model(), []
    for x, sync in blocks(model):
        with sync:
            outputs.append(model(x).mean())
            if sync.is_final:
                torch.stack(outputs).sum().backward()
    torch.testing.assert_close(gradients(model), wanted())


def test_what_adds_to_no_gradient() -> None:
    model = make_model()
    for x, sync in blocks(model):
        x.requires_grad_()
        with sync:
            loss = model(x).mean()
            loss.backward(retain_graph=True)
        (saliency,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert saliency.shape == x.shape
        assert len(torch.autograd.grad(loss, [*model.parameters()])) == 4
        model(x).mean().detach()
    torch.testing.assert_close(gradients(model), wanted())


def test_two_models_that_see_each_other_s_gradients() -> None:
    """The judge's gradients of the generator's loss are dropped by ``zero_grad``."""
    judge, generator = make_model(), Sequential(Linear(3, 3))
    wanted_of_generator = []
    for x, sync in blocks(judge, 2 * STEPS):
        if sync.number == 0:
            judge.zero_grad()
        with sync:
            (judge(x).mean() - judge(generator(x).detach()).mean()).backward()
        if sync.is_final:
            judge(generator(x)).mean().backward()  # through the judge, in no block
            wanted_of_generator.append(gradients(generator))
    assert len(wanted_of_generator) == 2


def test_a_module_that_returns_what_it_got() -> None:
    """The input comes from another model, whose backward pass comes later."""
    model, before = Sequential(torch.nn.Identity(), Linear(3, 1)), Linear(3, 3)
    for x, sync in blocks(model):
        features = before(x)
        with sync:
            model(features).mean().backward(retain_graph=True)
        features.sum().backward()


def test_an_exception_and_a_break_leave_nothing() -> None:
    model = make_model()
    for _, sync in blocks(model):
        with pytest.raises(ZeroDivisionError), sync:
            _ = 1 / 0
        break
    for x, sync in blocks(model):
        with sync:
            copied = copy.deepcopy(model)
            model(x).mean().backward()
        copied(x).mean().backward()
    torch.testing.assert_close(gradients(model), wanted())
    assert not any(one._forward_hooks for one in model.modules())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpoints(is_reentrant: bool) -> None:
    model = make_model()

    def loss(model: Module, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(model, x, use_reentrant=is_reentrant)
        return hidden.mean()  # type: ignore[no-any-return]

    for x, sync in blocks(model):
        with sync:
            loss(model, x.requires_grad_()).backward()
    torch.testing.assert_close(gradients(model), wanted())


def test_gradients_of_each_sample() -> None:
    model = make_model()
    values = {name: one.detach() for name, one in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, (x,)).mean()  # type: ignore[no-any-return]

    for x, sync in blocks(model):
        with sync:
            of_each = vmap(grad(loss), in_dims=(None, 0), randomness="different")(values, x)
            model(x).mean().backward()
        assert of_each["0.weight"].shape == (2, 4, 3)
    torch.testing.assert_close(gradients(model), wanted())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_is_not_compiled_anew_in_each_block(fullgraph: bool) -> None:
    """It is called in 24 blocks, and outside of them."""
    model, compiled = make_model(), 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    loss = torch.compile(lambda x: model(x).mean(), backend=backend, fullgraph=fullgraph)
    for _ in range(12):
        model.zero_grad()
        for x, sync in blocks(model):
            with sync:
                loss(x).backward()
        torch.testing.assert_close(gradients(model), wanted())
        loss(inputs()[0])
    assert compiled <= 3  # with hooks, without, and once more with torch 2.9


def test_a_block_is_entered_once() -> None:
    model = make_model()
    for x, sync in blocks(model):
        with sync:
            loss = model(x).mean()
        with pytest.raises(RuntimeError, match="was entered before"), sync:
            loss.backward()
