"""``ignite-dist run``: a script on every rank, without code of its own for that."""

from __future__ import annotations

import os
import py_compile
import subprocess
import zipapp
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from command_line import run_here
from helpers import free_port, plain_environ, run_new_python, run_python, write_script

SCRIPT = """
    import sys
    import beside
    import ignite_dist as idist

    def work(local_rank):
        return idist.get_world_size()

    def main():
        with idist.Parallel("gloo", nproc_per_node=2) as parallel:  # joins the command's processes
            size = parallel.run(work)
        ranks, launcher = idist.all_gather(idist.get_rank()), idist.environment().launcher
        sys.stdout.write(f"{ranks} {size} {beside.NAME} {sys.argv[1:]} {launcher}\\n")
        if "fail" in sys.argv and idist.restart_count() < 1:
            raise LookupError("no data")

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    return write_script(tmp_path, SCRIPT)


def _run(*args: Any, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environ = plain_environ(OMP_NUM_THREADS="1")
    return run_python(*launcher, "-m", "ignite_dist", "run", *args, env=environ)


def test_a_script_runs_on_every_rank(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", os.path.relpath(script), "--lr", "0.1")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout == "[0, 1] 2 beside ['--lr', '0.1'] ignite-dist run\n" * 2


@pytest.mark.long
def test_a_script_may_initialize_the_context_itself(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys
        import ignite_dist as idist

        idist.initialize("gloo")
        sys.stdout.write(f"{idist.all_reduce(1)}\\n")
        idist.finalize()
        """,
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for ended in (
        _run("--nproc-per-node", "2", script),
        _run("--nproc-per-node", "2", "--backend", "gloo", script, launcher=torchrun),
    ):
        assert ended.returncode == 0, ended.stdout
        assert ended.stdout == "2\n2\n"


@pytest.mark.long
def test_a_module_runs_as_with_python_m(script: Path) -> None:
    environ = plain_environ(OMP_NUM_THREADS="1")
    command = ("-m", "ignite_dist", "run", "--nproc-per-node", "2", "-m", "script", "--lr", "0.1")
    ended = run_python(*command, env=environ, cwd=script.parent)
    assert ended.stdout == "[0, 1] 2 beside ['--lr', '0.1'] ignite-dist run\n" * 2


