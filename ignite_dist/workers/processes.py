"""Worker processes on this machine: start them in a fraction of a second, and say which one failed first.

Workers come from Python's fork server, which has torch imported already. What a worker needs of *this*
launch (the environment, where output goes) is handed to it before anything of the user's is imported.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, reduction
from multiprocessing.context import BaseContext, get_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ignite_dist.devices import num_cores
from ignite_dist.errors import RankFailedError
from ignite_dist.values import safe_objects, serialization
from ignite_dist.workers.failures import (
    Failed,
    Failure,
    count_oom_kills,
    failure_of,
    is_cause_known,
    outcome_of,
    silent_failure,
    why_killed,
)
from ignite_dist.workers.nodes import ALONE, Nodes

__all__ = ["Post", "Workers", "start"]

_logger = logging.getLogger(__name__)

_NONE = serialization.encode(None)
_Sent = bytes | Callable[..., Any]  # what a rank calls, encoded unless its process is a fork of this one

# How long after the first failure the other workers may go on: to report what they died of, no more.
_GRACE_SECONDS = 1.0
# The same while all that is known are consequences: that one of them failed has yet to be told by the one
# who began it, which may be busy with cleaning up.
_PATIENCE_SECONDS = 4.0
# How long a worker may take to heed SIGTERM.
_TERMINATE_SECONDS = 3.0


# --- starting ----------------------------------------------------------------------------------------


def start(
    entry: Callable[..., Any],
    entry_kwargs: Mapping[str, Any],
    environs: Sequence[Mapping[str, str]],
    *,
    serving: object,
    start_method: str | None,
    daemon: bool,
    ranks_per_process: int = 1,
    run: Callable[[_Sent, Sequence[Post]], Failure | None] | None = None,
    nodes: Nodes = ALONE,
) -> Workers:
    """Start a process per environment; local rank ``i`` runs ``entry(i, **entry_kwargs)``.

    Args:
        entry: anything that pickle or cloudpickle can send; anything at all if ``start_method`` is "fork".
        entry_kwargs: likewise.
        environs: what each process's environment has beside the launcher's own.
        serving: what the workers meet at; kept alive as long as they are.
        start_method: one of ``multiprocessing``'s; the fork server where there is one.
        daemon: whether the workers are daemonic processes.
        ranks_per_process: how many ranks each process runs.
        run: how a process runs its ranks, from what each of them is sent and where each reports to; it
            returns a failure if there was one. Without it the process is the rank that ``RANK`` says.
        nodes: the launchers on other machines that start other ranks of the same job.

    Raises:
        TypeError: ``entry`` cannot be sent; nothing was started.
    """
    workers: list[_Worker] = []
    try:
        context = _context(start_method)
        call = partial(entry, **entry_kwargs)
        sent = call if context.get_start_method() == "fork" else _encode(call)
        oom_kills = count_oom_kills()
        for position, environ in enumerate(environs):
            first = position * ranks_per_process
            ranks = range(first, first + ranks_per_process)
            workers += _start_process(context, run or _run_alone, sent, ranks, environ, daemon)
    except BaseException:
        _end(Workers(workers, serving, None, nodes).processes)
        nodes.leave()  # or the others would wait for as long as somebody keeps the traceback
        raise
    _kept[:] = [kept for kept in _kept if kept.may_run()]
    _kept.append(Workers(workers, serving, oom_kills, nodes))
    return _kept[-1]


def _start_process(
    context: BaseContext,
    run: Callable[[_Sent, Sequence[Post]], Failure | None],
    sent: _Sent,
    local_ranks: Sequence[int],
    environ: Mapping[str, str],
    daemon: bool,
) -> list[_Worker]:
    """Start one process, which runs the ``local_ranks``, and whatever of it the launcher listens to."""
    pipes = {local_rank: context.Pipe(duplex=False) for local_rank in local_ranks}
    fault_reader, fault_writer = context.Pipe(duplex=False)
    os.set_blocking(fault_writer.fileno(), False)  # a process that dies must not wait for a reader
    complete = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    complete.update(environ)
    process = context.Process(  # type: ignore[attr-defined]
        target=_work,
        args=(
            run,
            sent,
            [Post(local_rank, sender) for local_rank, (_, sender) in pipes.items()],
            (complete, fault_writer) if context.get_start_method() == "fork" else None,
            multiprocessing.get_start_method(allow_none=True),
        ),
        name=_Launch(f"rank {environ.get('RANK', local_ranks[0])}", complete, fault_writer),
        daemon=daemon,
    )
    with _hidden_main():
        process.start()
    fault_writer.close()
    fault = _Fault(fault_reader)
    for _, sender in pipes.values():
        sender.close()
    return [
        _Worker(process, receiver, fault, local_rank, int(environ.get("RANK", local_rank)))
        for local_rank, (receiver, _) in pipes.items()
    ]


# What a script does not keep of spawn(join=False) is kept here, and where its workers meet, until they end.
_kept: list[Workers] = []


@atexit.register
def _join_kept() -> None:
    """Take what the workers still send before Python waits for their end, and say what became of them."""
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    for workers in [kept for kept in _kept if kept.are_ours()]:
        if is_interrupted or any(process.daemon for process in workers.processes):
            workers.terminate()
            continue
        try:
            workers.join()
        except RankFailedError as error:
            _logger.error("A launch that nobody joined has failed. %s", error)


def _encode(call: Callable[..., Any]) -> bytes:
    """The call as bytes; by value where the workers cannot import this process's main module."""
    try:
        return serialization.encode(call) if _main_is_importable() else serialization.encode_by_value(call)
    except TypeError as error:
        reason = error.__cause__ or error
        raise TypeError(
            f"The function given to spawn, or one of its arguments, cannot be sent to a worker: {reason}"
        ) from error


