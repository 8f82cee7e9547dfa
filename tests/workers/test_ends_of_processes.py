"""A worker ends as a Python process does: nothing that a script leaves open is lost."""

from __future__ import annotations

import atexit
import bz2
import concurrent.futures
import contextlib
import cProfile
import csv
import gzip
import logging
import logging.handlers
import lzma
import mmap
import multiprocessing
import os
import pickle
import shelve
import signal
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.multiprocessing

import ignite_dist as idist
from helpers import run_python, write_script
from ignite_dist.workers.supervisor import processes
from spawned import spawn
from warm_client import WHOLE_EXIT

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"]
kept: list[Any] = []  # in a global: nothing closes what is here


@pytest.fixture(autouse=True)
def whole_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers end as Python does outside of the tests, and have 200 s for it on a busy machine."""
    for name, value in {**WHOLE_EXIT, "IGNITE_DIST_GRACE_SECONDS": "200"}.items():
        monkeypatch.setenv(name, value)


class Deleted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.write_text("done")


def text_file(path: Path) -> None:
    kept.append(path.open("w"))
    kept[-1].write("done")


def binary_file(path: Path) -> None:
    kept.append(path.open("wb"))
    kept[-1].write(b"done")


def file_to_read_and_write(path: Path) -> None:
    path.write_text("gone")
    kept.append(path.open("r+b"))
    kept[-1].write(b"do")
    kept[-1].seek(2)
    kept[-1].write(b"ne")


def csv_log(path: Path) -> None:
    kept.append(path.open("w", newline=""))
    csv.writer(kept[-1]).writerow(["done"])


def pickle_of_a_tensor(path: Path) -> None:
    kept.append(path.open("wb"))
    pickle.dump(torch.ones(3), kept[-1])


def numpy_array(path: Path) -> None:
    kept.append(path.open("wb"))
    numpy.save(kept[-1], numpy.ones(3))


def memory_map(path: Path) -> None:
    path.write_bytes(b"gone")
    with path.open("r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 4))
    kept[-1][:] = b"done"


def compressed(path: Path) -> None:
    for open_, suffix in ((gzip.open, "gz"), (bz2.open, "bz2"), (lzma.open, "xz")):
        with open_(f"{path}.{suffix}", "wt") as file:  # type: ignore[operator]
            file.write("done")
    path.write_text("done")


def archive(path: Path) -> None:
    kept.append(zipfile.ZipFile(path, "w"))
    kept[-1].writestr("member", "done")
    atexit.register(kept[-1].close)


def tar(path: Path) -> None:
    kept.append(tarfile.open(path, "w"))  # noqa: SIM115
    kept[-1].add(__file__, "member")
    atexit.register(kept[-1].close)


def database(path: Path) -> None:
    kept.append(sqlite3.connect(path))
    kept[-1].execute("create table t (x)")
    kept[-1].execute("insert into t values ('done')")
    kept[-1].commit()


def shelf(path: Path) -> None:
    global shelved
    shelved = shelve.open(os.fspath(path), writeback=True)  # noqa: SIM115
    shelved["x"] = "done"


def logger(path: Path) -> None:
    logging.getLogger("a file").addHandler(logging.FileHandler(path))
    logging.getLogger("a file").warning("done")


def logger_that_waits(path: Path) -> None:
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(path))
    logging.getLogger("memory").addHandler(handler)
    logging.getLogger("memory").warning("done")


def atexit_handler(path: Path) -> None:
    atexit.register(path.write_text, "done")


def atexit_handler_that_raises(path: Path) -> None:
    atexit.register(path.write_text, "done")
    atexit.register(lambda: 1 / 0)


def finalizer(path: Path) -> None:
    kept.append(set())
    weakref.finalize(kept[-1], path.write_text, "done")


def destructor(path: Path) -> None:
    global deleted
    deleted = Deleted(path)


def exit_stack(path: Path) -> None:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    stack.callback(path.write_text, "done")


def temporary_folder(path: Path) -> None:
    kept.append(tempfile.TemporaryDirectory(dir=path.parent, prefix="temporary-"))
    path.write_text("done")


def thread(path: Path) -> None:
    def write() -> None:
        event.wait()
        path.write_text("done")

    event = threading.Event()
    threading.Thread(target=write).start()
    atexit_of_threads = threading.Timer(0.2, event.set)
    atexit_of_threads.start()


def pool_of_threads(path: Path) -> None:
    pool = concurrent.futures.ThreadPoolExecutor()
    pool.submit(time.sleep, 0.2)
    kept.append(pool.submit(path.write_text, "done"))


def pool_of_processes(path: Path) -> None:
    pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    kept.append(pool.submit(path.write_text, "done"))


def child(path: Path) -> None:
    multiprocessing.get_context("fork").Process(target=path.write_text, args=("done",)).start()


def queue_with_a_feeder(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    context.Process(target=_write_what_comes, args=(queue, path)).start()
    queue.put("x" * 1_000_000)


def _write_what_comes(queue: Any, path: Path) -> None:
    path.write_text("done" if len(queue.get()) == 1_000_000 else "cut off")


def program(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())", path],
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("done")
    kept.append(process)
    atexit.register(process.communicate)


def profile(path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    atexit.register(profiler.dump_stats, path)
    atexit.register(profiler.disable)


# Forks come before threads: a forked child may wait for a lock that a thread held.
THINGS: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        *(child, queue_with_a_feeder, pool_of_processes, program, thread, pool_of_threads),
        *(text_file, binary_file, file_to_read_and_write, csv_log, pickle_of_a_tensor, numpy_array),
        *(memory_map, compressed, archive, tar, database, shelf, logger, logger_that_waits),
        *(atexit_handler, atexit_handler_that_raises, finalizer, destructor, exit_stack, temporary_folder),
        profile,
    )
}


# --- what trackers of experiments have not written yet ---------------------------------------------------


def summary_writer(path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    kept.append(SummaryWriter(str(path)))
    kept[-1].add_scalar("loss", 0.5, 3)


def hdf5_file(path: Path) -> None:
    """Not in ``kept``: if that is the launcher's list, a fork of the launcher leaves it alone."""
    global hdf5
    import h5py

    hdf5 = h5py.File(path, "w")
    hdf5["x"] = [1.0] * 3


