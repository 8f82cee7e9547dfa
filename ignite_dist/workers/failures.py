"""Failures of workers: the report that a worker sends, and the error that the launcher raises."""

from __future__ import annotations

import os
import re
import runpy
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ignite_dist.environments.rendezvous import connections
from ignite_dist.errors import (
    CollectiveMismatchError,
    HostLostError,
    LaunchError,
    MissingRanksError,
    RankFailedError,
    WorkerExitedError,
    WorkerRaisedError,
)
from ignite_dist.internals import limits
from ignite_dist.internals.call_sites import is_library_path, is_package_path, site_of_place
from ignite_dist.values import serialization
from ignite_dist.values.serialization import Payload
from ignite_dist.workers.sent_calls import EncodedCall
from ignite_dist.workers.sent_exceptions import decode_exception, encode_exception
from ignite_dist.workers.supervisor.out_of_memory import SIGKILL_HINT

# Longer texts are shortened to this many characters. A message may contain a whole tensor.
_LONGEST_TEXT = 100_000
# The launcher may detect a worker's death this much later, because the fork server reports the death.
_DETECTION_SECONDS = 1.0
_LONG_BITS = 64  # of a long in C, to which Python converts an exit status
_EXIT_WITHOUT_TEXT = re.compile(r"SystemExit(: (-?\d+|None|True|False))?")
_OUT_OF_STEP = (CollectiveMismatchError.__name__, MissingRanksError.__name__)


@dataclass(frozen=True)
class Failure:
    """The reason why a worker failed.

    Attributes:
        time: time of the failure, as ``time.time()``.
        error_type: name of the exception's class; empty if the worker died without a report.
        summary: type and message of the exception; empty if the worker died without a report.
        traceback: the whole traceback.
        exit_code: the process's exit code; None if the worker raised an exception other than SystemExit.
        is_consequence: True if the exception says that another rank failed or is gone.
        is_permanent: True if another attempt would fail in the same way.
        exception: the encoded exception; None if the worker died without a report, or on another machine.
        site: where the user's code was, for example ``"folder/train.py:12"``; empty if unknown.
        has_cause: True if the exception was raised ``from`` another one.
        about_sigkill: what the worker's launcher knows about a SIGKILL, see :func:`sigkill_reason`.
    """

    time: float
    error_type: str
    summary: str
    traceback: str
    exit_code: int | None = None
    is_consequence: bool = False
    is_permanent: bool = False
    exception: bytes | None = None
    site: str = ""
    has_cause: bool = False
    about_sigkill: str = SIGKILL_HINT

    @property
    def is_exit_0(self) -> bool:
        """True after ``sys.exit(0)``. This is a failure only if other ranks failed because of it."""
        return self.exit_code == 0 and bool(self.error_type)

    @property
    def last_output(self) -> str:
        """What Python shows at the end of such a process: the traceback, or the text of ``sys.exit("text")``.

        A text that is a number is not shown: the summary does not tell it from a status.
        """
        if self.exit_code is None:
            return self.traceback
        text = self.summary.partition(": ")[2]
        return "" if _EXIT_WITHOUT_TEXT.fullmatch(f"SystemExit: {text}") or not text else f"{text}\n"

    @property
    def is_end_by_signal(self) -> bool:
        """True if the worker ended as one does after Ctrl-C or SIGTERM. Other errors are of its clean-up."""
        if self.error_type == KeyboardInterrupt.__name__:
            return not self.has_cause
        if self.error_type == SystemExit.__name__:
            return _EXIT_WITHOUT_TEXT.fullmatch(self.summary) is not None
        if self.error_type:
            return False
        return self.exit_code in (-signal.SIGINT, -signal.SIGTERM)

    @property
    def is_of_clean_up(self) -> bool:
        """True if the worker raised an error of its own. The caller knows that the worker was interrupted."""
        return bool(self.error_type) and not (self.is_end_by_signal or self.is_consequence)

    def is_same_error(self, other: Failure) -> bool:
        """True if both workers raised an error of their own, with the same class and text."""
        is_own = self.exit_code is other.exit_code is None and not (
            self.is_consequence or other.is_consequence
        )
        return is_own and (self.error_type, self.summary) == (other.error_type, other.summary)

    @property
    def is_out_of_step(self) -> bool:
        """True if the worker failed in a call that the other ranks did not make."""
        return self.is_consequence or self.error_type in _OUT_OF_STEP


