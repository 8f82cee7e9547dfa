"""How ranks find each other: what listens meanwhile, and many jobs at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist
from ignite_dist.environments.rendezvous import connections, stores
from ignite_dist.environments.rendezvous.network_interfaces import loopback_interface

SHORT = timedelta(seconds=40)
IN_VAIN = timedelta(seconds=4)  # passes in the test; a busy machine may take a second to connect to a store
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NOT_SAID = dict.fromkeys(INTERFACES, "")  # an empty variable is one that is not set

linux_tables = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets"
)


# --- what listens --------------------------------------------------------------------------------------


def _what_listens(backend: str = "gloo", **kwargs: Any) -> tuple[set[str], list[str | None]]:
    """Where this rank listens while groups are made and used, and on which interfaces it was to."""
    before = dict(os.environ)
    idist.initialize(backend, timeout=SHORT, **kwargs)
    ranks = list(range(idist.get_world_size()))
    for group in (ranks[:1], ranks[-1:], ranks):
        idist.all_reduce(torch.ones(4, device=idist.device()), group=group)
        idist.all_gather("object", group=group)
    idist.barrier(idist.new_group(ranks))
    found = helpers.listening([os.getpid()]), [os.environ.get(name) for name in INTERFACES]
    idist.finalize()
    assert dict(os.environ) == before
    return found


def _environs(how: str) -> list[dict[str, str]]:
    if how == "arguments":
        return [{"TEST_RANK": str(rank), **NOT_SAID} for rank in range(2)]
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    if how == "addresses":
        said = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environs = [{name: one[name] for name in said} for one in environs]
    return [{**one, **NOT_SAID} for one in environs]


def _by_arguments(port: int) -> tuple[set[str], list[str | None]]:
    method, rank = f"tcp://127.0.0.1:{port}", int(os.environ["TEST_RANK"])
    return _what_listens(init_method=method, rank=rank, world_size=2)


@linux_tables
@pytest.mark.parametrize("how", ["torchruns-variables", "addresses", "arguments"])
def test_ranks_on_one_machine_listen_on_the_loopback_interface_only(how: str) -> None:
    function, args = (_by_arguments, [helpers.free_port()]) if how == "arguments" else (_what_listens, [])
    lo = loopback_interface()
    for addresses, interfaces in helpers.run_ranks(function, *args, environs=_environs(how)):
        assert addresses and all(map(helpers.is_loopback, addresses)), addresses
        assert interfaces == [lo, lo]


UNDER_TORCHRUN = """
    import os
    import helpers
    import ignite_dist as idist

    with idist.Parallel(backend="gloo") as parallel:
        assert parallel.run(lambda local_rank: idist.all_reduce(1, group=[0, 1])) == 2
        found = helpers.listening([os.getpid()])
        assert found and all(map(helpers.is_loopback, found)), found
        print(f"rank {idist.get_rank()}: {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
"""


@pytest.mark.long
@linux_tables
def test_the_workers_of_torchrun_on_one_machine_listen_on_the_loopback_interface_only(
    tmp_path: Path,
) -> None:
    script = helpers.write_script(tmp_path, UNDER_TORCHRUN)
    environ = helpers.plain_environ()
    environ["PYTHONPATH"] += os.pathsep + str(helpers.TESTS)
    for name in INTERFACES:
        environ.pop(name, None)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = helpers.run_python(*run, script, env=environ)
    assert ended.returncode == 0, ended.stdout
    for rank in (0, 1):
        assert f"rank {rank}: {loopback_interface()}" in ended.stdout


@linux_tables
def test_a_world_of_one_listens_on_the_loopback_interface_only() -> None:
    ((addresses, interfaces),) = helpers.run_ranks(_what_listens, world_size=1, environs=[NOT_SAID])
    assert addresses and all(map(helpers.is_loopback, addresses)), addresses
    assert interfaces == [loopback_interface()] * 2


@linux_tables
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")
def test_under_nccl_too() -> None:
    ((addresses, interfaces),) = helpers.run_ranks(_what_listens, "nccl", world_size=1, environs=[NOT_SAID])
    assert all(map(helpers.is_loopback, addresses)), addresses
    assert interfaces == [loopback_interface()] * 2


def _asks_once() -> tuple[str | None, ...]:
    """The variable before a context, in it, and after it."""
    name = "GLOO_ENABLE_STORE_V2_API"
    found = [os.environ.get(name)]
    idist.initialize("gloo", timeout=SHORT)
    found.append(os.environ.get(name))
    assert idist.all_reduce(1, group=[0, 1]) == 2
    idist.finalize()
    return *found, os.environ.get(name)


@pytest.mark.parametrize("said", [None, "0"], ids=["not-said", "said-by-the-user"])
def test_gloo_asks_the_store_for_all_addresses_at_once(said: str | None) -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    environs = [{**one, **({"GLOO_ENABLE_STORE_V2_API": said} if said else {})} for one in environs]
    assert helpers.run_ranks(_asks_once, environs=environs) == [(said, said or "1", said)] * 2


def _network_interface() -> str | None:
    """An interface that other machines may reach, with an address of IPv4."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET" and not helpers.is_loopback(address.address):
                return str(name)
    return None


@linux_tables
@pytest.mark.skipif(_network_interface() is None, reason="needs a network interface")
def test_the_interface_that_the_user_names_is_used() -> None:
    named = _network_interface()
    assert named is not None
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    environs = [{**one, "GLOO_SOCKET_IFNAME": named} for one in environs]
    for addresses, interfaces in helpers.run_ranks(_what_listens, environs=environs):
        assert not all(map(helpers.is_loopback, addresses))
        assert interfaces[0] == named


@pytest.mark.parametrize(
    ("environ", "init_method", "expected"),
    [
        ({}, None, True),  # a world of one
        ({"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "node1"}, None, True),
        ({"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None, False),
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, None, True),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None, False),
        ({"MASTER_ADDR": "127.0.0.1"}, None, True),
        ({"MASTER_ADDR": "127.3.2.1"}, "env://", True),
        ({"MASTER_ADDR": "::1"}, None, True),
        ({"MASTER_ADDR": "localhost"}, None, True),
        ({"MASTER_ADDR": "node1"}, None, False),
        ({"MASTER_ADDR": "10.0.0.1"}, None, False),
        ({"MASTER_ADDR": "node1"}, "tcp://127.0.0.1:5", True),
        ({"MASTER_ADDR": "node1"}, "tcp://[::1]:5", True),
        ({"MASTER_ADDR": "127.0.0.1"}, "tcp://node1:5", False),
        ({"MASTER_ADDR": "127.0.0.1"}, "file:///shared/by/machines", False),
        ({}, "file:///shared/by/machines", False),  # the address is our own default then
    ],
)
def test_when_all_ranks_are_known_to_run_on_this_machine(
    environ: dict[str, str], init_method: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environ or init_method:
        environ = {"RANK": "0", "WORLD_SIZE": "4", **environ}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = stores.find_place(init_method, None, None)
    assert (stores.interface_variables(place, init_method) == stores.loopback_variables()) == expected


def _waits_in_vain(seconds: int = 2) -> None:
    idist.initialize("gloo", timeout=timedelta(seconds=seconds))


def test_a_rank_0_that_calls_itself_localhost_is_told_that_others_do_not_reach_it() -> None:
    """Some launchers say that to rank 0 alone, and its name on the network to all others."""
    port = helpers.free_port()
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    (ended,) = helpers.end_of_ranks(_waits_in_vain, environs=[environ])
    for text in ("MissingRanksError", f"localhost:{port}", "Only processes on rank 0's machine", "network"):
        assert text in ended.error


@pytest.mark.long
def test_ranks_that_do_not_come_are_named_on_every_rank_that_has() -> None:
    port = str(helpers.free_port())
    place = {"WORLD_SIZE": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environs = [{**place, "RANK": rank} for rank in ("0", "3")]
    said = f"MissingRanksError: Ranks 1-2, 4 of 5 did not reach 127.0.0.1:{port} in time; ranks 0, 3 did"
    for ended in helpers.end_of_ranks(_waits_in_vain, 10, environs=environs):
        assert f"{said} ({socket.gethostname()})." in ended.error


def test_a_rank_0_that_does_not_come_is_named() -> None:
    port = helpers.free_port()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (ended,) = helpers.end_of_ranks(_waits_in_vain, environs=[environ])
    assert f"MissingRanksError: Rank 0 of 2 did not reach 127.0.0.1:{port} in time, or" in ended.error


def _tries_again(folder: Path) -> tuple[list[int], int]:
    """Rank 1 comes when rank 0 has given up; then both try."""
    missed = []
    if os.environ["RANK"] == "0":
        with pytest.raises(idist.MissingRanksError) as info:
            idist.initialize("gloo", timeout=IN_VAIN)
        missed = info.value.ranks
        (folder / "given up").touch()
    while not (folder / "given up").exists():
        time.sleep(0.02)
    idist.initialize("gloo", timeout=SHORT)
    return missed, idist.all_reduce(1)


@pytest.mark.parametrize("server", ["agent", "rank 0"])
def test_ranks_that_have_missed_each_other_may_try_again(server: str, tmp_path: Path) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    by_agent = server == "agent"
    environs = helpers.torchrun_environs(
        2, agent.port if by_agent else helpers.free_port(), agent_store=by_agent
    )
    assert helpers.run_ranks(_tries_again, tmp_path, environs=environs) == [([1], 2), ([], 2)]


def _gives_up_early(folder: Path) -> str:
    """Rank 1 has less patience than rank 0, and comes when rank 0 is there."""
    rank = int(os.environ["RANK"])
    with pytest.raises(idist.MissingRanksError) as info:
        idist.initialize("gloo", timeout=timedelta(seconds=[100, 2][rank]))
    return str(info.value)


def test_who_gives_up_first_does_so_for_all(tmp_path: Path) -> None:
    environs = helpers.torchrun_environs(3, helpers.free_port(), agent_store=False)[:2]
    first, second = helpers.run_ranks(_gives_up_early, tmp_path, environs=environs)
    assert first == second and first.startswith("Rank 2 of 3 did not reach 127.0.0.1:")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_to_a_file_is_named(rank: int, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet"
    with pytest.raises(idist.MissingRanksError, match=f"of 2 did not reach {meet} in time") as info:
        idist.initialize("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    assert info.value.ranks == [1 - rank]


# --- one place, many contexts --------------------------------------------------------------------------


def _beside_another_library(theirs_first: bool) -> int:
    """Another library of this process, torch's RPC for example, meets at the same address."""
    rank = int(os.environ["RANK"])
    rendezvous_of_theirs = dist.rendezvous("env://", rank, 2, timeout=SHORT)
    if not theirs_first:
        idist.initialize("gloo", timeout=SHORT)
    store = next(rendezvous_of_theirs)[0]
    if theirs_first:
        idist.initialize("gloo", timeout=SHORT)
    store.set(f"theirs {rank}", str(rank))
    found = int(store.get(f"theirs {1 - rank}"))
    idist.finalize()
    return found


@pytest.mark.parametrize("theirs_first", [True, False], ids=["theirs-first", "ours-first"])
def test_another_library_meets_at_the_same_address(theirs_first: bool) -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    assert helpers.run_ranks(_beside_another_library, theirs_first, environs=environs) == [1, 0]


def _files_of_contexts(folder: str) -> list[list[str]]:
    seen = []
    for _ in range(3):
        rank = int(os.environ["TEST_RANK"])
        idist.initialize("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=SHORT)
        idist.barrier()
        seen.append(sorted(path.name for path in Path(folder).iterdir()))
        idist.barrier()
        idist.finalize()
    return seen


def _outputs_of_two_ranks(script: Path, exit_codes: tuple[int, int] = (0, 0)) -> list[str]:
    """The output of each of two ranks, which must exit with ``exit_codes``. Rank 0 serves the store."""
    ranks = [
        subprocess.Popen(
            [helpers.python_that_forks(), script],
            env=helpers.plain_environ(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    ]
    try:
        outputs = [helpers.without_gloos(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert tuple(rank.returncode for rank in ranks) == exit_codes, outputs
    return outputs


@pytest.mark.long
def test_many_contexts_at_one_address_print_nothing(tmp_path: Path) -> None:
    """A rank may begin the next context before rank 0 has closed the store of the last one."""
    script = helpers.write_script(
        tmp_path,
        """
        import ignite_dist as idist

        for _ in range(20):
            with idist.Parallel("gloo") as parallel:
                assert parallel.run(lambda _: idist.all_gather(idist.get_rank())) == [0, 1]
        """,
    )
    assert _outputs_of_two_ranks(script) == ["", ""]


@pytest.mark.long
def test_a_rank_waits_for_the_end_of_the_last_store_however_late(tmp_path: Path) -> None:
    """A rank that joins a store before rank 0 closes it prints a warning of torch."""
    script = helpers.write_script(
        tmp_path,
        """
        import os, pathlib, threading, time, torch
        import ignite_dist as idist
        from ignite_dist.environments.rendezvous import connections

        waits = pathlib.Path(__file__).with_name("waits")

        def close_late(models):
            while not waits.exists():
                time.sleep(0.01)
            threading.Event().wait(6.0)  # longer than ranks once waited
            models.clear()  # closes the store, which a model has held
            connections.listen("127.0.0.1", int(os.environ["MASTER_PORT"])).close()  # the port is free

        idist.initialize("gloo")
        models = [idist.auto_model(torch.nn.Linear(2, 2))]
        idist.finalize()
        close_late(models) if idist.environment().rank == 0 else waits.touch()
        idist.initialize("gloo")
        assert idist.all_gather(idist.get_rank()) == [0, 1]
        idist.finalize()
        """,
    )
    assert _outputs_of_two_ranks(script) == ["", ""]


def test_a_rank_that_waits_for_the_end_of_the_last_store_makes_no_request(tmp_path: Path) -> None:
    """A request to which rank 0 does not reply before it closes the store prints a warning of torch."""
    script = helpers.write_script(
        tmp_path,
        """
        import os, psutil, signal, threading, time, torch
        from datetime import timedelta
        import ignite_dist as idist
        from ignite_dist.environments.rendezvous import connections

        idist.initialize("gloo")
        models = [idist.auto_model(torch.nn.Linear(2, 2))]  # the store stays open
        pid_of_rank_0, _ = idist.all_gather(os.getpid())
        idist.finalize()
        if pid_of_rank_0 == os.getpid():
            os.kill(pid_of_rank_0, signal.SIGSTOP)
        rank_0 = psutil.Process(pid_of_rank_0)
        while rank_0.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)

        def wait_for_end(fds, seconds, wait=connections.wait_for_end):
            threading.Timer(0.5, rank_0.kill).start()
            wait(fds, seconds)
            rank_0.wait()  # the kernel may close its connections before its port

        connections.wait_for_end = wait_for_end
        try:
            idist.initialize("gloo", timeout=timedelta(seconds=5))
        except idist.MissingRanksError:
            print("rank 0 is missing")
        """,
    )
    _, output = _outputs_of_two_ranks(script, (-signal.SIGKILL, 0))
    assert "rank 0 is missing" in output and "recvValue" not in output


def _begins_again_after_a_failure() -> list[int]:
    """gloo fails after the ranks have met. Rank 0 takes longer to leave what it has begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "none")
        try:
            idist.initialize("gloo", timeout=SHORT)
        except RuntimeError:
            threading.Event().wait(1.0 if int(os.environ["RANK"]) == 0 else 0.0)
    idist.initialize("gloo", timeout=SHORT)
    found = idist.all_gather(idist.get_rank())
    idist.finalize()
    return found


def test_a_context_after_a_failure_to_begin_one() -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    assert helpers.run_ranks(_begins_again_after_a_failure, environs=environs) == [[0, 1]] * 2


def _does_not_come_to_the_second_context(folder: str) -> str:
    """Rank 0 keeps a model, which holds the store of the first context, and begins no second one."""
    idist.initialize("gloo", timeout=SHORT)
    model = idist.auto_model(torch.nn.Linear(2, 2))
    idist.finalize()
    ended = [Path(folder, str(rank)) for rank in (1, 2)]
    try:
        if int(os.environ["RANK"]) == 0:
            while not all(path.exists() for path in ended):
                time.sleep(0.02)
        else:
            idist.initialize("gloo", timeout=timedelta(seconds=3 + int(os.environ["RANK"])))
    except idist.MissingRanksError as error:
        return str(error)
    finally:
        Path(folder, str(int(os.environ["RANK"]))).touch()
        del model
    return ""


def test_a_rank_0_that_does_not_come_again_is_named_alone(tmp_path: Path) -> None:
    environs = helpers.torchrun_environs(3, helpers.free_port(), agent_store=False)
    served, *others = helpers.run_ranks(
        _does_not_come_to_the_second_context, str(tmp_path), world_size=3, environs=environs
    )
    assert not served
    assert all("Rank 0 of 3 did not reach" in error and "ranks 1-2 did" in error for error in others), others


def test_contexts_while_models_hold_the_stores_of_earlier_ones() -> None:
    """Rank 0 serves the next context over the store of the last one."""
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    assert helpers.run_ranks(_contexts_with_models, environs=environs) == [[[0, 1]] * 3] * 2


def _with_a_client_of_the_user() -> list[Any]:
    """Rank 1 has a connection of its own to the store, which rank 0 serves in all contexts."""
    clients, models, found = [], [], []
    if int(os.environ["RANK"]) == 1:
        port = int(os.environ["MASTER_PORT"])
        clients.append(dist.TCPStore("127.0.0.1", port, timeout=SHORT, wait_for_workers=False))
    for number in range(3):
        idist.initialize("gloo", timeout=SHORT)
        for client in clients:
            client.set("of the user", str(number))
            found.append(client.get("of the user"))
        models.append(idist.auto_model(torch.nn.Linear(2, 2)))
        idist.finalize()
    return found


def test_a_connection_of_the_user_to_the_store_stays_open() -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    assert helpers.run_ranks(_with_a_client_of_the_user, environs=environs) == [[], [b"0", b"1", b"2"]]


def _contexts_with_models() -> list[list[int]]:
    models, found = [], []
    for _ in range(3):
        idist.initialize("gloo", timeout=SHORT)
        models.append(idist.auto_model(torch.nn.Linear(2, 2)))
        found.append(idist.all_gather(idist.get_rank()))
        idist.finalize()
    return found


def test_no_file_is_deleted_while_somebody_enters_the_next_context_over_it(tmp_path: Path) -> None:
    """torch's FileStore deletes its file when its last user leaves, but not under the file's lock.

    It leaves the file behind if two users leave at once: each first counts itself, then gives up its
    reference, and deletes the file if both numbers say that it is the last.
    """
    environs = [{"TEST_RANK": str(rank)} for rank in range(2)]
    for seen in helpers.run_ranks(_files_of_contexts, str(tmp_path), environs=environs):
        for number, (name, files) in enumerate(zip(["meet", "meet.1", "meet.2"], seen, strict=True)):
            assert name in files, f"context {number}"
            assert set(files) <= {"meet", "meet.1", "meet.2"}


# --- side by side --------------------------------------------------------------------------------------

JOBS = """
    import sys
    import ignite_dist as idist

    def check(local_rank, job):
        assert idist.all_reduce(job + local_rank) == 2 * job + 1
        assert idist.all_gather((job, local_rank), group=[0, 1]) == [(job, 0), (job, 1)]
        return job

    if __name__ == "__main__":
        print("ready", file=sys.stderr)  # where the gloo of torch 2.9 does not say how it connects
        for line in sys.stdin:
            job = int(line)
            if job % 2:
                assert idist.spawn("gloo", check, (job,), nproc_per_node=2) == [job, job]
            else:
                with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                    assert parallel.run(check, job) == job
            print("fine", file=sys.stderr)
"""


@contextmanager
def _launchers(script: Path, num: int, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run ``script``; they are ended behind the block, or in ``seconds``."""
    started: list[subprocess.Popen[str]] = []

    def end() -> None:
        for launcher in started:
            launcher.kill()  # nothing happens to one that has ended

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        for _ in range(num):
            started.append(
                subprocess.Popen(
                    [helpers.python_that_forks(), str(script)],
                    env=helpers.plain_environ(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        timer.cancel()
        end()
        for launcher in started:
            launcher.communicate()


def _wait_until_said(launcher: subprocess.Popen[str], expected: str) -> None:
    """Fail if the launcher ends without the line. On a busy machine it warns of long waits before."""
    assert launcher.stderr is not None
    heard = []
    for line in launcher.stderr:
        if line == f"{expected}\n":
            return
        heard.append(line)
    pytest.fail("".join(heard))


@pytest.mark.long
@pytest.mark.stress
@pytest.mark.timeout(240)
def test_jobs_that_are_launched_side_by_side_do_not_collide(
    repetitions: Callable[[int, int], int], tally: Callable[[str], None], tmp_path: Path
) -> None:
    """As many launchers as the machine can hold, each a process of its own, launch at the same moment."""
    script = helpers.write_script(tmp_path, JOBS)
    num_launchers, num_rounds = repetitions(4, 10), repetitions(2, 10)
    with _launchers(script, num_launchers, repetitions(200, 1700)) as launchers:
        for launcher in launchers:
            _wait_until_said(launcher, "ready")
        for number in range(num_rounds):
            for job, launcher in enumerate(launchers, number):
                assert launcher.stdin is not None
                launcher.stdin.write(f"{job}\n")
                launcher.stdin.flush()
            for launcher in launchers:
                _wait_until_said(launcher, "fine")
                tally("jobs of two ranks, launched side by side")


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "")
    assert stores.find_place("env://", 0, 2).main_address == "127.0.0.1"


def test_a_rank_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = helpers.free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connections, "LONG_WAIT_SECONDS", 0.05)
    with pytest.raises(idist.MissingRanksError):
        idist.initialize("gloo", timeout=IN_VAIN)
    waits_for = f"waiting for rank 1 at 127.0.0.1:{port}."
    (said,) = [message for message in caplog.messages if waits_for in message]
    assert said.startswith("Rank 0 of 2 (")


def test_a_rank_that_waits_for_those_of_other_agents_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = helpers.torchrun_environs(2, agent.port, nproc_per_node=1)[0]
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connections, "LONG_WAIT_SECONDS", 0.05)
    with pytest.raises(dist.DistStoreError):
        idist.initialize("gloo", timeout=IN_VAIN)
    assert any("waiting for all others at 127.0.0.1" in message for message in caplog.messages)


# --- a store that outlives an attempt ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_new_attempt_does_not_see_that_nccl_has_failed_before(kind: str, tmp_path: Path) -> None:
    root: dist.Store = {
        "hash": lambda: dist.HashStore(),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
    }[kind]()
    root.set("exception_dump", "1")
    root.set("other", "1")
    store = dist.PrefixStore("ignite_dist/1/0", dist.PrefixStore("attempt", root))
    stores.forget_failures(store)
    stores.forget_failures(store)
    assert not root.check(["exception_dump"]) and root.check(["other"])
