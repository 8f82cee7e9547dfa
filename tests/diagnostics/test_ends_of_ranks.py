"""Nothing waits for a rank that has ended: who waits gets an error that names it; others are left alone."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist
from ignite_dist.diagnostics.watchdog import _running
from warm_client import WHOLE_EXIT

# Longer than a watchdog takes to be sure that a wait cannot end.
A_WHILE = 8.0
TIMEOUT = timedelta(minutes=4)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


def ones(size: int = 3) -> torch.Tensor:
    return torch.ones(size, device=idist.device())


def run_a_first_block() -> None:
    with idist.one_rank_first():
        pass


WAITS = {
    "all_reduce": lambda: idist.all_reduce(ones()),
    "all_reduce of many": lambda: idist.all_reduce(ones(1_000_000)),
    "all_reduce of a number": lambda: idist.all_reduce(1),
    "all_gather": lambda: idist.all_gather(ones()),
    "all_gather of objects": lambda: idist.all_gather("text"),
    "broadcast": lambda: idist.broadcast(ones(), src=1),
    "barrier": lambda: idist.barrier(),
    "one_rank_first": run_a_first_block,
    "all_reduce begun": lambda: idist.all_reduce(ones(), async_op=True).wait(),
    "all_reduce begun with a timeout": lambda: idist.all_reduce(ones(), async_op=True).wait(TIMEOUT),
    "all_reduce begun with a dict": lambda: idist.all_reduce({"a": ones(), "b": 1}, async_op=True).wait(),
}


IN_MAKE_TEST = ("all_reduce of a number", "all_gather of objects", "all_reduce begun")


def waits_for_one(local_rank: int, wait: str, ended: int) -> None:
    """All but the rank ``ended`` make a call that it does not."""
    idist.barrier()
    if idist.get_rank() == ended:
        return
    with pytest.raises(idist.MissingRanksError) as info:
        WAITS[wait]()
    assert info.value.ranks == [ended] and "the end of its context" in info.value.where[ended]
    raise info.value


def failure(backend: str, function: Any, *args: Any, size: int) -> idist.RankFailedError:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(idist.RankFailedError) as info:
        patch.setenv("CPU_NUM_DEVICES", str(size))
        idist.spawn(backend, function, args, nproc_per_node=size)
    return info.value


def is_named(error: idist.RankFailedError, ended: int, wait: str) -> None:
    assert error.error_type == "MissingRanksError", error
    assert re.search(rf"Rank {ended} (did not|reached the end)", str(error)), error
    assert wait.partition(" ")[0] in str(error)


@pytest.mark.usefixtures("every_rank_reports")
@pytest.mark.parametrize(
    ("size", "ended", "wait"),
    [
        *(pytest.param(3, 1, wait, marks=[] if wait in IN_MAKE_TEST else pytest.mark.long) for wait in WAITS),
        *((2, 1, "barrier"), (2, 0, "all_reduce"), (3, 0, "barrier")),
    ],
)
def test_a_collective_that_a_rank_has_ended_without(size: int, ended: int, wait: str) -> None:
    error = failure("gloo", waits_for_one, wait, ended, size=size)
    assert error.rank != ended
    call = re.sub(" (of|with) .*", "", wait)
    assert f"Rank {ended} did not come to {call} at diagnostics/test_ends_of_ranks.py:" in str(error)
    assert f"Rank {ended} failed after it: " in str(error)
    assert "So rank" not in error.traceback, "it is about the rank that waited"


def waits_for_one_later(local_rank: int, wait: str) -> None:
    """As :func:`waits_for_one`, when the group has made such a call before."""
    idist.all_reduce(ones(), async_op=True).wait()
    waits_for_one(local_rank, wait, 1)


def waits_behind_it(local_rank: int, blocks: bool) -> None:
    """Rank 0 waits in a later call than the first that rank 1 does not make."""
    idist.barrier()
    idist.all_reduce(ones(), async_op=True).wait()
    if local_rank == 0:
        works = [idist.all_reduce(ones(), async_op=True) for _ in range(3)]
        with pytest.raises(idist.MissingRanksError) as info:
            idist.barrier() if blocks else works[-1].wait()
        raise info.value


@pytest.mark.usefixtures("every_rank_reports")
@pytest.mark.parametrize("blocks", [False, True])
def test_a_call_behind_an_asynchronous_one_that_a_rank_has_ended_without(blocks: bool) -> None:
    error = failure("gloo", waits_behind_it, blocks, size=2)
    assert error.rank == 0
    is_named(error, 1, "all_reduce begun")


@pytest.mark.usefixtures("every_rank_reports")
@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
@pytest.mark.parametrize(
    "wait", [pytest.param("all_reduce begun", marks=pytest.mark.long), "all_reduce begun with a dict"]
)
def test_a_later_asynchronous_collective_that_a_rank_has_ended_without(backend: str, wait: str) -> None:
    error = failure(backend, waits_for_one_later, wait, size=2)
    assert error.rank == 0
    is_named(error, 1, wait)


@pytest.mark.horovod
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wait", ["all_reduce", "all_gather of objects", "barrier"])
def test_a_collective_of_horovod_that_a_rank_has_ended_without(size: int, wait: str) -> None:
    error = failure("horovod", waits_for_one, wait, 1, size=size)
    assert error.rank != 1
    is_named(error, 1, wait)


@pytest.mark.xla
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wait", ["all_reduce", "all_gather of objects", "barrier"])
def test_a_collective_of_replicas_that_one_has_ended_without(size: int, wait: str) -> None:
    is_named(failure("xla-tpu", waits_for_one, wait, 1, size=size), 1, wait)


def late_for_both(local_rank: int, folder: Path) -> None:
    """Rank 1 has ended and rank 0 waits for it; rank 2 is elsewhere until rank 0 has its error."""
    rank = idist.get_rank()
    if rank == 0:
        with pytest.raises(idist.MissingRanksError) as info:
            idist.barrier()
        (folder / "told").touch()
        raise info.value
    while rank == 2 and not (folder / "told").exists():
        time.sleep(0.05)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("xla-tpu", marks=pytest.mark.xla)])
def test_a_third_rank_need_not_come_first(backend: str, tmp_path: Path) -> None:
    is_named(failure(backend, late_for_both, tmp_path, size=3), 1, "barrier")


def waits_elsewhere(local_rank: int, where: str) -> None:
    rank = idist.get_rank()
    model = idist.auto_model(torch.nn.Linear(2, 1))
    if where == "a group":
        idist.barrier(group=[0, 1])
    if rank == 1:
        return
    if where == "a backward pass":
        model(torch.ones(1, 2)).sum().backward()
    elif where == "torch's own":
        dist.all_reduce(torch.ones(2))
    elif rank == 0:
        idist.all_reduce(1, group=[0, 1])


@pytest.mark.long
@pytest.mark.parametrize("where", ["a backward pass", "torch's own", "a group", "a group being made"])
def test_what_else_a_rank_may_wait_in(where: str) -> None:
    error = failure("gloo", waits_elsewhere, where, size=3)
    assert "Rank 1 did not come to " in str(error)
    assert "diagnostics/test_ends_of_ranks.py:" in str(error), "where the other waits is said"


def steps_alone(local_rank: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    if idist.get_rank() == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.horovod
def test_a_step_of_horovods_optimizer_that_a_rank_has_ended_without() -> None:
    error = failure("horovod", steps_alone, size=2)
    assert (error.rank, error.error_type) == (0, "MissingRanksError")
    assert "Rank 1 did not come to " in str(error)


# --- false alarms ----------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """A backward pass that computes for a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ends = time.monotonic() + A_WHILE
        while time.monotonic() < ends:
            torch.ones(100).sum()
        return grad