def _main_is_importable() -> bool:
    """Whether workers can import this process's main module: not from a notebook, ``-c`` or a pipe."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and os.path.exists(path))


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep ``multiprocessing`` from importing a main module that claims a file which does not exist."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or _main_is_importable():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def _context(start_method: str | None) -> BaseContext:
    allowed = multiprocessing.get_all_start_methods()
    method = start_method or ("forkserver" if "forkserver" in allowed else "spawn")
    if method not in allowed:
        raise ValueError(f"Unknown start_method {method!r}. Allowed here: {', '.join(map(repr, allowed))}.")
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # No effect on a server that is running already. Not "__main__", Python's default: the main module
        # is imported in each worker, where it sees the environment of its own launch.
        server = multiprocessing.forkserver._forkserver
        wanted = [name for name in server._preload_modules if name != "__main__"]  # type: ignore[attr-defined]
        context.set_forkserver_preload(list(dict.fromkeys([*wanted, "torch", "ignite_dist"])))
        with _server_lock:
            if server._forkserver_pid is None:  # type: ignore[attr-defined]
                _start_server(server)
    return context


_server_lock = threading.Lock()


def _start_server(server: Any) -> None:
    """Start the fork server so that it imports what this process would.

    Python before 3.13 tells it nothing of our path, so it would preload the package that is installed.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        folder for folder in sys.path if folder and isinstance(folder, str)
    )
    try:
        server.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Launch(str):
    """A process name that carries the launch's environment and outputs with it.

    ``multiprocessing`` sends the name first of all, before it imports the main module in the worker, and
    has no other hook that early.
    """

    environ: dict[str, str]
    fault_writer: connection.Connection | None

    def __new__(cls, name: str, environ: dict[str, str], fault_writer: connection.Connection) -> _Launch:
        self = super().__new__(cls, name)
        self.environ = environ
        self.fault_writer = fault_writer
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        popen = get_spawning_popen()
        outputs = {}
        if popen is not None and popen.method == "forkserver":
            # The server holds the output of the launcher's first launch; pytest, for one, changes it since.
            outputs = {fd: reduction.DupFd(fd) for fd in (1, 2) if _is_open(fd)}
        # The name is sent a second time, with the process; a file descriptor must not be.
        fault_writer, self.fault_writer = self.fault_writer, None
        return _take_over, (str(self), self.environ, fault_writer, outputs)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _take_over(
    name: str,
    environ: Mapping[str, str],
    fault_writer: connection.Connection | None,
    outputs: Mapping[int, Any],
) -> str:
    """In the worker: become a process of this launch."""
    if fault_writer is not None and not faulthandler.is_enabled():  # else the user's own tells it, elsewhere
        faulthandler.enable(fault_writer)  # which keeps it open
    os.environ.clear()
    os.environ.update(environ)
    for fd, duplicate in outputs.items():
        received = duplicate.detach()
        os.dup2(received, fd)
        os.close(received)
    return name


