"""Horovod's launches: workers of our own fork server, and of ``horovod.run``; and how they end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_horovod import HOSTS, run_script, spawn, who

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.horovod import jobs
from ignite_dist.context import live

pytestmark = pytest.mark.horovod

FAILURE_SECONDS = 30  # a start of Python on a busy machine included


# --- spawn on this machine ---------------------------------------------------------------------------


def test_spawn_returns_what_each_rank_returned() -> None:
    results = spawn(who, 1, nproc_per_node=3, kwargs_dict={"two": 2})
    for rank, result in enumerate(results):
        assert result["ranks"] == (rank,) * 4
        assert result["sizes"] == (3, 3, 1)
        assert result["model"] == ("horovod-dist", "horovod", torch.device("cpu"))
        assert result["called"] == ((1,), {"two": 2})
    assert len(results) == 3


def test_spawn_takes_lambdas_and_closures() -> None:
    offset = 10
    assert spawn(lambda local_rank: local_rank + offset) == [10, 11]


def test_spawn_without_waiting() -> None:
    workers = spawn(who, join=False)
    assert len(workers.pids()) == 2
    assert [one["ranks"][0] for one in workers.join()] == [0, 1]


def test_parallel_starts_workers() -> None:
    with idist.Parallel(backend="horovod", nproc_per_node=2) as parallel:
        assert parallel.run(who)["ranks"] == (0, 0, 0, 0)


def _addresses(_: int) -> list[str]:
    """Of all connections. Horovod's gloo listens only until its ranks are connected, on the same address."""
    idist.all_reduce(1, group=[0])
    idist.barrier()
    mine = [psutil.Process(), psutil.Process(os.getppid())]
    found = [connection.laddr.ip for process in mine for connection in process.net_connections()]
    idist.barrier()
    return found


def test_everything_listens_on_the_loopback_interface() -> None:
    servers = {connection.laddr.port for connection in psutil.Process().net_connections()}
    workers = spawn(_addresses, join=False)
    own = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port not in servers
    ]
    assert own == ["127.0.0.1"] * 2  # Horovod's rendezvous, and the store of the watchdogs
    for found in workers.join():
        assert found and set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_launcher_keeps_nothing_of_a_launch() -> None:
    spawn(who)
    threads, files = threading.active_count(), psutil.Process().num_fds()
    for _ in range(3):
        spawn(who)
    assert threading.active_count() <= threads and psutil.Process().num_fds() <= files


# --- failures ----------------------------------------------------------------------------------------


def _fail_on_1(_: int) -> None:
    if idist.get_rank() == 1:
        raise ValueError("bôom")
    idist.barrier()
    time.sleep(60)


def _fail_beside_a_sleeper(_: int) -> None:
    if idist.get_rank() == 1:
        raise ValueError("bôom")
    time.sleep(60)


@pytest.mark.parametrize("function", [_fail_on_1, _fail_beside_a_sleeper])
def test_the_error_carries_rank_and_traceback_of_the_worker_that_failed_first(function: Any) -> None:
    started = time.monotonic()
    with pytest.raises(idist.WorkerRaisedError, match=r"Rank 1 .* failed first") as caught:
        spawn(function)
    assert time.monotonic() - started < FAILURE_SECONDS
    error = caught.value
    assert (error.rank, error.error_type, error.error_index) == (1, "ValueError", 1)
    assert 'raise ValueError("bôom")' in error.traceback and error.traceback.endswith("ValueError: bôom\n")


def _die_on_1(_: int) -> None:
    idist.barrier()
    if idist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()


def test_a_worker_that_is_killed_ends_the_job() -> None:
    started = time.monotonic()
    with pytest.raises(idist.WorkerExitedError, match="SIGKILL") as caught:
        spawn(_die_on_1)
    assert time.monotonic() - started < FAILURE_SECONDS
    assert caught.value.rank == 1


def _catch_the_end(_: int) -> str:
    if idist.get_rank() == 1:
        try:
            raise ValueError("boom")
        except ValueError:
            idist.finalize()  # this rank alone: it waits for nobody
        return "left"
    try:
        idist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def test_when_a_rank_leaves_after_an_exception_the_others_are_told() -> None:
    first, second = spawn(_catch_the_end)
    assert "shut down" in first and second == "left"


def _call_while_it_ends(_: int, error: str) -> str:
    if idist.get_rank() == 1:
        idist.barrier()
        try:
            raise ValueError("boom")
        except ValueError:
            idist.finalize()
        return "left"
    hvd = sys.modules["horovod.torch"]
    pending = [hvd.allreduce_async(torch.ones(1), name=f"nobody.{number}") for number in range(1000)]
    idist.barrier()
    # Between its look at Horovod and its call a moment is left in which Horovod may end, and it hangs as raw
    # Horovod does: so not before the end has begun.
    while live.current_model().transport._is_running():  # type: ignore[attr-defined]
        pass
    for _attempt in range(2):
        with pytest.raises(RuntimeError, match=error):
            idist.all_reduce(torch.ones(1))
    return f"{len(pending)} given up"


