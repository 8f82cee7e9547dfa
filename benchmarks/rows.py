"""The rows of the benchmark: contenders, and the bars that our own contender should meet.

A new backend adds rows, not code: a `RankRow` if ranks call collectives, a `LauncherRow` if the measurement
starts its own processes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ignite_dist as idist
from timing import Effort, Processes, Samples, summarize, time_in_turn

OURS, RAW, IGNITE, TORCHRUN = "ours", "raw", "ignite", "torchrun"

_SCALES = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "MB": 1e-6, "x": 1.0}

SIZES = {"4 B": 4, "1 MB": 1 << 20, "16 MB": 16 << 20}

Contenders = dict[str, Callable[[], Any]]

# The name of all_gather_into_tensor since torch 2.13.
all_gather_raw = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Bar:
    """The figure that our own contender should reach.

    Attributes:
        kind: "ratio" (ours / reference), "more" (ours - reference) or "value" (ours).
        limit: the largest figure that meets the bar; in the row's unit for "more" and "value".
        reference: the contender to compare with.
        label: the reference in words.
    """

    kind: Literal["ratio", "more", "value"]
    limit: float
    reference: str = RAW
    label: str = RAW

    def text(self, unit: str) -> str:
        if self.kind == "ratio":
            return f"<= {self.limit:g} x {self.label}"
        if self.kind == "more":
            return f"<= {self.label} + {self.limit:g} {unit}"
        return f"< {self.limit:g} {unit}"

    def figures(self, samples: Samples, scale: float) -> list[float]:
        """The figure of every round, each paired with the reference in the same round."""
        ours = samples[OURS]
        if self.kind == "value":
            return [value * scale for value in ours]
        pairs = zip(ours, samples[self.reference], strict=False)
        if self.kind == "ratio":
            return [own / other for own, other in pairs]
        return [(own - other) * scale for own, other in pairs]

    def format(self, figure: float, unit: str) -> str:
        if self.kind == "ratio":
            return f"{figure:.2f} x" if figure >= 0.1 else f"{figure:.3f} x"
        return f"{figure:+.3g} {unit}" if self.kind == "more" else f"{figure:.3g} {unit}"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        section: the subject.
        name: the call and its arguments.
        unit: "ns", "us", "ms" or "s" for times; "MB" for memory; "x" for plain numbers.
        bars: empty if the row has no bar; the table then shows only the times.
    """

    section: str
    name: str
    unit: str = "us"
    bars: tuple[Bar, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.section}: {self.name}"

    @property
    def scale(self) -> float:
        return _SCALES[self.unit]


@dataclass(frozen=True)
class LauncherRow(Row):
    """A row measured from this process, in processes that the measurement starts itself.

    Attributes:
        measure: returns the samples, in seconds (in bytes if the unit is "MB").
    """

    measure: Callable[[Effort], Samples] = lambda effort: {}


@dataclass(frozen=True, kw_only=True)
class RankRow(Row):
    """A row measured in the ranks of a context. All rows of one kind of context share one launch.

    Attributes:
        contenders: called on every rank with the device; returns the timed functions by contender.
        ranks: number of ranks.
        backend: backend of the context.
        device: type of the tensors' device.
        slow: contenders so slow that only a few calls are timed.
        weight: share of time, relative to other rows; larger if the difference is small against the times.
    """

    contenders: Callable[[torch.device], Contenders]
    ranks: int = 2
    backend: str = "gloo"
    device: str = "cpu"
    slow: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def context(self) -> tuple[str, int, str]:
        return self.backend, self.ranks, self.device


def launch(backend: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(local_rank, *arguments)`` on the ranks of a new context."""
    options = {"timeout": timedelta(minutes=2)} if backend in ("gloo", "nccl") else {}
    if backend == "xla-tpu":
        # PJRT needs both. A collective of one replica would wait for a second device if there were one.
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(ranks))
    return idist.spawn(backend, function, args=arguments, nproc_per_node=ranks, **options)


def measure_in_ranks(local_rank: int, rows: list[RankRow], effort: Effort) -> list[Samples]:
    """The samples of each row. Every rank of a context runs this; use the samples of rank 0."""
    torch.set_num_threads(1)
    device = torch.device(rows[0].device)
    processes = rank_processes(device)
    measured = []
    for row in rows:
        samples = time_in_turn(row.contenders(device), effort, processes, row.slow, row.weight)
        if idist.get_rank() == 0:
            show_progress(row, samples)
        measured.append(samples)
    return measured


def rank_processes(device: torch.device) -> Processes:
    synchronize = synchronizer(device)
    if dist.is_initialized():
        return Processes(_from_rank_0, dist.barrier, synchronize)
    return Processes(partial(idist.broadcast, safe_mode=True), idist.barrier, synchronize)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that returns when this rank's device has finished its work."""
    if device.type == "cuda":
        return torch.cuda.synchronize
    if device.type == "xla":
        from torch_xla.core import xla_model as xm

        # The default waits for all devices of the process; a wait for another replica's device blocks it.
        return partial(xm.wait_device_ops, xm.xla_real_devices([str(idist.device())]))
    return lambda: None


def _from_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def show_progress(row: Row, samples: Samples) -> None:
    medians = ", ".join(
        f"{name} {statistics.median(values) * row.scale:.4g} {row.unit}" for name, values in samples.items()
    )
    print(f"  {row.title}: {medians}", flush=True)


def evaluate(row: Row, samples: Samples) -> dict[str, Any]:
    """The row's content in the JSON file."""
    bars = []
    for bar in row.bars:
        figure = summarize(bar.figures(samples, row.scale))
        bars.append(
            {
                "text": bar.text(row.unit),
                "kind": bar.kind,
                "reference": None if bar.kind == "value" else bar.reference,
                "limit": bar.limit,
                "figure": figure,
                "shown": bar.format(figure["median"], row.unit),
                "met": figure["median"] <= bar.limit,
            }
        )
    return {
        "section": row.section,
        "name": row.name,
        "unit": row.unit,
        "ranks": getattr(row, "ranks", None),
        "backend": getattr(row, "backend", None),
        "device": getattr(row, "device", None),
        "contenders": {
            name: summarize([value * row.scale for value in values]) for name, values in samples.items()
        },
        "bars": bars,
    }


def zeros(size: int, device: torch.device) -> Tensor:
    """Zeros, because their sums stay zeros. The memory is written, because untouched memory reads faster."""
    return torch.full((size // 4,), 0.0, device=device)


def ignite_library() -> Any:
    """pytorch-ignite's ``ignite.distributed`` in the live context, or None if it is not installed."""
    try:
        import ignite.distributed as ignite
    except ImportError:
        return None
    ignite.sync()
    return ignite
