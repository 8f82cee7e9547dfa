"""The end of a launcher, by Ctrl-C or a signal: it leaves no worker, no fork server, no data loader."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

import helpers
import ignite_dist as idist

# How long after the launcher its workers and its fork server may live; and what torch's data loader starts
# in a worker, which looks for its parent every 5 s.
WORKER_SECONDS = 5
LOADER_SECONDS = 10

SCRIPT = """
    import multiprocessing, os, signal, sys, threading
    import torch
    from torch.utils.data import DataLoader
    import ignite_dist as idist

    def wait_for_ever():
        threading.Event().wait()

    def start_loader(method, started):
        started.append(iter(DataLoader(range(10 ** 9), num_workers=2, multiprocessing_context=method)))

    def endless(local_rank, how):
        idist.barrier()
        pids, own = [], []
        if "own" in how:
            process = multiprocessing.get_context("forkserver").Process(target=wait_for_ever)
            process.start()
            own = [process.pid]
        if "loader" in how:
            method = "forkserver" if "server" in how else None
            started = []
            thread = threading.Thread(target=start_loader, args=(method, started))
            thread.start()
            thread.join()
            (batches,) = started
            for _ in range(2):  # a batch from each process: before its first, it has not noted its parent
                next(batches)
            pids = [process.pid for process in batches._workers]
        for name in {"deaf": ["SIGTERM"], "deafer": ["SIGINT", "SIGTERM"]}.get(how.partition(",")[0], []):
            signal.signal(getattr(signal, name), lambda *_: os.write(1, b"not now\\n"))
        os.write(1, f"worker {os.getpid()} {pids} {own}\\n".encode())  # at once: the other worker writes too
        while "loader" in how:
            next(batches)
        while "python" in how or local_rank == 1:
            threading.Event().wait(60)
        idist.all_reduce(torch.ones(3))

    if __name__ == "__main__":
        backend, start_method, how = sys.argv[1:]
        if "handler" in how:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        handle = idist.spawn(
            backend, endless, (how,), nproc_per_node=2, start_method=start_method, join="idle" not in how
        )
        threading.Event().wait()
"""


class Job(NamedTuple):
    """A launcher, and what it has started: workers and fork servers; loaders; the workers' own processes."""

    launcher: subprocess.Popen[str]
    workers: set[int]
    loaders: set[int]
    own: set[int]