def wandb_run(path: Path) -> None:
    import wandb

    path.mkdir()
    settings = wandb.Settings(console="off", silent=True, root_dir=str(path), x_disable_stats=True)
    kept.append(wandb.init(mode="offline", project="test", settings=settings))
    kept[-1].log({"loss": 0.5}, step=3)


TRACKERS: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (summary_writer, hdf5_file, wandb_run)
}


def _leave(rank: int, folder: Path, how: str = "returns", trackers: Sequence[str] = ()) -> None:
    for name, leave in THINGS.items():
        leave(folder / f"{name}-{rank}")
    for name in trackers:
        TRACKERS[name](folder / f"{name}-{rank}")
    if how != "returns":  # a failure interrupts a rank that has not left everything
        idist.barrier()
    if how == "raises":
        raise LookupError("no data")
    if how == "exits":
        sys.exit(3)


def _found(folder: Path, rank: int, is_forked: bool = True) -> dict[str, Any]:
    """What is in the files of ``rank``: None if nothing."""
    found: dict[str, Any] = {}
    for name in THINGS:
        path = folder / f"{name}-{rank}"
        found[name] = path.read_bytes().strip() if path.exists() else None
    found["archive"] = zipfile.ZipFile(folder / f"archive-{rank}").read("member")
    found["database"] = sqlite3.connect(folder / f"database-{rank}").execute("select x from t").fetchone()
    with shelve.open(os.fspath(folder / f"shelf-{rank}"), "r") as shelved:
        found["shelf"] = shelved["x"]
    found["numpy_array"] = numpy.load(folder / f"numpy_array-{rank}").tolist()
    found["pickle_of_a_tensor"] = pickle.loads(found["pickle_of_a_tensor"]).tolist()
    with tarfile.open(folder / f"tar-{rank}") as archived:
        found["tar"] = archived.getnames()
    found["profile"] = bool(found["profile"])
    found["folders"] = [path.name for path in folder.glob("temporary-*")]
    if not is_forked:  # at the end of Python itself a destructor may find no open() any more
        found["destructor"] = b"done"
    return found


