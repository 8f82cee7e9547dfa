"""XLA on the CPU: the facade compared with torch_xla's own calls in the same context.

One replica in its own process is lazy: a collective becomes a part of the graph of its step. Two replicas
share a process: ``_all_reduce`` shows the code of a hand-written collective for this case.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import ignite_dist as idist
from rows import OURS, RAW, SIZES, Bar, Contenders, LauncherRow, RankRow, Row, launch, synchronizer, zeros
from timing import Effort, Samples

_STEPS = 10
_EXECUTIONS, _COMPILATIONS = "executions per step", f"compilations in {_STEPS} steps"

# Replicas that share a process are threads.
_both_replicas = threading.Barrier(2)
_compiling = threading.Lock()


def rows() -> list[Row]:
    row = partial(RankRow, backend="xla-tpu", device="xla")
    bars = (Bar("ratio", 1.1, label="(xm.all_reduce + sync)"),)
    no_difference = (Bar("more", 0, label="xm.all_reduce"),)
    step = "XLA: a step with an all_reduce"
    return [
        row(step, "time, 1 replica", bars=bars, contenders=_steps, ranks=1, weight=2),
        *(
            LauncherRow(step, counted, "x", no_difference, measure=partial(_counts, counted))
            for counted in (_EXECUTIONS, _COMPILATIONS)
        ),
        *(
            row(
                "XLA: all_reduce",
                f"tensor, {name}, 2 replicas",
                bars=bars,
                contenders=partial(_all_reduce, size),
            )
            for name, size in SIZES.items()
        ),
        *(
            row("XLA: getters", f"{name}()", "ns", contenders=partial(_getter, name))
            for name in ("get_rank", "get_world_size", "device")
        ),
    ]


# --- one replica -------------------------------------------------------------------------------------


def _steps(device: torch.device) -> Contenders:
    """Steps of a small layer. Each step reduces one gradient and then executes the whole graph."""
    import torch_xla
    from torch_xla.core import xla_model as xm

    # In a world of one torch_xla would omit the collective, for both contenders.
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    layer, inputs = torch.nn.Linear(64, 64).to(device), torch.rand(64, 64).to(device)

    def step(reduce: Callable[[Tensor], Any]) -> None:
        layer.zero_grad()
        layer(inputs).square().mean().backward()
        reduce(layer.weight.grad)
        torch_xla.sync()

    return {
        OURS: lambda: step(idist.all_reduce),
        RAW: lambda: step(lambda gradient: xm.all_reduce("sum", [gradient])),
    }


def _counts(counted: str, effort: Effort) -> Samples:
    return {name: [counts[counted]] for name, counts in _all_counts().items()}


@cache
def _all_counts() -> dict[str, dict[str, float]]:
    # One process per contender, so that no contender uses the other's compiled graphs.
    return {name: launch("xla-tpu", 1, _count, name)[0] for name in (OURS, RAW)}


def _count(local_rank: int, name: str) -> dict[str, float]:
    from torch_xla.debug import metrics

    step = _steps(idist.device())[name]
    for _ in range(_STEPS):
        step()
    synchronizer(idist.device())()  # torch_xla counts an execution at its end
    return {
        _EXECUTIONS: metrics.metric_data("ExecuteTime")[0] / _STEPS,
        _COMPILATIONS: metrics.counter_value("UncachedCompile"),
    }


# --- two replicas ------------------------------------------------------------------------------------


def _all_reduce(size: int, device: torch.device) -> Contenders:
    import torch_xla
    from torch_xla.core import xla_model as xm

    tensor, synchronize = zeros(size, device), synchronizer(device)

    def by_hand() -> None:
        nonlocal tensor
        torch_xla.sync()  # executes earlier operations, whose graphs may differ between the replicas
        _both_replicas.wait()  # a long wait for the other replica inside PJRT ends the process
        # Not `xm.all_reduce("sum", [tensor])`: the result would reuse the memory of the input, and with 1 MB
        # PJRT's CPU device hangs sooner or later.
        tensor = xm.all_reduce("sum", tensor)
        with _compiling:  # two compilations at once would give two modules that wait for each other
            torch_xla.sync()
        synchronize()  # until a call ends, it holds a thread of a pool

    return {OURS: lambda: idist.all_reduce(tensor), RAW: by_hand}


def _getter(name: str, device: torch.device) -> Contenders:
    import torch_xla
    from torch_xla import runtime

    if idist.get_rank() != 0:  # idle, because two busy replicas would wait for the GIL
        return dict.fromkeys((OURS, RAW), lambda: None)
    raw = {
        "get_rank": runtime.global_ordinal,
        "get_world_size": runtime.world_size,
        "device": torch_xla.device,
    }
    return {OURS: getattr(idist, name), RAW: raw[name]}
