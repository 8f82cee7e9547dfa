"""What a row of the benchmark is: contenders, and bars that our own one should clear.

A new backend brings rows, not code: a `RankRow` where ranks call collectives, a `LauncherRow` where the
measurement starts processes of its own.
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
from timing import Effort, Party, Samples, summarize, time_in_turn

OURS, RAW, IGNITE = "ours", "raw", "ignite"

_SCALES = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "MB": 1e-6, "x": 1.0}

SIZES = {"4 B": 4, "1 MB": 1 << 20, "16 MB": 16 << 20}

Contenders = dict[str, Callable[[], Any]]

# The name of all_gather_into_tensor since torch 2.13.
all_gather_raw = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Bar:
    """What our own contender has to reach.

    Attributes:
        kind: "ratio" (ours / reference), "more" (ours - reference) or "value" (ours).
        limit: the largest figure that clears it; of "more" and "value" in the row's unit.
        reference: the contender that it is measured against.
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
        """The figure of every round: paired with what the reference took in the same round."""
        ours = samples[OURS]
        if self.kind == "value":
            return [value * scale for value in ours]
        pairs = zip(ours, samples[self.reference], strict=False)
        if self.kind == "ratio":
            return [mine / other for mine, other in pairs]
        return [(mine - other) * scale for mine, other in pairs]

    def format(self, figure: float, unit: str) -> str:
        if self.kind == "ratio":
            return f"{figure:.2f} x" if figure >= 0.1 else f"{figure:.3f} x"
        return f"{figure:+.3g} {unit}" if self.kind == "more" else f"{figure:.3g} {unit}"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        section: what it is about.
        name: what is called, and on what.
        unit: of times "ns", "us", "ms" or "s"; "MB" of memory; "x" of plain numbers.
        bars: none for what is only shown.
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
    """Measured from this process, in processes that the measurement starts itself.

    Attributes:
        measure: the samples, in seconds (bytes, if the unit is "MB").
    """

    measure: Callable[[Effort], Samples] = lambda effort: {}


@dataclass(frozen=True, kw_only=True)
class RankRow(Row):
    """Measured in the ranks of a context; all rows of one kind of context share its launch.

    Attributes:
        contenders: called in every rank with the device; what is timed, by contender.
        ranks: how many.
        backend: of the context.
        device: type of the tensors' device.
        slow: contenders that take so long that a few calls have to do.
        weight: share of time; more for a small difference between large numbers.
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
    """What ``function(local_rank, *arguments)`` returns in the ranks of a context of their own."""
    options = {"timeout": timedelta(minutes=2)} if backend in ("gloo", "nccl") else {}
    if backend == "xla-tpu":
        # PJRT wants to be told. A collective of one replica would wait for a second device, if there was one.
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(ranks))
    return idist.spawn(backend, function, args=arguments, nproc_per_node=ranks, **options)


def measure_in_ranks(local_rank: int, rows: list[RankRow], effort: Effort) -> list[Samples]:
    """Run in every rank of a context: the samples of each row; rank 0's are the ones to look at."""
    torch.set_num_threads(1)
    device = torch.device(rows[0].device)
    party = party_of_ranks(device)
    measured = []
    for row in rows:
        samples = time_in_turn(row.contenders(device), effort, party, row.slow, row.weight)
        if idist.get_rank() == 0:
            show_progress(row, samples)
        measured.append(samples)
    return measured


def party_of_ranks(device: torch.device) -> Party:
    synchronize = synchronizer(device)
    if dist.is_initialized():
        return Party(_from_rank_0, dist.barrier, synchronize)
    return Party(partial(idist.broadcast, safe_mode=True), idist.barrier, synchronize)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What returns when this rank's device has done what it was given."""
    if device.type == "cuda":
        return torch.cuda.synchronize
    if device.type == "xla":
        from torch_xla.core import xla_model as xm

        # The default is all devices of the process, and who waits for another replica's keeps it from work.
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
    """The row as it is written to the JSON file."""
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
    """Zeros stay zeros however often they are added up; written once, as untouched memory reads faster."""
    return torch.full((size // 4,), 0.0, device=device)


def ignite_library() -> Any:
    """pytorch-ignite's ``ignite.distributed`` in the context that is there already, or None without it."""
    try:
        import ignite.distributed as ignite
    except ImportError:
        return None
    ignite.sync()
    return ignite
