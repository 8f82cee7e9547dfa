"""What several collectives do with their arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["check_blocking", "copy_of"]


def copy_of(value: Any) -> Any:
    """A tensor as a new one without a graph; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_blocking(function: str, async_op: bool) -> None:
    """Refuse ``async_op`` with ``sync_grads``.

    Raises:
        ValueError: names ``function``.
    """
    if async_op:
        raise ValueError(
            f"{function} with sync_grads=True gives a tensor with a gradient: leave async_op out."
        )
