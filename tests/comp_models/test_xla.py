"""XLA's contexts, launches and collectives: what the conformance suite, which XLA passes too, does not ask.

On PJRT's CPU, with one replica and with several, which are threads of one process. A process can initialize
its runtime once and never end it, so contexts are made in processes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from xla_jobs import run_script, spawn, who

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")


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
