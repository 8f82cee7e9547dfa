"""``record_timeline()``: the calls of all ranks in one file, and what it does where ranks fail."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.comp_models import SerialModel
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import announce, get_or_create_recorder, recorder_of
from ignite_dist.testing import faults
from on_ranks import on_ranks
from waiting import when_waiting

XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}


def calls_of(path: Path, rank: int, category: str = "call") -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [one for one in events if one.get("cat") == category and one["pid"] == rank]


def names_of(path: Path, rank: int) -> list[str]:
    return [one["name"] for one in calls_of(path, rank)]


def wait_for(is_true: Callable[[], Any]) -> None:
    never = threading.Event()
    while not is_true():
        never.wait(0.001)


# --- what is recorded ----------------------------------------------------------------------------------


def _late(_: int, folder: Path) -> None:
    idist.barrier()  # the group opens its shared memory
    with idist.record_timeline(folder / "trace.json"):
        if idist.get_rank() == 0:
            when_waiting((folder / "waits").touch)
        else:
            wait_for((folder / "waits").exists)
        idist.all_reduce(torch.ones(3, 5), "MAX")


def test_a_rank_waits_for_the_rank_that_comes_last(tmp_path: Path) -> None:
    on_ranks(_late, tmp_path)
    (waits,), (is_last,) = calls_of(tmp_path / "trace.json", 0), calls_of(tmp_path / "trace.json", 1)
    assert waits["name"] == is_last["name"] == "all_reduce"
    facts = {"op": "MAX", "value": "torch.float32 (3, 5)", "bytes": 60, "ranks": [0, 1]}
    assert waits["args"].items() >= {**facts, "waits for": 1}.items()
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "torch.ones(3, 5)" in text
    )
    assert waits["args"]["line"] == f"diagnostics/test_timeline.py:{line}"
    assert waits["args"]["waiting us"] == pytest.approx(is_last["ts"] - waits["ts"], abs=0.002)
    assert "waits for" not in is_last["args"] and is_last["args"]["waiting us"] == 0
    (waiting,), (working,) = (calls_of(tmp_path / "trace.json", 0, name) for name in ("waiting", "working"))
    assert waiting["name"] == "waiting for rank 1"
    assert waiting["dur"] + working["dur"] == pytest.approx(waits["dur"], abs=0.002)
    (name,) = (
        one["args"]["name"]
        for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if one["name"] == "process_name" and one["pid"] == 1
    )
    assert name == f"rank 1 ({idist.hostname()})"
    assert not list(tmp_path.glob("*.tmp"))


def _groups(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        idist.all_reduce(torch.ones(1), group=[0, 2])
        idist.all_gather({"rank": idist.get_rank()})
        idist.broadcast([1.0, 2], src=1)


def test_a_rank_outside_a_group_records_nothing_of_it(tmp_path: Path) -> None:
    on_ranks(_groups, tmp_path / "trace.json", world_size=3)
    assert names_of(tmp_path / "trace.json", 1) == ["all_gather", "broadcast"]
    for rank in (0, 2):
        first, *_ = calls_of(tmp_path / "trace.json", rank)
        assert first["name"] == "all_reduce" and first["args"]["ranks"] == [0, 2]


def _delayed(_: int, path: Path) -> None:
    with idist.record_timeline(path), faults.delay(0.2, rank=1, at="barrier"):
        idist.barrier()


def test_a_fault_that_delays_a_rank_counts_as_waiting_for_it(tmp_path: Path) -> None:
    on_ranks(_delayed, tmp_path / "trace.json")
    (call,) = calls_of(tmp_path / "trace.json", 0)
    assert call["args"]["waits for"] == 1 and call["args"]["waiting us"] > 100_000


def _asynchronous(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        primitive = idist.all_reduce(torch.ones(4), async_op=True)
        primitive.wait()
        steps = idist.all_gather({"rank": idist.get_rank()}, async_op=True)
        steps.wait()
        steps.wait()
        idist.barrier()


def test_asynchronous_calls_have_a_span_and_a_wait(tmp_path: Path) -> None:
    on_ranks(_asynchronous, tmp_path / "trace.json")
    for rank in (0, 1):
        waits = ["wait() of all_reduce", "wait() of all_gather"]
        assert names_of(tmp_path / "trace.json", rank) == [*waits, "barrier"]
        spans = calls_of(tmp_path / "trace.json", rank, "async")
        assert [(one["ph"], one["name"]) for one in spans] == [
            *(("b", "all_reduce"), ("e", "all_reduce")),
            *(("b", "all_gather"), ("e", "all_gather")),
        ]
        assert all(begin["ts"] < end["ts"] for begin, end in zip(spans[::2], spans[1::2], strict=True))


def _backward(_: int, path: Path) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    with idist.record_timeline(path):
        for function in (idist.all_reduce, idist.all_gather, idist.reduce_scatter, idist.all_to_all):
            function(x, sync_grads=True).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_backward_passes_are_recorded_from_begin_to_end(tmp_path: Path) -> None:
    assert on_ranks(_backward, tmp_path / "trace.json") == [[6.0, 6.0]] * 2
    functions = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for rank in (0, 1):
        calls = calls_of(tmp_path / "trace.json", rank)
        expected = [name for function in functions for name in (function, f"{function}'s backward pass")]
        assert sorted(one["name"] for one in calls) == sorted(expected)
        assert not [one for one in calls if "outcome" in one["args"]]


def _threads(_: int, path: Path) -> None:
    groups = [idist.new_group([0, 1]) for _ in range(2)]
    with idist.record_timeline(path):
        thread = threading.Thread(target=lambda: idist.barrier(group=groups[1]))
        idist.barrier(group=groups[0])
        thread.start()
        thread.join()


def test_each_thread_has_its_row(tmp_path: Path) -> None:
    on_ranks(_threads, tmp_path / "trace.json")
    for rank in (0, 1):
        assert [one["tid"] for one in calls_of(tmp_path / "trace.json", rank)] == [0, 1]


def _many(_: int, path: Path) -> None:
    with idist.record_timeline(path, max_calls=3):
        for _ in range(5):
            idist.barrier()


def test_calls_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    on_ranks(_many, tmp_path / "trace.json")
    assert len(names_of(tmp_path / "trace.json", 1)) == 3
    notes = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert notes["calls of rank 1"] == "the last 2 are missing: raise max_calls"


def _compared(_: int, path: Path) -> None:
    with idist.compare_calls(), idist.record_timeline(path):
        idist.all_reduce(1.5)
    idist.barrier()


def test_debug_and_a_timeline_work_together(tmp_path: Path) -> None:
    on_ranks(_compared, tmp_path / "trace.json")
    assert names_of(tmp_path / "trace.json", 1) == ["all_reduce"]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("horovod", marks=pytest.mark.horovod),
        pytest.param("xla-tpu", marks=pytest.mark.xla),
    ],
)
def test_other_backends(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in XLA.items() if backend == "xla-tpu" else ():
        monkeypatch.setenv(name, value)
    idist.spawn(backend, _compared, (tmp_path / "trace.json",), nproc_per_node=2)
    idist.spawn(backend, _groups_of_two, (tmp_path / "groups.json",), nproc_per_node=2)
    for rank in (0, 1):
        assert names_of(tmp_path / "trace.json", rank) == ["all_reduce"]
        own = ["barrier"] if rank == 0 else []
        assert names_of(tmp_path / "groups.json", rank) == [*own, "wait() of all_reduce", "all_gather"]


def _groups_of_two(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        idist.barrier(group=[0])
        idist.all_reduce(torch.ones(3), async_op=True).wait()
        idist.all_gather(idist.get_rank())


# --- without ranks -------------------------------------------------------------------------------------


def test_one_process_without_a_context(tmp_path: Path) -> None:
    with idist.record_timeline(str(tmp_path / "trace.json")):
        assert idist.all_reduce(2) == 2
    assert names_of(tmp_path / "trace.json", 0) == ["all_reduce"]
    with idist.record_timeline(tmp_path / "trace.json"):  # replaces the file
        idist.barrier()
    assert names_of(tmp_path / "trace.json", 0) == ["barrier"]
    idist.barrier()
    assert names_of(tmp_path / "trace.json", 0) == ["barrier"]


def test_a_recording_keeps_no_tensor_alive(tmp_path: Path) -> None:
    with idist.record_timeline(tmp_path / "trace.json"):
        tensor = torch.ones(1000)
        memory = weakref.ref(tensor.untyped_storage())
        idist.all_reduce(tensor, inplace=True)
        idist.all_gather([tensor])
        del tensor
        gc.collect()
        assert memory() is None


def test_nothing_is_wrapped_when_off(tmp_path: Path) -> None:
    model = SerialModel()

    def begin(_: Any) -> Any:
        raise AssertionError

    assert announce(model, "barrier", model.groups.world, begin) is begin
    get_or_create_recorder(model, keep_calls=True)
    assert announce(model, "barrier", model.groups.world, begin) is begin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((len,), "takes the path of a file, got <built-in function len>. record_timeline is no decorator"),
        ((None,), "takes the path of a file, got None"),
    ],
)
def test_a_wrong_path_is_a_type_error(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        idist.record_timeline(*arguments)
    with pytest.raises(ValueError, match="max_calls must be a positive int, got 0"):
        idist.record_timeline("trace.json", max_calls=0)


def test_one_timeline_at_a_time(tmp_path: Path) -> None:
    with idist.record_timeline(tmp_path / "trace.json"):
        with pytest.raises(RuntimeError, match="recorded already"):
            idist.record_timeline(tmp_path / "other.json")
        idist.barrier()
    assert names_of(tmp_path / "trace.json", 0) == ["barrier"]


# --- errors and ends -----------------------------------------------------------------------------------


def _bad_path(_: int, folder: Path) -> list[str]:
    found = []
    for path in (folder / "no" / "trace.json", folder):
        try:
            idist.record_timeline(path if idist.get_rank() == 0 else folder / "good.json")
        except ValueError as error:
            found.append(str(error))
    with idist.record_timeline(folder / "good.json"):
        idist.barrier()
    return found


def test_a_bad_path_of_rank_0_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for messages in on_ranks(_bad_path, tmp_path):
        assert messages == [
            f"record_timeline: there is no folder {tmp_path / 'no'}.",
            f"record_timeline: {tmp_path} cannot be written.",
        ]
    assert names_of(tmp_path / "good.json", 1) == ["barrier"]


def _lost_folder(_: int, folder: Path) -> str:
    try:
        with idist.record_timeline(folder / "gone" / "trace.json"):
            idist.barrier()
            if idist.get_rank() == 0:
                (folder / "gone").rmdir()
    except OSError as error:
        return f"{error} {idist.all_reduce(1)}"
    return ""


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    for message in on_ranks(_lost_folder, tmp_path):
        assert message.startswith("Rank 0 could not write the timeline: ") and message.endswith(" 2")


def _failing(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        idist.all_reduce(1)
        if idist.get_rank() == 1:
            raise LookupError("no data")
        idist.barrier()


def _failing_without_a_block(_: int, path: Path) -> None:
    idist.record_timeline(path)
    idist.all_reduce(1)
    if idist.get_rank() == 1:
        try:
            raise LookupError("no data")
        finally:
            idist.finalize()
    idist.barrier()


@pytest.mark.parametrize("function", [_failing, _failing_without_a_block])
def test_a_rank_that_fails_saves_its_own_calls(function: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError, match="no data"):
        on_ranks(function, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    assert names_of(tmp_path / "trace.rank1.json", 1) == ["all_reduce"]
    notes = json.loads((tmp_path / "trace.rank1.json").read_text())["otherData"]
    assert notes == {"incomplete": "only rank 1, after a failure"}


def _unfinished(_: int, path: Path) -> None:
    model = current_model()
    with idist.record_timeline(path):
        try:
            with faults.disconnect(rank=1, at="barrier"):
                idist.barrier()
        except RuntimeError:
            (call,) = recorder_of(model).timelines[model.get_rank()].calls  # type: ignore[union-attr]
            assert call.end == 0
            raise


def test_a_call_that_raised_is_marked(tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError):
        on_ranks(_unfinished, tmp_path / "trace.json")
    (call,) = calls_of(tmp_path / "trace.rank1.json", 1)
    assert call["args"]["outcome"] == "not completed"


def _ended_in_the_block(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        idist.all_reduce(torch.ones(2), async_op=True)
        idist.finalize()
        idist.barrier()


def _ended_without_a_block(_: int, path: Path) -> None:
    idist.record_timeline(path)
    idist.all_reduce(torch.ones(2), async_op=True)


@pytest.mark.parametrize("function", [_ended_in_the_block, _ended_without_a_block])
def test_the_end_of_the_context_saves_the_file(function: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(function, tmp_path / "trace.json")
    for rank in (0, 1):
        assert names_of(tmp_path / "trace.json", rank) == ["wait() of all_reduce"]
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]


def _exits(_: int, path: Path) -> None:
    with idist.record_timeline(path):
        idist.barrier()
        sys.exit()


def test_sys_exit_saves_the_file(tmp_path: Path) -> None:
    on_ranks(_exits, tmp_path / "trace.json")
    assert names_of(tmp_path / "trace.json", 1) == ["barrier"]


def _begun_in_the_block(_: int, path: Path) -> str:
    idist.finalize()
    try:
        with idist.record_timeline(path):
            idist.initialize("gloo")
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_context_that_begins_in_the_block_is_an_error(tmp_path: Path) -> None:
    for message in on_ranks(_begun_in_the_block, tmp_path / "trace.json", world_size=1):
        assert "The context of the timeline is not live any more" in message
