"""Checkpoints on full disks and under ``ulimit -f``: an error with the numbers, and the old file is whole."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ignite_dist as idist
from helpers import plain_environ, python_that_forks, write_script
from ignite_dist.internals import limits
from machines import needs_mounts, on_a_disk

SECONDS = 200
SCRIPT = """
    import os
    import sys
    import torch
    import ignite_dist as idist

    PATH, KIND = sys.argv[1:]

    def made(width):
        net = torch.nn.Sequential(torch.nn.Linear(width, width))
        options = {"strategy": "fsdp", "wrap": [torch.nn.Linear]} if KIND == "sharded" else {}
        return idist.auto_model(net, **options)

    def work(local_rank):
        model, large = made(10), made(1000)
        idist.save_checkpoint(PATH, model=model, number=1)
        try:
            idist.save_checkpoint(PATH, model=large, number=2, asynchronous=KIND == "asynchronous").wait()
        except OSError as error:
            found = error.errno, str(error)
        assert idist.load_checkpoint(PATH, model=model) == {"number": 1}
        folder = os.path.dirname(PATH)
        return *found, str(idist.latest_checkpoint(folder)), sorted(os.listdir(folder))

    if __name__ == "__main__":
        for one in idist.spawn("gloo", work, nproc_per_node=2):
            print(one)
"""
LEFT = {"sharded": ["checkpoint.pt", "checkpoint.pt.shards-1"]}


def run(folder: Path, target: Path, kind: str, *prefix: str, num_bytes: int | None = None) -> list[str]:
    """What the script writes. ``num_bytes`` limits the size of its files."""

    def limit() -> None:
        if num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    ended = subprocess.run(
        [*prefix, python_that_forks(), write_script(folder, SCRIPT), target / "checkpoint.pt", kind],
        env=plain_environ(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=limit,
    )
    return [line for line in ended.stdout.splitlines() if line.startswith("(") or "Traceback" in line]


def check(lines: list[str], number: int, reason: str, target: Path, kind: str) -> None:
    assert len(lines) == 2, lines
    for line in lines:
        found = re.fullmatch(r"\((\d+), '(.*)', '(.*)', (\[.*\])\)", line)
        assert found is not None, line
        assert int(found[1]) == number
        path = target / "checkpoint.pt"
        what = (
            f"The folder {path}.shards-2 of sharded tensors"
            if kind == "sharded"
            else f"The checkpoint {path}"
        )
        pattern = rf"\[Errno {number}\] {re.escape(what)} cannot be written: {reason}"
        assert re.fullmatch(pattern, found[2]), found[2]
        assert found[3] == str(path)
        assert found[4] == str(LEFT.get(kind, ["checkpoint.pt"]))


@needs_mounts
@pytest.mark.parametrize(
    "kind",
    ["plain", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("asynchronous", "sharded"))],
)
def test_a_full_disk(kind: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    lines = run(tmp_path, disk, kind, *on_a_disk(disk, "size=1m"))
    room = rf"It needs 4,0\d\d,\d\d\d bytes. [\d,]+ bytes are free in {disk}."
    check(lines, errno.ENOSPC, f"No space left on device. {room}", disk, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_files_of_limited_size(kind: str, tmp_path: Path) -> None:
    lines = run(tmp_path, tmp_path / "new", kind, num_bytes=1_000_000)
    room = rf"It needs 4,0\d\d,\d\d\d bytes. [\d,]+ bytes are free in {tmp_path / 'new'}."
    reason = rf"File too large. {room} A file may have 1,000,000 bytes here \(ulimit -f\)."
    check(lines, errno.EFBIG, reason, tmp_path / "new", kind)


@needs_mounts
def test_a_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
        import sys
        import torch
        import ignite_dist as idist

        try:
            idist.save_checkpoint(sys.argv[1], number=1)
        except OSError as error:
            print(error)
    """
    command = [sys.executable, write_script(tmp_path, script), disk / "checkpoint.pt"]
    ended = subprocess.run(
        [*on_a_disk(disk, "ro"), *command],
        env=plain_environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    path = disk / "checkpoint.pt"
    reason = f"Read-only file system: {path}.tmp"
    assert ended.stdout == f"[Errno 30] The checkpoint {path} cannot be written: {reason}\n"


def test_a_failure_before_the_write_is_not_its_cause(tmp_path: Path) -> None:
    """The script saves in an ``except`` block. torch refuses two dtypes of one memory."""
    floats = torch.ones(2)
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        OSError, match=r"run.pt cannot be written: .*the same data as different types"
    ) as info:
        try:
            (tmp_path / "missing").read_text()
        except FileNotFoundError:
            idist.save_checkpoint(
                tmp_path / "folder" / "run.pt", floats=floats, bits=floats.view(torch.int32)
            )
    assert info.value.errno is None
    errors = LookupError("of the script"), RuntimeError("of the write")
    errors[1].__context__ = errors[0]
    assert limits.cause_of_write(errors[1], errors[0]) is errors[1]
    assert limits.cause_of_write(errors[1], None) is errors[0]
