"""Results that are sent in pieces, from workers that are interrupted or too large for the launcher."""

from __future__ import annotations

import pickle
import signal
from multiprocessing import Pipe
from typing import Any

import pytest

import ignite_dist as idist
from ignite_dist.workers.failures import failure_of
from ignite_dist.workers.sent_results import ResultSize, send_result
from ignite_dist.workers.supervisor.running_worker import RunningWorker
from spawned import spawn


def _worker() -> tuple[RunningWorker, Any]:
    receiver, sender = Pipe(duplex=False)
    nobody: Any = None
    return RunningWorker(nobody, receiver, nobody, nobody, 0, 0), sender


@pytest.mark.parametrize("size", [30, 100_000], ids=["more than is left", "less than is left"])
def test_what_follows_a_part_of_a_result_is_no_message(size: int) -> None:
    worker, sender = _worker()
    sender.send_bytes(pickle.dumps(ResultSize(size)))
    sender.send_bytes(bytes(20))
    sender.send_bytes(pickle.dumps(failure_of(KeyboardInterrupt())))
    sender.close()
    for _ in range(2):
        worker.read()
    assert worker.is_torn and not worker.has_reported


def test_a_result_for_which_the_launcher_has_no_memory() -> None:
    worker, sender = _worker()
    sender.send_bytes(pickle.dumps(ResultSize(1 << 60)))
    worker.read()
    assert worker.failure is not None and worker.failure.error_type in ("OSError", "MemoryError")
    with pytest.raises(BrokenPipeError):  # the worker does not wait
        send_result(sender, bytes(1 << 20))


def _killed_while_it_sends(_: int) -> bytes:
    """The pipe has 64 kB; the rest of the result is never sent."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return bytes(200_000_000)


def test_a_worker_that_dies_at_the_end_of_its_function() -> None:
    try:
        results = spawn(_killed_while_it_sends, nproc_per_node=1)
    except idist.WorkerExitedError as error:
        assert error.exit_code == -signal.SIGALRM
    else:  # it was faster
        assert [len(result) for result in results] == [200_000_000]
