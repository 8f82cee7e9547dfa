"""XLA's failures and misuse: what is raised, and what is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.xla import replicas
from xla_jobs import run_script, spawn, who

pytestmark = pytest.mark.xla
FAILURE_SECONDS = 8  # and PJRT would take 10 to end the process


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")


def failure_of(function: Any, *args: Any, **kwargs: Any) -> idist.RankFailedError:
    """The failure of a launch."""
    with pytest.raises(idist.RankFailedError) as info:
        spawn(function, *args, **kwargs)
    return info.value


def seconds_of(function: Any, *args: Any, **kwargs: Any) -> tuple[idist.RankFailedError, float]:
    """The failure of a launch, which says when it began, and how many seconds it has taken from then on."""
    error = failure_of(function, *args, **kwargs)
    started = re.search(r"started at (\d+\.\d+)", str(error))
    assert started is not None, error
    return error, time.time() - float(started[1])


# --- failures ----------------------------------------------------------------------------------------


def _fails(local_rank: int, others: str) -> None:
    if idist.get_rank() == 1:
        raise ValueError(f"on purpose, started at {time.time():f}")
    if others == "wait":
        idist.barrier()
    elif others == "reduce":
        idist.all_reduce(torch.ones(3, device=idist.device()))
    elif others == "compute":
        time.sleep(100)


@pytest.mark.parametrize("others", ["wait", "reduce", "compute", "return"])
def test_the_failure_of_one_replica_ends_the_job(others: str) -> None:
    error, seconds = seconds_of(_fails, others)
    assert (error.rank, error.error_type) == (1, "ValueError")
    assert "on purpose" in str(error) and "in _fails" in error.traceback
    assert "threading.py" not in error.traceback and "xla_replicas" not in error.traceback
    assert seconds < FAILURE_SECONDS


def _dies(local_rank: int, how: str) -> None:
    if idist.get_rank() == 1:
        if how.startswith("exit"):
            sys.exit(int(how[-1]))
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()


def test_a_replica_that_exits_or_is_killed() -> None:
    error = failure_of(_dies, "exit 3")
    assert error.rank == 1 and error.exit_code == 3
    error = failure_of(_dies, "exit 0")  # nothing wrong with that, but the others cannot go on
    assert (error.rank, error.exit_code) == (1, 0) and "while others still needed it" in str(error)
    assert "Rank 1 raised SystemExit" in str(error)  # as rank 0 says
    error = failure_of(_dies, "kill")  # and with it the other one, whose process it is
    assert error.signal_name == "SIGKILL" and str(error).startswith("Rank 0 or 1 (pid ")


LAUNCH_OF_ONE_THAT_FAILS = """
    import torch_xla
    import ignite_dist as idist

    def work(index):
        if idist.get_rank() == 1:
            raise ValueError("on purpose")
        idist.all_reduce(1)

    if __name__ == "__main__":
        torch_xla.launch(work)
