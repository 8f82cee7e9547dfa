"""Numbers and ports as ``argparse``, the environment and numpy have them, where processes are started."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ignite_dist as idist
from helpers import free_port, plain_environ, run_python, write_script
from ignite_dist.environments.devices import num_cores


def _where(_: int) -> tuple[int, int, str]:
    import os

    return idist.get_rank(), idist.get_world_size(), os.environ["MASTER_PORT"]


def test_a_port_may_be_a_text_and_numbers_may_be_numpys() -> None:
    for as_text in (True, False):
        port = free_port()
        given = {"master_port": str(port) if as_text else np.int32(port), "nnodes": np.int64(1)}
        found = idist.spawn("gloo", _where, nproc_per_node=np.int64(2), node_rank=np.uint8(0), **given)  # type: ignore[arg-type]
        assert found == [(0, 2, str(port)), (1, 2, str(port))]


def test_parallel_takes_them_too() -> None:
    port = free_port()
    given: dict[str, Any] = {"nnodes": np.int64(1), "node_rank": np.int64(0), "master_port": str(port)}
    with idist.Parallel("gloo", nproc_per_node=np.int64(1), **given) as parallel:  # type: ignore[arg-type]
        assert parallel.run(_where) == (0, 1, str(port))
    # Looked at when it is made, and started on another day.
    idist.Parallel("gloo", 2, 3, np.int64(1), "10.0.0.1", "3344")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("master_port", value)
            for value in ("", "x", "-1", "65536", "99999", " 1", "1.0", "\u0663", 1.0, True)
        ),
        *(("node_rank", value) for value in (0.0, "0", True, np.bool_(True), np.float64(0))),
        *(("nproc_per_node", value) for value in (1.0, "1", True, np.float32(1), np.bool_(True))),
        *(("nnodes", value) for value in (1.0, "1", True, np.float32(1))),
    ],
)
def test_what_is_none_is_refused_before_anything_is_started(name: str, value: Any) -> None:
    given = {"nproc_per_node": 1, name: value}
    with pytest.raises(ValueError, match=name):
        idist.spawn("gloo", _where, **given)
    with pytest.raises(ValueError, match=name):
        idist.Parallel("gloo", **given)


def test_arguments_in_the_wrong_order_or_without_their_comma() -> None:
    with pytest.raises(TypeError, match=r"spawn takes the backend first: spawn\('gloo', _where, ...\)"):
        idist.spawn(_where, "gloo")  # type: ignore[arg-type]
    config = {"lr": 0.1}
    for value in (config, "text", 3):
        with pytest.raises(TypeError, match=r"args must be a tuple, got .*args=\(value,\)"):
            idist.spawn("gloo", _where, args=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "meant"), [("nprocs", "nproc_per_node"), ("kwargs", "kwargs_dict")])
def test_names_of_other_launchers(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        idist.spawn("gloo", _where, **{name: 2})  # type: ignore[call-overload]


@pytest.mark.parametrize("number", ["many", "2", ""])
def test_a_number_of_processes_in_words(number: str) -> None:
    text = f"nproc_per_node must be a positive int or 'auto', got '{number}'"
    with pytest.raises(ValueError, match=text):
        idist.spawn("gloo", _where, nproc_per_node=number)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=text):
        idist.Parallel("gloo", nproc_per_node=number)  # type: ignore[arg-type]


def _returns_a_model(local_rank: int) -> Any:
    return idist.auto_model(torch.nn.Linear(2, 1))


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(idist.WorkerRaisedError) as info:
        idist.spawn("gloo", _returns_a_model, nproc_per_node=2)
    message = str(info.value)
    assert "The result of the function cannot be sent to the launcher" in message
    assert "Return idist.model_state(model)." in message and "cloudpickle.py" not in message


def test_objects_of_another_kind() -> None:
    net = torch.nn.Linear(2, 1)
    for call, text in (
        (lambda: idist.auto_model(torch.nn.Linear), "auto_model takes a model, .* got the class Linear"),
        (lambda: idist.auto_optim(net), "auto_optim takes a torch optimizer, got a Linear"),
        (lambda: idist.auto_optim(net.parameters()), "auto_optim takes a torch optimizer, got a generator"),
        (lambda: idist.clip_grad_norm(net.parameters(), 1.0), "clip_grad_norm takes a model, .* a generator"),
        (lambda: idist.auto_dataloader(None), "takes a data set .* got a NoneType"),
    ):
        with pytest.raises(TypeError, match=text):
            call()  # type: ignore[no-untyped-call]


def _wraps_twice(local_rank: int) -> None:
    wrapped = idist.auto_model(torch.nn.Linear(2, 1))
    for model in (wrapped, torch.nn.Sequential(wrapped), torch.compile(wrapped)):
        with pytest.raises(ValueError, match="wrapped already"):
            idist.auto_model(model)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_model_that_is_wrapped_already() -> None:
    idist.spawn("gloo", _wraps_twice, nproc_per_node=2)


def test_a_function_that_does_not_take_what_workers_pass() -> None:
    def takes_nothing() -> None: ...

    def takes_two(local_rank: int, config: Any) -> None: ...

    for function, args, kwargs in (
        (takes_nothing, (), {}),
        (takes_two, (), {}),
        (takes_two, (1, 2), {}),
        (takes_two, (), {"cfg": 1}),
    ):
        message = f"{function.__name__}.* cannot be called with the local rank, .* {len(args)} args"
        with pytest.raises(TypeError, match=message):
            idist.spawn("gloo", function, args, kwargs, nproc_per_node=1)  # type: ignore[arg-type]

    @functools.wraps(takes_two)
    def takes_one(*args: Any) -> int:
        return len(args)

    assert idist.spawn("gloo", takes_one, nproc_per_node=1) == [1], "the wrapper is what is called"
    with pytest.raises(TypeError, match=r"got NoneType\. Pass the function itself"):
        idist.spawn("gloo", takes_two(0, 1))  # type: ignore[arg-type, func-returns-value]


@pytest.mark.parametrize(("backend", "hint"), [("cuda", "'nccl'"), ("gpu", "'nccl'"), ("cpu", "'gloo'")])
def test_the_name_of_a_device_is_no_backend(backend: str, hint: str) -> None:
    for start in (idist.Parallel, idist.initialize, lambda name: idist.spawn(name, _where)):
        with pytest.raises(ValueError, match=f"Unknown backend '{backend}'.*use {hint}"):
            start(backend)


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker per core where there is no GPU; fewer where each has several threads."""
    num_workers = torch.cuda.device_count() or num_cores()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = idist.spawn("auto", _world, nproc_per_node="auto")
    assert found == [("nccl" if torch.cuda.is_available() else "gloo", num_workers)] * num_workers
    if not torch.cuda.is_available():
        monkeypatch.setenv("OMP_NUM_THREADS", str(num_cores()))
        with idist.Parallel("auto", "auto") as parallel:
            assert parallel.run(_world) == ("gloo", 1)