@contextmanager
def job(folder: Path, backend: str, start_method: str, how: str, **environ: str) -> Iterator[Job]:
    """A job whose workers are all at work."""
    launcher = subprocess.Popen(
        [sys.executable, str(helpers.write_script(folder, SCRIPT)), backend, start_method, how],
        env=helpers.plain_environ(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = Job(launcher, set(), set(), set())
    num_at_work, output = 0, ""
    try:
        assert launcher.stdout is not None
        while num_at_work < 2:
            line = launcher.stdout.readline()
            output += line
            assert line, f"the launcher has ended:\n{output}"
            for pid, loaders, own in re.findall(r"worker (\d+) \[(.*?)\] \[(.*?)\]", line):
                num_at_work += 1
                found.workers.add(int(pid))
                found.loaders.update(map(int, re.findall(r"\d+", loaders)))
                found.own.update(map(int, re.findall(r"\d+", own)))
        children = psutil.Process(launcher.pid).children(recursive=True)
        # Python's resource tracker ends with the last process that holds on to it: one of the worker's own
        # processes if there is any, else a loader perhaps.
        trackers = {child.pid for child in children if "resource_tracker" in " ".join(child.cmdline())}
        (found.own or found.loaders).update(trackers)
        found.workers.update({child.pid for child in children} - found.loaders - found.own)
        yield found
    finally:
        launcher.kill()
        for pid in found.workers | found.loaders | found.own:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()  # until no process has the pipe


def _is_over(found: Job) -> None:
    """The launcher has ended with an error, and what it had started soon after."""
    # The bars are those of a machine that has time for its processes.
    slow = max(4.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
    assert found.launcher.wait(WORKER_SECONDS * slow) != 0
    assert helpers.end_of_processes(list(found.workers), WORKER_SECONDS * slow) == []
    assert helpers.end_of_processes(list(found.loaders), (LOADER_SECONDS - WORKER_SECONDS) * slow) == []


BACKENDS = [
    "gloo",
    pytest.param("horovod", marks=pytest.mark.horovod),
    pytest.param("xla-tpu", marks=pytest.mark.xla),
]


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_what_ends_the_launcher_ends_all_that_it_has_started(
    number: signal.Signals, backend: str, tmp_path: Path
) -> None:
    how = "python" if backend == "xla-tpu" else "loader"  # its replicas are threads, which do not fork
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"} if backend == "xla-tpu" else {}
    with job(tmp_path, backend, "forkserver", how, **devices) as found:
        assert len(found.loaders) == (5 if how == "loader" else 1)
        found.launcher.send_signal(number)
        _is_over(found)
        assert found.launcher.stdout is not None
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in found.launcher.stdout.read()


@pytest.mark.long
@pytest.mark.parametrize(
    ("start_method", "how", "number"),
    [
        ("forkserver", "collective", signal.SIGKILL),
        ("spawn", "collective", signal.SIGKILL),
        ("fork", "collective", signal.SIGKILL),
        ("forkserver", "collective", signal.SIGINT),
        ("forkserver", "deaf", signal.SIGKILL),
        ("forkserver", "deaf, idle", signal.SIGINT),
        ("forkserver", "collective, handler", signal.SIGTERM),
    ],
    ids=str,
)
def test_however_its_workers_were_started_and_whatever_they_do(
    start_method: str, how: str, number: signal.Signals, tmp_path: Path
) -> None:
    with job(tmp_path, "gloo", start_method, how) as found:
        found.launcher.send_signal(number)
        _is_over(found)


@pytest.mark.long
def test_loaders_and_their_fork_servers_end_with_their_ranks(tmp_path: Path) -> None:
    """A rank's own processes, from the same fork server, live on and do not keep the others alive."""
    with job(tmp_path, "gloo", "forkserver", "loader, server, own") as found:
        assert len(found.workers) == 2 + 3  # each rank and the launcher have a fork server
        assert len(found.loaders) == 4
        assert len(found.own) == 3  # with the resource tracker
        found.launcher.kill()
        _is_over(found)
        assert all(map(psutil.pid_exists, found.own))


def _server_of_a_process() -> int:
    """Start a process of this worker's own from a fork server. Returns the server's process id."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    return int(multiprocessing.forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def _forks_beside_its_server(local_rank: int) -> tuple[int, int]:
    server, child = _server_of_a_process(), os.fork()
    if child == 0:
        threading.Event().wait(60)
        os._exit(0)
    return server, child


def test_a_forked_process_that_outlives_its_rank_does_not_keep_the_ranks_fork_server_alive() -> None:
    ((server, child),) = idist.spawn("gloo", _forks_beside_its_server, nproc_per_node=1)
    try:
        assert helpers.end_of_processes([server], WORKER_SECONDS) == []
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def _loses_its_server(local_rank: int) -> list[int]:
    first = _server_of_a_process()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    return [first, _server_of_a_process()]


def test_a_fork_server_that_has_died_is_replaced_and_ends_with_its_rank_too() -> None:
    ((first, second),) = idist.spawn("gloo", _loses_its_server, nproc_per_node=1)
    assert first != second
    assert helpers.end_of_processes([second], WORKER_SECONDS) == []


@pytest.mark.long
def test_an_impatient_second_interrupt_leaves_nothing_either(tmp_path: Path) -> None:
    with job(tmp_path, "gloo", "forkserver", "deafer") as found:
        found.launcher.send_signal(signal.SIGINT)
        assert found.launcher.stdout is not None
        while "not now" not in found.launcher.stdout.readline():  # a worker has been interrupted
            continue
        found.launcher.send_signal(signal.SIGINT)
        _is_over(found)


INTERRUPTED = """
    import signal
    import sys
    import ignite_dist as idist

    def interrupt(frame, event, arg):
        if event == "return" and frame.f_code.co_name == "_launch":  # multiprocessing has started a process
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    if __name__ == "__main__":
        sys.setprofile(interrupt)
        try:
            idist.spawn("gloo", idist.barrier, nproc_per_node=2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def test_an_interrupt_while_a_process_starts_leaves_no_process(tmp_path: Path) -> None:
    """Python would wait for it at the exit of the launcher."""
    ended = helpers.run_python(helpers.write_script(tmp_path, INTERRUPTED), seconds=100)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended
