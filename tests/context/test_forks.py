"""Processes that a rank starts: a forked child, and the workers of a DataLoader."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.transport import Transport
from ignite_dist.comp_models.work import communicating
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import recorder_of
from warm_client import WHOLE_EXIT

BACKENDS = ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)]
REFUSED = "collective would hang here"
SECONDS = 60  # far more than a child takes, far less than a test may

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce of a tensor": lambda: idist.all_reduce(torch.ones(2)),
    "all_reduce of a number": lambda: idist.all_reduce(1),
    "all_gather with a gradient": lambda: idist.all_gather(torch.ones(2), sync_grads=True),
    "all_gather of an object": lambda: idist.all_gather({"a": 1}),
    "all_gather_ragged": lambda: idist.all_gather_ragged(torch.ones(2)),
    "broadcast": lambda: idist.broadcast(torch.ones(2)),
    "broadcast of an object": lambda: idist.broadcast("text"),
    "in a group": lambda: idist.all_reduce(torch.ones(2), group=[0, 1]),
    "reduce": lambda: idist.reduce(torch.ones(2)),
    "reduce_scatter": lambda: idist.reduce_scatter(torch.ones(2)),
    "all_to_all": lambda: idist.all_to_all(torch.ones(2)),
    "gather": lambda: idist.gather(torch.ones(2)),
    "scatter": lambda: idist.scatter([1, 2]),
    "any_true": lambda: idist.any_true(True),
    "barrier": lambda: idist.barrier(),
    "barrier with a timeout": lambda: idist.barrier(timeout=timedelta(seconds=1)),
    "new_group": lambda: idist.new_group([0, 1]),
    "watch_for_hangs": lambda: idist.watch_for_hangs(),
    "compare_calls": lambda: idist.compare_calls(),
    "one_rank_first": lambda: idist.one_rank_first().__enter__(),
    "raise_together": lambda: idist.raise_together().__enter__(),
    "one_rank_only": lambda: idist.one_rank_only(broadcast=True)(print)(),
    "shared_seed": lambda: idist.shared_seed(),
    "auto_model": lambda: idist.auto_model(torch.nn.Linear(1, 1)),
    "auto_dataloader": lambda: idist.auto_dataloader([1, 2], batch_size=2, shuffle=True),
    "average_parameters": lambda: idist.average_parameters(torch.nn.Linear(1, 1)),
    "save_checkpoint": lambda: idist.save_checkpoint("/nowhere/checkpoint.pt"),
    "initialize": lambda: idist.initialize("gloo"),
}


def test_every_method_that_begins_a_collective_is_marked() -> None:
    """So that a forked child refuses it, in the base class and in every backend."""
    importlib.import_module("ignite_dist.comp_models.shared_memory.transport")
    kinds = [Transport, *subclasses_of(Transport)]
    assert len(kinds) > 4
    begins = {
        name
        for kind in kinds
        for name, member in vars(kind).items()
        if not name.startswith("_") and getattr(member, "__annotations__", {}).get("return") == "Work"
    }
    assert begins >= {"all_reduce", "reduce_scatter"}
    model = idist.comp_models.SerialModel(0)
    assert begins | {"fill_rows", "gather_bytes", "make_group", "make_mesh"} <= communicating(model.transport)
    assert {"broadcast", "gather", "gather_packed", "broadcast_packed"} <= communicating(model.objects)
    assert {"new", "resolve"} <= communicating(model.groups)
    assert {"average_in_block", "join", "wrap_model", "shard_model"} <= communicating(model.training)


def subclasses_of(kind: type) -> list[type]:
    return [one for below in kind.__subclasses__() for one in (below, *subclasses_of(below))]


def failures_in_child() -> list[str]:
    """What is wrong in the forked child of a rank of two: nothing."""
    found = []
    for name, call in CALLS.items():
        try:
            call()
        except RuntimeError as error:
            if REFUSED not in str(error) or str(os.getppid()) not in str(error):
                found.append(f"{name}: {error}")
        else:
            found.append(f"{name} did not raise")
    seen = idist.get_world_size(), idist.get_rank(), idist.get_local_rank()
    if seen != (2, int(os.environ["EXPECTED_RANK"]), int(os.environ["EXPECTED_RANK"])):
        found.append(f"getters: {seen}")
    idist.finalize()  # ends nothing
    if idist.get_world_size() != 2:
        found.append("finalize() has ended what is the parent's")
    return found


def end_of(pid: int) -> int:
    """The exit status of a child, which is ended if it takes too long."""
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child was still there after {SECONDS} s")
        time.sleep(0.01)


def still_works() -> None:
    """The rank goes on as if there had been no child."""
    size = idist.get_world_size()
    assert idist.all_reduce(1) == size
    assert idist.all_reduce(torch.ones(100_000)).sum() == size * 100_000
    idist.barrier(timeout=timedelta(seconds=60))


def forks(local_rank: int, how: str) -> None:
    os.environ["EXPECTED_RANK"] = str(idist.get_rank())
    idist.watch_for_hangs()
    still_works()
    if how == "os.fork":
        with_exit_handlers = os.fork()
        if with_exit_handlers == 0:
            found = failures_in_child()
            print(found, file=sys.stderr, flush=True)
            # As a process ends by itself: with what is registered for its exit, then the interpreter's end.
            for frame in (sys.stdout, sys.stderr):
                frame.flush()
            _end_as_a_script_does(len(found))
        assert end_of(with_exit_handlers) == 0
    else:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_send_failures, args=(sender,))
        child.start()
        sender.close()
        assert receiver.poll(SECONDS)
        found = receiver.recv()
        child.join(SECONDS)
        assert child.exitcode == 0, child.exitcode
        assert found == [], found
    still_works()


def _send_failures(sender: Any) -> None:
    sender.send(failures_in_child())


def _end_as_a_script_does(status: int) -> None:
    import atexit

    atexit._run_exitfuncs()
    os._exit(status)


def _wait_in_a_child(works: list[Any]) -> None:
    for work in works:
        assert work.is_completed()  # wait() raises, and waits for nobody
        with pytest.raises(RuntimeError, match=REFUSED):
            work.wait(timeout=timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=REFUSED):
        idist.all_reduce(1)


def forks_during_asynchronous_calls(local_rank: int, goes_on: Any) -> None:
    """Rank 0 begins the calls when the child of rank 1 has ended."""
    if local_rank == 0:
        assert goes_on.wait(SECONDS)
    tensor, tree = torch.ones(1000), {"loss": 1}
    works = [idist.all_reduce(value, async_op=True) for value in (tensor, tree)]
    idist.all_reduce(2, async_op=True)  # dropped at once
    if local_rank == 1:
        waiting = threading.Thread(target=works[0].wait)
        waiting.start()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                idist.finalize()  # while all calls are pending
                _wait_in_a_child(works)
                if os.fork() == 0:  # the child of the child
                    _wait_in_a_child(works)
                    idist.finalize()
                else:
                    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
                status = 0
            finally:
                os._exit(status)
        try:
            assert end_of(pid) == 0
        finally:
            goes_on.set()
        waiting.join()
    assert works[0].wait().sum() == 2000 and works[1].wait() == {"loss": 2}
    still_works()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_waits_for_none_of_the_asynchronous_calls(backend: str) -> None:
    event = multiprocessing.get_context("spawn").Event()
    idist.spawn(backend, forks_during_asynchronous_calls, (event,), nproc_per_node=2)


def forks_during_a_checkpoint(local_rank: int, path: Path) -> None:
    save = idist.save_checkpoint(path, asynchronous=True, step=1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            idist.finalize()
            with pytest.raises(RuntimeError, match=REFUSED):
                save.wait()
            status = 0
        finally:
            os._exit(status)
    assert end_of(pid) == 0
    assert save.wait() == path
    still_works()


def test_a_child_waits_for_no_checkpoint(tmp_path: Path) -> None:
    idist.spawn("gloo", forks_during_a_checkpoint, (tmp_path / "checkpoint.pt",), nproc_per_node=2)


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_gets_an_error_at_once_and_harms_nobody(backend: str, how: str) -> None:
    idist.spawn(backend, forks, (how,), nproc_per_node=2)


# Through every finally and exit handler, and the end of the interpreter.
SCRIPT = """
    import os, sys, torch
    import ignite_dist as idist

    idist.initialize("gloo")
    group = idist.new_group([0, 1])
    model = idist.auto_model(torch.nn.Linear(1, 1))
    assert idist.all_reduce(1) == 2 and idist.all_reduce(torch.ones(3), group=group).sum() == 6
    pid = os.fork()
    if pid == 0:
        try:
            idist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            sys.exit(7 if "collective would hang here" in str(error) else 8)
        sys.exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 7, status
    assert idist.all_reduce(1) == 2
    idist.finalize()
    print("THROUGH", flush=True)
