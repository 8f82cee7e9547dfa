from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
import ignite_dist as idist

FAILURE_SECONDS = 30  # a start of Python on a busy machine included


def spawn(function: Callable[..., Any], *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> Any:
    return idist.spawn("gloo", function, args, nproc_per_node=nproc_per_node, **kwargs)


def who(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    assert idist.all_reduce(1) == idist.get_world_size()
    return {
        "local rank": local_rank,
        "rank": idist.get_rank(),
        "world size": idist.get_world_size(),
        "backend": idist.backend(),
        "args": args,
        "kwargs": kwargs,
    }


def expected(local_rank: int, world_size: int = 2, args: Any = (), kwargs: Any = None) -> dict[str, Any]:
    return {
        "local rank": local_rank,
        "rank": local_rank,
        "world size": world_size,
        "backend": "gloo",
        "args": args,
        "kwargs": kwargs or {},
    }


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


# --- results and arguments ---------------------------------------------------------------------------


def test_results_come_by_local_rank_and_arguments_arrive() -> None:
    results = idist.spawn("gloo", who, args=(1, "zwei"), kwargs_dict={"three": [3]}, nproc_per_node=3)
    assert results == [expected(rank, 3, (1, "zwei"), {"three": [3]}) for rank in range(3)]


def test_one_process_by_default_and_none_as_a_result() -> None:
    assert idist.spawn("gloo", who) == [expected(0, 1)]
    assert spawn(print, nproc_per_node=2) == [None, None]


def test_lambdas_closures_partials_and_methods() -> None:
    captured = {"factor": 10}

    def closure(local_rank: int) -> int:
        return captured["factor"] * (local_rank + 1)

    class Local:
        def method(self, local_rank: int) -> str:
            return f"{type(self).__name__} {local_rank}"

    assert spawn(lambda local_rank: (local_rank, captured["factor"])) == [(0, 10), (1, 10)]
    assert spawn(closure) == [10, 20]
    assert spawn(functools.partial(who, 5), nproc_per_node=1)[0]["args"] == (0,)
    assert spawn(Local().method) == ["Local 0", "Local 1"]


def _large(local_rank: int, received: torch.Tensor) -> torch.Tensor:
    return received + local_rank


def test_large_arguments_and_results() -> None:
    tensor = torch.arange(1_000_000, dtype=torch.float64)  # more than a pipe holds
    for rank, result in enumerate(spawn(_large, tensor)):
        assert torch.equal(result, tensor + rank)


def test_this_process_stays_serial_and_its_environment_is_left_alone() -> None:
    before = dict(os.environ)
    spawn(who)
    assert dict(os.environ) == before
    assert (idist.model_name(), idist.get_world_size()) == ("serial", 1)


# --- where the function is defined -------------------------------------------------------------------

MAIN = """
    import ignite_dist as idist

    FACTOR = 10

    class Mine:
        def __init__(self, value):
            self.value = value

    def function(local_rank, mine):
        assert isinstance(mine, Mine)
        return Mine(FACTOR * mine.value + idist.all_reduce(local_rank))

    if __name__ == "__main__":
        results = idist.spawn("gloo", function, (Mine(1),), nproc_per_node=2)
        print([type(result) is Mine and result.value for result in results])
        print(idist.spawn("gloo", lambda local_rank: FACTOR + local_rank, nproc_per_node=2))
"""
MAIN_OUTPUT = ["[11, 11]", "[10, 11]"]


def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, MAIN))
    assert ended.stdout.splitlines() == MAIN_OUTPUT


def test_functions_of_a_module_run_as_a_script(tmp_path: Path) -> None:
    helpers.write_script(tmp_path, MAIN, name="some_module.py")
    ended = helpers.run_python("-m", "some_module", cwd=tmp_path)
    assert ended.stdout.splitlines() == MAIN_OUTPUT


def test_functions_of_a_command_line_as_in_a_notebook() -> None:
    ended = helpers.run_python("-c", textwrap.dedent(MAIN))
    assert ended.stdout.splitlines() == MAIN_OUTPUT


