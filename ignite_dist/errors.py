"""The errors that this package raises.

Wrong arguments are ``ValueError`` and ``TypeError``; everything that can only happen because several
processes work together derives from :class:`DistributedError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

__all__ = [
    "CollectiveMismatchError",
    "DistributedError",
    "EnvironmentVariablesError",
    "HostLostError",
    "LaunchError",
    "MissingRanksError",
    "RankFailedError",
    "UnsafeObjectError",
    "WorkerExitedError",
    "WorkerRaisedError",
]


class DistributedError(RuntimeError):
    """Base of every error that has to do with several processes working together."""


class EnvironmentVariablesError(DistributedError):
    """The environment variables of a launcher are half set, or contradict each other."""


class LaunchError(DistributedError):
    """A job could not be started: a port in use, a function that cannot be sent to the workers."""


class HostLostError(DistributedError):
    """Another machine, or the network to it, has gone without a word, and a collective needed it.

    Attributes:
        host: its name, where that is known; else empty.
        address: its address.
    """

    def __init__(self, host: str, address: str) -> None:
        self.host = host
        self.address = address
        known = f"{host} ({address})" if host else address
        super().__init__(f"{known} does not answer any more: that machine, or the network to it, is gone.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.host, self.address)


class CollectiveMismatchError(DistributedError):
    """Ranks entered one collective with values that do not belong together. Raised on every rank of it."""


class MissingRanksError(DistributedError, TimeoutError):
    """Ranks have not come to a collective, or to the start of the job, in time.

    Attributes:
        ranks: those that have not come, ascending. Empty on one that has come when the others had given up.
        where: where each of them is, as far as it is known: its last call or its stack.
    """

    def __init__(
        self, message: str, ranks: Sequence[int] = (), where: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.where = dict(where or {})


class UnsafeObjectError(DistributedError):
    """What another rank sent could run code here, and was refused before it did: see ``idist.safe_objects``.

    Attributes:
        rank: the rank that sent it.
        type_name: what was refused, ``"posix.system"`` for example; empty if all of it was.
    """

    def __init__(self, message: str, rank: int, type_name: str = "") -> None:
        self.message = message
        self.rank = rank
        self.type_name = type_name
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.rank, self.type_name)


class RankFailedError(DistributedError):
    """Another rank failed; this rank did not.

    Attributes:
        rank: the rank that failed first.
        error_type: the name of what it raised, ``"ValueError"`` for example.
        traceback: that rank's traceback as text; empty if it died without one.
        host: the host that it ran on; empty where nobody has told.
    """

    def __init__(
        self, rank: int, error_type: str, traceback: str, message: str | None = None, host: str = ""
    ) -> None:
        self.rank = rank
        self.error_type = error_type
        self.traceback = traceback
        self.host = host
        self.message = message or f"Rank {rank} raised {error_type}; its traceback:\n\n{traceback}"
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.error_type, self.traceback, self.message, self.host)


class WorkerRaisedError(RankFailedError, ProcessRaisedException):
    """A worker of ``spawn`` raised. Also a ``torch.multiprocessing.ProcessRaisedException``."""

    def __init__(
        self,
        rank: int,
        error_type: str,
        traceback: str,
        message: str,
        error_index: int,
        error_pid: int,
        host: str = "",
    ) -> None:
        ProcessRaisedException.__init__(self, message, error_index, error_pid)
        RankFailedError.__init__(self, rank, error_type, traceback, message, host)
        self.error_pid = error_pid  # torch 2.9 calls it pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.rank,
            self.error_type,
            self.traceback,
            self.message,
            self.error_index,
            self.error_pid,
            self.host,
        )


class WorkerExitedError(RankFailedError, ProcessExitedException):
    """A worker of ``spawn`` ended without a result: a signal, or an exit of its own.

    Also a ``torch.multiprocessing.ProcessExitedException``, with ``exit_code`` and ``signal_name``. Its
    ``traceback`` is where ``sys.exit()`` was called, or where each thread was at a segmentation fault.
    """

    def __init__(
        self,
        rank: int,
        message: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
        traceback: str = "",
        host: str = "",
    ) -> None:
        ProcessExitedException.__init__(self, message, error_index, error_pid, exit_code, signal_name)
        RankFailedError.__init__(self, rank, signal_name or "SystemExit", traceback, message, host)
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.rank,
            self.message,
            self.error_index,
            self.error_pid,
            self.exit_code,
            self.signal_name,
            self.traceback,
            self.host,
        )
