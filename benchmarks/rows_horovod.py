"""Horovod: the facade compared with Horovod's own calls in the same context. Both give their calls names."""

from __future__ import annotations

import signal
import time
from functools import partial

import torch

import ignite_dist as idist
from rows import OURS, RAW, SIZES, Bar, Contenders, LauncherRow, RankRow, Row, zeros
from timing import Effort, Samples


def rows() -> list[Row]:
    collectives = {
        "all_reduce": ("hvd.allreduce_", _all_reduce),
        "all_gather": ("hvd.allgather", _all_gather),
        "broadcast": ("hvd.broadcast_", _broadcast),
    }
    found: list[Row] = [
        RankRow(
            f"Horovod: {name}",
            f"tensor, {size_name}{', 3 ranks' if ranks == 3 else ''}",
            bars=(Bar("more", 10, label=label) if size == 4 else Bar("ratio", 1.05, label=label),),
            contenders=partial(contenders, size),
            ranks=ranks,
            backend="horovod",
            weight=2 if size == 4 else 1,
        )
        for ranks in (2, 3)  # 3: more ranks than cores, so spinning ranks take turns
        for name, (label, contenders) in collectives.items()
        for size_name, size in SIZES.items()
        if ranks == 2 or name == "all_reduce"
    ]
    getter = RankRow("Horovod: getters", "get_rank()", "ns", contenders=_getter, backend="horovod")
    launch = LauncherRow("Horovod: spawn", "2 workers to a first barrier", "s", measure=_launches)
    return [*found, getter, launch]


def _all_reduce(size: int, device: torch.device) -> Contenders:
    import horovod.torch as hvd

    tensor = zeros(size, device)
    return {
        OURS: lambda: idist.all_reduce(tensor),
        RAW: lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"raw {size}"),
    }


def _all_gather(size: int, device: torch.device) -> Contenders:
    import horovod.torch as hvd

    tensor = zeros(size, device)
    return {
        OURS: lambda: idist.all_gather(tensor),
        RAW: lambda: hvd.allgather(tensor, name=f"raw {size}"),
    }


def _broadcast(size: int, device: torch.device) -> Contenders:
    import horovod.torch as hvd

    tensor = zeros(size, device)
    return {
        OURS: lambda: idist.broadcast(tensor),
        RAW: lambda: hvd.broadcast_(tensor, 0, name=f"raw {size}"),
    }


def _getter(device: torch.device) -> Contenders:
    import horovod.torch as hvd

    return {OURS: idist.get_rank, RAW: hvd.rank}


def _launches(effort: Effort) -> Samples:
    """Seconds until both workers have passed a barrier and returned. Our first launch is not counted."""
    from horovod.runner import run

    def init_and_barrier() -> None:  # local, because horovod.run does not find a script's modules
        import horovod.torch as hvd

        hvd.init()
        hvd.barrier()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    idist.spawn("horovod", _barrier, nproc_per_node=2)
    samples: Samples = {OURS: [], RAW: []}
    for _ in range(min(effort.repeats, 3)):
        start = time.perf_counter()
        idist.spawn("horovod", _barrier, nproc_per_node=2)
        samples[OURS].append(time.perf_counter() - start)
        start = time.perf_counter()
        run(init_and_barrier, num_proc=2, use_gloo=True)
        samples[RAW].append(time.perf_counter() - start)
        for number, handler in handlers.items():  # run() leaves its own handlers
            signal.signal(number, handler)
    return samples


def _barrier(local_rank: int) -> None:
    idist.barrier()
