"""``max_restarts``: after a failure all workers start again, unless that would fail in the same way."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models.xla.launcher import XlaLauncher
from ignite_dist.launcher import restarts


def _attempt(folder: Path) -> int:
    """Records that this rank has begun an attempt; returns its number."""
    count = idist.restart_count()
    (folder / f"attempt {count} of rank {idist.get_rank()}").touch()
    return count


def _attempts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _dies_twice(local_rank: int, folder: Path, how: str) -> tuple[int, int]:
    count = _attempt(folder)
    idist.barrier()
    if count < 2 and local_rank == 1:
        if how == "raises":
            raise OSError(f"attempt {count}")
        os.kill(os.getpid(), signal.SIGKILL)
    return count, idist.all_reduce(1)


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_all_workers_start_again(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ignite_dist"):
        found = idist.spawn("gloo", _dies_twice, (tmp_path, how), nproc_per_node=2, max_restarts=3)
    assert found == [(2, 2), (2, 2)]
    assert _attempts(tmp_path) == [f"attempt {count} of rank {rank}" for count in range(3) for rank in (0, 1)]
    told = [record.getMessage() for record in caplog.records if "Restart" in record.getMessage()]
    assert len(told) == 2 and told[0].startswith("Restart 1 of at most 3") and "Rank 1" in told[0]
    assert idist.restart_count() == 0, "the launcher itself is in no attempt"


def test_the_last_attempt_raises(tmp_path: Path) -> None:
    parallel = idist.Parallel("gloo", nproc_per_node=2, max_restarts=1)
    with parallel, pytest.raises(idist.RankFailedError, match="attempt 1"):
        parallel.run(_dies_twice, tmp_path, "raises")


def _cannot_get_better(local_rank: int, folder: Path, what: str) -> Any:
    _attempt(folder)
    if what == "an import":
        import no_such_module_anywhere  # noqa: F401
    elif what == "a call":
        len(3)  # type: ignore[arg-type]
    elif what == "a result":
        return threading.Lock()
    elif what == "a call after a collective":
        idist.all_reduce(torch.ones(1))
        len(3)  # type: ignore[arg-type]
    return None


@pytest.mark.parametrize(
    ("what", "attempts"), [("an import", 1), ("a call", 1), ("a result", 1), ("a call after a collective", 2)]
)
def test_an_error_that_would_come_again_is_raised_at_once(what: str, attempts: int, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn("gloo", _cannot_get_better, (tmp_path, what), nproc_per_node=1, max_restarts=1)
    assert len(_attempts(tmp_path)) == attempts
    assert info.value.is_permanent is (attempts == 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_restarts": -1}, "an int >= 0"),
        ({"max_restarts": 1.0}, "an int >= 0"),
        ({"max_restarts": True}, "an int >= 0"),
        ({"max_restarts": 1, "join": False}, "join=True"),
        (
            {"max_restarts": 1, "nnodes": 2, "node_rank": 0, "init_method": "file:///meet"},
            "needs master_addr and master_port",
        ),
    ],
)
def test_wrong_arguments(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        idist.spawn("gloo", _attempt, nproc_per_node=1, **options)
    with pytest.raises(ValueError, match=text):
        idist.Parallel("gloo", nproc_per_node=1, **options)


def test_a_launcher_that_does_not_talk_to_other_nodes() -> None:
    with pytest.raises(ValueError, match="max_restarts is for one machine"):
        restarts.check_max_restarts(XlaLauncher, 1, {"nnodes": 2})
    restarts.check_max_restarts(XlaLauncher, 1, {"nnodes": 1})


def _dies_in_the_second_context(local_rank: int, folder: Path, method: str) -> int:
    count = _attempt(folder)
    idist.finalize()
    idist.initialize("gloo", init_method=method, rank=local_rank, world_size=2)
    idist.barrier()
    if count < 2 and local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return idist.all_reduce(1)


@pytest.mark.parametrize("context", ["first", "second"])
def test_attempts_that_meet_at_a_file(context: str, tmp_path: Path) -> None:
    folder, method = tmp_path / "attempts", f"file://{tmp_path}/meeting"
    folder.mkdir()
    for name in ("meeting.2026-notes", "meeting.txt"):  # the user's own files
        (tmp_path / name).touch()
    args, function = (folder, "is killed"), _dies_twice
    if context == "second":
        args, function = (folder, method), _dies_in_the_second_context  # type: ignore[assignment]
    found = idist.spawn("gloo", function, args, nproc_per_node=2, max_restarts=2, init_method=method)
    assert found == [2 if context == "second" else (2, 2)] * 2
    assert len(_attempts(folder)) == 6
    left = sorted(path.name for path in tmp_path.glob("meeting*"))
    assert left == ["meeting.2026-notes", "meeting.txt"], "nothing that a later job would read"
