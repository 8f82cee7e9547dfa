"""What is left after many collectives, contexts and launches: nothing that was not there after the first."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.context.live import current_model

SHORT = timedelta(seconds=60)
SHARED_MEMORY = Path("/dev/shm")
# What the allocators and caches of a process may still take once it has done everything a few times.
ALLOWED_BYTES = 20 * 2**20

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="reads Linux's /proc and /dev/shm"),
]


@dataclass(frozen=True)
class Held:
    """What a process and its fork server hold, and what lies about because of them."""

    num_threads: int
    num_files: int
    num_files_of_server: int
    children: frozenset[int]
    shared_memory: frozenset[str]
    temporary: frozenset[str]
    num_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        process = psutil.Process()
        server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
        return cls(
            process.num_threads(),
            process.num_fds(),
            psutil.Process(server).num_fds() if server else 0,
            frozenset(child.pid for child in process.children(recursive=True)),
            frozenset(_shared_memory()),
            frozenset(_temporary(os.environ["TMPDIR"])),
            process.memory_info().rss,
        )

    def more_than(self, before: Held) -> list[str]:
        """What there is beyond what there was before."""
        found = []
        for name, now in vars(self).items():
            then = getattr(before, name)
            if isinstance(now, frozenset):
                found += [f"{name}: {sorted(map(str, now - then))}"] if now - then else []
            elif now > then + (ALLOWED_BYTES if name == "num_bytes" else 0):
                found.append(f"{name}: {then:,} before, {now:,} after")
        return found

    def check(self, seconds: float = 10) -> int:
        """Fail if this process still holds more in ``seconds``: a thread that is to end takes a moment.

        Returns:
            By how many bytes the process has grown.
        """
        deadline = time.monotonic() + seconds
        while more := Held.now().more_than(self):
            assert time.monotonic() < deadline, "; ".join(more)
            time.sleep(0.05)
        return Held.now().num_bytes - self.num_bytes


def _temporary(folder: str) -> set[str]:
    """The paths under ``folder``, without what torch leaves there.

    torch._dynamo, which the fork server imports, makes a folder for a cache. torch 2.9 makes a folder per
    worker: its ``torch.distributed.nn``, which torch_xla imports, leaves the end of the folder to ``atexit``.
    A process that comes from a fork, or from a fork server, ends without it.
    """
    paths = {path for path in Path(folder).rglob("*") if not path.name.startswith("torchinductor_")}
    for of_torch in {path for path in paths if path.name == "_remote_module_non_scriptable.py"}:
        paths -= {of_torch.parent, *of_torch.parent.rglob("*")}  # also where Python keeps it compiled
    return set(map(str, paths))


def _shared_memory() -> set[str]:
    """The names in shared memory that this process and its children hold, or nobody at all any more.

    What other processes of this machine hold is their own. They may see the same files under other paths.
    """
    inodes = {entry.inode(): entry.name for entry in os.scandir(SHARED_MEMORY)}
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for pid in set(psutil.pids()) - own if inodes else ():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for inode in _inodes_of(pid):
                inodes.pop(inode, None)
    return set(inodes.values()).intersection(path.name for path in SHARED_MEMORY.iterdir())


def _inodes_of(pid: int) -> Iterator[int]:
    """The inodes of files in shared memory that a process has mapped or opened."""
    device = SHARED_MEMORY.stat().st_dev
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        _, _, _, device_of_file, inode, *_ = line.split(maxsplit=5)
        if device_of_file == number:
            yield int(inode)
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            status = fd.stat()
            if status.st_dev == device:
                yield status.st_ino


@pytest.fixture
def folder() -> Iterator[str]:
    """For temporary files of this test alone; its path is short, because sockets are made there."""
    with tempfile.TemporaryDirectory(prefix="leaks") as path:
        yield path


def _use_folder(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # what was found before is forgotten


# --- collectives ---------------------------------------------------------------------------------------


NUM_KINDS = 12


def _collective(number: int, group: Any, ranks: list[int]) -> None:
    """One of several kinds of collectives in a group of ``ranks``."""
    rank, size, last = idist.get_rank(), len(ranks), ranks[-1]
    kind = number % NUM_KINDS
    if kind == 0:
        assert idist.all_reduce(torch.ones(100), group=group).tolist() == [size] * 100
    elif kind == 1:
        assert idist.all_reduce(number, group=group) == number * size
    elif kind == 2:
        tree = {"loss": torch.ones(3), "counts": [1, 2.5], "all": torch.tensor([True])}
        assert idist.all_reduce(tree, "MAX", group=group)["counts"] == [1, 2.5]
    elif kind == 3:
        assert idist.all_gather(torch.ones(7, 3), group=group).shape == (7 * size, 3)
    elif kind == 4:
        assert idist.all_gather({"rank": rank}, group=group) == [{"rank": other} for other in ranks]
    elif kind == 5:
        text = "x" * (20_000 + number % 7)  # more than fits beside its header
        assert idist.all_gather(text, group=group) == [text] * size
    elif kind == 6:
        ragged = idist.all_gather_ragged(torch.ones(1 + rank, 2), group=group)
        assert [tensor.shape[0] for tensor in ragged] == [1 + other for other in ranks]
    elif kind == 7:
        assert idist.broadcast({"from": rank}, src=last, group=group) == {"from": last}
    elif kind == 8:
        assert idist.broadcast(torch.full((50,), rank), src=last, group=group).tolist() == [last] * 50
    elif kind == 9:
        assert idist.all_reduce(torch.ones(5, dtype=torch.bfloat16), "PRODUCT", group=group).sum() == 5
    elif kind == 10:
        assert idist.all_reduce(torch.ones(60_000), group=group)[-1] == size
    else:
        idist.barrier(group)


def _many_collectives(_: int, backend: str, num: int, folder: str) -> tuple[int, int]:
    _use_folder(folder)
    rank, world = idist.get_rank(), list(range(idist.get_world_size()))
    groups = [(None, world), (world, world), ([rank], [rank]), (idist.new_group(world), world)]
    for alone in world:
        idist.barrier([alone])  # Horovod's groups are made by all ranks
    num_all = NUM_KINDS * len(groups)  # every kind of collective in every group
    held = None
    for number in range(num):
        if number == max(num_all, num // 10):
            held = Held.now()
        if held is not None and number == num // 2:  # the allocator has had its fill by then
            held = replace(held, num_bytes=Held.now().num_bytes)
        _collective(number, *groups[number // NUM_KINDS % len(groups)])
    assert held is not None
    return num, held.check()


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_collectives_in_groups_leave_nothing_behind(
    backend: str, repetitions: Callable[[int, int], int], tally: Callable[..., None], folder: str
) -> None:
    num = repetitions(1_000, 10_000) if backend == "gloo" else repetitions(500, 2_000)
    found = idist.spawn(backend, _many_collectives, (backend, num, folder), nproc_per_node=2)
    assert [done for done, _ in found] == [num] * 2
    for _ in range(num):
        tally(f"collectives in groups ({backend}), after which nothing was left")
    for _, grown in found:
        print(f"{backend}: {num} collectives, {grown:,} bytes more than after half of them")


# --- contexts ------------------------------------------------------------------------------------------


def _many_contexts(backend: str, num: int, folder: str) -> int:
    _use_folder(folder)
    held = None
    for number in range(num + 2):
        kwargs = {"timeout": SHORT} if backend == "gloo" else {}
        idist.initialize(backend, **kwargs)
        rank, world_size = idist.get_rank(), idist.get_world_size()
        for group in ([0], list(range(world_size))):
            assert idist.all_reduce(1, group=group) == len(group)  # 1 outside the first of them, too
        assert idist.all_gather(rank) == list(range(world_size))
        idist.finalize()
        if number == 1:
            held = Held.now()
    assert held is not None
    return held.check()


def _many_contexts_in_a_worker(_: int, backend: str, num: int, folder: str) -> int:
    idist.finalize()
    return _many_contexts(backend, num, folder)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["alone", "agents-store", "served-by-rank-0"])
def test_contexts_leave_nothing_behind(
    how: str, repetitions: Callable[[int, int], int], tally: Callable[..., None], folder: str
) -> None:
    num, environs = repetitions(5, 20), None
    if how == "alone":
        environs = [{"TEST": "alone"}]
    elif how == "served-by-rank-0":
        environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    world_size = 1 if how == "alone" else 2
    found = helpers.run_ranks(
        _many_contexts, "gloo", num, folder, world_size=world_size, environs=environs, seconds=90
    )
    assert len(found) == world_size
    print(f"{how}: {num} contexts, grown by {found} bytes")
    for _ in range(num):
        tally("contexts, after which nothing was left")


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.horovod
def test_contexts_of_horovod_leave_nothing_behind(
    repetitions: Callable[[int, int], int], tally: Callable[..., None], folder: str
) -> None:
    num = repetitions(5, 20)
    found = idist.spawn("horovod", _many_contexts_in_a_worker, ("horovod", num, folder), nproc_per_node=2)
    print(f"horovod: {num} contexts, grown by {found} bytes")
    for _ in range(num):
        tally("contexts (horovod), after which nothing was left")


# --- launches ------------------------------------------------------------------------------------------

LAUNCHES = """
    import os
    import signal
    import sys

    import ignite_dist as idist


    def works(local_rank, payload):
        assert idist.all_reduce(1, group=[0, 1]) == 2
        return payload


    def raises(local_rank, payload):
        if local_rank == 1:
            raise LookupError("no data here")
        idist.barrier()


    def dies(local_rank, payload):
        if local_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        idist.barrier()


    def launch(backend, function):
        payload = "x" * 100_000  # more than a pipe holds
        try:
            assert idist.spawn(backend, function, (payload,), nproc_per_node=2) == [payload, payload]
        except idist.RankFailedError:
            assert function is not works


    if __name__ == "__main__":
        from test_leaks import Held

        backend, num = sys.argv[1], int(sys.argv[2])
        functions = [globals()[name] for name in sys.argv[3:]]
        for function in functions:
            launch(backend, function)
        held = Held.now()
        for number in range(num):
            launch(backend, functions[number % len(functions)])
        print(f"{num} launches, grown by {held.check():,} bytes")