def test_functions_of_a_script_from_the_standard_input() -> None:
    ended = helpers.run_python("-", input=textwrap.dedent(MAIN))
    assert ended.stdout.splitlines() == MAIN_OUTPUT


def test_a_missing_main_guard_gives_the_hint(tmp_path: Path) -> None:
    script = helpers.write_script(
        tmp_path,
        """
        import ignite_dist as idist

        def function(local_rank):
            return local_rank

        idist.spawn("gloo", function, nproc_per_node=2)
        """,
    )
    with within(150):
        ended = helpers.run_python(script)
    assert ended.returncode == 1
    (said,) = [line for line in ended.stdout.splitlines() if "WorkerExitedError" in line]
    assert "__name__ == '__main__'" in said.replace('"', "'")


# --- the worker's surroundings -----------------------------------------------------------------------


def _surroundings(_: int) -> dict[str, Any]:
    return {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }


def test_workers_see_the_environment_of_this_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "1")
    monkeypatch.setenv("BOTH", "1")
    (first,) = spawn(_surroundings, nproc_per_node=1)
    assert (first["environ"]["FIRST"], first["environ"]["BOTH"]) == ("1", "1")
    monkeypatch.delenv("FIRST")
    monkeypatch.setenv("BOTH", "2")
    monkeypatch.setenv("SECOND", "grüße")
    (second,) = spawn(_surroundings, nproc_per_node=1)
    assert "FIRST" not in second["environ"]
    assert (second["environ"]["BOTH"], second["environ"]["SECOND"]) == ("2", "grüße")


def test_beside_the_launchers_variables_there_are_those_that_scripts_read() -> None:
    for rank, found in enumerate(spawn(_surroundings)):
        environ = found["environ"]
        assert {name: value for name, value in os.environ.items() if environ.get(name) != value} == {}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert [environ[name] for name in names] == [str(rank), "2", str(rank), "2", "127.0.0.1"]


def _default_start_method(_: int) -> str:
    return multiprocessing.get_start_method()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_processes_of_a_worker_start_as_they_would_in_the_launcher(start_method: str) -> None:
    expected = multiprocessing.get_start_method()
    assert spawn(_default_start_method, start_method=start_method) == [expected, expected]


def test_the_fork_server_imports_the_package_of_the_launcher(tmp_path: Path) -> None:
    """The one that the script has put on its path, whatever is installed."""
    shutil.copytree(helpers.ROOT / "ignite_dist", tmp_path / "copy" / "ignite_dist")
    script = helpers.write_script(
        tmp_path,
        """
        import sys
        sys.path.insert(0, "copy")
        import ignite_dist as idist

        def where(local_rank):
            import ignite_dist
            return ignite_dist.__file__

        if __name__ == "__main__":
            assert set(idist.spawn("gloo", where, nproc_per_node=2)) == {idist.__file__}
            print(idist.__file__)
        """,
    )
    ended = helpers.run_python(script, cwd=tmp_path)
    assert ended.returncode == 0 and "copy" in ended.stdout, ended.stdout


_OF_THE_MODULE = os.environ.get("READ_AT_IMPORT")


def _read_at_import(_: int) -> str | None:
    return _OF_THE_MODULE


