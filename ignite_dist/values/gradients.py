"""Gradients of parameters: hooks, zero gradients, and marks of averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer

from ignite_dist.internals._torch import number_of_backward_pass, run_after_backward, version_of

# --- hooks ---


def accumulation_node(parameter: Parameter) -> Node:
    """The autograd node that adds to ``parameter.grad``. Keep a reference: hooks live as long as the node.

    Hooks of ``parameter.register_hook`` also run in ``torch.autograd.grad``, which changes no ``.grad``.
    Hooks on this node do not. They run before the addition, and hooks of DDP and Horovod run after it.
    """
    return get_gradient_edge(parameter).node


def nodes_of(values: Iterable[Any]) -> set[Node]:
    """The autograd nodes that have made the tensors among ``values``."""
    return {one.grad_fn for one in values if isinstance(one, Tensor) and one.grad_fn is not None}


class AfterBackward:
    """Calls ``function()`` at the end of each backward pass that adds to gradients of ``parameters``.

    Several functions of a pass are called in the order in which their objects were made, on every rank.
    ``torch.autograd.grad`` adds to no gradient. Nothing is called at the end of a pass that fails. A copy of
    a model has no such hooks. ``function`` must not hold the parameters, which then would never be freed.

    Attributes:
        has_unfinished_pass: True while a backward pass that has reached a parameter runs, and after one that
            has failed.
    """

    _numbers = count()

    def __init__(self, parameters: Iterable[Parameter], function: Callable[[], None]) -> None:
        self.function, self.has_unfinished_pass = function, False
        self.number = next(self._numbers)
        self._pass = -1  # the last one that has reached a parameter
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def remove(self) -> None:
        """Call nothing any more."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, _: Tensor) -> None:
        number = number_of_backward_pass()
        if number == self._pass:
            return
        self._pass, self.has_unfinished_pass = number, True
        current = _passes.get(number)
        if current is None:
            current = _passes[number] = _Pass()
            run_after_backward(current.end)
        current.reached.add(self)


class _Pass:
    """A backward pass. Only its callback holds it, which autograd frees when the pass fails."""

    def __init__(self) -> None:
        self.reached: set[AfterBackward] = set()

    def end(self) -> None:
        run_after_backward(
            self.call_all
        )  # behind what DDP calls at the end of the pass: its hooks come later

    def call_all(self) -> None:
        for one in sorted(self.reached, key=lambda one: one.number):
            one.has_unfinished_pass = False
            one.function()


_passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()  # by number


@contextmanager
def scale_gradients(parameters: Iterable[Parameter], factor: float) -> Iterator[None]:
    """Context manager: backward passes in the block add their gradients multiplied by ``factor``."""

    def scale(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:  # the loss does not depend on the parameter
            return gradients
        # With factor 0 the gradient may be NaN (a mean over no samples), and NaN * 0 is NaN.
        return (gradient * factor if factor else torch.zeros_like(gradient),)

    nodes = [accumulation_node(parameter) for parameter in parameters] if factor != 1.0 else []
    handles = [node.register_prehook(scale) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_arrival(node: Node, number: int, arrived: set[int]) -> None:
    """Add ``number`` to ``arrived`` each time that ``node`` runs."""

    def record(_: Any) -> None:  # must not reference `node`: a reference cycle would keep it alive
        arrived.add(number)

    node.register_prehook(record)


def empty_gradient(parameter: Parameter, sparse_dim: int = 1) -> Tensor:
    """An empty sparse gradient (no entries) for ``parameter``."""
    positions = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
    return torch.sparse_coo_tensor(positions, values, parameter.shape, check_invariants=False)


class _AddGradients(Function):
    """Autograd function: its value is zero, and its gradients are the tensors that ``make()`` returns."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], list[Tensor | None]], *parameters: Tensor) -> Tensor:
        ctx.make = make
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.make())


def add_gradients(parameters: list[Parameter], make: Callable[[], list[Tensor | None]]) -> Tensor:
    """A tensor whose backward pass adds the results of ``make()`` to the gradients; None adds nothing."""
    with torch.enable_grad():
        return _AddGradients.apply(make, *parameters)  # type: ignore[no-any-return, no-untyped-call]


# --- marks ---

# Attribute of an optimizer: its averaged gradients, with their versions. A step does not average these again.
_MARK = "_ignite_dist_averaged"


def mark_averaged(optimizer: Optimizer) -> None:
    """Mark the current gradients as averaged. A change of any gradient invalidates the mark."""
    optimizer.__dict__[_MARK] = [(gradient, version_of(gradient)) for gradient in _gradients(optimizer)]


def take_mark(optimizer: Optimizer) -> bool:
    """Remove the mark. True if the gradients are unchanged since :func:`mark_averaged`."""
    marked: list[tuple[Tensor, int]] | None = optimizer.__dict__.pop(_MARK, None)
    if marked is None:
        return False
    gradients = _gradients(optimizer)
    return len(gradients) == len(marked) and all(
        gradient is marked_gradient and version_of(gradient) == version
        for gradient, (marked_gradient, version) in zip(gradients, marked, strict=True)
    )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def parameters_of(*optimizers: Optimizer) -> Iterator[Parameter]:
    """The parameters of ``optimizers``, group by group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
