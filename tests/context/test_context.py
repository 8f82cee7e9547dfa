from __future__ import annotations

import importlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist
from contexts import SHORT, by_test_rank, facts, messages_of, my_rank, topology
from ignite_dist.comp_models.native import gloo
from ignite_dist.context import live
from warm_client import WHOLE_EXIT

CPU = torch.device("cpu")
BRIEF = timedelta(seconds=2)
SERIAL = {"model": "serial", "backend": None, "rank": 0, "world size": 1, "local rank": 0, "device": CPU}


def native(rank: int, world_size: int, backend: str = "gloo") -> dict[str, Any]:
    return {
        "model": "native-dist",
        "backend": backend,
        "rank": rank,
        "world size": world_size,
        "local rank": rank,
        "device": CPU,
    }


# --- contexts that others have made ------------------------------------------------------------------


def _made_destroyed_and_made_again(backend: str | None, folder: str) -> list[Any]:
    seen: list[Any] = [facts()]
    for name in ("first", "second"):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, init_method=f"file://{folder}/{name}", rank=rank, world_size=world_size
        )
        seen += [facts(), idist.all_reduce(rank + 1), idist.all_gather(name), topology()]
        idist.barrier()
        dist.destroy_process_group()
        seen.append(facts())
    return seen


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_a_context_made_by_others_is_picked_up_without_a_call(backend: str | None, tmp_path: Path) -> None:
    ended = helpers.run_ranks(_made_destroyed_and_made_again, backend, str(tmp_path))
    for rank, seen in enumerate(ended):
        assert seen == [
            SERIAL,
            *(native(rank, 2), 3, ["first"] * 2, (rank, 2, 1, 0), SERIAL),
            *(native(rank, 2), 3, ["second"] * 2, (rank, 2, 1, 0), SERIAL),
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")
def test_a_backend_per_device() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert (idist.model_name(), idist.backend(), idist.device().type) == ("native-dist", "nccl", "cuda")
    assert idist.all_reduce(torch.ones(2)).device == CPU
    assert idist.all_reduce(torch.ones(2, device="cuda")).device.type == "cuda"
    idist.finalize()


def test_a_context_of_one_in_this_process_too() -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert facts() == native(0, 1) | {"local rank": idist.get_local_rank()}
        assert idist.all_gather({"x": 1}) == [{"x": 1}]
        dist.destroy_process_group()
        assert facts() == SERIAL


def test_the_context_of_another_is_ended_by_finalize_and_is_not_initialised_twice() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="exists already"):
        idist.initialize("gloo")
    idist.finalize()
    assert not dist.is_initialized()
    assert facts() == SERIAL
    idist.finalize()  # without a context it does nothing


# --- environment variables alone ---------------------------------------------------------------------


def _variables_alone() -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = facts()
        assert not caught, "asking for a rank is no collective"
        assert idist.all_reduce(2) == 2
        assert idist.all_gather("x") == ["x"]
        importlib.import_module("tabnanny")  # after an import a context is looked for again
        idist.barrier()
        assert idist.one_rank_only()(lambda: "here")() == "here"
        with idist.one_rank_first():
            pass
    return before, messages_of(caught)


def test_environment_variables_alone_are_no_context_and_that_is_said_once() -> None:
    for found, messages in helpers.run_ranks(_variables_alone):
        assert found == SERIAL
        (message,) = messages
        assert "one of 2 processes (TORCHELASTIC_RUN_ID is set" in message
        assert "idist.initialize" in message


def _control_flow_alone() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert idist.one_rank_only()(lambda: "here")() == "here"
    return [f"{Path(one.filename).name}: {one.message}" for one in caught]


def test_running_something_on_one_rank_warns_too_and_points_at_the_callers_line() -> None:
    for messages in helpers.run_ranks(_control_flow_alone):
        (message,) = messages
        assert message.startswith("test_context.py: This is one of 2 processes")


# --- initialize and finalize, again and again --------------------------------------------------------


