"""The tables and scripts of docs/coming_from: both columns of every line run, with the same results."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import helpers
from coming_from import FOLDER, WORKERS, Result, differences, imports, run_page, run_script, tables
from pages import blocks

pytestmark = pytest.mark.long

ALWAYS = ["ignite.md", "torch.md"]
WITH_LAUNCHERS = ["accelerate.md", "fabric.md"]
INSTALLED = [*ALWAYS, *(pytest.param(page, marks=pytest.mark.launchers) for page in WITH_LAUNCHERS)]
both_sizes = pytest.mark.parametrize("world_size", [1, 2])


def results(page: str, column: str, world_size: int, folder: Path) -> list[dict[str, list[Result]]]:
    """For each rank, by title of a table: the results of its lines, in order."""
    (folder / column).mkdir()
    return helpers.run_ranks(run_page, page, column, folder / column, world_size, world_size=world_size)


@both_sizes
@pytest.mark.parametrize("page", INSTALLED)
def test_both_lines_give_the_same(page: str, world_size: int, tmp_path: Path) -> None:
    theirs, ours = (results(page, column, world_size, tmp_path) for column in ("theirs", "ours"))
    for one, other in zip(theirs, ours, strict=True):
        for title in other:
            assert not differences(tables(page)[title], one[title], other[title])


@contextmanager
def one_at_a_time(page: str) -> Iterator[None]:
    """Hold a lock that the other processes of this run take too: Ignite's workers meet at port 2222."""
    with (Path(tempfile.gettempdir()) / f"ignite_dist-{os.getuid()}-{page}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@both_sizes
@pytest.mark.parametrize(
    ("page", "column"),
    [
        *((page, column) for page in ALWAYS for column in ("theirs", "ours")),
        *((page, "ours") for page in WITH_LAUNCHERS),
        *(pytest.param(page, "theirs", marks=pytest.mark.launchers) for page in WITH_LAUNCHERS),
    ],
)
def test_each_line_starts_workers(page: str, column: str, world_size: int) -> None:
    for row in tables(page)[WORKERS]:
        code = f"{imports(page, column)}\nn = {world_size}\n{getattr(row, column)}"
        with one_at_a_time(page) if column == "theirs" else nullcontext():
            ended = helpers.run_python("-c", code, env=helpers.plain_environ(ACCELERATE_USE_CPU="true"))
        lines = sorted(re.findall(r"^\d? ?of \d$", ended.stdout, re.MULTILINE))
        assert ended.returncode == 0 and len(lines) == world_size, ended.stdout


@both_sizes
@pytest.mark.parametrize(
    "page", ["torch.md", *(pytest.param(page, marks=pytest.mark.launchers) for page in WITH_LAUNCHERS)]
)
def test_the_scripts_print_the_same(page: str, world_size: int, tmp_path: Path) -> None:
    scripts = {block.title: block.text for block in blocks((FOLDER / page).read_text(encoding="utf-8"))}
    before, after = (
        helpers.run_ranks(run_script, scripts[name], tmp_path, world_size=world_size)
        for name in ("before.py", "after.py")
    )
    assert before == after and before[0].count("epoch") == 2
    assert not any(before[1:])


# --- complete ------------------------------------------------------------------------------------------


def test_every_function_of_ignite_is_in_a_line() -> None:
    ended = helpers.run_python("-c", "import ignite.distributed as idist; print(*idist.utils.__all__)")
    assert ended.returncode == 0, ended.stdout
    lines = "\n".join(row.theirs for rows in tables("ignite.md").values() for row in rows)
    names = {
        *ended.stdout.splitlines()[-1].split(),
        "Parallel",
        "auto_model",
        "auto_optim",
        "auto_dataloader",
    }
    names -= {"has_xla_support"}  # raises AttributeError where torch_xla is newer than Ignite
    assert names <= set(re.findall(r"\bidist\.(?:auto\.)?(\w+)", lines))


# The public functions of mmengine.dist 0.10.
MMENGINE = """
    all_gather_object all_reduce all_gather all_reduce_dict collect_results collect_results_cpu
    collect_results_gpu gather broadcast gather_object sync_random_seed broadcast_object_list get_dist_info
    init_dist init_local_group get_backend get_world_size get_rank get_local_size get_local_group
    get_local_rank is_main_process master_only barrier is_distributed get_default_group allreduce_params
"""


def test_every_function_of_mmengine_is_in_a_line() -> None:
    lines = [row.theirs for rows in tables("mmengine.md").values() for row in rows]
    assert sorted(line.partition("(")[0] for line in lines) == sorted(MMENGINE.split())


@both_sizes
def test_our_lines_for_mmengine_give_what_they_say(world_size: int, tmp_path: Path) -> None:
    """Its library is not installed anywhere, so their values stand here."""
    names = [row.theirs.partition("(")[0] for row in tables("mmengine.md")["Functions"]]
    total = float(sum(range(world_size)))
    everywhere = {
        "all_gather": [[1.0, float(other)] for other in range(world_size)],
        "broadcast": [1.0, 0.0],
        "all_reduce": [float(world_size), 0.0],  # of what broadcast has left
        "all_reduce_dict": {"loss": float(world_size)},
        "broadcast_object_list": ["of rank", 0],
        "collect_results": [0, 1, 2, 3, 4],
        "collect_results_cpu": [0, 1, 2, 3, 4],
        "collect_results_gpu": [0, 1, 2, 3, 4],
        "allreduce_params": [[float(world_size)] * 2, [total] * 3],
        "init_local_group": list(range(world_size)),
        "get_local_group": list(range(world_size)),
        "get_local_size": world_size,
        "get_world_size": world_size,
        "get_backend": "gloo",
        "is_distributed": world_size > 1,
    }
    for rank, by_title in enumerate(results("mmengine.md", "ours", world_size, tmp_path)):
        found = {name: line.value for name, line in zip(names, by_title["Functions"], strict=True)}
        assert {name: found[name] for name in everywhere} == everywhere
        assert found["get_dist_info"] == [rank, world_size]
        assert found["get_rank"] == found["get_local_rank"] == rank
        assert found["is_main_process"] is (rank == 0)
        assert found["master_only"] == (None if rank else "called")
        assert len(found["all_gather_object"]) == world_size
        assert (found["gather"] is None) == (found["gather_object"] is None) == (rank > 0)
