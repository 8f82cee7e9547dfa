"""Code that a worker process runs before and after the user's function."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from ignite_dist.environments.devices import num_cores
from ignite_dist.internals import limits
from ignite_dist.values import safe_objects
from ignite_dist.values.serialization import Payload
from ignite_dist.workers import own_fork_server, process_end
from ignite_dist.workers.failures import Failure, failure_of, outcome_of
from ignite_dist.workers.interrupts import ReceivedSignals
from ignite_dist.workers.log_settings import LogSettings
from ignite_dist.workers.output import write_whole_lines
from ignite_dist.workers.sent_calls import EncodedCall
from ignite_dist.workers.sent_results import send_result

TERMINATE_SECONDS = 3.0
"""Time for a worker to end after SIGTERM."""

# A rank's call, encoded unless the worker is a fork of the launcher.
SentCall = EncodedCall | Callable[..., Any]


def apply_launch(
    name: str,
    environ: Mapping[str, str],
    fault_writer: connection.Connection | None,
    outputs: Mapping[int, Any],
) -> str:
    """Use the environment and the output files of the launch in this worker. Returns ``name``.

    Called before the worker imports the script, and once more after that without ``fault_writer``.
    """
    if fault_writer is not None:
        _seed()  # the script's own seeds come later
        if not faulthandler.is_enabled():  # keep the user's handler
            faulthandler.enable(fault_writer)  # keeps the pipe open
    if any(os.environ.get(name) != environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")):
        tempfile.tempdir = None  # the fork server has found the folder of its own environment
    os.environ.clear()
    os.environ.update(environ)
    for fd, duplicate in outputs.items():
        received = duplicate.detach()
        os.dup2(received, fd)
        os.close(received)
    write_whole_lines(outputs)
    return name


@dataclass(frozen=True)
class ReportPipe:
    """The pipe through which a rank reports to the launcher."""

    local_rank: int
    sender: connection.Connection

    def run(self, sent_call: SentCall, rank: int) -> Failure | None:
        """Make the call as the global ``rank``, and report its outcome. Returns the failure, if any.

        A forked child of the function may get here too. It is not a rank and reports nothing: its error goes
        to stderr.
        """
        self.report(rank)
        pid = os.getpid()
        outcome = outcome_of(sent_call, self.local_rank)
        if os.getpid() == pid:
            self.report(outcome)
        elif isinstance(outcome, Failure):
            with suppress(Exception):  # the child has closed its stderr: nobody reads it
                sys.stderr.write(outcome.last_output)
        return outcome if isinstance(outcome, Failure) and not outcome.is_exit_0 else None

    def report(self, message: int | Payload | Failure) -> None:
        """Send the global rank at the start, or the outcome at the end."""
        with suppress(BrokenPipeError):  # the launcher is gone, and this process gets SIGTERM
            if isinstance(message, (int, Failure)):
                self.sender.send_bytes(pickle.dumps(message))
            else:
                send_result(self.sender, message)


def worker_main(
    run: Callable[[SentCall, Sequence[ReportPipe]], Failure | None],
    sent_call: SentCall,
    pipes: Sequence[ReportPipe],
    control: connection.Connection,
    launch: tuple[Mapping[str, str], connection.Connection, Mapping[int, Any]] | None,
    start_method: str,
    default_method: str | None,
    log_settings: LogSettings,
) -> None:
    """Main function of a worker process: make the call on each rank, and report to the launcher.

    Args:
        run: makes the call on each rank of this process.
        sent_call: the call.
        pipes: a pipe to the launcher for each rank.
        control: the numbers of the signals that the launcher passes on.
        launch: arguments of :func:`apply_launch`, if this process is a fork of the launcher.
        start_method: how this process was started.
        default_method: the launcher's default start method.
        log_settings: the launcher's.
    """
    # By default, child processes use the start method of this worker. DataLoader workers would then take
    # seconds to start from a fork server.
    multiprocessing.set_start_method(default_method, force=True)
    if launch is not None:  # a fork has not decoded a Launch
        apply_launch("", *launch)
        safe_objects.forget_mode()  # the environment has changed
        process_end.begin_in_fork()
    log_settings.apply()
    own_fork_server.begin()
    try:
        limits.check_memory()
        _set_num_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        received = ReceivedSignals()
        threading.Thread(target=_follow_launcher, args=(control, received), daemon=True).start()
        failure = run(sent_call, pipes)
        received.end_function()
    except BaseException as error:  # no rank has started
        failure = failure_of(error)
        for pipe in pipes:
            pipe.report(failure)
    code = 0 if failure is None else failure.exit_code or 1
    del sent_call, failure  # so that their objects are destroyed
    process_end.end(code, start_method)


def run_alone(sent_call: SentCall, pipes: Sequence[ReportPipe]) -> Failure | None:
    """Make the call in a process of one rank."""
    (pipe,) = pipes
    return pipe.run(sent_call, int(os.environ["RANK"]))


def _set_num_threads(nproc_per_node: int) -> None:
    """Apply ``OMP_NUM_THREADS``, which torch read in the fork server. By default, workers share the cores."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(
        int(text) if text.isdecimal() and int(text) else max(1, num_cores() // nproc_per_node)
    )


def _seed() -> None:
    """Seed the generators at random: all workers inherit the same state from the fork server."""
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _follow_launcher(control: connection.Connection, received: ReceivedSignals) -> None:
    """Raise the launcher's signals. End this process when the launcher ends, even inside a collective."""
    received.block_in_this_thread()
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    waited_for: list[Any] = [parent.sentinel, control]
    while parent.sentinel not in connection.wait(waited_for):
        try:
            received.raise_once(control.recv_bytes()[0])
        except (EOFError, OSError):
            waited_for.remove(control)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