def test_modules_see_the_environment_of_this_launch_when_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("READ_AT_IMPORT", value)
        assert spawn(_read_at_import) == [value, value]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_omp_num_threads_is_honoured(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (3, 1):
        monkeypatch.setenv("OMP_NUM_THREADS", str(value))
        (found,) = spawn(_surroundings, nproc_per_node=1, start_method=start_method)
        assert found["threads"] == value


def test_without_omp_num_threads_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for nproc_per_node in (1, 2, 3):
        threads = [found["threads"] for found in spawn(_surroundings, nproc_per_node=nproc_per_node)]
        assert threads == [max(1, cores // nproc_per_node)] * nproc_per_node


def test_the_working_directory_is_that_of_this_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert {found["cwd"] for found in spawn(_surroundings)} == {str(folder.resolve())}


def _write(local_rank: int, text: str) -> None:
    sys.stdout.write(f"{text} out {local_rank}\n")  # print() may write the end of the line by itself
    sys.stderr.write(f"{text} err {local_rank}\n")


TWO_LAUNCHES = """
    import os, sys
    import ignite_dist as idist

    def show(local_rank, launch):
        os.write(1, f"{launch} launch: {os.environ.get('REMOVED')} {os.environ.get('ADDED')}\\n".encode())

    if __name__ == "__main__":
        idist.spawn("gloo", show, ("first",))
        del os.environ["REMOVED"]
        os.environ["ADDED"] = "added"
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
        idist.spawn("gloo", show, ("second",))
"""


def test_a_fork_server_that_is_older_than_the_launch_does_not_show(tmp_path: Path) -> None:
    """It was started with the first launch's environment and output, and passes them on to its workers."""
    script, later = helpers.write_script(tmp_path, TWO_LAUNCHES), tmp_path / "later"
    ended = helpers.run_python(script, later, env=helpers.plain_environ(REMOVED="removed"))
    assert (ended.stdout, ended.returncode) == ("first launch: removed None\n", 0)
    written = helpers.without_gloos(later.read_text(encoding="utf-8"))
    assert written == "second launch: None added\n"


def test_output_goes_where_the_launchers_goes_at_this_launch(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("first", "second"):
        spawn(_write, text)
        out, err = capfd.readouterr()
        written = helpers.without_gloos(out).splitlines()
        assert sorted(written) == [f"{text} out 0", f"{text} out 1"]
        assert sorted(err.splitlines()) == [f"{text} err 0", f"{text} err 1"]


def _random_numbers(_: int) -> float:
    return float(torch.rand(1, dtype=torch.float64))


def test_workers_that_seed_nothing_draw_different_numbers_as_under_torchrun() -> None:
    drawn = [*spawn(_random_numbers), *spawn(_random_numbers)]
    assert len(set(drawn)) == 4


# --- join, start methods and the other keywords ------------------------------------------------------


def _waits_for(local_rank: int, path: str) -> int:
    with open(path, encoding="utf-8") as file:  # a named pipe: until somebody opens its other end
        return local_rank + len(file.read())


def test_join_false_gives_a_handle_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    handle = spawn(_waits_for, str(tmp_path / "go"), nproc_per_node=1, join=False)
    assert handle.join(timeout=0.2) is None
    (pid,) = handle.pids()
    assert psutil.pid_exists(pid)
    (tmp_path / "go").write_text("abc", encoding="utf-8")
    assert handle.join() == [3]
    assert handle.join() == [3]  # as often as one likes
    assert helpers.end_of_processes([pid], 5) == []


def test_terminate_ends_workers_that_would_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    handle = spawn(_waits_for, str(tmp_path / "go"), join=False)
    with within(FAILURE_SECONDS):
        handle.terminate()
        assert helpers.end_of_processes(handle.pids(), 0) == []
        with pytest.raises(idist.WorkerExitedError):
            handle.join()


def _touch(local_rank: int, folder: str) -> bytes:
    idist.barrier()
    Path(folder, str(local_rank)).touch()
    return bytes(1_000_000)  # more than a pipe holds, and nobody will ever read it


def test_join_false_without_keeping_the_handle(tmp_path: Path) -> None:
    """As scripts do that come from a ``spawn`` which returned None."""
    script = helpers.write_script(
        tmp_path,
        """
        import sys
        import ignite_dist as idist
        from test_launcher import _touch

        if __name__ == "__main__":
            idist.spawn("gloo", _touch, (sys.argv[1],), nproc_per_node=2, join=False)
        """,
    )
    environ = helpers.plain_environ()
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    (tmp_path / "made").mkdir()
    ended = helpers.run_python(script, tmp_path / "made", env=environ, seconds=200)
    assert ended.returncode == 0, ended.stdout
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["0", "1"], ended.stdout


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver", None])
def test_start_methods(start_method: str | None) -> None:
    assert spawn(who, start_method=start_method) == [expected(0), expected(1)]


def test_fork_takes_what_cannot_be_pickled() -> None:
    lock = threading.Lock()

    def function(local_rank: int) -> bool:
        with lock:
            return idist.all_reduce(local_rank) == 1

    assert spawn(function, start_method="fork") == [True, True]


def _is_daemon(_: int) -> bool:
    import multiprocessing

    return multiprocessing.current_process().daemon


def test_daemon() -> None:
    assert spawn(_is_daemon, nproc_per_node=1, daemon=True) == [True]
    assert spawn(_is_daemon, nproc_per_node=1) == [False]


def _waits_alone(local_rank: int, path: str) -> str:
    if local_rank == 1:
        with open(path, encoding="utf-8") as file:
            return file.read()
    try:
        idist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    finally:
        Path(path).write_text("go", encoding="utf-8")
    return "no error"


def test_timeout_is_that_of_the_collectives(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with within(120):
        handle = spawn(_waits_alone, str(tmp_path / "go"), timeout=timedelta(seconds=1), join=False)
        try:
            first, _ = handle.join()
        except idist.RankFailedError:  # the group is broken afterwards, so finalising may fail
            return
    assert "imed out" in first


def test_a_file_as_the_meeting_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert spawn(who, init_method=f"file://{tmp_path}/{name}") == [expected(0), expected(1)]


def test_an_address_of_another_job_when_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    # mpirun's, for the launcher alone: another world of the same size
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, "0202", strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found = spawn(_launcher_here, init_method=f"file://{tmp_path}/meet")
    assert found == ["idist.spawn"] * 2


def _launcher_here(_: int) -> str:
    return idist.environment().launcher


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_a_port_of_ones_own_again_and_again(init_method: str | None) -> None:
    port = helpers.free_port()
    for _ in range(3):
        results = spawn(_surroundings, master_addr="127.0.0.1", master_port=port, init_method=init_method)
        assert [found["environ"]["MASTER_PORT"] for found in results] == [str(port)] * 2


def _node(node_rank: int, port: int, file: str) -> Any:
    kwargs: dict[str, Any] = {"init_method": f"file://{file}"} if file else {"master_addr": "127.0.0.1"}
    if not file:
        kwargs["master_port"] = port
    return idist.spawn("gloo", _place, nproc_per_node=2, nnodes=2, node_rank=node_rank, **kwargs)


def _place(local_rank: int) -> tuple[int, ...]:
    assert idist.all_gather(idist.get_rank()) == [0, 1, 2, 3]
    with idist.one_rank_first(local=True):
        pass
    return idist.get_rank(), local_rank, idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()


@pytest.mark.parametrize("by_file", [False, True], ids=["port", "file"])
def test_two_nodes_on_one_machine(by_file: bool, tmp_path: Path) -> None:
    port, file = helpers.free_port(), str(tmp_path / "meet") if by_file else ""
    nodes: dict[int, Any] = {}
    threads = [
        threading.Thread(
            target=lambda node_rank=node_rank: nodes.update({node_rank: _node(node_rank, port, file)})
        )
        for node_rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert nodes == {0: [(0, 0, 2, 2, 0), (1, 1, 2, 2, 0)], 1: [(2, 0, 2, 2, 1), (3, 1, 2, 2, 1)]}


# --- what listens ------------------------------------------------------------------------------------


def _busy_with_groups(local_rank: int, pipes: list[str]) -> None:
    for group in ([0], [1], [0, 1]):
        idist.all_reduce(torch.ones(4), group=group)
        idist.all_gather("object", group=group)
    handle = idist.new_group([0, 1])
    idist.barrier(handle)
    with open(pipes[local_rank], encoding="utf-8") as file:
        file.read()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_a_job_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    before = helpers.listening([os.getpid()])
    pipes = [str(tmp_path / "first"), str(tmp_path / "second")]
    for pipe in pipes:
        os.mkfifo(pipe)
    handle = spawn(_busy_with_groups, pipes, join=False)
    try:
        opened = [_open_once_it_is_read(pipe, handle) for pipe in pipes]
        of_workers = helpers.listening(handle.pids())
        addresses = (helpers.listening([os.getpid(), *handle.pids()]) - before) | of_workers
        for fd in opened:
            os.close(fd)
        assert handle.join(120) == [None, None]
    finally:
        handle.terminate()
    assert of_workers, "the workers listen for each other"
    assert all(map(helpers.is_loopback, addresses)), addresses


def _open_once_it_is_read(pipe: str, handle: Any) -> int:
    deadline = time.monotonic() + 120
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody has opened it for reading yet
            assert time.monotonic() < deadline, "the worker did not come that far"
            assert handle.join(0.05) is None


# --- failures ----------------------------------------------------------------------------------------


def _fails(local_rank: int) -> None:
    idist.barrier()
    if local_rank == 1:
        raise LookupError("no dåta here")
    idist.all_reduce(torch.ones(3))
    idist.barrier()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_rank_that_raises_is_named_with_its_traceback(start_method: str) -> None:
    with pytest.raises(idist.WorkerRaisedError) as info:
        spawn(_fails, nproc_per_node=3, start_method=start_method)
    error = info.value
    assert (error.rank, error.error_type, error.error_index) == (1, "LookupError", 1)
    for text in ("LookupError: no dåta here", "in _fails", "test_launcher.py"):
        assert text in error.traceback
        assert text in str(error)


def _fails_on_one_rank_only(_: int) -> None:
    idist.one_rank_only(rank=1, with_barrier=True)(_raises)()


def _raises() -> None:
    raise LookupError("the cause")


def test_the_cause_is_named_not_those_who_heard_of_it() -> None:
    for _ in range(15):
        with pytest.raises(idist.RankFailedError) as info:
            spawn(_fails_on_one_rank_only, nproc_per_node=3)
        assert (info.value.rank, info.value.error_type) == (1, "LookupError")


def test_workers_are_gone_after_a_failure() -> None:
    handle = spawn(_fails, nproc_per_node=3, join=False)
    with pytest.raises(idist.RankFailedError):
        handle.join()
    with pytest.raises(idist.RankFailedError):
        handle.join()  # again
    assert helpers.end_of_processes(handle.pids(), 0) == []


def test_failed_launches_leave_nothing_for_the_garbage_collector_of_a_forked_process() -> None:
    """A store that serves ends with its threads, which a forked process does not have."""
    gc.disable()
    try:
        for _ in range(10):
            with suppress(idist.RankFailedError):
                spawn(sys.exit, nproc_per_node=2)
        pid = os.fork()  # as a DataLoader with workers does, or a launch with start_method="fork"
        if pid == 0:
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    finally:
        gc.enable()
    assert status == 0


def _unpicklable_result(local_rank: int) -> Any:
    return threading.Lock() if local_rank == 1 else local_rank


def test_a_result_that_cannot_be_sent_names_the_rank_and_the_type() -> None:
    with within(FAILURE_SECONDS), pytest.raises(idist.WorkerRaisedError, match="lock") as info:
        spawn(_unpicklable_result)
    assert (info.value.rank, info.value.error_type) == (1, "TypeError")


@pytest.mark.parametrize("where", ["function", "args", "kwargs_dict"])
def test_a_call_that_cannot_be_sent_starts_nothing(where: str) -> None:
    lock = threading.Lock()
    calls: dict[str, tuple[Any, ...]] = {
        "function": (lambda local_rank: lock.locked(),),
        "args": (who, (lock,)),
        "kwargs_dict": (who, (), {"lock": lock}),
    }
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(TypeError, match="cannot be sent"):
        idist.spawn("gloo", *calls[where], nproc_per_node=2)
    assert set(psutil.Process().children(recursive=True)) <= children


def _context_of_its_own(_: int) -> str:
    idist.finalize()
    assert idist.get_world_size() == 1
    idist.initialize("gloo")
    assert idist.get_world_size() == 2
    return idist.broadcast("from 0" if idist.get_rank() == 0 else "")


def test_a_function_may_end_its_context_and_make_another() -> None:
    assert spawn(_context_of_its_own) == ["from 0", "from 0"]


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"nprocs_per_node": 2}, TypeError, ["nprocs_per_node", "Allowed"]),
        ({"start_metod": "fork"}, TypeError, ["start_metod", "Did you mean 'start_method'?"]),
        ({"start_method": "fokr"}, ValueError, ["fokr", "'forkserver'"]),
        ({"nproc_per_node": 0}, ValueError, ["nproc_per_node", "0"]),
        ({"nproc_per_node": True}, ValueError, ["nproc_per_node", "True"]),
        ({"nproc_per_node": "2"}, ValueError, ["nproc_per_node", "'2'"]),
        ({"nnodes": 0}, ValueError, ["nnodes"]),
        ({"nnodes": 2}, ValueError, ["master_addr", "master_port"]),
        ({"nnodes": 2, "master_addr": "127.0.0.1"}, ValueError, ["master_port"]),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h", "master_port": 1}, ValueError, ["node_rank"]),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "h", "master_port": 0}, ValueError, ["[1, 65535]"]),
        ({"master_port": 65536}, ValueError, ["master_port", "65536"]),
        ({"master_port": "2950x"}, ValueError, ["master_port", "'2950x'"]),
        ({"node_rank": 1}, ValueError, ["node_rank"]),
        ({"init_method": "file:///x", "master_port": 1}, ValueError, ["master_port", "init_method"]),
        ({"master_port": 65536}, ValueError, ["master_port", "65536"]),
        ({"master_port": "2950x"}, ValueError, ["master_port", "'2950x'"]),
        ({"timeout": 30}, TypeError, ["timedelta"]),
    ],
    ids=str,
)
def test_wrong_arguments_of_spawn(kwargs: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(error) as info:
        idist.spawn("gloo", who, **kwargs)
    for text in texts:
        assert text in str(info.value)
    assert set(psutil.Process().children(recursive=True)) <= children


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="function"):
        idist.spawn("gloo", "who")  # type: ignore[arg-type]


def test_a_port_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(idist.LaunchError, match=str(port)):
            spawn(who, master_port=port)


# --- Parallel ----------------------------------------------------------------------------------------


def _add(local_rank: int, a: int, *, b: int) -> list[int]:
    return [local_rank + a + b, idist.get_world_size()]


def test_parallel_without_a_backend_runs_here() -> None:
    with idist.Parallel() as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 1]
        assert idist.model_name() == "serial"


def test_parallel_starts_processes() -> None:
    with idist.Parallel("gloo", nproc_per_node=2) as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 2]
        assert parallel.run(_add, 2, b=2) == [4, 2]
        assert idist.model_name() == "serial"


