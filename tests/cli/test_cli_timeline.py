"""``ignite-dist run --timeline`` and ``ignite-dist timeline``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ignite_dist as idist
from command_line import run_here
from commands import at_a_shell, blocks, documented
from helpers import ROOT, free_port, plain_environ, run_python, write_script

PAGE = (ROOT / "docs" / "timeline.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_example_of_the_page(tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks(PAGE) if block.title == "train.py")
    folder = tmp_path / "code"  # a line has the name of its file's folder
    folder.mkdir()
    (folder / "train.py").write_text(script)
    command = documented("ignite-dist run --nproc-per-node 3 --timeline trace.json train.py")
    ended = at_a_shell(command, folder, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.errors
    ended = at_a_shell(documented("ignite-dist timeline trace.json --save picture.png"), folder)
    assert ended.returncode == 0, ended.errors
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(\S+\) +13 .* rank 2: ", ended.output), ended.output
    assert re.search(r"rank 2 \(\S+\) +7 ", ended.output), ended.output
    longest = next(line for line in ended.output.splitlines() if "train.py" in line)
    assert re.search(r"code/train.py:12 all_reduce +18 .* rank 2: ", longest), ended.output
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    labels = re.findall(r"code/train\.py:\d+ \w+", ended.output)
    assert len(labels) == 3 and all(label in PAGE for label in labels)  # the page shows the same lines


def test_the_figures_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with idist.record_timeline(tmp_path / "trace.json", max_calls=2):
        for _ in range(3):
            idist.all_reduce(1.0)
    status, output, _ = run_here(capfd, "timeline", tmp_path / "trace.json", "--json")
    figures = json.loads(output)
    assert status == 0
    (rank,) = figures["ranks"].values()
    (line,) = figures["lines"].values()
    assert rank == line and rank["calls"] == 2 and rank["waiting_us"] == 0 and rank["working_us"] > 0
    assert figures["notes"] == {"calls of rank 0": "the last 1 are missing: raise max_calls"}
    assert "the last 1 are missing" in "".join(run_here(capfd, "timeline", tmp_path / "trace.json")[1:])


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"traceEvents": []}', '{"traceEvents": 3, "otherData": {}}']
)
def test_a_file_that_is_no_trace(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text(text)
    status, _, errors = run_here(capfd, "timeline", tmp_path / "trace.json")
    assert status == 2 and "trace.json is not a trace of idist.record_timeline()" in errors


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, _, errors = run_here(capfd, "timeline", tmp_path / "none.json")
    assert "none.json cannot be read: No such file" in errors
    status, _, errors = run_here(
        capfd, "timeline", tmp_path / "none.json", "--save", tmp_path / "picture.xyz"
    )
    assert status == 2 and "the name must end in one of" in errors


SCRIPT = """
    import sys
    import ignite_dist as idist

    idist.initialize("gloo")  # the command's context
    idist.all_reduce(1)
    if "fail" in sys.argv:
        if idist.get_rank() == 1:
            raise LookupError("no data")
        idist.barrier()
    if "finalize" in sys.argv:
        idist.finalize()
    sys.exit(0)
"""


def _run(folder: Path, *arguments: str, trace: str = "trace.json", launcher: tuple[str, ...] = ()) -> Any:
    script = write_script(folder, SCRIPT)
    own = () if launcher else ("--nproc-per-node", "2")
    command = (*launcher, "-m", "ignite_dist", "run", *own, "--backend", "gloo", "--timeline", trace, script)
    return run_python(*command, *arguments, env=plain_environ(OMP_NUM_THREADS="1"), cwd=folder)


def _calls(path: Path) -> list[tuple[int, str]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [(one["pid"], one["name"]) for one in events if one.get("cat") == "call"]


@pytest.mark.long
def test_a_script_that_exits_or_ends_the_context_is_saved(tmp_path: Path) -> None:
    for arguments in ((), ("finalize",)):
        ended = _run(tmp_path, *arguments)
        assert ended.returncode == 0, ended.stdout
        assert _calls(tmp_path / "trace.json") == [(0, "all_reduce"), (1, "all_reduce")]
        (tmp_path / "trace.json").unlink()


@pytest.mark.long
def test_under_a_launcher(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    ended = _run(tmp_path, launcher=torchrun)
    assert ended.returncode == 0, ended.stdout
    assert _calls(tmp_path / "trace.json") == [(0, "all_reduce"), (1, "all_reduce")]


@pytest.mark.long
def test_a_script_that_fails_leaves_the_calls_of_the_rank(tmp_path: Path) -> None:
    ended = _run(tmp_path, "fail")
    assert ended.returncode == 1 and "LookupError: no data" in ended.stdout
    assert _calls(tmp_path / "trace.rank1.json") == [(1, "all_reduce")]
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.long
def test_a_path_that_cannot_be_written_is_an_error_before_the_script_runs(tmp_path: Path) -> None:
    ended = _run(tmp_path, "fail", trace="no/trace.json")
    assert ended.returncode != 0
    assert f"record_timeline: there is no folder {tmp_path / 'no'}." in ended.stdout
    assert "no data" not in ended.stdout
