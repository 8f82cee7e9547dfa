"""The collectives, compared with hand-written calls of torch.distributed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ignite_dist as idist
from ignite_dist.values.message_header import HEADER_BYTES
from rows import (
    IGNITE,
    OURS,
    RAW,
    Bar,
    Contenders,
    LauncherRow,
    RankRow,
    Row,
    all_gather_raw,
    ignite_library,
    zeros,
)
from timing import Effort, Samples, memory_of

_KB, _MB = 1 << 10, 1 << 20
_SMALL = {"32 B": 32, "128 B": 128, "512 B": 512, "2 KB": 2 * _KB, "8 KB": 8 * _KB}
_LARGE = {"1 MB": _MB, "16 MB": 16 * _MB}
_TWENTY_CALLS = "20 calls"
_NO_COMPUTATION = "without the computation"
_LATE_SECONDS = 0.1
_GATHER_BARS = (Bar("ratio", 0.6, label="dist.all_gather_object"),)
_NUMBERS: dict[str, Any] = {f"metric_{i}": i * 1000 + 1 if i % 2 else i / 7 for i in range(20)}


def rows() -> list[Row]:
    """The rows of the CPU whose bars hold with and without shared memory."""
    return [*_other_tensor_rows(), *_peak_rows(), *_value_rows()]


def gloo_rows() -> list[Row]:
    """The rows of the CPU that `rows_shared_memory` replaces if the ranks share memory."""
    return [*_tensor_rows(), *_small_rows(), *_packed_rows()]


def cuda_rows() -> list[Row]:
    """The tensor rows on a GPU: gloo with two ranks on the GPU, NCCL as a world of one."""
    contexts = (("gloo", 2, "cuda"), ("nccl", 1, "cuda"))
    return [row for context in contexts for row in (*_tensor_rows(*context), *_other_tensor_rows(*context))]


def _where(backend: str, ranks: int, device: str) -> str:
    return "" if device == "cpu" else f" ({backend}, {device}, {ranks} ranks)"


def _tensor_rows(backend: str = "gloo", ranks: int = 2, device: str = "cpu") -> list[Row]:
    where = _where(backend, ranks, device)
    row = partial(RankRow, backend=backend, ranks=ranks, device=device)
    found: list[Row] = []
    for name, size in _LARGE.items():
        bars = (Bar("ratio", 1.03, label="dist.all_reduce"),)
        contenders = partial(reduce_tensor, size)
        found.append(row(f"all_reduce{where}", f"tensor, {name}", bars=bars, contenders=contenders))
    bars = (Bar("more", 3, label="dist.all_reduce"),)
    contenders = partial(reduce_tensor, 4)
    found.append(row(f"all_reduce{where}", "tensor, 4 B", bars=bars, contenders=contenders, weight=3))
    for name, size in _LARGE.items():
        for suffix, (gather, label) in GATHERS.items():
            bars = (Bar("ratio", 1.05, label=label),)
            title, contenders = f"tensor, {name} per rank{suffix}", partial(gather, size)
            found.append(row(f"all_gather{where}", title, bars=bars, contenders=contenders))
    return found


def _small_rows() -> list[Row]:
    return [
        RankRow(
            "all_reduce",
            f"tensor, {name}, {ranks} ranks",
            bars=(Bar("ratio", 0.7, label="dist.all_reduce"),),
            contenders=partial(reduce_tensor, size),
            ranks=ranks,
        )
        for name, size in _SMALL.items()
        for ranks in (2, 4)
    ]


def _packed_rows() -> list[Row]:
    return [
        RankRow(
            "all_reduce",
            "dict of 20 ints and floats",
            bars=(
                Bar("ratio", 0.2, reference=_TWENTY_CALLS, label="20 calls of our own"),
                Bar("ratio", 0.7, label="dist.all_reduce, packed by hand"),
            ),
            contenders=reduce_numbers,
        ),
        RankRow("all_gather", "small dict", bars=_GATHER_BARS, contenders=gather_dict),
    ]


def _other_tensor_rows(backend: str = "gloo", ranks: int = 2, device: str = "cpu") -> list[Row]:
    where = _where(backend, ranks, device)
    row = partial(RankRow, backend=backend, ranks=ranks, device=device)
    bars = (Bar("ratio", 1.1, label="(dist.broadcast + one of 512 B)"),)
    contenders = _safe_broadcast
    found: list[Row] = [
        row(f"broadcast(safe_mode){where}", "tensor, 16 MB", bars=bars, contenders=contenders, slow=(IGNITE,))
    ]
    if ranks > 1:
        bars = (Bar("more", 5, label="dist.all_reduce, group ready"),)
        group = f"all_reduce(group=[0, 1]){where}"
        found.append(row(group, "tensor, 4 B", bars=bars, contenders=_group_reduce, slow=(IGNITE,), weight=3))
        bars = (Bar("ratio", 1.15, reference=_NO_COMPUTATION, label="the same without the computation"),)
        found.append(
            row(
                f"all_reduce(async_op=True){where}",
                "16 MB from a rank that is 100 ms late, and 100 ms of computation",
                bars=bars,
                contenders=_with_computation,
            )
        )
    return found


def _value_rows() -> list[Row]:
    return [
        RankRow(
            "all_reduce",
            "one number",
            bars=(Bar("ratio", 1.2, label=f"all_gather_into_tensor of {HEADER_BYTES} B"),),
            contenders=_number,
            weight=2,
        ),
        RankRow(
            "all_gather", "short string", bars=_GATHER_BARS, contenders=partial(_gather_object, "rank näme")
        ),
    ]


# --- tensors -----------------------------------------------------------------------------------------


def reduce_tensor(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    contenders: Contenders = {
        OURS: lambda: idist.all_reduce(tensor),
        RAW: lambda: dist.all_reduce(tensor),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_reduce(tensor)
    return contenders


def reduce_under_way(count: int, size: int, device: torch.device) -> Contenders:
    """``count`` asynchronous calls, and then their waits."""
    tensors = [zeros(size, device) for _ in range(count)]

    def reduce(all_reduce: Callable[..., Any]) -> None:
        for work in [all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return {OURS: partial(reduce, idist.all_reduce), RAW: partial(reduce, dist.all_reduce)}


def _with_computation(device: torch.device) -> Contenders:
    """Rank 1 is late; this simulates a long transfer without CPU time. Rank 0 computes in the meantime.

    With as many ranks as cores, a real transfer of gloo would take a core from the computation, so the row
    would show no overlap.
    """
    tensor = zeros(16 * _MB, device)
    matrix = torch.ones(128, 128, device=device)
    start = time.perf_counter()
    num_products = 0
    while time.perf_counter() - start < _LATE_SECONDS:
        matrix @ matrix
        num_products += 1
    is_late = idist.get_rank() == 1

    def reduce(computes: bool) -> None:
        if is_late:
            time.sleep(_LATE_SECONDS)
        work = idist.all_reduce(tensor, async_op=True)
        for _ in range(num_products if computes and not is_late else 0):
            matrix @ matrix
        work.wait()

    return {OURS: partial(reduce, computes=True), _NO_COMPUTATION: partial(reduce, computes=False)}


def gather_tensor(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    length = dist.get_world_size() * len(tensor)
    contenders: Contenders = {
        OURS: lambda: idist.all_gather(tensor),
        RAW: lambda: all_gather_raw(torch.empty(length, device=device), tensor),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_gather(tensor)
    return contenders


def gather_into(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    out = zeros(size * dist.get_world_size(), device)
    return {
        OURS: lambda: idist.all_gather(tensor, out=out),
        RAW: lambda: all_gather_raw(out, tensor),
    }


GATHERS: dict[str, tuple[Callable[..., Contenders], str]] = {
    "": (gather_tensor, "(torch.empty + all_gather_into_tensor)"),
    ", out=": (gather_into, "all_gather_into_tensor, reused buffer"),
}
"""The ways to gather tensors, and the reference of each."""


def _safe_broadcast(device: torch.device) -> Contenders:
    tensor, small = zeros(16 * _MB, device), zeros(512, device)

    def raw() -> None:
        dist.broadcast(small, 0)
        dist.broadcast(tensor, 0)

    contenders: Contenders = {OURS: lambda: idist.broadcast(tensor, src=0, safe_mode=True), RAW: raw}
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.broadcast(tensor, src=0, safe_mode=True)
    return contenders


def _group_reduce(device: torch.device) -> Contenders:
    tensor, group = zeros(4, device), dist.new_group([0, 1])
    contenders: Contenders = {
        OURS: lambda: idist.all_reduce(tensor, group=[0, 1]),
        RAW: lambda: dist.all_reduce(tensor, group=group),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_reduce(tensor, group=[0, 1])
    return contenders


# --- numbers and objects -----------------------------------------------------------------------------


def _number(device: torch.device) -> Contenders:
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    headers = torch.zeros(dist.get_world_size() * HEADER_BYTES, dtype=torch.uint8)
    contenders: Contenders = {
        OURS: lambda: idist.all_reduce(1.5),
        RAW: lambda: all_gather_raw(headers, header),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_reduce(1.5)
    return contenders


def reduce_numbers(device: torch.device) -> Contenders:
    values = list(_NUMBERS.values())

    def packed_by_hand() -> dict[str, float]:
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return dict(zip(_NUMBERS, packed.tolist(), strict=True))

    contenders: Contenders = {
        OURS: lambda: idist.all_reduce(_NUMBERS),
        RAW: packed_by_hand,
        _TWENTY_CALLS: lambda: [idist.all_reduce(value) for value in values],
    }
    ignite = ignite_library()
    if ignite is not None:  # ignite takes no dict
        contenders[IGNITE] = lambda: [ignite.all_reduce(value) for value in values]
    return contenders


def gather_dict(device: torch.device) -> Contenders:
    return _gather_object({"loss": 0.5, "n": 3}, device)


def _gather_object(value: Any, device: torch.device) -> Contenders:
    received = [None] * dist.get_world_size()
    contenders: Contenders = {
        OURS: lambda: idist.all_gather(value),
        RAW: lambda: dist.all_gather_object(received, value),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_gather(value)
    return contenders


# --- memory ------------------------------------------------------------------------------------------


def _peak_rows() -> list[Row]:
    # A second copy of the output makes the figure 2. gloo's own all-gather has such a copy: see raw's figure.
    bars = (Bar("value", 1.1),)
    return [
        LauncherRow(
            "all_gather", "peak memory / size of the output, 32 MB per rank", "x", bars, measure=_peaks
        )
    ]


def _peaks(effort: Effort) -> Samples:
    samples: Samples = {}
    for _ in range(effort.repeats):
        for name in (OURS, RAW, IGNITE):
            peaks = idist.spawn("gloo", _peak, args=(name, 32 * _MB), nproc_per_node=2)
            if None not in peaks:
                samples.setdefault(name, []).append(statistics.mean(peaks))
    return samples


def _peak(local_rank: int, name: str, size: int) -> float | None:
    """Peak growth of a new worker's memory during a gather, as a multiple of the output's size."""
    contenders = gather_tensor(_KB, torch.device("cpu"))
    if name not in contenders:
        return None
    contenders[name]()  # the first call includes one-time set-up
    gather = gather_tensor(size, torch.device("cpu"))[name]
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the kernel's peak memory of this process
    before = memory_of("VmRSS")
    gather()
    return (memory_of("VmHWM") - before) / (size * dist.get_world_size())
