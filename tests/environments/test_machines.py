"""Jobs on several machines: network namespaces with addresses and host names of their own."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers import write_script
from machines import Host, Job, machines, needs_namespaces

pytestmark = [pytest.mark.launchers, needs_namespaces]

# torch's store, gloo, our launchers: all of it has to listen where the others reach it, and nowhere else.
SCRIPT = """
    import os
    import sys
    import time
    import traceback
    from datetime import timedelta

    import torch

    import ignite_dist as idist

    def say(text):  # torchrun runs python -u, where print() writes the end of the line by itself
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()

    def places():
        return idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()

    def work(local_rank, way):
        rank, size = idist.get_rank(), idist.get_world_size()
        if way == "works":
            check_collectives(rank, size)
            return f"rank {rank}/{size} on {idist.hostname()}: {local_rank} {places()}"
        try:
            idist.barrier()
            say("at work")  # others may still be in the barrier
            if way == "fails" and rank == size - 1 or way == "fails once" and not idist.restart_count():
                raise LookupError("there is no data")
            say(f"in attempt {idist.restart_count()}")
            tensor = torch.ones(size << 20)
            while True:
                if way == "exchanges":
                    idist.all_to_all(tensor)
                else:
                    idist.all_reduce(tensor[: 1 << 20], "MAX")
        except idist.HostLostError as error:
            say(f"lost {error.host} {error.address}")
            raise

    def check_collectives(rank, size):
        ranks = torch.arange(size)
        assert torch.equal(idist.all_gather(torch.tensor([rank])), ranks)
        assert idist.all_gather({"rank": rank}) == [{"rank": other} for other in range(size)]
        assert idist.all_reduce(torch.ones(1 << 20)).unique().tolist() == [size]
        assert idist.all_reduce({"rank": rank, "one": 1.0}) == {"rank": sum(range(size)), "one": size}
        mine = "mine" if rank == size - 1 else None
        assert idist.broadcast(mine, src=size - 1, safe_mode=True) == "mine"
        ends = [0, size - 1]
        assert idist.all_reduce(1, group=ends) == (2 if rank in ends else 1)
        with idist.one_rank_first(local=True):
            entered = time.monotonic()
            time.sleep(0.1)
            left = time.monotonic()  # all machines are this one, and so are their clocks
        gathered = idist.all_gather((idist.get_node_rank(), idist.get_local_rank(), entered, left))
        for node, local, when, _ in gathered:
            (of_first,) = [end for other, first, _, end in gathered if (other, first) == (node, 0)]
            assert local == 0 or when >= of_first, gathered
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0", os.environ["GLOO_SOCKET_IFNAME"]

    if __name__ == "__main__":
        way, launch, *numbers = sys.argv[1:]
        kwargs = {}
        if launch != "torchrun":
            names = ("node_rank", "nnodes", "nproc_per_node", "timeout")
            kwargs = dict(zip(names, map(int, numbers)), master_addr=os.environ["MAIN"], master_port=29500)
            kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
        if way == "fails once":
            kwargs["max_restarts"] = 3
        try:
            if launch == "spawn":
                results = idist.spawn("gloo", work, (way,), **kwargs)
            else:
                with idist.Parallel("gloo", **kwargs) as parallel:
                    results = [parallel.run(work, way)]
        except idist.DistributedError as error:
            if launch == "torchrun":
                raise
            sys.exit(f"{type(error).__name__}, {getattr(error, 'rank', None)}: {error}")
        say("\\n".join(results))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path, SCRIPT)


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with machines(2) as hosts:
        yield hosts


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with machines(3) as hosts:
        yield hosts


def start(
    hosts: Sequence[Host], script: Path, way: str, launch: str, sizes: Sequence[int], main: str = ""
) -> list[Job]:
    """The script on each host, with as many processes as ``sizes`` says."""
    main = main or hosts[0].address
    return [
        start_one(host, script, way, launch, node_rank, len(sizes), nproc, main)
        for node_rank, (host, nproc) in enumerate(zip(hosts, sizes, strict=False))
    ]


