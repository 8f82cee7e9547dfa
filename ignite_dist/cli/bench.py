"""``bench``: latency and bandwidth of collectives, compared with raw torch.distributed.

The definitions of time and bandwidth are the same as in NVIDIA's nccl-tests:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import ignite_dist as idist
from ignite_dist.cli.jobs import Steps
from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import did_you_mean

_WITHOUT_SIZES = ("barrier", "numbers", "objects")
# Their sizes are those of the rows of all ranks, as in nccl-tests.
_BY_ROWS = ("all_gather", "reduce_scatter", "all_to_all")
_BY_DEFAULT = ("all_reduce", "all_gather", "broadcast", *_WITHOUT_SIZES)
COLLECTIVES = (*_BY_DEFAULT, "reduce_scatter", "all_to_all")
"""``numbers`` is an all_reduce of a dict of 20 numbers, ``objects`` an all_gather of a small dict."""

# Time for our calls and the raw calls of one collective at one size. Slow calls take longer (_MIN_ROUNDS).
_ROW_SECONDS = 0.3
# A measurement ends after this time if calls have become slower than those that set their number.
_LONGEST_ROW_SECONDS = 1.0
_MIN_ROUNDS, _ROUNDS, _MAX_CALLS = 3, 25, 100
_NUMBERS: dict[str, Any] = {f"metric {i}": i / 7 for i in range(20)}
_OBJECT = {"loss": 0.5, "n": 3}
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# --- arguments ---------------------------------------------------------------------------------------


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in bytes of ``"4:64M"`` (factor 2), ``"4:64M:4"`` or ``"4,1K,16M"``.

    Raises:
        ValueError: ``text`` has another form.
    """
    if ":" not in text:
        return tuple(map(_parse_size, text.split(",")))
    first, last, *more = text.split(":")
    factor = more[0] if more else "2"
    if len(more) > 1 or not factor.isdecimal() or int(factor) < 2:
        raise ValueError(
            f"--sizes must be from:to or from:to:factor, with a factor of at least 2; got {text!r}."
        )
    size, end = _parse_size(first), _parse_size(last)
    if size > end:
        raise ValueError(f"--sizes must go from the smallest to the largest, got {text!r}.")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= int(factor)
    return tuple(sizes)


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([BKMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 4 <= size <= 1 << 36:
        raise ValueError(
            "--sizes must be numbers of bytes, at least 4 and at most 64G. K, M and G are powers of 1024, as "
            f"in 4:64M or 4,1K,16M; got {text!r}."
        )
    return size


def parse_collectives(text: str) -> tuple[str, ...]:
    """The names in ``"all_reduce,barrier"``; the most used collectives if ``text`` is empty.

    Raises:
        ValueError: a name is not one of :data:`COLLECTIVES`.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in COLLECTIVES:
            raise ValueError(
                f"--collectives: unknown {name!r}. Allowed: {', '.join(COLLECTIVES)}."
                f"{did_you_mean(name, COLLECTIVES)}"
            )
    return tuple(names) or _BY_DEFAULT


# --- measurements ------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """One collective at one size. A time is the median over the rounds, averaged over the ranks.

    Attributes:
        collective: one of :data:`COLLECTIVES`.
        num_bytes: S of nccl-tests: the size of each rank's tensor; of the rows of all ranks for all_gather,
            reduce_scatter and all_to_all. 0 for collectives without sizes.
        seconds: the time of our call.
        raw_seconds: the time of torch.distributed's call; None if the backend is not torch's.
        bus_bytes: the bytes that a call moves over the busiest link. Bus bandwidth is bus_bytes / seconds.
    """

    collective: str
    num_bytes: int
    seconds: float
    raw_seconds: float | None
    bus_bytes: float


class BenchReport(NamedTuple):
    """The results of ``bench``. ``shared_memory``: True if our calls used it."""

    backend: str
    device: str
    dtype: str
    shared_memory: bool
    world_size: int
    hosts: list[str]
    figures: list[Figure]

    @property
    def exit_status(self) -> int:
        """Always 0: a slow result is not a failure."""
        return 0


def bus_bytes(collective: str, num_bytes: int, world_size: int) -> float:
    """``num_bytes`` times the factor of nccl-tests between algorithm bandwidth and bus bandwidth."""
    share = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, **dict.fromkeys(_BY_ROWS, share)}
    return num_bytes * factor.get(collective, 0.0)


@dataclass(frozen=True)
class Bench:
    """Measures ``collectives`` at ``sizes``, with tensors of ``dtype``."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Each collective with each of its sizes."""
        return [
            (collective, size)
            for collective in self.collectives
            for size in ((0,) if collective in _WITHOUT_SIZES else self.sizes)
        ]

    @property
    def announcement(self) -> str:
        """Message with the number of measurements and their duration."""
        count = len(self.rows)
        seconds = f"{count * _ROW_SECONDS:.0f} s, longer if calls are slow"
        return f"{count} measurement{'s' * (count > 1)} of {_ROW_SECONDS} s each: {seconds}."

    def __call__(self, steps: Steps) -> BenchReport:
        """Measure. Every rank must call this. Returns the same report on every rank."""
        figures = []
        for collective, size in self.rows:
            with steps.step(f"{collective} of {size} bytes"):
                figures.append(_figure(collective, size, getattr(torch, self.dtype)))
                _show_progress(len(figures), len(self.rows))
        model, device = current_model(), idist.device().type
        return BenchReport(
            backend=str(idist.backend()),
            device=device,
            dtype=self.dtype,
            shared_memory=device == "cpu" and bool(model.transport.shares_memory(model.groups.world)),
            world_size=idist.get_world_size(),
            hosts=steps.hosts,
            figures=figures,
        )


def _show_progress(done: int, total: int) -> None:
    if idist.get_rank() == 0 and sys.stderr.isatty():
        sys.stderr.write(f"\r{done}/{total}" if done < total else f"\r{' ' * 12}\r")
        sys.stderr.flush()


def _figure(collective: str, num_bytes: int, dtype: torch.dtype) -> Figure:
    world_size = idist.get_world_size()
    num_rows = world_size if collective in _BY_ROWS else 1
    row_bytes = dtype.itemsize * num_rows
    numel = max(1, num_bytes // row_bytes)  # rounded down to whole numbers per rank, as in nccl-tests
    num_bytes = 0 if collective in _WITHOUT_SIZES else numel * row_bytes
    tensor = torch.zeros(numel, dtype=dtype, device=idist.device())
    calls = _calls(collective, tensor, tensor.new_zeros(numel * num_rows) if num_rows > 1 else tensor)
    medians = [statistics.median(samples) for samples in _time_in_turn(calls, tensor)]
    seconds, *raw = idist.all_reduce(medians, "AVERAGE")
    return Figure(
        collective, num_bytes, seconds, raw[0] if raw else None, bus_bytes(collective, num_bytes, world_size)
    )


def _calls(collective: str, tensor: Tensor, rows: Tensor) -> list[Callable[[], Any]]:
    """The call of this package, and the call of torch.distributed if the backend is torch's.

    ``rows`` has the shape of ``tensor`` for each rank, if the collective is one of rows.
    """
    received = torch.empty_like(rows) if collective == "all_to_all" else rows
    ours: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: idist.all_reduce(tensor),
        "all_gather": lambda: idist.all_gather(tensor, out=rows),
        "reduce_scatter": lambda: idist.reduce_scatter(rows, out=tensor),
        "all_to_all": lambda: idist.all_to_all(rows, out=received),
        "broadcast": lambda: idist.broadcast(tensor),
        "barrier": lambda: idist.barrier(),
        "numbers": lambda: idist.all_reduce(_NUMBERS),
        "objects": lambda: idist.all_gather(_OBJECT),
    }
    # The names in newer torch.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    raw: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: gather(rows, tensor),
        "reduce_scatter": lambda: scatter(tensor, rows),
        "all_to_all": lambda: dist.all_to_all_single(received, rows),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "barrier": lambda: dist.barrier(),
        "numbers": lambda: _reduce_packed(tensor.device),
        "objects": lambda: dist.all_gather_object([None] * idist.get_world_size(), _OBJECT),
    }
    is_torch = isinstance(idist.world_group(), ProcessGroup)
    return [ours[collective], raw[collective]] if is_torch else [ours[collective]]


def _reduce_packed(device: torch.device) -> dict[str, float]:
    """``_NUMBERS``, reduced as in a script that packs them by hand."""
    packed = torch.tensor(list(_NUMBERS.values()), dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(_NUMBERS, packed.tolist(), strict=True))


def _time_in_turn(calls: Sequence[Callable[[], Any]], tensor: Tensor) -> list[list[float]]:
    """Samples of seconds per call, for each of ``calls``. Calls alternate, so noise affects all equally."""
    # All ranks must make the same number of calls. The number depends on the duration of a call, so all ranks
    # use the longest duration of any rank. The first block opens connections and fills caches.
    first = idist.all_reduce(max(_block(call, 2, tensor) for call in calls), "MAX")
    num_probes = 3 if first < 0.01 else 1
    slowest: float = idist.all_reduce(max(_block(call, num_probes, tensor) for call in calls), "MAX")
    num_calls = int(_ROW_SECONDS / (slowest * len(calls)))
    rounds = max(_MIN_ROUNDS, min(_ROUNDS, num_calls))
    calls_per_block = max(1, min(_MAX_CALLS, num_calls // rounds))
    samples: list[list[float]] = [[] for _ in calls]
    started = time.perf_counter()
    for position in range(rounds):
        order = list(zip(samples, calls, strict=True))
        for times, call in order if position % 2 else reversed(order):
            times.append(_block(call, calls_per_block, tensor))
        seconds: float = idist.all_reduce(time.perf_counter() - started, "MAX")
        if seconds > _LONGEST_ROW_SECONDS and position + 1 >= _MIN_ROUNDS:
            break
    return samples


def _block(call: Callable[[], Any], num_calls: int, tensor: Tensor) -> float:
    """Seconds per call, over ``num_calls`` calls."""
    idist.barrier()
    call()  # ranks leave a barrier at different times; this call synchronizes them again
    _synchronize(tensor)
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    _synchronize(tensor)
    return (time.perf_counter() - started) / num_calls


def _synchronize(tensor: Tensor) -> None:
    """Wait until the device of ``tensor`` has finished its work."""
    if tensor.device.type != "cpu":
        tensor[0].item()
