"""``--pdb``, ``--trace`` and ``breakpoint()`` in tests on ranks: users type into a terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import helpers

# Runs a command in a new terminal. Its input is what the user types.
IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
SECONDS = 120


class Session:
    """pytest in a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "pytest", "-p", "pytest_ignite_dist", "-p", "no:cacheprovider"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command, *arguments],
            cwd=folder,
            env=helpers.plain_environ(TERM="dumb"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._unread = ""

    def type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())

    def until(self, text: str) -> str:
        """What the terminal has shown since the last call, up to ``text``."""
        deadline = time.monotonic() + SECONDS
        while text not in self._unread:
            shown = self._read(deadline)
            assert shown, f"{text!r} was not shown: {self._unread}"
            self._unread += shown
        before, _, self._unread = self._unread.partition(text)
        return before

    def end(self) -> tuple[int, str]:
        """The exit code, and the rest of what the terminal has shown."""
        deadline = time.monotonic() + SECONDS
        while shown := self._read(deadline):
            self._unread += shown
        return self._process.wait(SECONDS), self._unread

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self, deadline: float) -> str:
        """Empty at the end, or after the deadline."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(self._process.stdout.fileno(), 65_536).decode() if ready else ""


class Starter(Protocol):
    def __call__(self, text: str, *arguments: str) -> Session: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """``start(text, *arguments)``: run a file of tests in a terminal."""
    sessions = []

    def start_one(text: str, *arguments: str) -> Session:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        file = helpers.write_script(tmp_path, text, "test_theirs.py")
        file.write_text(f"import pytest\nimport ignite_dist as idist\n{file.read_text()}")
        sessions.append(Session(tmp_path, *arguments))
        return sessions[-1]

    yield start_one
    for session in sessions:
        session.close()


@pytest.mark.long
def test_post_mortem_of_rank_0_while_the_others_wait(start: Starter) -> None:
    """The debugger is open for longer than the test may take, and Ctrl-C reaches only the debugger."""
    session = start(
        """
        @pytest.mark.ranks(2, timeout=3)
        def test_first(rank):
            value = 40
            print("printed by", rank)
            if rank == 0:
                assert idist.all_reduce(1) == 3
            idist.all_reduce(1)
            idist.barrier()
            idist.barrier()

        @pytest.mark.ranks(2)
        def test_later():
            idist.barrier()
        """,
        "--pdb",
        "--timeout=4",
    )
    shown = session.until("(Pdb) ")
    assert ">>> rank 0 >>>" in shown and "printed by 0" in shown and "assert 2 == 3" in shown, shown
    session.type("import time; time.sleep(6)\n")
    session.until("(Pdb) ")
    session.type("print('be' + 'gun'); time.sleep(1000)\n")
    session.until("begun")
    session.type("\x03")
    assert "KeyboardInterrupt" in session.until("(Pdb) ")
    session.type("value + idist.get_world_size()\n")
    assert "42" in session.until("(Pdb) ")
    session.type("c\n")
    code, rest = session.end()
    assert code == 1 and "1 failed, 1 passed" in rest and "rank 0 failed first" in rest, rest


@pytest.mark.long
def test_post_mortem_of_another_rank_and_the_end_of_the_session(start: Starter) -> None:
    session = start(
        """
        @pytest.mark.ranks(3)
        def test_first(rank):
            assert rank == 0

        def test_not_run():
            pass
        """,
        "--pdb",
        "--pdbcls=pdb:Pdb",
    )
    assert ">>> rank 1 >>>" in session.until("(Pdb) ")
    session.type("rank * 77\n")
    assert "77" in session.until("(Pdb) ")
    session.type("q\n")
    code, rest = session.end()
    assert code == 2 and "Quitting debugger" in rest and "1 failed in" in rest, rest


@pytest.mark.long
def test_breakpoint_opens_on_rank_0(start: Starter) -> None:
    session = start(
        """
        @pytest.mark.ranks(2, timeout=3)
        def test_first(rank):
            value = 40
            breakpoint()
            assert idist.all_reduce(value) == 80

        @pytest.mark.ranks(2)
        def test_later():
            idist.barrier()
        """
    )
    session.until("(Pdb) ")
    session.type("import time; time.sleep(4)\n")
    session.until("(Pdb) ")
    session.type("value + idist.get_world_size()\n")
    assert "42" in session.until("(Pdb) ")
    session.type("c\n")
    code, rest = session.end()
    assert code == 0 and "2 passed" in rest, rest
    assert "breakpoint() has no effect on rank 1" in rest, rest


@pytest.mark.long
def test_trace_opens_a_debugger_on_rank_0(start: Starter) -> None:
    session = start(
        """
        @pytest.mark.ranks(2)
        def test_first(rank):
            assert idist.all_reduce(1) == 2
        """,
        "--trace",
    )
    session.until("(Pdb) ")
    session.type("rank + 77\n")
    assert "77" in session.until("(Pdb) ")
    session.type("c\n")
    code, rest = session.end()
    assert code == 0 and "1 passed" in rest, rest