@pytest.mark.parametrize(("memory", "error"), [("0", "shut down"), ("1", r"rank 1 \(pid \d+\) has ended")])
def test_a_call_that_comes_while_horovod_ends_is_refused(
    memory: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread gives up a thousand calls and takes the GIL for it, under a lock the next call needs."""
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", memory)
    assert spawn(_call_while_it_ends, error) == ["1000 given up", "left"]


def _interrupted(_: int) -> str:
    idist.barrier()
    if idist.get_rank() == 1:
        return "left"  # to the barrier of the end
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 3)
    try:
        idist.all_reduce(torch.ones(1))
    except KeyboardInterrupt as interrupt:
        frames = [frame.name for frame in traceback.extract_tb(interrupt.__traceback__)]
        assert "_wait" in frames
    with pytest.raises(RuntimeError, match="interrupted before its end"):
        idist.all_reduce(torch.ones(1))
    raise ValueError("enough")


def test_a_ctrl_c_gets_through_to_a_rank_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvd.synchronize() alone would not let it."""
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")
    with pytest.raises(idist.WorkerRaisedError, match="ValueError: enough"):
        spawn(_interrupted)


# What a launch is, the exit status of its launcher, and what that says last.
ENDINGS = {
    "nobody joins": (
        "idist.spawn('horovod', time.sleep, (60,), nproc_per_node=2, join=False, daemon=True)",
        0,
        "",
    ),
    "not picklable": (
        "idist.spawn('horovod', work, (threading.Lock(),), nproc_per_node=2)",
        1,
        "TypeError: Argument 1 of work cannot be sent to a worker",
    ),
    "unknown method": (
        "idist.spawn('horovod', work, nproc_per_node=2, start_method='bogus')",
        1,
        "ValueError: Unknown start_method 'bogus'",
    ),
    "terminated": ("w = idist.spawn('horovod', work, nproc_per_node=2, join=False); w.terminate()", 0, ""),
    "interrupted": (
        "threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start(); "
        "idist.spawn('horovod', work, (60,), nproc_per_node=2)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_launcher_ends_however_its_launch_does(ending: str, tmp_path: Path) -> None:
    launch, status, said = ENDINGS[ending]
    text = f"""
        import os, signal, threading, time
        import ignite_dist as idist

        def work(local_rank, seconds=0):
            time.sleep(seconds)

        if __name__ == "__main__":
            {launch}
        """
    ended = helpers.run_python(helpers.write_script(tmp_path, text), seconds=200)
    assert ended.returncode == status, ended.stdout
    assert said in ended.stdout


# --- through horovod.run ------------------------------------------------------------------------------


def test_hosts() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results = idist.spawn("horovod", _of_hosts, (1,), {"two": 2}, nproc_per_node=1, nnodes=2, hosts=HOSTS)
    assert [one["ranks"] for one in results] == [(0, 0), (0, 1)]
    assert [one["sizes"] for one in results] == [(2, 1, 2)] * 2
    assert [one["called"] for one in results] == [((1,), {"two": 2})] * 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def _of_hosts(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {
        "ranks": (local_rank, idist.get_rank()),
        "sizes": (idist.get_world_size(), idist.get_nproc_per_node(), idist.get_nnodes()),
        "called": (args, kwargs),
    }


def test_a_failure_through_horovod_run_has_rank_and_traceback_too(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(idist.WorkerRaisedError, match=r"Rank 1 .* failed first") as caught:
        spawn(_fail_on_1, nproc_per_node=1, hosts=HOSTS)
    error = caught.value
    assert (error.rank, error.error_type, error.error_index) == (1, "ValueError", 0)
    assert 'raise ValueError("bôom")' in error.traceback and error.traceback.endswith("ValueError: bôom\n")
    capfd.readouterr()


def test_a_worker_killed_through_horovod_run() -> None:
    with pytest.raises(idist.WorkerExitedError, match="Rank 1 was ended by SIGKILL") as caught:
        spawn(_die_on_1, nproc_per_node=2, use_gloo=True)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")


def _end(local_rank: int, how: str) -> Any:
    if idist.get_rank() == 1 or idist.get_world_size() == 1:
        if how == "progress":
            sys.stderr.write("50%|=====")
            raise ValueError("beside a progress bar")
        if how == "lock":
            return threading.Lock()
        sys.exit(int(how))
    return "fine"


def test_the_end_of_a_worker_through_horovod_run_is_that_of_any_other() -> None:
    with pytest.raises(idist.WorkerRaisedError, match="ValueError: beside a progress bar"):
        spawn(_end, "progress", nproc_per_node=1, hosts=HOSTS)
    with pytest.raises(idist.WorkerRaisedError, match="cannot be sent"):
        spawn(_end, "lock", nproc_per_node=1, hosts=HOSTS)
    with pytest.raises(idist.WorkerExitedError, match="ended with exit code 3"):
        spawn(_end, "3", nproc_per_node=1, hosts=HOSTS)
    assert spawn(_end, "0", nproc_per_node=1, hosts=HOSTS) == ["fine", None]


def _interrupt(_: int, launcher: int) -> None:
    idist.barrier()
    if idist.get_rank() == 0:
        os.kill(launcher, signal.SIGINT)
    time.sleep(60)


def test_a_ctrl_c_during_horovod_run_is_one() -> None:
    """Horovod itself makes an error like any other of it."""
    with pytest.raises(KeyboardInterrupt):
        spawn(_interrupt, os.getpid(), nproc_per_node=1, hosts=HOSTS)


def _fails_first(_: int, folder: Path, how: str, launcher: int) -> int:
    count, rank = idist.restart_count(), idist.get_rank()
    (folder / f"attempt {count} of rank {rank}").touch()
    idist.barrier()
    if count == 0 and rank == 1:
        if how == "SIGTERM":
            os.kill(launcher, signal.SIGTERM)
            time.sleep(60)  # until Horovod ends this worker
        raise ImportError("for good") if how == "permanent" else OSError("once")
    return idist.all_reduce(count)


def test_all_hosts_start_again_through_horovod_run(tmp_path: Path) -> None:
    kwargs: Any = {"nproc_per_node": 1, "nnodes": 2, "hosts": HOSTS, "max_restarts": 1}
    assert spawn(_fails_first, tmp_path, "once", 0, **kwargs) == [2, 2]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("how", ["permanent", "SIGTERM"])
def test_no_restart_through_horovod_run(how: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        spawn(_fails_first, tmp_path, how, os.getpid(), nproc_per_node=1, hosts=HOSTS, max_restarts=1)
    assert caught.value.is_permanent
    assert {path.name[:9] for path in tmp_path.iterdir()} == {"attempt 0"}


def test_a_job_that_was_ended_before_a_rank_had_failed_is_not_started_again() -> None:
    with pytest.raises(idist.WorkerExitedError, match="SIGTERM") as caught, jobs._restore_signals():
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("Read data from KVStore server failed.")  # as Horovod does
    assert caught.value.is_permanent


def test_a_job_of_one_process_on_a_named_host() -> None:
    with pytest.raises(idist.WorkerRaisedError, match="beside a progress bar"):
        spawn(_end, "progress", nproc_per_node=1, hosts="localhost:1")


def test_what_horovod_ended_itself_is_not_blamed(tmp_path: Path) -> None:
    """Horovod names the process whose end it noticed first, which may be one that it has ended."""
    error = RuntimeError("Process name: 1\nExit code: 143\n")
    old = "Rank 0 (local rank 0, pid 7 on host) failed at 0.1 with KeyError (exit code None) in launch old. "
    new = (
        old.replace("Rank 0", "Rank 2").replace("KeyError", "ValueError").replace("launch old", "launch new")
    )
    for folder, text, token in (("rank.0", old, "old"), ("rank.2", new, "new")):
        (tmp_path / folder).mkdir()
        text += f"Its traceback:\nTraceback\nError: é\nEnd of the traceback of {token}.\n"
        lines = "".join(f"[2]<stderr>:{line}\n" for line in text.splitlines())
        (tmp_path / folder / "stderr").write_text(lines)
    found = jobs._error(error, str(tmp_path), "new")
    assert isinstance(found, idist.WorkerRaisedError)
    assert (found.rank, found.error_type, found.traceback) == (2, "ValueError", "Traceback\nError: é\n")
    silent = jobs._error(error, str(tmp_path), "other")
    assert isinstance(silent, idist.WorkerExitedError) and silent.signal_name == "SIGTERM"


def test_a_script_and_the_modules_beside_it_through_horovod_run(tmp_path: Path) -> None:
    helpers.write_script(tmp_path, "FACTOR = 10", name="beside.py")
    output = run_script(
        tmp_path,
        """
        import ignite_dist as idist
        from beside import FACTOR

        class Mine:
            def __init__(self, value):
                self.value = value

        def function(local_rank, mine):
            import beside
            return Mine(beside.FACTOR * mine.value + idist.all_reduce(idist.get_rank()))

        if __name__ == "__main__":
            results = idist.spawn("horovod", function, (Mine(2),), nproc_per_node=2, hosts="localhost:2")
            print([type(one) is Mine and one.value for one in results])
        """,
    )
    assert output.splitlines()[-1] == "[21, 21]"


def test_horovod_run_needs_the_main_thread() -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            spawn(who, nproc_per_node=1, hosts=HOSTS)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
