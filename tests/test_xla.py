"""XLA's contexts, launches and collectives: what the conformance suite, which XLA passes too, does not ask.

On PJRT's CPU, with one replica and with several, which are threads of one process. A process can initialize
its runtime once and never end it, so contexts are made in processes of their own.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.xla import replicas

pytestmark = pytest.mark.xla

FAILURE_SECONDS = 8  # and PJRT would take 10 to end the process


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")


def spawn(function: Any, *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> Any:
    return idist.spawn("xla-tpu", function, args, nproc_per_node=nproc_per_node, **kwargs)


def run_script(folder: Path, text: str, **environ: str) -> str:
    """What the script printed; it must succeed."""
    ended = helpers.run_python(helpers.write_script(folder, text), env=helpers.plain_environ(**environ))
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


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


# --- contexts ----------------------------------------------------------------------------------------


def test_installed_is_not_in_use(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import sys
        import ignite_dist as idist
        assert idist.has_xla_support and "xla-tpu" in idist.available_backends()
        assert idist.model_name() == "serial" and "torch_xla" not in sys.modules

        import torch_xla
        assert idist.model_name() == "serial" and idist.device().type == "cpu" and idist.backend() is None
        assert not torch_xla._XLAC._xla_runtime_is_initialized()  # by none of these questions

        device = torch_xla.device()
        assert (idist.model_name(), idist.backend(), idist.device()) == ("xla-dist", "xla-tpu", device)
        assert (idist.get_rank(), idist.get_world_size()) == (0, 1)  # whatever the number of devices
        """,
    )


def test_initialize_and_finalize(tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        """
        import os, threading
        import pytest, torch
        import ignite_dist as idist
        before = set(os.environ)
        for _ in range(3):
            idist.initialize("xla-tpu")
            assert (idist.model_name(), idist.backend(), idist.device()) == (
                "xla-dist", "xla-tpu", torch.device("xla:0"))
            assert (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()) == (0, 1, 0)
            assert (idist.get_nnodes(), idist.get_node_rank(), idist.get_nproc_per_node()) == (1, 0, 1)
            assert idist.all_reduce(torch.ones(2, device=idist.device()), group=[0]).tolist() == [1, 1]
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)  # several ranks may share it
            for backend in ("xla-tpu", "gloo"):
                with pytest.raises(RuntimeError, match="already"):
                    idist.initialize(backend)
            seen = []
            thread = threading.Thread(target=lambda: seen.append((idist.model_name(), idist.get_rank())))
            thread.start(); thread.join()
            assert seen == [("xla-dist", 0)]
            idist.finalize()
            # The runtime goes on, but nobody asks for it any more.
            assert idist.model_name() == "serial" and idist.device().type == "cpu"
        idist.initialize("gloo")
        assert idist.model_name() == "native-dist"
        idist.finalize()
        assert idist.model_name() == "serial"
        with idist.Parallel(backend="xla-tpu") as parallel:
            print(parallel.run(lambda local_rank: (local_rank, idist.model_name())))
        idist.show_config()
        """,
    )
    assert "(0, 'xla-dist')" in output and "distributed configuration: serial" in output


def test_other_contexts_beside_an_xla_device_at_hand(tmp_path: Path) -> None:
    """A device that is merely used does not keep anybody from making a context; what was asked for does."""
    run_script(
        tmp_path,
        """
        import pytest, torch, torch.distributed as dist, torch_xla
        import ignite_dist as idist
        torch_xla.device()
        assert idist.model_name() == "xla-dist"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert idist.model_name() == "native-dist" and idist.device().type == "cpu"
        dist.destroy_process_group()
        assert idist.model_name() == "xla-dist"
        idist.initialize("gloo")
        assert idist.model_name() == "native-dist"
        idist.finalize()
        assert idist.model_name() == "xla-dist"
        idist.initialize("xla-tpu")  # joins what is there
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert idist.model_name() == "xla-dist"  # a group at its side, for checkpoints
        dist.destroy_process_group()
        idist.finalize()
        assert idist.model_name() == "serial"
        """,
    )


OWN_LAUNCH = """
    import sys
    import torch, torch_xla
    import torch_xla.runtime as xr
    import ignite_dist as idist

    def work(index, text):
        assert idist.model_name() == "xla-dist"
        assert (idist.get_rank(), idist.get_world_size()) == (xr.global_ordinal(), 2)
        assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (xr.local_ordinal(), 2)
        assert idist.device() == torch_xla.device()
        assert idist.all_gather(f"{text} {idist.get_rank()}") == ["hello 0", "hello 1"]
        tensor = torch.full((2,), idist.get_rank() + 1.0, device=idist.device())
        assert idist.all_reduce(tensor).tolist() == [3, 3]
        with idist.Parallel(backend="xla-tpu") as parallel:  # joins
            assert parallel.run(lambda local_rank: idist.all_reduce(local_rank)) == 1
        sys.stdout.write(f"done {idist.model_name()}\\n")

    if __name__ == "__main__":
        LAUNCH
        assert idist.model_name() == "serial"
"""


@pytest.mark.parametrize(
    "launch",
    [
        "torch_xla.launch(work, args=('hello',))",
        "import torch_xla.distributed.xla_multiprocessing as xmp; "
        "xmp.spawn(work, args=('hello',), start_method='fork')",
    ],
    ids=["launch", "xmp"],
)
def test_the_users_own_launch(launch: str, tmp_path: Path) -> None:
    output = run_script(tmp_path, OWN_LAUNCH.replace("LAUNCH", launch))
    assert output.count("done serial") == 2


