"""How launchers agree on one job: several of them in one process, each in a thread of its own."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import psutil
import pytest
import torch.distributed as dist

import ignite_dist as idist
from helpers import free_port
from ignite_dist.environments.rendezvous import connections, network_interfaces, stores
from ignite_dist.workers.failures import FailedRank, Failure
from ignite_dist.workers.output import ForwardedOutput
from ignite_dist.workers.supervisor import nodes, processes
from ignite_dist.workers.supervisor.node_links import Hello

ADDRESS = "127.0.0.1"


def meeting(*hellos: Hello, port: int | None = None, seconds: float = 30) -> list[Any]:
    """What each launcher gets: the nodes of the job, or an error."""
    port = port or free_port()
    results: list[Any] = [None] * len(hellos)

    def meet(position: int, hello: Hello) -> None:
        timeout = timedelta(seconds=seconds)
        try:
            results[position] = nodes.meet(hello, ADDRESS, port, timeout, stores.serve_store)
        except idist.LaunchError as error:
            results[position] = error

    threads = [threading.Thread(target=meet, args=arguments) for arguments in enumerate(hellos)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 30)
        assert not thread.is_alive()
    return results


def join(mine: Hello, port: int) -> nodes.Nodes:
    """As a launcher that connects, whatever its node_rank: that of node 0 would listen."""
    return nodes._join(mine, ADDRESS, port, time.monotonic() + 30)


def hello(
    node_rank: int,
    nnodes: int = 2,
    nproc: int = 1,
    backend: str = "gloo",
    host: str = "",
    restarts: int = 0,
) -> Hello:
    return Hello(node_rank, nnodes, nproc, backend, host or f"host{node_rank}", restarts)


@pytest.fixture
def pair() -> Any:
    """The two launchers of a job of 2 + 1 ranks."""
    here, there = meeting(hello(0, nproc=2), hello(1))
    yield here, there
    for job in (here, there):
        job.close()


def read(job: nodes.Nodes, until: Callable[[], bool]) -> None:
    """Let a launcher take the news of the others."""
    while not until():
        ready = connection.wait(job.waited_for(), 30)
        assert ready, "no news"
        job.read(ready)


def failed(rank: int, is_consequence: bool = False) -> FailedRank:
    failure = Failure(1.0 + rank, "LookupError", "no data", "its traceback", None, is_consequence)
    return FailedRank(rank, 0, 4242, "hostx", failure)


# --- meeting -------------------------------------------------------------------------------------------


def test_ranks_are_counted_over_nodes_of_all_sizes() -> None:
    jobs = meeting(hello(0, 3, 2), hello(2, 3, 3), hello(1, 3, 1))
    found = [(environ["RANK"], environ["LOCAL_RANK"]) for job in jobs for environ in job.environs()]
    assert found == [("0", "0"), ("1", "1"), ("3", "0"), ("4", "1"), ("5", "2"), ("2", "0")]
    for job, size in zip(jobs, (2, 3, 1), strict=True):
        for environ in job.environs():
            sizes = environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["GROUP_WORLD_SIZE"]
            assert sizes == ("6", str(size), "3")
        assert [str(node) for node in job.nodes] == [
            f"node {rank} (host{rank}, {ADDRESS})" for rank in range(3)
        ]
    store = dist.TCPStore(ADDRESS, jobs[2].port, wait_for_workers=False)
    store.set("from", "node 1")
    for job in jobs:
        job.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (hello(1, nnodes=3), "nnodes is 2 on host0 (node 0), and 3 on host1"),
        (hello(1, backend="nccl"), "backend is 'gloo' on host0 (node 0), and 'nccl' on host1"),
        (hello(1, restarts=3), "max_restarts is 0 on host0 (node 0), and 3 on host1"),
        (hello(2), "node_rank=2 on host2 is not in [0, 2)"),
        (hello(0, host="hostb"), "node_rank is 0 on both host0 and hostb"),
    ],
)
def test_launchers_that_want_different_jobs(other: Hello, said: str) -> None:
    port = free_port()
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.extend(meeting(hello(0), port=port)))
    first.start()
    with pytest.raises(idist.LaunchError) as caught:
        join(other, port)
    first.join(30)
    assert said in str(caught.value) and said in str(results[0])


def test_two_launchers_with_one_node_rank() -> None:
    results = meeting(hello(0, 3), hello(1, 3), hello(1, 3, host="hostx"))
    assert all("node_rank is 1 on both host" in str(error) for error in results), results


def test_who_did_not_come_is_said_to_those_who_did() -> None:
    results = meeting(hello(0, 4), hello(2, 4), seconds=5)
    said = "Nodes 1, 3 of 4 did not connect in time. Connected: node 0 (host0), node 2 (host2)."
    assert said in str(results[0])
    assert said in str(results[1]) or "waits for other nodes" in str(results[1])


def test_a_port_that_is_in_use() -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        (error,) = meeting(hello(0), port=server.getsockname()[1])
    assert "Node 0 cannot wait for the others" in str(error) and "in use" in str(error)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b'{"node_rank": 1}\n', b"{}\n" * 3, b"[" * 100_000 + b"\n", b""],
)
def test_strangers_are_not_taken_for_launchers(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_HELLO_SECONDS", 0.3)
    port = free_port()
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.extend(meeting(hello(0), port=port)))
    first.start()
    with _connected(port) as stranger:
        stranger.sendall(sent)
        there = join(hello(1), port)
        first.join(30)
    assert [len(job.nodes) for job in (*results, there)] == [2, 2]
    for job in (*results, there):
        job.close()


@pytest.mark.parametrize("sent", [b"HTTP/1.0 400\r\n\r\n", b"{}\n", b"[]\n", b"[" * 100_000 + b"\n", b""])
def test_who_listens_there_is_no_launcher(sent: bytes) -> None:
    num_visits = 0

    def answer() -> None:
        nonlocal num_visits
        while (visitor := server.accept()[0]).recv(1000) != b"end":
            num_visits += 1
            visitor.sendall(sent)
            visitor.close()
        visitor.close()

    with socket.create_server((ADDRESS, 0)) as server:
        answering = threading.Thread(target=answer)
        answering.start()
        port = server.getsockname()[1]
        with pytest.raises(idist.LaunchError, match="Node 0 did not answer node 1"):
            nodes.meet(hello(1), ADDRESS, port, timedelta(seconds=1), stores.serve_store)
        with _connected(port) as last:
            last.sendall(b"end")
            answering.join(30)
    assert 1 <= num_visits <= 11  # and not thousands


def _connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((ADDRESS, port), 30)
        except ConnectionRefusedError:
            continue


def test_a_launcher_that_was_started_again_before_the_others_came() -> None:
    port = free_port()
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.extend(meeting(hello(0, 3), port=port)))
    first.start()
    with _connected(port) as gone:
        gone.sendall(
            b'{"node_rank": 1, "nnodes": 3, "nproc_per_node": 1, "backend": "gloo", "host": "hostx"}\n'
        )
    others: list[Any] = []
    second = threading.Thread(target=lambda: others.append(join(hello(1, 3), port)))
    second.start()
    others.append(join(hello(2, 3), port))
    first.join(30)
    second.join(30)
    assert [node.host for node in results[0].nodes] == ["host0", "host1", "host2"]
    for job in (*results, *others):
        job.close()


# --- while the job goes on -------------------------------------------------------------------------------


def test_the_end_of_a_job(pair: tuple[nodes.Nodes, nodes.Nodes]) -> None:
    here, there = pair
    assert here.has_unfinished_peers() and there.has_unfinished_peers()
    there.report([], is_done=False)
    there.report([], is_done=True)
    read(here, lambda: not here.has_unfinished_peers())
    assert there.has_unfinished_peers()
    here.report([], is_done=True)
    read(there, lambda: not there.has_unfinished_peers())
    there.close()
    assert not here.has_failure()
    read(here, lambda: here._links == {})
    assert not here.has_failure()  # it had said that it was through


def test_a_failure_is_told_to_all_and_once() -> None:
    jobs = meeting(hello(0, 3), hello(1, 3), hello(2, 3))
    for _ in range(2):
        jobs[1].report([failed(1)], is_done=False)
    jobs[1].report([failed(1)], is_done=True)
    for job in (jobs[0], jobs[2]):
        read(job, lambda job=job: 1 in job._done)
        assert job.failed_ranks() == [failed(1)] and job.has_failure()
        with pytest.raises(idist.WorkerRaisedError, match=r"Rank 1 \(pid 4242 on hostx\) failed first"):
            raise job.error_of(job.failed_ranks())
    for job in jobs:
        job.close()


def test_a_launcher_that_goes_without_a_word(pair: tuple[nodes.Nodes, nodes.Nodes]) -> None:
    here, there = pair
    there.close()
    read(here, here.has_failure)
    consequence, cause = failed(0, is_consequence=True), failed(1)
    error = here.error_of([consequence])
    assert (error.rank, error.host) == (2, "host1")
    assert "Node 1 (host1, 127.0.0.1) with rank 2 cannot be reached: its launcher has ended" in str(error)
    assert "Rank 0 failed after it: no data" in str(error)
    assert here.error_of([consequence, cause]).rank == 1  # whose launcher left because of it


def test_a_machine_is_lost_when_a_rank_has_left(pair: tuple[nodes.Nodes, nodes.Nodes]) -> None:
    """By ``sys.exit(0)``, which is no failure: the machine is what the others failed of."""
    here, there = pair
    there.close()
    read(here, here.has_failure)
    left = FailedRank(1, 1, 4242, "hostx", Failure(1.0, "SystemExit", "SystemExit: 0", "its traceback", 0))
    for known in ([left], [left, failed(0, is_consequence=True)]):
        error = here.error_of(known)
        assert (error.rank, error.host) == (2, "host1")
        assert "cannot be reached: its launcher has ended" in str(error)
        assert "Rank 1" not in str(error)
    assert here.error_of([left, failed(0)]).rank == 0


def test_node_0_goes_when_it_is_through_but_others_are_not() -> None:
    jobs = meeting(hello(0, 3), hello(1, 3), hello(2, 3))
    jobs[0].report([], is_done=True)
    jobs[0].close()
    read(jobs[1], jobs[1].has_failure)  # what node 2 says cannot come any more
    with pytest.raises(idist.RankFailedError, match=r"Node 0 .* cannot be reached: its launcher has ended"):
        raise jobs[1].error_of([])
    for job in jobs:
        job.close()


@pytest.mark.parametrize(("argument", "start_method"), [(threading.Lock(), None), (1, "no such method")])
def test_what_cannot_be_started_keeps_nobody_waiting(
    argument: Any, start_method: str | None, pair: tuple[nodes.Nodes, nodes.Nodes]
) -> None:
    here, there = pair
    with pytest.raises((TypeError, ValueError)):
        processes.start(
            print,
            {"end": argument},
            here.environs(),
            store=None,
            start_method=start_method,
            daemon=False,
            nodes=here,
        )
    read(there, there.has_failure)


def test_a_launch_goes_on_while_its_ranks_elsewhere_do(pair: tuple[nodes.Nodes, nodes.Nodes]) -> None:
    here, there = pair
    workers = processes.Workers(
        [], None, None, here, ForwardedOutput(has_prefix=False)
    )  # whose processes have ended
    assert workers.may_run()
    there.report([], is_done=True)
    read(here, lambda: not here.has_unfinished_peers())
    assert not workers.may_run()


@pytest.mark.parametrize("line", [b"no message\n", b"[1]\n"])
def test_what_is_no_message_is_a_launcher_that_is_gone(
    line: bytes, pair: tuple[nodes.Nodes, nodes.Nodes]
) -> None:
    here, there = pair
    there._links[0].sock.sendall(line)
    read(here, here.has_failure)
    assert here._links == {}


def test_a_latecomer_is_refused(pair: tuple[nodes.Nodes, nodes.Nodes]) -> None:
    here, _ = pair
    port = here._listener.getsockname()[1]
    late: list[BaseException] = []

    def come() -> None:
        try:
            join(hello(1, host="late"), port)
        except idist.LaunchError as error:
            late.append(error)

    coming = threading.Thread(target=come)
    coming.start()
    here.read(connection.wait(here.waited_for(), 30))
    coming.join(30)
    assert "The job has all its nodes" in str(late[0]) and "node 1 (host1, 127.0.0.1)" in str(late[0])


# --- a new attempt ---------------------------------------------------------------------------------------


def next_attempts(*jobs: nodes.Nodes, wanted: bool = True) -> list[nodes.Nodes | None]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda job: job.next_attempt(wanted, stores.serve_store), jobs))


def test_a_new_attempt_has_the_same_nodes_and_nothing_of_the_old_one() -> None:
    jobs = meeting(hello(0, 3, restarts=2), hello(1, 3, 2, restarts=2), hello(2, 3, restarts=2))
    jobs[1].report([failed(1)], is_done=True)
    again = next_attempts(*jobs)
    for old, new in zip(jobs, again, strict=True):
        assert new is not None and new.nodes == old.nodes and new.restarts_left == 1
        assert new.port == again[0].port != old.port  # type: ignore[union-attr]
        assert not new.has_failure() and new.failed_ranks() == [] and new.has_unfinished_peers()
        assert old.waited_for() == [] and old._store is None
    again[2].report([failed(3)], is_done=True)  # type: ignore[union-attr]
    for new in again[:2]:
        read(new, new.has_failure)  # type: ignore[arg-type, union-attr]
        assert new.failed_ranks() == [failed(3)]  # type: ignore[union-attr]
    for new in again:
        new.close()  # type: ignore[union-attr]


def test_what_follows_the_decision_belongs_to_the_new_attempt() -> None:
    here, there = meeting(hello(0, restarts=1), hello(1, restarts=1))
    report = {"node": 0, "failed": {**failed(0)._asdict(), "failure": vars(failed(0).failure)}}
    lines = [{"node": 0, "done": True}, {"node": 0, "next": 4242}, report]  # in one packet
    here._links[1].sock.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    new = there.next_attempt(True, stores.serve_store)
    assert new is not None and new.port == 4242
    assert new.failed_ranks() == [failed(0)] and there.failed_ranks() == []
    for job in (here, new):
        job.close()


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_no_new_attempt_without_a_launcher(leaves: int, caplog: pytest.LogCaptureFixture) -> None:
    jobs = meeting(*[hello(rank, 3, restarts=1) for rank in range(3)])
    jobs.pop(leaves).close()
    assert next_attempts(*jobs) == [None, None]
    assert all(job.waited_for() == [] for job in jobs)
    assert f"No restart: node {leaves} (host{leaves}, {ADDRESS}) did not agree" in caplog.text


def test_no_new_attempt_if_node_0_does_not_want_one() -> None:
    here, there = meeting(hello(0, restarts=1), hello(1, restarts=1))
    with ThreadPoolExecutor() as pool:
        other = pool.submit(there.next_attempt, True, stores.serve_store)
        assert here.next_attempt(False, stores.serve_store) is None
    assert other.result() is None


def test_a_launcher_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_END_SECONDS", 0.2)
    for silent in (0, 1):
        jobs = meeting(hello(0, restarts=1), hello(1, restarts=1))
        assert next_attempts(jobs[1 - silent]) == [None]
        jobs[silent].close()


# --- the connections of others ---------------------------------------------------------------------------


def _options(sock: socket.socket) -> list[int]:
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return [sock.getsockopt(socket.IPPROTO_TCP, name) for name in names]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux's options of TCP")
@pytest.mark.parametrize("default_timeout", [None, 5.0])
def test_what_a_block_opens_is_watched_and_nothing_else(
    default_timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IGNITE_DIST_SILENCE_SECONDS", "15")
    with (
        socket.create_server((ADDRESS, 0)) as server,
        socket.create_connection(server.getsockname()) as before,
    ):
        with connections.keepalive():
            after = socket.create_connection(server.getsockname())
            unconnected = socket.socket()
            socket.setdefaulttimeout(default_timeout)
        socket.setdefaulttimeout(None)
        with after, unconnected:
            assert os.get_blocking(after.fileno())
            assert _options(after) == [5, 5, 3, 15_000]
            assert _options(before) == _options(unconnected) != _options(after)
            kept = [one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for one in (before, after)]
            assert kept == [0, 1]


def test_how_long_a_machine_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IGNITE_DIST_SILENCE_SECONDS", raising=False)
    assert connections.keepalive_seconds() == 30
    for wrong in ("2", "soon", "-1"):
        monkeypatch.setenv("IGNITE_DIST_SILENCE_SECONDS", wrong)
        with pytest.raises(idist.EnvironmentVariablesError, match="IGNITE_DIST_SILENCE_SECONDS"):
            connections.keepalive_seconds()


SILENT = "[/gloo/pair.cc:537] Read error [{}]:64721: Connection timed out. This is typically caused by"


def test_a_silent_machine_is_named() -> None:
    cause = RuntimeError(SILENT.format("127.0.0.1"))
    lost = connections.with_cause(cause)
    assert isinstance(lost, idist.HostLostError) and lost.__cause__ is cause
    assert (lost.host, lost.address) == (socket.gethostbyaddr("127.0.0.1")[0], "127.0.0.1")
    assert connections.with_cause(lost) is lost
    mapped = connections.with_cause(RuntimeError(SILENT.format("::ffff:127.0.0.1")))
    assert isinstance(mapped, idist.HostLostError) and mapped.address == "127.0.0.1"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:53679."),
        RuntimeError("Timed out waiting 1800000ms for recv operation"),
        OSError("[127.0.0.1]:5432: Connection timed out"),  # the user's own, to a database say
    ],
    ids=repr,
)
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    assert connections.with_cause(error) is error


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(connections, "_DNS_SECONDS", 0.1)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda address: ("late",) * answered.wait(60))
    lost = connections.with_cause(RuntimeError(SILENT.format("10.1.2.3")))
    answered.set()
    assert isinstance(lost, idist.HostLostError) and (lost.host, lost.address) == ("", "10.1.2.3")
    assert str(lost).startswith("10.1.2.3 does not answer any more")


def test_the_interface_towards_another_machine() -> None:
    for address in ("127.0.0.1", "localhost", "no.such.host.invalid"):
        assert network_interfaces.interface_towards(address) is None
    for name, known in psutil.net_if_addrs().items():
        for one in known:
            if one.family is socket.AF_INET and not network_interfaces.is_loopback(one.address):
                assert network_interfaces.interface_towards(one.address) == name


def test_a_wait_for_other_nodes_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "LONG_WAIT_SECONDS", 0.05)
    port = free_port()
    (error,) = meeting(hello(0, 3), port=port, seconds=1)
    assert isinstance(error, idist.LaunchError)
    assert f"Node 0 (host0) is still waiting at {ADDRESS}:{port} for node 1, 2 of 3." in caplog.messages
    (error,) = meeting(hello(1), port=port, seconds=1)
    assert isinstance(error, idist.LaunchError)
    assert f"Node 1 (host1) is still waiting for node 0 at {ADDRESS}:{port}." in caplog.messages
