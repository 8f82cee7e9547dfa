"""What a worker died of: told by the worker, and made into one error in the launcher."""

from __future__ import annotations

import re
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from ignite_dist.call_sites import is_library_path, is_package_path
from ignite_dist.errors import (
    HostLostError,
    MissingRanksError,
    RankFailedError,
    WorkerExitedError,
    WorkerRaisedError,
)
from ignite_dist.rendezvous import connections
from ignite_dist.values import serialization

__all__ = [
    "Failed",
    "Failure",
    "count_oom_kills",
    "error_of",
    "failure_of",
    "in_a_line",
    "is_cause_known",
    "is_consequence",
    "outcome_of",
    "silent_failure",
    "users_part",
    "why_killed",
]


# More of a traceback than this nobody reads, and a message may be the text of a tensor.
_LONGEST_TEXT = 100_000
# How much later than a worker's death its launcher may hear of it, by way of the fork server.
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """What a worker died of, as it tells the launcher.

    Attributes:
        time: when, in seconds of ``time.time()``.
        error_type: the name of the exception's class; empty after a silent death, and so is ``summary``.
        summary: the last lines of the traceback, without where.
        traceback: all of it.
        exit_code: of a worker that ended rather than raised.
        is_consequence: whether it says itself that another rank failed before, or was gone.
    """

    time: float
    error_type: str
    summary: str
    traceback: str
    exit_code: int | None = None
    is_consequence: bool = False

    @property
    def is_exit_0(self) -> bool:
        """Whether it left by ``sys.exit(0)``: no failure, unless others still needed it."""
        return self.exit_code == 0 and bool(self.error_type)


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
        call = serialization.decode(sent) if isinstance(sent, bytes) else sent
        return serialization.encode(call(local_rank))
    except SystemExit as exit_:
        code = exit_.code & 0xFF if isinstance(exit_.code, int) else int(exit_.code is not None)
        return failure_of(exit_, exit_code=code)
    except BaseException as error:
        return failure_of(error)


def failure_of(error: BaseException, exit_code: int | None = None) -> Failure:
    """What the launcher is told of an exception."""
    now = time.time()
    trace, error = error.__traceback__, connections.explained(error)
    if error.__cause__ is not None:  # which has the traceback
        trace = error.__traceback__
    summary = connections.last_lines(error).strip()
    try:
        text = "".join(traceback.format_exception(type(error), error, users_part(trace)))
    except Exception:  # raised by the exception's own code, or by that of one that it was raised from
        where = "".join(traceback.format_tb(users_part(trace)))
        text = f"Traceback (most recent call last):\n{where}{summary}\n"
    return Failure(now, type(error).__name__, _cut(summary), _cut(text), exit_code, is_consequence(error))


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames through which this package came to the user's function."""
    rest = trace
    while rest is not None and is_package_path(rest.tb_frame.f_code.co_filename):
        rest = rest.tb_next
    return rest or trace


def _cut(text: str) -> str:
    left_out = len(text) - _LONGEST_TEXT
    if left_out <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {left_out:,} characters ...\n{text[-half:]}"


