"""Narrow floats reduced with one rounding, at the cost of the bytes that they have themselves.

A library's own all-reduce computes in the dtype that it sends. So it would have to send float64, four times
float16. Here each rank gets all ranks' values of one part, reduces them, and sends the narrow result to the
others. Altogether that sends as many bytes as an all-reduce of narrow floats in a ring.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ignite_dist.values.reduce_ops import reduce_rows
from ignite_dist.values.serialization import as_bytes

__all__ = ["reduce_in_parts", "reduce_rows"]

# A piece has a copy, and its part one in float64, so this bounds what a large tensor needs beside itself.
_PIECE_BYTES = 4 << 20


def reduce_in_parts(
    tensor: Tensor,
    op: str,
    group_size: int,
    exchange: Callable[[Tensor, Tensor], object],
    gather: Callable[[Tensor, Tensor], object],
) -> Tensor:
    """Reduce a large ``tensor`` in place: every rank reduces a part of it and gathers the others' parts.

    Args:
        tensor: contiguous.
        op: "SUM", "AVERAGE" or "PRODUCT".
        group_size: number of ranks.
        exchange: ``exchange(sent, received)``, flat bytes: the ``i``-th part of what is sent goes to the
            ``i``-th rank, and its part for this rank comes back in its place.
        gather: ``gather(sent, received)``, flat bytes from every rank, in rank order.
    """
    piece_numel = group_size * max(1, _PIECE_BYTES // group_size // tensor.itemsize)
    for piece in torch.split(tensor.view(-1), piece_numel):
        part_numel = -(-piece.numel() // group_size)
        parts = piece
        if part_numel * group_size != piece.numel():  # the last one
            parts = piece.new_zeros(part_numel * group_size)
            parts[: piece.numel()].copy_(piece)
        received = torch.empty_like(parts)
        exchange(as_bytes(parts), as_bytes(received))
        own = reduce_rows(torch.split(received, part_numel), op, out=piece.new_empty(part_numel))
        gather(as_bytes(own), as_bytes(parts))
        if parts is not piece:
            piece.copy_(parts[: piece.numel()])
    return tensor
