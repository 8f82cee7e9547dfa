"""Helpers for the arguments of collectives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ignite_dist.comp_models import Group


def copy_of(value: Any) -> Any:
    """A copy of a tensor, without its autograd graph. Other values are returned unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_not_async(function: str, async_op: bool) -> None:
    """Raise ``ValueError`` if a call of ``function`` with ``sync_grads`` also has ``async_op``."""
    if async_op:
        raise ValueError(
            f"{function} with sync_grads=True returns a tensor with a gradient: do not pass async_op."
        )


def check_root(name: str, rank: Any, group: Group, world_size: int) -> None:
    """Raise ``ValueError`` if ``rank``, given as ``name`` ("src" or "dst"), is not a rank of ``group``."""
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"{name} must be a global rank, an int in [0, {world_size}), got {rank!r}.")
    if group.ranks and group.position(rank) is None:
        raise ValueError(f"{name} must be a global rank of the group {list(group.ranks)}, got {rank}.")


def check_divisible(function: str, tensor: Tensor, group: Group) -> None:
    """Raise ``ValueError`` if dimension 0 of ``tensor`` is not a multiple of the size of ``group``."""
    if group.ranks and (not tensor.dim() or tensor.shape[0] % len(group.ranks)):
        raise ValueError(
            f"{function} splits dimension 0 into {len(group.ranks)} equal parts, one per rank of the group; "
            f"got a tensor of shape {tuple(tensor.shape)}. A list takes a tensor per rank."
        )


def check_length(function: str, values: Any, group: Group) -> None:
    """Raise ``ValueError`` if the list ``values`` has not one entry per rank of ``group``."""
    if len(values) != len(group.ranks):
        raise ValueError(
            f"{function} takes a list with one entry per rank of the group, which has {len(group.ranks)} "
            f"ranks; got {len(values)} entries."
        )


def check_out(out: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if the result for ``tensor``, of shape ``shape``, does not fit into ``out``."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out= must be a tensor, got {type(out).__name__}.")
    expected = (shape, tensor.dtype, tensor.device)
    if (tuple(out.shape), out.dtype, out.device) != expected or not out.is_contiguous():
        raise ValueError(
            f"out= must be a contiguous {tensor.dtype} tensor of shape {shape} on {tensor.device}, got "
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
            f"{'' if out.is_contiguous() else ', not contiguous'}."
        )
