"""What a rank says when the timeout passes: the call, the time, where the late ranks are, and the keyword."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist

SECONDS = 120.0
# Of the collectives. The ranks must also meet within this time, on a busy machine too.
TIMEOUT = timedelta(seconds=6)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _meet(folder: Path) -> None:
    """Return when both ranks have started."""
    (folder / os.environ["RANK"]).touch()
    for rank in ("0", "1"):
        _wait_for(folder / rank)


def _first() -> None:
    with idist.one_rank_first(rank=1):
        pass


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: idist.all_reduce(torch.ones(2)),
    "all_gather": lambda: idist.all_gather({"of any": "kind"}),
    "barrier": idist.barrier,
    "one_rank_first": _first,
    "begun": lambda: idist.all_reduce(torch.ones(2), async_op=True).wait(),
}


def _is_late(folder: Path, name: str, is_first: bool) -> str:
    _meet(folder)
    idist.initialize("gloo", timeout=TIMEOUT)
    if not is_first:
        idist.barrier()
    if idist.get_rank() == 1:
        _wait_for(folder / "given up")  # the late rank is here
        return ""
    try:
        CALLS[name]()
    except idist.MissingRanksError as error:
        assert error.ranks == [1]
        return str(error)
    finally:
        (folder / "given up").touch()
    return "nothing was raised"


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "one_rank_first",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("all_gather", "barrier", "begun")),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
def test_it_names_the_call_the_late_rank_and_the_keyword(name: str, is_first: bool, tmp_path: Path) -> None:
    said = helpers.end_of_ranks(_is_late, tmp_path, name, is_first)[0]
    assert said.error == ""
    text, call = str(said.result), "all_reduce begun" if name == "begun" else name
    assert text.startswith(f"Rank 1 did not come to {call} at diagnostics/test_timeouts.py:"), said
    assert ", where rank 0 has waited for 6 s, its timeout. " in text
    assert (
        "pass timeout= to initialize, spawn or Parallel.\nRank 1 is at diagnostics/test_timeouts.py:" in text
    )
    assert "in _wait_for\n" in text


def _gives_up(local_rank: int, folder: Path) -> None:
    idist.barrier()
    try:
        with idist.one_rank_first():
            _wait_for(folder / "given up")
    finally:
        (folder / "given up").touch()


def test_a_rank_in_its_block_is_not_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _gives_up, (tmp_path,), nproc_per_node=2, timeout=TIMEOUT)
    text = (
        "Rank 0 is still in the block of one_rank_first, for which rank 1 has waited for 6 s, its timeout, "
    )
    assert text + "at one_rank_first at diagnostics/test_timeouts.py:" in str(caught.value)


def _forward_pass() -> Callable[[], object]:
    model = idist.auto_model(torch.nn.Linear(2, 2), strategy="fsdp")
    return lambda: model(torch.ones(1, 2))


TORCHS_CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "all_reduce": lambda: lambda: dist.all_reduce(torch.ones(2)),
    "forward": _forward_pass,
}


def _in_torchs_own_call(local_rank: int, folder: Path, name: str) -> None:
    call = TORCHS_CALLS[name]()
    idist.barrier()
    if idist.get_rank() == 1:
        _wait_for(folder / "given up")
    else:
        try:
            call()
        finally:
            (folder / "given up").touch()


@pytest.mark.parametrize("name", TORCHS_CALLS)
def test_a_worker_that_waits_in_torchs_own_call_says_it_too(name: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _in_torchs_own_call, (tmp_path, name), nproc_per_node=2, timeout=TIMEOUT)
    assert f"Rank 1 did not come to {name} at diagnostics/test_timeouts.py:" in str(caught.value)
    assert "pass timeout= to initialize, spawn or Parallel" in str(caught.value)


def _alone_in_a_group(local_rank: int, folder: Path, collective: bool) -> str:
    if local_rank != 0:
        _wait_for(folder / "raised")
        return ""
    try:
        with pytest.raises(idist.MissingRanksError) as raised:
            idist.all_reduce(1, group=[0, 1]) if collective else idist.new_group([0, 1], backend="gloo")
    finally:
        (folder / "raised").touch()
    return str(raised.value)


@pytest.mark.parametrize("collective", [False, True])
def test_a_group_that_only_some_of_its_ranks_make(collective: bool, tmp_path: Path) -> None:
    found = idist.spawn("gloo", _alone_in_a_group, (tmp_path, collective), nproc_per_node=3, timeout=TIMEOUT)
    assert "The group of ranks 0-1 is not complete: some of them have not made it" in found[0]


def _in_another_call(local_rank: int) -> str:
    """Ranks 0 and 1 wait for rank 2, which waits in a call of another group."""
    pair = idist.new_group([1, 2])
    idist.barrier()
    with pytest.raises(RuntimeError) as raised:
        idist.barrier(pair) if idist.get_rank() == 2 else idist.all_reduce(torch.ones(1))
    return str(raised.value)


def test_the_rank_that_waits_in_another_call_is_named() -> None:
    """The first rank whose timeout passes names it. The other one may get the end of the first."""
    found = idist.spawn("gloo", _in_another_call, nproc_per_node=3, timeout=TIMEOUT)
    named = [text for text in found if text.startswith("Rank 2 did not come to all_reduce")]
    assert named and not any(text.startswith("Ranks ") for text in found), found
