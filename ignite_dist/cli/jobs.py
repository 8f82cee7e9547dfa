"""Running a function on every rank: of the launcher that started this process, or of workers of its own."""

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
from ignite_dist.arguments import keywords_of
from ignite_dist.context import live
from ignite_dist.errors import DistributedError, MissingRanksError, RankFailedError

__all__ = ["Job", "Meeting", "Report", "explanation", "num_processes", "run"]

# How much later than a backend's own timeout a rank that is stuck ends itself.
_GRACE_SECONDS = 10.0


class Job(NamedTuple):
    """Which ranks a command runs on.

    Attributes:
        backend: one of ``available_backends()``.
        timeout: how long a rank waits for the others, in the rendezvous and in each step.
        nproc_per_node: how many workers to start here; None: two, or those of the launcher.
        nodes: ``nnodes``, ``node_rank``, ``master_addr`` and ``master_port`` of ``idist.spawn``, if given.
    """

    backend: str
    timeout: timedelta
    nproc_per_node: int | None
    nodes: Mapping[str, Any]


class Report(Protocol):
    """What a command has found: the same on all ranks, and it can be pickled."""

    @property
    def exit_status(self) -> int:
        """That of the command."""
        ...


_Report = TypeVar("_Report", bound=Report)


def run(
    job: Job,
    function: Callable[[Meeting], _Report],
    show: Callable[[_Report], None],
    say: Callable[[str], None],
) -> int:
    """Run ``function``, which can be pickled, on every rank, and ``show`` its report on one of them.

    Returns:
        The report's exit status.

    Raises:
        ValueError, RuntimeError: nothing was started; see ``idist.spawn`` and ``idist.initialize``.
        RankFailedError, MissingRanksError: a rank has failed, or has not come.
    """
    place = idist.environment()
    given = [name for name, value in job.nodes.items() if value is not None]
    given += ["nproc_per_node"] if job.nproc_per_node is not None else []
    if place.launcher == "none" or (given and place.world_size == 1):
        return _run_in_workers(job, function, show, say)
    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            f"{named}: for processes that are started here, and these {place.world_size} were started by "
            f"{place.launcher} ({place.reason}). Leave it out."
        )
    say(f"Joining {num_processes(place.world_size)}, started by {place.launcher}: {place.reason}.")
    options: dict[str, Any] = {}
    if "timeout" in keywords_of(live.find_model(job.backend).open):
        options["timeout"] = job.timeout
    with idist.Parallel(job.backend, **options):
        report = function(Meeting(job.timeout))
        if idist.get_rank() == 0:  # before any leaves: a launcher ends all when one leaves with a failure
            show(report)
    return report.exit_status


def _run_in_workers(
    job: Job,
    function: Callable[[Meeting], _Report],
    show: Callable[[_Report], None],
    say: Callable[[str], None],
) -> int:
    model = live.find_model(job.backend)
    nproc_per_node = 2 if job.nproc_per_node is None else job.nproc_per_node
    model.launcher.check(nproc_per_node=nproc_per_node, **job.nodes)
    timeout = {"timeout": job.timeout} if "timeout" in model.launcher.options() else {}
    say(f"Starting {num_processes(nproc_per_node)} on {job.backend} ...")
    results = idist.spawn(
        job.backend, _in_worker, (function, job.timeout), None, nproc_per_node, **job.nodes, **timeout
    )
    report: _Report = results[0]
    if not job.nodes.get("node_rank"):
        show(report)
    return report.exit_status


def num_processes(count: int) -> str:
    """``2 processes``."""
    return f"{count} process{'es' * (count != 1)}"


def _in_worker(local_rank: int, function: Callable[[Meeting], Any], timeout: timedelta) -> Any:
    return function(Meeting(timeout))


class Meeting:
    """Where the ranks meet before each step, so that who does not come is named.

    Every rank makes one, and the same calls of it.

    Args:
        timeout: how long to wait for the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.hosts: list[str] = []
        idist.watch(timeout)  # a rank that is stuck tells the others where
        with self.step("the first exchange"):
            self.hosts = idist.all_gather(socket.gethostname())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A part that all ranks come to, and in which none of them may stay.

        Raises:
            MissingRanksError: ranks have not come to it, or are lost in it; with their hosts.
        """
        self._meet(name, self.timeout)
        patience = self.timeout.total_seconds() + _GRACE_SECONDS
        timer = threading.Timer(patience, self._give_up, (name, idist.get_rank()))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            timer.cancel()
            if not isinstance(error, DistributedError):
                # Is it that another rank has gone? Those that are there come here soon, with the same error.
                self._meet(name, timedelta(seconds=_GRACE_SECONDS))
            raise
        finally:
            timer.cancel()

    def _meet(self, name: str, timeout: timedelta) -> None:
        try:
            idist.barrier(timeout=timeout)
        except MissingRanksError as error:
            hosts = [f"rank {rank} on {self.hosts[rank]}" for rank in error.ranks if self.hosts]
            where = f" Missing: {', '.join(hosts)}." if hosts else ""
            raise MissingRanksError(f"Before {name}:{where} {error}", error.ranks, error.where) from error

    def _give_up(self, name: str, rank: int) -> None:
        """The backend has no timeout of its own: no other thread can end its wait."""
        seconds = self.timeout.total_seconds()
        sys.stderr.write(
            f"Rank {rank} on {socket.gethostname()} has been in {name} for more than "
            f"{seconds:g} s, and gives up.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def explanation(error: BaseException) -> str:
    """What to tell of ``error``: without the traceback, if it is of a kind that explains itself."""
    if isinstance(error, RankFailedError):
        explains_itself = hasattr(errors, error.error_type) or hasattr(torch.distributed, error.error_type)
        _, found, text = error.traceback.rpartition(f"{error.error_type}: ")
        if explains_itself and found:
            return f"Rank {error.rank} on {error.host or socket.gethostname()}: {text.strip()}"
    return str(error)
