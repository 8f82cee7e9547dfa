"""The benchmarks of shared memory: what they measure and what they write. The figures are not checked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT, plain_environ, run_new_python
from ignite_dist.comp_models.shared_memory import opening as shared_memory

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(shared_memory.unavailable_reason()), reason=shared_memory.unavailable_reason()),
]


def benchmark(name: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a file of ``benchmarks/``."""
    return run_new_python(ROOT / "benchmarks" / name, *arguments, env=plain_environ(**environ))


def test_bars_of_shared_memory_are_checked_only_where_it_is_used() -> None:
    rows = ("--quick", "--only", "^barrier: 2 ranks|^broadcast: tensor, 64 KB, 2 ranks")
    ended = benchmark("bench.py", *rows)
    assert ended.returncode == 0, ended.stdout
    assert "<= 0.15 x dist.barrier" in ended.stdout
    assert "<= 0.3 x dist.broadcast" in ended.stdout
    assert "of 2 bars met" in ended.stdout
    off = benchmark("bench.py", *rows, IGNITE_DIST_SHARED_MEMORY="0")
    assert off.returncode == 2 and "no row matches" in off.stdout


def test_latency_is_measured_and_drawn(tmp_path: Path) -> None:
    ended = benchmark("latency.py", "--quick", "--sizes", 4, 4096, "--out", tmp_path / "measured")
    assert ended.returncode == 0, ended.stdout
    (file,) = (tmp_path / "measured").glob("latency-*.json")
    curves = json.loads(file.read_text())["worlds"]["2"]
    assert curves.keys() == {"all_reduce", "all_gather", "broadcast"}
    for by_contender in curves.values():
        assert by_contender.keys() == {"ours", "over gloo", "raw"}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in by_contender.values())
    again = benchmark("latency.py", "--draw", file, "--out", tmp_path)
    assert again.returncode == 0, again.stdout
    assert "<svg" in (tmp_path / "latency.svg").read_text()
    assert (tmp_path / "latency.svg").read_bytes() == (tmp_path / "measured" / "latency.svg").read_bytes()


def test_latency_needs_shared_memory(tmp_path: Path) -> None:
    ended = benchmark("latency.py", "--quick", "--out", tmp_path, IGNITE_DIST_SHARED_MEMORY="0")
    assert ended.returncode == 2 and "IGNITE_DIST_SHARED_MEMORY=0" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_the_grid_has_a_row_for_each_collective() -> None:
    ended = benchmark("grid.py", "--quick", "--dtypes", "int64", "--only", "SUM int64 4 KB|^scatter .* 4 KB")
    assert ended.returncode == 0, ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines() if " KB " in line]
    assert [" ".join(words[: words.index("int64")]) for words in lines] == [
        "all_reduce SUM",
        "reduce SUM",
        "reduce_scatter SUM",
        "scatter",
    ], ended.stdout
    assert "of 4 rows" in ended.stdout
    refused = benchmark("grid.py", "--quick", "--only", "nothing")
    assert refused.returncode == 2 and "matches no row" in refused.stdout
