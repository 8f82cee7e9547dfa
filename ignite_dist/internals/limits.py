"""The limits of processes and disks, for the texts of errors."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from ignite_dist.errors import LaunchError

# For each limit: the texts of errors that it causes, its name, and a sentence about it. The texts are
# compiled here, because there may be no memory for it later.
_LIMITS = (
    (
        re.compile("Too many open files(?! in system)"),
        "NOFILE",
        "A process may open {limit} files here (ulimit -n).",
    ),
    (
        re.compile("Resource temporarily unavailable|can't start new thread"),
        "NPROC",
        "This user may run {limit} processes and threads here (ulimit -u).",
    ),
    (re.compile("File too large"), "FSIZE", "A file may have {limit} bytes here (ulimit -f)."),
    (
        re.compile(
            "[Cc]annot allocate memory|MemoryError|can't allocate memory|bad_alloc|failed to map"
            "|can't start new thread|Resource temporarily unavailable"  # also for a thread's stack
        ),
        "AS",
        "A process may map {limit} bytes of memory here (ulimit -v).",
    ),
)
# The functions that start a process. Python's library calls some by names with an underscore in front.
_STARTS = {"fork", "forkpty", "fork_exec", "posix_spawn", "posix_spawnp"}
_MAX_LINKS = 20  # of a chain of exceptions, which may be a circle
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sentences_about(text: str) -> str:
    """A sentence for each limit of this process that the error text ``text`` may be about."""
    found = []
    for pattern, name, sentence in _LIMITS:
        limit, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        if limit != resource.RLIM_INFINITY and pattern.search(text):
            found.append(sentence.format(limit=f"{limit:,}"))
    return " ".join(found)


def sentences_about_error(error: BaseException, text: str) -> str:
    """The sentences about ``text``, which is the text of ``error``.

    A system call fails with "Resource temporarily unavailable" for other reasons too: a lock that is held
    (``flock``), or a socket without data. Only a call that starts a process is about the limit of processes.
    """
    refused = next((one for one in _chain(error) if getattr(one, "errno", None) == errno.EAGAIN), None)
    if isinstance(refused, OSError) and not _has_started_process(refused):
        text = text.replace(os.strerror(errno.EAGAIN), "")
    return sentences_about(text)


def _has_started_process(error: BaseException) -> bool:
    """True if the function that has raised ``error`` starts a process."""
    names: tuple[str, ...] = ()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_code.co_names
    return not _STARTS.isdisjoint(name.lstrip("_") for name in names)


def lacks_memory(error: MemoryError | OSError) -> bool:
    """True for the system's error, and for Python's own, which has no text."""
    return error.errno == errno.ENOMEM if isinstance(error, OSError) else not str(error)


def memory_error(function: str) -> MemoryError:
    """An error that says the limit of memory, if there is one."""
    return MemoryError(f"{function} has no memory left. {sentences_about('MemoryError')}".rstrip())


def check_files(num_needed: int, purpose: str) -> None:
    """Raise if this process cannot open ``num_needed`` more files.

    Raises:
        LaunchError: it cannot.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:  # a sandbox without /proc
            return
        num_open = limit
    if limit != resource.RLIM_INFINITY and num_open + num_needed > limit:
        raise LaunchError(
            f"Too many open files: {num_open:,} are open, {purpose} needs {num_needed:,} more, and this "
            f"process may open {limit:,} (ulimit -n). Raise the limit, or start fewer workers."
        )


# Threads of a worker: of gloo, of the store, of this package.
_NUM_THREADS = 8


def check_memory() -> None:
    """Raise if this worker cannot map the stacks of its threads. gloo may then abort, or wait for ever.

    Raises:
        LaunchError: it cannot.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == resource.RLIM_INFINITY or stack == resource.RLIM_INFINITY:
        return
    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:  # not Linux
        return
    num_mapped, num_needed = num_pages * resource.getpagesize(), _NUM_THREADS * stack
    if num_mapped + num_needed > limit:
        raise LaunchError(
            f"Too little memory: {num_mapped:,} bytes are mapped, the threads of a worker need "
            f"{num_needed:,} more, and this process may map {limit:,} (ulimit -v). Raise the limit."
        )


def room_in(folder: str | Path) -> str:
    """A sentence with the free bytes in ``folder``; empty if there is no such folder."""
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free in {folder}."
    except OSError:
        return ""


def error_of_write(
    what: str,
    folder: Path,
    error: BaseException,
    num_bytes: Callable[[], int],
    handled: BaseException | None,
) -> OSError:
    """The error after ``error``: ``what`` cannot be written to ``folder``.

    Args:
        what: a file or a folder.
        folder: the folder that contains it.
        error: its chain has the reason.
        num_bytes: returns the size of ``what``. Called if there is no room for it.
        handled: see :func:`cause_of_write`.
    """
    found = cause_of_write(error, handled)
    reason = (found.strerror if isinstance(found, OSError) else None) or str(found)
    if not isinstance(found, OSError) or found.errno is None:
        return OSError(f"{what} cannot be written: {reason}")
    if found.filename is not None:
        reason = f"{reason}: {found.filename}"
    if found.errno in _NO_ROOM:
        room = f"It needs {num_bytes():,} bytes. {room_in(folder)}"
        reason = " ".join(filter(None, (f"{reason}.", room, sentences_about(reason))))
    return OSError(found.errno, f"{what} cannot be written: {reason}")


def cause_of_write(error: BaseException, handled: BaseException | None) -> BaseException:
    """The ``OSError`` in the chain of ``error``, behind which torch hides it; else ``error``'s own cause.

    Args:
        error: the exception of a write.
        handled: the exception that was being handled when the write began (``sys.exc_info()[1]``). Python
            appends it to the chain of ``error``, but it is none of the write's causes.
    """
    chain = list(_chain(error, handled))
    found = next((link for link in chain if isinstance(link, OSError)), None)
    return found or chain[min(1, len(chain) - 1)]


def _chain(error: BaseException, end: BaseException | None = None) -> Iterator[BaseException]:
    """``error``, its cause or context, and so on, without ``end`` and what comes after it."""
    link: BaseException | None = error
    for _ in range(_MAX_LINKS):
        if link is None or link is end:
            return
        yield link
        link = link.__cause__ or link.__context__
