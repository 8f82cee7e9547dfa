"""The failure of a rank while others wait: what the job says of it, how soon, and what it leaves behind."""

from __future__ import annotations

import builtins
import ctypes
import itertools
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import helpers
import ignite_dist as idist
from ignite_dist.workers import failures
from ignite_dist.workers.failures import FailedRank, Failure, error_of, failure_of

FAILURE_SECONDS = 30  # on a busy machine


# --- every way to die, while the others wait ---------------------------------------------------------


class Death(NamedTuple):
    """What the error is to say: without an exit code it is about an exception."""

    error_type: str
    exit_code: int | None
    texts: tuple[str, ...] = ()  # of the message
    trace: tuple[str, ...] = ("in _die",)  # of the traceback


DEATHS = {
    "exception": Death("LookupError", None, trace=("in _die", "LookupError: no dåta here")),
    "unprintable": Death("Unprintable", None, trace=("in _die", "Unprintable: <exception str() failed>")),
    "KeyboardInterrupt": Death("KeyboardInterrupt", None),
    "sys.exit(3)": Death("SystemExit", 3, ("ended with exit code 3",)),
    "sys.exit(text)": Death("SystemExit", 1, ("exit code 1 (SystemExit: there is no data)",)),
    "os._exit": Death("SystemExit", 4, ("ended with exit code 4.",), ()),
    "os._exit(0)": Death("SystemExit", 0, ("ended with exit code 0.",), ()),
    "SIGKILL": Death("SIGKILL", -signal.SIGKILL, ("memory",), ()),
    "out of memory": Death("SIGKILL", -signal.SIGKILL, ("memory",), ()),
    "segmentation fault": Death("SIGSEGV", -signal.SIGSEGV, trace=("in _die", "Segmentation fault")),
    "abort": Death("SIGABRT", -signal.SIGABRT, trace=("in _die", "Aborted")),
}
# The others notice that it has gone; if they are in Python, there is nothing to notice.
LEAVES = {"sys.exit(0)": Death("SystemExit", 0, ("exit code 0", "while others still needed it"))}


def _die(kind: str, control_group: str) -> None:
    class Unprintable(Exception):  # of a function, so it cannot be pickled either
        def __str__(self) -> str:
            raise ValueError("no text")

    if kind == "exception":
        raise LookupError("no dåta here")
    if kind == "unprintable":
        raise Unprintable
    if kind.startswith("sys.exit"):
        sys.exit({"sys.exit(0)": 0, "sys.exit(3)": 3}.get(kind, "there is no data"))
    if kind.startswith("os._exit"):
        os._exit(0 if kind == "os._exit(0)" else 4)
    if kind == "segmentation fault":
        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "out of memory" and control_group:
        _run_out_of_memory(control_group)
    signal.raise_signal(signal.SIGINT if kind == "KeyboardInterrupt" else signal.SIGKILL)


