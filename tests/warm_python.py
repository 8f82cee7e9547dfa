"""A Python that has imported torch. Tests run scripts in forks of it, so that a script need not import torch.

A fork has the arguments, environment, folder, streams, limits of files, processes and memory, main module
and exit status of ``python SCRIPT``, and its client's network, host name and mounts. A fork server that the
script starts is a fork too, made before the script's first line. What differs: all forks have one hash seed
(ranks that loop over a set of strings see one order), their parent is this Python, no terminal controls them,
and they do not free what they share with this Python. Tests of such things, and of the start of Python, use
:func:`helpers.run_new_python` or the programs of ``commands.BIN``. For the exit there is
``warm_client.WHOLE_EXIT``.

``python warm_python.py FD OWNER`` is that Python, which ends with the process OWNER. ``FD`` is a socket that
listens: each connection is one request (see :mod:`warm_client`). The answers are ``"started PID"`` and
``"ended STATUS"``. The fork is killed if the client closes the connection before that.
"""

# ruff: noqa: E402

from __future__ import annotations

import atexit

atexit.register(lambda: _keep_what_forks_share())  # before any other function, which are then called first

import ctypes
import fcntl
import gc
import io
import multiprocessing.process
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from warm_client import JOINED, WHOLE_EXIT, Request, is_open, receive, send

_libc = ctypes.CDLL(None, use_errno=True)
_pid_of_script = 0  # of the script or the fork server, not of what these fork
_FIRST_FREE_FD = 500  # above those that a script may have passed on


def _serve(listener: socket.socket, owner: int) -> Request:
    """Fork for each request, and tell the client its end. Returns in the forks."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    the_owner = os.pidfd_open(owner)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, read, the_owner, *running.values()], [], [])
        if the_owner in ready:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if read in ready:
            os.read(read, 1 << 10)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with running.pop(pid) as channel:
                    _answer(channel, "ended", status)
        for pid, channel in running.items():
            if channel in ready:  # nothing is sent after the request: the client has gone
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            channel, _ = listener.accept()
            received = receive(channel)
            if received is None:
                channel.close()
                continue
            request, files = received
            try:
                pid = _fork()
            except OSError:  # the client sees the end of the connection
                pid = -1
            if pid == 0:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(request, files)
                os.closerange(3, 256)
                return request
            for file in files:
                os.close(file)
            if pid < 0:
                channel.close()
                continue
            running[pid] = channel
            _answer(channel, "started", pid)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads: numpy's OpenBLAS prepares its own for a fork
        return os.fork()


def _answer(channel: socket.socket, what: str, number: int) -> None:
    with suppress(OSError):  # the client has given up
        channel.send(f"{what} {number}".encode())


def _become(request: Request, files: Sequence[int]) -> None:
    """Take over from the client what a new process inherits: see :class:`Request`."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE_FD + 100) for file in files]
    for file in files:
        os.close(file)
    num = len(request.fds)
    for name, file in zip(JOINED, high[num:], strict=True):
        is_same = os.path.samestat(os.stat(f"/proc/self/ns/{name}"), os.fstat(file))
        if not is_same and _libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join the {name} namespace")
        os.close(file)
    for file, number in zip(high[:num], request.fds, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    multiprocessing.process.ORIGINAL_DIR = request.cwd  # type: ignore[attr-defined]
    tempfile.tempdir = None
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    for limit, values in request.limits:
        if resource.getrlimit(limit) != values:
            resource.setrlimit(limit, values)
    os.sched_setaffinity(0, request.cpus)
    os.umask(request.umask)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # torch and random do as in a new process
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
        received = receive(theirs)
        if received is None:  # the script has ended
            os._exit(0)
        theirs.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(*received)
        _run_and_exit(received[0].args)
    theirs.close()
    start = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = [os.fsdecode(one) for one in args]
        code = code[code.index("-c") :] if "-c" in code else ["", ""]  # newer Pythons add sys.argv
        if "forkserver import main" not in code[1] or os.getpid() != owner or ours.fileno() < 0:
            return start(path, args, passfds)
        kept = [number for number in (0, 1, 2) if is_open(number)]
        numbers = sorted({*kept, *map(int, passfds)})
        send(ours, code, os.environ, os.getcwd(), {number: number for number in numbers})
        ours.close()
        return server

    util.spawnv_passfds = spawnv_passfds


def _unbuffered(number: int) -> io.TextIOWrapper:
    file: Any = io.FileIO(number, "w", closefd=False)
    errors = "backslashreplace" if number == 2 else sys.stdout.errors
    return io.TextIOWrapper(file, encoding=sys.stdout.encoding, errors=errors, write_through=True)


def _is_terminal(number: int) -> bool:
    return is_open(number) and os.isatty(number)


def _keep_what_forks_share() -> None:
    """The last that ``atexit`` calls: let this process end without freeing what all forks share.

    It would first copy that memory. Python then clears no module that was imported before the fork, and C's
    ``exit`` writes the streams of C and ends the process. No destructor of a C library runs, also not of one
    that the script has loaded.
    """
    if os.getpid() != _pid_of_script or WHOLE_EXIT.items() <= os.environ.items():
        return
    kept = [module for name in _shared_modules if (module := sys.modules.pop(name, None)) is not None]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _libc.on_exit(_libc._exit, None)
    _libc.__cxa_atexit(_libc.fflush, None, None)  # the last to be registered is the first to be called


def _run_and_exit(args: Sequence[str]) -> NoReturn:
    """What ``python *args`` does once it has started."""
    global _pid_of_script
    _pid_of_script = os.getpid()
    if args[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        args = args[args[0] == "-u" :]
        sys.stdout = sys.__stdout__ = _unbuffered(1)
        sys.stderr = sys.__stderr__ = _unbuffered(2)
    else:
        sys.stdout.reconfigure(line_buffering=_is_terminal(1))  # type: ignore[union-attr]
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
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None
    raise SystemExit(0)


if __name__ == "__main__":
    if os.fork() != 0:  # so that it is no child of a test
        os._exit(0)
    # A shell ignores SIGINT in its background, from where a test may have started this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(_number, signal.SIG_DFL)

    gc.disable()  # nothing of it is garbage
    import torch._dynamo  # noqa: F401  # torch, and what every optimizer imports

    _site_path = sys.path[1:]
    _shared_modules = {*sys.modules} - {"__main__", "builtins", "sys"}
    gc.freeze()
    gc.enable()
    _request = _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    _prepare_fork_server()
    _run_and_exit(_request.args)
