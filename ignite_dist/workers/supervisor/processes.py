"""Worker processes on this machine: start them, wait for them, and name the rank that failed first.

Python's fork server has imported torch already, so its workers start in a fraction of a second. Each worker
receives the environment and the output files of its launch before it imports the user's code.
"""

from __future__ import annotations

import atexit
import errno
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection, reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from ignite_dist.errors import LaunchError, RankFailedError
from ignite_dist.internals import limits
from ignite_dist.workers import process_end
from ignite_dist.workers.failures import (
    FailedRank,
    Failure,
    error_of,
    is_cause_known,
)
from ignite_dist.workers.interrupts import OTHER_RANK_FAILED
from ignite_dist.workers.log_settings import LogSettings
from ignite_dist.workers.output import ForwardedOutput, InheritedFile
from ignite_dist.workers.sent_calls import EncodedCall, encode_call
from ignite_dist.workers.supervisor.attempts import JOB_ID_VARIABLE
from ignite_dist.workers.supervisor.fork_server import (
    Launch,
    context_of,
    exit_if_main_is_not_guarded,
    hidden_main,
    import_in_idle_server,
    interrupt_delayed,
)
from ignite_dist.workers.supervisor.nodes import ALONE, Nodes
from ignite_dist.workers.supervisor.out_of_memory import count_oom_kills, sigkill_reason
from ignite_dist.workers.supervisor.running_worker import FaultOutput, RunningWorker
from ignite_dist.workers.supervisor.termination import (
    GRACE_VARIABLE,
    SigtermDelay,
    SigtermReceived,
    end_processes,
    grace_seconds,
)
from ignite_dist.workers.worker import TERMINATE_SECONDS, ReportPipe, SentCall, run_alone, worker_main

_logger = logging.getLogger(__name__)

