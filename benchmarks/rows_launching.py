"""Start-up: the import, and launches of workers. All rows run in fresh processes."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import fresh
from rows import IGNITE, OURS, RAW, TORCHRUN, Bar, LauncherRow, Row
from timing import QUICK, Effort, Samples


def rows() -> list[Row]:
    return [
        LauncherRow("import", "after torch", "ms", (Bar("value", 40),), measure=_imports),
        LauncherRow(
            "spawn of 4 workers to a first barrier",
            "first launch of a process",
            "s",
            (Bar("value", 1.5),),
            measure=partial(_launch_of_four, is_later=False),
        ),
        LauncherRow(
            "spawn of 4 workers to a first barrier",
            "later launches",
            "s",
            (Bar("value", 0.3),),
            measure=partial(_launch_of_four, is_later=True),
        ),
        *(
            LauncherRow(
                "spawn of 2 workers to the end of a first DDP step",
                name,
                "s",
                (
                    Bar("ratio", limit, label="mp.spawn"),
                    Bar("ratio", limit, reference=TORCHRUN, label="torchrun"),
                ),
                measure=partial(_launch_with_step, position),
            )
            for position, (name, limit) in enumerate(
                {"first launch of a process": 0.8, "second launch, 2 s after the first": 0.2}.items()
            )
        ),
        *(
            LauncherRow(
                "spawn",
                f"{workers} workers to a first barrier",
                "s",
                measure=partial(_curve, workers, "seconds"),
            )
            for workers in QUICK.workers
        ),
        *(
            LauncherRow(
                "spawn",
                f"memory per worker, {workers} workers ({field})",
                "MB",
                measure=partial(_curve, workers, field),
            )
            for field in ("PSS", "USS")
            for workers in QUICK.workers
        ),
    ]


def _imports(effort: Effort) -> Samples:
    samples: Samples = {}
    for _ in range(effort.repeats):
        for contender, library in fresh.libraries():
            samples.setdefault(contender, []).append(fresh.run("import", library))
    return samples


def _launch_of_four(effort: Effort, is_later: bool) -> Samples:
    samples: Samples = {}
    for contender, launches in _launches_of_four(effort.repeats).items():
        samples[contender] = [
            launch["seconds"]
            for process_launches in launches
            for launch in (process_launches[1:] if is_later else process_launches[:1])
        ]
    return samples


@cache
def _launches_of_four(repeats: int) -> dict[str, list[list[dict[str, Any]]]]:
    launches: dict[str, list[list[dict[str, Any]]]] = {}
    for _ in range(max(1, repeats // 2)):
        for contender, library in fresh.libraries():
            # pytorch-ignite keeps nothing between launches, so two launches are enough.
            counts = [4] * (2 if contender == IGNITE else 5)
            launches.setdefault(contender, []).append(fresh.run("launches", library, *counts))
    return launches


def _launch_with_step(position: int, effort: Effort) -> Samples:
    return {
        contender: [seconds[position] for seconds in processes]
        for contender, processes in _launches_with_step(effort.repeats).items()
    }


@cache
def _launches_with_step(repeats: int) -> dict[str, list[list[float]]]:
    """Seconds of two launches, for each contender and process."""
    launches: dict[str, list[list[float]]] = {}
    for _ in range(repeats):
        raw = [(RAW, "torch.multiprocessing"), (TORCHRUN, "torch.distributed.run")]
        for contender, library in [*fresh.libraries(), *raw]:
            launches.setdefault(contender, []).append(fresh.run("steps", library))
    return launches


def _curve(workers: int, field: str, effort: Effort) -> Samples:
    return {
        contender: [launch[field] for launch in launches if launch["workers"] == workers]
        for contender, launches in _launches(effort).items()
        if any(launch["workers"] == workers for launch in launches)
    }


@cache
def _launches(effort: Effort) -> dict[str, list[dict[str, Any]]]:
    """Launches of all sizes, one process per contender. The first launch starts the fork server."""
    launches: dict[str, list[dict[str, Any]]] = {}
    for contender, library in fresh.libraries():
        counts = effort.workers if contender == OURS else effort.ignite_workers
        repeats = max(1, effort.repeats // 2) if contender == OURS else 1
        launches[contender] = fresh.run("launches", library, 2, *(list(counts) * repeats))[1:]
    return launches
