"""``spawn`` where a process lacks something: its streams, its main module, its fork server."""

from __future__ import annotations

import os
import zipapp
from pathlib import Path

import pytest

from helpers import run_new_python, write_script

SCRIPT = """
    import ignite_dist as idist

    def work(local_rank):
        return idist.all_reduce(1)

    if __name__ == "__main__":
        print(idist.spawn("gloo", work, nproc_per_node=2), flush=True)
"""

WITHOUT_STREAMS = """
    import os
    import sys
    import ignite_dist as idist

    def work(local_rank):
        print("a line of a worker", flush=True)
        return idist.all_reduce(1)

    if __name__ == "__main__":
        kept = os.dup(1)
        for number in sys.argv[1]:
            os.close(int(number))
            setattr(sys, {"0": "stdin", "1": "stdout", "2": "stderr"}[number], None)
        for _ in range(2):
            os.write(kept, f"{idist.spawn('gloo', work, nproc_per_node=2)}\\n".encode())
"""


@pytest.mark.parametrize(
    "closed", ["012", *(pytest.param(one, marks=pytest.mark.long) for one in ("12", "01", "0"))]
)
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    ended = run_new_python(write_script(tmp_path, WITHOUT_STREAMS), closed)
    lines = [line for line in ended.stdout.splitlines() if line != "a line of a worker"]
    assert lines == ["[2, 2]"] * 2 and ended.returncode == 0, ended.stdout


FORKS = """
    import concurrent.futures
    import multiprocessing
    import os
    import ignite_dist as idist

    def rank(local_rank):
        return idist.all_gather(local_rank)

    def launch(number):
        return idist.spawn("gloo", rank, nproc_per_node=2)[number % 2]

    if __name__ == "__main__":
        print(launch(0), flush=True)
        if (pid := os.fork()) == 0:
            print(launch(0), launch(1), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
            print(list(pool.map(launch, range(4))), flush=True)
        print(launch(0), flush=True)
"""


@pytest.mark.long
def test_forked_children_of_a_process_that_has_used_it(tmp_path: Path) -> None:
    ended = run_new_python(write_script(tmp_path, FORKS))
    assert ended.stdout.splitlines() == ["[0, 1]", "[0, 1] [0, 1]", str([[0, 1]] * 4), "[0, 1]"], ended.stdout


@pytest.mark.long
def test_under_a_debugger_without_a_spec_of_the_main_module(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    ended = run_new_python("-m", "pdb", "-c", "continue", "-c", "quit", script)
    assert "[2, 2]" in ended.stdout and "Error" not in ended.stdout, ended.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(one, marks=pytest.mark.long) for one in ("a thread", "a folder", "exec")),
        *("a zipapp", "no file any more", "stdin"),
    ],
)
def test_other_main_modules(how: str, tmp_path: Path) -> None:
    script, text = write_script(tmp_path, SCRIPT), ""
    if how == "a thread":
        lines = script.read_text().replace(
            "print(", "import threading\n    thread = threading.Thread(target=lambda: print("
        )
        script.write_text(lines.rstrip() + ")\n    thread.start()\n    thread.join()\n")
    elif how == "no file any more":
        script.write_text(f"import os\nos.unlink(__file__)\n{script.read_text()}")
    elif how == "exec":
        script.write_text(f"exec({script.read_text()!r})")
    elif how in ("a zipapp", "a folder"):
        folder = tmp_path / "folder"
        folder.mkdir()
        script = script.rename(folder / "__main__.py").parent
        if how == "a zipapp":
            zipapp.create_archive(folder, tmp_path / "app.pyz")
            script = tmp_path / "app.pyz"
    args: tuple[object, ...] = (script,)
    if how == "stdin":
        args, text = ("-",), script.read_text()
    ended = run_new_python(*args, **({"input": text} if text else {}), cwd=os.fspath(tmp_path))
    assert ended.stdout == "[2, 2]\n" and ended.returncode == 0, ended.stdout


GARBAGE = """
    import gc
    import os
    import torch.distributed as dist
    import ignite_dist as idist

    def work(local_rank):
        assert gc.isenabled() and gc.get_threshold()[0] == 1
        return idist.all_reduce(1)

    if __name__ == "__main__":
        gc.set_threshold(1_000_000)
        cycle = [dist.TCPStore("127.0.0.1", 0, is_master=True)]
        cycle.append(cycle)
        del cycle
        os.register_at_fork(after_in_child=lambda: gc.set_threshold(1))
        print(idist.spawn("gloo", work, nproc_per_node=2, start_method="fork"))
        assert gc.isenabled()
"""


def test_a_fork_does_not_destroy_the_garbage_of_the_launcher(tmp_path: Path) -> None:
    """The destructor of a TCPStore would wait for a thread that the fork does not have."""
    ended = run_new_python(write_script(tmp_path, GARBAGE), seconds=100)
    assert (ended.returncode, ended.stdout) == (0, "[2, 2]\n"), ended


THREADS = """
    import gc
    import threading
    import ignite_dist as idist

    def inner(local_rank):
        return idist.get_world_size()

    def work(local_rank):
        idist.finalize()  # a fork of a rank cannot begin a context
        return idist.spawn("gloo", inner, nproc_per_node=1, start_method="fork")

    def launch():
        results.append(idist.spawn("gloo", work, nproc_per_node=2, start_method="fork"))

    if __name__ == "__main__":
        results = []
        threads = [threading.Thread(target=launch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(results == [[[1], [1]]] * 4, gc.isenabled())
"""


def test_forks_in_several_threads_and_in_a_fork(tmp_path: Path) -> None:
    ended = run_new_python(write_script(tmp_path, THREADS), seconds=200)
    assert (ended.returncode, ended.stdout) == (0, "True True\n"), ended