# --- in the worker -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """Where a rank of a worker process reports to the launcher."""

    local_rank: int
    sender: connection.Connection

    def run(self, sent: _Sent, rank: int) -> Failure | None:
        """Make the call that was sent, as the global ``rank``, and report what became of it."""
        self.report(rank)
        outcome = outcome_of(sent, self.local_rank)
        self.report(outcome)
        return outcome if isinstance(outcome, Failure) and not outcome.is_exit_0 else None

    def report(self, message: int | bytes | Failure) -> None:
        """Send the rank, when it starts, or its outcome."""
        try:
            self.sender.send_bytes(pickle.dumps(message))
        except BrokenPipeError:
            sys.exit(1)  # the launcher is gone


def _work(
    run: Callable[[_Sent, Sequence[Post]], Failure | None],
    sent: _Sent,
    posts: Sequence[Post],
    launch: tuple[Mapping[str, str], connection.Connection] | None,
    default_method: str | None,
) -> None:
    # A process started by one method would start its own by that method too: the workers of a DataLoader,
    # which take seconds from a fork server. They are started as they would be in the launcher.
    multiprocessing.set_start_method(default_method, force=True)
    if launch is not None:  # a forked worker has not read its name
        _take_over("", *launch, {})
        safe_objects.ask_again()  # this launch's environment
    _let_go_of_server()
    _set_num_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _seed()
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        failure = run(sent, posts)
    except BaseException as error:  # before any rank could begin
        failure = failure_of(error)
        for post in posts:
            post.report(failure)
    if failure is not None:
        # Peers see our connections close, which ends their wait; the launcher ends what goes on regardless.
        sys.exit(failure.exit_code or 1)


def _let_go_of_server() -> None:
    """Leave the fork server to the launcher: it would live as long as this worker, or its data loaders."""
    server: Any = multiprocessing.forkserver._forkserver
    keeps_alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if keeps_alive is not None:
        os.close(keeps_alive)
    server._forkserver_pid = server._forkserver_address = None  # a forked worker has them from the launcher


def _run_alone(sent: _Sent, posts: Sequence[Post]) -> Failure | None:
    (post,) = posts
    return post.run(sent, int(os.environ["RANK"]))


def _set_num_threads(nproc_per_node: int) -> None:
    """Honour ``OMP_NUM_THREADS``, which torch read when the fork server imported it; else share the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(
        int(wanted) if wanted.isdecimal() and int(wanted) else max(1, num_cores() // nproc_per_node)
    )


def _seed() -> None:
    """Give this worker random numbers of its own, as a new process has, and not those of the fork server."""
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _end_with_launcher() -> None:
    """Wait for the launcher's death and follow it, even out of a collective that never ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_TERMINATE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


# --- in the launcher ---------------------------------------------------------------------------------


@dataclass
class _Fault:
    """What the fault handler of a process has written: where its threads were when a signal ended it."""

    reader: connection.Connection
    text: str = ""

    def read(self) -> str:
        """All that has been written, once the process has ended."""
        if not self.reader.closed:
            os.set_blocking(self.reader.fileno(), False)  # processes of the worker's may live on
            with open(self.reader.fileno(), "rb", buffering=0, closefd=False) as file:
                self.text = (file.read() or b"").decode(errors="replace")
            self.reader.close()
        return self.text


@dataclass
class _Worker:
    """A rank, and the process that it runs in, which may run others too."""

    process: BaseProcess
    receiver: connection.Connection
    fault: _Fault
    local_rank: int
    rank: int
    started: bool = False
    done: bool = False
    result: bytes | None = None
    failure: Failure | None = None

    def read(self) -> None:
        """Take what the worker has sent, until it would block."""
        try:
            while self.receiver.poll():
                message = pickle.loads(self.receiver.recv_bytes())
                if isinstance(message, int):
                    self.rank, self.started = message, True
                elif isinstance(message, Failure):
                    self.failure = message
                    self.result = _NONE if message.is_exit_0 else None
                else:
                    self.result = message
        except (EOFError, OSError):
            pass  # it has closed its end; its exit code says why

    def take_result(self) -> Any:
        """What the worker returned; its bytes are given up. What cannot be decoded here is its failure."""
        payload, self.result = self.result or b"", None
        try:
            return serialization.decode(payload)
        except Exception as error:  # whatever a class of the user's raises
            self.failure = failure_of(error)
            return None

    def reap(self) -> None:
        """Note how the process ended."""
        self.read()
        self.process.join()
        self.done = True
        code, fault = self.process.exitcode or 0, self.fault.read()
        if self.failure is None and self.result is None:
            self.failure = silent_failure(code, fault)

    @property
    def has_failed(self) -> bool:
        """Whether it has failed, as far as it alone is concerned."""
        return self.failure is not None and not self.failure.is_exit_0

    def failed(self) -> Failed | None:
        """The failure and where it happened, if there is one."""
        if self.failure is None:
            return None
        pid = int(self.process.pid or 0)
        return Failed(self.rank, self.local_rank, pid, socket.gethostname(), self.failure, self.started)


