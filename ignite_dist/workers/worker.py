"""What runs in a worker process before, around and after the user's function."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from ignite_dist.devices import num_cores
from ignite_dist.values import safe_objects
from ignite_dist.workers.failures import (
    Failure,
    failure_of,
    outcome_of,
)

__all__ = ["TERMINATE_SECONDS", "Post", "Sent", "run_alone", "take_over", "work"]

TERMINATE_SECONDS = 3.0
"""How long a worker may take to heed SIGTERM."""

Sent = bytes | Callable[..., Any]  # what a rank calls, encoded unless its process is a fork of this one


def take_over(
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


@dataclass(frozen=True)
class Post:
    """Where a rank of a worker process reports to the launcher."""

    local_rank: int
    sender: connection.Connection

    def run(self, sent: Sent, rank: int) -> Failure | None:
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


def work(
    run: Callable[[Sent, Sequence[Post]], Failure | None],
    sent: Sent,
    posts: Sequence[Post],
    launch: tuple[Mapping[str, str], connection.Connection] | None,
    default_method: str | None,
) -> None:
    """Call the user's function, and tell the launcher how it went: the main function of a worker process.

    Args:
        run: calls it on each rank of this process.
        sent: what is called.
        posts: a connection to the launcher for each rank.
        launch: the environment and the fault file of this launch, for a worker of a fork server.
        default_method: the launcher's own default start method.
    """
    # A process started by one method would start its own by that method too: the workers of a DataLoader,
    # which take seconds from a fork server. They are started as they would be in the launcher.
    multiprocessing.set_start_method(default_method, force=True)
    if launch is not None:  # a forked worker has not read its name
        take_over("", *launch, {})
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


def run_alone(sent: Sent, posts: Sequence[Post]) -> Failure | None:
    """Call the user's function in a process of one rank."""
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
        time.sleep(TERMINATE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