# --- spawn -------------------------------------------------------------------------------------------


def who(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    assert idist.all_reduce(1) == idist.get_world_size()
    return {
        "ranks": (local_rank, idist.get_rank(), idist.get_local_rank()),
        "sizes": (idist.get_world_size(), idist.get_nproc_per_node(), idist.get_nnodes()),
        "model": (idist.model_name(), idist.backend(), str(idist.device())),
        "called": (args, kwargs),
        "process": (os.getpid(), threading.current_thread() is threading.main_thread()),
    }


def test_spawn_returns_what_each_replica_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")  # more than cores
    results = spawn(who, 1, nproc_per_node=4, kwargs_dict={"two": 2})
    for rank, result in enumerate(results):
        assert result["ranks"] == (rank, rank, rank)
        assert result["sizes"] == (4, 4, 1)
        assert result["model"] == ("xla-dist", "xla-tpu", f"xla:{rank}")
        assert result["called"] == ((1,), {"two": 2})
    assert len({result["process"][0] for result in results}) == 1 and len(results) == 4


def _operations_left_to_the_cpu(_: int) -> list[str]:
    from torch_xla.debug import metrics

    return [name for name in metrics.counter_names() if name.startswith("aten::")]


def test_replicas_can_take_their_first_number_at_the_same_time() -> None:
    """torch_xla's table of such operations has no lock: where item() is new, two at once end the process."""
    for names in spawn(_operations_left_to_the_cpu):
        assert "aten::_local_scalar_dense" in names


def test_one_replica_where_there_are_more_devices() -> None:
    (result,) = spawn(who, nproc_per_node=1)
    assert (result["ranks"], result["sizes"]) == ((0, 0, 0), (1, 1, 1))
    assert result["process"][1], "alone it has the main thread"


def test_spawn_takes_closures_and_does_not_wait_if_told_so() -> None:
    offset = 10
    workers = spawn(lambda local_rank: local_rank + offset, join=False)
    assert len(workers.pids()) == 2 and len(set(workers.pids())) == 1
    assert workers.join() == [10, 11]


def test_parallel_starts_replicas_and_other_start_methods_do_too() -> None:
    for start_method in (None, "spawn", "fork"):
        with idist.Parallel("xla-tpu", nproc_per_node=2, start_method=start_method) as parallel:
            assert parallel.run(who)["ranks"] == (0, 0, 0)


def _finalizes(local_rank: int) -> list[Any]:
    seen = []
    for _ in range(2):
        seen.append((idist.model_name(), idist.all_reduce(1)))
        idist.finalize()
        seen.append((idist.model_name(), idist.all_reduce(1)))
        idist.initialize("xla-tpu")
    return seen


def test_replicas_end_and_make_their_context_again() -> None:
    assert spawn(_finalizes) == [[("xla-dist", 2), ("serial", 1)] * 2] * 2


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


# --- lazy --------------------------------------------------------------------------------------------


def _counts(local_rank: int) -> dict[str, tuple[int, int]]:
    """Executions and compilations of ten steps: with no collective, with torch_xla's own, with ours."""
    import torch_xla
    import torch_xla.debug.metrics as metrics
    from torch_xla.core import xla_model

    def counts() -> list[int]:
        xla_model.wait_device_ops()
        fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
        assert not fallbacks, f"taken to the CPU and back: {fallbacks}"
        return [metrics.counter_value(name) or 0 for name in ("ExecuteComputation", "UncachedCompile")]

    def all_numbers(tensor: torch.Tensor) -> None:
        idist.all_reduce(1)
        idist.all_gather("text")
        idist.barrier()
        assert idist.get_rank() == 0

    contenders = {
        "none": lambda tensor: None,
        "numbers": all_numbers,
        "raw": lambda tensor: xla_model.all_reduce("sum", [tensor]),
        "sum": idist.all_reduce,
        "average": lambda tensor: idist.all_reduce(tensor, "AVERAGE"),
        "max": lambda tensor: idist.all_reduce(tensor, "MAX"),
        "gather": lambda tensor: tensor.add_(idist.all_gather(tensor).sum()),
        "broadcast": idist.broadcast,
    }
    seen = {}
    for name, contender in contenders.items():
        for steps in (2, 10):  # the first ones compile
            weight = torch.ones(8, 8, device=idist.device())
            torch_xla.sync(wait=True)
            before = counts()
            for _ in range(steps):
                weight = (weight @ weight / 8).clamp(-1, 1)
                contender(weight)
                torch_xla.sync()
            executions, compilations = (now - then for now, then in zip(counts(), before, strict=True))
            seen[name] = executions, compilations
        assert weight.cpu().isfinite().all()
    return seen


def test_with_one_replica_a_collective_is_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # also in a world of one
    (seen,) = spawn(_counts, nproc_per_node=1)
    assert seen == dict.fromkeys(seen, (10, 0))


# --- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nproc_per_node", "environ", "message"),
    [
        (
            4,
            {},
            "has 2 XLA device(s) (PJRT_DEVICE=CPU), and PJRT runs one replica or one on each device. Set CPU",
        ),
        (2, {"CPU_NUM_DEVICES": "two"}, "CPU_NUM_DEVICES is a number of devices, got 'two'"),
        (2, {"PJRT_DEVICE": "cpu"}, "PJRT_DEVICE is 'cpu', not one of 'CPU', "),
        (2, {"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE is 'TPU', and torch_xla finds no TPU here"),
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
    with pytest.raises(ValueError, match="a list of ranks or a result of new_group"):
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
        with pytest.raises(ValueError, match="torch_xla needs torch 2.9, and this is 2.13.0"):
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
