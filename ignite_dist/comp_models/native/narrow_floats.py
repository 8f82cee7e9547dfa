"""All-reduce of narrow floats with one rounding, which sends no wider floats.

A library's all-reduce computes in the dtype that it sends. For only one rounding it would have to send
float64, four times the bytes of float16. In this module each rank receives the values of one part from all
ranks, reduces them with :func:`ignite_dist.values.reduce_ops.reduce_rows`, and sends the result to the other
ranks. A ring all-reduce would send as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ignite_dist.values.reduce_ops import reduce_rows
from ignite_dist.values.serialization import as_bytes

# This bounds the extra memory for a large tensor: a copy of one piece, and a part of that piece in float64.
_PIECE_BYTES = 4 << 20
_PIECE_BYTES_ON_GPU = 64 << 20


def reduce_in_parts(
    tensor: Tensor,
    op: str,
    group_size: int,
    exchange: Callable[[Tensor, Tensor], object],
    gather: Callable[[Tensor, Tensor], object],
) -> Tensor:
    """Reduce a large ``tensor`` in place: every rank reduces a part of it and gathers the other ranks' parts.

    Args:
        tensor: a contiguous tensor.
        op: "SUM", "AVERAGE" or "PRODUCT".
        group_size: number of ranks.
        exchange: ``exchange(sent, received)``, an all-to-all of flat bytes in equal parts, in rank order.
        gather: ``gather(sent, received)``, an all-gather of flat bytes, in rank order.
    """
    piece_bytes = _PIECE_BYTES if tensor.device.type == "cpu" else _PIECE_BYTES_ON_GPU
    piece_numel = group_size * max(1, piece_bytes // group_size // tensor.itemsize)
    for piece in torch.split(tensor.view(-1), piece_numel):
        part_numel = -(-piece.numel() // group_size)
        parts = piece
        if part_numel * group_size != piece.numel():  # the last piece
            parts = piece.new_zeros(part_numel * group_size)
            parts[: piece.numel()].copy_(piece)
        received = torch.empty_like(parts)
        exchange(as_bytes(parts), as_bytes(received))
        reduced_part = reduce_rows(torch.split(received, part_numel), op, out=piece.new_empty(part_numel))
        gather(as_bytes(reduced_part), as_bytes(parts))
        if parts is not piece:
            piece.copy_(parts[: piece.numel()])
    return tensor