def _tracked(folder: Path, rank: int, tracker: str) -> Any:
    path = folder / f"{tracker}-{rank}"
    if tracker == "summary_writer":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return [(one.step, one.value) for one in EventAccumulator(str(path)).Reload().Scalars("loss")]
    if tracker == "hdf5_file":
        import h5py

        with h5py.File(path) as file:
            return file["x"][:].tolist()
    (path,) = (path / "wandb").glob("offline-run-*/*.wandb")
    kinds = _kinds_of_records(path.read_bytes())
    return kinds.count("history"), kinds[-1]


def _kinds_of_records(data: bytes) -> list[Any]:
    """Of a file of wandb: after 7 bytes, a checksum, a length and a 1 (it is whole) before each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    kinds, start = [], 7
    while start < len(data):
        _, size, is_whole = struct.unpack_from("<IHB", data, start)
        assert is_whole == 1
        start += 7 + size
        kinds.append(Record.FromString(data[start - size : start]).WhichOneof("record_type"))
    return kinds


EXPECTED = {
    **dict.fromkeys(THINGS, b"done"),
    **{"database": ("done",), "shelf": "done", "tar": ["member"], "profile": True, "folders": []},
    **{"numpy_array": [1.0] * 3, "pickle_of_a_tensor": [1.0] * 3},
}
TRACKED = {"summary_writer": [(3, 0.5)], "hdf5_file": [1.0] * 3, "wandb_run": (1, "exit")}
FILES, WANDB = ("summary_writer", "hdf5_file"), ("wandb_run",)  # wandb starts a program of its own


def _assert_all_is_there(folder: Path, rank: int, trackers: Sequence[str], is_forked: bool = True) -> None:
    assert _found(folder, rank, is_forked) == EXPECTED
    for tracker in trackers:
        assert _tracked(folder, rank, tracker) == TRACKED[tracker]


@pytest.mark.parametrize("trackers", [FILES, pytest.param(WANDB, marks=pytest.mark.long)])
def test_what_torch_promises(trackers: Sequence[str], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_leave, (tmp_path, "returns", trackers), nprocs=1)
    _assert_all_is_there(tmp_path, 0, trackers, is_forked=False)


@pytest.mark.parametrize(
    ("method", "how", "trackers"),
    [
        *((method, how, FILES) for method in ("fork", "forkserver") for how in ("returns", "raises")),
        *((method, "exits", ()) for method in ("fork", "forkserver")),
        *(
            pytest.param(method, how, trackers, marks=pytest.mark.long)
            for method, trackers in (("fork", WANDB), ("forkserver", WANDB), ("spawn", (*FILES, *WANDB)))
            for how in ("returns", "raises")
        ),
        pytest.param("spawn", "exits", (), marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost(method: str, how: str, trackers: Sequence[str], tmp_path: Path) -> None:
    if how == "returns":
        spawn(_leave, tmp_path, how, trackers, start_method=method)
    else:
        with pytest.raises(idist.RankFailedError, match="no data" if how == "raises" else None) as caught:
            spawn(_leave, tmp_path, how, trackers, start_method=method)
        assert getattr(caught.value, "exit_code", "raised") == {"raises": "raised", "exits": 3}[how]
    for rank in range(2):
        _assert_all_is_there(tmp_path, rank, trackers, method != "spawn")


# --- after the failure of another rank --------------------------------------------------------------------


def _write_slowly(path: Path, seconds: float) -> None:
    time.sleep(seconds)
    path.write_text("done")


def _fails_or_waits(rank: int, folder: Path, seconds: float) -> None:
    atexit.register(_write_slowly, folder / str(rank), seconds)
    text_file(folder / f"file-{rank}")
    idist.barrier()  # a failure interrupts a rank that has not come as far as this
    if rank == 0:
        raise LookupError("no data")
    idist.barrier()


@pytest.mark.parametrize("method", METHODS)
def test_the_others_have_time_for_their_ends(method: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError, match="no data"):
        spawn(_fails_or_waits, tmp_path, 3.0, start_method=method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "file-0", "file-1"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"done"}


def _fails_or_works(rank: int, folder: Path, how: str) -> None:
    text_file(folder / f"file-{rank}")
    temporary_folder(folder / f"folder-{rank}")
    idist.barrier()
    if rank == 0:
        raise LookupError("no data")
    if how == "ignores":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        time.sleep(3600)
    finally:
        (folder / "finally").write_text("done")


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_still_works_ends_as_python_does(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TERMINATE_SECONDS", 100.0)  # for its `finally` block on a busy machine
    with pytest.raises(idist.RankFailedError, match="no data") as caught:
        spawn(_fails_or_works, tmp_path, "waits", start_method=method)
    assert "KeyboardInterrupt" not in str(caught.value)
    left = {"file-0", "file-1", "finally", "folder-0", "folder-1"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert {path.read_text() for path in tmp_path.iterdir()} == {"done"}


def _fails_or_cannot_save(rank: int) -> None:
    if rank == 0:
        idist.barrier()
        raise LookupError("no data")
    try:
        idist.barrier()
        time.sleep(3600)
    except KeyboardInterrupt:
        raise OSError("disk full") from None


def test_what_a_rank_raises_after_its_interrupt_is_shown() -> None:
    with pytest.raises(idist.RankFailedError, match="no data") as caught:
        spawn(_fails_or_cannot_save)
    assert "Rank 1 failed after it: " in str(caught.value) and "OSError: disk full" in str(caught.value)


def _fails_or_tries_again(rank: int) -> None:
    if rank == 0:
        idist.barrier()
        raise LookupError("no data")
    try:
        raise ValueError("no answer") from OSError("no network")
    except ValueError:
        idist.barrier()
        time.sleep(3600)


def test_an_interrupt_of_what_handles_another_error_is_not_shown() -> None:
    with pytest.raises(idist.RankFailedError, match="no data") as caught:
        spawn(_fails_or_tries_again)
    assert "KeyboardInterrupt" not in str(caught.value)


def _fails_or_has_files(rank: int, folder: Path, how: str) -> None:
    text = (folder / f"text-{rank}").open("w")
    text.write("done")
    compressed = gzip.open(folder / f"gzip-{rank}", "wt")  # noqa: SIM115
    compressed.write("done")
    idist.barrier()
    if rank == 0:
        raise LookupError("no data")
    if how == "blocking":
        idist.all_reduce(torch.ones(2))
    else:
        idist.all_reduce(torch.ones(2), async_op=True).wait()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["blocking", "asynchronous"])
def test_files_of_a_function_that_waits_for_a_failed_rank(method: str, how: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError, match="no data"):
        spawn(_fails_or_has_files, tmp_path, how, start_method=method)
    for rank in (0, 1):
        assert (tmp_path / f"text-{rank}").read_text() == "done"
        with gzip.open(tmp_path / f"gzip-{rank}", "rt") as file:
            assert file.read() == "done"


def _compressed_anywhere(rank: int, folder: Path) -> None:
    kinds = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
    for name, kind in kinds.items():
        for place, owner in {"torch": torch, "function": _compressed_anywhere, "list": kept}.items():
            file = kind(folder / f"{place}-{rank}.{name}", "wt")
            file.write("done")
            if isinstance(owner, list):
                owner.append(file)
            else:
                setattr(owner, f"_kept_by_a_test_{name}", file)
    sys.stdout = gzip.open(folder / f"stdout-{rank}.gzip", "wt")  # type: ignore[assignment]  # noqa: SIM115
    print("done", end="")
    archive = zipfile.ZipFile(folder / f"{rank}.zip", "w")
    archive.writestr("text", "done")
    torch._kept_by_a_test_zip = archive  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_compressed_files_are_whole_wherever_they_are_kept(method: str, tmp_path: Path) -> None:
    kept.append(None)  # what the launcher has is shared with a fork
    try:
        spawn(_compressed_anywhere, tmp_path, start_method=method)
    finally:
        kept.pop()
    for rank in (0, 1):
        for name, kind in {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}.items():
            for place in ("torch", "function", "list"):
                with kind(tmp_path / f"{place}-{rank}.{name}", "rt") as file:
                    assert file.read() == "done"
        with gzip.open(tmp_path / f"stdout-{rank}.gzip", "rt") as file:
            assert file.read() == "done"
        assert zipfile.ZipFile(tmp_path / f"{rank}.zip").read("text") == b"done"


def test_a_rank_that_ignores_the_interrupt_does_not_hang_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(idist.RankFailedError, match="no data"):
        spawn(_fails_or_works, tmp_path, "ignores")
    assert not (tmp_path / "finally").exists()
    (warning,) = caplog.messages
    assert warning == "Workers had 3 s to end after a failure, and are ended now: ranks 1"


def test_a_handler_that_waits_for_ever_does_not_hang_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("IGNITE_DIST_GRACE_SECONDS", "1")
    with pytest.raises(idist.RankFailedError, match="no data"):
        spawn(_fails_or_waits, tmp_path, 3600.0)
    (warning,) = caplog.messages
    assert warning.startswith("Workers had 1 s to end after a failure (IGNITE_DIST_GRACE_SECONDS), and ")
    assert warning.endswith(" ranks 0, 1")


BLOCKS = """
    import os
    import signal
    import sys
    import threading
    import ignite_dist as idist
    from ignite_dist.workers import process_end

    class Deleted:
        def __init__(self, name):
            self.name = name

        def __del__(self, write=os.write):
            write(1, f"deleted {self.name}\\n".encode())

    replaced = Deleted("the launcher's")

    def handler(*_):
        pass

    def work(local_rank, how):
        global replaced, one
        if how == "destructors":
            signal.signal(signal.SIGUSR1, handler)  # keeps the script's globals
            replaced = None
            replaced, one = Deleted("another"), Deleted("new")
            sys.modules["odd"] = type(sys)("odd")
            sys.modules["odd"].__dict__[5] = sys.modules["odd"].__dict__["__file__"] = "/odd.py"
        elif how == "full":
            sys.stdout = open("/dev/full", "w")
            sys.stdout.write("lost")
        elif how == "minimal":
            sys.stdout = type("Minimal", (), {"write": lambda self, text: len(text)})()
        elif how == "blocked":
            process_end._FLUSH_SECONDS = 0.5
            full = os.fdopen(os.pipe()[1], "wb")
            threading.Thread(target=full.write, args=(bytes(1_000_000),), daemon=True).start()
            kept.append(open("written.txt", "w"))
            kept[0].write("done")

    kept = []

    if __name__ == "__main__":
        idist.spawn("gloo", work, (sys.argv[1],), start_method=sys.argv[2])
        os._exit(0)  # without the destructors of the launcher
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_destructors_of_the_script_run_whatever_keeps_its_globals(method: str, tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, BLOCKS), "destructors", method)
    expected = [
        "deleted another",
        "deleted new",
        *(["deleted the launcher's"] if method == "forkserver" else []),
    ]
    assert sorted(ended.stdout.splitlines()) == expected


