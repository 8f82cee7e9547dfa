"""Which gradients hold the mean of all ranks already, so that a step does not average them again."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["mark_averaged", "take_mark"]

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
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
