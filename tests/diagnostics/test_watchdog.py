"""Reports of a collective that waits: of ``watch_for_hangs``, ``compare_calls`` and ``barrier(timeout=)``."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist
from ignite_dist.comp_models import SerialModel
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import announcing, flight_recorder, hang_reports
from ignite_dist.internals import _torch
from ignite_dist.internals.ranks import describe_ranks

SHORT = timedelta(seconds=2)  # more than a busy machine keeps a rank waiting
LONG = timedelta(seconds=60)
THREAD = "ignite_dist's watchdog"

XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "3"}
BACKENDS = [
    pytest.param("gloo", 3, id="gloo"),
    pytest.param("horovod", 2, id="horovod", marks=pytest.mark.horovod),
    pytest.param("xla-tpu", 3, id="xla", marks=pytest.mark.xla),
]


class Heard(logging.Handler):
    """What the watchdog of this process has said, ``about`` something."""

    def __init__(self, about: str = "") -> None:
        super().__init__()
        self.about = about
        self.messages: list[str] = []
        logging.getLogger("ignite_dist.diagnostics.watchdog").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self.about in record.getMessage():
            self.messages.append(record.getMessage())


def wait_until_any_is_told(heard: Heard, folder: Path) -> None:
    """Return when the watchdog of some process has spoken: each leaves a file."""
    deadline = time.monotonic() + LONG.total_seconds()
    while not list(folder.iterdir()):
        if heard.messages:
            (folder / str(os.getpid())).touch()
        assert time.monotonic() < deadline, "nobody has said anything"
        time.sleep(0.02)


class Teller(Heard):
    """One that leaves the file at once: its rank is stuck in a collective."""

    def __init__(self, folder: Path) -> None:
        # On a busy machine another wait may take long too: for a connection to the store, say.
        super().__init__("busy_elsewhere")
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.messages:
            (self.folder / str(os.getpid())).touch()


def only(told: list[list[str]]) -> str:
    """The one message about that wait which all ranks together have heard."""
    (message,) = [one for messages in told for one in messages]
    return message


def busy_elsewhere(heard: Heard, folder: Path) -> None:
    _busy(folder).touch()
    wait_until_any_is_told(heard, folder)


def _busy(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-busy")


def is_late(heard: Heard, folder: Path) -> None:
    """Rank 1 is busy elsewhere until somebody has said it. The other ranks go on when it is."""
    if idist.get_rank() == 1:
        busy_elsewhere(heard, folder)
    while not _busy(folder).exists():
        time.sleep(0.02)


def late(local_rank: int, folder: Path) -> list[str]:
    """Rank 1 comes to the third collective when somebody has said that it is not there."""
    heard = Teller(folder)
    idist.watch_for_hangs(SHORT)
    for _ in range(2):
        idist.all_gather("before")
    is_late(heard, folder)
    idist.all_gather("after")
    idist.barrier()
    return heard.messages


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_a_wait_that_is_too_long_is_explained_once(
    backend: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in XLA.items():
        monkeypatch.setenv(name, value)
    told = idist.spawn(backend, late, (tmp_path,), nproc_per_node=size)
    if backend == "xla-tpu":  # replicas share the logger: each has heard it
        assert told[0] == told[1] == told[2]
        told = told[:1]
    message = only(told)
    others = "Ranks 0, 2 wait in all_gather" if size == 3 else "Rank 0 waits in all_gather"
    assert others in message
    assert "Rank 1 is not in a collective" in message and "in busy_elsewhere" in message
    assert "The last 2 collectives of rank 1" in message
    assert f"The last 3 collectives of rank{'s 0, 2' if size == 3 else ' 0'}" in message
    assert message.index(others) < message.index("Rank 1 is not")  # the majority first
    assert "ignite_dist/launcher/" not in message  # nor what else has started the process


def in_a_block(local_rank: int, folder: Path, how: str) -> list[str]:
    heard = Teller(folder)
    heard.about = "one_rank"
    idist.watch_for_hangs(SHORT)
    if how == "first":
        with idist.one_rank_first(rank=1):
            if idist.get_rank() == 1:
                busy_elsewhere(heard, folder)
    else:
        idist.one_rank_only(rank=1, with_barrier=True)(busy_elsewhere)(heard, folder)
    idist.barrier()
    return heard.messages


@pytest.mark.parametrize(
    ("how", "what"), [("first", "block of one_rank_first"), ("only", "function of one_rank_only")]
)
def test_ranks_that_wait_for_a_block_on_purpose_are_no_hang(how: str, what: str, tmp_path: Path) -> None:
    message = only(idist.spawn("gloo", in_a_block, (tmp_path, how), nproc_per_node=2))
    assert message.startswith(f"Rank 1 is in the {what}, now at diagnostics/test_watchdog.py:")
    assert "the other ranks have waited for it for " in message and "\n" not in message


def late_for_torch(local_rank: int, folder: Path) -> list[str]:
    heard = Teller(folder)
    idist.watch_for_hangs(SHORT)
    is_late(heard, folder)
    dist.all_reduce(torch.ones(2))
    idist.barrier()
    return heard.messages


def test_a_wait_in_torchs_own_collective_is_explained_too(tmp_path: Path) -> None:
    told = idist.spawn("gloo", late_for_torch, (tmp_path,), nproc_per_node=2)
    message = only(told)
    assert "Rank 0 waits in all_reduce" in message and "in busy_elsewhere" in message
    assert "No call of idist by ranks 0-1 yet." in message


def late_for_ddp(local_rank: int, folder: Path) -> list[str]:
    heard = Teller(folder)
    model = idist.auto_model(torch.nn.Linear(2, 1))
    idist.watch_for_hangs(SHORT)
    for step in range(3):
        if step == 2:
            is_late(heard, folder)
        model(torch.ones(4, 2)).sum().backward()
    idist.barrier()
    return heard.messages


def test_a_wait_in_a_backward_pass_of_ddp_is_explained_too(tmp_path: Path) -> None:
    told = idist.spawn("gloo", late_for_ddp, (tmp_path,), nproc_per_node=2)
    message = only(told)
    assert "Rank 0 waits in backward" in message and "in busy_elsewhere" in message
    assert "IGNITE_DIST_DEBUG=1" in message


def fails_beside_a_collective(local_rank: int, folder: Path) -> list[str]:
    """Rank 1 tells of its error, while rank 0 is in a collective that rank 1 will never make."""
    heard = Teller(folder)
    idist.watch_for_hangs(SHORT)
    with suppress(ValueError), idist.raise_together(group=[1]):
        if idist.get_rank() == 1:
            raise ValueError("the cause")
    is_late(heard, folder)
    idist.barrier()
    return heard.messages


def test_what_a_rank_has_told_the_others_of_is_said(tmp_path: Path) -> None:
    told = idist.spawn("gloo", fails_beside_a_collective, (tmp_path,), nproc_per_node=2)
    message = only(told)
    assert "Rank 1 is not in a collective, after ValueError: the cause" in message


def trains_fast(local_rank: int) -> list[str]:
    heard = Heard()
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    idist.barrier()  # what is slow only once is over
    idist.watch_for_hangs(timedelta(seconds=5))
    ends = time.monotonic() + 12
    while idist.all_true(time.monotonic() < ends):
        for _ in range(20):  # backward passes and steps, and no call of ours
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
    return heard.messages


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_training_that_goes_on_is_left_alone(backend: str) -> None:
    assert idist.spawn(backend, trains_fast, nproc_per_node=2) == [[], []]


def many_barriers(local_rank: int) -> int:
    before = psutil.Process().num_fds()
    for _ in range(60):
        idist.barrier(timeout=LONG)
    return psutil.Process().num_fds() - before


def test_barriers_share_a_connection() -> None:
    assert max(idist.spawn("gloo", many_barriers, nproc_per_node=2)) <= 1


def frees_what_it_held(local_rank: int) -> bool:
    gc.disable()
    tensor = weakref.ref(waits_with_a_tensor(local_rank))
    return tensor() is None


def waits_with_a_tensor(local_rank: int) -> torch.Tensor:
    tensor = torch.ones(3)
    if local_rank == 1:
        time.sleep(2.5)  # the watchdog looks every second: it may not be looking at the end
    idist.barrier()
    return tensor


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_what_a_wait_held_goes_with_it(backend: str) -> None:
    assert idist.spawn(backend, frees_what_it_held, nproc_per_node=2) == [True, True]


def many_short_waits(local_rank: int) -> list[str]:
    heard = Heard()
    idist.barrier()  # what is slow only once is over
    idist.watch_for_hangs(timedelta(seconds=5))
    ends = time.monotonic() + 12
    while idist.all_true(time.monotonic() < ends):
        dist.barrier()
    return heard.messages


@pytest.mark.long
def test_who_goes_on_is_left_alone() -> None:
    assert idist.spawn("gloo", many_short_waits, nproc_per_node=2) == [[], []]


def watched_since_the_start(local_rank: int) -> tuple[bool, int]:
    assert announcing.keeps_calls(current_model())
    names = [thread.name for thread in threading.enumerate()]
    idist.finalize()
    after = [thread.name for thread in threading.enumerate()]
    return THREAD in names, after.count(THREAD)


def test_workers_are_watched_from_their_start_to_the_end_of_their_context() -> None:
    assert idist.spawn("gloo", watched_since_the_start, nproc_per_node=2) == [(True, 0)] * 2


# --- in a context of somebody else's ---------------------------------------------------------------------


def foreign(folder: Path) -> list[str]:
    dist.init_process_group("gloo")
    assert not announcing.keeps_calls(current_model())
    with pytest.raises(RuntimeError, match=r"Call idist.watch_for_hangs\(\) once on every rank"):
        idist.barrier(timeout=LONG)
    told = late(0, folder)
    idist.barrier(timeout=LONG)
    dist.destroy_process_group()
    idist.sync()
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]
    return told


def test_a_context_that_somebody_else_has_made(tmp_path: Path) -> None:
    told = helpers.run_ranks(foreign, tmp_path, world_size=3)
    message = only(told)
    assert "Ranks 0, 2 wait in all_gather" in message, message


def test_ranks_that_wait_in_one_call_are_told_together() -> None:
    """A rank that polls and a rank that sleeps wait in the same call."""

    def report(stack: str, place: str, waits_in: str = "all_gather") -> dict[str, Any]:
        about = {"pid": 1, "host": "here", "seconds": 3.0, "site": "", "last": "", "error": "", "block": ""}
        kept = {"compares": False, "numbers": {}, "calls": [], "keeps": True}
        return {**about, **kept, "waits_in": waits_in, "stack": stack, "place": place}

    user = "script.py, line 1"
    text = hang_reports.explanation(
        {
            0: report(f"{user}\npolls", user),
            1: report(f"{user}\npolls", user, waits_in=""),
            2: report(f"{user}\nsleeps", user),
            3: report("script.py, line 2\nsleeps", "script.py, line 2"),
        },
        world_size=4,
    )
    assert "Ranks 0, 2 wait in all_gather" in text and text.count("polls") == 2, text
    assert "Rank 1 is not in a collective" in text and "Rank 3 waits in all_gather" in text, text


def watchdogs() -> int:
    return [thread.name for thread in threading.enumerate()].count(THREAD)


def cycles() -> list[tuple[Any, ...]]:
    """What is seen in each of three contexts, and after it."""
    seen = []
    for number in range(3):
        idist.initialize("gloo")
        idist.barrier(timeout=LONG)
        idist.watch_for_hangs(LONG)
        gathered = idist.all_gather((number, idist.get_rank())) if number == 1 else None
        idist.barrier(timeout=LONG)
        record = announcing.recorder_of(current_model())
        assert record is not None
        calls = [call.operation for call in record.logs[idist.get_rank()].calls]
        during = watchdogs()
        idist.finalize()
        seen.append((gathered, calls, during, watchdogs(), idist.backend()))
    return seen


def test_one_context_after_another() -> None:
    """Each has a watchdog, and calls, of its own."""
    without = (None, [], 1, 0, None)
    with_a_call = ([(1, 0), (1, 1)], ["all_gather"], 1, 0, None)
    assert helpers.run_ranks(cycles) == [[without, with_a_call, without]] * 2


def test_a_world_of_one_waits_for_nobody() -> None:
    idist.watch_for_hangs()
    idist.barrier(timeout=SHORT)
    with idist.compare_calls(), idist.raise_together():
        idist.all_reduce(1)
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.mark.parametrize(
    ("threshold", "error", "text"),
    [(5, TypeError, "Use timedelta"), (timedelta(0), ValueError, "must be positive")],
)
def test_wrong_thresholds(threshold: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        idist.watch_for_hangs(threshold)


# --- comparing -------------------------------------------------------------------------------------------


def skips_a_call() -> str:
    idist.initialize("gloo")
    with pytest.raises(idist.CollectiveMismatchError) as info:
        if idist.get_rank() == 0:
            idist.all_reduce(torch.ones(2))
        idist.finalize()
    idist.all_gather("in step")
    dist.destroy_process_group()
    return str(info.value)


def test_by_environment_and_a_rank_that_has_skipped_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_DEBUG", "1")
    first, second = helpers.run_ranks(skips_a_call)
    assert first == second
    assert "all_reduce" in first and "the end of the context" in first


def never_comes(folder: Path) -> list[int] | None:
    idist.initialize("gloo", timeout=timedelta(seconds=15))
    idist.compare_calls()
    if idist.get_rank() == 1:
        deadline = time.monotonic() + LONG.total_seconds()
        while not (folder / "given up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        idist.compare_calls(verify=False)
        os._exit(0)
    with pytest.raises(idist.MissingRanksError, match="did not come to all_reduce") as info:
        idist.all_reduce(torch.ones(2))
    (folder / "given up").touch()
    assert "in never_comes" in info.value.where[1]
    return info.value.ranks


@pytest.mark.long
def test_a_rank_that_makes_no_call_is_named_when_the_timeout_passes(tmp_path: Path) -> None:
    first, _ = helpers.end_of_ranks(never_comes, tmp_path)
    assert (first.result, first.error) == ([1], "")


def dies_in_the_block(folder: Path) -> float:
    idist.initialize("gloo")
    idist.barrier()
    started = time.monotonic()
    with pytest.raises(RuntimeError), idist.raise_together():
        if idist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return time.monotonic() - started


def test_a_rank_that_is_killed_in_the_block_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    first, second, third = helpers.end_of_ranks(dies_in_the_block, tmp_path, world_size=3)
    assert "died without a word" in second.error
    for other in (first, third):
        assert other.error == "" and other.result < 10


def fails_in_turn(local_rank: int, folder: Path) -> tuple[int, str] | None:
    """Rank 2 fails first, rank 0 after it; rank 1 hears of the one that was first."""
    rank = idist.get_rank()
    try:
        with idist.raise_together():
            if rank == 2:
                (folder / "failed").touch()
                raise ValueError("first")
            if rank == 0:
                while not (folder / "failed").exists():
                    time.sleep(0.01)
                time.sleep(2)  # the other failure has its time when its traceback has been written
                raise KeyError("second")
    except idist.RankFailedError as error:
        return error.rank, error.error_type
    except (ValueError, KeyError):
        return None
    raise AssertionError("not reached")


def test_the_failure_that_came_first_is_reported(tmp_path: Path) -> None:
    heard = idist.spawn("gloo", fails_in_turn, (tmp_path,), nproc_per_node=3)
    assert heard == [None, (2, "ValueError"), None]


def compares(local_rank: int = 0) -> bool:
    model = current_model()
    record = announcing.recorder_of(model)
    return record is not None and record.log_of(model.get_rank()).comparison is not None


def debug_around_a_context() -> list[bool]:
    with idist.compare_calls():
        idist.initialize("gloo")
        inside = compares()
    after = compares()
    idist.finalize()
    return [inside, after]


def test_before_a_context_it_holds_for_those_to_come_until_its_block_ends() -> None:
    assert helpers.run_ranks(debug_around_a_context) == [[True, False]] * 2
    with idist.compare_calls():
        assert idist.spawn("gloo", compares, nproc_per_node=2) == [True, True]
    assert idist.spawn("gloo", compares, nproc_per_node=2) == [False, False]


def ends_without_the_other() -> str | None:
    idist.initialize("gloo")
    with idist.compare_calls():
        idist.barrier()
        if idist.get_rank() == 1:
            os._exit(0)
        with pytest.warns(UserWarning, match="Not every rank reached"):
            idist.finalize()
    return idist.backend()


def test_a_context_ends_though_a_rank_is_gone() -> None:
    first, _ = helpers.end_of_ranks(ends_without_the_other)
    assert (first.result, first.error) == (None, "")


@pytest.mark.parametrize("value", ["true", "yes", "2"])
def test_the_environment_says_yes_or_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_DEBUG", value)
    with pytest.raises(idist.EnvironmentVariablesError, match="IGNITE_DIST_DEBUG must be 0 or 1"):
        announcing.recorder_of(SerialModel())


def test_debug_is_no_decorator() -> None:
    with pytest.raises(TypeError, match="no decorator"):
        idist.compare_calls(compares)


# --- what is kept ------------------------------------------------------------------------------------------


def test_the_last_calls_are_kept_without_their_tensors() -> None:
    record = flight_recorder.Recorder()
    for number in range(30):
        call = record.record(0, "all_reduce", (), torch.ones(number), "SUM")
    assert str(call) == (
        "all_reduce(SUM torch.float32 (29,)), call 30, at diagnostics/test_watchdog.py:"
        f"{call.site.rpartition(':')[2]}"
    )
    assert [one.number for one in record.logs[0].calls] == list(range(11, 31))
    assert not any(isinstance(part, torch.Tensor) for one in record.logs[0].calls for part in one)


def test_groups_are_counted_apart() -> None:
    record = flight_recorder.Recorder()
    numbers = [record.record(0, "barrier", group).number for group in [(), (0, 1), (), (0, 2), (0, 1)]]
    assert numbers == [1, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([7, 6], "ranks 6-7")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text


# --- groups with a backend for each type of device -----------------------------------------------------


class _TwoBackends:
    """A group of `cpu:gloo,cuda:nccl`, with gloo's counters for both."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, *groups: Any) -> None:
        self._groups = groups

    def _get_backend(self, device: torch.device) -> Any:
        return self._groups[device.type == "cuda"]._get_backend(torch.device("cpu"))


def _counts(_: int) -> list[int]:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    both = _TwoBackends(*groups)
    found = []
    for number in (0, 1, 1, 1):
        dist.all_reduce(torch.ones(1), group=groups[number])
        found.append(_torch.sequence_number(both))
    assert _torch.sequence_number(_TwoBackends(groups[0], groups[0])) == _torch.sequence_number(groups[0])
    return [(number or 0) - (found[0] or 0) for number in found]


def test_the_calls_of_all_backends_of_a_group_are_counted() -> None:
    assert idist.spawn("gloo", _counts, nproc_per_node=2) == [[0, 1, 2, 3]] * 2
