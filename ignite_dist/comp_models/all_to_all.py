"""All-to-all exchange: every rank sends a part of a tensor to each rank of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_dist.comp_models.transport import Group, Sizes, Transport
from ignite_dist.comp_models.work import Completed, Steps, Work


def exchange_parts(
    transport: Transport,
    rank: int,
    tensor: Tensor,
    group: Group,
    out: Tensor | None = None,
    sizes: Sizes | None = None,
) -> Work:
    """Begin to send part ``i`` of the 1-d ``tensor`` to the rank at position ``i`` of ``group``.

    Args:
        transport: carries the parts. "all_gather" supports the dtype of ``tensor``.
        rank: the caller's global rank. With XLA a rank outside the group also calls.
        tensor: the parts for the ranks, concatenated in the group's order.
        group: as in :meth:`Transport.all_gather`.
        out: 1-d, for the result.
        sizes: the sizes of the parts; None if all parts of all ranks have the same size.

    Returns:
        A work with the parts for this rank, concatenated in the group's order.
    """
    if out is None:
        out = tensor.new_empty(tensor.numel() if sizes is None else sum(sizes.received))
    if group.ranks == (rank,):
        return Completed(out.copy_(tensor))
    if exchanges(transport, group, tensor.dtype, tensor.device):
        return transport.all_to_all(tensor, group, out, sizes)
    return Steps(lambda: _gather_parts(transport, group.position(rank), tensor, group, out, sizes))


def exchanges(transport: Transport, group: Group, dtype: torch.dtype, device: torch.device) -> bool:
    """True if ``transport`` sends each part to its receiver only. Else every rank gathers all parts."""
    is_whole = group.handle is None or not transport.groups_need_all_ranks
    return is_whole and transport.supports("all_to_all", None, dtype, device)


def _gather_parts(
    transport: Transport,
    position: int | None,
    tensor: Tensor,
    group: Group,
    out: Tensor,
    sizes: Sizes | None,
) -> Tensor:
    """Gather the tensors of all ranks, and take the parts for the rank at ``position``.

    A rank outside the group (position None) sends nothing. Without ``sizes`` it gets the first rank's parts.
    """
    if sizes is None:
        rows = transport.all_gather(tensor.view(len(group.ranks), -1), group).wait()
        return out.copy_(rows[:, position or 0].reshape(-1))
    sent = torch.tensor(sizes.sent, dtype=torch.int64, device=tensor.device)
    sizes_by_rank = transport.all_gather(sent, group).wait().tolist()
    padded = tensor.new_zeros(max(map(sum, sizes_by_rank)))
    if position is not None:
        padded[: tensor.numel()] = tensor
    rows = transport.all_gather(padded, group).wait()
    if position is None:
        return out
    parts = []
    for row, sent_sizes in zip(rows, sizes_by_rank, strict=True):
        start = sum(sent_sizes[:position])
        parts.append(row[start : start + sent_sizes[position]])
    return out.copy_(torch.cat(parts))
