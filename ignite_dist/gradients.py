"""Gradients of parameters: hooks on what backward passes add, zeros to add, marks on what is averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer

from ignite_dist._torch import version_of

__all__ = [
    "accumulation_node",
    "add_gradients",
    "empty_gradient",
    "mark_averaged",
    "note_arrival",
    "parameters_of",
    "scale_gradients",
    "take_mark",
]


# --- hooks ---


def accumulation_node(parameter: Parameter) -> Node:
    """The node of autograd's graph that adds to ``parameter.grad``; hooks on it live as long as it is held.

    ``parameter.register_hook`` runs in ``torch.autograd.grad`` too, whose result is not added to anything.
    A hook on this node does not. It runs before the hooks of DDP and Horovod, which come after the addition.
    """
    return get_gradient_edge(parameter).node


@contextmanager
def scale_gradients(parameters: Iterable[Parameter], factor: float) -> Iterator[None]:
    """In the block ``factor`` times as much is added to the gradient of each of ``parameters``."""

    def scale(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:  # this output of the model is not a part of the loss
            return gradients
        # What counts nothing may be NaN: the mean of no samples.
        return (gradient * factor if factor else torch.zeros_like(gradient),)

    nodes = [accumulation_node(parameter) for parameter in parameters] if factor != 1.0 else []
    handles = [node.register_prehook(scale) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def note_arrival(node: Node, number: int, arrived: set[int]) -> None:
    """Put ``number`` into ``arrived`` each time that ``node`` runs, for as long as the node lives."""

    def note(_: Any) -> None:  # holds no node, which would hold itself
        arrived.add(number)

    node.register_prehook(note)


def empty_gradient(parameter: Parameter, sparse_dim: int = 1) -> Tensor:
    """A sparse gradient of zeros for ``parameter``, without any entry."""
    positions = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
    return torch.sparse_coo_tensor(positions, values, parameter.shape, check_invariants=False)


class _AddGradients(Function):
    """Zero, as a function of parameters, with the gradients that it is given."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], list[Tensor | None]], *parameters: Tensor) -> Tensor:
        ctx.make = make
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.make())


def add_gradients(parameters: list[Parameter], make: Callable[[], list[Tensor | None]]) -> Tensor:
    """A tensor whose backward pass adds what ``make()`` gives (None: nothing) to those of ``parameters``."""
    with torch.enable_grad():
        return _AddGradients.apply(make, *parameters)  # type: ignore[no-any-return, no-untyped-call]


# --- the mean of all ranks ---

# The gradients of an optimizer that hold the mean of all ranks already: a step does not average them again.
_MARK = "_ignite_dist_averaged"


def mark_averaged(optimizer: Optimizer) -> None:
    """Note that the gradients, as they are now, are averaged. A change of any of them takes the mark away."""
    optimizer.__dict__[_MARK] = [(gradient, version_of(gradient)) for gradient in _gradients(optimizer)]


def take_mark(optimizer: Optimizer) -> bool:
    """Whether the gradients are those that :func:`mark_averaged` saw; the mark is gone afterwards."""
    marked: list[tuple[Tensor, int]] | None = optimizer.__dict__.pop(_MARK, None)
    if marked is None:
        return False
    gradients = _gradients(optimizer)
    return len(gradients) == len(marked) and all(
        gradient is known and version_of(gradient) == version
        for gradient, (known, version) in zip(gradients, marked, strict=True)
    )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def parameters_of(*optimizers: Optimizer) -> Iterator[Parameter]:
    """The parameters of ``optimizers``, group by group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