def test_parallel_alone_is_a_world_of_one() -> None:
    before = dict(os.environ)
    with idist.Parallel("gloo") as parallel:
        assert idist.model_name() == "native-dist"
        assert parallel.run(_add, 1, b=2) == [3, 1]
    assert idist.model_name() == "serial"
    assert dict(os.environ) == before


def _joined() -> Any:
    with idist.Parallel(backend="gloo", nproc_per_node=None) as parallel:
        result = parallel.run(_add, 1, b=2)
    assert idist.model_name() == "serial"
    return result


def test_parallel_joins_the_processes_of_a_launcher() -> None:
    assert helpers.run_ranks(_joined) == [[3, 2], [4, 2]]


def _joined_by_file(method: str) -> Any:
    with idist.Parallel(backend="gloo", init_method=method) as parallel:
        return parallel.run(_add, 1, b=2)


def test_parallel_joins_over_a_file(tmp_path: Path) -> None:
    assert helpers.run_ranks(_joined_by_file, f"file://{tmp_path}/meet") == [[3, 2], [4, 2]]


def test_parallel_hands_its_keywords_to_spawn(tmp_path: Path) -> None:
    keywords = {"start_method": "fork", "daemon": True, "init_method": f"file://{tmp_path}/meet"}
    with idist.Parallel("gloo", nproc_per_node=2, **keywords) as parallel:
        assert parallel.run(_is_daemon) is True