def go_on_without_rank_2(local_rank: int, what: str) -> int:
    """Rank 2 has come to its end, and ranks 0 and 1 have much to do that is none of its business."""
    rank = idist.get_rank()
    idist.all_reduce(1, group=[0, 1])
    if what == "a broadcast":  # rank 2 has sent its part of it
        idist.broadcast("text", src=2)
    if rank == 2:
        return rank
    if what == "a checkpoint":
        threading.Event().wait(A_WHILE if rank == 0 else 0)
    elif what == "a group":
        threading.Event().wait(A_WHILE if rank == 0 else 0)
        for _ in range(20):
            assert idist.all_reduce(1, group=[0, 1]) == 2
        idist.barrier(group=[0, 1])
    elif what == "a message":
        threading.Event().wait(A_WHILE if rank == 0 else 0)
        (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)
    elif what == "a long backward pass":
        if dist.is_initialized():  # gloo counts messages as calls of the group
            (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)
        Slow.apply(torch.ones(1, requires_grad=True)).backward()
    else:
        idist.barrier(group=[0, 1])
    return rank


@pytest.mark.long
@pytest.mark.parametrize(
    "what", ["a checkpoint", "a group", "a message", "a long backward pass", "a broadcast"]
)
def test_ranks_that_need_nobody_else_go_on(what: str) -> None:
    assert idist.spawn("gloo", go_on_without_rank_2, (what,), nproc_per_node=3) == [0, 1, 2]


