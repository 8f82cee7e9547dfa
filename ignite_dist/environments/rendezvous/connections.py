"""Connections to other machines: keepalive, errors that name a lost host, and warnings about long waits.

TCP alone notices after 15 minutes that a machine has lost its power or cable. A process that only receives
never notices. With keepalive the kernel checks the connection, without a thread of this package. The option
is set on each socket, also on the sockets of gloo and torch's store.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NoReturn
from weakref import WeakSet

from torch.distributed import Work

from ignite_dist.environments.base import read_int
from ignite_dist.errors import DistributedError, EnvironmentVariablesError, HostLostError

_logger = logging.getLogger(__name__)

# Default keepalive timeout; an environment variable overrides the default. A network outage of this length
# ends the job. A process that does not receive for this long while a peer sends (in a debugger, for example)
# ends the job too, because the kernel cannot distinguish the two cases.
_KEEPALIVE_SECONDS = 30
_VARIABLE = "IGNITE_DIST_SILENCE_SECONDS"
_NUM_PROBES = 3

# Longer waits for other processes are logged.
LONG_WAIT_SECONDS = 15.0

# Polling intervals for a listener that another process is about to open.
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.001, 0.05

# Time limit of a DNS request. A lost network link may cut off the DNS server too.
_DNS_SECONDS = 2.0


# --- keepalive -----------------------------------------------------------------------------------------


def keepalive_seconds() -> int:
    """The keepalive timeout: seconds without any packet from another machine.

    Raises:
        EnvironmentVariablesError: the environment variable is not a number, or too small.
    """
    seconds = read_int(os.environ, _VARIABLE)
    if seconds is None:
        return _KEEPALIVE_SECONDS
    if seconds < _NUM_PROBES:
        raise EnvironmentVariablesError(f"{_VARIABLE} must be {_NUM_PROBES} seconds or more, got {seconds}.")
    return seconds


@contextmanager
def keepalive() -> Iterator[None]:
    """Context manager: enable keepalive on the connections that the block opens and leaves open."""
    seconds = keepalive_seconds()
    before = _open_sockets()
    yield
    for fd, _ in _open_sockets() - before:
        with suppress(OSError), _connection(fd) as sock:
            enable_keepalive(sock, seconds)


def enable_keepalive(sock: socket.socket, seconds: int) -> None:
    """Let the kernel end the connection when the other machine has been silent for ``seconds``."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {  # a platform may lack some of these options
        "TCP_KEEPIDLE": seconds // _NUM_PROBES,  # for an idle connection
        "TCP_KEEPINTVL": seconds // _NUM_PROBES,
        "TCP_KEEPCNT": _NUM_PROBES,
        "TCP_USER_TIMEOUT": seconds * 1000,  # while sent data are not acknowledged
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _open_sockets() -> set[tuple[int, int]]:
    """The sockets of this process: file descriptor and inode. A reused descriptor has another inode.

    None are known without ``/proc``, as in a sandbox.
    """
    found: set[tuple[int, int]] = set()
    try:
        names = os.listdir("/dev/fd")
    except FileNotFoundError:
        return found
    for name in names:
        with suppress(OSError):  # the descriptor of listdir itself is closed already
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


@contextmanager
def _socket_object(fd: int) -> Iterator[socket.socket]:
    """A socket object for ``fd``, which another library owns. Leaves ``fd`` open."""
    blocking = os.get_blocking(fd)
    sock = socket.socket(fileno=fd)
    try:
        if socket.getdefaulttimeout() is not None:  # socket() has then made fd non-blocking
            os.set_blocking(fd, blocking)
        yield sock
    finally:
        sock.detach()


@contextmanager
def _connection(fd: int) -> Iterator[socket.socket]:
    """A socket object for a TCP connection. Raises OSError if ``fd`` is closed or of another kind."""
    with _socket_object(fd) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise OSError(errno.ENOTCONN, "no TCP connection")
        sock.getpeername()  # raises OSError unless connected
        yield sock