class FailedRank(NamedTuple):
    """A rank and its failure. ``pid`` is 0 if unknown. ``started`` is False if the rank never reported."""

    rank: int
    local_rank: int
    pid: int
    host: str
    failure: Failure
    started: bool = True


# --- in the worker -----------------------------------------------------------------------------------


def outcome_of(sent_call: EncodedCall | Callable[..., Any], local_rank: int) -> Payload | Failure:
    """Decode ``sent_call`` and make the call. Returns the encoded result, or the failure."""
    try:
        try:
            call = _decode_call(sent_call, local_rank) if isinstance(sent_call, EncodedCall) else sent_call
        except Exception as error:
            return failure_of(error, is_permanent=True)
        result = call(local_rank)
        return result if isinstance(result, Failure) else _encode_result(result)
    except SystemExit as exit_:
        return failure_of(exit_, exit_code=_status_of(exit_.code))
    except BaseException as error:
        return failure_of(error)


def _status_of(code: Any) -> int:
    """The exit status that Python makes of ``sys.exit(code)``."""
    if not isinstance(code, int):
        return int(code is not None)
    return code & 0xFF if code.bit_length() < _LONG_BITS else 0xFF


def _encode_result(result: Any) -> Payload | Failure:
    try:
        return serialization.encode(result)
    except TypeError as error:
        hint = " Return idist.model_state(model)." if isinstance(result, torch.nn.Module) else ""
        message = f"The result of the function cannot be sent to the launcher. {error}{hint}"
        return failure_of(TypeError(message), is_permanent=True)


def _decode_call(sent_call: EncodedCall, local_rank: int) -> Callable[..., Any]:
    try:
        return sent_call.decode(local_rank)
    except AttributeError as error:
        raise LaunchError(
            f"A worker did not find what was sent: {error}. Workers import the script without the "
            "part under `if __name__ == '__main__':`. Define functions and classes above that part."
        ) from None


def failure_of(error: BaseException, exit_code: int | None = None, is_permanent: bool = False) -> Failure:
    """The report of an exception to the launcher."""
    now, has_cause = time.time(), error.__cause__ is not None
    trace, error = error.__traceback__, connections.with_cause(error)
    if error.__cause__ is not None:  # the cause has the traceback
        trace = error.__traceback__
    return Failure(
        now,
        type(error).__name__,
        _cut(connections.last_lines(error).strip()),
        text_of(error, trace),
        exit_code,
        is_consequence(error),
        is_permanent,
        encode_exception(error),
        _users_site(trace),
        has_cause,
    )


