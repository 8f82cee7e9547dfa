"""Seeds of ranks and of a data loader's workers; what all ranks agree on is in the conformance suite."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset

import ignite_dist as idist


class Draws(Dataset[tuple[float, float, float]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())


def _draws(_: int, seed: int) -> list[list[float]]:
    idist.seed_everything(seed)
    here = list(Draws()[0])
    loader = idist.auto_dataloader(Draws(), batch_size=4, num_workers=4, shuffle=False)
    return [here, *(column.tolist() for batch in loader for column in batch)]


def test_ranks_and_workers_draw_their_own_numbers_and_the_same_again() -> None:
    first, again, other = (idist.spawn("gloo", _draws, (seed,), nproc_per_node=2) for seed in (3, 3, 4))
    assert first == again != other
    numbers = [number for rank in [*first, *other] for drawn in rank for number in drawn]
    assert len(set(numbers)) == len(numbers)
