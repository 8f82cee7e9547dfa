from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import helpers
import ignite_dist as idist
from spawned import FAILURE_SECONDS, is_daemon, spawn, who, within


def expected(local_rank: int, world_size: int = 2, args: Any = (), kwargs: Any = None) -> dict[str, Any]:
    return {
        "local rank": local_rank,
        "rank": local_rank,
        "world size": world_size,
        "backend": "gloo",
        "args": args,
        "kwargs": kwargs or {},
    }


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
    ended = helpers.run_new_python(helpers.write_script(tmp_path, MAIN))
    assert ended.stdout.splitlines() == MAIN_OUTPUT


@pytest.mark.long
def test_functions_of_a_module_run_as_a_script(tmp_path: Path) -> None:
    helpers.write_script(tmp_path, MAIN, name="some_module.py")
    ended = helpers.run_new_python("-m", "some_module", cwd=tmp_path)
    assert ended.stdout.splitlines() == MAIN_OUTPUT


@pytest.mark.long
def test_functions_of_a_command_line_as_in_a_notebook() -> None:
    ended = helpers.run_new_python("-c", textwrap.dedent(MAIN))
    assert ended.stdout.splitlines() == MAIN_OUTPUT


@pytest.mark.long
def test_functions_of_a_script_from_the_standard_input() -> None:
    ended = helpers.run_new_python("-", input=textwrap.dedent(MAIN))
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
        ended = helpers.run_new_python(script)
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


@pytest.mark.parametrize(
    "start_method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.long)]
)
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


@pytest.mark.parametrize(
    "start_method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.long)]
)
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


def test_workers_keep_the_seeds_of_their_script(tmp_path: Path) -> None:
    script = """
        import random
        import numpy
        import torch
        import ignite_dist as idist

        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

        def draw(local_rank):
            return float(torch.rand(())), random.random(), numpy.random.rand()

        if __name__ == "__main__":
            expected = draw(0)
            for start_method in ("forkserver", "spawn"):
                drawn = idist.spawn("gloo", draw, nproc_per_node=2, start_method=start_method)
                print(drawn == [expected] * 2)
    """
    ended = helpers.run_python(helpers.write_script(tmp_path, script), env=helpers.plain_environ())
    assert ended.stdout.split() == ["True", "True"], (ended.stdout, ended.stderr)


def test_each_launch_has_its_own_temporary_folder(tmp_path: Path) -> None:
    """Also the second, whose fork server has used the folder of the first."""
    helpers.write_script(tmp_path, "import tempfile; tempfile.gettempdir()", "uses_it.py")
    script = """
        import multiprocessing, os, sys, tempfile
        import ignite_dist as idist

        multiprocessing.set_forkserver_preload(["uses_it"])

        def folder(local_rank):
            return tempfile.gettempdir()

        if __name__ == "__main__":
            for name in sys.argv[1:]:
                os.environ["TMPDIR"] = name
                print(*idist.spawn("gloo", folder))
    """
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for name in folders:
        os.mkdir(name)
    environ = helpers.plain_environ(PYTHONPATH=f"{helpers.ROOT}:{tmp_path}")
    ended = helpers.run_python(helpers.write_script(tmp_path, script), *folders, env=environ)
    assert ended.stdout.split() == folders, ended.stdout


LONG_FOLDER = """
    import multiprocessing.util, os, sys
    import torch
    import ignite_dist as idist

    def sends(local_rank):
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        queue.put(torch.ones(2))  # through a socket in the temporary folder
        return os.environ["TMPDIR"], float(queue.get().sum())

    if __name__ == "__main__":
        if "used" in sys.argv:
            multiprocessing.util.get_temp_dir()  # as a queue of tensors does
        try:
            print(idist.spawn("gloo", sends, nproc_per_node=2) == [(os.environ["TMPDIR"], 2.0)] * 2)
        except idist.LaunchError as error:
            print(error)
        print(multiprocessing.util.get_temp_dir())
"""


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    script, environ = helpers.write_script(tmp_path, LONG_FOLDER), helpers.plain_environ(TMPDIR=str(long))
    ended = helpers.run_python(script, env=environ)
    found, folder = ended.stdout.splitlines()
    assert (found, folder.startswith("/tmp/pymp-")) == ("True", True)
    assert not Path(folder).exists()
    # Newer Pythons avoid longer folders themselves, but a socket in a folder of 79 bytes is too long for all.
    with tempfile.TemporaryDirectory(prefix="l" * (79 - len("/tmp/01234567")), dir="/tmp") as folder:
        ended = helpers.run_python(script, "used", env={**environ, "TMPDIR": folder})
    assert "Set TMPDIR to a short path" in ended.stdout and ended.returncode == 0, ended.stdout


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
    environ["PYTHONPATH"] += os.pathsep.join(["", str(helpers.TESTS), str(Path(__file__).parent)])
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


def test_daemon() -> None:
    assert spawn(is_daemon, nproc_per_node=1, daemon=True) == [True]
    assert spawn(is_daemon, nproc_per_node=1) == [False]


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
    assert "Rank 1 did not come to all_reduce at " in first and "has waited for 1 s, its timeout" in first


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
