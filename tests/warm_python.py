"""A Python that has imported torch. Tests run scripts in forks of it, so that a script need not import torch.

A fork has the arguments, environment, folder, streams, main module and exit status of ``python SCRIPT``. A
fork server that the script starts is a fork too, made before the script's first line. Some tests are about
the start of Python, its imports or its child processes. They use :func:`helpers.run_new_python`.

``python warm_python.py FD`` is that Python. ``FD`` is its socket to the tests, which use :class:`WarmPython`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import multiprocessing.process
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_LONGEST_REQUEST = 1 << 17
_FIRST_FREE_FD = 500  # above those that a script may have passed on
# What Python and torch read from the environment when they start. A fork would not read it again.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH", "CUDA")


class Request(NamedTuple):
    """What to run, and what the process inherits."""

    args: list[str]  # of python
    env: dict[str, str]
    cwd: str
    fds: list[int]  # the numbers that the files have there
    mask: set[int]
    ignored: set[int]


def _send(
    channel: socket.socket,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    files: Mapping[int, int],
) -> None:
    """Ask for ``python *args`` with these files: their numbers there and here."""
    mask = {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
    ignored = {int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}
    request = Request(list(args), dict(env), cwd, list(files), mask, ignored)
    socket.send_fds(channel, [pickle.dumps(tuple(request))], list(files.values()))


def _receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    message, files, _, _ = socket.recv_fds(channel, _LONGEST_REQUEST, 32)
    return (Request(*pickle.loads(message)), files) if message else None


# --- the client --------------------------------------------------------------------------------------


class WarmPython:
    """Starts the Python that has imported torch, and asks it to run scripts. It ends with this process.

    Args:
        environ: what this Python reads from it when it starts is the same for all scripts.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._environ = _read_at_start(environ)
        others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**others, **self._environ},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self._end, os.getpid())

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a forked process
            self._channel.close()
            self._process.terminate()
            self._process.wait()

    def can_run(self, args: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork does what a new Python would."""
        return _read_at_start(env) == self._environ and (
            args[0] in ("-m", "-c", "-") or Path(args[0]).is_file()
        )

    def run(
        self, args: Sequence[str], env: Mapping[str, str], cwd: str, text: str | None, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Like :func:`subprocess.run` with ``text`` as the input, and both output streams as one text."""
        deadline = time.monotonic() + seconds
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        with tempfile.TemporaryFile() as stdin, theirs, answers:
            stdin.write((text or "").encode())
            stdin.seek(0)
            with self._lock:
                files = {0: stdin.fileno(), 1: write, 2: write, _FIRST_FREE_FD: theirs.fileno()}
                _send(self._channel, args, env, cwd, files)
            os.close(write)
            theirs.close()
            pid = int(answers.recv(100))
            output = b""
            with os.fdopen(read, "rb", buffering=0) as pipe:
                while True:
                    ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
                    if not ready:
                        os.kill(pid, signal.SIGKILL)
                        raise subprocess.TimeoutExpired(list(args), seconds, output)
                    piece = os.read(pipe.fileno(), 1 << 16)
                    output += piece
                    if not piece:
                        break
            status = os.waitstatus_to_exitcode(int(answers.recv(100)))
        return subprocess.CompletedProcess(
            list(args), status, output.decode(errors="replace").replace("\r\n", "\n")
        )


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and name != "PYTHONPATH"
    }


# --- the warm Python -----------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> Request:
    """Fork for each request, and tell the client its end. Returns in the forks."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel, read], [], [])
        if read in ready:
            os.read(read, 1 << 10)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                _answer(running.pop(pid), status, close=True)
        if channel in ready:
            received = _receive(channel)
            if received is None:  # the client has ended
                os._exit(0)
            request, files = received
            answers = files[-1]
            pid = _fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(request, files)
                os.closerange(3, 256)
                os.close(_FIRST_FREE_FD)
                return request
            running[pid] = answers
            _answer(answers, pid)
            for file in files[:-1]:
                os.close(file)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads: numpy's OpenBLAS prepares its own for a fork
        return os.fork()


def _answer(file: int, number: int, close: bool = False) -> None:
    with suppress(OSError):  # the client has given up
        os.write(file, str(number).encode())
    if close:
        os.close(file)


def _become(request: Request, files: Sequence[int]) -> None:
    """Take over the files and all else that a new process inherits."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE_FD + 100) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, request.fds, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    multiprocessing.process.ORIGINAL_DIR = request.cwd  # type: ignore[attr-defined]
    tempfile.tempdir = None
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)


def _prepare_fork_server() -> None:
    """Fork a process in advance. It becomes the fork server when ``multiprocessing`` starts one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, server = os.getpid(), _fork()
    if server == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        received = _receive(theirs)
        if received is None:  # the script has ended
            os._exit(0)
        theirs.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(*received)
        _run_and_exit(received[0].args)
    theirs.close()
    start = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "forkserver import main" not in str(args[-1]) or os.getpid() != owner or ours.fileno() < 0:
            return start(path, args, passfds)
        kept = [number for number in (0, 1, 2) if _is_open(number)]
        numbers = sorted({*kept, *map(int, passfds)})
        code = [os.fsdecode(one) for one in args[-2:]]  # -c CODE
        _send(ours, code, os.environ, os.getcwd(), {number: number for number in numbers})
        ours.close()
        return server

    util.spawnv_passfds = spawnv_passfds


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


def _run_and_exit(args: Sequence[str]) -> NoReturn:
    """What ``python *args`` does once it has started."""
    first, rest = args[0], list(args[1:])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *args]
    sys.argv = [first, *rest] if first not in ("-m", "-c") else [first, *rest[1:]]
    folder = {"-m": os.getcwd(), "-c": "", "-": ""}.get(first, os.path.dirname(os.path.realpath(first)))
    sys.path[:] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_site_path]
    try:
        if first == "-m":
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif first == "-":
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), main.__dict__)
        else:
            main.__file__ = os.path.abspath(first)
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
            source = Path(main.__file__).read_bytes()
            exec(compile(source, main.__file__, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None
    raise SystemExit(0)


if __name__ == "__main__":
    import torch  # noqa: F401

    _site_path = sys.path[1:]
    gc.freeze()
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _prepare_fork_server()
    _run_and_exit(_request.args)