"""


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "num", "functions"),
    [
        ("gloo", (10, 200), ("works", "raises", "dies")),
        pytest.param("horovod", (6, 60), ("works", "raises", "dies"), marks=pytest.mark.horovod),
        pytest.param("xla-tpu", (2, 10), ("works", "raises"), marks=pytest.mark.xla),
    ],
    ids=["gloo", "horovod", "xla"],
)
def test_launches_leave_nothing_behind(
    backend: str,
    num: tuple[int, int],
    functions: tuple[str, ...],
    repetitions: Callable[[int, int], int],
    tally: Callable[..., None],
    folder: str,
    tmp_path: Path,
) -> None:
    """One launcher, many launches, some of which fail: its fork server stays, and nothing else."""
    script = helpers.write_script(tmp_path, LAUNCHES)
    environ = helpers.plain_environ(TMPDIR=folder, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    environ["PYTHONPATH"] += os.pathsep + str(helpers.TESTS)
    ended = helpers.run_new_python(script, backend, repetitions(*num), *functions, env=environ, seconds=1500)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    assert _temporary(folder) == set(), "the launcher has ended, and its fork server with it"
    for _ in range(repetitions(*num)):
        tally(f"launches ({backend}), after which nothing was left")


def _model_of_an_ended_context(backend: str) -> bool:
    """Whether the model is gone as soon as its context has ended, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        idist.initialize(backend)
        idist.all_reduce({"n": 1}, async_op=True).wait()
        idist.all_gather("x", group=[idist.get_rank()])
        reference = weakref.ref(current_model())
        idist.finalize()
        return reference() is None
    finally:
        gc.enable()


def test_a_context_that_has_ended_is_in_no_cycle() -> None:
    """Else a forked process would destroy it once more, and wait for threads that are not there."""
    assert helpers.run_ranks(_model_of_an_ended_context, "gloo") == [True, True]
