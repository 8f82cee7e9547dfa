"""What the getters say in the workers of a DataLoader, by whatever method these are started."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import ignite_dist as idist

SECONDS = 120

Seen = tuple[int, int, int, int, int, int, str | None, str, str]


def seen() -> Seen:
    return (
        *(idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.get_nproc_per_node()),
        *(idist.get_rank([0]), idist.get_world_size([0])),
        *(idist.backend(), idist.model_name(), str(idist.device())),
    )


class Seeing(Dataset[Any]):
    """What a worker sees; it has looked before it was told anything, as modules do."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> Seen:
        return seen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        idist.get_rank()
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"a": 1}


def in_worker(method: str) -> Seen:
    loader = DataLoader(
        Seeing(), num_workers=1, batch_size=None, multiprocessing_context=method, timeout=SECONDS
    )
    (found,) = loader
    return tuple(found)  # type: ignore[return-value]  # the loader makes a list of it


def compare(local_rank: int, method: str) -> None:
    found = in_worker(method)
    assert found == seen(), (found, seen())


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_a_worker_has_the_rank_of_its_main_process(backend: str, method: str) -> None:
    idist.spawn(backend, compare, (method,), nproc_per_node=2)


def in_a_child() -> None:
    """In a process that a rank has started, and that is no rank: its workers are none either."""
    for method in ("fork", "spawn", "forkserver"):
        assert in_worker(method) == seen(), method
    assert seen()[:2] == (0, 1)


def of_a_child(local_rank: int) -> None:
    if local_rank == 0:  # whose loaders cannot be told from those of a process that is no rank
        return
    child = multiprocessing.get_context("spawn").Process(target=in_a_child)
    child.start()
    child.join(SECONDS)
    assert child.exitcode == 0


@pytest.mark.long
def test_a_worker_of_a_process_that_is_no_rank_has_none() -> None:
    idist.spawn("gloo", of_a_child, nproc_per_node=2)


def by_hand(local_rank: int) -> None:
    """A fork server that was started before the context knows of it all the same."""
    rank = idist.get_rank()
    idist.finalize()
    assert in_worker("forkserver")[:2] == (0, 1)
    idist.initialize("gloo")
    within, here = in_worker("forkserver"), seen()
    assert within == here, (within, here)
    assert here[:2] == (rank, 2)
    idist.finalize()
    assert in_worker("forkserver")[:2] == (0, 1)


@pytest.mark.long
def test_a_worker_knows_of_a_context_while_it_lasts() -> None:
    idist.spawn("gloo", by_hand, nproc_per_node=2)
