"""What torchrun shows of a job that failed, and how soon: the rank that failed first, and its traceback."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

import ignite_dist as idist
from helpers import loopback, plain_environ, run_python, write_script
from ignite_dist.workers import failures, torchelastic

SCRIPT = """
    import os
    import signal
    import sys

    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    import ignite_dist as idist

    way, failing = sys.argv[1], int(sys.argv[2])

    @idist.one_rank_only(rank=failing, with_barrier=True)
    def read_data():
        raise LookupError("there is no data")

    @record
    def recorded():
        raise LookupError("there is no data")

    def train():
        idist.barrier()
        if way == "in-one-rank-only":
            read_data()
        if idist.get_rank() == failing:
            if way == "exits":
                sys.exit(3)
            if way == "is-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "leaves":
                os._exit(0)
            if way == "is-recorded":
                try:
                    recorded()
                except LookupError:
                    raise ValueError("a worse one")
            raise LookupError("there is no data")
        idist.all_reduce(torch.ones(2))

    def by_hand():
        idist.initialize("gloo")
        try:
            train()
        finally:
            idist.finalize()

    if way == "by-hand":
        by_hand()
    elif way == "under-record":
        record(by_hand)()
    else:
        with idist.Parallel("gloo") as parallel:
            parallel.run(lambda local_rank: train())
"""


class Summary(NamedTuple):
    """torchrun's own words at the end."""

    root_rank: int
    root_cause: str
    others: str


def summary_of(folder: Path, way: str, failing: int) -> Summary:
    script = write_script(folder, SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environ = plain_environ(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **loopback())
    ended = run_python(*launcher, script, way, failing, env=environ)
    assert ended.returncode == 1, ended.stdout
    found = re.search(r"^Failures:\n(.*)^Root Cause .*?:\n(.*)^===", ended.stdout, re.MULTILINE | re.DOTALL)
    assert found is not None, ended.stdout
    rank = re.search(r"^  rank +: (\d)", found[2], re.MULTILINE)
    assert rank is not None, ended.stdout
    return Summary(int(rank[1]), found[2], found[1])


# How rank `failing` comes to its end, the rank that is to be named, and what is shown of it.
WAYS: list[tuple[str, int, int, list[str]]] = [
    ("raises", 0, 0, ["in train", "LookupError: there is no data"]),
    ("raises", 1, 1, ["in train", "LookupError: there is no data"]),
    ("exits", 1, 1, ["exitcode  : 3", "in train", "SystemExit: 3"]),
    ("leaves", 0, 1, ["in all_reduce", "by peer"]),  # with exit code 0: no rank but the other has failed
    ("in-one-rank-only", 0, 0, ["in read_data", "LookupError: there is no data"]),
    ("in-one-rank-only", 1, 1, ["in read_data", "LookupError: there is no data"]),
    ("is-killed", 0, 0, ["Signal 9 (SIGKILL)"]),
    ("is-killed", 1, 1, ["Signal 9 (SIGKILL)"]),
    ("by-hand", 1, 1, ["in train", "LookupError: there is no data"]),
    ("under-record", 1, 1, ["in by_hand", "LookupError: there is no data"]),
    ("is-recorded", 1, 1, ["in recorded", "LookupError: there is no data"]),
]


@pytest.mark.long
@pytest.mark.stress
@pytest.mark.timeout(600)
def test_the_rank_that_failed_first_is_the_root_cause(
    tmp_path: Path, repetitions: Callable[[int, int], int], tally: Callable[[str], None]
) -> None:
    for number in range(repetitions(3, 2 * len(WAYS))):
        way, failing, root, shown = WAYS[number % len(WAYS)]
        summary = summary_of(tmp_path, way, failing)
        assert summary.root_rank == root, (way, summary)
        assert all(text in summary.root_cause for text in shown), (way, summary)
        assert "To enable traceback see" not in summary.root_cause + summary.others, (way, summary)
        tally(f"torchrun's summary: a rank {way}")


# --- the record, without torchrun --------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that torchrun would read."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def _end_with(error: BaseException) -> None:
    with suppress(type(error)), idist.Parallel("gloo"):
        raise error


def _finalize_while_handling(error: BaseException) -> None:
    idist.initialize("gloo")
    try:
        raise error
    except BaseException:
        idist.finalize()


@pytest.mark.parametrize("end", [_end_with, _finalize_while_handling])
def test_it_is_what_torch_would_have_written(path: Path, end: Callable[[BaseException], None]) -> None:
    end(LookupError("there is no data"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert abs(failure.timestamp - time.time()) < 60
    shown = ChildFailedError("script.py", {0: failure}).format_msg()
    assert "LookupError: there is no data" in shown and f"in {end.__name__}" in shown


def test_what_is_there_stays(path: Path) -> None:
    path.write_text("what the user has recorded")
    _end_with(LookupError("there is no data"))
    assert path.read_text() == "what the user has recorded"


def test_record_may_come_after_it(path: Path) -> None:
    @record
    def main() -> None:
        with idist.Parallel("gloo"):
            raise LookupError("there is no data")

    with pytest.raises(LookupError):
        main()
    assert "in main" in json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]


def test_a_consequence_is_recorded_when_nobody_has_ended_the_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torchelastic, "_SECONDS_UNTIL_ENDED", 0.2)
    started = time.monotonic()
    _end_with(idist.RankFailedError(1, "LookupError", "its traceback"))
    assert time.monotonic() - started >= 0.2
    assert "Another rank has failed or is gone" in caplog.text
    assert "Rank 1 raised LookupError" in path.read_text()


def test_what_spawn_raises_is_no_consequence() -> None:
    spawned = idist.WorkerRaisedError(1, "LookupError", "", "", 1, 2)
    assert not failures.is_consequence(spawned)
    assert failures.is_consequence(idist.RankFailedError(1, "LookupError", ""))
    assert not failures.is_consequence(RuntimeError("Timed out waiting 1800000ms for recv operation"))


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None)], ids=repr)
def test_an_end_without_error_is_not_recorded(path: Path, error: SystemExit) -> None:
    _end_with(error)
    assert not path.exists()
    _end_with(SystemExit("no data"))
    assert "SystemExit: no data" in path.read_text()


def test_without_torchrun_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchelastic, "_SECONDS_UNTIL_ENDED", 600.0)  # more than the test's timeout
    _end_with(idist.RankFailedError(1, "LookupError", ""))


def test_nothing_of_it_is_imported_before_there_is_an_error() -> None:
    lines = (
        "import sys, ignite_dist",
        "with ignite_dist.Parallel('gloo'): pass",
        "assert 'torch.distributed.elastic.multiprocessing.errors' not in sys.modules",
    )
    ended: Any = run_python("-c", "\n".join(lines))
    assert ended.returncode == 0, ended.stdout