def start_one(
    host: Host,
    script: Path,
    way: str,
    launch: str,
    node_rank: int,
    nnodes: int,
    nproc: int,
    main: str,
    seconds: int = 100,
) -> Job:
    if launch.startswith("torchrun"):
        run = ["-m", "torch.distributed.run", "--nnodes", nnodes, "--nproc-per-node", nproc]
        if launch == "torchrun":
            run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{main}:29400", "--rdzv-id", "job"]
            # The host that has the endpoint, which torchrun does not recognise by its name.
            run += ["--rdzv-conf", f"is_host={int(node_rank == 0)}"]
        else:
            run += ["--node-rank", node_rank, "--master-addr", main, "--master-port", "29400"]
        return host.python(*run, script, way, "torchrun")
    return host.python(script, way, launch, node_rank, nnodes, nproc, seconds, MAIN=main)


def shown(ended: Sequence[tuple[int, str]]) -> str:
    return "\n".join(
        f"--- node {node}: exit code {code}\n{output}" for node, (code, output) in enumerate(ended)
    )


def lines(output: str, start: str = "rank ") -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith(start))


def expected(hosts: Sequence[Host], sizes: Sequence[int]) -> list[str]:
    """What the ranks say, in order."""
    found = []
    for node_rank, (host, size) in enumerate(zip(hosts, sizes, strict=True)):
        for local_rank in range(size):
            places = (local_rank, size, len(sizes), node_rank)
            found.append(f"rank {len(found)}/{sum(sizes)} on {host.name}: {local_rank} {places}")
    return found


@pytest.mark.parametrize("launch", ["spawn", "torchrun", "torchrun, static"])
def test_nodes_of_different_sizes(launch: str, two: list[Host], script: Path) -> None:
    ended = [job.end() for job in start(two, script, "works", launch, (2, 1))]
    assert [code for code, _ in ended] == [0, 0], shown(ended)
    found = sorted(line for _, output in ended for line in lines(output))
    if launch == "torchrun":  # which node is the first is not for us to say
        found = [re.sub(r"\d+", "N", line) for line in found]
        assert found == [re.sub(r"\d+", "N", line) for line in expected(two, (2, 1))], shown(ended)
    else:
        assert found == expected(two, (2, 1)), shown(ended)


@pytest.mark.parametrize("launch", ["Parallel", "torchrun, static"])
def test_three_nodes_by_name(launch: str, three: list[Host], script: Path) -> None:
    """The name of the main host is a loopback address there."""
    sizes = (1, 2, 1)
    ended = [job.end() for job in start(three, script, "works", launch, sizes, main=three[0].name)]
    assert [code for code, _ in ended] == [0, 0, 0], shown(ended)
    found = sorted(line for _, output in ended for line in lines(output))
    ranks = [line for line in expected(three, sizes) if launch != "Parallel" or ": 0 (" in line]
    assert found == ranks, ended  # Parallel gives what local rank 0 returned


@pytest.mark.parametrize("launch", ["spawn", "Parallel"])
def test_every_launcher_raises_what_the_first_rank_died_of(
    launch: str, two: list[Host], script: Path
) -> None:
    jobs = start(two, script, "fails", launch, (2, 1))
    jobs[1].wait_for("at work")
    started = time.monotonic()
    ended = [job.end() for job in jobs]
    assert time.monotonic() - started < 80
    for code, output in ended:
        assert code == 1, shown(ended)
        assert "WorkerRaisedError, 2: Rank 2 (pid" in output and "on hostb) failed first" in output, shown(
            ended
        )
        assert "LookupError: there is no data" in output, shown(ended)