def _run_out_of_memory(control_group: str) -> None:
    Path(control_group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    held = [bytearray(b"x" * 10_000_000) for _ in range(300)]
    raise AssertionError(f"{len(held)} blocks did not reach the limit")


def _job(_: int, kind: str, victim: int, where: str, num_calls: int, folder: str, control_group: str) -> None:
    idist.barrier()
    for _call in range(num_calls):
        idist.all_reduce(torch.ones(3))
    if idist.get_rank() == victim:
        Path(folder, "when").write_text(str(time.time()), encoding="ascii")
        _die(kind, control_group)
    while where == "collective":
        idist.all_reduce(torch.ones(3))
    threading.Event().wait()


def _check(
    kind: str,
    victim: int,
    where: str,
    num_calls: int,
    folder: Path,
    control_group: str,
    backend: str = "gloo",
    **kwargs: Any,
) -> float:
    """Run the job and look at what it says in the end; how many seconds after the failure it did."""
    death = (DEATHS | LEAVES)[kind]
    args = (kind, victim, where, num_calls, str(folder), control_group)
    handle = idist.spawn(backend, _job, args, join=False, **kwargs)
    try:
        with pytest.raises(idist.RankFailedError) as info:
            handle.join()
        seconds = time.time() - float((folder / "when").read_text(encoding="ascii"))
    finally:
        handle.terminate()
    error, message = info.value, str(info.value)
    assert helpers.end_of_processes(handle.pids(), 0) == []
    assert (error.rank, error.error_type) == (victim, death.error_type), error
    assert error.host == socket.gethostname()
    assert message.startswith(f"Rank {victim} (pid {handle.pids()[victim]} on {error.host}) "), message
    if death.exit_code is None:
        assert isinstance(error, idist.WorkerRaisedError) and isinstance(error, ProcessRaisedException)
        assert "failed first. Its traceback:" in message
    else:
        assert isinstance(error, idist.WorkerExitedError) and isinstance(error, ProcessExitedException)
        name = death.error_type if death.exit_code < 0 else None
        assert (error.exit_code, error.signal_name) == (death.exit_code, name)
    for text in death.texts:
        assert text in message
    for text in death.trace:
        assert text in error.traceback and text in message
    assert bool(error.traceback) == bool(death.trace)
    for plumbing in (
        "multiprocessing",
        "outcome_of",
        "_end_with_launcher",
        "watchdog.py",
        "spawning.py",
        "parallel.py",
    ):
        assert plumbing not in error.traceback
    others = _ranks_after(error)
    assert len(set(others)) == len(others) and str(victim) not in others
    assert seconds < FAILURE_SECONDS
    return seconds


@pytest.fixture
def control_group(tmp_path: Path) -> Iterator[str]:
    """A folder: a control group of its own with little memory; empty where this machine lets us make none."""
    found = _make_control_group(f"{tmp_path.name}-{os.getpid()}", 100_000_000)
    yield found
    if found:
        _remove(found)


def _make_control_group(name: str, limit: int) -> str:
    limits = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}  # version 1
    limits |= {"memory.max": limit, "memory.swap.max": 0}  # version 2
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        there = [file for file in limits if (folder / file).exists()]
        try:
            for file in there:
                (folder / file).write_text(str(limits[file]), encoding="ascii")
        except OSError:
            there = []
        if there:
            return str(folder)
        folder.rmdir()
    return ""


def _remove(control_group: str) -> None:
    """Once its processes are gone, which takes the kernel a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return os.rmdir(control_group)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.mark.parametrize("kind", DEATHS | LEAVES)
def test_a_rank_that_dies_while_the_others_are_in_a_collective(
    kind: str, tmp_path: Path, control_group: str
) -> None:
    _check(kind, 1, "collective", 1, tmp_path, control_group, nproc_per_node=3)


@pytest.mark.parametrize("kind", ["exception", "sys.exit(3)", "SIGKILL", "segmentation fault"])
def test_a_rank_that_dies_while_the_others_are_in_python(kind: str, tmp_path: Path) -> None:
    _check(kind, 0, "python", 0, tmp_path, "", nproc_per_node=2)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param("horovod", "exception", marks=pytest.mark.horovod),
        pytest.param("horovod", "segmentation fault", marks=pytest.mark.horovod),
        pytest.param("horovod", "sys.exit(0)", marks=pytest.mark.horovod),
        pytest.param("xla-tpu", "exception", marks=pytest.mark.xla),
        pytest.param("xla-tpu", "sys.exit(3)", marks=pytest.mark.xla),
        pytest.param("xla-tpu", "sys.exit(0)", marks=pytest.mark.xla),
    ],
)
def test_a_rank_of_another_backend_that_dies(
    backend: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "xla-tpu":
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    _check(kind, 1, "collective", 1, tmp_path, "", backend, nproc_per_node=2)


FAULTS = """
    import ctypes, faulthandler, sys
    import ignite_dist as idist

    def work(local_rank):
        idist.barrier()
        if local_rank == 1:
            ctypes.string_at(0)
        idist.barrier()

    if __name__ == "__main__":
        for start_method in ("spawn", "fork", "forkserver"):
            try:
                idist.spawn("gloo", work, nproc_per_node=2, start_method=start_method)
            except idist.WorkerExitedError as error:
                print(start_method, error.rank, error.signal_name, "in work" in error.traceback)
        faulthandler.enable(sys.stdout)
        try:
            idist.spawn("gloo", work, nproc_per_node=2, start_method="fork")
        except idist.WorkerExitedError as error:
            print("own", error.rank, error.signal_name, error.traceback == "")
