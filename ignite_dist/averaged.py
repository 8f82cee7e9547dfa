"""Which gradients of an optimizer hold the mean of all ranks already: a step does not average them again."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["mark_averaged", "parameters_of", "take_mark"]

_MARK = "_ignite_dist_averaged"


def mark_averaged(optimizer: Optimizer) -> None:
    """Note that the gradients, as they are now, are averaged. A change of any of them takes the mark away."""
    optimizer.__dict__[_MARK] = [(gradient, gradient._version) for gradient in _gradients(optimizer)]


def take_mark(optimizer: Optimizer) -> bool:
    """Whether the gradients are those that :func:`mark_averaged` saw; the mark is gone afterwards."""
    marked: list[tuple[Tensor, int]] | None = optimizer.__dict__.pop(_MARK, None)
    if marked is None:
        return False
    gradients = _gradients(optimizer)
    return len(gradients) == len(marked) and all(
        gradient is known and gradient._version == version
        for gradient, (known, version) in zip(gradients, marked, strict=True)
    )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def parameters_of(*optimizers: Optimizer) -> Iterator[Parameter]:
    """The parameters of ``optimizers``, group by group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