def test_a_launcher_that_is_gone(three: list[Host], script: Path) -> None:
    jobs = start(three, script, "goes on", "spawn", (1, 1, 1))
    jobs[0].wait_for("at work")
    jobs[1].process.send_signal(signal.SIGKILL)
    for job in (jobs[0], jobs[2]):
        code, output = job.end(90)
        assert code == 1, output
        assert (
            "RankFailedError, 1: Node 1 (hostb, 10.98.7.2) with rank 1 cannot be reached: its launcher has "
            in output
        )


def test_a_host_that_never_comes(three: list[Host], script: Path) -> None:
    jobs = [
        start_one(host, script, "works", "spawn", node_rank, 3, 1, three[0].address, seconds=30)
        for node_rank, host in ((0, three[0]), (2, three[2]))
    ]
    (code, first), (code_of_third, third) = (job.end() for job in jobs)
    assert (code, code_of_third) == (1, 1)
    said = (
        "LaunchError, None: Node 1 of 3 did not connect in time. Connected: node 0 (hosta), node 2 (hostc)."
    )
    assert said in first
    assert "LaunchError" in third and ("Node 1 of 3" in third or "waits for other nodes" in third), third


def test_a_main_host_that_never_comes(two: list[Host], script: Path) -> None:
    job = start_one(two[1], script, "works", "spawn", 1, 2, 1, two[0].address, seconds=3)
    code, output = job.end(60)
    assert code == 1
    assert f"Node 0 did not answer node 1 (hostb) at {two[0].address}:29500 in time" in output, output


@pytest.mark.parametrize("launch", ["spawn", "Parallel"])
def test_a_link_that_is_cut_ends_the_job_on_both_sides(launch: str, two: list[Host], script: Path) -> None:
    jobs = start(two, script, "goes on", launch, (2, 1))
    jobs[0].wait_for("at work")
    two[1].cut()
    cut = time.monotonic()
    for job, other, ranks in zip(jobs, reversed(two), ("rank 2", "ranks 0 to 1"), strict=True):
        code, output = job.end(90)
        assert code == 1, output
        node = f"({other.name}, {other.address}) with {ranks} cannot be reached: Connection timed out"
        assert node in output, output
    assert time.monotonic() - cut < 80  # the ranks wait for 100
    for host in two:
        _is_empty(host)


def test_a_link_that_is_cut_after_a_restart(two: list[Host], script: Path) -> None:
    """The failed rank starts again, but the lost machine does not."""
    jobs = start(two, script, "fails once", "spawn", (2, 1))
    for job in jobs:
        job.wait_for("in attempt 1")
    two[1].cut()
    for job, other in zip(jobs, reversed(two), strict=True):
        code, output = job.end(90)
        assert code == 1, output
        assert output.count("Restart 1 of at most 3") == 1 and "Restart 2" not in output, output
        assert f"({other.name}, {other.address})" in output and "cannot be reached" in output, output
    for host in two:
        _is_empty(host)


@pytest.mark.parametrize("way", ["goes on", "exchanges"])
def test_a_link_that_is_cut_under_torchrun(way: str, two: list[Host], script: Path) -> None:
    """gloo forgets those whose part is half sent or half received when a connection fails."""
    jobs = start(two, script, way, "torchrun, static", (2, 1))
    jobs[0].wait_for("at work")
    two[1].cut()
    cut = time.monotonic()
    summaries = []
    for job, other in zip(jobs, reversed(two), strict=True):
        code, output = job.end()
        seconds = time.monotonic() - cut
        assert code == 1, output
        assert f"lost {other.name} {other.address}" in output, output
        assert f"HostLostError: {other.name} ({other.address}) does not answer any more" in output, output
        assert seconds < 100
        summaries.append(output.partition("Root Cause")[2])
    # Where two ranks fail in one second torchrun may take the one that only lost the other.
    assert any("HostLostError" in summary for summary in summaries), summaries


def _is_empty(host: Host, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while host.pids():
        assert time.monotonic() < deadline, f"processes go on on {host.name}: {host.pids()}"
        time.sleep(0.1)
