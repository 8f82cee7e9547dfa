"""Which accelerator a rank selects. What a machine has is replaced: how many devices, and of which type."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ignite_dist.environments import Environment, devices
from recorded_jobs import SLURM, TORCHRUN, found_in

NCCL = {"cuda": "nccl"}
GLOO = {"cpu": "gloo", "cuda": "gloo"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}
THIRD = Environment("test", rank=7, world_size=8, local_rank=3, nproc_per_node=4)


class Machine:
    """What torch says of a machine with ``count`` devices of a type, and the device that was selected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, device_type: str = "cuda") -> None:
        self.selected: list[int] = []
        module = SimpleNamespace(device_count=lambda: count, get_device_properties=self.properties)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device_type))
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.selected.append)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.selected[-1])
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    def properties(self, device: torch.device) -> Any:
        return SimpleNamespace(name="Card", uuid=f"GPU-{device.index}")


@pytest.mark.parametrize(
    ("backend", "types", "count", "place", "expected"),
    [
        ("nccl", NCCL, 4, THIRD, 3),
        ("cpu:gloo,cuda:nccl", BOTH, 4, THIRD, 3),
        ("gloo", GLOO, 2, THIRD, 1),  # ranks share devices
        ("nccl", NCCL, 1, THIRD, 0),  # a wrapper shows each process its own
        ("nccl", NCCL, 2, THIRD, "Local rank 3 has no GPU: 'nccl' needs one per rank, and this node has 2."),
        ("nccl", NCCL, 2, THIRD._replace(has_own_devices=True), 1),
        ("nccl", NCCL, 4, THIRD._replace(local_rank=None), 3),  # by its rank, which is 7
        ("mpi", {"cpu": "mpi", "cuda": "mpi"}, 4, THIRD, None),  # MPI assigns the ranks later
        ("nccl", NCCL, 0, THIRD, None),
        ("nccl", NCCL, 4, found_in(TORCHRUN), 1),
        ("nccl", NCCL, 4, found_in(SLURM), 1),
        ("nccl", NCCL, 1, found_in(SLURM), 0),  # --gpu-bind
        ("nccl", NCCL, 1, found_in({**SLURM, "SLURM_GPUS_PER_TASK": "1"}), 0),
        # --tres-bind=gres/gpu:none shows all GPUs to each task, whatever the job has asked for.
        ("nccl", NCCL, 2, found_in({**SLURM, "SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}), 1),
    ],
)
def test_a_rank_selects(
    backend: str,
    types: dict[str, str],
    count: int,
    place: Environment,
    expected: int | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, count)
    if isinstance(expected, str):
        with pytest.raises(RuntimeError) as info:
            devices.select_device(backend, types, place)
        assert str(info.value) == expected and not machine.selected
    else:
        devices.select_device(backend, types, place)
        assert machine.selected == ([] if expected is None else [expected])


def test_a_device_that_the_backend_does_not_carry_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, "mps")
    devices.select_device("gloo", GLOO, THIRD)
    assert machine.selected == [] and devices.auto_backend() == "gloo"
    intel = Machine(monkeypatch, 4, "xpu")
    devices.select_device("xccl", {"xpu": "xccl"}, THIRD)
    assert intel.selected == [3]


def test_the_accelerator_says_the_backend_and_the_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl", "xccl"))
    for device_type, backend in (("cuda", "nccl"), ("xpu", "xccl")):
        Machine(monkeypatch, 6, device_type)
        assert (devices.auto_backend(), devices.auto_nproc_per_node()) == (backend, 6)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert (devices.auto_backend(), devices.auto_nproc_per_node()) == ("gloo", 2), "gloo carries no xpu"
    Machine(monkeypatch, 6)
    assert (devices.auto_backend(), devices.auto_nproc_per_node()) == ("gloo", 6)


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [
        ("nccl", [0, 1, 2], ""),
        ("cpu:gloo,cuda:nccl", [0, 1, 1], "and 'cpu:gloo,cuda:nccl' needs one per rank. Rank"),
        ("nccl", [0, 1, 0], " have the same GPU (Card, UUID GPU-0), and 'nccl' needs one per rank. Rank"),
        ("gloo", [0, 0, 0], ""),
    ],
)
def test_ranks_with_the_same_gpu_are_named_on_every_rank(
    backend: str, gpus: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, 1)
    own, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(devices, "current_accelerator", lambda: torch.device("cuda", own.index))

    def claim(rank: int) -> str:
        own.index = gpus[rank]
        try:
            devices.claim_device(backend, store, THIRD._replace(rank=rank, world_size=len(gpus)))
        except RuntimeError as error:
            return str(error)
        return ""

    def texts() -> set[str]:
        with ThreadPoolExecutor(len(gpus)) as threads:
            return set(threads.map(claim, range(len(gpus))))

    (text,) = texts()
    assert expected in text and bool(expected) == bool(text)
    gpus[:] = range(len(gpus))
    assert texts() == {""}, "a second attempt in the same store"
    gpus[:] = [0] * len(gpus)
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {own.index} {threading.get_ident()}")
    assert texts() == {""}, "the same UUID on several hosts"


def test_a_worker_knows_its_device_before_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 4)
    assert devices.of_local_rank(5) == torch.device("cuda", 1)
    Machine(monkeypatch, 0)
    assert devices.of_local_rank(5) is None