class Held:
    """What a process holds: its environment, random states, hook, threads and open files."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.torch_state = torch.get_rng_state()
        self.python_state = random.getstate()
        self.hook = sys.excepthook

    @staticmethod
    def counts() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_threads(), process.num_fds()

    def check(self) -> None:
        assert dict(os.environ) == self.environ
        assert torch.equal(torch.get_rng_state(), self.torch_state)
        assert random.getstate() == self.python_state
        assert sys.excepthook is self.hook


def settled_counts(expected: tuple[int, int], seconds: float = 5) -> tuple[int, int]:
    """The counts once they are at most ``expected``: a thread that has been told to end takes a moment."""
    deadline = time.monotonic() + seconds
    while any(now > then for now, then in zip(Held.counts(), expected, strict=True)):
        if time.monotonic() > deadline:
            break
        threading.Event().wait(0.02)
    return Held.counts()


def _cycle(**kwargs: Any) -> None:
    idist.initialize("gloo", timeout=SHORT, **kwargs)
    rank, world_size = idist.get_rank(), idist.get_world_size()
    assert idist.all_reduce(torch.tensor([rank + 1])).tolist() == [world_size * (world_size + 1) // 2]
    assert idist.all_gather(("object", rank)) == [("object", other) for other in range(world_size)]
    assert idist.all_reduce(1, group=[rank]) == 1  # a group of a list, to be ended with the rest
    idist.finalize()
    assert facts() == SERIAL


def _twenty_cycles(init_method: str | None, with_ranks: bool) -> int:
    kwargs: dict[str, Any] = {} if init_method is None else {"init_method": init_method}
    if with_ranks:
        kwargs.update(rank=my_rank(), world_size=2)
    held = Held()
    _cycle(**kwargs)  # the first one starts what torch keeps for the process's life
    held.check()
    counts = Held.counts()
    for _ in range(19):
        _cycle(**kwargs)
        held.check()
    after = settled_counts(counts)
    assert after[0] <= counts[0] and after[1] <= counts[1], (
        f"threads and files: {counts} after one cycle, {after} after twenty"
    )
    return 20


@pytest.mark.long
@pytest.mark.parametrize("agent_store", [True, False], ids=["agents-store", "served-by-rank-0"])
def test_twenty_times_in_a_row_under_torchrun_on_one_port(agent_store: bool) -> None:
    environs = None if agent_store else helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    assert helpers.run_ranks(_twenty_cycles, None, False, environs=environs, seconds=250) == [20, 20]


@pytest.mark.long
def test_twenty_times_in_a_row_over_one_file(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/rendezvous"
    assert helpers.run_ranks(_twenty_cycles, method, True, environs=by_test_rank(), seconds=250) == [20, 20]


@pytest.mark.long
def test_twenty_times_in_a_row_over_one_tcp_address() -> None:
    method = f"tcp://127.0.0.1:{helpers.free_port()}"
    assert helpers.run_ranks(_twenty_cycles, method, True, environs=by_test_rank(), seconds=250) == [20, 20]


def _twenty_cycles_in_a_worker(_: int) -> int:
    idist.finalize()
    return _twenty_cycles(None, False)


@pytest.mark.long
def test_twenty_times_in_a_row_in_a_spawned_worker() -> None:
    assert idist.spawn("gloo", _twenty_cycles_in_a_worker, nproc_per_node=2, timeout=SHORT) == [20, 20]


@pytest.mark.long
def test_twenty_times_in_a_row_alone() -> None:
    assert _twenty_cycles(None, False) == 20


def _rank_zero_was_alone_before() -> int:
    if os.environ["RANK"] == "0":
        launcher = {
            name: os.environ.pop(name) for name in list(os.environ) if helpers.is_launcher_variable(name)
        }
        idist.initialize("gloo")
        assert idist.get_world_size() == 1
        idist.finalize()
        os.environ.update(launcher)
    _cycle()
    return 1


def test_ranks_with_different_histories_find_each_other() -> None:
    assert helpers.run_ranks(_rank_zero_was_alone_before, seconds=150) == [1, 1]


# --- what finalize takes back ------------------------------------------------------------------------


def test_alone_the_variables_that_scripts_read_are_there_and_go_again() -> None:
    held = Held()
    idist.initialize("gloo")
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    assert facts() == native(0, 1)
    assert topology() == (0, 1, 1, 0)
    idist.finalize()
    held.check()


def test_what_the_script_has_set_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTHER", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)  # as it was afterwards, whatever happens in between
    idist.initialize("gloo")
    os.environ.update(OTHER="x", MASTER_ADDR="somewhere", RANK="7")
    idist.finalize()
    assert [os.environ.get(name) for name in ("OTHER", "MASTER_ADDR", "RANK")] == ["x", "somewhere", "7"]
    assert "WORLD_SIZE" not in os.environ
    assert "LOCAL_RANK" not in os.environ


def test_a_variable_that_was_there_and_empty_is_empty_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    held = Held()
    idist.initialize("gloo")
    idist.finalize()
    held.check()


def test_sync_in_between_changes_nothing() -> None:
    held = Held()
    idist.initialize("gloo")
    idist.sync()
    idist.sync(temporary=True)
    assert facts() == native(0, 1)
    idist.finalize()
    held.check()


def test_a_script_that_destroys_the_group_itself_gets_its_environment_back_from_finalize() -> None:
    held = Held()
    idist.initialize("gloo")
    dist.destroy_process_group()
    assert facts() == SERIAL
    idist.finalize()
    held.check()


def _groups_survive_sync() -> list[int]:
    idist.initialize("gloo", timeout=SHORT)
    rank = idist.get_rank()
    results = []
    for _ in range(3):
        results.append(idist.all_reduce(rank + 1, group=[rank]))
        idist.sync()
    idist.finalize()
    return results


def test_groups_of_a_list_are_found_again_after_sync() -> None:
    assert helpers.run_ranks(_groups_survive_sync) == [[1, 1, 1], [2, 2, 2]]


def _dies_before_the_end() -> list[str]:
    idist.initialize("gloo", timeout=SHORT)
    idist.barrier()
    if idist.get_rank() == 1:
        os._exit(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.finalize()
    assert facts() == SERIAL
    return messages_of(caught)


def test_a_rank_that_does_not_come_to_finalize_is_a_warning() -> None:
    survivor, dead = helpers.end_of_ranks(_dies_before_the_end, seconds=150)
    assert dead.error
    assert not survivor.error, survivor.error
    (message,) = survivor.result
    assert "finalize" in message


def _raises_before_the_end() -> str:
    idist.initialize("gloo", timeout=timedelta(minutes=5))
    idist.barrier()
    if idist.get_rank() == 0:
        try:
            raise LookupError("rank 0 has no data")
        finally:
            idist.finalize()
    try:
        idist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_finalize_while_an_exception_is_handled_waits_for_nobody_and_nobody_waits() -> None:
    failed, waiting = helpers.end_of_ranks(_raises_before_the_end, seconds=150)
    assert "LookupError: rank 0 has no data" in failed.error
    assert not waiting.error, waiting.error
    assert waiting.result.endswith("Error")
    assert waiting.seconds - failed.seconds < 20


# --- other ways to meet ------------------------------------------------------------------------------


def _initialized_by_arguments(init_method: str) -> tuple[Any, int]:
    held = Held()
    idist.initialize("gloo", init_method=init_method, rank=my_rank(), world_size=2, timeout=SHORT)
    idist.set_local_rank(my_rank())
    found = facts(), idist.all_reduce(my_rank() + 1)
    idist.finalize()
    held.check()
    return found


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_from_the_arguments(scheme: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet" if scheme == "file" else f"tcp://127.0.0.1:{helpers.free_port()}"
    ended = helpers.run_ranks(_initialized_by_arguments, method, environs=by_test_rank())
    assert ended == [(native(0, 2), 3), (native(1, 2), 3)]


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "texts"),
    [
        ("ncl", ["Unknown backend 'ncl'", "'gloo'"]),
        ("glo", ["Unknown backend 'glo'", "Did you mean 'gloo'?"]),
        ("", ["Unknown backend ''", "'gloo'"]),
        (None, ["Unknown backend None", "'gloo'"]),
        ("gloo,ncl", ["Unknown backend 'gloo,ncl'", "'gloo'"]),
        ("serial", ["Unknown backend 'serial'", "'gloo'"]),
    ],
)
def test_an_unknown_backend(backend: Any, texts: list[str]) -> None:
    for start in (idist.initialize, lambda backend: idist.spawn(backend, print)):
        with pytest.raises(ValueError, match="Unknown backend") as info:
            start(backend)
        for text in texts:
            assert text in str(info.value)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_without_a_gpu(backend: str) -> None:
    held = Held()
    with pytest.raises((RuntimeError, ValueError), match="nccl") as info:
        idist.initialize(backend)
    assert "'gloo'" in str(info.value)
    held.check()


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"timeuot": SHORT}, TypeError, ["timeuot", "Did you mean 'timeout'?"]),
        ({"store": None}, TypeError, ["store", "Allowed:"]),
        ({"timeout": 30}, TypeError, ["timedelta", "30"]),
        ({"rank": 0}, ValueError, ["rank=0", "world_size"]),
        ({"world_size": 2}, ValueError, ["world_size=2", "rank"]),
        ({"rank": 0, "world_size": 1}, ValueError, ["init_method"]),
        ({"init_method": "file:///nowhere/x"}, ValueError, ["file:///nowhere/x", "rank="]),
        (
            {"rank": 2, "world_size": 2, "init_method": "tcp://127.0.0.1:1", "timeout": BRIEF},
            ValueError,
            ["rank=2"],
        ),
        ({"rank": -1, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}, ValueError, ["rank=-1"]),
    ],
    ids=str,
)
def test_wrong_arguments_of_initialize(
    kwargs: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    held = Held()
    with pytest.raises(error) as info:
        idist.initialize("gloo", **kwargs)
    for text in texts:
        assert text in str(info.value)
    held.check()
    assert facts() == SERIAL


@pytest.mark.parametrize(
    "environ", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}], ids=str
)
def test_half_set_and_impossible_variables(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    held = Held()
    with pytest.raises(idist.EnvironmentVariablesError):
        idist.initialize("gloo")
    held.check()
    assert facts() == SERIAL


def test_arguments_that_contradict_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="contradict") as info:
        idist.initialize("gloo", init_method=f"file://{tmp_path}/x", rank=1, world_size=3)
    for text in ("rank=1", "world_size=3", "world size 2"):
        assert text in str(info.value)


@pytest.mark.parametrize("by_arguments", [False, True], ids=["environment", "tcp"])
def test_a_port_in_use_is_named_at_once(by_arguments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        kwargs: dict[str, Any] = {"timeout": SHORT}
        if by_arguments:
            kwargs |= {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "world_size": 2}
        else:
            for name, value in helpers.torchrun_environs(2, int(port), agent_store=False)[0].items():
                monkeypatch.setenv(name, value)
        held = Held()
        with pytest.raises(idist.LaunchError, match="in use") as info:
            idist.initialize("gloo", **kwargs)
        assert port in str(info.value)
        assert "15000" not in str(info.value)  # a default that has nothing to do with it
        held.check()


def test_a_second_initialize_says_that_there_is_one_already() -> None:
    idist.initialize("gloo")
    with pytest.raises(RuntimeError, match="exists already"):
        idist.initialize("gloo")
    assert facts() == native(0, 1)
    idist.finalize()


# --- small ones --------------------------------------------------------------------------------------


def test_what_this_installation_has() -> None:
    assert isinstance(idist.available_backends(), tuple)
    assert "gloo" in idist.available_backends()
    assert ("nccl" in idist.available_backends()) == dist.is_nccl_available()
    assert idist.has_native_dist_support is True
    assert idist.hostname() == socket.gethostname()


def test_serial_has_a_topology_of_one() -> None:
    assert facts() == SERIAL
    assert topology() == (0, 1, 1, 0)
    assert live.current_model().node_ranks() == {0: 0}
    idist.sync()
    idist.sync(temporary=True)
    assert facts() == SERIAL


# --- contexts that nobody ends -------------------------------------------------------------------------


LAST_STATEMENT = """
    import sys
    import torch
    import torch.distributed as dist
    import ignite_dist as idist
    from ignite_dist.comp_models.native import gloo

    gloo._EXIT_SECONDS = 60  # a busy machine may give its thread no time for a while
    sys.setswitchinterval(1000)  # a thread gets the interpreter only when it is given up
    dist.init_process_group("gloo")
    for _ in range(3):
        {last}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "last",
    [
        "idist.all_gather({'rank': idist.get_rank()})",
        "idist.all_reduce(1)",
        "idist.all_reduce(torch.ones(2))",
        "idist.all_reduce(torch.ones(1000))",
        "idist.broadcast(torch.ones(1000))",
        "idist.all_reduce(torch.ones(1_000_000))",
        "idist.all_gather(torch.ones(1_000_000))",
    ],
)
def test_a_collective_may_be_the_last_statement_of_a_script(tmp_path: Path, last: str) -> None:
    # gloo's thread still holds the tensors; without the interpreter it could only abort the process.
    script = helpers.write_script(tmp_path, LAST_STATEMENT.format(last=last))
    ranks = [
        subprocess.Popen(
            [helpers.python_that_forks(), script], env=helpers.plain_environ(**environ, **WHOLE_EXIT)
        )
        for environ in helpers.torchrun_environs(3, helpers.free_port(), agent_store=False)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _ends_while_gloo_has_a_tensor(seconds: float) -> tuple[list[str], bool]:
    idist.initialize("gloo")
    gloo._EXIT_SECONDS = seconds
    world, events, lent = weakref.ref(dist.group.WORLD), list[str](), [gloo.lend(torch.ones(1))]
    has_lent, destroy = gloo._has_lent_tensors, dist.destroy_process_group

    def look() -> bool:
        if lent and seconds:
            events.append("released")
            lent.clear()
            return True
        return has_lent()

    def record() -> None:
        events.append("destroyed")
        destroy()

    gloo._has_lent_tensors, dist.destroy_process_group = look, record
    idist.finalize()
    return events, world() is not None


@pytest.mark.parametrize("is_released", [True, False])
def test_a_context_ends_after_gloo_has_released_its_tensors(is_released: bool) -> None:
    """torch joins gloo's threads with the GIL, for which a thread with a tensor waits: neither would end."""
    ended = helpers.run_ranks(_ends_while_gloo_has_a_tensor, 30.0 if is_released else 0.0)
    # The groups of a thread that takes too long are kept instead.
    assert ended == [(["released", "destroyed"] if is_released else ["destroyed"], not is_released)] * 2
