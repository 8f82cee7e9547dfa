"""The collectives, compared with hand-written calls of torch.distributed."""

from __future__ import annotations

import statistics
import time
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
_NUMBERS: dict[str, Any] = {f"metric_{i}": i * 1000 + 1 if i % 2 else i / 7 for i in range(20)}


def rows() -> list[Row]:
    return [*tensor_rows(), *_peak_rows(), *_value_rows()]


def cuda_rows() -> list[Row]:
    """The tensor rows on a GPU: gloo with two ranks on the GPU, NCCL as a world of one."""
    return [*tensor_rows(device="cuda"), *tensor_rows(backend="nccl", ranks=1, device="cuda")]


def tensor_rows(backend: str = "gloo", ranks: int = 2, device: str = "cpu") -> list[Row]:
    where = "" if device == "cpu" else f" ({backend}, {device}, {ranks} ranks)"
    row = partial(RankRow, backend=backend, ranks=ranks, device=device)
    reduce_, gather, group, safe = (
        f"{call}{where}"
        for call in ("all_reduce", "all_gather", "all_reduce(group=[0, 1])", "broadcast(safe_mode)")
    )
    found: list[Row] = []
    for name, size in _LARGE.items():
        bars = (Bar("ratio", 1.03, label="dist.all_reduce"),)
        found.append(row(reduce_, f"tensor, {name}", bars=bars, contenders=partial(_all_reduce, size)))
    bars = (Bar("more", 3, label="dist.all_reduce"),)
    found.append(row(reduce_, "tensor, 4 B", bars=bars, contenders=partial(_all_reduce, 4), weight=3))
    if backend == "gloo" and device == "cpu":
        for size_name, size in _SMALL.items():
            for count in (2, 4):
                bars = (Bar("ratio", 0.7, label="dist.all_reduce"),)
                name = f"tensor, {size_name}, {count} ranks"
                found.append(
                    RankRow(reduce_, name, bars=bars, contenders=partial(_all_reduce, size), ranks=count)
                )
    for name, size in _LARGE.items():
        bars = (Bar("ratio", 1.05, label="(torch.empty + all_gather_into_tensor)"),)
        found.append(
            row(gather, f"tensor, {name} per rank", bars=bars, contenders=partial(_all_gather, size))
        )
        bars = (Bar("ratio", 1.05, label="all_gather_into_tensor, reused buffer"),)
        found.append(
            row(gather, f"tensor, {name} per rank, out=", bars=bars, contenders=partial(_gather_into, size))
        )
    bars = (Bar("ratio", 1.1, label="(dist.broadcast + one of 512 B)"),)
    found.append(row(safe, "tensor, 16 MB", bars=bars, contenders=_safe_broadcast, slow=(IGNITE,)))
    if ranks > 1:
        bars = (Bar("more", 5, label="dist.all_reduce, group ready"),)
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
    gather_bars = (Bar("ratio", 0.6, label="dist.all_gather_object"),)
    return [
        RankRow(
            "all_reduce",
            "one number",
            bars=(Bar("ratio", 1.2, label=f"all_gather_into_tensor of {HEADER_BYTES} B"),),
            contenders=_number,
            weight=2,
        ),
        RankRow(
            "all_reduce",
            "dict of 20 ints and floats",
            bars=(
                Bar("ratio", 0.2, reference=_TWENTY_CALLS, label="20 calls of our own"),
                Bar("ratio", 0.7, label="dist.all_reduce, packed by hand"),
            ),
            contenders=_numbers,
        ),
        RankRow(
            "all_gather", "short string", bars=gather_bars, contenders=partial(_gather_object, "rank näme")
        ),
        RankRow(
            "all_gather",
            "small dict",
            bars=gather_bars,
            contenders=partial(_gather_object, {"loss": 0.5, "n": 3}),
        ),
    ]


# --- tensors -----------------------------------------------------------------------------------------


def _all_reduce(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    contenders: Contenders = {
        OURS: lambda: idist.all_reduce(tensor),
        RAW: lambda: dist.all_reduce(tensor),
    }
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = lambda: ignite.all_reduce(tensor)
    return contenders


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


def _all_gather(size: int, device: torch.device) -> Contenders:
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


def _gather_into(size: int, device: torch.device) -> Contenders:
    tensor = zeros(size, device)
    out = zeros(size * dist.get_world_size(), device)
    return {
        OURS: lambda: idist.all_gather(tensor, out=out),
        RAW: lambda: all_gather_raw(out, tensor),
    }


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


def _numbers(device: torch.device) -> Contenders:
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
    contenders = _all_gather(_KB, torch.device("cpu"))
    if name not in contenders:
        return None
    contenders[name]()  # the first call includes one-time set-up
    gather = _all_gather(size, torch.device("cpu"))[name]
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the kernel's peak memory of this process
    before = memory_of("VmRSS")
    gather()
    return (memory_of("VmHWM") - before) / (size * dist.get_world_size())
