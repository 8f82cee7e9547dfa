"""A mismatch over shared memory names the public function and the line of every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ignite_dist as idist
from spawned import spawn

CALLS: dict[str, Callable[[Path], object]] = {
    "all_reduce": lambda _: idist.all_reduce(1),
    "all_gather": lambda _: idist.all_gather({"an": "object"}),
    "save_checkpoint": lambda folder: idist.save_checkpoint(folder / "checkpoint", step=1),
    "barrier": lambda _: idist.barrier(),
}


def _one_more_backward_pass(local_rank: int, name: str, folder: Path) -> None:
    model = idist.auto_model(torch.nn.Linear(1, 1))
    for _ in range(3 + idist.get_rank()):
        model(torch.ones(1, 1)).sum().backward()
    CALLS[name](folder)


@pytest.mark.parametrize(
    "name", ["all_reduce", *(pytest.param(name, marks=pytest.mark.long) for name in list(CALLS)[1:])]
)
def test_a_backward_pass_on_one_rank(name: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        spawn(_one_more_backward_pass, name, tmp_path)
    place = "diagnostics/test_mismatched_places.py:"
    text = str(caught.value)
    assert f"(rank 0: {name} at {place}" in text and f"; rank 1: backward at {place}" in text
    assert "idist.compare_calls()" not in text  # there is nothing more that it could show


def _twice(local_rank: int) -> list[str]:
    """The ranks go on after a mismatch, and the next one has its own places."""
    said = []
    for shift in range(2):
        try:
            idist.barrier() if idist.get_rank() == shift else idist.all_reduce(1)
        except idist.CollectiveMismatchError as error:
            said.append(str(error))
    assert idist.all_reduce(1) == 2
    return said


def test_one_mismatch_after_another() -> None:
    first, second = spawn(_twice)
    assert first == second
    assert "rank 0: barrier at" in first[0] and "rank 1: all_reduce at" in first[0]
    assert "rank 0: all_reduce at" in first[1] and "rank 1: barrier at" in first[1]


def _compares_alone(local_rank: int) -> str:
    if idist.get_rank() == 0:
        idist.compare_calls()
    with pytest.raises(idist.CollectiveMismatchError) as caught:
        idist.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_rank_that_compares_alone() -> None:
    """It compares the end of its context too, which is named: no user's line is there."""
    with pytest.raises(idist.RankFailedError) as caught:
        spawn(_compares_alone)
    text = str(caught.value)
    assert "Rank 1 did not come to a comparison of compare_calls() at the end of the context" in text


def _compares_alone_until_the_end(local_rank: int) -> str:
    said = _compares_alone(local_rank)
    idist.compare_calls(verify=False)
    return said


def test_a_rank_that_does_not_compare() -> None:
    first, second = spawn(_compares_alone_until_the_end)
    assert first == second
    assert "(a comparison of compare_calls()); rank 1: all_reduce at" in first
    assert "(SUM torch.float32 (3,))" in first