@pytest.mark.horovod
@pytest.mark.parametrize("what", ["a checkpoint", "a group", "a long backward pass", "a broadcast"])
def test_ranks_of_horovod_that_need_nobody_else_go_on(what: str) -> None:
    assert idist.spawn("horovod", go_on_without_rank_2, (what,), nproc_per_node=3) == [0, 1, 2]


# --- contexts of initialize() ------------------------------------------------------------------------------


def under_parallel() -> None:
    with idist.Parallel("gloo") as parallel:
        parallel.run(waits_for_one, "all_reduce", 1)


def by_hand() -> None:
    idist.initialize("gloo")
    waits_for_one(0, "barrier", 1)
    idist.finalize()


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [under_parallel, by_hand])
def test_ranks_that_somebody_else_has_started(function: Any, size: int) -> None:
    ended = helpers.end_of_ranks(function, world_size=size)
    assert "MissingRanksError: Rank 1 did not come to " in ended[0].error
    assert "RankFailedError: Rank 1 did not come to " in ended[1].error
    assert "where rank " in ended[1].error and "So rank 1 has ended its context" in ended[1].error
    assert size == 2 or "MissingRanksError: Rank 1 did not come to " in ended[2].error


def keeps_its_model() -> float:
    """What rank 1 holds keeps the group's connections; they are closed all the same."""
    idist.initialize("gloo")
    model = idist.auto_model(torch.nn.Linear(2, 1))
    if idist.get_rank() == 0:
        with pytest.raises(idist.MissingRanksError):
            idist.barrier()
        with pytest.warns(UserWarning, match="Not every rank reached finalize"):
            idist.finalize()
    else:
        with pytest.raises(idist.RankFailedError, match="where rank 0 waits") as info:
            idist.finalize()
        assert info.value.rank == 0 and idist.backend() is None
    return float(model(torch.ones(1, 2)).detach().isfinite())


def test_a_model_that_lives_on_keeps_nobody_waiting() -> None:
    assert helpers.run_ranks(keeps_its_model) == [1.0, 1.0]


