"""Ranks that make their calls in different groups: each would wait for the other, and both get an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.segment import VARIABLE
from on_ranks import on_ranks


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory, which alone knows the calls of other groups."""
    monkeypatch.delenv(VARIABLE, raising=False)


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: idist.all_reduce(torch.ones(3), group=group),
    "all_reduce of halves": lambda group: idist.all_reduce(torch.ones(3).half(), group=group),
    "large all_reduce": lambda group: idist.all_reduce(torch.ones(600_000), group=group),
    "number": lambda group: idist.all_reduce(1, group=group),
    "object": lambda group: idist.all_gather({"rank": idist.get_rank()}, group=group),
    "broadcast": lambda group: idist.broadcast(torch.ones(3), src=1, group=group),
    "barrier": lambda group: idist.barrier(group=group),
    "all_to_all": lambda group: idist.all_to_all(torch.ones(idist.get_world_size(group)), group=group),
}


def _use(*groups: Any) -> None:
    """A call in each group: the ranks share memory from then on."""
    for group in groups:
        if group is None or idist.get_rank(group) >= 0:
            assert idist.all_reduce(1, group=group) == idist.get_world_size(group)


def _different(rank: int, names: list[str], members: list[int]) -> list[str]:
    """The error of each call, which the last rank makes in the group of ``members``."""
    group = idist.new_group(members)
    errors = []
    for name in names:
        _use(None, group)
        with pytest.raises(idist.CollectiveMismatchError) as caught:
            CALLS[name](group if rank == idist.get_world_size() - 1 else None)
        errors.append(str(caught.value))
    _use(None, group)
    return errors


@pytest.mark.parametrize(
    ("backend", "size", "members"),
    [
        ("gloo", 2, [0, 1]),
        ("gloo", 3, [1, 2]),
        ("gloo", 3, [0, 1, 2]),
        pytest.param("horovod", 3, [1, 2], marks=pytest.mark.horovod),
    ],
)
def test_every_rank_gets_an_error(backend: str, size: int, members: list[int]) -> None:
    results = idist.spawn(backend, _different, (list(CALLS), members), nproc_per_node=size)
    for rank, errors in enumerate(results):
        for error in errors:
            if rank < size - 1:
                assert f"(in the group {members}" in error
            else:
                assert f"(in the group {list(range(size))}" in error
            assert "test_different_groups.py:" in error


def _other_functions(rank: int) -> str:
    group = idist.new_group([0, 1])
    _use(None, group)
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        if rank:
            idist.barrier(group=group)
        else:
            idist.all_reduce(torch.ones(3))
    _use(None, group)
    return str(caught.value)


def test_another_function_in_another_group() -> None:
    first, second = on_ranks(_other_functions)
    assert "rank 0: all_reduce at" in first and "rank 1: barrier at" in first
    assert "in the group [0, 1]" in first and "in the group [0, 1]" in second


def _backward(rank: int) -> None:
    """Each rank comes to another one of two wrapped models, which have different groups."""
    torch.manual_seed(0)
    group = idist.new_group([0, 1])
    models = [
        idist.auto_model(torch.nn.Linear(3, 1)),
        idist.auto_model(torch.nn.Linear(3, 1), process_group=group),
    ]
    for _ in range(2):
        with pytest.raises(idist.CollectiveMismatchError):
            models[rank](torch.ones(1, 3)).sum().backward()
        for model in models:
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + rank)).sum().backward()
            assert next(model.parameters()).grad.eq(1.5).all()


def test_backward_passes_of_models_of_different_groups() -> None:
    on_ranks(_backward)


def _threads(rank: int) -> None:
    """Rank 1 makes both calls at once, and comes to rank 0's first call late."""
    group = idist.new_group([0, 1])
    _use(None, group)
    results = {}
    if rank == 0:
        results["world"] = idist.all_reduce(1)
        results["group"] = idist.all_reduce(2, group=group)
    else:
        thread = threading.Thread(
            target=lambda: results.update(group=idist.all_reduce(2, group=group)), daemon=True
        )
        thread.start()
        time.sleep(1.5)  # the ranks look for each other twice a second
        results["world"] = idist.all_reduce(1)
        thread.join()
    assert results == {"world": 2, "group": 4}


def test_threads_of_a_rank_may_make_both_calls_at_once() -> None:
    on_ranks(_threads)


def _late(rank: int) -> None:
    """Rank 1 is late for rank 0's call, and waits for rank 2, which waits for nobody."""
    first, second = idist.new_group([0, 1]), idist.new_group([1, 2])
    _use(None, first, second)
    if rank == 2:
        time.sleep(1.5)
    if rank:
        assert idist.all_reduce(1, group=second) == 2
    if rank < 2:
        assert idist.all_reduce(1, group=first) == 2
    assert idist.all_reduce(1) == 3


def test_ranks_that_are_only_late_are_left_alone() -> None:
    on_ranks(_late, world_size=3)
