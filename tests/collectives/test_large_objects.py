"""Objects with large tensors, of a different size on each rank, in every collective that takes objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ignite_dist as idist
from spawned import spawn

WIDTH = 1000


def rows(rank: int) -> torch.Tensor:
    return torch.arange(300_000.0 * (1 + rank)).view(-1, WIDTH) + rank


def is_of(value: Any, rank: int) -> bool:
    """True if ``value`` is ``entry(rank)``, and its tensors still share their memory."""
    half, column, small = value["half"], value["column"], value["small"]
    is_equal = torch.equal(half, rows(rank)[: len(half)]) and torch.equal(column, rows(rank)[:, 7])
    half[0, 7] += 1
    return is_equal and column[0] == half[0, 7] and small.tolist() == [rank] and value["rank"] == rank


def entry(rank: int) -> dict[str, Any]:
    x = rows(rank)
    return {
        "half": x[: len(x) // 2],
        "column": x[:, 7],
        "all": x,
        "small": torch.tensor([rank]),
        "rank": rank,
    }


def exchange(rank: int) -> list[bool]:
    own, world_size = entry(rank), idist.get_world_size()
    found = {
        "all_gather": [is_of(one, number) for number, one in enumerate(idist.all_gather(own))],
        "later": [
            is_of(one, number) for number, one in enumerate(idist.all_gather(own, async_op=True).wait())
        ],
        "broadcast": [
            is_of(idist.broadcast(own if rank == src else "anything", src=src), src) for src in (0, 2)
        ],
        "scatter": [
            is_of(
                idist.scatter([entry(9 - to) for to in range(world_size)] if rank == 1 else None, src=1),
                9 - rank,
            )
        ],
        "gather": [is_of(one, number) for number, one in enumerate(idist.gather(own, dst=1) or [])],
        "all_to_all": [is_of(one, number) for number, one in enumerate(idist.all_to_all([own] * world_size))],
    }
    if rank:
        pair = idist.all_gather(own, group=[1, 2])
        found["group"] = [is_of(one, number + 1) for number, one in enumerate(pair)]
    assert is_of(own, rank), "the value that was sent has changed"
    return [name for name, are_equal in found.items() if not all(are_equal)]


@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_objects_with_large_tensors(monkeypatch: pytest.MonkeyPatch, shared_memory: str) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", shared_memory)
    assert spawn(exchange, nproc_per_node=3) == [[]] * 3


def gather_rows(rank: int) -> list[Any]:
    data = torch.utils.data.TensorDataset(torch.arange(400_000.0).view(400, WIDTH))
    loader = idist.auto_dataloader(data, batch_size=100, exact=True)
    results = [row for (x,) in loader for row in x]
    storages = {row.untyped_storage().data_ptr(): row for row in idist.gather_in_order(results, loader)}
    return [sum(row.untyped_storage().nbytes() for row in storages.values()), len(results)]


def test_results_per_sample_cost_the_bytes_of_the_samples() -> None:
    assert spawn(gather_rows) == [[400_000 * 4, 200]] * 2
