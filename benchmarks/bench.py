"""Measure ignite_dist against raw torch.distributed, Horovod, torch_xla and pytorch-ignite, in one run.

    python benchmarks/bench.py                     # about 10 minutes
    python benchmarks/bench.py --quick             # about 2 minutes, written to *-quick files
    python benchmarks/bench.py --only all_gather   # some rows only, nothing is written
    python benchmarks/bench.py --device cuda       # the tensor rows on a GPU
    IGNITE_DIST_SHARED_MEMORY=0 python benchmarks/bench.py   # over gloo only, with the bars of gloo

The table has no rows of libraries that are not installed. A missed bar is shown as missed; the exit status is
always 0.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ignite_dist as idist
import machine
import rows_collectives
import rows_getters
import rows_horovod
import rows_launching
import rows_parts
import rows_shared_memory
import rows_training
import rows_xla
from ignite_dist.comp_models.shared_memory import opening as shared_memory
from rows import LauncherRow, RankRow, Row, evaluate, launch, measure_in_ranks, show_progress
from timing import FULL, QUICK, Effort, Samples


def rows_for(device: str) -> list[Row]:
    if device == "cuda":
        return rows_collectives.cuda_rows()
    shares_memory = not shared_memory.unavailable_reason()
    horovod = [*rows_horovod.rows(), *rows_training.horovod_rows()] if idist.has_hvd_support else []
    xla = rows_xla.rows() if idist.has_xla_support else []
    return [
        *rows_getters.rows(),
        *(rows_shared_memory.rows() if shares_memory else rows_collectives.gloo_rows()),
        *rows_collectives.rows(),
        *rows_parts.rows(),
        *rows_training.rows(),
        *rows_launching.rows(),
        *horovod,
        *xla,
    ]


def measure(rows: Sequence[Row], effort: Effort) -> dict[str, Samples]:
    """Samples by the row's title. `RankRow`s come first, with one launch for each kind of context."""
    measured: dict[str, Samples] = {}
    contexts: dict[Any, list[RankRow]] = {}
    for row in rows:
        if isinstance(row, RankRow):
            contexts.setdefault(row.context, []).append(row)
    for (backend, ranks, device), together in contexts.items():
        print(f"{ranks} ranks, {backend}, {device}", flush=True)
        results = launch(backend, ranks, measure_in_ranks, together, effort)
        measured.update({row.title: samples for row, samples in zip(together, results[0], strict=True)})
    for row in rows:
        if isinstance(row, LauncherRow):
            measured[row.title] = row.measure(effort)
            show_progress(row, measured[row.title])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, more noise")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="rows whose title matches this regular expression"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="directory for the results"
    )
    arguments = parser.parse_args()

    # Imported here because workers import this module too, but need no report.
    import report

    start = time.perf_counter()
    about = machine.describe(arguments.device)
    rows = [row for row in rows_for(arguments.device) if re.search(arguments.only, row.title)]
    if not rows:
        parser.error(f"no row matches {arguments.only!r}")
    samples = measure(rows, QUICK if arguments.quick else FULL)
    results = [evaluate(row, samples[row.title]) for row in rows]
    report.print_table(results)
    bars = [bar for result in results for bar in result["bars"]]
    print(f"{sum(bar['met'] for bar in bars)} of {len(bars)} bars met, {time.perf_counter() - start:.0f} s")
    if not arguments.only:
        name = about["tag"] + ("-quick" if arguments.quick else "")
        seconds = time.perf_counter() - start
        for path in report.write_files(arguments.out, name, about, results, seconds):
            print(os.path.relpath(path))


if __name__ == "__main__":
    main()