@pytest.mark.long
def test_lines_have_the_rank_in_front(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", "--prefix", script)
    assert ended.returncode == 0, ended.stdout
    line = "[0, 1] 2 beside [] ignite-dist run"
    assert sorted(ended.stdout.splitlines()) == [f"[rank 0] {line}", f"[rank 1] {line}"]


@pytest.mark.long
def test_it_joins_the_processes_of_a_launcher(script: Path) -> None:
    ended = _run(script, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("[0, 1] 2 beside [] torchrun\n") == 2


def test_the_number_of_processes_as_mpirun_spells_it(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import ignite_dist as idist; idist.print(idist.get_world_size())")
    assert _run("-np", "2", script).stdout == "2\n"


def test_a_failure_shows_the_script_and_nothing_else(script: Path) -> None:
    ended = _run("--nproc-per-node", "2", script, "fail")
    assert ended.returncode == 1
    assert "LookupError: no data" in ended.stdout
    assert "runpy" not in ended.stdout and "ignite_dist/" not in ended.stdout
    again = _run("--nproc-per-node", "2", "--max-restarts", "1", script, "fail")
    assert again.returncode == 0, again.stdout


@pytest.mark.long
def test_a_script_starts_again_on_two_nodes(script: Path) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    common = (*place, "--nproc-per-node", "2", "--max-restarts", "1")
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(_run, *common, "--node-rank", str(rank), script, "fail") for rank in (0, 1)]
    for node in nodes:
        ended = node.result()
        assert ended.returncode == 0, ended.stdout
        assert "Restart 1 of at most 1" in ended.stdout and "LookupError: no data" in ended.stdout
        # At least two in the second attempt. In the first, a rank may be ended before it prints.
        assert ended.stdout.count("[0, 1, 2, 3] 4 beside ['fail'] ignite-dist run") >= 2


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["missing.py"], "There is no script 'missing.py' in "),
        (["-m", "missing.py"], "There is no module 'missing' in "),
        (["-m", "./missing.py"], "There is no module './missing.py' in "),
        (["--nproc-per-node", "many", "missing.py"], "must be a number or 'auto', got 'many'"),
        ([], "script"),
    ],
)
def test_wrong_arguments(args: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run_here(capfd, "run", *args)
    assert (status, output) == (2, "")
    assert len(errors.splitlines()) == 1 and text in errors


# --- as `python` runs it -------------------------------------------------------------------------------

SHOWS = """
    import os, sys
    import beside
    name = os.path.basename(sys.path[0]), os.path.basename(__file__), os.path.isabs(__file__), sys.argv
    os.chdir("/")
    sys.stdout.write(f"{name} {beside.NAME} {open(__file__).read(6)!r} {__name__} {__spec__}\\n")
"""


@pytest.mark.parametrize("how", ["file", "link"])
def test_a_file_is_found_where_it_really_is(how: str, tmp_path: Path) -> None:
    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir()
    links.mkdir()
    (real / "beside.py").write_text("NAME = 'beside'\n")
    script = write_script(real, SHOWS)
    if how == "link":
        (links / "linked.py").symlink_to(script)
        script = links / "linked.py"
    name = os.path.relpath(script, tmp_path)
    alone = run_python(name, "--lr", "1", cwd=tmp_path)
    ended = run_python("-m", "ignite_dist", "run", "--nproc-per-node", "2", name, "--lr", "1", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout
    assert ended.stdout == alone.stdout * 2


@pytest.mark.parametrize("how", ["folder", pytest.param("zip", marks=pytest.mark.long)])
def test_a_folder_and_a_zip_file(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_script(
        folder,
        "import sys, beside\nsys.stdout.write(f'{beside.NAME} {__name__} {sys.argv[1:]}\\n')",
        "__main__.py",
    )
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    if how == "zip":
        zipapp.create_archive(folder, tmp_path / "app.pyz")
    ended = _run("--nproc-per-node", "2", folder if how == "folder" else tmp_path / "app.pyz", "a")
    assert ended.stdout == "beside __main__ ['a']\n" * 2


def test_the_standard_input(tmp_path: Path) -> None:
    text = "import sys, ignite_dist as idist\nsys.stdout.write(f'{idist.all_reduce(1)} {sys.argv}\\n')\n"
    command = ("-m", "ignite_dist", "run", "--nproc-per-node", "2", "-", "a")
    ended = run_python(*command, input=text, cwd=tmp_path)
    assert ended.stdout == "2 ['-', 'a']\n" * 2


AS_PYTHON = """
    import atexit, pickle, sys
    class Mine: pass
    def annotated(x: int): pass
    atexit.register(lambda: sys.stdout.write(f"{len(pickle.dumps(Mine())) > 0} {__name__}\\n"))
    sys.stdout.write(f"{annotated.__annotations__} {sys.argv} {__spec__ and __spec__.name} {__package__}\\n")
"""


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(one, marks=pytest.mark.long) for one in ("file", "folder", "module")),
        "package",
        "compiled",
    ],
)
def test_a_script_cannot_tell_it_from_python(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    script = write_script(folder, AS_PYTHON, "__main__.py")
    args = {
        "file": (script,),
        "folder": ("pack",),
        "module": ("-m", "pack.__main__"),
        "package": ("-m", "pack"),
        "compiled": (py_compile.compile(os.fspath(script), cfile=os.fspath(tmp_path / "x.pyc")),),
    }[how]
    alone = run_new_python(*args, "a", cwd=tmp_path)
    ended = run_python("-m", "ignite_dist", "run", "--nproc-per-node", "2", *args, "a", cwd=tmp_path)
    assert alone.returncode == 0 and "True __main__" in alone.stdout, alone.stdout
    assert sorted(ended.stdout.splitlines()) == sorted(alone.stdout.splitlines() * 2)


ENDS = """
    import os, sys
    import ignite_dist as idist
    how = sys.argv[1]
    if how == "status":
        sys.exit(7)
    elif how == "text":
        sys.exit("all is lost")
    elif how == "signal":
        os.kill(os.getpid(), 9)
    elif how == "error":
        raise LookupError("no data")
    elif how == "ours":
        idist.all_reduce(1) if idist.get_rank() else idist.barrier()
    elif how == "zero":
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("how", "status", "shown"),
    [
        pytest.param("zero", 0, "", marks=pytest.mark.long),
        ("status", 7, "sys.exit(7)"),
        pytest.param("text", 1, "all is lost", marks=pytest.mark.long),
        ("signal", 128 + 9, "SIGKILL"),
        ("error", 1, 'raise LookupError("no data")'),
        ("ours", 1, "idist.all_reduce(1) if idist.get_rank() else idist.barrier()"),
    ],
)
def test_the_exit_status_is_the_scripts_and_its_lines_are_shown(
    how: str, status: int, shown: str, tmp_path: Path
) -> None:
    ended = _run("--nproc-per-node", "2", write_script(tmp_path, ENDS), how)
    assert ended.returncode == status and shown in ended.stdout, ended.stdout
    frames = [line for line in ended.stdout.splitlines() if "ignite_dist/" in line and "File" in line]
    assert len(frames) <= 2 and (how == "ours") == bool(frames), ended.stdout


AS_SEEN_BY_A_SHELL = {
    "interrupt": "raise KeyboardInterrupt",
    "at once": "import os; os._exit(5)",
    "SIGINT": "import os, signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "text": "raise SystemExit('all is lost')",
    "status": "raise SystemExit(3)",
    "no status": "raise SystemExit(None)",
    "negative": "raise SystemExit(-1)",
    "too large": "raise SystemExit(256 + 7)",
    "no C integer": "raise SystemExit(10**30)",
}


@pytest.mark.parametrize(
    "how",
    [
        *("interrupt", "at once", "no C integer"),
        *(pytest.param(one, marks=pytest.mark.long) for one in [*AS_SEEN_BY_A_SHELL][2:-1]),
    ],
)
def test_the_exit_status_is_pythons(how: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, AS_SEEN_BY_A_SHELL[how])
    alone = run_new_python(script).returncode
    ended = _run("--nproc-per-node", "2", script)
    assert ended.returncode == (alone if alone >= 0 else 128 - alone), ended.stdout


@pytest.mark.long
def test_an_interrupt_under_a_launcher(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    script = write_script(tmp_path, AS_SEEN_BY_A_SHELL["interrupt"])
    ended = _run("--backend", "gloo", script, launcher=torchrun)
    assert "exitcode  : 130" in ended.stdout and 'script.py", line 1' in ended.stdout, ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("how", ["error", "ours", "status"])
def test_failures_under_a_launcher_too(how: str, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = _run("--backend", "gloo", write_script(tmp_path, ENDS), how, launcher=torchrun)
    shown = {"error": 'raise LookupError("no data")', "ours": "idist.barrier()", "status": "exitcode  : 7"}
    assert ended.returncode == 1 and shown[how] in ended.stdout, ended.stdout
    assert "runpy" not in ended.stdout.partition("torch/distributed/run.py")[0].partition("E1")[0]


def test_all_frames_of_this_package_with_debug(tmp_path: Path) -> None:
    environ = plain_environ(IGNITE_DIST_DEBUG="1")
    command = ("-m", "ignite_dist", "run", "--nproc-per-node", "2", write_script(tmp_path, ENDS), "ours")
    ended = run_python(*command, env=environ)
    frames = [line for line in ended.stdout.splitlines() if "ignite_dist/" in line and "File" in line]
    assert len(frames) > 2, ended.stdout
