"""``spawn`` under limits of processes and disks: it works, or one sentence tells the limit and its number."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from helpers import ROOT, plain_environ, run_new_python, write_script
from machines import needs_mounts, on_a_disk

SECONDS = 120
SCRIPT = """
    import sys
    import ignite_dist as idist

    def work(local_rank):
        return idist.all_reduce(1)

    if __name__ == "__main__":
        try:
            print(idist.spawn("gloo", work, nproc_per_node=int(sys.argv[1])))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""
REFUSED = """
    import fcntl, os, resource, subprocess, sys
    import ignite_dist as idist

    def lock(local_rank):
        with open(__file__) as first, open(__file__) as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if local_rank:
                    raise RuntimeError(f"the file is locked: {error}") from error
                raise

    def fork(local_rank):
        os.fork()

    def run(local_rank):
        try:
            subprocess.run(["true"])
        except OSError as error:
            raise RuntimeError(f"true cannot be run: {error}")

    def child(local_rank):
        import multiprocessing
        multiprocessing.get_context("spawn").Process(target=print).start()

    def refuse(local_rank, name):
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        globals()[name](local_rank)

    if __name__ == "__main__":
        try:
            idist.spawn("gloo", refuse, (sys.argv[1],), nproc_per_node=int(sys.argv[2]))
        except idist.WorkerRaisedError as error:
            print(error)
"""
_user_numbers = count(1_000_000 + 1000 * os.getpid())


def as_a_user() -> tuple[str, ...]:
    """Run a command as another user than root, for whom the limit of processes holds.

    The user may still read the files of root. Nobody else has the number, not even an earlier command: the
    limit counts all processes of a user, also those that are about to end.
    """
    return (
        *("setpriv", f"--reuid={next(_user_numbers)}", "--clear-groups"),
        *("--inh-caps=-all,+dac_override", "--ambient-caps=+dac_override"),
    )


needs_another_user = pytest.mark.skipif(
    shutil.which("setpriv") is None or subprocess.run([*as_a_user(), "true"], check=False).returncode != 0,
    reason="may not become another user, and root has no limit of processes",
)


def run(
    folder: Path,
    *prefix: str,
    num_workers: int = 2,
    limits: Mapping[int, int] | None = None,
    environ: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    seen_as: str | None = None,
) -> str:
    """What the script writes, of which ``prefix`` begins the command. That may see ``folder`` elsewhere."""
    script = Path(seen_as or folder, write_script(folder, SCRIPT).name)
    complete = {**plain_environ(OMP_NUM_THREADS="1"), **(environ or {})}
    ended = run_new_python(
        script,
        num_workers,
        seconds=SECONDS,
        prefix=prefix,
        env={name: value for name, value in complete.items() if name not in without},
        preexec_fn=partial(_set, limits or {}),
    )
    return re.sub(r"\nSee ignite_dist's docs/\S+", "", ended.stdout).strip()


def _set(limits: Mapping[int, int]) -> None:
    for kind, number in limits.items():
        resource.setrlimit(kind, (number, number))


def test_too_few_files_are_told_before_the_start(tmp_path: Path) -> None:
    """Otherwise the store could not accept the connections of workers, which would wait for 30 minutes."""
    found = run(tmp_path, num_workers=8, limits={resource.RLIMIT_NOFILE: 64})
    assert re.fullmatch(
        r"LaunchError: Too many open files: \d+ are open, a launch of 8 workers needs 70 more, and this "
        r"process may open 64 \(ulimit -n\). Raise the limit, or start fewer workers.",
        found,
    ), found


@pytest.mark.long
def test_as_many_files_as_a_launch_needs(tmp_path: Path) -> None:
    found = run(tmp_path, num_workers=8, limits={resource.RLIMIT_NOFILE: 100})
    assert found == "[8, 8, 8, 8, 8, 8, 8, 8]"


@pytest.mark.long
def test_files_without_bytes(tmp_path: Path) -> None:
    """The fork server needs a folder for its socket; its output goes to a pipe."""
    found = run(tmp_path, limits={resource.RLIMIT_FSIZE: 0})
    assert re.fullmatch(
        r"LaunchError: The fork server cannot be started: .*No usable temporary directory found in \['/tmp'.*"
        r"\]. [\d,]+ bytes are free in /tmp. A file may have 0 bytes here \(ulimit -f\). "
        "Set TMPDIR to a folder that can be written.",
        found,
    ), found


@needs_another_user
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (1, "LaunchError: The store of the job cannot be started"),
        *(
            pytest.param(number, "LaunchError: The workers cannot be started", marks=pytest.mark.long)
            for number in (2, 3, 4, 5)
        ),
        *(pytest.param(number, "WorkerRaisedError", marks=pytest.mark.long) for number in (6, 12)),
        pytest.param(64, "[2, 2]", marks=pytest.mark.long),
    ],
)
def test_few_processes(number: int, error: str, tmp_path: Path) -> None:
    found = run(tmp_path, *as_a_user(), limits={resource.RLIMIT_NPROC: number})
    assert error in found
    sentence = f"This user may run {number} processes and threads here (ulimit -u)."
    assert (sentence in found) == (number < 64), found
    assert "process_end.py" not in found, found


