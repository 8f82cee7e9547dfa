"""Where the ranks of a group cannot share memory, or a container limits it: the results are the same."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from machines import machines, needs_namespaces
from on_ranks import on_ranks

pytestmark = pytest.mark.long

SECONDS = 90

# A rank of a job on one or several machines: its results, and how many groups share memory on it.
RANK = """
    import os
    import re
    import sys
    from pathlib import Path

    MAPS = "/proc/self/maps"
    if "without /proc" in sys.argv:  # it is hidden after the imports, which read it
        import ctypes
        import torch
        import ignite_dist
        assert ctypes.CDLL(None).mount(b"none", b"/proc", b"tmpfs", 0, None) == 0
    import torch
    import ignite_dist as idist

    def num_shared():
        maps = Path(MAPS)
        return len(re.findall("/memfd:ignite_dist", maps.read_text())) if maps.exists() else 0

    idist.initialize("gloo")
    rank, size = idist.get_rank(), idist.get_world_size()
    found = []
    for group in [None, *([[0, 1], [2, 3]] if size == 4 else [])]:
        if group is None or rank in group:
            ranks = group or list(range(size))
            before = num_shared()
            for numel in (1, 1_000_001):
                reduced = idist.all_reduce(torch.full((numel,), rank), group=group)
                assert set(reduced.tolist()) == {sum(ranks)}
            assert idist.all_gather({"rank": rank}, group) == [{"rank": other} for other in ranks]
            idist.barrier(group)
            found.append(num_shared() - before)
    print(f"rank {rank} shares {found}", flush=True)
    idist.finalize()
"""


def mapped() -> int:
    return len(re.findall("/memfd:ignite_dist", Path("/proc/self/maps").read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


# --- one rank cannot -----------------------------------------------------------------------------------


def _no_small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _no_more_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _allow_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)


def _switch_off() -> None:
    os.environ[VARIABLE] = "0"


def _no_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 12, 1 << 12))


# What limits a rank, on which rank, and how many groups then share memory.
LIMITS: dict[str, tuple[Callable[[], None], int, int]] = {
    "the variable on the first rank": (_switch_off, 0, 0),
    "the variable on the last rank": (_switch_off, 2, 0),
    "ulimit -f on the first rank": (_no_small_files, 0, 0),
    "ulimit -n on the last rank": (_no_more_files, 2, 0),
    "ulimit -l": (_no_locked_memory, 1, 1),
}


def _with_limit(_: int, name: str) -> int:
    limit, on_rank, _ = LIMITS[name]
    rank, size = idist.get_rank(), idist.get_world_size()
    if rank == on_rank:
        limit()
    for numel in (1, 700_001):
        assert set(idist.all_reduce(torch.full((numel,), rank)).tolist()) == {sum(range(size))}
        assert idist.broadcast(torch.full((numel,), rank), size - 1)[-1] == size - 1
        assert idist.all_gather(torch.full((numel,), rank))[:: max(numel, 1)].tolist() == list(range(size))
    assert idist.all_gather("x" * rank) == ["x" * other for other in range(size)]
    idist.barrier()
    _allow_files()
    return mapped()


@pytest.mark.parametrize("name", list(LIMITS))
def test_if_one_rank_cannot_all_ranks_use_gloo(name: str) -> None:
    assert on_ranks(_with_limit, name, world_size=3) == [LIMITS[name][2]] * 3


# --- containers ----------------------------------------------------------------------------------------

# In front of the command of each rank: what a container takes from its processes.
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh")
MOUNTS = ("unshare", "--mount")


def _run(script: Path, *prefixes: tuple[str, ...], arguments: tuple[tuple[str, ...], ...] = ()) -> list[str]:
    """What each rank has written; rank ``i`` is started by the command ``prefixes[i]``."""
    environs = helpers.torchrun_environs(len(prefixes), helpers.free_port(), agent_store=False)
    ranks = [
        subprocess.Popen(
            [
                *(*prefix, helpers.python_that_forks(), str(script)),
                *(arguments[rank] if arguments else ()),
            ],
            env=helpers.plain_environ(**{**helpers.loopback(), **environs[rank]}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
        return outputs
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@needs_namespaces
@pytest.mark.parametrize(
    ("prefixes", "shares"),
    [
        (((), ()), 1),
        ((PID_NAMESPACE, PID_NAMESPACE), 0),
        (((), PID_NAMESPACE), 0),
        ((PID_NAMESPACE, ()), 0),
        ((SMALL_SHM, SMALL_SHM), 1),
    ],
    ids=[
        "none",
        "own PID namespaces",
        "the last in a namespace",
        "the first in a namespace",
        "small /dev/shm",
    ],
)
def test_ranks_in_containers(prefixes: tuple[tuple[str, ...], ...], shares: int, tmp_path: Path) -> None:
    outputs = _run(helpers.write_script(tmp_path, RANK), *prefixes)
    assert all(f"rank {rank} shares [{shares}]" in output for rank, output in enumerate(outputs)), outputs


@needs_namespaces
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_proc(rank: int, tmp_path: Path) -> None:
    arguments = tuple(("without /proc",) if place == rank else () for place in range(2))
    outputs = _run(helpers.write_script(tmp_path, RANK), MOUNTS, MOUNTS, arguments=arguments)
    assert all(f"rank {place} shares [0]" in output for place, output in enumerate(outputs)), outputs


@needs_namespaces
def test_on_several_machines_the_ranks_of_each_share_memory(tmp_path: Path) -> None:
    """The processes of a machine have their own numbers, which those of the other machine have too."""
    script = helpers.write_script(tmp_path, RANK)
    both = helpers.write_script(
        tmp_path,
        f"""
        import os
        import subprocess
        import sys

        first, address = int(sys.argv[1]), sys.argv[2]
        common = dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT="29400")
        ranks = [
            subprocess.Popen(
                [sys.executable, {str(script)!r}],
                env={{**os.environ, **common, "RANK": str(first + place), "LOCAL_RANK": str(place)}},
            )
            for place in range(2)
        ]
        sys.exit(max(abs(rank.wait({SECONDS})) for rank in ranks))
        """,
        "both.py",
    )
    with machines(2, "10.98.17") as hosts:
        jobs = [
            host.start(
                *(*PID_NAMESPACE, sys.executable, both, 2 * place, hosts[0].address),
                IGNITE_DIST_SHARED_MEMORY="1",
            )
            for place, host in enumerate(hosts)
        ]
        ended = [job.end(SECONDS) for job in jobs]
    for place, (code, output) in enumerate(ended):
        assert code == 0, ended
        for rank in (2 * place, 2 * place + 1):
            assert f"rank {rank} shares [0, 1]" in output, ended