def wait_for_end(fds: Collection[int], seconds: float) -> None:
    """Wait for at most ``seconds`` until a peer closes one of the connections."""
    connection.wait(fds, seconds)


def wait_for_listener(address: str, port: int, seconds: float) -> None:
    """Wait for at most ``seconds`` until a process listens at the address.

    A store of torch that connects earlier is refused, and tries again after 0.25 to 0.75 seconds.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:  # torch's store will fail too, with an error that names the host
        return
    deadline, period = time.monotonic() + seconds, _FIRST_POLL_SECONDS
    while time.monotonic() < deadline:
        for *_, socket_address in found:
            with suppress(OSError):
                socket.create_connection((str(socket_address[0]), port), _PROBE_SECONDS).close()
                return
        time.sleep(period)
        period = min(2 * period, _POLL_SECONDS)


class Connections:
    """The connections that a library opened: those that are open after a block but not before."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Any] = {}  # the peer's address, by file descriptor and inode

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: record the connections that the block opens and leaves open."""
        before = _open_sockets()
        yield
        for fd, inode in _open_sockets() - before:
            with suppress(OSError), _connection(fd) as sock:
                self._found[fd, inode] = sock.getpeername()

    def to_port(self, port: int | None) -> dict[int, tuple[str, int]]:
        """The open connections to ``port``: this end's address and port, by file descriptor."""
        found = {}
        for fd, _ in self._found.keys() & _open_sockets():
            with suppress(OSError), _connection(fd) as sock:
                if sock.getpeername()[1] == port:  # another thread may have opened another one meanwhile
                    found[fd] = _address_and_port(sock.getsockname())
        return found

    @staticmethod
    def from_peers(port: int, peers: Collection[tuple[str, int]]) -> Connections:
        """The open connections of ``peers`` to the server of this process at ``port``."""
        connections = Connections()
        for key in _open_sockets():
            with suppress(OSError), _connection(key[0]) as sock:
                if sock.getsockname()[1] == port and _address_and_port(sock.getpeername()) in peers:
                    connections._found[key] = sock.getpeername()
        return connections

    def has_closed(self) -> bool:
        """True if a recorded connection is closed. The library closes a connection when its peer is gone."""
        return bool(self.closed())

    def closed(self) -> set[tuple[str, int]]:
        """The addresses and ports of the peers to which a recorded connection is closed."""
        peers = [self._found[key] for key in self._found.keys() - _open_sockets()]
        return set(map(_address_and_port, peers))

    def shut_down(self) -> None:
        """Shut down the open connections, so that waits at both ends fail. The library closes the sockets."""
        for fd, _ in self._found.keys() & _open_sockets():
            with suppress(OSError), _socket_object(fd) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def _address_and_port(name: Any) -> tuple[str, int]:
    """The address and the port of a socket's name. IPv4 addresses lose the prefix that IPv6 gives them."""
    address, port, *_ = name
    return address.removeprefix("::ffff:"), port


# Messages of gloo and torch's store about a silent machine.
_SILENCE = re.compile(
    r"\[([0-9a-f.:]+)\]:\d+: (?:connection timed out|no route to host|network is unreachable)", re.IGNORECASE
)


def last_lines(error: BaseException) -> str:
    """Type and message of ``error``, even if the exception's own ``__str__`` raises."""
    try:
        return "".join(traceback.format_exception_only(error))
    except Exception:  # a SyntaxError without a text, for example
        return f"{type(error).__name__}: <its message cannot be formatted>\n"


cause_finders: list[Callable[[RuntimeError], BaseException | None]] = []
"""Functions that find the cause of a backend's error. Each returns an error that names the cause, or None."""