LITTLE_MEMORY = """
    import resource, sys
    import ignite_dist as idist

    def work(local_rank):
        return idist.all_reduce(1)

    if __name__ == "__main__":
        if sys.argv[1] != "0":
            [getattr(idist, name) for name in idist.__all__]  # imports the whole package
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        limit = mapped + int(sys.argv[1]) * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print(f"{limit:,}", flush=True)
        try:
            print(idist.spawn("gloo", work, nproc_per_node=2, start_method=sys.argv[2]))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""
METHODS = ["forkserver", *(pytest.param(one, marks=pytest.mark.long) for one in ("spawn", "fork"))]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "megabytes", [*(pytest.param(few, marks=pytest.mark.long) for few in (0, 10, 40)), 400]
)
def test_little_memory(megabytes: int, method: str, tmp_path: Path) -> None:
    """In addition to what the launcher has mapped: torch alone maps 600 MB."""
    script = write_script(tmp_path, LITTLE_MEMORY)
    environ = plain_environ(OMP_NUM_THREADS="1")
    ended = run_new_python(script, megabytes, method, seconds=SECONDS, env=environ)
    limit, _, found = ended.stdout.partition("\n")
    if megabytes == 400:
        assert found == "[2, 2]\n"
    else:
        assert re.search(rf"may map {limit} (bytes of memory here )?\(ulimit -v\)\.", found), found
        assert "process_end.py" not in found, found


@pytest.mark.parametrize(
    "allocate", ["bytes(10**9)", pytest.param("__import__('mmap').mmap(-1, 10**9)", marks=pytest.mark.long)]
)
def test_the_launcher_s_own_memory_error_tells_the_limit(allocate: str, tmp_path: Path) -> None:
    """Python raises a MemoryError without a text, the system an OSError."""
    script = LITTLE_MEMORY.replace(
        "nproc_per_node=2", f"nproc_per_node=type('Many', (), {{'__index__': lambda _: len({allocate})}})()"
    )
    ended = run_new_python(write_script(tmp_path, script), 400, "forkserver", seconds=SECONDS)
    limit, _, found = ended.stdout.partition("\n")
    assert found == (
        "MemoryError: spawn has no memory left. "
        f"A process may map {limit} bytes of memory here (ulimit -v).\n"
    )


def test_an_abort_under_a_limit_of_memory_tells_the_limit(tmp_path: Path) -> None:
    """C++ aborts where it gets no memory."""
    aborts = LITTLE_MEMORY.replace("return idist.all_reduce(1)", "import os; os.abort()")
    ended = run_new_python(write_script(tmp_path, aborts), 400, "forkserver", seconds=SECONDS)
    sentence = rf"A process may map {ended.stdout.splitlines()[0]} bytes of memory here \(ulimit -v\)\."
    assert "was ended by SIGABRT" in ended.stdout and re.search(sentence, ended.stdout), ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_lock_that_is_held_is_no_limit(num_ranks: int, tmp_path: Path) -> None:
    ended = run_new_python(write_script(tmp_path, REFUSED), "lock", num_ranks, seconds=SECONDS)
    assert "Resource temporarily unavailable" in ended.stdout and "ulimit" not in ended.stdout, ended.stdout


@needs_another_user
@pytest.mark.parametrize(
    "how", ["fork", *(pytest.param(one, marks=pytest.mark.long) for one in ("run", "child"))]
)
def test_a_process_that_cannot_be_started_is_about_the_limit(how: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, REFUSED)
    ended = run_new_python(script, how, 1, seconds=SECONDS, prefix=as_a_user())
    assert "This user may run 1 processes and threads here (ulimit -u)." in ended.stdout, ended.stdout


# --- disks -------------------------------------------------------------------------------------------


@pytest.mark.long
@needs_mounts
def test_a_full_folder_for_temporary_files(tmp_path: Path) -> None:
    """Python then takes another one."""
    folder = tmp_path / "full"
    folder.mkdir()
    fill = ("sh", "-c", f'cat /dev/zero > {folder}/fill 2> /dev/null; exec "$@"', "sh")
    assert run(tmp_path, *on_a_disk(folder, "size=16k"), *fill, environ={"TMPDIR": str(folder)}) == "[2, 2]"


@pytest.mark.long
@needs_mounts
@pytest.mark.parametrize("options", ["size=16k,nr_inodes=1", "ro"], ids=["full", "read-only"])
def test_no_folder_for_temporary_files(options: str, tmp_path: Path) -> None:
    """Neither does the working directory serve as one."""
    if ROOT.is_relative_to("/tmp"):
        pytest.skip("the package is in a folder for temporary files")
    moved = ("unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path} /mnt && exec "$@"', "sh")
    disks = (*on_a_disk("/tmp", options), *on_a_disk("/var/tmp", options), "env", "--chdir=/proc")
    found = run(tmp_path, *moved, *disks, seen_as="/mnt")
    assert re.fullmatch(
        r"LaunchError: The fork server cannot be started: .*No usable temporary directory found in \['/tmp'.*"
        r"\]. [\d,]+ bytes are free in /tmp. Set TMPDIR to a folder that can be written.",
        found,
    ), found


@pytest.mark.long
@needs_mounts
def test_a_small_dev_shm(tmp_path: Path) -> None:
    assert run(tmp_path, *on_a_disk("/dev/shm", "size=4k")) == "[2, 2]"


@pytest.mark.long
@needs_mounts
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert run(tmp_path, *on_a_disk(home, "ro"), environ={"HOME": str(home)}) == "[2, 2]"


@pytest.mark.long
def test_no_home(tmp_path: Path) -> None:
    assert run(tmp_path, without=["HOME"]) == "[2, 2]"
