"""What all tests of this checkout share, also those in ``ignite_dist/testing/conformance/``."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ignite_dist.environments import is_launcher_variable
from ignite_dist.testing.conformance import plugin, suite
from ignite_dist.testing.conformance.worlds import LaunchedWorld, SerialWorld, SpawnedWorld

MPIRUN = "mpirun.openmpi --allow-run-as-root --oversubscribe -np {ranks}"
# XLA's older way to fuse operations, which compiles in less than half of the time. It multiplies and adds in
# one instruction where the processor can: then the results of equal steps depend on what is fused with them.
# AVX has no such instruction.
_OLDER_FUSION = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"


class XlaWorld(SpawnedWorld):
    """Replicas on PJRT's CPU, threads of one process."""

    def __init__(self, size: int, fusion: str = _OLDER_FUSION) -> None:
        super().__init__("xla-tpu", size)
        self.name = f"xla-{size}"
        self._fusion = fusion

    def _start(self, address: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PJRT_DEVICE", "CPU")
            patch.setenv("CPU_NUM_DEVICES", str(self.size))
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {self._fusion}")
            return super()._start(address)


class XlaWorldOfThree(XlaWorld):
    """The older fusion rounds a quotient of float8 numbers twice. So that case has workers without it."""

    def __init__(self) -> None:
        super().__init__(3)
        self._with_xlas_choice = XlaWorld(3, fusion="")

    def run(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        if case.__name__ == "test_narrow_floats_are_rounded_once":
            return self._with_xlas_choice.run(case, **kwargs)
        return super().run(case, **kwargs)

    def close(self) -> None:
        self._with_xlas_choice.close()
        super().close()


_WORLDS = {
    "serial": SerialWorld(),
    "gloo-2": SpawnedWorld("gloo", 2),
    "gloo-3": SpawnedWorld("gloo", 3),
    "gloo-4": SpawnedWorld("gloo", 4),
    "horovod-2": SpawnedWorld("horovod", 2),
    "horovod-3": SpawnedWorld("horovod", 3),
    "xla-1": XlaWorld(1),
    "xla-2": XlaWorld(2),
    "xla-3": XlaWorldOfThree(),
    # A backend of a third party: examples/mpi4py_backend.py
    "mpi4py-2": LaunchedWorld("mpi4py_backend:mpi4py", 2, MPIRUN),
    "mpi4py-3": LaunchedWorld("mpi4py_backend:mpi4py", 3, MPIRUN),
    # On one GPU: NCCL takes a world of one, gloo carries CUDA tensors between two ranks that share it.
    "nccl-1": SpawnedWorld("nccl", 1),
    "gloo-cuda-2": SpawnedWorld("gloo", 2),
}
_ON_A_GPU = ("nccl-1", "gloo-cuda-2")


def _marks(name: str) -> list[Any]:
    if name in _ON_A_GPU:
        skip = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
        return [pytest.mark.gpu, skip]
    if name == "gloo-4":
        return [pytest.mark.long]
    return [getattr(pytest.mark, one) for one in ("horovod", "mpi4py", "xla") if name.startswith(one)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Inductor makes C++ of a graph: in ``make test`` on two ranks, and not of all functions at once."""
    for item in items:
        world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
        marker = {_WORLDS["serial"]: "same_on_every_backend", _WORLDS["gloo-2"]: "all_functions"}.get(world)
        if marker is not None and item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.long)


def pytest_addoption(parser: pytest.Parser) -> None:
    kept = "keep what the conformance suite sees, as JSON"
    parser.addoption("--conformance-results", type=Path, metavar="FILE", help=kept)


def pytest_configure(config: pytest.Config) -> None:
    """What the processes of the tests inherit does not depend on who started pytest."""
    # In the background (``make test &``, ``nohup``) Ctrl-C is ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where nothing is buffered (images of containers often say so), print() writes a line and its end one
    # after the other: those of two ranks that share a file get between each other.
    os.environ.pop("PYTHONUNBUFFERED", None)
    # XLA's tests compile much and run little: quick compilation is faster.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    # Each rank of Horovod asks the others for work, by default every millisecond. While there is none, that
    # takes half of a core on a busy machine. With 10 ms it takes a quarter, with 30 ms less than a tenth.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "50")
    # OpenMP's threads spin while they wait for each other. Where other processes want the cores, training
    # takes up to three times the processor time. This holds for processes that start from here on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # OpenBLAS's threads, which wait for numpy's products, spin too.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Most tests say what happens on CPUs.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The options of this run are not those of the pytest that a test starts.
    os.environ.pop("PYTEST_ADDOPTS", None)
    if not config.pluginmanager.has_plugin(plugin.__name__):  # else its options name the worlds
        worlds = [pytest.param(world, id=name, marks=_marks(name)) for name, world in _WORLDS.items()]
        suite.register(config, worlds)
    # Not in a pytest that a test has started, which collects the conformance suite.
    if config.rootpath == Path(__file__).parent and not config.option.collectonly:
        from left_out import LeftOut  # in tests/, which pytest puts on the path (pyproject.toml)
        from warm_client import share

        share()
        first = str(Path(__file__).parent / "tests" / "first_on_path")  # see the module in it
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if first not in folders:  # the workers of pytest-xdist have it from their parent
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [first, *folders]))
        config.pluginmanager.register(LeftOut())
    path = config.getoption("--conformance-results")
    if path is not None and not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        from conformance_table import ResultsWriter

        config.pluginmanager.register(ResultsWriter(path))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without a launcher's variables and leaves no context behind."""
    for name in list(os.environ):
        if is_launcher_variable(name):
            monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind")


def pytest_collection_finish() -> None:
    """The collector, which runs at the end of each context, then skips the objects of the collection."""
    gc.collect()
    gc.freeze()