def test_parallel_with_join_false_gives_the_handle() -> None:
    with idist.Parallel("gloo", nproc_per_node=2, join=False) as parallel:
        handle = parallel.run(_add, 1, b=2)
    assert handle.join() == [[3, 2], [4, 2]]


def _lives_on(world_size: int) -> bool:
    """Whether the context is still there, and still works."""
    return idist.get_world_size() == dist.get_world_size() == idist.all_reduce(1) == world_size


def _inside_of_anothers_context(backend: str) -> Any:
    dist.init_process_group(backend)
    before = dict(os.environ)
    with idist.Parallel(backend="gloo") as parallel:
        result = parallel.run(_add, 1, b=2)
    kept = _lives_on(2)
    with suppress(LookupError), idist.Parallel(backend="gloo"):
        raise LookupError("every rank has no data")
    assert dict(os.environ) == before
    return result, kept, _lives_on(2)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_parallel_uses_a_live_context_and_leaves_it_to_its_owner(backend: str) -> None:
    assert helpers.run_ranks(_inside_of_anothers_context, backend) == [
        ([3, 2], True, True),
        ([4, 2], True, True),
    ]


def _inside_of_a_worker(local_rank: int) -> Any:
    with idist.Parallel(backend="gloo") as parallel:
        result = parallel.run(_add, 1, b=2)
    return result, _lives_on(2)