@pytest.mark.parametrize("method", METHODS)
def test_output_that_cannot_be_written_is_a_failure(method: str, tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, BLOCKS), "full", method)
    assert ended.returncode == 1 and "exit code 120" in ended.stdout, ended.stdout
    assert "No space left on device" in ended.stdout


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_stdout_without_flush(method: str, tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, BLOCKS), "minimal", method)
    assert ended.returncode == 0 and "Error" not in ended.stdout, ended.stdout


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_file_that_a_thread_blocks_does_not_keep_the_others(method: str, tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, BLOCKS), "blocked", method, cwd=tmp_path, seconds=60)
    assert ended.returncode == 0, ended.stdout
    assert (tmp_path / "written.txt").read_text() == "done"


def _wait(path: Path) -> None:
    """One handler: an interrupt that comes while it writes the file ends it too."""
    path.write_text("done")
    time.sleep(3600)


def _waits_at_the_end(_: int, folder: Path) -> None:
    text_file(folder / f"file-{idist.get_rank()}")
    atexit.register((folder / f"{idist.get_rank()} after it").write_text, "done")  # the last one
    atexit.register(_wait, folder / f"{idist.get_rank()} waits")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_interrupt_ends_a_handler_and_the_rest_goes_on(method: str, tmp_path: Path) -> None:
    workers = spawn(_waits_at_the_end, tmp_path, start_method=method, join=False)
    while len(list(tmp_path.glob("* waits"))) < 2:
        time.sleep(0.01)
    for pid in workers.pids():
        os.kill(pid, signal.SIGINT)
    workers.join()
    files = ("0 after it", "1 after it", "file-0", "file-1")
    assert [(tmp_path / name).read_text() for name in files] == ["done"] * 4