# After the first failure, the other workers have this long to report their own failures.
_GRACE_SECONDS = 1.0
# Longer while every reported failure is a consequence: the root cause may still be cleaning up.
_LONG_GRACE_SECONDS = 4.0
_OUT_OF_STEP_HINT = (
    "The ranks were interrupted in different calls: idist.any_interrupted() ends all in the same step. "
)


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
    prefix_output: bool = False,
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
        prefix_output: True to put the rank before each line of output.

    Raises:
        TypeError: ``entry`` cannot be encoded. No process was started.
        EnvironmentVariablesError: ``IGNITE_DIST_GRACE_SECONDS`` is not a number. No process was started.
        LaunchError: a limit of the system, or of this process, does not allow the processes.
    """
    exit_if_main_is_not_guarded()
    workers: list[RunningWorker] = []
    output = ForwardedOutput(has_prefix=prefix_output)
    try:
        _check_files(environs, store, has_pipes=prefix_output)
        grace = grace_seconds()
        context = context_of(start_method)
        call = partial(entry, **entry_kwargs)
        sent_call = call if context.get_start_method() == "fork" else encode_call(call)
        oom_kills, log_settings = count_oom_kills(), LogSettings.of_this_process()
        for position, environ in enumerate(environs):
            first = position * ranks_per_process
            ranks = range(first, first + ranks_per_process)
            workers += _start_process(
                context, run or run_alone, sent_call, ranks, environ, daemon, output, log_settings
            )
    except BaseException as error:
        end_processes(list(dict.fromkeys(worker.process for worker in workers)))
        nodes.close()  # a stored traceback would keep the connections open
        output.close()
        if isinstance(error, (BlockingIOError, EOFError)):  # no more processes here, or in the fork server
            reason = "the fork server has ended" if isinstance(error, EOFError) else str(error)
            limit = limits.sentences_about(os.strerror(errno.EAGAIN))
            raise LaunchError(f"The workers cannot be started: {reason}. {limit}".strip()) from error
        raise
    output.start()
    _launches[:] = [launch for launch in _launches if launch.may_run()]
    _launches.append(Workers(workers, store, oom_kills, nodes, output, grace))
    return _launches[-1]


# Files of this process: for a launch, for each worker, for its output, and for each rank in the store.
_NUM_FILES, _PER_PROCESS, _PER_OUTPUT, _PER_RANK = 6, 5, 4, 3


def _check_files(environs: Sequence[Mapping[str, str]], store: object, has_pipes: bool) -> None:
    """Raise if this process may not open enough files. The store would not answer, and workers would hang."""
    num_ranks = int(environs[0].get("WORLD_SIZE", len(environs))) if environs and store is not None else 0
    per_process = _PER_PROCESS + has_pipes * _PER_OUTPUT
    num_needed = _NUM_FILES + per_process * len(environs) + _PER_RANK * num_ranks
    limits.check_files(num_needed, f"a launch of {len(environs)} workers")


# Variables of the job to which this process belongs itself.
_OF_OTHER_JOBS = ("TORCHELASTIC_", JOB_ID_VARIABLE)


def _start_process(
    context: BaseContext,
    run: Callable[[SentCall, Sequence[ReportPipe]], Failure | None],
    sent_call: SentCall,
    local_ranks: Sequence[int],
    environ: Mapping[str, str],
    daemon: bool,
    output: ForwardedOutput,
    log_settings: LogSettings,
) -> list[RunningWorker]:
    """Start one process for the ``local_ranks``, with a pipe for each rank and two for signals."""
    pipes = {local_rank: context.Pipe(duplex=False) for local_rank in local_ranks}
    reports = [ReportPipe(local_rank, sender) for local_rank, (_, sender) in pipes.items()]
    fault_reader, fault_writer = context.Pipe(duplex=False)
    control_reader, control_writer = context.Pipe(duplex=False)
    os.set_blocking(fault_writer.fileno(), False)  # a dying process must not wait for a reader
    complete = {key: value for key, value in os.environ.items() if not key.startswith(_OF_OTHER_JOBS)}
    complete.update(environ)
    label = _label(environ, local_ranks)
    outputs = output.pipes_for(label, local_ranks[0])
    inherited = {fd: InheritedFile(file) for fd, file in outputs.items()}
    method = str(context.get_start_method())
    launch = (complete, fault_writer, inherited) if method == "fork" else None
    process = context.Process(  # type: ignore[attr-defined]
        target=worker_main,
        args=(
            *(run, sent_call, reports, control_reader, launch),
            *(method, _default_start_method(), log_settings),
        ),
        name=Launch(label, complete, fault_writer, outputs),
        daemon=daemon,
    )
    try:
        careful = {"forkserver": interrupt_delayed, "fork": process_end.garbage_kept}.get(method, nullcontext)
        if isinstance(sent_call, EncodedCall):
            sent_call.refuse_semaphores_of_fork()
        with hidden_main(), careful():
            process.start()
    except BaseException as error:
        if process.pid is not None:  # a delayed Ctrl-C: the process runs, and nobody else knows it
            end_processes([process])
        better = _sharing_error(error, method) if isinstance(error, Exception) else None
        if better is None:
            raise
        raise better from error
    finally:
        for file in outputs.values():
            os.close(file)
    for received in (fault_writer, control_reader, *(sender for _, sender in pipes.values())):
        received.close()
    fault = FaultOutput(fault_reader)
    return [
        RunningWorker(process, receiver, fault, control_writer, rank, int(environ.get("RANK", rank)))
        for rank, (receiver, _) in pipes.items()
    ]


def _sharing_error(error: Exception, method: str) -> TypeError | None:
    """The error if ``multiprocessing`` cannot send a shared argument to the new process; else None."""
    if "too many fds" in str(error):
        advice = "It takes about 250 shared tensors, queues and locks. Pass start_method='spawn'."
    elif "in a fork context" in str(error):
        advice = f"Make it with multiprocessing.get_context({method!r}), or pass start_method='fork'."
    elif any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
        advice = "Send the underlying data instead."
    else:
        return None
    reason = f"{str(error).rstrip('.')}. {advice}"
    return TypeError(f"An argument cannot be shared with workers of start_method {method!r}: {reason}")


def _label(environ: Mapping[str, str], local_ranks: Sequence[int]) -> str:
    """The name of a process. XLA replicas may share a process."""
    if len(local_ranks) > 1:
        return f"ranks {local_ranks[0]}-{local_ranks[-1]}"
    return f"rank {environ.get('RANK', local_ranks[0])}"


def _default_start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


# Running launches: a script may drop the result of spawn(join=False), but the workers need the store.
_launches: list[Workers] = []


@atexit.register
def _join_launches() -> None:
    """At exit: wait for the workers that the script did not join, and log failures."""
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    for workers in [launch for launch in _launches if launch.belong_to_this_process()]:
        if is_interrupted:
            workers.pass_on(signal.SIGINT, KeyboardInterrupt.__name__)
            continue
        if any(process.daemon for process in workers.processes):
            workers.terminate()
            continue
        try:
            workers.join()
        except RankFailedError as error:
            _logger.error("A launch that was not joined has failed. %s", error)


# --- waiting and ending -------------------------------------------------------------------------------


class Workers:
    """The running workers of one launch, in the order of their local ranks."""

    def __init__(
        self,
        workers: list[RunningWorker],
        store: object,
        oom_kills: int | None,
        nodes: Nodes,
        output: ForwardedOutput,
        grace_seconds: int = 0,
    ) -> None:
        self._workers = workers
        self._nodes = nodes
        self._store = store  # kept in the launcher, so that the store outlives every worker
        self._oom_kills = oom_kills  # the count before the workers started
        self._output = output
        self._grace_seconds = grace_seconds
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

        Ctrl-C raises KeyboardInterrupt in the workers, too. SIGTERM is sent to the workers if the main thread
        is in this method and has no handler for SIGTERM. The workers then have 10 s to save and to end, or
        ``IGNITE_DIST_GRACE_SECONDS``. A second Ctrl-C ends them at once.

        Raises:
            RankFailedError: a worker failed. Names the rank that failed first. The other workers were ended.
        """
        if self._results is None and self._error is None:
            with SigtermDelay() as sigterm:
                try:
                    if not self._wait(timeout, sigterm):
                        return None
                    self._conclude()
                except BaseException as error:  # Ctrl-C, for example
                    is_interrupt = isinstance(error, KeyboardInterrupt)
                    number = signal.SIGINT if is_interrupt else signal.SIGTERM
                    reason = number.name if isinstance(error, SigtermReceived) else type(error).__name__
                    self.pass_on(number, reason)
                    if is_interrupt:  # the user does not need the lines of this package
                        raise error.with_traceback(None)  # noqa: B904
                    raise
        if self._error is not None:
            raise self._error()
        return self._results

    def pass_on(self, number: signal.Signals, reason: str) -> None:
        """Let the workers receive a signal of the launcher, and end them after the grace period."""
        deadline = time.monotonic() + self._grace_seconds
        self._was_terminated = True
        try:
            self._send(number, self._running())
            if self._running():
                workers = "the workers" if number == signal.SIGINT else "workers that handle SIGTERM"
                text = "%s: %s have %d s to save and to end (%s). Ctrl-C ends them now."
                _logger.warning(text, reason, workers, self._grace_seconds, GRACE_VARIABLE)
            while self._running() and (left := deadline - time.monotonic()) > 0:
                self._read(left)
            if failed := [rank for rank in self._local_failures() if not rank.failure.is_end_by_signal]:
                hint = _OUT_OF_STEP_HINT if any(rank.failure.is_out_of_step for rank in failed) else ""
                _logger.error("A worker failed after the %s. %s%s", reason, hint, error_of(failed))
        except KeyboardInterrupt:
            pass  # the second one: do not wait
        finally:
            if self._running():
                ranks = self._running_ranks()
                _logger.warning("The workers had not ended, and are ended now: ranks %s", ranks)
            self.terminate()

    def terminate(self) -> None:
        """End the running workers: SIGTERM, then SIGKILL for workers that ignore SIGTERM."""
        self._was_terminated = True
        end_processes(self.processes)
        self._nodes.close()
        self._forget()

    def _wait(self, timeout: float | None, sigterm: SigtermDelay) -> bool:
        """Wait until all workers end, or a failure's grace period is over. Returns False at the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        while self._running() or self._nodes.has_unfinished_peers():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read(left, sigterm.fds[:1]):
                return failed_at is not None
            if sigterm.received:
                raise SigtermReceived
            if self._has_failed():
                failed_at = failed_at or time.monotonic()
                deadline = failed_at + (_GRACE_SECONDS if self._is_cause_known() else _LONG_GRACE_SECONDS)
        return True

    def _wait_for_ends(self) -> None:
        """Interrupt the ranks that still run their function, and give all processes time to end.

        Those whose ranks have reported may run handlers of ``atexit``.
        """
        self._send(OTHER_RANK_FAILED, self._busy())
        start = time.monotonic()
        while self._running():
            are_ending = len(self._busy()) < len(self._running())
            seconds = self._grace_seconds if are_ending else min(TERMINATE_SECONDS, self._grace_seconds)
            left = start + seconds - time.monotonic()
            self._read(max(0.0, left))
            if left <= 0 and self._running():
                variable = f" ({GRACE_VARIABLE})" if are_ending else ""
                text = "Workers had %g s to end after a failure%s, and are ended now: ranks %s"
                _logger.warning(text, seconds, variable, self._running_ranks())
                break

    @staticmethod
    def _send(number: int, workers: list[RunningWorker]) -> None:
        for control in {worker.control for worker in workers}:
            with suppress(OSError):  # the process has ended
                control.send_bytes(bytes([number]))

    def _read(self, timeout: float | None, fds: tuple[int, ...] = ()) -> bool:
        """Read what workers and nodes send, or wait for one of ``fds``. Returns False at the timeout."""
        running = self._running()
        waited_for: set[Any] = {worker.process.sentinel for worker in running}
        waited_for |= {worker.receiver for worker in running if not (worker.has_reported or worker.is_torn)}
        ready = set(connection.wait([*waited_for, *fds, *self._nodes.waited_for()], timeout))
        for worker in running:
            if worker.receiver in ready:
                worker.read()
            if worker.process.sentinel in ready:
                worker.reap()
        if ready:
            self._nodes.read(ready)
            self._nodes.report(self._local_failures(), is_done=not self._running())
        return bool(ready)

    def _running(self) -> list[RunningWorker]:
        return [worker for worker in self._workers if not worker.done]

    def _running_ranks(self) -> str:
        return ", ".join(str(worker.rank) for worker in self._running())

    def _busy(self) -> list[RunningWorker]:
        """The workers in whose process a rank still runs its function."""
        processes = {worker.process for worker in self._running() if not worker.has_reported}
        return [worker for worker in self._running() if worker.process in processes]

    def _local_failures(self) -> list[FailedRank]:
        """The failures of this launcher's workers. No other launcher can say why one got a SIGKILL."""
        failed = [rank for worker in self._workers if (rank := worker.failed_rank()) is not None]
        if self._was_terminated:
            reason = ""
        elif any(rank.failure.exit_code == -signal.SIGKILL for rank in failed):
            reason = sigkill_reason(self._oom_kills)
        else:
            return failed
        return [rank._replace(failure=replace(rank.failure, about_sigkill=reason)) for rank in failed]

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
        if self._was_terminated:  # a worker ended by terminate() may not have started yet
            failed = [rank._replace(started=True) for rank in failed]
        self._nodes.report(self._local_failures(), is_done=True)
        if not (has_failed and self._nodes.restarts_left):
            self._nodes.close()
        if has_failed:
            self._wait_for_ends()
            known = {rank.rank for rank in failed}
            late = [rank for rank in self._local_failures() if rank.rank not in known]
            failed += [rank for rank in late if rank.failure.is_of_clean_up]
            end_processes(self.processes)
            self._error = partial(self._nodes.error_of, failed)
        else:
            self._results = results
        for worker in self._workers:
            worker.receiver.close()
            worker.control.close()
            worker.fault.reader.close()
        self._forget()

    def _forget(self) -> None:
        """Release the store and the output, after the end of the launch."""
        self._output.close()
        self._store = None
        if self in _launches:
            _launches.remove(self)
            if not _launches:
                import_in_idle_server()