def test_a_script_that_uses_parallel_can_be_spawned() -> None:
    assert spawn(_inside_of_a_worker) == [([3, 2], True), ([4, 2], True)]


def test_parallel_refuses_a_live_context_of_another_backend() -> None:
    idist.initialize("gloo")
    try:
        with pytest.raises(RuntimeError, match="backend 'gloo' exists already"), idist.Parallel("cpu:gloo"):
            pytest.fail("it was entered")
        assert _lives_on(1)
    finally:
        idist.finalize()


def test_parallel_says_which_keywords_come_too_late_for_a_live_context() -> None:
    idist.initialize("gloo")
    try:
        keywords = {"timeout": timedelta(seconds=9), "init_method": "env://"}
        with pytest.warns(UserWarning, match="without timeout:"), idist.Parallel("gloo", **keywords):
            assert _lives_on(1)
    finally:
        idist.finalize()


def test_parallel_can_be_entered_again() -> None:
    parallel = idist.Parallel("gloo")
    for _ in range(2):
        with parallel:
            assert idist.model_name() == "native-dist"
        assert idist.model_name() == "serial"


def _raises_in_the_block(where: str) -> None:
    with idist.Parallel(backend="gloo") as parallel:
        if where == "before":
            idist.barrier()
            if idist.get_rank() == 0:
                raise LookupError("rank 0 has no data")
        parallel.run(_raises_in_the_function, where)