class Workers:
    """The running workers of one launch, in the order of their local ranks."""

    def __init__(self, workers: list[_Worker], serving: object, oom_kills: int | None, nodes: Nodes) -> None:
        self._workers = workers
        self._nodes = nodes
        self._serving = serving  # lives in the launcher, so it outlives any worker
        self._oom_kills = oom_kills  # when they were started
        self._launcher_pid = os.getpid()
        self._is_ended_here = False
        self._results: list[Any] | None = None
        # Made anew at each join: an error that is kept keeps the frames that it went through, and this.
        self._error: Callable[[], RankFailedError] | None = None

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in the order of their local ranks."""
        return list(dict.fromkeys(worker.process for worker in self._workers))

    def are_ours(self) -> bool:
        """Whether this process has started them, and not one that it was forked from."""
        return self._launcher_pid == os.getpid()

    def may_run(self) -> bool:
        """Whether one of them, or of those on other machines, runs, as far as this process can tell."""
        # What another process serves must not end here, in a process without its threads.
        if not self.are_ours():
            return True
        return any(process.is_alive() for process in self.processes) or self._nodes.are_awaited()

    def pids(self) -> list[int]:
        """The process ids, by local rank. Replicas of XLA may share a process."""
        return [int(worker.process.pid or 0) for worker in self._workers]

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the workers: their results by local rank, or None if ``timeout`` seconds pass first.

        Raises:
            RankFailedError: a worker failed. The one that failed first is named; the others are ended.
        """
        if self._results is None and self._error is None:
            try:
                if not self._wait(timeout):
                    return None
            except BaseException:  # Ctrl-C, above all
                self.terminate()
                raise
            self._conclude()
        if self._error is not None:
            raise self._error()
        return self._results

    def terminate(self) -> None:
        """End the workers that still run: SIGTERM, and SIGKILL for those that do not heed it."""
        self._is_ended_here = True
        _end(self.processes)
        self._nodes.leave()
        self._serving = None
        if self in _kept:
            _kept.remove(self)

    def _wait(self, timeout: float | None) -> bool:
        """Whether the workers are through: all have ended, or one has failed and the grace is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while (running := self._running()) or self._nodes.are_awaited():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waited_for: set[Any] = {worker.process.sentinel for worker in running}
            waited_for |= {
                worker.receiver for worker in running if worker.result is None and worker.failure is None
            }
            ready = set(connection.wait([*waited_for, *self._nodes.waited_for()], left))
            if not ready:
                return failed_at is not None
            for worker in running:
                if worker.receiver in ready:
                    worker.read()
                if worker.process.sentinel in ready:
                    worker.reap()
            self._nodes.read(ready)
            self._nodes.tell(self._failed_here(), is_done=not self._running())
            if self._has_failed():
                failed_at = failed_at or time.monotonic()
                deadline = failed_at + (_GRACE_SECONDS if self._is_cause_known() else _PATIENCE_SECONDS)
        return True

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.done]

    def _failed_here(self) -> list[Failed]:
        return [one for worker in self._workers if (one := worker.failed()) is not None]

    def _has_failed(self) -> bool:
        return any(worker.has_failed for worker in self._workers) or self._nodes.have_failed()

    def _is_cause_known(self) -> bool:
        return self._nodes.is_one_lost() or is_cause_known([*self._failed_here(), *self._nodes.failed()])

    def _conclude(self) -> None:
        """All have ended, or one has failed: take what they returned, or what they died of."""
        if not self._has_failed():
            results = [worker.take_result() for worker in self._workers]
        failed, has_failed = [*self._failed_here(), *self._nodes.failed()], self._has_failed()
        about_sigkill = "" if self._is_ended_here else why_killed(self._oom_kills)
        if self._is_ended_here:  # so nobody knows whether it could have begun
            failed = [one._replace(started=True) for one in failed]
        self._nodes.tell(self._failed_here(), is_done=True)
        self._nodes.leave()
        if has_failed:
            self.terminate()
            self._error = partial(self._nodes.error_of, failed, about_sigkill)
        else:
            self._results = results
        for worker in self._workers:
            worker.receiver.close()
            worker.fault.reader.close()
        self._serving = None
        if self in _kept:
            _kept.remove(self)


def _end(processes: Sequence[BaseProcess]) -> None:
    """End them within seconds, however often this is interrupted."""
    try:
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
