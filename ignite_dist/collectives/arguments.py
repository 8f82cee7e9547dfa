"""Helpers for the arguments of collectives."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def copy_of(value: Any) -> Any:
    """A copy of a tensor, without its autograd graph. Other values are returned unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_not_async(function: str, async_op: bool) -> None:
    """Raise ``ValueError`` if a call of ``function`` with ``sync_grads`` also has ``async_op``."""
    if async_op:
        raise ValueError(
            f"{function} with sync_grads=True returns a tensor with a gradient: do not pass async_op."
        )
