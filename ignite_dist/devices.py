"""CPU cores and accelerators of this machine, and the accelerator of this rank."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
import torch.distributed as dist

from ignite_dist.environments import Environment


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerator() -> torch.device | None:
    """This machine's accelerator, without an index; None if it has none.

    CUDA's devices are counted, which asks the driver. torch's own look at what is available starts CUDA, and
    processes that are forked later cannot use it.
    """
    found = torch.accelerator.current_accelerator()
    return found if found is not None and torch.get_device_module(found).device_count() else None


def accelerator_in(device_types: Collection[str]) -> str | None:
    """The type of this machine's accelerator if the type is in ``device_types``, else None."""
    found = accelerator()
    return found.type if found is not None and found.type in device_types else None


def current_accelerator() -> torch.device:
    """The selected accelerator with its index. The machine must have one."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def auto_backend() -> str:
    """``"nccl"`` on a machine with a GPU, else ``"gloo"``."""
    return "nccl" if torch.cuda.device_count() and dist.is_nccl_available() else "gloo"


def auto_nproc_per_node() -> int:
    """Number of GPUs; without a GPU, number of cores divided by ``OMP_NUM_THREADS`` (1)."""
    if num_gpus := torch.cuda.device_count():
        return num_gpus
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, num_cores() // (int(num_threads) if num_threads.isdecimal() and int(num_threads) else 1))


def check_devices(backend: str, nproc_per_node: int) -> None:
    """Raise if NCCL has fewer GPUs than processes on this node.

    Raises:
        RuntimeError: the machine has no GPU.
        ValueError: the machine has too few GPUs.
    """
    if "nccl" not in backend:
        return
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(f"Backend {backend!r} needs a CUDA device, and this machine has none. Use 'gloo'.")
    if nproc_per_node > count:
        raise ValueError(
            f"Backend {backend!r} needs a GPU per process: {nproc_per_node} processes, {count} GPUs."
        )


def select_device(backend: str, place: Environment) -> None:
    """Select this rank's GPU. Ranks share GPUs if there are too few (gloo only).

    If the launcher shows each rank only its own GPU, nothing changes.
    """
    count = torch.cuda.device_count()
    if not count or backend == "mpi" or place.has_own_devices:
        return
    local_rank = place.rank if place.local_rank is None else place.local_rank
    if "nccl" in backend and place.local_rank is not None and local_rank >= count:
        raise RuntimeError(
            f"Local rank {local_rank} has no GPU: NCCL needs one per rank, and this node has {count}."
        )
    torch.cuda.set_device(local_rank % count)
