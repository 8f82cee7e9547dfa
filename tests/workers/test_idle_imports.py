"""What the fork server imports between the first launch and the second, and what its workers see of that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import helpers

LAUNCHES = """
    import gc, signal, sys, warnings
    import torch
    import ignite_dist as idist

    def surroundings(local_rank):
        before = set(sys.modules)
        handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGURG)]
        assert handlers == [signal.SIG_DFL] * 2, handlers
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert gc.isenabled()
        assert "idle_imports" not in str(sys.meta_path) + str(warnings.showwarning)
        return before

    def trains(local_rank):
        before = set(sys.modules)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return len(set(sys.modules) - before)

    if __name__ == "__main__":
        fails = sys.argv[1] == "fails"
        try:
            (found,) = idist.spawn("gloo", (lambda _: 1 / 0) if fails else surroundings)
            assert "torch._dynamo" not in found and not fails
        except idist.RankFailedError:
            assert fails
        while "torch.distributed.checkpoint.state_dict" not in idist.spawn("gloo", surroundings)[0]:
            pass  # the server imports one module after the other
        print(max(idist.spawn("gloo", trains, nproc_per_node=2)))
"""


def test_after_the_first_launch_workers_have_what_training_needs(tmp_path: Path) -> None:
    for end in ("returns", "fails"):
        ended = helpers.run_new_python(helpers.write_script(tmp_path, LAUNCHES), end)
        assert ended.returncode == 0, ended.stdout
        assert int(ended.stdout) < 5, ended.stdout  # without the server's imports: about 800


READS_ALL_NAMES = """
    import sys
    import ignite_dist as idist

    def imports(local_rank):
        before = set(sys.modules)
        for name in idist.__all__:
            getattr(idist, name)
        return sorted(set(sys.modules) - before)

    if __name__ == "__main__":
        print(idist.spawn("gloo", imports))
"""


def test_workers_have_all_of_this_package(tmp_path: Path) -> None:
    ended = helpers.run_new_python(helpers.write_script(tmp_path, READS_ALL_NAMES))
    assert ended.stdout == "[[]]\n"


ANY_SCRIPT = """
    import ignite_dist as idist

    if __name__ == "__main__":
        print(idist.spawn("gloo", abs, nproc_per_node=2))
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_the_server_takes_no_module_from_the_working_folder(tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, ANY_SCRIPT)
    data = tmp_path / "data"
    data.mkdir()
    (data / "glob.py").write_text("raise SystemExit('of the working folder')")
    assert helpers.run_new_python(script, cwd=data).stdout == "[0, 1]\n"


OTHER_SERVER = """
    import multiprocessing, multiprocessing.forkserver, os
    import ignite_dist as idist

    if __name__ == "__main__":
        multiprocessing.forkserver.ensure_running()  # as another library does
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        sent, kill = [], os.kill
        os.kill = lambda pid, number: (sent.append(pid), kill(pid, number))
        for _ in range(2):
            assert idist.spawn("gloo", abs) == [0]
        assert server == multiprocessing.forkserver._forkserver._forkserver_pid
        print(sent)
"""


@pytest.mark.long
def test_the_server_of_another_library_is_left_alone(tmp_path: Path) -> None:
    ended = helpers.run_new_python(helpers.write_script(tmp_path, OTHER_SERVER))
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stdout


INTERRUPTED = """
    import multiprocessing.forkserver, os, signal, socket, threading
    import ignite_dist as idist
    from ignite_dist.workers.supervisor import fork_server

    start = fork_server._ensure_running
    arrived, writer = socket.socketpair()
    writer.setblocking(False)

    def interrupted(server):
        signal.set_wakeup_fd(writer.fileno())
        # Another thread receives the signal, as in a notebook's kernel: it is blocked in this one.
        signal.pthread_kill(other.ident, signal.SIGINT)
        arrived.recv(1)
        signal.set_wakeup_fd(-1)
        start(server)

    if __name__ == "__main__":
        other = threading.Thread(target=threading.Event().wait, daemon=True)
        other.start()
        fork_server._ensure_running = interrupted
        try:
            idist.spawn("gloo", abs)
        except KeyboardInterrupt:
            server = multiprocessing.forkserver._forkserver._forkserver_pid
        fork_server._ensure_running = start
        assert idist.spawn("gloo", abs) == [0]
        assert server == multiprocessing.forkserver._forkserver._forkserver_pid is not None
"""


@pytest.mark.long
def test_a_server_that_starts_during_an_interrupt_is_the_one_that_is_used(tmp_path: Path) -> None:
    ended = helpers.run_new_python(helpers.write_script(tmp_path, INTERRUPTED))
    assert ended.returncode == 0, ended.stdout


AS_THE_SERVER = """
    import signal, sys
    from ignite_dist.workers.supervisor import idle_imports

    idle_imports._modules = iter(["first_module", "second_module"])
    idle_imports._PAUSE_SECONDS = 1_000.0
    sys.path.insert(0, sys.argv[1])
    signal.raise_signal(signal.SIGURG)
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGALRM)
    print([name for name in ("first_module", "first_leaf", "second_module") if name in sys.modules])
"""
FIRST_MODULE = """
    import os, warnings
    warnings.warn("not to be seen")
    import first_leaf
    raise RuntimeError("not to be seen")
"""


def run_as_the_server(folder: Path, leaf: str) -> str:
    helpers.write_script(folder, FIRST_MODULE, "first_module.py")
    helpers.write_script(folder, leaf, "first_leaf.py")
    helpers.write_script(folder, "", "second_module.py")
    script = helpers.write_script(folder, AS_THE_SERVER)
    ended = helpers.run_new_python(script, folder)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.long
def test_errors_and_warnings_of_an_import_are_not_seen(tmp_path: Path) -> None:
    assert run_as_the_server(tmp_path, "") == "['first_leaf', 'second_module']\n"


def test_the_imports_end_with_the_launcher(tmp_path: Path) -> None:
    """It ends while the first leaf is imported: nothing else is."""
    leaf = "import os\nos.getppid = lambda: -1\nimport second_module\n"
    assert run_as_the_server(tmp_path, leaf) == "[]\n"


ENDED_AT_ONCE = """
    import os, signal
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    from ignite_dist.workers.supervisor import idle_imports  # its own function runs after the lambda

    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os.kill(os.getpid(), signal.SIGTERM)  # the server ignores it
    print(os.WTERMSIG(status))
"""


@pytest.mark.long
def test_a_worker_that_is_ended_before_its_first_instruction_ends(tmp_path: Path) -> None:
    """The server ignores SIGTERM, and an ignored signal would be lost."""
    ended = helpers.run_new_python(helpers.write_script(tmp_path, ENDED_AT_ONCE))
    assert (ended.returncode, ended.stdout) == (0, "15\n")


FORKS = """
    import os, signal
    import ignite_dist as idist

    def forks(local_rank):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        if pid == 0:
            os._exit(blocked)
        return blocked, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    if __name__ == "__main__":
        print(idist.spawn("gloo", forks, nproc_per_node=1))
"""


@pytest.mark.long
def test_a_worker_that_blocks_sigterm_may_fork(tmp_path: Path) -> None:
    assert helpers.run_new_python(helpers.write_script(tmp_path, FORKS)).stdout == "[(True, 1)]\n"