"""


@pytest.mark.long
def test_a_child_that_ends_as_scripts_do_ends_nothing_else(tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, SCRIPT)
    environ = helpers.plain_environ(OMP_NUM_THREADS="1", **helpers.loopback(), **WHOLE_EXIT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = helpers.run_python(*launcher, script, seconds=120, env=environ)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("THROUGH") == 2, ended.stdout


def inherits_a_context_of_torchs(rank: int) -> None:
    """The package has not been asked for anything before the fork."""
    pid = os.fork()
    if pid == 0:
        try:
            idist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(7 if REFUSED in str(error) and idist.get_world_size() == 2 else 8)
        os._exit(9)
    assert end_of(pid) == 7
    assert idist.all_reduce(1) == 2


def with_a_context_of_torchs() -> None:
    dist.init_process_group("gloo")
    inherits_a_context_of_torchs(dist.get_rank())
    dist.destroy_process_group()


def test_a_context_that_torch_made_is_known_in_the_child_too() -> None:
    helpers.run_ranks(with_a_context_of_torchs)


def test_a_world_of_one_without_context_goes_on_in_a_child() -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fine = idist.all_reduce(2) == 2 and idist.all_gather("a") == ["a"]
            idist.initialize("gloo")
            fine = fine and idist.all_reduce(torch.ones(1)).item() == 1 and idist.backend() == "gloo"
            idist.finalize()
            status = 0 if fine else 2
        finally:
            os._exit(status)
    assert end_of(pid) == 0


# --- workers of a DataLoader ------------------------------------------------------------------------------


class Asking(Dataset[Any]):
    """Each item is what a worker gets for its call."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> str:
        try:
            idist.all_reduce(torch.ones(1)) if item else idist.any_true(True)
        except RuntimeError as error:
            return str(error)
        return "no error"