def _dies_at_the_end(_: int, how: str) -> int:
    atexit.register(os._exit, 5) if how == "exit" else atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    return 1


@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("signal", -signal.SIGSEGV)])
@pytest.mark.parametrize("method", METHODS)
def test_a_death_at_the_end_is_a_failure(method: str, how: str, code: int) -> None:
    with pytest.raises(idist.WorkerExitedError) as caught:
        spawn(_dies_at_the_end, how, start_method=method, nproc_per_node=1)
    assert caught.value.exit_code == code


# --- a fork of the launcher --------------------------------------------------------------------------------

OF_THE_LAUNCHER = """
    import atexit
    import os
    import tempfile
    import weakref
    import ignite_dist as idist

    def work(local_rank):
        atexit.register(os.write, 1, b"the worker's handler\\n")
        return idist.all_reduce(1)

    if __name__ == "__main__":
        atexit.register(print, "the launcher's handler")
        file = open("file.txt", "w")
        file.write("written once")
        folder = tempfile.TemporaryDirectory()
        weakref.finalize(file, print, "the launcher's finalizer")
        idist.spawn("gloo", work, nproc_per_node=2, start_method="fork")
        print("the folder is", os.path.isdir(folder.name), flush=True)
"""


def test_what_the_launcher_has_stays_with_the_launcher(tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, OF_THE_LAUNCHER), cwd=tmp_path)
    assert sorted(ended.stdout.splitlines()) == [
        "the folder is True",
        "the launcher's finalizer",
        "the launcher's handler",
        "the worker's handler",
        "the worker's handler",
    ]
    assert (tmp_path / "file.txt").read_text() == "written once"