def _world(local_rank: int) -> tuple[str | None, int]:
    return idist.backend(), idist.get_world_size()


SCRIPT = """
    import sys
    import ignite_dist as idist

    def work(local_rank):
        return idist.all_gather(idist.get_rank())

    if __name__ == "__main__":
        number = sys.argv[1] if sys.argv[1] == "auto" else int(sys.argv[1])
        with idist.Parallel("auto", nproc_per_node=number) as parallel:
            ranks = parallel.run(work)
        sys.stdout.write(f"ranks {ranks}\\n")
"""


@pytest.mark.parametrize("number", ["auto", pytest.param("2", marks=pytest.mark.long)])
def test_as_many_processes_as_a_launcher_has_started_are_joined(number: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = run_python(*run, script, number)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("ranks [0, 1]\n") == 2
    if number == "2":
        assert run_python(script, number).stdout == "ranks [0, 1]\n"


def test_another_number_than_that_of_the_launcher_is_refused(tmp_path: Path) -> None:
    """Each process would start a job of its own, and all would write the same checkpoint."""
    environ = plain_environ(
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    ended = run_python(write_script(tmp_path, SCRIPT), "3", env=environ)
    assert ended.returncode != 0
    last = ended.stdout.splitlines()[-1]
    assert "has started 2 processes on this machine" in last and "Pass nproc_per_node=2" in last


def test_spawn_in_the_processes_of_a_launcher_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"torchrun has started 2 processes .* use idist\.Parallel"):
        assert idist.spawn("gloo", _world, nproc_per_node=1) == [("gloo", 1)]


def test_ranks_of_initialize(tmp_path: Any) -> None:
    for rank, world_size in ((0.0, 1), ("0", 1), (False, True), (0, np.float64(1))):
        with pytest.raises(ValueError, match="must be an int"):
            idist.initialize("gloo", init_method=f"file://{tmp_path}/a", rank=rank, world_size=world_size)
    idist.initialize("gloo", init_method=f"file://{tmp_path}/b", rank=np.int64(0), world_size=np.int64(1))
    assert (idist.get_rank(), idist.get_world_size()) == (0, 1)
    idist.finalize()
