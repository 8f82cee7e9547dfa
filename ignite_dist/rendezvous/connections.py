"""Connections to other machines: what is said while one is waited for, and how one is found to be gone.

TCP alone waits a quarter of an hour for a machine that has lost its power or its cable, and for ever if it
only listens. The kernel can look after a connection by itself, without a thread or traffic of ours: it only
has to be told so for each socket, those that gloo and torch's store have opened too.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from torch.distributed import Work

from ignite_dist.environments.base import read_int
from ignite_dist.errors import DistributedError, EnvironmentVariablesError, HostLostError

__all__ = [
    "SECONDS_WITHOUT_A_WORD",
    "Connections",
    "explained",
    "explainers",
    "last_lines",
    "listen",
    "raise_explained",
    "seconds_of_silence",
    "wait",
    "wait_told",
    "watch",
    "watched",
]

_logger = logging.getLogger(__name__)

# How long a machine may be silent; the variable says it otherwise.
# Two costs: a network that is away for longer ends the job. And so does a process that takes nothing in for
# as long while its peer sends (stopped in a debugger, say), because the kernel does not tell the two apart.
_SECONDS_OF_SILENCE = 30
_VARIABLE = "IGNITE_DIST_SILENCE_SECONDS"
_NUM_PROBES = 3

# How long a wait for other processes may be silent.
SECONDS_WITHOUT_A_WORD = 15.0

# How long a name server may take; behind a cut link it does not answer either.
_SECONDS_TO_FIND_NAME = 2.0


# --- when the other end goes ---------------------------------------------------------------------------


def seconds_of_silence() -> int:
    """How long another machine may be silent.

    Raises:
        EnvironmentVariablesError: the variable that says it holds something else than seconds.
    """
    seconds = read_int(os.environ, _VARIABLE)
    if seconds is None:
        return _SECONDS_OF_SILENCE
    if seconds < _NUM_PROBES:
        raise EnvironmentVariablesError(f"{_VARIABLE} must be {_NUM_PROBES} seconds or more, got {seconds}.")
    return seconds


@contextmanager
def watched() -> Iterator[None]:
    """Let the kernel look after the connections that are opened in the block and still open behind it."""
    seconds = seconds_of_silence()
    before = _open_sockets()
    yield
    for fd, _ in _open_sockets() - before:
        with suppress(OSError), _borrowed(fd) as sock:  # closed since, or of the kernel's own kind
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                sock.getpeername()  # refused where nothing is connected
                watch(sock, seconds)


def watch(sock: socket.socket, seconds: int) -> None:
    """Let the kernel end the connection when the other machine has been silent for that long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {  # those that this platform has
        "TCP_KEEPIDLE": seconds // _NUM_PROBES,  # while nothing is under way
        "TCP_KEEPINTVL": seconds // _NUM_PROBES,
        "TCP_KEEPCNT": _NUM_PROBES,
        "TCP_USER_TIMEOUT": seconds * 1000,  # while something is
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _open_sockets() -> set[tuple[int, int]]:
    """The sockets of this process: file descriptor, and what tells it from one that had the number before."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one that reads this folder
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Somebody else's socket, as Python's."""
    blocking = os.get_blocking(fd)
    sock = socket.socket(fileno=fd)
    try:
        if socket.getdefaulttimeout() is not None:  # then Python has made it a non-blocking one
            os.set_blocking(fd, blocking)
        yield sock
    finally:
        sock.detach()


class Connections:
    """The connections that a library has opened, found by what is open after a block and was not before."""

    def __init__(self) -> None:
        self._found: set[tuple[int, int]] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the connections that are opened in the block and still open behind it."""
        before = _open_sockets()
        yield
        for fd, inode in _open_sockets() - before:
            with suppress(OSError), _borrowed(fd) as sock:
                sock.getpeername()  # refused where nothing is connected
                self._found.add((fd, inode))

    def one_is_gone(self) -> bool:
        """Whether one of them is closed: the library does so when the other end has gone."""
        return not self._found <= _open_sockets()

    def cut(self) -> None:
        """End those that are open, at both ends: what waits for them fails. The library closes them."""
        for fd, _ in self._found & _open_sockets():
            with suppress(OSError), _borrowed(fd) as sock:
                sock.shutdown(socket.SHUT_RDWR)


# How gloo and torch's store put it that a machine is silent.
_SILENCE = re.compile(
    r"\[([0-9a-f.:]+)\]:\d+: (?:connection timed out|no route to host|network is unreachable)", re.IGNORECASE
)


def last_lines(error: BaseException) -> str:
    """What a traceback ends with, even if the exception's own code fails when it is asked for its words."""
    try:
        return "".join(traceback.format_exception_only(error))
    except Exception:  # of a SyntaxError whose text is none, for example
        return f"{type(error).__name__}: <its message cannot be formatted>\n"


explainers: list[Callable[[RuntimeError], BaseException | None]] = []
"""What may know more of a backend's error: each gives a better error for it, with its cause, or None."""


def explained(error: BaseException) -> BaseException:
    """``error``; or, where it is known which machine or rank it is about, an error that names that."""
    if not isinstance(error, RuntimeError) or isinstance(error, DistributedError):
        return error
    found = _SILENCE.search(last_lines(error))  # not str(): a subclass of the user's may have one that raises
    if found is None:
        return next(filter(None, (explain(error) for explain in explainers)), error)
    address = found[1].removeprefix("::ffff:")
    lost = HostLostError(_name_of(address), address)
    lost.__cause__ = error
    return lost


@contextmanager
def wait_told(what: Callable[[], str]) -> Iterator[None]:
    """Say ``what`` the block waits for, once, if it takes long."""
    timer = threading.Timer(SECONDS_WITHOUT_A_WORD, lambda: _logger.warning("%s", what()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def wait(work: Work) -> None:
    """Wait for a collective; see :func:`explained`."""
    try:
        work.wait()
    except RuntimeError as error:
        raise_explained(error)


def raise_explained(error: RuntimeError) -> NoReturn:
    """Raise what is known of ``error``, which is being handled; see :func:`explained`."""
    better = explained(error)
    if better is error:
        raise error
    raise better from better.__cause__


def _name_of(address: str) -> str:
    """The name of the host with this address, if that is found out soon."""
    names: list[str] = []

    def ask() -> None:
        with suppress(OSError):
            names.append(socket.gethostbyaddr(address)[0])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_TO_FIND_NAME)
    return names[0] if names else ""


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there; an empty address stands for all of this machine.

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Connections of a store that was served there before may still be on their way out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