def _killed(_: int, path: Path) -> None:
    text_file(path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_what_python_has_not_written(tmp_path: Path) -> None:
    with pytest.raises(idist.WorkerExitedError):
        spawn(_killed, tmp_path / "file", nproc_per_node=1)
    assert (tmp_path / "file").read_text() == ""


LEAVES_AN_EXECUTOR = """
    import concurrent.futures, ctypes, sys
    import ignite_dist as idist

    def double(value):
        return 2 * value

    def work(local_rank):
        global executor
        executor = concurrent.futures.ProcessPoolExecutor(1)
        assert list(executor.map(double, [1, 2])) == [2, 4]
        ctypes.CDLL(None).printf(b"printed by %d\\n", local_rank)

    if __name__ == "__main__":
        ctypes.CDLL(None).printf(b"printed by the launcher\\n")
        idist.spawn("gloo", work, nproc_per_node=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", METHODS)
def test_executors_that_nobody_ends_and_what_c_has_printed(method: str, tmp_path: Path) -> None:
    """A worker first ends the threads of executors, then joins children, and at last writes C's buffer."""
    ended = run_python(write_script(tmp_path, LEAVES_AN_EXECUTOR), method, seconds=200)
    said = ["printed by 0", "printed by 1", "printed by the launcher"]
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, said), ended.stdout
