"""However the ranks and nodes of a job end, there is a report of it, and never an error of our own."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import ignite_dist as idist
from ignite_dist.workers import failures
from ignite_dist.workers.failures import FailedRank, Failure, error_of, failure_of, silent_failure
from ignite_dist.workers.supervisor import nodes


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Named(RuntimeError):
    def __init__(self, first: int, second: int) -> None:  # cannot be unpickled
        super().__init__("of two arguments")
        self.held = lambda: first + second  # nor pickled


def _raised_from(cause: BaseException) -> BaseException:
    try:
        raise KeyError("made of it") from cause
    except KeyError as error:
        return error


def _syntax_error() -> BaseException:
    error = SyntaxError("odd")
    error.text, error.lineno, error.offset = 3, "x", -7  # type: ignore[assignment]
    return error


def _with_notes() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = 7  # type: ignore[attr-defined]
    return error


def _of_itself() -> BaseException:
    error = RuntimeError("in a circle")
    error.__context__ = ValueError("other")
    error.__context__.__context__ = error
    return error


GLOO = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7"
SILENT_HOST = "[/x/third_party/gloo/gloo/x.cc:1] [127.0.0.1]:7: Connection timed out"
ERRORS: list[BaseException] = [
    *(ValueError("boom"), ValueError(), KeyboardInterrupt(), MemoryError(), Unprintable(), Named(1, 2)),
    *(RuntimeError(GLOO), RuntimeError(SILENT_HOST), dist.DistNetworkError("broken pipe")),
    *(_raised_from(RuntimeError(GLOO)), _raised_from(Unprintable()), _of_itself()),
    *(_syntax_error(), _with_notes(), ValueError("\ud800 \x00 \n\n"), ValueError("x" * 300_000)),
    *(idist.RankFailedError(1, "ValueError", ""), idist.MissingRanksError("rank 1 did not come", [1])),
    idist.HostLostError("host", "10.0.0.1"),
    RuntimeError(Unprintable()),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_whatever_is_raised_can_be_told(number: int) -> None:
    """In the worker: no exception, however odd, keeps it from telling what it died of."""
    failure = failure_of(ERRORS[number])
    assert failure.error_type == type(ERRORS[number]).__name__ or failure.error_type == "HostLostError"
    assert failure.traceback
    assert pickle.loads(pickle.dumps(failure)) == failure

    def call(_: int) -> Any:
        raise ERRORS[number]

    assert isinstance(failures.outcome_of(call, 0), Failure)


@pytest.mark.parametrize("code", [None, 0, 3, -1, 256, 10**30, True, False, "text", 2.5, (), Unprintable()])
def test_whatever_it_exits_with_can_be_told(code: Any) -> None:
    def call(_: int) -> Any:
        raise SystemExit(code)

    failure = failures.outcome_of(call, 0)
    assert isinstance(failure, Failure) and failure.exit_code is not None and 0 <= failure.exit_code < 256


TOLD = [failure_of(error) for error in ERRORS]


def _exit(code: Any) -> Failure:
    def call(_: int) -> Any:
        raise SystemExit(code)

    failure = failures.outcome_of(call, 0)
    assert isinstance(failure, Failure)
    return failure


SIGNALS = [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGTERM, -34, -64, -65, -200]
FAULTS = ["", "\n\n", "Fatal Python error\n\nThread 0x1\n  File x in f", "Extension modules: a"]
ENDS = st.one_of(
    st.sampled_from(TOLD),
    st.builds(_exit, st.sampled_from([None, 0, 1, 3, 256, "text", ""])),
    st.builds(silent_failure, st.sampled_from([0, 1, 255, *SIGNALS]), st.sampled_from(FAULTS)),
)
TIMES = st.sampled_from([0.0, 1.0, 1.0, 2.0, 1e9])


@st.composite
def failed_ranks(draw: st.DrawFn) -> list[FailedRank]:
    """Some of the ranks of a job, each with its end; replicas of XLA share a process."""
    found = []
    for rank in draw(st.lists(st.integers(0, 7), max_size=6, unique=True)):
        failure = Failure(**{**vars(draw(ENDS)), "time": draw(TIMES)})
        pid = draw(st.sampled_from([0, 100, 100 + rank]))
        found.append(FailedRank(rank, rank % 4, pid, f"host{rank // 4}", failure, draw(st.booleans())))
    return found


def _is_a_report(error: idist.RankFailedError, failed: list[FailedRank]) -> None:
    assert isinstance(error, idist.RankFailedError)
    assert str(error).strip() and error.rank >= 0
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.rank == error.rank
    real = [one for one in failed if not one.failure.is_exit_0]
    own = [one for one in real if not one.failure.is_consequence]
    if own and error.error_type != "HostLostError":
        assert error.rank in [one.rank for one in own], "a consequence hides the cause"


@settings(deadline=None, max_examples=400)
@given(failed=failed_ranks())
def test_every_end_of_ranks_has_a_report(failed: list[FailedRank]) -> None:
    failures.is_cause_known(failed)
    if failed:
        _is_a_report(error_of(failed), failed)


@pytest.mark.long
@settings(deadline=None, max_examples=400)
@given(
    failed=failed_ranks(),
    lost=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["it was ended", "", "timed out"])), max_size=3
    ),
    is_done=st.booleans(),
)
def test_every_end_of_ranks_and_nodes_has_a_report(
    failed: list[FailedRank], lost: list[tuple[int, str]], is_done: bool
) -> None:
    """As the launcher of each node sees it: with its own ranks' ends, and what others have told."""
    job = nodes.assumed_nodes(0, 2, 4)
    for one in failed:
        if one.rank >= 4:
            told = {**one._asdict(), "failure": vars(one.failure)}
            job._record({"node": 1, "failed": told}, 1)
    for node, why in lost:
        job._record({"node": node, "lost": why}, 1)
    if is_done:
        job._record({"node": 1, "done": True}, 1)
    here = [one for one in failed if one.rank < 4]
    everybody = [*here, *job.failed_ranks()]
    has_failed = job.has_failure() or any(not one.failure.is_exit_0 for one in here)
    if has_failed:
        _is_a_report(job.error_of(everybody), everybody)
