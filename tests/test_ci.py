"""What CI is made of: its steps, other Pythons, and the line about the tests that a run has left out."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, end_of_processes, plain_environ, run_new_python, write_script

WITH_PYTHON = ROOT / ".ci" / "with-python"
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


# --- the steps -----------------------------------------------------------------------------------------


SCRIPT = """
    import runpy, sys
    from pathlib import Path

    ci = runpy.run_path(sys.argv[1])
    Step = ci["Step"]
    ci["run"].__globals__["LOGS"] = Path("logs").absolute()
    sys.exit(not ci["run"](eval(sys.argv[2])))
"""


def command_of_steps(folder: Path, steps: str) -> list[str]:
    """The arguments of Python that run these steps, and keep their output in ``folder / "logs"``."""
    return [str(write_script(folder, SCRIPT)), str(ROOT / ".ci" / "steps.py"), f"[{steps}]"]


def test_a_step_that_fails_stops_those_that_need_it_and_no_others(tmp_path: Path) -> None:
    steps = """
        Step("one", "echo said by one"), Step("two", "false | true; echo after", after=("one",)),
        Step("three", "true", after=("two",)), Step("four", "true", after=("three",)), Step("five", "true"),
    """
    ended = run_new_python(*command_of_steps(tmp_path, steps), cwd=tmp_path)
    assert ended.returncode == 1
    assert "said by one" in ended.stdout and "after\n" not in ended.stdout
    outcomes = dict(re.findall(r"^(\w+) +(passed|FAILED|not run) +\d+ +\d+ *$", ended.stdout, re.MULTILINE))
    assert outcomes == {
        "one": "passed",
        "two": "FAILED",
        "three": "not run",
        "four": "not run",
        "five": "passed",
    }


def test_the_tests_of_all_steps_are_counted_and_the_slowest_are_kept(tmp_path: Path) -> None:
    file = write_script(
        tmp_path,
        """
        import pytest
        def test_that_passes(): pass
        def test_that_fails(): assert False
        def test_that_is_skipped(): pytest.skip()
        """,
        "test_of_a_step.py",
    )
    command = f"{sys.executable} -m pytest -q --noconftest -c {os.devnull} --rootdir {tmp_path} {file}"
    steps = f"Step('one', {command!r}), Step('two', {command + ' -k passes'!r})"
    ended = run_new_python(*command_of_steps(tmp_path, steps), cwd=tmp_path)
    end = (
        "Steps that have not passed: one\n"
        "one: test_of_a_step::test_that_fails has failed: 'assert False'\n"
        "2 passed, 1 failed, 1 skipped\n"
    )
    assert ended.stdout.endswith(end), ended.stdout
    slowest = (tmp_path / "logs" / "slowest.txt").read_text(encoding="utf-8")
    assert len(slowest.splitlines()) == 4 and "test_of_a_step::test_that_fails" in slowest


def test_the_processor_seconds_of_each_step_are_shown(tmp_path: Path) -> None:
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 2: pass'"
    ended = run_new_python(
        *command_of_steps(tmp_path, f"Step('idle', 'true'), Step('busy', {burn!r})"), cwd=tmp_path
    )
    seconds = dict(re.findall(r"^(\w+) +passed +\d+ +(\d+) *$", ended.stdout, re.MULTILINE))
    assert seconds["idle"] == "0" and int(seconds["busy"]) >= 2, ended.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_an_interrupt_ends_the_steps_and_shows_the_table(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    command = f"sleep 600 & echo $! >{tmp_path / 'started'}; wait"
    arguments = command_of_steps(tmp_path, f"Step('one', {command!r})")
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=plain_environ(), cwd=tmp_path
    )
    pid = int((tmp_path / "started").read_text())
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "=== the steps" in output
    assert end_of_processes([pid], 30) == []


def test_a_step_needs_only_steps_before_it() -> None:
    steps = runpy.run_path(str(ROOT / ".ci" / "steps.py"))["STEPS"]
    names = [step.name for step in steps]
    assert all(set(step.after) <= set(names[:number]) for number, step in enumerate(steps))


# --- other Pythons -------------------------------------------------------------------------------------


def with_python(
    *command: str, under: tuple[str, ...] = (), program: Path = WITH_PYTHON, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*under, program, *command],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_python_of_this_machine_is_used(tmp_path: Path) -> None:
    (tmp_path / f"python{OWN_VERSION}").symlink_to(sys.executable)
    ended = with_python(OWN_VERSION, "sh", "-c", "echo $PYTHON", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (ended.returncode, ended.stdout) == (0, f"python{OWN_VERSION}\n"), ended.stderr


@pytest.mark.parametrize("version", ["3.9", "3.15", "abc", ""])
def test_an_unknown_version_is_refused(version: str) -> None:
    ended = with_python(version, "true")
    assert ended.returncode == 1
    assert ended.stderr == (
        f"Unknown PYTHON_VERSION '{version}'. ignite_dist runs on 3.10, 3.11, 3.12, 3.13 and 3.14.\n"
    )


@pytest.fixture
def no_python() -> Iterator[str]:
    """A PATH with the programs of this machine, but for its Pythons. Other users may read it."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        for folder in map(Path, ("/usr/sbin", "/usr/bin", "/sbin", "/bin")):
            for program in folder.iterdir():
                link = Path(path, program.name)
                if not program.name.startswith("python") and not link.is_symlink():
                    link.symlink_to(program)
        yield path


def test_a_version_that_debian_does_not_have(no_python: str) -> None:
    ended = with_python("3.12", "true", PATH=no_python)
    assert (ended.returncode, ended.stderr) == (
        1,
        "There is no python3.12 with venv on this machine, and Debian forky has 3.13 3.14 only: "
        "install python3.12.\n",
    )


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.mark.launchers
@needs_root
def test_without_root_one_sentence_says_so(no_python: str) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    program = Path(shutil.copy(WITH_PYTHON, no_python))  # where this user may read
    ended = with_python("3.14", "true", program=program, under=nobody, PATH=no_python)
    assert (ended.returncode, ended.stderr) == (
        1,
        "There is no python3.14 with venv on this machine. Install it, or run this as root, "
        "which installs Debian's.\n",
    )


@pytest.mark.launchers
@needs_root
def test_without_a_network_one_sentence_says_so(no_python: str, tmp_path_factory: Any) -> None:
    empty = tmp_path_factory.mktemp("checkout") / ".ci"
    empty.mkdir()
    shutil.copy(WITH_PYTHON, empty)
    ended = with_python(
        "3.14", "true", program=empty / "with-python", under=("unshare", "--net"), PATH=no_python
    )
    assert ended.returncode == 1 and "Is there a network?" in ended.stderr.splitlines()[-1], ended.stderr


# --- what was left out ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_run_ends_with_what_it_has_left_out(processes: tuple[str, ...]) -> None:
    tests = [f"tests/{name}.py" for name in ("comp_models/test_horovod_state", "values/test_tree")]
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *processes, "-m", "not horovod and not xla")
    ended = run_new_python(*run, *tests, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("Left out: ")]
    assert re.fullmatch(r"Left out: \d+ horovod \(make test-horovod\)\. `make test-all` .*", line)
