"""Faults on purpose, in the contexts of ``spawn``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ignite_dist as idist
from ignite_dist.testing import faults
from on_ranks import on_ranks


def _killed(_: int, folder: Path) -> int:
    """Rank 1 dies in the first attempt."""
    if idist.restart_count() == 0:
        with faults.kill(rank=1, at="all_reduce", call=3):
            for number in range(5):
                idist.all_reduce(1)
                idist.barrier()
                (folder / f"{idist.get_rank()}-{number}").touch()
    return int(idist.all_reduce(1))


def test_a_rank_is_killed_at_its_third_call(tmp_path: Path) -> None:
    results = idist.spawn("gloo", _killed, (tmp_path,), nproc_per_node=2, max_restarts=1)
    assert results == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _killed, (tmp_path,), nproc_per_node=2)
    assert caught.value.rank == 1 and caught.value.error_type == "SIGKILL"


def _raised(_: int) -> list[str]:
    errors = []
    with faults.raise_(OSError("disk full"), rank=1, at="any", call=2):
        idist.barrier()
        try:
            if idist.get_rank() == 1:
                idist.all_gather(1)
        except OSError as error:
            errors.append(str(error))
        idist.barrier()
    idist.all_reduce(torch.ones(3))
    return errors


def test_a_rank_raises_and_the_block_ends_the_fault() -> None:
    assert on_ranks(_raised) == [[], ["disk full"]]


def _delayed(_: int) -> float:
    idist.barrier()
    began = time.monotonic()
    with faults.delay(0.5, rank=1, at="barrier"):
        idist.barrier()
    return time.monotonic() - began


def test_a_rank_is_late() -> None:
    assert on_ranks(_delayed)[1] >= 0.5


def _disconnected(_: int) -> bool:
    idist.barrier()
    with faults.disconnect(rank=1, at="all_reduce"), pytest.raises(RuntimeError):
        for _ in range(3):
            idist.all_reduce(torch.ones(3))
    return True


def test_a_rank_loses_its_connections() -> None:
    assert on_ranks(_disconnected) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1, "at": "barrier"}, "one of the 1 ranks"),
        ({"rank": 0, "at": "get_rank"}, "'get_rank'"),
        ({"rank": 0, "at": "barrier", "call": 0}, "got 0"),
        ({"rank": True, "at": "barrier"}, "got True"),
    ],
)
def test_wrong_arguments_of_a_fault(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message), faults.kill(**arguments):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError):
        faults.raise_("text", rank=0, at="barrier")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        faults.delay(-1, rank=0, at="barrier")