def _raises_in_the_function(local_rank: int, where: str) -> None:
    idist.barrier()
    if where == "inside" and local_rank == 0:
        raise LookupError("rank 0 has no data")
    idist.all_reduce(torch.ones(2))
    idist.barrier()


@pytest.mark.parametrize("where", ["before", "inside"])
def test_an_exception_in_the_block_reaches_the_user_and_ends_the_wait_of_the_others(where: str) -> None:
    failed, waiting = helpers.end_of_ranks(_raises_in_the_block, where, seconds=120)
    assert failed.error.strip().endswith("LookupError: rank 0 has no data")
    assert "During handling" not in failed.error
    assert waiting.error, "the other rank cannot have come through"
    assert "RuntimeError" in waiting.error or "DistBackendError" in waiting.error
    assert abs(waiting.seconds - failed.seconds) < 20


SCRIPT_THAT_FAILS = """
    import torch
    import ignite_dist as idist

    def train(local_rank):
        idist.barrier()
        if local_rank == 0:
            raise LookupError("rank 0 has no data")
        idist.all_reduce(torch.ones(2))
        idist.barrier()

    if __name__ == "__main__":
        with idist.Parallel(backend="gloo") as parallel:
            parallel.run(train)
"""


def test_scripts_under_a_launcher_end_with_an_error_within_seconds(tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, SCRIPT_THAT_FAILS)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=helpers.plain_environ(**helpers.loopback(), **environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in helpers.torchrun_environs(2, agent.port)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert outputs[0].strip().splitlines()[-1] == "LookupError: rank 0 has no data"


def test_parallel_that_spawned_raises_what_spawn_raises() -> None:
    with (
        within(FAILURE_SECONDS),
        pytest.raises(idist.WorkerRaisedError) as info,
        idist.Parallel("gloo", nproc_per_node=2) as parallel,
    ):
        parallel.run(_raises_in_the_function, "inside")
    assert (info.value.rank, info.value.error_type) == (0, "LookupError")


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"backend": "ncl"}, ValueError, ["Unknown backend 'ncl'", "'gloo'"]),
        ({"backend": None, "nproc_per_node": 2}, ValueError, ["nproc_per_node", "None"]),
        ({"backend": None, "nnodes": 2}, ValueError, ["nnodes", "None"]),
        ({"backend": None, "node_rank": 0}, ValueError, ["node_rank", "None"]),
        ({"backend": None, "master_addr": "h"}, ValueError, ["master_addr", "None"]),
        ({"backend": None, "master_port": 1}, ValueError, ["master_port", "None"]),
        ({"nproc_per_node": 0}, ValueError, ["nproc_per_node", "0"]),
        ({"nproc_per_node": -1}, ValueError, ["nproc_per_node", "-1"]),
        ({"nproc_per_node": 1, "nnodes": 0}, ValueError, ["nnodes", "0"]),
        ({"nproc_per_node": 1, "nnodes": 2}, ValueError, ["nnodes=2", "node_rank"]),
        ({"nproc_per_node": 1, "nnodes": 2, "node_rank": 2}, ValueError, ["node_rank", "2"]),
        ({"nproc_per_node": 1, "nnodes": 2, "node_rank": -1}, ValueError, ["node_rank", "-1"]),
        ({"nproc_per_node": 1, "node_rank": 1}, ValueError, ["node_rank", "1"]),
        (
            {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0},
            ValueError,
            ["master_addr", "master_port", "init_method"],
        ),
        (
            {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "master_addr": "h"},
            ValueError,
            ["master_port", "init_method"],
        ),
        (
            {"nproc_per_node": 2, "start_metod": "fork"},
            TypeError,
            ["start_metod", "Did you mean 'start_method'?"],
        ),
    ],
    ids=str,
)
def test_wrong_arguments_of_parallel(
    kwargs: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    """All of them when it is made, not when it runs something."""
    with pytest.raises(error) as info:
        idist.Parallel(**{"backend": "gloo", **kwargs})
    for text in texts:
        assert text in str(info.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"backend": None, "start_method": "fork"},
        {
            "backend": "gloo",
            "nproc_per_node": None,
            "nnodes": None,
            "node_rank": None,
            "start_method": "fork",
        },
        {"backend": "gloo", "nproc_per_node": None, "nnodes": 1, "node_rank": 0},
    ],
    ids=str,
)
def test_what_scripts_pass_that_may_or_may_not_spawn(kwargs: dict[str, Any]) -> None:
    """One set of keywords for ``python`` and for ``torchrun``: what only spawning needs is not an error."""
    with idist.Parallel(**kwargs) as parallel:
        assert parallel.run(_add, 1, b=2) == [3, 1]


def test_the_signature_names_every_argument() -> None:
    assert list(inspect.signature(idist.Parallel).parameters) == [
        *("backend", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "init_method"),
        "spawn_kwargs",
    ]


# --- a launcher and nproc_per_node ----------------------------------------------------------------------


def test_several_machines_without_processes_to_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nnodes=2 without nproc_per_node"):
        idist.Parallel(backend="gloo", nnodes=2, node_rank=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    idist.Parallel(backend="gloo", nnodes=2, node_rank=0)  # its launcher's


def test_a_job_for_each_process_of_a_launcher_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.warns(UserWarning, match="torchrun has started 2 processes, and nproc_per_node=2") as caught:
        idist.Parallel(backend="gloo", nproc_per_node=2)
    assert caught[0].filename == __file__
