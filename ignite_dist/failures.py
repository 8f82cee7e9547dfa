"""What a worker died of: told by the worker, and made into one error in the launcher."""

from __future__ import annotations

import os
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from ignite_dist import wire
from ignite_dist.errors import RankFailedError, WorkerExitedError, WorkerRaisedError

__all__ = ["Failed", "Failure", "error_of", "failure_of", "outcome_of", "users_part"]

_HERE = os.path.dirname(__file__)


@dataclass(frozen=True)
class Failure:
    """What a worker died of, as it tells the launcher.

    Attributes:
        time: when, in seconds of ``time.time()``.
        error_type: the name of the exception's class; this and the next two are empty after a silent death.
        summary: the last lines of the traceback, without where.
        traceback: all of it.
        exit_code: of a worker that ended rather than raised.
        is_consequence: whether it says itself that another rank failed before.
    """

    time: float
    error_type: str
    summary: str
    traceback: str
    exit_code: int | None = None
    is_consequence: bool = False


class Failed(NamedTuple):
    """A failure, and where it happened: ``pid`` is 0 if nobody knows.

    ``started`` is whether the worker could begin at all.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    failure: Failure
    started: bool = True


# --- in the worker -----------------------------------------------------------------------------------


def outcome_of(sent: bytes | Callable[..., Any], local_rank: int) -> bytes | Failure:
    """What a worker sends home: what the call that it was ``sent`` returns, as bytes, or a failure."""
    try:
        call = wire.decode(sent) if isinstance(sent, bytes) else sent
        return wire.encode(call(local_rank))
    except SystemExit as exit_:
        code = exit_.code & 0xFF if isinstance(exit_.code, int) else int(exit_.code is not None)
        return failure_of(exit_, exit_code=code) if code else wire.encode(None)
    except BaseException as error:
        return failure_of(error)


def failure_of(error: BaseException, exit_code: int | None = None) -> Failure:
    """What the launcher is told of an exception."""
    text = "".join(traceback.format_exception(type(error), error, users_part(error.__traceback__)))
    summary = "".join(traceback.format_exception_only(error)).strip()  # survives a __str__ that raises
    return Failure(
        time.time(), type(error).__name__, summary, text, exit_code, isinstance(error, RankFailedError)
    )


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames through which this package came to the user's function."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_HERE + os.sep):
        rest = rest.tb_next
    return rest or trace


# --- in the launcher ---------------------------------------------------------------------------------


def error_of(failed: Sequence[Failed]) -> RankFailedError:
    """The error of a launch of which some workers failed: it is about the one that failed first."""
    first, *others = sorted(failed, key=lambda one: (one.failure.is_consequence, one.failure.time))
    failure = first.failure
    names = str(first.rank)
    if (
        first.pid and not failure.error_type
    ):  # replicas of XLA share a process: by whose doing it ended, who knows
        names = " or ".join(str(one.rank) for one in failed if one.pid == first.pid)
    place = f"Rank {names}" + (f" (pid {first.pid} on {first.host})" if first.pid else "")
    after = "".join(
        f"\nRank {other.rank} failed after it: {_first_line(other.failure.summary)}"
        for other in others
        if other.failure.summary
    )
    if failure.exit_code is None:
        message = f"{place} failed first. Its traceback:\n\n{failure.traceback}{after}"
        return WorkerRaisedError(
            first.rank, failure.error_type, failure.traceback, message, first.local_rank, first.pid
        )
    signal_name = _signal_name(-failure.exit_code) if failure.exit_code < 0 else None
    ending = f"was ended by {signal_name}" if signal_name else f"ended with exit code {failure.exit_code}"
    ending += f" ({failure.summary})" if failure.summary else ""
    hint = ""
    if not first.started:
        hint = (
            " before it could begin; its own output says why. Workers import the script, so it has to start "
            "its work under if __name__ == '__main__'"
        )
    message = f"{place} {ending}{hint}.{after}"
    return WorkerExitedError(first.rank, message, first.local_rank, first.pid, failure.exit_code, signal_name)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _first_line(text: str) -> str:
    first = text.strip().partition("\n")[0].removesuffix("; its traceback:")
    return textwrap.shorten(first, 200, placeholder=" ...")