def _users_site(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback; empty if there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    places = [(path, line) for path, line in places if not (_is_plumbing(path) or is_library_path(path))]
    return site_of_place(*places[-1]) if places else ""


def text_of(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback as Python prints it, shortened, with fewer frames of this package. Never raises.

    A sentence about the limit of this process follows, if the error is about one.
    """
    trace = user_traceback(trace)
    try:
        formatted = traceback.TracebackException(type(error), error, trace, compact=True)
        if os.environ.get("IGNITE_DIST_DEBUG") != "1":
            _shorten(formatted)
        text = "".join(formatted.format())
    except Exception:  # raised by code of this exception, or of its cause
        where = "".join(traceback.format_tb(trace))
        text = f"Traceback (most recent call last):\n{where}{connections.last_lines(error)}"
    limit = limits.sentences_about_error(error, connections.last_lines(error))
    return _cut(text) + (f"{limit}\n" if limit and limit not in text else "")


def _shorten(formatted: traceback.TracebackException) -> None:
    """Keep the first and the last frame of this package below each frame of the user."""
    kept: list[traceback.FrameSummary] = []
    own: list[int] = []  # where those of this package are, since the last frame of the user
    for frame in formatted.stack:
        if is_package_path(frame.filename):
            if len(own) == 2:
                del kept[own.pop()]
            own.append(len(kept))
        elif not is_library_path(frame.filename):
            own = []
        kept.append(frame)
    formatted.stack[:] = kept
    others = (formatted.__cause__, formatted.__context__, *(getattr(formatted, "exceptions", None) or ()))
    for other in others:
        if other is not None:
            _shorten(other)


def _is_plumbing(path: str) -> bool:
    """True for code of this package and for ``runpy``, which runs the script of ``ignite-dist run``."""
    return is_package_path(path) or path == "<frozen runpy>" or path == runpy.__file__


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts at the user's function, without this package's frames."""
    entry = trace
    while entry is not None and _is_plumbing(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    return entry or trace


def _cut(text: str) -> str:
    num_left_out = len(text) - _LONGEST_TEXT
    if num_left_out <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {num_left_out:,} characters left out ...\n{text[-half:]}"


# Messages of gloo, NCCL and torch's store about a peer that is gone.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset) by peer|connection refused|connection was likely closed|broken pipe"
    r"|remote peer closed|remote process exited|communicator was aborted"
    r"|connection timed out|no route to host|network is unreachable",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """True if ``error``, or an error in its chain, says that another rank failed or is gone.

    An exception group says so if all of its members do.
    """
    return _is_consequence(error, set())


def _is_consequence(error: BaseException, seen: set[int]) -> bool:
    """See :func:`is_consequence`. ``seen`` has the ids of the errors that the search has visited.

    It ends there: if a script raises a member of a group again, the group is the member's context.
    """
    return any(_is_about_other_rank(link, seen) for link in _chain(error, seen))


def _is_about_other_rank(error: BaseException, seen: set[int]) -> bool:
    """True if ``error`` itself says that another rank failed or is gone.

    Never true for an ``OSError``: the user's own connection, to a database for example, may be the cause.
    """
    if isinstance(error, (WorkerRaisedError, WorkerExitedError)):  # about workers that this rank spawned
        return False
    if isinstance(error, (RankFailedError, HostLostError)) or type(error).__name__ == "HorovodInternalError":
        return True
    members = getattr(error, "exceptions", ()) if hasattr(error, "derive") else ()  # of an exception group
    if members:
        return all(_is_consequence(member, set(seen)) for member in members)
    text = connections.last_lines(error)
    is_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in text)
    return is_torch and _LOST_PEER.search(text) is not None


def _chain(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """``error``, its cause, the cause's cause and so on: user code may have wrapped a library's error.

    Ends before an error whose id is in ``seen``. Adds the ids of the others to it.
    """
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        if isinstance(link, (WorkerRaisedError, WorkerExitedError)):  # their causes are of another job
            return
        if isinstance(link, MissingRanksError) and link.__suppress_context__:
            link = link.__cause__  # the connection was closed because of the missing ranks
        else:
            link = link.__cause__ or link.__context__


# --- in the launcher ---------------------------------------------------------------------------------


def silent_failure(exit_code: int, fault: str) -> Failure:
    """The failure of a worker that ended without a report. Its time is the current time.

    Args:
        exit_code: exit code of the process; negative for a signal.
        fault: the fault handler's output; may be empty.
    """
    now = time.time()
    if exit_code < 0 and exit_code != -signal.SIGABRT:
        # A fatal signal is never a reaction to a peer's failure, but peers may report first.
        now -= _DETECTION_SECONDS
    text = _without_library_frames(fault)
    if exit_code == -signal.SIGABRT and (limit := limits.sentences_about("bad_alloc")):
        text = f"{text}\n\n{limit}".strip()  # C++ ends a process that has no memory
    return Failure(now, "", "", text, exit_code)


# One frame in the fault handler's output.
_FAULT_LINE = re.compile(r'File "([^"]+)", line \d+ in ')


def _without_library_frames(fault: str) -> str:
    """The fault handler's output without library threads and the callers of the user's function."""
    blocks = []
    for block in fault.split("\n\n"):
        if block.startswith("Extension modules:"):
            continue
        lines = block.splitlines()
        users = [number for number, line in enumerate(lines) if _is_users_frame(line)]
        if users or block.startswith(("Current thread", "Fatal Python error")):
            blocks.append("\n".join(lines[: users[-1] + 1] if users else lines))
    return "\n\n".join(blocks).strip()


def _is_in_package(fault: str) -> bool:
    """True if a thread was in code of this package when the process died."""
    innermost = [_FAULT_LINE.search(block) for block in fault.split("\n\n")]
    return any(found is not None and is_package_path(found[1]) for found in innermost)


def _is_users_frame(line: str) -> bool:
    found = _FAULT_LINE.search(line)
    # "<string>" is the command of the `python -c` that multiprocessing starts.
    return found is not None and not found[1].startswith("<") and not is_library_path(found[1])


def is_cause_known(failed: Sequence[FailedRank]) -> bool:
    """True if a failure is not a consequence. Until then the root cause may still be reported."""
    return not all(rank.failure.is_consequence for rank in failed)


def error_of(failed: Sequence[FailedRank]) -> RankFailedError:
    """The error of a failed launch. It describes the worker that failed first.

    Args:
        failed: the workers that failed or called ``sys.exit(0)``.
    """
    first, *others = sorted(_possible_causes(failed), key=_order)
    failure = first.failure
    is_permanent = any(other.failure.is_permanent for other in failed if not other.failure.is_consequence)
    names = str(first.rank)
    if first.pid and not failure.error_type:
        # XLA replicas may share a process. The replica that ended the process is unknown.
        process = first.host, first.pid
        names = " or ".join(str(other.rank) for other in failed if (other.host, other.pid) == process)
        others = [other for other in others if (other.host, other.pid) != process]
    place = f"Rank {names}" + (f" (pid {first.pid} on {first.host})" if first.pid else "")
    same = [other.rank for other in others if other.failure.is_same_error(failure)]
    after = lines_after([other for other in others if other.rank not in same])
    if failure.exit_code is None:
        start = f"{place} failed first"
        if same:
            ranks = _names_of([first.rank, *same])
            start = f"{ranks} raised the same {failure.error_type}. {place} was the first"
        elif failure.is_consequence:
            start = f"{place} noticed first that another rank failed or is gone; none reported why"
        message = f"{start}. Its traceback:\n\n{failure.traceback}{after}"
        error = WorkerRaisedError(
            first.rank,
            failure.error_type,
            failure.traceback,
            message,
            first.local_rank,
            first.pid,
            first.host,
        )
        error.is_permanent = is_permanent
        error.__cause__ = decode_exception(failure.exception)
        return error
    trace = f" Its traceback:\n\n{failure.traceback.rstrip()}\n" if failure.traceback else ""
    message = f"{place} {_describe_end(first)}.{trace}{after}"
    ended = WorkerExitedError(
        first.rank,
        message,
        first.local_rank,
        first.pid,
        failure.exit_code,
        _signal_name(failure.exit_code),
        failure.traceback,
        first.host,
    )
    ended.is_permanent = is_permanent
    ended.__cause__ = decode_exception(failure.exception)
    return ended


def lines_after(failed: Sequence[FailedRank]) -> str:
    """A line for each failure after the first one. Ranks with the same failure share a line."""
    ranks: dict[str, list[int]] = {}
    for other in failed:
        site = f"at {other.failure.site}: " if other.failure.site else ""
        ranks.setdefault(site + summary_line(other.failure), []).append(other.rank)
    return "".join(f"\n{_names_of(some)} failed after it: {line}" for line, some in ranks.items())


def _names_of(ranks: Sequence[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _order(rank: FailedRank) -> tuple[bool, float]:
    return rank.failure.is_consequence, rank.failure.time


def _possible_causes(failed: Sequence[FailedRank]) -> list[FailedRank]:
    """The failed workers. If all are consequences, also the workers that called ``sys.exit(0)`` earlier."""
    errors = [rank for rank in failed if not rank.failure.is_exit_0]
    if not errors:
        return list(failed)
    if is_cause_known(errors):
        return errors
    start = min(rank.failure.time for rank in errors)
    exits = [rank for rank in failed if rank.failure.is_exit_0 and not rank.failure.is_consequence]
    return [*errors, *(rank for rank in exits if rank.failure.time <= start)]


def _describe_end(rank: FailedRank) -> str:
    failure = rank.failure
    text = _exit_text(failure.exit_code or 0)
    if failure.summary:
        text += f" ({_first_line(failure.summary)})"
    if failure.is_exit_0:
        text += " while others still needed it"
    if not rank.started:
        return (
            f"{text} before it called the function; the worker's output says why. Workers import the "
            "script, so the script must start its work under if __name__ == '__main__'"
        )
    if failure.exit_code == -signal.SIGABRT and _is_in_package(failure.traceback):
        text += (
            " (gloo aborts if the ranks call different collectives: idist.compare_calls() names them. "
            "NCCL aborts after the timeout of a collective; its message is in the output)"
        )
    return text + (failure.about_sigkill if failure.exit_code == -signal.SIGKILL else "")


def _exit_text(exit_code: int) -> str:
    signal_name = _signal_name(exit_code)
    return f"was ended by {signal_name}" if signal_name else f"ended with exit code {exit_code}"


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    number = -exit_code
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def summary_line(failure: Failure) -> str:
    """The failure in one line: the first line of its summary, or how the worker ended."""
    return _first_line(failure.summary) if failure.summary else f"it {_exit_text(failure.exit_code or 0)}"


def _first_line(text: str) -> str:
    first = text.strip().partition("\n")[0].removesuffix("; its traceback:")
    return textwrap.shorten(first, 200, placeholder=" ...")
