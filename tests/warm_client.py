"""Runs scripts and programs in forks of a Python that has imported torch: see :mod:`warm_python`.

Two such Pythons listen on sockets in a folder that the tests share: ``as-it-is`` has the variables of the
tests, ``one-thread`` has OMP_NUM_THREADS=1 too, which torch reads when it is imported. Each is started when
a test needs it, and ends with the tests.

Its :func:`main` is ``python``, ``pytest``, ... for a shell: it asks for a fork, forwards signals to it, and
exits with its status. :func:`write_programs` writes these programs.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

# What Python and torch read from the environment when they start. A fork would not read it again.
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "GOMP_", "OMP_", "MKL_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHON_EXEC", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
_PROGRAMS = ("ignite-dist", "pytest", "torchrun")
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
_LONGEST_REQUEST = 1 << 17
# The namespaces that a fork joins. A process in another one of the others gets no fork.
JOINED = ("net", "uts", "mnt")
_OTHERS = ("ipc", "pid", "user")
# The environment variable that names the folder of the sockets.
FOLDER = "IGNITE_DIST_TESTS_WARM"
# A process with this in its environment finalizes all objects at its exit, as it would outside of the tests.
WHOLE_EXIT = {"IGNITE_DIST_TESTS_WHOLE_EXIT": "1"}


class Request(NamedTuple):
    """What to run, and what the process inherits."""

    args: list[str]  # of python
    env: dict[str, str]
    cwd: str
    fds: list[int]  # the numbers that the files get in the fork; behind the files, the namespaces are sent
    mask: set[int]
    ignored: set[int]
    limits: list[tuple[int, tuple[int, int]]]
    cpus: set[int]
    umask: int


def send(
    channel: socket.socket,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    files: Mapping[int, int],
) -> None:
    """Ask for ``python *args``. ``files``: their numbers in the fork, and in this process."""
    mask = {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
    ignored = {int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}
    limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
    cpus, umask = os.sched_getaffinity(0), os.umask(0o77)
    os.umask(umask)
    request = Request(list(args), dict(env), cwd, list(files), mask, ignored, limits, cpus, umask)
    message = pickle.dumps(tuple(request))
    assert len(message) < _LONGEST_REQUEST, "the arguments and the environment are too long"
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in JOINED]
    socket.send_fds(channel, [message], [*files.values(), *namespaces])
    for fd in namespaces:
        os.close(fd)


def receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """The request, and the numbers of its files in this process. None if the client has gone."""
    message, files, _, _ = socket.recv_fds(channel, _LONGEST_REQUEST, 32)
    return (Request(*pickle.loads(message)), files) if message else None


def can_run(args: Sequence[str]) -> bool:
    """True if a fork does what a new Python would."""
    rest = args[1:] if args[:1] == ["-u"] else args
    return bool(rest) and (rest[0] in ("-m", "-c", "-") or Path(rest[0]).is_file())


def share() -> None:
    """Make the folder of the Pythons that this process and its children share. They end with this process."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="warm-")
        about = {"owner": os.getpid(), "environ": _read_at_start(os.environ), "namespaces": _namespaces()}
        Path(folder, "about.json").write_text(json.dumps(about), encoding="utf-8")
        atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


def connect(env: Mapping[str, str], *, starts: bool = True) -> socket.socket | None:
    """A connection to a Python that has read the same from its environment as one with ``env`` would.

    None for another environment, for a process in another container or of another user, and where
    ``starts`` is False and that Python was not started.
    """
    folder, read = Path(os.environ[FOLDER]), _read_at_start(env)
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError):
        return None
    if about["namespaces"] != _namespaces():
        return None
    environs = {"as-it-is": about["environ"], "one-thread": {**about["environ"], "OMP_NUM_THREADS": "1"}}
    path = next((folder / name for name, environ in environs.items() if environ == read), None)
    if path is None:
        return None
    if not path.exists():
        if not starts:
            return None
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _start(path, read, about["owner"])
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(str(path))
    return channel


def _namespaces() -> list[str]:
    """What differs in a container. Empty where the kernel does not say it."""
    try:
        return [os.readlink(f"/proc/self/ns/{name}") for name in _OTHERS]
    except OSError:
        return []


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
    }


