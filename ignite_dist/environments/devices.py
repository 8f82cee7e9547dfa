"""CPU cores and accelerators of this machine, and the accelerator of this rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

import torch
import torch.distributed as dist

from ignite_dist.environments import Environment
from ignite_dist.environments.rendezvous import roll_call


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


def of_local_rank(local_rank: int) -> torch.device | None:
    """The accelerator for a worker before it has a context; None on a machine without one."""
    found = accelerator()
    return None if found is None else torch.device(found.type, local_rank % _count(found.type))


def auto_backend() -> str:
    """``"nccl"`` on a machine with a GPU, ``"xccl"`` on one with an Intel GPU, else ``"gloo"``."""
    return _backend_of_accelerator() or "gloo"


def auto_nproc_per_node() -> int:
    """Number of GPUs; without a GPU, number of cores divided by ``OMP_NUM_THREADS`` (1)."""
    found = accelerator()
    if found is not None and (_backend_of_accelerator() or found.type in _OF_GLOO):
        return _count(found.type)
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, num_cores() // (int(num_threads) if num_threads.isdecimal() and int(num_threads) else 1))


def _backend_of_accelerator() -> str | None:
    """Torch's backend for this machine's accelerator, if this torch has it and it is not gloo."""
    found = accelerator()
    backend = dist.Backend.default_device_backend_map.get(found.type) if found is not None else None
    return backend if backend != "gloo" and backend and dist.is_backend_available(backend) else None


def _count(device_type: str) -> int:
    return int(torch.get_device_module(device_type).device_count())


# Devices whose tensors gloo carries.
_OF_GLOO = dist.Backend.backend_capability.get("gloo", [])
# Backends that refuse two ranks on a device, by what is in their names.
_ONE_PER_PROCESS = {"nccl": ("cuda", "a CUDA"), "xccl": ("xpu", "an XPU")}


def needs_one_per_rank(backend: str) -> bool:
    """True for NCCL and XCCL, also as a part of ``"cpu:gloo,cuda:nccl"``."""
    return any(name in backend for name in _ONE_PER_PROCESS)


def check_devices(backend: str, nproc_per_node: int) -> None:
    """Raise if ``backend`` needs a device for each process, and this node has too few.

    Raises:
        RuntimeError: the machine has no such device.
        ValueError: the machine has too few of them.
    """
    for name, (device_type, device) in _ONE_PER_PROCESS.items():
        if name not in backend:
            continue
        count = _count(device_type)
        if count == 0:
            raise RuntimeError(
                f"Backend {backend!r} needs {device} device, and this machine has none. Use 'gloo'."
            )
        if nproc_per_node > count:
            raise ValueError(
                f"Backend {backend!r} needs a GPU per process: {nproc_per_node} processes, {count} GPUs."
            )


def select_device(backend: str, device_types: Collection[str], place: Environment) -> None:
    """Select this rank's accelerator, if the machine has one of ``device_types``, which ``backend`` carries.

    That is the only one that this process sees, or the one with the number of the local rank. Over gloo,
    ranks share accelerators if there are too few.

    Raises:
        RuntimeError: the process sees several, but none for its local rank. Only if ``backend`` needs one.
    """
    found = accelerator()
    if found is None or found.type not in device_types or backend == "mpi":
        return
    count = _count(found.type)
    local_rank = place.rank if place.local_rank is None else place.local_rank
    is_known = place.local_rank is not None and not place.has_own_devices
    if needs_one_per_rank(backend) and is_known and 1 < count <= local_rank:
        raise RuntimeError(
            f"Local rank {local_rank} has no GPU: {backend!r} needs one per rank, and this node has {count}."
        )
    torch.accelerator.set_device_index(local_rank % count)


def claim_device(backend: str, store: dist.Store, place: Environment) -> None:
    """Compare the GPUs that the ranks of NCCL have selected, in ``store``. Every rank calls this.

    Only those of NVIDIA: other vendors' may have no UUID, or one that is unique on its machine only.

    Raises:
        RuntimeError: two ranks have the same one. Raised on every rank.
    """
    if "nccl" not in backend or torch.version.cuda is None:
        return
    # A process may open several contexts after errors, in the same store.
    attempt = (store.add(f"{_CLAIMS}/begun", 1) - 1) // place.world_size
    claims = f"{_CLAIMS}/{attempt}"
    conflict = f"{claims}/conflict"
    with suppress(RuntimeError):  # of a device that does not work: NCCL says what is wrong
        device = current_accelerator()
        properties = torch.get_device_module(device).get_device_properties(device)
        key = f"{claims}/{socket.gethostname()}/{properties.uuid}"
        owner = int(store.compare_set(key, "", str(place.rank)))
        if owner != place.rank:
            store.set(
                conflict,
                f"Ranks {owner} and {place.rank} have the same GPU ({properties.name}, UUID "
                f"{properties.uuid}), and {backend!r} needs one per rank. Rank {place.rank} sees "
                f"{_count(device.type)}. Start fewer processes, or let the launcher show each its own "
                "(Slurm: --gpus-per-task=1).",
            )
    if store.add(f"{claims}/number", 1) == place.world_size:
        store.set(f"{claims}/verdict", store.get(conflict).decode() if store.check([conflict]) else "")
    with roll_call.logging_wait(place, "the GPUs of the other ranks"):
        verdict = store.get(f"{claims}/verdict").decode()
    if verdict:
        raise RuntimeError(verdict)


_CLAIMS = "ignite_dist/devices"
