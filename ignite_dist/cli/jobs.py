"""Run a function on every rank: on the launcher's processes, or on workers that the command starts."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed

import ignite_dist as idist
from ignite_dist import errors
from ignite_dist.context import live
from ignite_dist.environments import devices
from ignite_dist.errors import DistributedError, MissingRanksError, RankFailedError
from ignite_dist.internals.arguments import keywords_of

# A stuck rank exits this long after the timeout, so the backend can enforce the timeout first.
_GRACE_SECONDS = 10.0


class Job(NamedTuple):
    """The ranks on which a command runs.

    Attributes:
        backend: one of ``available_backends()``.
        timeout: how long a rank waits for the other ranks, in the rendezvous and in each step.
        nproc_per_node: number of workers to start here. None: the launcher's processes, else a worker per GPU
            if the backend needs that, else two.
        nodes: the user's values of ``nnodes``, ``node_rank``, ``master_addr`` and ``master_port``.
    """

    backend: str
    timeout: timedelta
    nproc_per_node: int | None
    nodes: Mapping[str, Any]


class Report(Protocol):
    """The results of a command: equal on all ranks, and can be pickled."""

    @property
    def exit_status(self) -> int:
        """Exit status of the command."""
        ...


_Report = TypeVar("_Report", bound=Report)


def run(
    job: Job,
    function: Callable[[Steps], _Report],
    show: Callable[[_Report], None],
    log: Callable[[str], None],
) -> int:
    """Run ``function`` on every rank of ``job``, and ``show`` its report once.

    Args:
        job: the ranks.
        function: must be picklable.
        show: prints a report; called in one process.
        log: prints a message.

    Returns:
        The report's exit status.

    Raises:
        ValueError, RuntimeError: before the start; see ``idist.spawn`` and ``idist.initialize``.
        RankFailedError, MissingRanksError: a rank has failed or is missing.
    """
    place = idist.environment()
    arguments = [name for name, value in job.nodes.items() if value is not None]
    arguments += ["nproc_per_node"] if job.nproc_per_node is not None else []
    if place.launcher == "none" or (arguments and place.world_size == 1):
        return _run_in_workers(job, function, show, log)
    if arguments:
        options = ", ".join("--" + name.replace("_", "-") for name in arguments)
        raise ValueError(
            f"{options} is for processes that this command starts, but {place.launcher} has started these "
            f"{place.world_size} processes ({place.reason}). Leave {options} out."
        )
    log(f"Joining {num_processes(place.world_size)}, started by {place.launcher}: {place.reason}.")
    keywords = keywords_of(live.find_model(job.backend).open)
    timeout: dict[str, Any] = {"timeout": job.timeout} if "timeout" in keywords else {}
    with idist.Parallel(job.backend, **timeout):
        report = function(Steps(job.timeout))
        if idist.get_rank() == 0:  # in the block: if a rank exits with 1, the launcher ends the others
            show(report)
    return report.exit_status


def _run_in_workers(
    job: Job,
    function: Callable[[Steps], _Report],
    show: Callable[[_Report], None],
    log: Callable[[str], None],
) -> int:
    model = live.find_model(job.backend)
    nproc_per_node = job.nproc_per_node
    if nproc_per_node is None:
        nproc_per_node = devices.auto_nproc_per_node() if devices.needs_one_per_rank(job.backend) else 2
    model.launcher.check(nproc_per_node=nproc_per_node, **job.nodes)
    options: Any = dict(job.nodes)
    if "timeout" in model.launcher.options():
        options["timeout"] = job.timeout
    log(f"Starting {num_processes(nproc_per_node)} on {job.backend} ...")
    results = idist.spawn(job.backend, _in_worker, (function, job.timeout), None, nproc_per_node, **options)
    report: _Report = results[0]
    if not job.nodes.get("node_rank"):
        show(report)
    return report.exit_status


def auto_backend(nproc_per_node: int | None) -> str:
    """NCCL if this machine has a GPU for each process, and several; else gloo. See :class:`Job`."""
    backend = devices.auto_backend()
    if not devices.needs_one_per_rank(backend):
        return "gloo"
    count = devices.auto_nproc_per_node()
    place = idist.environment()
    launched = None if place.launcher == "none" else place.nproc_per_node
    return backend if (nproc_per_node or launched or max(count, 2)) <= count else "gloo"


def num_processes(count: int) -> str:
    """For example ``"2 processes"``."""
    return f"{count} process{'es' * (count != 1)}"


def _in_worker(local_rank: int, function: Callable[[Steps], Any], timeout: timedelta) -> Any:
    return function(Steps(timeout))


class Steps:
    """The steps of a command. All ranks begin each step together, so an error can name the missing ranks.

    Every rank must create one object and call its methods in the same order.

    Args:
        timeout: how long a rank waits for the other ranks.

    Attributes:
        hosts: the host of each rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.hosts: list[str] = []
        idist.watch_for_hangs(timeout)  # the watchdog reports where a rank is stuck
        with self.step("the first exchange"):
            self.hosts = idist.all_gather(socket.gethostname())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context manager: all ranks enter the block together. A rank that stays in it too long exits.

        Raises:
            MissingRanksError: ranks did not enter the block, or exited in it. The error names their hosts.
        """
        self._wait_for_all(name, self.timeout)
        longest = self.timeout.total_seconds() + _GRACE_SECONDS
        timer = threading.Timer(longest, self._exit_process, (name, idist.get_rank()))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            timer.cancel()
            if not isinstance(error, DistributedError):
                # The error may come from the exit of another rank. Then the barrier names the missing rank.
                self._wait_for_all(name, timedelta(seconds=_GRACE_SECONDS))
            raise
        finally:
            timer.cancel()

    def _wait_for_all(self, name: str, timeout: timedelta) -> None:
        try:
            idist.barrier(timeout=timeout)
        except MissingRanksError as error:
            hosts = [f"rank {rank} on {self.hosts[rank]}" for rank in error.ranks if self.hosts]
            where = f" Missing: {', '.join(hosts)}." if hosts else ""
            raise MissingRanksError(f"Before {name}:{where} {error}", error.ranks, error.where) from error

    def _exit_process(self, name: str, rank: int) -> None:
        """End this process, because no thread can interrupt the wait of a backend without a timeout."""
        seconds = self.timeout.total_seconds()
        sys.stderr.write(
            f"Rank {rank} on {socket.gethostname()} has been in {name} for more than "
            f"{seconds:g} s, and exits.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def error_message(error: BaseException) -> str:
    """The message for ``error``. Errors of this package and of torch.distributed need no traceback."""
    if isinstance(error, RankFailedError):
        is_known = hasattr(errors, error.error_type) or hasattr(torch.distributed, error.error_type)
        _, found, text = error.traceback.rpartition(f"{error.error_type}: ")
        if is_known and found:
            return f"Rank {error.rank} on {error.host or socket.gethostname()}: {text.strip()}"
    return str(error)