# How gloo, NCCL and torch's store put it that the process at the other end is gone.
_LOST = re.compile(
    r"connection (was )?(closed|reset) by peer|connection refused|connection was likely closed|broken pipe"
    r"|remote peer closed|remote process exited|communicator was aborted"
    r"|connection timed out|no route to host|network is unreachable",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says that another rank has failed or is gone."""
    return any(map(_tells_of_another, _chain(error)))


def _tells_of_another(error: BaseException) -> bool:
    """Whether ``error`` itself says so.

    An ``OSError`` does not, whatever its words: it is about a connection of the user's own, to a database
    say, and may well be what began it all.
    """
    if isinstance(error, (WorkerRaisedError, WorkerExitedError)):  # of workers that this rank has spawned
        return False
    if isinstance(error, (RankFailedError, HostLostError)) or type(error).__name__ == "HorovodInternalError":
        return True
    text = connections.last_lines(error)
    of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in text)
    return of_torch and _LOST.search(text) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what it was raised from: the user may have made something of his own of it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        if isinstance(link, MissingRanksError) and link.__suppress_context__:
            link = link.__cause__  # the connection was closed because of the missing ranks
        else:
            link = link.__cause__ or link.__context__


# --- in the launcher ---------------------------------------------------------------------------------


def silent_failure(exit_code: int, fault: str) -> Failure:
    """The failure of a worker that has ended without a word, as was noticed just now.

    Args:
        exit_code: of its process, negative for a signal.
        fault: what its fault handler has written, if anything.
    """
    now = time.time()
    if exit_code < 0 and exit_code != -signal.SIGABRT:
        # Nobody does that to himself, so it is not for what happened to another a moment ago; but those
        # that lost it may have told before its end was noticed here.
        now -= _NOTICE_SECONDS
    return Failure(now, "", "", _without_plumbing(fault), exit_code)


# A line of what the fault handler writes for each frame.
_FAULT_LINE = re.compile(r'File "([^"]+)", line \d+ in ')


def _without_plumbing(fault: str) -> str:
    """What the fault handler wrote, without threads of libraries and frames around the user's function."""
    blocks = []
    for block in fault.split("\n\n"):
        if block.startswith("Extension modules:"):
            continue
        lines = block.splitlines()
        users = [number for number, line in enumerate(lines) if _is_users(line)]
        if users or block.startswith(("Current thread", "Fatal Python error")):
            blocks.append("\n".join(lines[: users[-1] + 1] if users else lines))
    return "\n\n".join(blocks).strip()


def _is_users(line: str) -> bool:
    found = _FAULT_LINE.search(line)
    # "<string>" is the `python -c` in which multiprocessing runs.
    return found is not None and not found[1].startswith("<") and not is_library_path(found[1])


def count_oom_kills() -> int | None:
    """How many processes of this one's control group the kernel has ended because memory ran out.

    None where that is not told: not Linux, or no control group has the memory.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    paths = []
    for number, controllers, path in groups:
        if "memory" in controllers.split(","):  # version 1
            root, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        elif number == "0":  # version 2
            root, name = "/sys/fs/cgroup", "memory.events"
        else:
            continue
        # In a container the path may be the one outside, and the root what is ours.
        paths += [f"{root}{path.rstrip('/')}/{name}", f"{root}/{name}"]
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                found = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def why_killed(oom_kills_before: int | None) -> str:
    """What is to be said of a SIGKILL that nobody here has sent, given the count when the workers began."""
    now = count_oom_kills()
    if now is None or oom_kills_before is None:
        return _BY_THE_KERNEL
    if now <= oom_kills_before:
        return " (not for lack of memory, as far as the control group of this launch tells)"
    return " (by the kernel: memory has run out in the control group of this launch)"


_BY_THE_KERNEL = " (the kernel does so when memory runs out)"


def is_cause_known(failed: Sequence[Failed]) -> bool:
    """Whether one of them says nothing of another; else what began it may still be told."""
    return not all(one.failure.is_consequence for one in failed)


def error_of(failed: Sequence[Failed], about_sigkill: str = _BY_THE_KERNEL) -> RankFailedError:
    """The error of a launch of which some workers failed: it is about the one that failed first.

    Args:
        failed: the workers that failed, and those that left by ``sys.exit(0)``.
        about_sigkill: what to say of one; see :func:`why_killed`.
    """
    first, *others = sorted(_failed_or_needed(failed), key=_order)
    failure = first.failure
    names = str(first.rank)
    if first.pid and not failure.error_type:
        # Replicas of XLA share a process: by whose doing it ended, who knows.
        names = " or ".join(str(one.rank) for one in failed if one.pid == first.pid)
        others = [other for other in others if other.pid != first.pid]
    place = f"Rank {names}" + (f" (pid {first.pid} on {first.host})" if first.pid else "")
    after = "".join(f"\nRank {other.rank} failed after it: {in_a_line(other.failure)}" for other in others)
    if failure.exit_code is None:
        told = ", as it says because of another" if failure.is_consequence else ""
        message = f"{place} failed first{told}. Its traceback:\n\n{failure.traceback}{after}"
        return WorkerRaisedError(
            first.rank,
            failure.error_type,
            failure.traceback,
            message,
            first.local_rank,
            first.pid,
            first.host,
        )
    trace = f" Its traceback:\n\n{failure.traceback.rstrip()}\n" if failure.traceback else ""
    message = f"{place} {_ending(first, about_sigkill)}.{trace}{after}"
    return WorkerExitedError(
        first.rank,
        message,
        first.local_rank,
        first.pid,
        failure.exit_code,
        _signal_name(failure.exit_code),
        failure.traceback,
        first.host,
    )


def _order(one: Failed) -> tuple[bool, float]:
    return one.failure.is_consequence, one.failure.time


def _failed_or_needed(failed: Sequence[Failed]) -> list[Failed]:
    """Those that failed; and those that left by ``sys.exit(0)``, if that is what the others failed of."""
    real = [one for one in failed if not one.failure.is_exit_0]
    if not real:
        return list(failed)
    if is_cause_known(real):
        return real
    began = min(one.failure.time for one in real)
    left = [one for one in failed if one.failure.is_exit_0 and not one.failure.is_consequence]
    return [*real, *(one for one in left if one.failure.time <= began)]


def _ending(one: Failed, about_sigkill: str) -> str:
    failure = one.failure
    ending = _manner(failure.exit_code or 0)
    if failure.summary:
        ending += f" ({_first_line(failure.summary)})"
    if failure.is_exit_0:
        ending += " while others still needed it"
    if not one.started:
        return (
            f"{ending} before it could begin; its own output says why. Workers import the script, so it has "
            "to start its work under if __name__ == '__main__'"
        )
    if failure.exit_code == -signal.SIGABRT and "comp_models" in failure.traceback:
        ending += " (gloo does so where the calls of ranks do not go together: idist.debug() names them)"
    return ending + (about_sigkill if failure.exit_code == -signal.SIGKILL else "")


def _manner(exit_code: int) -> str:
    signal_name = _signal_name(exit_code)
    return f"was ended by {signal_name}" if signal_name else f"ended with exit code {exit_code}"


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    number = -exit_code
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def in_a_line(failure: Failure) -> str:
    """What it says of itself, or how the worker ended."""
    return _first_line(failure.summary) if failure.summary else f"it {_manner(failure.exit_code or 0)}"


def _first_line(text: str) -> str:
    first = text.strip().partition("\n")[0].removesuffix("; its traceback:")
    return textwrap.shorten(first, 200, placeholder=" ...")
