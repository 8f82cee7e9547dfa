"""Worker processes on this machine: start them, wait for them, and name the rank that failed first.

Python's fork server has imported torch already, so its workers start in a fraction of a second. Each worker
receives the environment and the output files of its launch before it imports the user's code.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from ignite_dist.errors import RankFailedError
from ignite_dist.values import serialization
from ignite_dist.workers.failures import (
    FailedRank,
    Failure,
    count_oom_kills,
    failure_of,
    is_cause_known,
    sigkill_reason,
    silent_failure,
)
from ignite_dist.workers.fork_server import (
    Launch,
    context_of,
    encode_call,
    hidden_main,
    import_in_idle_server,
)
from ignite_dist.workers.nodes import ALONE, Nodes
from ignite_dist.workers.worker import TERMINATE_SECONDS, ReportPipe, SentCall, run_alone, worker_main

_logger = logging.getLogger(__name__)

_NONE = serialization.encode(None)

# After the first failure, the other workers have this long to report their own failures.
_GRACE_SECONDS = 1.0
# Longer while every reported failure is a consequence: the root cause may still be cleaning up.
_LONG_GRACE_SECONDS = 4.0


# --- starting ----------------------------------------------------------------------------------------


def start(
    entry: Callable[..., Any],
    entry_kwargs: Mapping[str, Any],
    environs: Sequence[Mapping[str, str]],
    *,
    store: object,
    start_method: str | None,
    daemon: bool,
    ranks_per_process: int = 1,
    run: Callable[[SentCall, Sequence[ReportPipe]], Failure | None] | None = None,
    nodes: Nodes = ALONE,
) -> Workers:
    """Start a process per environment; local rank ``i`` runs ``entry(i, **entry_kwargs)``.

    Args:
        entry: a function that pickle or cloudpickle can encode; any function if ``start_method`` is "fork".
        entry_kwargs: arguments of ``entry``, with the same limit.
        environs: for each process, the variables to add to the launcher's environment.
        store: the workers' store; kept alive until the workers end.
        start_method: a start method of ``multiprocessing``. Default: see ``fork_server.context_of``.
        daemon: True for daemonic processes.
        ranks_per_process: number of ranks in each process.
        run: runs all ranks of a process, given their call and a :class:`ReportPipe` for each rank; returns a
            failure if a rank failed. By default a process runs the single rank ``RANK``.
        nodes: connections to the launchers on other machines.

    Raises:
        TypeError: ``entry`` cannot be encoded. No process was started.
    """
    workers: list[_Worker] = []
    try:
        context = context_of(start_method)
        call = partial(entry, **entry_kwargs)
        sent_call = call if context.get_start_method() == "fork" else encode_call(call)
        oom_kills = count_oom_kills()
        for position, environ in enumerate(environs):
            first = position * ranks_per_process
            ranks = range(first, first + ranks_per_process)
            workers += _start_process(context, run or run_alone, sent_call, ranks, environ, daemon)
    except BaseException:
        _end(Workers(workers, store, None, nodes).processes)
        nodes.close()  # a stored traceback would keep the connections open
        raise
    _launches[:] = [launch for launch in _launches if launch.may_run()]
    _launches.append(Workers(workers, store, oom_kills, nodes))
    return _launches[-1]


def _start_process(
    context: BaseContext,
    run: Callable[[SentCall, Sequence[ReportPipe]], Failure | None],
    sent_call: SentCall,
    local_ranks: Sequence[int],
    environ: Mapping[str, str],
    daemon: bool,
) -> list[_Worker]:
    """Start one process for the ``local_ranks``, with a pipe for each rank and one for fatal signals."""
    pipes = {local_rank: context.Pipe(duplex=False) for local_rank in local_ranks}
    fault_reader, fault_writer = context.Pipe(duplex=False)
    os.set_blocking(fault_writer.fileno(), False)  # a dying process must not wait for a reader
    complete = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    complete.update(environ)
    process = context.Process(  # type: ignore[attr-defined]
        target=worker_main,
        args=(
            run,
            sent_call,
            [ReportPipe(local_rank, sender) for local_rank, (_, sender) in pipes.items()],
            (complete, fault_writer) if context.get_start_method() == "fork" else None,
            multiprocessing.get_start_method(allow_none=True),
        ),
        name=Launch(f"rank {environ.get('RANK', local_ranks[0])}", complete, fault_writer),
        daemon=daemon,
    )
    with hidden_main():
        process.start()
    fault_writer.close()
    fault = _Fault(fault_reader)
    for _, sender in pipes.values():
        sender.close()
    return [
        _Worker(process, receiver, fault, local_rank, int(environ.get("RANK", local_rank)))
        for local_rank, (receiver, _) in pipes.items()
    ]


# Running launches: a script may drop the result of spawn(join=False), but the workers need the store.
_launches: list[Workers] = []


@atexit.register
def _join_launches() -> None:
    """At exit: wait for the workers that the script did not join, and log failures."""
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    for workers in [launch for launch in _launches if launch.belong_to_this_process()]:
        if is_interrupted or any(process.daemon for process in workers.processes):
            workers.terminate()
            continue
        try:
            workers.join()
        except RankFailedError as error:
            _logger.error("A launch that was not joined has failed. %s", error)


# --- in the launcher ---------------------------------------------------------------------------------


@dataclass
class _Fault:
    """Output of a process's fault handler: the stacks of all threads at a fatal signal."""

    reader: connection.Connection
    text: str = ""

    def read(self) -> str:
        """The whole output, after the process has ended."""
        if not self.reader.closed:
            os.set_blocking(self.reader.fileno(), False)  # child processes may keep the pipe open
            with open(self.reader.fileno(), "rb", buffering=0, closefd=False) as file:
                self.text = (file.read() or b"").decode(errors="replace")
            self.reader.close()
        return self.text