"""


def test_a_failure_under_the_users_own_launch(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, LAUNCH_OF_ONE_THAT_FAILS))
    assert ended.returncode != 0
    assert "DistributedError: Another replica of this process has returned or failed" in ended.stdout


def _result(local_rank: int) -> Any:
    tensor = torch.full((2,), float(idist.get_rank()), device=idist.device())
    return {"loss": tensor, "rest": [tensor.cpu(), (tensor.double(), "text")]}


def test_results_on_the_device_come_home_on_the_cpu() -> None:
    for rank, result in enumerate(spawn(_result)):
        for tensor in (result["loss"], result["rest"][0], result["rest"][1][0]):
            assert tensor.device.type == "cpu" and tensor.tolist() == [rank, rank]


def _aborts(local_rank: int) -> Any:
    if idist.get_rank() == 1:
        try:
            raise KeyError("lost")
        except KeyError:
            idist.finalize()  # at once, and without the others
            return idist.model_name()
    with pytest.raises(idist.RankFailedError) as info:
        idist.all_reduce(1)
    with pytest.raises(idist.RankFailedError):  # it will not come any more
        idist.barrier()
    with pytest.warns(UserWarning, match="Not every rank"):
        idist.finalize()
    return info.value.rank, info.value.error_type


def test_the_others_hear_of_a_replica_that_gave_up() -> None:
    assert spawn(_aborts) == [(1, "KeyError"), "serial"]


def _different_calls(local_rank: int) -> list[str]:
    rank, device = idist.get_rank(), idist.device()
    messages = []
    for call in (
        lambda: idist.all_reduce(torch.ones(2 + rank, device=device)),
        lambda: idist.all_reduce(torch.ones(2, device=device), "SUM" if rank else "MIN"),
        lambda: idist.all_gather(torch.ones(2, device=device)) if rank else idist.barrier(),
        lambda: idist.broadcast(torch.ones(2, device=device), src=rank),
    ):
        with pytest.raises(idist.CollectiveMismatchError) as info:
            call()
        messages.append(str(info.value))
        assert idist.all_reduce(1) == 2, "nothing is lost"
    with pytest.raises(idist.MissingRanksError) as info:
        idist.finalize() if rank else idist.all_gather("text")
    return [*messages, str(info.value)]


def test_different_calls_raise_on_every_replica() -> None:
    """Where PJRT would wait, and end the process after ten seconds."""
    first, second = spawn(_different_calls)
    assert first == second
    assert "rank 0: all_reduce SUM of torch.float32 of shape (2,); rank 1: all_reduce SUM" in first[0]
    assert "rank 0: barrier of ranks [0, 1]; rank 1: all_gather of torch.float32 of shape (2,)" in first[2]
    assert (
        "Rank 1 reached the end of its context" in first[4]
        and "rank 0: " in first[4]
        and "an object or a number" in first[4]
    )


def _uses_anothers_device(local_rank: int) -> str:
    tensor = torch.ones(2, device=f"xla:{1 - idist.get_rank()}")
    with pytest.raises(ValueError) as info:
        idist.all_reduce(tensor)
    return str(info.value)


def test_a_tensor_on_another_replicas_device() -> None:
    assert spawn(_uses_anothers_device) == [
        "The tensor is on xla:1, and this replica's device is xla:0: see idist.device().",
        "The tensor is on xla:0, and this replica's device is xla:1: see idist.device().",
    ]


def _comes_late(local_rank: int) -> list[str]:
    replicas._PATIENCE_SECONDS = replicas._LOOK_SECONDS = 0.2
    said: list[str] = []
    handler = _Keeper(said)
    replicas._logger.addHandler(handler)
    if idist.get_rank() == 1:
        while not said:  # until the other has lost its patience
            time.sleep(0.01)
    assert idist.all_reduce(1) == 2
    return said


class _Keeper(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_replica_that_waits_says_so() -> None:
    _, said = spawn(_comes_late)
    assert len(said) == 1
    assert said[0].startswith("Rank 0 has waited 0 s in all_gather of an object or a number. Only ranks [0]")


def _draws(local_rank: int) -> list[list[int]]:
    shares = []
    for epoch in range(200):
        sampler = idist.auto.DistributedProxySampler(
            torch.utils.data.RandomSampler(range(12)), idist.get_world_size(), idist.get_rank()
        )
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    return shares


def test_shares_do_not_overlap_though_replicas_share_a_random_state() -> None:
    for first, second in zip(*spawn(_draws), strict=True):
        assert sorted(first + second) == list(range(12))


# --- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nproc_per_node", "environ", "message"),
    [
        (
            4,
            {},
            "has 2 XLA device(s) (PJRT_DEVICE=CPU), and PJRT runs one replica, or one replica per device.",
        ),
        (2, {"CPU_NUM_DEVICES": "two"}, "CPU_NUM_DEVICES must be a positive number of devices, got 'two'"),
        (2, {"PJRT_DEVICE": "cpu"}, "PJRT_DEVICE is 'cpu', not one of 'CPU', "),
        (2, {"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE is 'TPU', but torch_xla finds no TPU on this host"),
        (0, {}, "nproc_per_node must be a positive int"),
    ],
)
def test_replicas_that_cannot_be_had(
    nproc_per_node: int, environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    starts = [
        lambda: spawn(who, nproc_per_node=nproc_per_node),
        lambda: idist.Parallel("xla-tpu", nproc_per_node=nproc_per_node),
    ]
    if environ:
        starts.append(lambda: idist.initialize("xla-tpu"))
    for start in starts:
        with pytest.raises(ValueError, match=re.escape(message)):
            start()


def _optimizer_too_early(local_rank: int) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    idist.auto_model(model)
    with pytest.raises(ValueError) as info:
        idist.auto_optim(optimizer)
    return str(info.value)


def test_an_optimizer_of_parameters_that_have_been_left_behind() -> None:
    (message,) = spawn(_optimizer_too_early, nproc_per_node=1)
    assert "from the parameters of the model that auto_model has returned" in message


def _views(local_rank: int) -> None:
    idist.get_rank()  # from now on views as another dtype are part of a graph
    for given, dtype in (
        (torch.tensor([True, False]), torch.int8),
        (torch.tensor([1, 256], dtype=torch.int16), torch.bool),
        (torch.tensor([1, 0], dtype=torch.uint8), torch.bool),
        (torch.tensor([1.5, -2.0]), torch.bfloat16),
        (torch.tensor([[1, 2], [3, 4]]), torch.float16),
        (torch.tensor(1.5), torch.int32),
        (torch.empty(0, 4), torch.uint8),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.float8_e5m2),
    ):
        seen, wanted = given.to(idist.device()).view(dtype), given.view(dtype)
        assert seen.dtype == dtype and seen.shape == wanted.shape
        assert seen.cpu().tolist() == wanted.tolist(), (given, dtype)


def test_views_as_another_dtype() -> None:
    spawn(_views, nproc_per_node=1)


def test_keywords_that_do_not_exist() -> None:
    with pytest.raises(TypeError, match="Did you mean 'start_method'"):
        spawn(who, start_methods="fork")
    with pytest.raises(TypeError, match="unexpected keyword argument 'node_rank'"):
        idist.Parallel("xla-tpu", nproc_per_node=2, nnodes=2, node_rank=0)
    with pytest.raises(ValueError, match="nnodes must be a positive int"):
        spawn(who, nnodes=0)


def _wrong_groups(local_rank: int) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'"):
        idist.new_group([0], timeout=3)
    with pytest.raises(ValueError, match="lists of ranks or handles"):
        idist.barrier(group="world")


def _alone_in_a_group(local_rank: int) -> None:
    if idist.get_rank() == 1:
        tensor = torch.tensor([-0.0, 1e-310], dtype=torch.float64).to(idist.device())
        idist.all_reduce(tensor, group=[1])
        assert str(tensor.tolist()) == "[-0.0, 1e-310]"
        assert idist.all_gather("text", group=[1]) == ["text"]
        assert idist.broadcast(3, src=1, group=[1]) == 3
        idist.barrier(group=[1])


def test_a_group_of_one_needs_nobody() -> None:
    spawn(_alone_in_a_group)


def test_wrong_groups() -> None:
    spawn(_wrong_groups)


def test_an_environment_that_does_not_ask_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PJRT_DEVICE")
    run_script(
        tmp_path,
        """
        import os
        import pytest
        import ignite_dist as idist
        for _ in range(2):
            for call in (
                lambda: idist.initialize("xla-tpu"),
                lambda: idist.spawn("xla-tpu", print, nproc_per_node=1),
                lambda: idist.Parallel("xla-tpu", nproc_per_node=1),
            ):
                with pytest.raises(idist.EnvironmentVariablesError, match="Set PJRT_DEVICE=CPU to run on"):
                    call()
                assert "PJRT_DEVICE" not in os.environ
        """,
    )


def test_spawn_after_a_device_was_used(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import pytest, torch_xla
        import ignite_dist as idist
        if __name__ == "__main__":
            assert idist.spawn("xla-tpu", str, nproc_per_node=2) == ["0", "1"]
            torch_xla.device()
            for call in (idist.spawn, lambda *args, **kwargs: idist.Parallel(args[0], **kwargs)):
                with pytest.raises(RuntimeError, match="This process has used an XLA device"):
                    call("xla-tpu", str, nproc_per_node=2)
        """,
    )


def test_torch_xla_of_another_torch(tmp_path: Path) -> None:
    """The real torch_xla, under a torch that says it is newer."""
    run_script(
        tmp_path,
        """
        import pytest, torch
        torch.__version__ = "2.13.0"
        import ignite_dist as idist
        assert not idist.has_xla_support and "xla-tpu" not in idist.available_backends()
        with pytest.raises(ValueError, match="torch_xla needs torch 2.9, but torch 2.13.0 is installed"):
            idist.initialize("xla-tpu")
        """,
    )


def test_ctrl_c(tmp_path: Path) -> None:
    script = helpers.write_script(
        tmp_path,
        """
        import os, sys, time
        import ignite_dist as idist
        def wait(local_rank):
            if idist.get_rank():
                sys.stdout.write(f"{os.getpid()}\\n"); sys.stdout.flush()
                time.sleep(100)
            idist.barrier()
        if __name__ == "__main__":
            idist.spawn("xla-tpu", wait, nproc_per_node=2)
        """,
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=helpers.plain_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode != 0 and "KeyboardInterrupt" in output
    assert helpers.end_of_processes([worker], 5) == []
