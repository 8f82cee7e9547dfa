"""XLA on the CPU: the facade against torch_xla's own calls, in the same context.

One replica that has its process to itself is lazy: a collective joins the graph of its step. Two replicas
share a process, and what a collective takes there by hand is in ``_all_reduce``.
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

# The replicas of a process are threads of it.
_both_replicas = threading.Barrier(2)
_compiling = threading.Lock()


def rows() -> list[Row]:
    row = partial(RankRow, backend="xla-tpu", device="xla")
    bars = (Bar("ratio", 1.1, label="(xm.all_reduce + sync)"),)
    no_more = (Bar("more", 0, label="xm.all_reduce"),)
    step = "XLA: a step with an all_reduce"
    return [
        row(step, "time, 1 replica", bars=bars, contenders=_steps, ranks=1, weight=2),
        *(
            LauncherRow(step, counted, "x", no_more, measure=partial(_counts, counted))
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
    """Steps of a small layer, one of whose gradients is reduced before all of it is executed."""
    import torch_xla
    from torch_xla.core import xla_model as xm

    # In a world of one torch_xla would leave the collective out, for both contenders.
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
    # A process for each, so that neither finds what the other one has compiled.
    return {name: launch("xla-tpu", 1, _count, name)[0] for name in (OURS, RAW)}


def _count(local_rank: int, name: str) -> dict[str, float]:
    from torch_xla.debug import metrics

    step = _steps(idist.device())[name]
    for _ in range(_STEPS):
        step()
    synchronizer(idist.device())()  # what has been executed is counted at its end
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
        torch_xla.sync()  # what led to the tensor may be another graph on each replica: it goes before
        _both_replicas.wait()  # one that has to wait for the other inside of PJRT for long ends the process
        # Not `xm.all_reduce("sum", [tensor])`: the result would get the memory of the tensor that goes in,
        # and with 1 MB of it PJRT's CPU device sooner or later stands still.
        tensor = xm.all_reduce("sum", tensor)
        with _compiling:  # both at the same time would get a module each, and wait in it for the other
            torch_xla.sync()
        synchronize()  # calls under way hold threads of a pool

    return {OURS: lambda: idist.all_reduce(tensor), RAW: by_hand}


def _getter(name: str, device: torch.device) -> Contenders:
    import torch_xla
    from torch_xla import runtime

    if idist.get_rank() != 0:  # it rests, or the two would take turns with Python's one lock
        return dict.fromkeys((OURS, RAW), lambda: None)
    raw = {
        "get_rank": runtime.global_ordinal,
        "get_world_size": runtime.world_size,
        "device": torch_xla.device,
    }
    return {OURS: getattr(idist, name), RAW: raw[name]}