def fails_first() -> str:
    """Rank 0 fails before the first collective, which tests whether the ranks share memory."""
    try:
        with idist.Parallel("gloo"):
            if idist.get_rank() == 0:
                raise LookupError("no data")
            idist.barrier()
    except (LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_failure_before_the_first_collective_is_named() -> None:
    own, of_other = helpers.run_ranks(fails_first)
    assert own == "LookupError: no data"
    assert of_other.startswith("RankFailedError: Rank 0 raised LookupError; its traceback:")
    assert "in fails_first" in of_other and "LookupError: no data" in of_other


def fails_because_of_another() -> str:
    """Rank 0 dies; rank 1 fails because of it, and rank 2 comes after that."""
    try:
        with idist.Parallel("gloo"):
            pair = idist.new_group([1, 2])
            if idist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if idist.get_rank() == 1:
                idist.all_reduce(1)
            idist.all_reduce(1, group=pair)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_consequence_is_not_named_as_the_cause() -> None:
    of_others = [one.result for one in helpers.end_of_ranks(fails_because_of_another, world_size=3)[1:]]
    assert all(text.startswith("RankFailedError: Rank 0 (pid ") for text in of_others), of_others
    assert all(" has ended without a report of an error" in text for text in of_others), of_others


def loses(ended: int, num_calls: int) -> str:
    """The rank ``ended`` is killed in the call after ``num_calls``. The first call tests shared memory."""
    try:
        with idist.Parallel("gloo"):
            for _ in range(num_calls):
                idist.all_reduce(1)
            if idist.get_rank() == ended:
                os.kill(os.getpid(), signal.SIGKILL)
            idist.all_reduce(1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("num_calls", [0, 2])
@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("shared_memory", ["", "0"])
def test_a_process_that_is_killed_is_named(
    shared_memory: str, ended: int, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", shared_memory)
    of_other = helpers.end_of_ranks(loses, ended, num_calls)[1 - ended].result
    assert of_other.startswith(f"RankFailedError: Rank {ended} (pid "), of_other


def loses_the_store(folder: Path) -> str:
    """Rank 0, which serves the store, is killed as soon as rank 1 knows its process."""
    with idist.Parallel("gloo"):
        if idist.get_rank() == 0:
            while not (folder / "known").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        (watchdog,) = _running
        while watchdog._endings._first_rank is None:
            time.sleep(0.02)
        (folder / "known").touch()
        with pytest.raises(idist.RankFailedError) as info:
            idist.all_reduce(1)
    return str(info.value)


def test_the_process_that_serves_the_store_is_named(tmp_path: Path) -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    of_other = helpers.end_of_ranks(loses_the_store, tmp_path, environs=environs)[1]
    assert of_other.result.startswith("Rank 0 (pid "), of_other
    assert "has ended and the store with it" in of_other.result


def is_interrupted(folder: Path) -> str:
    """Rank 0 is interrupted, and its process has ended when rank 1 comes to its call."""
    number = folder / "pid"
    try:
        with idist.Parallel("gloo"):
            if idist.get_rank() == 0:
                (folder / "new").write_text(str(os.getpid()))
                (folder / "new").rename(number)
                raise KeyboardInterrupt
            while not number.exists():
                time.sleep(0.02)
            assert not helpers.end_of_processes([int(number.read_text())], 60)
            idist.all_reduce(1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_interrupted_rank_has_not_ended_without_a_report(tmp_path: Path) -> None:
    of_other = helpers.end_of_ranks(is_interrupted, tmp_path)[1].result
    assert "peer" in of_other and not of_other.startswith("RankFailedError"), of_other


def ends_its_context_in_except(local_rank: int) -> str:
    idist.barrier()
    try:
        if idist.get_rank() == 0:
            raise LookupError("no data")
        idist.all_reduce(1)
    except (LookupError, RuntimeError) as error:
        idist.finalize()
        return type(error).__name__
    return "no error"


@pytest.mark.horovod
def test_horovod_keeps_the_error_that_elastic_scripts_catch() -> None:
    of_ranks = idist.spawn("horovod", ends_its_context_in_except, nproc_per_node=2)
    assert of_ranks == ["LookupError", "HorovodInternalError"]


SCRIPT = """
    import sys
    import torch
    import ignite_dist as idist

    idist.initialize("gloo")
    idist.barrier()
    if idist.get_rank() == 0:
        idist.all_reduce(torch.ones(2))
    if sys.argv[1] == "finalizes":
        idist.finalize()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["finalizes", "just returns"])
def test_under_torchrun(how: str, tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environ = helpers.plain_environ(
        CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **helpers.loopback(), **WHOLE_EXIT
    )
    ended = helpers.run_python(*launcher, script, how.split()[0], env=environ)
    assert ended.returncode == 1, ended.stdout
    assert "MissingRanksError: Rank 1 did not come" in ended.stdout
    expected = (
        "its process has ended" if how == "just returns" else "it has come to the end of its context at"
    )
    assert expected in ended.stdout


# --- ends that are none ------------------------------------------------------------------------------------


def leaves(local_rank: int) -> None:
    idist.barrier()
    if idist.get_rank() == 1:
        sys.exit(0)
    idist.all_reduce(ones())


def test_a_rank_that_leaves_by_sys_exit() -> None:
    error = failure("gloo", leaves, size=3)
    assert isinstance(error, idist.WorkerExitedError) and (error.rank, error.exit_code) == (1, 0)
    assert "while others still needed it" in str(error)


def cycles(local_rank: int) -> int:
    total = 0
    for _ in range(3):
        total += idist.all_reduce(1)
        idist.finalize()
        idist.initialize("gloo")
    return total


def test_contexts_end_one_after_the_other() -> None:
    assert idist.spawn("gloo", cycles, nproc_per_node=3) == [9, 9, 9]