class Sharding(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> str:
        return f"{idist.get_rank()} of {idist.get_world_size()}"


def asked(dataset: Dataset[Any], method: str) -> list[Any]:
    loader = DataLoader(
        dataset, num_workers=1, batch_size=None, multiprocessing_context=method, timeout=SECONDS
    )
    return list(loader)


def load(local_rank: int, method: str) -> None:
    texts = asked(Asking(), method)
    assert len(texts) == 2
    for text in texts:
        assert "DataLoader" in text, text
    if method == "fork":
        assert asked(Sharding(), method) == [f"{idist.get_rank()} of {idist.get_world_size()}"]
    still_works()


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_of_a_loader_gets_an_error_at_once(backend: str, method: str) -> None:
    idist.spawn(backend, load, (method,), nproc_per_node=2)


class Reducing(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> int:
        number: int = idist.all_reduce(item)
        return number


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_workers_of_a_world_of_one_go_on(method: str) -> None:
    assert asked(Reducing(), method) == [0, 1]


def _one_child_finalizes(local_rank: int) -> int:
    """The child of one rank alone comes to its end; that the rank has ended is not said."""
    if local_rank == 0:
        pid = os.fork()
        if pid == 0:
            try:
                idist.finalize()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    total: int = idist.all_reduce(1)
    record = recorder_of(current_model())
    assert record is not None and record.watchdog is not None
    return total


def test_the_end_of_one_child_is_not_that_of_its_rank() -> None:
    assert idist.spawn("gloo", _one_child_finalizes, nproc_per_node=2) == [2, 2]
