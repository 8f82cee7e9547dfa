"""A backward pass that fails, or is interrupted, on one rank: the others get an error, and all train on."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.segment import VARIABLE
from on_ranks import on_ranks

PACKAGE = str(Path(idist.__file__).parent)
# They wait for other ranks: how often they look depends on the machine.
WAITS = {"wait_for", "_sleep", "_places"}


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.fails:
            raise MemoryError("no memory for this batch")
        return gradient, None


class _Model(Module):
    """Its backward pass, from layer 2 to 0, may fail when it comes to the layer ``fails_at``."""

    fails_at = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Linear(3, 300), Linear(300, 300), Linear(300, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = _Fails.apply(layer(x), number == self.fails_at)
        return x


def _step(model: Module, value: float = 1.0) -> list[Tensor]:
    """The gradients after a backward pass, of which the other ranks have other ones."""
    model.zero_grad()
    model(torch.full((2, 3), value + idist.get_rank())).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _fail(_: int, kwargs: dict[str, Any], failing: list[int]) -> None:
    model = idist.auto_model(_Model(), bucket_cap_mb=0.1, **kwargs)
    expected = _step(model)
    for place in (1, 0, 0, 1):
        model.module.fails_at = place if idist.get_rank() in failing else -1
        with pytest.raises((MemoryError, idist.CollectiveMismatchError)) as caught:
            _step(model)
        if idist.get_rank() in failing:
            assert isinstance(caught.value, MemoryError)
        else:
            assert "a backward pass that failed" in str(caught.value)
        model.module.fails_at = -1
        for _ in range(3):
            assert _equal(_step(model), expected)
        assert idist.all_gather(place) == [place] * idist.get_world_size()


@pytest.mark.parametrize("failing", [[1], [0], [0, 1]])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"broadcast_buffers": False},
    ],
    ids=lambda kwargs: next(iter(kwargs), "default"),
)
def test_a_pass_that_fails(kwargs: dict[str, Any], failing: list[int]) -> None:
    on_ranks(_fail, kwargs, failing)


def test_a_pass_that_fails_on_one_of_three_ranks() -> None:
    on_ranks(_fail, {}, [2], world_size=3)


def _fail_in_the_first(_: int) -> None:
    model = idist.auto_model(_Model())
    model.module.fails_at = 1 if idist.get_rank() else -1
    with pytest.raises((MemoryError, idist.CollectiveMismatchError)):
        _step(model)
    model.module.fails_at = -1
    gradients = _step(model)
    assert _equal(gradients, idist.broadcast(gradients))


def test_the_first_pass_fails() -> None:
    on_ranks(_fail_in_the_first)


def _fail_in_the_second(_: int) -> None:
    """The second pass of a step, which DDP leaves alone."""
    model = idist.auto_model(_Model())
    for fails in (True, False):
        model.zero_grad()
        (first, second) = model(torch.ones(1, 3)).sum(), None
        model.module.fails_at = 1 if fails and idist.get_rank() else -1
        second = model(torch.full((1, 3), float(idist.get_rank()))).sum()
        model.module.fails_at = -1
        first.backward()
        if fails:
            with pytest.raises((MemoryError, idist.CollectiveMismatchError)):
                second.backward()
        else:
            second.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert _equal(gradients, idist.broadcast(gradients))


def test_the_second_pass_of_a_step_fails() -> None:
    on_ranks(_fail_in_the_second)


def _interrupt(moment: int, model: Module) -> bool:
    """A step that is interrupted at this moment of its backward pass; False if it has fewer moments.

    Python runs the handlers of signals where a function begins, and after a call of a function in C.
    """
    left = moment

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if (
            event in ("call", "c_return")
            and code.co_filename.startswith(PACKAGE)
            and code.co_name not in WAITS
        ):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    loss = model(torch.full((2, 3), 1.0 + idist.get_rank())).sum()
    sys.setprofile(interrupt)
    try:
        loss.backward()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return left < 0


def _interrupted(rank: int) -> int:
    """Pass ``k`` of rank 1 is interrupted at moment ``k``. The number of moments."""
    model = idist.auto_model(_Model(), bucket_cap_mb=0.1)
    expected = _step(model)
    k, goes_on = 0, True
    while goes_on:
        if rank == 1:
            goes_on = _interrupt(k, model)
        else:
            with suppress(idist.CollectiveMismatchError):
                _step(model)
        # The other rank may know of an interrupt at the end of the pass in its next call only.
        for _ in range(3):
            with suppress(idist.CollectiveMismatchError):
                at, goes_on = idist.broadcast((k, goes_on), src=1)
                break
        assert at == k
        assert _equal(_step(model), expected)
        k += 1
    return k


def test_a_pass_that_is_interrupted_at_any_moment() -> None:
    assert min(on_ranks(_interrupted)) > 50
