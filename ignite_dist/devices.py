"""CPU cores and accelerators of this machine, and the accelerator of this rank."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from ignite_dist.environments import Environment


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerator_in(device_types: Collection[str]) -> str | None:
    """The type of this machine's accelerator if the type is in ``device_types``, else None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in device_types else None


def current_accelerator() -> torch.device:
    """The selected accelerator with its index. The machine must have one."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


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
    if not torch.cuda.is_available() or backend == "mpi":
        return
    local_rank = place.rank if place.local_rank is None else place.local_rank
    count = torch.cuda.device_count()
    if place.has_own_devices:
        return
    if "nccl" in backend and place.local_rank is not None and local_rank >= count:
        raise RuntimeError(
            f"Local rank {local_rank} has no GPU: NCCL needs one per rank, and this node has {count}."
        )
    torch.cuda.set_device(local_rank % count)
