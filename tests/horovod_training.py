"""What a training under Horovod is compared with: one process that has the losses of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

import ignite_dist as idist

Function = Callable[..., Any]


def same_as_one_process(
    function: Function,
    *cases: tuple[Any, ...],
    num_ranks: int = 2,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> None:
    """Compare what ``function(num_ranks, *case)`` returns on each rank, for each case, with one process."""
    alone = _each(0, function, cases or ((),), num_ranks)
    args = function, cases or ((),), num_ranks
    for found in idist.spawn("horovod", _each, args, nproc_per_node=num_ranks):
        torch.testing.assert_close(found, alone, rtol=rtol, atol=atol, equal_nan=True)


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


def values(*models: Module) -> list[Tensor]:
    """The parameters and their gradients."""
    own = [parameter for model in models for parameter in model.parameters()]
    return [*(one.detach().clone() for one in own), *(_copy(one.grad) for one in own)]


def _copy(gradient: Tensor | None) -> Tensor:
    return torch.tensor(torch.nan) if gradient is None else gradient.to_dense().clone()