def with_cause(error: BaseException) -> BaseException:
    """An error that names the machine or rank that caused ``error``; ``error`` itself if that is unknown."""
    if not isinstance(error, RuntimeError) or isinstance(error, DistributedError):
        return error
    found = _SILENCE.search(last_lines(error))  # not str(): a user's subclass may raise
    if found is None:
        return next(filter(None, (find_cause(error) for find_cause in cause_finders)), error)
    address = found[1].removeprefix("::ffff:")
    lost = HostLostError(_host_name(address), address)
    lost.__cause__ = error
    return lost


@contextmanager
def log_long_wait(message: Callable[[], str]) -> Iterator[None]:
    """Context manager: log ``message()`` once if the block takes longer than ``LONG_WAIT_SECONDS``."""
    timer = threading.Timer(LONG_WAIT_SECONDS, lambda: _logger.warning("%s", message()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def wait(work: Work) -> None:
    """Wait for a collective. If it fails, raise :func:`with_cause` of the error."""
    try:
        _complete(work)
    except RuntimeError as error:
        raise_with_cause(error)


to_other_machines: WeakSet[Connections] = WeakSet()
"""The connections of gloo in contexts on several machines."""

# The peers to which a connection was closed when a thread looked last. Replaced as a whole, never changed.
_closed: frozenset[tuple[str, int]] = frozenset()
_LOOK = timedelta(seconds=5)
_NUM_PROBES_OF_PEER, _PROBE_SECONDS = 2, 3.0
_NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


def _complete(work: Work) -> None:
    """Wait for a collective of a process group.

    If a connection fails, gloo reports this only to operations whose message has not begun. An operation
    whose message is partly sent or received waits until the timeout. So on several machines this function
    looks every few seconds whether gloo has closed a connection since the wait began, and if so, whether the
    other machine answers. (Ctrl-C then interrupts the wait, too, and the collective still runs.)

    Raises:
        HostLostError: a machine does not answer.
        RuntimeError: the collective has failed.
    """
    if not to_other_machines:
        work.wait()
        return
    before = _closed
    while not _succeeds(work):
        if work.is_completed():
            _look()
            work.wait()  # raises the error, unless the collective has completed just now
            return
        for address, port in _look() - before:
            if not _answers(address, port):
                raise HostLostError(_host_name(address), address)


def _succeeds(work: Work) -> bool:
    """Wait for a few seconds. True if the collective has succeeded."""
    with suppress(RuntimeError):  # of the limit, or of the collective
        work.wait(_LOOK)
        return True
    return False


def _look() -> frozenset[tuple[str, int]]:
    """The peers to which a connection is closed now."""
    global _closed
    with suppress(OSError):  # no file descriptor is left for the look: keep what is known
        _closed = frozenset().union(*(opened.closed() for opened in list(to_other_machines)))
    return _closed


def _answers(address: str, port: int) -> bool:
    """False if the machine at ``address`` does not answer. No process needs to listen at ``port``."""
    for _ in range(_NUM_PROBES_OF_PEER):
        try:
            socket.create_connection((address, port), _PROBE_SECONDS).close()
            return True
        except TimeoutError:
            pass
        except OSError as error:
            if error.errno not in _NO_ANSWER:
                return True
    return False


def raise_with_cause(error: RuntimeError) -> NoReturn:
    """Raise :func:`with_cause` of ``error``. Call this function where ``error`` is handled."""
    better = with_cause(error)
    try:
        if better is error:
            raise error
        raise better from better.__cause__
    finally:
        # A cycle of the error, its traceback and this frame would keep the user's open files.
        del error, better


def _host_name(address: str) -> str:
    """The host name of ``address``; empty if DNS does not answer within ``_DNS_SECONDS``."""
    names: list[str] = []

    def look_up() -> None:
        with suppress(OSError):
            names.append(socket.gethostbyaddr(address)[0])

    lookup = threading.Thread(target=look_up, daemon=True)
    lookup.start()
    lookup.join(_DNS_SECONDS)
    return names[0] if names else ""


def listen(address: str, port: int) -> socket.socket:
    """A listening socket. An empty ``address`` stands for all addresses of this machine.

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Closed connections of an earlier store may still occupy the port (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