@dataclass
class _Worker:
    """A rank and its process. The process may run other ranks too."""

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
        """Read the messages that the worker has sent, without waiting."""
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
            pass  # the worker has closed the pipe; the exit code gives the reason

    def take_result(self) -> Any:
        """Decode the worker's result and free its bytes. A decoding error is a failure."""
        payload, self.result = self.result or b"", None
        try:
            return serialization.decode(payload)
        except Exception as error:  # raised by a class of the user
            self.failure = failure_of(error)
            return None

    def reap(self) -> None:
        """Record how the process ended."""
        self.read()
        self.process.join()
        self.done = True
        code, fault = self.process.exitcode or 0, self.fault.read()
        if self.failure is None and self.result is None:
            self.failure = silent_failure(code, fault)

    @property
    def has_failed(self) -> bool:
        """True if the worker failed. ``sys.exit(0)`` does not count."""
        return self.failure is not None and not self.failure.is_exit_0

    def failed_rank(self) -> FailedRank | None:
        """The rank and its failure; None if the worker has not failed."""
        if self.failure is None:
            return None
        pid = int(self.process.pid or 0)
        return FailedRank(self.rank, self.local_rank, pid, socket.gethostname(), self.failure, self.started)


class Workers:
    """The running workers of one launch, in the order of their local ranks."""

    def __init__(self, workers: list[_Worker], store: object, oom_kills: int | None, nodes: Nodes) -> None:
        self._workers = workers
        self._nodes = nodes
        self._store = store  # kept in the launcher, so that the store outlives every worker
        self._oom_kills = oom_kills  # the count before the workers started
        self._launcher_pid = os.getpid()
        self._was_terminated = False
        self._results: list[Any] | None = None
        # Each join makes a new error: a stored one would keep this object and its frames alive.
        self._error: Callable[[], RankFailedError] | None = None

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in the order of their local ranks."""
        return list(dict.fromkeys(worker.process for worker in self._workers))

    def belong_to_this_process(self) -> bool:
        """True if this process started the workers. False in a fork of the launcher."""
        return self._launcher_pid == os.getpid()

    def may_run(self) -> bool:
        """True if a worker of the job may still run, on this machine or another one."""
        # A fork lacks the store's threads, so it must not destroy the store.
        if not self.belong_to_this_process():
            return True
        return any(process.is_alive() for process in self.processes) or self._nodes.has_unfinished_peers()

    def pids(self) -> list[int]:
        """The process ids, by local rank. XLA replicas may share a process."""
        return [int(worker.process.pid or 0) for worker in self._workers]

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the workers. Returns their results by local rank; None after ``timeout`` seconds.

        Raises:
            RankFailedError: a worker failed. Names the rank that failed first. The other workers were ended.
        """
        if self._results is None and self._error is None:
            try:
                if not self._wait(timeout):
                    return None
            except BaseException:  # Ctrl-C, for example
                self.terminate()
                raise
            self._conclude()
        if self._error is not None:
            raise self._error()
        return self._results

    def terminate(self) -> None:
        """End the running workers: SIGTERM, then SIGKILL for workers that ignore SIGTERM."""
        self._was_terminated = True
        _end(self.processes)
        self._nodes.close()
        self._forget()

    def _wait(self, timeout: float | None) -> bool:
        """Wait until all workers end, or a failure's grace period is over. Returns False at the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while (running := self._running()) or self._nodes.has_unfinished_peers():
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
            self._nodes.report(self._local_failures(), is_done=not self._running())
            if self._has_failed():
                failed_at = failed_at or time.monotonic()
                deadline = failed_at + (_GRACE_SECONDS if self._is_cause_known() else _LONG_GRACE_SECONDS)
        return True

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.done]

    def _local_failures(self) -> list[FailedRank]:
        return [failed for worker in self._workers if (failed := worker.failed_rank()) is not None]

    def _has_failed(self) -> bool:
        return any(worker.has_failed for worker in self._workers) or self._nodes.has_failure()

    def _is_cause_known(self) -> bool:
        return self._nodes.has_lost_node() or is_cause_known(
            [*self._local_failures(), *self._nodes.failed_ranks()]
        )

    def _conclude(self) -> None:
        """Collect the results or the failures, and end the launch."""
        if not self._has_failed():
            results = [worker.take_result() for worker in self._workers]
        failed, has_failed = [*self._local_failures(), *self._nodes.failed_ranks()], self._has_failed()
        about_sigkill = "" if self._was_terminated else sigkill_reason(self._oom_kills)
        if self._was_terminated:  # a worker ended by terminate() may not have started yet
            failed = [rank._replace(started=True) for rank in failed]
        self._nodes.report(self._local_failures(), is_done=True)
        self._nodes.close()
        if has_failed:
            self.terminate()
            self._error = partial(self._nodes.error_of, failed, about_sigkill)
        else:
            self._results = results
        for worker in self._workers:
            worker.receiver.close()
            worker.fault.reader.close()
        self._forget()

    def _forget(self) -> None:
        """Release the store, after the end of the launch."""
        self._store = None
        if self in _launches:
            _launches.remove(self)
            if not _launches:
                import_in_idle_server()


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the processes within seconds, even after repeated Ctrl-C."""
    try:
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
