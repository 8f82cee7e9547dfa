"""Passes over an exact loader that need no other rank."""

from __future__ import annotations

import torch
from torch.nn import BatchNorm1d, Linear, Sequential

import ignite_dist as idist
from ignite_dist.data.samplers import ExactSampler
from on_ranks import on_ranks, warned


def _alone(rank: int) -> str:
    kept = [
        idist.auto_model(Sequential(BatchNorm1d(2), Linear(2, 2)).requires_grad_(False)),  # a teacher
        idist.auto_model(Linear(2, 2)),  # without buffers
        idist.auto_model(Sequential(BatchNorm1d(2), Linear(2, 2)), broadcast_buffers=False),
    ]
    loader = idist.auto_dataloader(list(range(4)), exact=True)
    if rank == 0:
        assert len(list(loader)) == 2
    idist.barrier()
    kept.append(idist.auto_model(BatchNorm1d(2)))
    if rank == 0:  # a loader of one's own says nothing to other ranks
        data = list(range(4))
        own = torch.utils.data.DataLoader(data, sampler=ExactSampler(data, **idist.sampler_kwargs()))
        assert len(list(own)) == 2
    idist.barrier()
    return "done"


def test_without_buffers_to_share_a_rank_may_make_a_pass_alone() -> None:
    assert idist.spawn("gloo", _alone, nproc_per_node=2) == ["done"] * 2


def _with_any_batch_size(_: int) -> list[str]:
    _, warnings = warned(lambda: idist.auto_dataloader(list(range(6)), batch_size=3, exact=True))
    return warnings


def test_an_evaluation_with_any_batch_size_warns_of_nothing() -> None:
    assert on_ranks(_with_any_batch_size) == [[], []]