def _start(path: Path, read: Mapping[str, str], owner: int) -> None:
    """Start a Python. It answers the requests at ``path`` as soon as it has imported torch."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
    temporary = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    temporary.unlink(missing_ok=True)  # of a process that was killed here
    listener.bind(str(temporary))
    listener.listen(64)
    with listener:
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm_python.py"), str(listener.fileno()), str(owner)],
            env={**others, **read},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in a terminal is for the tests
        ).wait()  # what listens is its child, and so no child of a test
    temporary.rename(path)


def run(
    args: Sequence[str], env: Mapping[str, str], cwd: str, text: str | None, seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Like :func:`subprocess.run` with ``text`` as the input, and both output streams as one text.

    None if no Python for this environment is there.
    """
    deadline = time.monotonic() + seconds
    channel = connect(env)
    if channel is None:
        return None
    with channel, tempfile.TemporaryFile() as stdin:
        stdin.write((text or "").encode())
        stdin.seek(0)
        read, write = os.pipe()
        output = b""
        with os.fdopen(read, "rb", buffering=0) as pipe:
            try:
                send(channel, args, env, cwd, {0: stdin.fileno(), 1: write, 2: write})
            finally:
                os.close(write)
            while True:
                ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:  # the end of the channel ends the fork
                    raise subprocess.TimeoutExpired(list(args), seconds, output)
                piece = os.read(pipe.fileno(), 1 << 16)
                output += piece
                if not piece:
                    break
        channel.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            status = _wait(channel)
        except TimeoutError:
            raise subprocess.TimeoutExpired(list(args), seconds, output) from None
    return subprocess.CompletedProcess(
        list(args), status, output.decode(errors="replace").replace("\r\n", "\n")
    )


def _wait(channel: socket.socket) -> int:
    """The exit status of the fork, as :mod:`subprocess` gives it."""
    while message := channel.recv(100).decode():
        kind, number = message.split()
        if kind == "ended":
            return os.waitstatus_to_exitcode(int(number))
    raise AssertionError("the warm Python has ended")


# --- programs for a shell ------------------------------------------------------------------------------


def write_programs() -> Path:
    """A folder with ``python``, ``pytest``, ... that are forks."""
    folder = Path(os.environ[FOLDER]) / "bin"
    bin_ = Path(sys.executable).parent
    programs = {"python": [], **{name: [str(bin_ / name)] for name in _PROGRAMS if (bin_ / name).exists()}}
    if not folder.exists():
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, first in programs.items():
            (new / name).write_text(
                f"#!{sys.executable} -ISE\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"import warm_client\nwarm_client.main({sys.executable!r}, {first} + sys.argv[1:])\n"
            )
            (new / name).chmod(0o755)
        with suppress(OSError):  # another process has been quicker
            new.rename(folder)
    return folder


def start_for(env: Mapping[str, str]) -> None:
    """Start the Pythons for ``env``, and for workers of a launcher that sets OMP_NUM_THREADS=1."""
    for environ in (env, {**env, "OMP_NUM_THREADS": "1"}):
        channel = connect(environ)
        if channel is not None:
            channel.close()


def main(python: str, args: list[str]) -> NoReturn:
    """Do what ``python *args`` does: in a fork, or in this process if no Python for this environment runs."""
    streams = {number: number for number in (0, 1, 2) if is_open(number)}
    channel = connect(os.environ, starts=False) if can_run(args) else None
    if channel is None:
        os.execv(python, [python, *args])
    if channel.fileno() < 3:  # the socket has the number of a stream that is closed
        channel = socket.socket(fileno=fcntl.fcntl(channel.detach(), fcntl.F_DUPFD_CLOEXEC, 3))
    pid, early = 0, []

    def forward(number: int, _: object) -> None:
        if pid == 0:
            early.append(number)
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    ignored = {number for number in forwarded if signal.getsignal(number) is signal.SIG_IGN}
    for number in {*forwarded} - ignored:
        signal.signal(number, forward)
    send(channel, args, os.environ, os.getcwd(), streams)
    started = channel.recv(100).decode().split()
    if not started:
        sys.exit("the warm Python could not fork")
    pid = int(started[1])
    for number in early:
        forward(number, None)
    status = _wait(channel)
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(1)


def is_open(number: int) -> bool:
    """True if this process has a file with this number."""
    with suppress(OSError):
        os.fstat(number)
        return True
    return False
