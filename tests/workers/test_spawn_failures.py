"""Failures of spawned workers: what is raised, and what is left."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

import helpers
import ignite_dist as idist
from spawned import FAILURE_SECONDS, spawn, who, within

# --- failures ----------------------------------------------------------------------------------------


def _fails(local_rank: int) -> None:
    idist.barrier()
    if local_rank == 1:
        raise LookupError("no dåta here")
    idist.all_reduce(torch.ones(3))
    idist.barrier()


@pytest.mark.parametrize(
    "start_method", ["forkserver", *(pytest.param(one, marks=pytest.mark.long) for one in ("spawn", "fork"))]
)
def test_a_rank_that_raises_is_named_with_its_traceback(start_method: str) -> None:
    with pytest.raises(idist.WorkerRaisedError) as info:
        spawn(_fails, nproc_per_node=3, start_method=start_method)
    error = info.value
    assert (error.rank, error.error_type, error.error_index) == (1, "LookupError", 1)
    for text in ("LookupError: no dåta here", "in _fails", "test_spawn_failures.py"):
        assert text in error.traceback
        assert text in str(error)


def _fails_on_one_rank_only(_: int) -> None:
    idist.one_rank_only(rank=1, with_barrier=True)(_raises)()


def _raises() -> None:
    raise LookupError("the cause")


@pytest.mark.long
def test_the_cause_is_named_not_those_who_heard_of_it() -> None:
    for _ in range(15):
        with pytest.raises(idist.RankFailedError) as info:
            spawn(_fails_on_one_rank_only, nproc_per_node=3)
        assert (info.value.rank, info.value.error_type) == (1, "LookupError")


def test_workers_are_gone_after_a_failure() -> None:
    handle = spawn(_fails, nproc_per_node=3, join=False)
    with pytest.raises(idist.RankFailedError):
        handle.join()
    with pytest.raises(idist.RankFailedError):
        handle.join()  # again
    assert helpers.end_of_processes(handle.pids(), 0) == []


def test_failed_launches_leave_nothing_for_the_garbage_collector_of_a_forked_process() -> None:
    """A store that serves ends with its threads, which a forked process does not have."""
    gc.disable()
    try:
        for _ in range(10):
            with suppress(idist.RankFailedError):
                spawn(sys.exit, nproc_per_node=2)
        pid = os.fork()  # as a DataLoader with workers does, or a launch with start_method="fork"
        if pid == 0:
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    finally:
        gc.enable()
    assert status == 0


def _forks(local_rank: int, end: str) -> tuple[int, int]:
    if (pid := os.fork()) == 0:
        if end == "error":
            raise LookupError("in the child")
        sys.exit({"text": "the child's text"}.get(end, 3))
    return local_rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("end", "status"), [("error", 1), ("text", 1), ("status", 3)])
def test_a_forked_child_that_fails_is_no_failure_of_its_rank(
    end: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert idist.spawn("gloo", _forks, (end,), nproc_per_node=2) == [(0, status), (1, status)]
    shown = {"error": "\nLookupError: in the child\n", "text": "the child's text\n", "status": ""}[end]
    assert capfd.readouterr().err.count(shown) == 2 or not shown


def _unpicklable_result(local_rank: int) -> Any:
    return threading.Lock() if local_rank == 1 else local_rank


def test_a_result_that_cannot_be_sent_names_the_rank_and_the_type() -> None:
    with within(FAILURE_SECONDS), pytest.raises(idist.WorkerRaisedError, match="lock") as info:
        spawn(_unpicklable_result)
    assert (info.value.rank, info.value.error_type) == (1, "TypeError")


@pytest.mark.parametrize("where", ["function", "args", "kwargs_dict"])
def test_a_call_that_cannot_be_sent_starts_nothing(where: str) -> None:
    lock = threading.Lock()
    calls: dict[str, tuple[Any, ...]] = {
        "function": (lambda local_rank: lock.locked(),),
        "args": (who, (lock,)),
        "kwargs_dict": (who, (), {"lock": lock}),
    }
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(TypeError, match="cannot be sent"):
        idist.spawn("gloo", *calls[where], nproc_per_node=2)
    assert set(psutil.Process().children(recursive=True)) <= children


def _context_of_its_own(_: int) -> str:
    idist.finalize()
    assert idist.get_world_size() == 1
    idist.initialize("gloo")
    assert idist.get_world_size() == 2
    return idist.broadcast("from 0" if idist.get_rank() == 0 else "")


def test_a_function_may_end_its_context_and_make_another() -> None:
    assert spawn(_context_of_its_own) == ["from 0", "from 0"]


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"nprocs_per_node": 2}, TypeError, ["nprocs_per_node", "Allowed"]),
        ({"start_metod": "fork"}, TypeError, ["start_metod", "Did you mean 'start_method'?"]),
        ({"start_method": "fokr"}, ValueError, ["fokr", "'forkserver'"]),
        ({"nproc_per_node": 0}, ValueError, ["nproc_per_node", "0"]),
        ({"nproc_per_node": True}, ValueError, ["nproc_per_node", "True"]),
        ({"nproc_per_node": "2"}, ValueError, ["nproc_per_node", "'2'"]),
        ({"nnodes": 0}, ValueError, ["nnodes"]),
        ({"nnodes": 2}, ValueError, ["master_addr", "master_port"]),
        ({"nnodes": 2, "master_addr": "127.0.0.1"}, ValueError, ["master_port"]),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h", "master_port": 1}, ValueError, ["node_rank"]),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "h", "master_port": 0}, ValueError, ["[1, 65535]"]),
        ({"master_port": 65536}, ValueError, ["master_port", "65536"]),
        ({"master_port": "2950x"}, ValueError, ["master_port", "'2950x'"]),
        ({"node_rank": 1}, ValueError, ["node_rank"]),
        ({"init_method": "file:///x", "master_port": 1}, ValueError, ["master_port", "init_method"]),
        ({"master_port": 65536}, ValueError, ["master_port", "65536"]),
        ({"master_port": "2950x"}, ValueError, ["master_port", "'2950x'"]),
        ({"timeout": 30}, TypeError, ["timedelta"]),
    ],
    ids=str,
)
def test_wrong_arguments_of_spawn(kwargs: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(error) as info:
        idist.spawn("gloo", who, **kwargs)
    for text in texts:
        assert text in str(info.value)
    assert set(psutil.Process().children(recursive=True)) <= children


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="function"):
        idist.spawn("gloo", "who")  # type: ignore[arg-type]


def test_a_port_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(idist.LaunchError, match=str(port)):
            spawn(who, master_port=port)
