"""Functions of several collectives, interrupted on one rank after the first one: the ranks go on in step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import ignite_dist as idist
from waiting import when_waiting

FUNCTIONS = [
    *("one_rank_only", "save_checkpoint", "load_checkpoint", "latest_checkpoint", "gather_in_order"),
    *("load_model_state", "load_optimizer_state", "auto_optim", "auto_dataloader", "average_parameters"),
    *("raise_together", "any_true", "all_reduce of a dict"),
]


def _calls(folder: str) -> dict[str, Callable[[], Any]]:
    model = nn.Linear(2, 2)
    wrapped = idist.auto_model(nn.Linear(2, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    loader = idist.auto_dataloader(list(range(8)), batch_size=4, exact=True)
    values = torch.cat(list(loader))
    idist.save_checkpoint(f"{folder}/there.pt", model=wrapped)

    def fails() -> None:
        with idist.raise_together():
            pass

    return {
        "one_rank_only": lambda: idist.one_rank_only(broadcast=True)(lambda: "folder")(),
        "save_checkpoint": lambda: idist.save_checkpoint(f"{folder}/new.pt", model=wrapped),
        "load_checkpoint": lambda: idist.load_checkpoint(f"{folder}/there.pt", model=wrapped),
        "latest_checkpoint": lambda: idist.latest_checkpoint(folder),
        "gather_in_order": lambda: idist.gather_in_order(values, loader),
        "load_model_state": lambda: idist.load_model_state(wrapped, idist.model_state(wrapped)),
        "load_optimizer_state": lambda: idist.load_optimizer_state(optimizer, optimizer.state_dict()),
        "auto_optim": lambda: idist.auto_optim(torch.optim.SGD(wrapped.parameters(), lr=0.1)),
        "auto_dataloader": lambda: idist.auto_dataloader(list(range(8)), batch_size=4, shuffle=True),
        "average_parameters": lambda: idist.average_parameters(model),
        "raise_together": fails,
        "any_true": lambda: idist.any_true(False),
        "all_reduce of a dict": lambda: idist.all_reduce({"a": 1, "b": torch.ones(3)}),
    }


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt


def _is_interrupted(rank: int, name: str, folder: str, is_interrupted: Any) -> tuple[str, list[int]]:
    call = _calls(folder)[name]
    idist.barrier()
    outcome = "returned"
    try:
        if rank == 1:
            signal.signal(signal.SIGUSR1, _raise)
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        else:
            is_interrupted.wait()
        call()
    except (KeyboardInterrupt, idist.CollectiveMismatchError) as error:
        outcome = type(error).__name__
    if rank == 1:
        is_interrupted.set()
    return outcome, [idist.all_reduce(step) for step in range(4)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_next_call_is_the_next_call_of_the_group(name: str, tmp_path: Any) -> None:
    args = name, str(tmp_path), mp.get_context("spawn").Event()
    results = idist.spawn("gloo", _is_interrupted, args, nproc_per_node=3)
    assert results[1][0] == "KeyboardInterrupt"
    assert {outcome for outcome, _ in results} <= {"returned", "CollectiveMismatchError", "KeyboardInterrupt"}
    assert [sums for _, sums in results] == [[0, 3, 6, 9]] * 3
