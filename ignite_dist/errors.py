"""The errors that this package raises.

Wrong arguments raise ``ValueError`` or ``TypeError``. Errors that only distributed jobs can have derive from
:class:`DistributedError`. Their text ends with a link to a section of ``docs/troubleshooting.md``.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
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
    "original_exception",
]

# Once the site has a host, its address: "See https://.../troubleshooting/#{anchor}".
_LINK = "See ignite_dist's docs/troubleshooting.md#{anchor}"
_LINKS = re.compile(r"\n[ |]*" + re.escape(_LINK).replace(re.escape("{anchor}"), r"[\w-]+"))


def original_exception(error: BaseException) -> BaseException:
    """The exception that a worker of :func:`spawn` raised, of its own class; else ``error``.

    The exception is also the ``__cause__`` of the error that ``spawn`` raises. It has its notes, its cause,
    its context and its group. It has no traceback: that is a text in the message of ``error``.

    Arguments and attributes that cannot be pickled, or that exceed 1 MB together, are replaced by objects
    with the same ``repr()``. If this process cannot import the exception's class, it makes a class of the
    same name, derived from the same built-in class. A worker that a signal has ended has no exception, and
    a worker on another machine does not send its own: ``error`` itself is returned.

    Example::

        try:
            idist.spawn("gloo", train, ({"batch_size": 4096},), nproc_per_node=2)
        except idist.RankFailedError as error:
            if not isinstance(idist.original_exception(error), torch.cuda.OutOfMemoryError):
                raise
            idist.spawn("gloo", train, ({"batch_size": 64},), nproc_per_node=2)
    """
    cause = error.__cause__
    return cause if isinstance(error, RankFailedError) and cause is not None else error


def without_link(text: str) -> str:
    """``text``, which contains the text of an error, without the links to the documentation."""
    return _LINKS.sub("", text)


class DistributedError(RuntimeError):
    """Base class of the errors of distributed jobs.

    ``str(error)`` ends with a line that names the section of ``docs/troubleshooting.md`` about the error.
    ``error.args[0]`` is the message without this line.

    Attributes:
        anchor: the anchor of this section.
    """

    anchor = "troubleshooting"

    def __init__(self, *args: Any) -> None:
        # Not super().__init__(): for a class that is also one of torch's errors, Python 3.14 finds torch's
        # constructor there, which needs other arguments (RuntimeError no longer has one of its own).
        self.args = args

    def __str__(self) -> str:
        # The message may contain the texts of other errors, each with a link.
        return f"{without_link(super().__str__()).rstrip()}\n{_LINK.format(anchor=self.anchor)}"


def _anchor_of(error_type: str) -> str:
    """The anchor of the error class with this name; that of :class:`RankFailedError` for other errors."""
    anchors = {kind.__name__: kind.anchor for kind in DistributedError.__subclasses__()}
    return anchors.get(error_type, RankFailedError.anchor)


class EnvironmentVariablesError(DistributedError):
    """The environment variables of a launcher are incomplete, invalid, or contradict each other."""

    anchor = "environment-variables"


class LaunchError(DistributedError):
    """A job could not start. For example, a port is in use, or a function cannot be sent to the workers."""

    anchor = "the-job-does-not-start"


class HostLostError(DistributedError):
    """A collective failed because another machine, or the network to that machine, is lost.

    Attributes:
        host: name of the machine; empty if unknown.
        address: address of the machine.
    """

    anchor = "host-lost"

    def __init__(self, host: str, address: str) -> None:
        self.host = host
        self.address = address
        name = f"{host} ({address})" if host else address
        super().__init__(f"{name} does not answer any more: the machine, or the network to it, is lost.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.host, self.address)


class CollectiveMismatchError(DistributedError):
    """Ranks called one collective with values that do not match. Raised on every rank of the collective."""

    anchor = "mismatched-calls"


class MissingRanksError(DistributedError, TimeoutError):
    """Ranks did not join a collective, or the start of the job, before the timeout.

    Attributes:
        ranks: the missing ranks, ascending. Empty on a rank that joined after the timeout of the others, and
            for a group that is not complete.
        where: the last call or the stack of each missing rank, if known.
    """

    anchor = "missing-ranks"

    def __init__(
        self, message: str, ranks: Sequence[int] = (), where: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.where = dict(where or {})


class UnsafeObjectError(DistributedError):
    """An object from another rank was rejected, because it could run code. See ``idist.safe_objects``.

    Attributes:
        rank: the rank that sent the object.
        type_name: the rejected type or function, for example ``"posix.system"``; empty if unknown.
    """

    anchor = "unsafe-objects"

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
        error_type: the class name of its exception, for example ``"ValueError"``.
        traceback: traceback of the failed rank as text; empty if the rank ended without a traceback.
        host: the host of the failed rank; empty if unknown.
        is_permanent: True if another attempt would fail in the same way, for example after an
            ``ImportError`` or the loss of a machine.
    """

    anchor = "a-rank-failed-first"
    is_permanent = False

    def __init__(
        self, rank: int, error_type: str, traceback: str, message: str | None = None, host: str = ""
    ) -> None:
        self.rank = rank
        self.error_type = error_type
        self.traceback = traceback
        self.host = host
        self.message = message or f"Rank {rank} raised {error_type}; its traceback:\n\n{traceback}"
        if type(self).anchor == RankFailedError.anchor:
            self.anchor = _anchor_of(error_type)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.error_type, self.traceback, self.message, self.host)

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows: the user's frames and the message. Frames in cells are named In[1].

        Without this hook, IPython also shows this package's code, and the cause, which is in the message.
        """
        ipython: Any = sys.modules["IPython"]
        libraries = tuple(
            os.path.join(sys.modules[name].__path__[0], "") for name in ("IPython", __package__)
        )
        frames = traceback.extract_tb(self.__traceback__)
        shown = [frame for frame in frames if not frame.filename.startswith(libraries)]

        def with_cell(found: re.Match[str]) -> str:
            cell = ipython.get_ipython().compile.format_code_name(found[1])
            return " ".join(cell) if cell else found[0]

        text = "".join(traceback.format_list(shown)) + f"{type(self).__name__}: {self}"
        return re.sub(r'File "([^"\n]+)"(?=, line \d)', with_cell, text).splitlines()


class WorkerRaisedError(RankFailedError, ProcessRaisedException):
    """A worker of ``spawn`` raised an exception. Also a subclass of torch's ``ProcessRaisedException``."""

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
        self.error_pid = error_pid  # torch 2.9 names it pid

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
    """A worker of ``spawn`` ended without a result, by a signal or by ``sys.exit()``.

    It is also a ``torch.multiprocessing.ProcessExitedException``, with ``exit_code`` and ``signal_name``. The
    ``traceback`` shows the call of ``sys.exit()``, or the stack of each thread at a segmentation fault.
    """

    anchor = "a-worker-ended"

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