"""


@pytest.mark.long
def test_where_a_segmentation_fault_was_with_every_start_method(tmp_path: Path) -> None:
    """Not where the user has a fault handler already: that one tells it where it always does."""
    ended = helpers.run_python(helpers.write_script(tmp_path, FAULTS))
    lines = ended.stdout.splitlines()
    for start_method in ("spawn", "fork", "forkserver"):
        assert f"{start_method} 1 SIGSEGV True" in lines
    assert "own 1 SIGSEGV True" in lines
    assert ended.stdout.count("Fatal Python error") == 1


MEMORY = """
    import os, signal, sys
    import ignite_dist as idist

    def work(local_rank, control_group):
        idist.barrier()
        if local_rank == 1:
            held = [bytearray(b"x" * 10_000_000) for _ in range(300 if control_group else 0)]
            signal.raise_signal(signal.SIGKILL)
        idist.barrier()

    if __name__ == "__main__":
        control_group = sys.argv[1]
        if control_group:
            with open(control_group + "/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        try:
            idist.spawn("gloo", work, (control_group,), nproc_per_node=2)
        except idist.WorkerExitedError as error:
            print(error)
"""


@pytest.mark.long
def test_that_memory_has_run_out_is_said_where_the_kernel_says_it(tmp_path: Path) -> None:
    """The whole job in a container, say: the kernel ends the process in it that holds most."""
    control_group = _make_control_group(f"{tmp_path.name}-{os.getpid()}", 1_000_000_000)
    try:
        ended = helpers.run_new_python(helpers.write_script(tmp_path, MEMORY), control_group)
    finally:
        if control_group:
            _remove(control_group)
    said = "memory has run out in the control group" if control_group else "memory"
    told = re.search(rf"^Rank 1 \(.*\) was ended by SIGKILL \(.*{said}", ended.stdout, re.MULTILINE)
    assert told, ended.stdout


# --- which failed first ------------------------------------------------------------------------------


def _clean_up_slowly(_: int, folder: str) -> None:
    """The one that began it tells of it last: it closes its connections, and then has more to do."""
    pids = idist.all_gather(os.getpid())
    if idist.get_rank() == 1:
        try:
            raise LookupError("the cause")
        finally:
            idist.finalize()  # this rank alone
            helpers.end_of_processes([pids[0], pids[2]], 2)
    idist.all_reduce(torch.ones(3))


def _give_up(_: int, folder: str) -> None:
    """Those that lose the one which dies make something of their own of it."""
    idist.barrier()
    if idist.get_rank() == 1:
        Path(folder, "dies").touch()
        os._exit(7)
    try:
        idist.all_reduce(torch.ones(3))
    except RuntimeError:
        if idist.get_rank() == 0:
            sys.exit("something was wrong")
        raise ValueError("no luck") from None


def _fail_before_there_is_a_context(_: int, __: Any) -> None:
    raise AssertionError("one of the ranks cannot read its arguments")


class _Unreadable:
    def __reduce__(self) -> Any:
        return _read_on_0, ()


def _read_on_0() -> None:
    if os.environ["RANK"] != "0":
        raise LookupError("the cause")


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (_clean_up_slowly, "", (1, "LookupError", 2)),
        (_give_up, "", (1, "SystemExit", 2)),
        (_fail_before_there_is_a_context, _Unreadable(), (1, "LookupError", 0)),
    ],
    ids=["tells last", "consequences of the user's own", "before the context"],
)
def test_the_cause_is_found_behind_its_consequences(
    function: Callable[..., Any],
    argument: Any,
    expected: tuple[int, str, int],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    num = 3 if expected[2] else 2
    if num == 3:
        request.getfixturevalue("every_rank_reports")
    started = time.monotonic()
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn("gloo", function, (argument or str(tmp_path),), nproc_per_node=num)
    assert time.monotonic() - started < 3 * FAILURE_SECONDS  # from the start of Python on
    found = info.value.rank, info.value.error_type, len(_ranks_after(info.value))
    assert found == expected, str(info.value)


def _ranks_after(error: idist.RankFailedError) -> list[str]:
    named = re.findall(r"^Ranks? ([\d, ]+) failed after it: ", str(error), re.MULTILINE)
    return [rank for ranks in named for rank in ranks.split(", ")]


def _failed(rank: int, error: BaseException | Failure, seconds: float = 0.0) -> FailedRank:
    failure = error if isinstance(error, Failure) else failure_of(error)
    moved = Failure(**{**vars(failure), "time": seconds})
    return FailedRank(rank, rank, 100 + rank, "here", moved)


GLOO = RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7")
STORE = dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")
NCCL = dist.DistBackendError("ncclRemoteError: remote process exited or there was a network error")
HEARD = idist.RankFailedError(1, "ValueError", "its traceback")


def _raised_from(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception:
            raise KeyError("what the user makes of it") from None
    except KeyError as raised:
        return raised


def _group(*errors: Exception) -> Exception:
    group: Any = getattr(builtins, "ExceptionGroup", None)  # Python 3.10 has none
    grouped: Exception = errors[0] if group is None else group("of an asyncio.TaskGroup", errors)
    return grouped


def _unwrapped(error: Exception) -> Exception:
    """``error``, raised by a script that has caught its group and raises the member alone."""
    try:
        try:
            raise _group(error)
        except Exception:
            raise error  # noqa: B904
    except Exception as raised:
        return raised


@pytest.mark.parametrize("own", [_group(ValueError("boom"), GLOO), _unwrapped(ValueError("boom"))], ids=repr)
def test_an_own_error_in_a_group_is_no_consequence(own: Exception) -> None:
    assert not failure_of(own).is_consequence


CONSEQUENCES = [
    *(GLOO, STORE, NCCL, HEARD, _raised_from(GLOO), _unwrapped(GLOO)),
    *(_group(GLOO, STORE), _group(_raised_from(GLOO), _raised_from(GLOO))),
]


@pytest.mark.parametrize("consequence", CONSEQUENCES, ids=repr)
def test_what_tells_of_another_is_a_consequence_even_if_it_came_first(consequence: Exception) -> None:
    message = str(error_of([_failed(0, consequence, 1.0), _failed(1, ValueError("boom"), 2.0)]))
    assert message.startswith("Rank 1 (pid 101 on here) failed first. Its traceback:")
    assert "\nRank 0 failed after it: " in message


@pytest.mark.parametrize("consequence", CONSEQUENCES, ids=repr)
def test_where_there_are_consequences_only_the_first_of_them_is_reported(consequence: Exception) -> None:
    error = error_of([_failed(0, consequence, 2.0), _failed(1, consequence, 1.0)])
    assert (error.rank, error.error_type) == (1, type(consequence).__name__)
    assert "Rank 1 (pid 101 on here) noticed first that another rank failed" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        RuntimeError("the download broke off: Connection reset by peer"),
        dist.DistStoreError("Wait timeout after 1800000ms"),
        ValueError(str(GLOO)),
    ],
    ids=repr,
)
def test_what_may_have_begun_it_is_no_consequence(error: Exception) -> None:
    assert not failure_of(error).is_consequence


def _left(code: int | None = 0) -> Failure:
    outcome = failures.outcome_of(lambda _: sys.exit(code), 0)
    assert isinstance(outcome, Failure)
    return outcome


def test_who_left_is_blamed_only_for_what_others_lost_later() -> None:
    left, lost = _left(), failure_of(GLOO)
    assert error_of([_failed(0, lost, 2.0), _failed(1, left, 1.0)]).rank == 1
    assert error_of([_failed(0, lost, 1.0), _failed(1, left, 2.0)]).rank == 0
    assert error_of([_failed(0, ValueError(), 2.0), _failed(1, left, 1.0)]).rank == 0
    assert _left(None).is_exit_0 and not _left(256 + 3).is_exit_0


def test_a_silent_death_comes_before_what_was_told_while_it_was_not_noticed_yet() -> None:
    """But an abort may be torch's own answer to what happened to another."""
    told = Failure(time.time() - 0.5, "ValueError", "ValueError", "the traceback")
    killed, aborted = (failures.silent_failure(-number, "") for number in (signal.SIGKILL, signal.SIGABRT))
    for silent, first in ((killed, 1), (aborted, 0)):
        failed = [FailedRank(0, 0, 100, "here", told), FailedRank(1, 1, 101, "here", silent)]
        assert error_of(failed).rank == first


def _wait_in_two_places(rank: int) -> None:
    idist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 0:
        idist.barrier()  # where rank 0 is
    else:
        idist.barrier()  # where rank 2 is


@pytest.mark.usefixtures("every_rank_reports")
def test_where_the_others_were_when_a_rank_was_killed() -> None:
    with pytest.raises(idist.WorkerExitedError) as info:
        idist.spawn("gloo", _wait_in_two_places, nproc_per_node=3)
    lines = Path(__file__).read_text().splitlines()
    for rank in (0, 2):
        place = (
            f"workers/test_failures.py:{lines.index(f'        idist.barrier()  # where rank {rank} is') + 1}"
        )
        assert f"\nRank {rank} failed after it: at {place}: " in str(info.value), info.value


def _call_with_other_sizes(rank: int) -> None:
    idist.all_reduce(torch.ones(2 + rank))


@pytest.mark.usefixtures("every_rank_reports")
def test_what_all_ranks_find_is_reported_once() -> None:
    with pytest.raises(idist.WorkerRaisedError) as info:
        idist.spawn("gloo", _call_with_other_sizes, nproc_per_node=2)
    message = str(info.value)
    assert message.startswith("Ranks 0, 1 raised the same CollectiveMismatchError. Rank "), message
    assert (
        message.count("CollectiveMismatchError: The ranks made different calls") == 1
        and "failed" not in message
    ), message


def test_equal_failures_share_a_line() -> None:
    own, same = ValueError("boom"), ValueError("boom")
    failed = [_failed(3, GLOO, 1.0), _failed(2, own, 2.0), _failed(0, GLOO, 3.0), _failed(1, same, 4.0)]
    for others in (failed, failed[:3]):
        error = error_of(others)
        assert error.rank == 2 and str(error).count("ValueError: boom") == 1
        assert re.findall(r"\n(.*) failed after it", str(error)) == ["Ranks 0, 3"], error
    assert str(error_of(failed)).startswith(
        "Ranks 1, 2 raised the same ValueError. Rank 2 (pid 102 on here) was the first. Its traceback:"
    )
    assert str(error_of([_failed(0, own), _failed(1, ValueError("other"), 1.0)])).startswith(
        "Rank 0 (pid 100"
    )


def _shout(_: int) -> None:
    raise ValueError("x" * 10_000_000 + "the end")


def test_a_message_without_end_is_cut_in_its_middle() -> None:
    with pytest.raises(idist.WorkerRaisedError) as info:
        idist.spawn("gloo", _shout)
    assert 50_000 < len(str(info.value)) < 300_000
    assert "in _shout" in info.value.traceback and "xthe end" in info.value.traceback
    assert pickle.loads(pickle.dumps(info.value)).traceback == info.value.traceback


# --- again and again ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.stress
def test_whatever_dies_whenever_the_first_failure_is_the_one_reported(
    repetitions: Callable[[int, int], int], tally: Callable[[str], None], tmp_path: Path
) -> None:
    draw = random.Random(20_240_917)
    kinds = list(DEATHS | LEAVES)
    draw.shuffle(kinds)
    slowest = 0.0
    for number, kind in zip(range(repetitions(8, 200)), itertools.cycle(kinds), strict=False):
        world_size = draw.randint(2, 4)
        victim, num_calls = draw.randrange(world_size), draw.randrange(20)
        where = "collective" if kind in LEAVES else draw.choice(["collective", "python"])
        folder = tmp_path / str(number)
        folder.mkdir()
        control_group = ""
        if kind == "out of memory":
            control_group = _make_control_group(f"{tmp_path.name}-{os.getpid()}-{number}", 100_000_000)
        try:
            print(f"{number}: {kind} of rank {victim} of {world_size} after {num_calls} calls, {where}")
            seconds = _check(kind, victim, where, num_calls, folder, control_group, nproc_per_node=world_size)
        finally:
            if control_group:
                _remove(control_group)
        slowest = max(slowest, seconds)
        tally(f"failures: {kind}, {'by the kernel' if control_group else 'others in a ' + where}")
    print(f"the slowest job ended {slowest:.1f} s after its failure")


class _Picky(Exception):
    """Cannot be made from what pickle keeps of it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def _returns_what_cannot_be_read(local_rank: int) -> Any:
    return _Picky(1, "x") if local_rank == 1 else None


def test_a_result_that_cannot_be_read_here_is_the_failure_of_its_rank() -> None:
    handle = idist.spawn("gloo", _returns_what_cannot_be_read, nproc_per_node=2, join=False)
    for _ in range(2):
        with pytest.raises(idist.WorkerRaisedError, match="missing 1 required positional") as info:
            handle.join()
        assert info.value.rank == 1


def test_what_was_ended_on_purpose_gets_no_advice() -> None:
    handle = idist.spawn("gloo", lambda local_rank: time.sleep(60), nproc_per_node=2, join=False)
    handle.terminate()
    with pytest.raises(idist.WorkerExitedError) as info:
        handle.join()
    assert "SIGTERM" in str(info.value) and "__main__" not in str(info.value)


def _calls_another(local_rank: int) -> None:
    idist.all_reduce(torch.ones(3 + local_rank))


def test_an_abort_of_gloo_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")  # over shared memory such calls raise
    with pytest.raises(idist.WorkerExitedError, match=r"idist\.compare_calls\(\) names them"):
        idist.spawn("gloo", _calls_another, nproc_per_node=2)


def _waits(local_rank: int) -> None:
    threading.Event().wait()


def _nested(local_rank: int) -> list[int]:
    return idist.spawn("gloo", int, nproc_per_node=1)


@pytest.mark.long
def test_a_forked_worker_starts_workers_of_its_own() -> None:
    others = idist.spawn("gloo", _waits, nproc_per_node=1, join=False)  # from a fork server
    assert idist.spawn("gloo", _nested, nproc_per_node=1, start_method="fork") == [[0]]
    others.terminate()


def test_a_rank_that_left_and_a_launch_without_a_failure() -> None:
    """Nobody has failed: a machine was lost, say, and the rank that left is all that is known."""
    error = error_of([_failed(1, _left(0), 1.0)])
    assert (error.rank, error.exit_code) == (1, 0)  # type: ignore[attr-defined]
