"""``max_restarts`` on several nodes: all launchers start their workers again, or none of them does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import ignite_dist as idist
from helpers import free_port, plain_environ, python_that_forks, write_script

SECONDS = 120


def launch(function: Any, *args: Any, max_restarts: tuple[int, int] = (1, 1), **kwargs: Any) -> list[Any]:
    """The results of two nodes with one rank each, or their errors."""
    port = free_port()
    results: list[Any] = [None, None]

    def node(rank: int) -> None:
        place = {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port}
        try:
            results[rank] = idist.spawn(
                "gloo", function, args, max_restarts=max_restarts[rank], **place, **kwargs
            )
        except (idist.DistributedError, KeyboardInterrupt) as error:
            results[rank] = error

    threads = [threading.Thread(target=node, args=(rank,), name=f"node {rank}") for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return results


def _attempts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _fails(local_rank: int, folder: Path, failing_rank: int, num_failures: int, how: str) -> tuple[int, int]:
    count, rank = idist.restart_count(), idist.get_rank()
    (folder / f"attempt {count} of rank {rank}").touch()
    if count < num_failures and rank == failing_rank and how == "permanent":
        raise ImportError("no such module")
    idist.barrier()
    if count < num_failures and rank == failing_rank:
        if how == "raises":
            raise OSError(f"attempt {count}")
        os.kill(os.getpid(), signal.SIGKILL)
    return count, idist.all_reduce(1)


@pytest.mark.parametrize(("failing_rank", "how"), [(1, "raises"), (0, "raises"), (1, "is killed")])
def test_all_nodes_start_again(
    failing_rank: int, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="ignite_dist"):
        results = launch(_fails, tmp_path, failing_rank, 2, how, max_restarts=(2, 2))
    assert results == [[(2, 2)], [(2, 2)]]
    assert _attempts(tmp_path) == [f"attempt {count} of rank {rank}" for count in range(3) for rank in (0, 1)]
    logged = [record.getMessage() for record in caplog.records if "Restart" in record.getMessage()]
    assert [line[:22] for line in sorted(logged)] == ["Restart 1 of at most 2"] * 2 + [
        "Restart 2 of at most 2"
    ] * 2
    assert all(f"Rank {failing_rank} (pid" in line for line in logged)


def test_all_nodes_raise_the_first_cause_of_the_last_attempt(tmp_path: Path) -> None:
    results = launch(_fails, tmp_path, 1, 9, "raises")
    for error in results:
        assert isinstance(error, idist.WorkerRaisedError), results
        assert error.rank == 1 and "OSError: attempt 1" in str(error)
    assert len(_attempts(tmp_path)) == 4


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_permanent_error_is_raised_at_once_on_all_nodes(failing_rank: int, tmp_path: Path) -> None:
    results = launch(_fails, tmp_path, failing_rank, 9, "permanent")
    for error in results:
        assert isinstance(error, idist.WorkerRaisedError), results
        assert error.rank == failing_rank and error.is_permanent and "no such module" in str(error)
    assert {name[:9] for name in _attempts(tmp_path)} == {"attempt 0"}


def test_all_nodes_need_the_same_max_restarts(tmp_path: Path) -> None:
    results = launch(_fails, tmp_path, 1, 0, "raises", max_restarts=(1, 0))
    for error in results:
        assert isinstance(error, idist.LaunchError), results
        assert "max_restarts is 1 on" in str(error) and "(node 0), and 0 on" in str(error)
    assert _attempts(tmp_path) == []


# --- launchers that end ------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys
    import ignite_dist as idist

    def work(local_rank, launcher, number):
        sys.stdout.write(f"attempt {idist.restart_count()}\\n")
        sys.stdout.flush()
        idist.barrier()
        if launcher:
            os.kill(launcher, number)
        idist.barrier()
        signal.pause()

    if __name__ == "__main__":
        node_rank, port, ending_node, number = map(int, sys.argv[1:])
        launcher = os.getpid() if ending_node == node_rank else 0
        place = dict(nnodes=2, node_rank=node_rank, master_addr="127.0.0.1", master_port=port)
        try:
            idist.spawn("gloo", work, (launcher, number), max_restarts=3, **place)
        except idist.RankFailedError as error:
            sys.exit(f"RankFailedError, permanent: {error.is_permanent}. {error}")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "ending_node"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.long),
    ],
)
def test_the_end_of_a_launcher_ends_the_job(number: signal.Signals, ending_node: int, tmp_path: Path) -> None:
    script, port = write_script(tmp_path, SCRIPT), free_port()
    environ = plain_environ(IGNITE_DIST_GRACE_SECONDS="2")
    jobs = [
        subprocess.Popen(
            [python_that_forks(), script, *map(str, (rank, port, ending_node, int(number)))],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [job.communicate(timeout=SECONDS)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    ended, other = outputs[ending_node], outputs[1 - ending_node]
    assert "attempt 0" in other and "attempt 1" not in ended + other
    assert jobs[1 - ending_node].returncode == 1 and "RankFailedError" in other, other
    if number == signal.SIGKILL:
        assert f"Node {ending_node} (" in other and "cannot be reached: its launcher has ended" in other
        assert "permanent: True" in other


class _InterruptsNode0(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread().name == "node 0" and "Restart" in record.getMessage():
            raise KeyboardInterrupt


def test_an_interrupt_between_two_attempts_ends_the_job_on_all_nodes(tmp_path: Path) -> None:
    """The launcher of node 0 goes on to live, so its connections must be closed."""
    handler = _InterruptsNode0()
    logging.getLogger("ignite_dist").addHandler(handler)
    try:
        first, second = launch(_fails, tmp_path, 1, 1, "raises")
    finally:
        logging.getLogger("ignite_dist").removeHandler(handler)
    assert isinstance(first, KeyboardInterrupt) and isinstance(second, idist.RankFailedError), (first, second)


def _job_id(local_rank: int, folder: Path) -> list[str]:
    if idist.restart_count() == 0:
        (folder / str(idist.get_rank())).write_text(os.environ["IGNITE_DIST_JOB_ID"])
        idist.barrier()
        raise OSError
    return idist.all_gather(os.environ["IGNITE_DIST_JOB_ID"])


def test_all_ranks_have_one_job_id_in_all_attempts(tmp_path: Path) -> None:
    results = launch(_job_id, tmp_path)
    (job_id,) = {*results[0][0], *results[1][0], *(path.read_text() for path in tmp_path.iterdir())}
    assert len(job_id) == 16
    (other,) = set(launch(_job_id, tmp_path)[0][0])
    assert other != job_id
