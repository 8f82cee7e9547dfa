"""Output of workers: whole lines, prefixes, and the launcher's configuration of ``logging``."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import helpers
from ignite_dist import spawn

# The start methods beside the default one.
OTHERS = {name: pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "fork")}

# The worker looks what has arrived in a pipe after each call of write().
LINES = """
    import os, sys
    import ignite_dist as idist

    def writes(local_rank):
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.set_blocking(reader, False)
        seen = []
        def check(write):
            write()
            try:
                seen.append(os.read(reader, 1_000_000).decode())
            except BlockingIOError:
                seen.append("")
        for stream in (sys.stdout, sys.stderr):
            check(lambda: stream.write("one"))
            check(lambda: stream.write("\\n"))
            check(lambda: stream.write("two\\nthree"))
            check(lambda: stream.write("\\n"))
            check(lambda: stream.write("four"))
            check(lambda: stream.flush())
            check(lambda: stream.write("x" * 50_000 + "\\nend"))
            check(lambda: stream.flush())
        stdout, stderr = seen[:8], seen[8:]
        assert stdout == stderr, (stdout, stderr)
        return stdout

    if __name__ == "__main__":
        (seen,) = idist.spawn("gloo", writes, start_method=sys.argv[1])
        assert seen == ["", "one\\n", "two\\n", "three\\n", "", "four", "x" * 50_000 + "\\n", "end"], seen
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("start_method", ["forkserver", *OTHERS.values()])
def test_lines_come_whole(start_method: str, unbuffered: str, tmp_path: Path) -> None:
    environ = helpers.plain_environ(PYTHONUNBUFFERED=unbuffered)
    ended = helpers.run_python(helpers.write_script(tmp_path, LINES), start_method, env=environ)
    assert ended.returncode == 0, ended.stdout


ENDS = """
    import os, signal, subprocess, sys
    import ignite_dist as idist

    def writes(local_rank, how):
        print("multi\\nline")
        print("to stderr", file=sys.stderr)
        os.write(1, b"C++\\n")
        subprocess.run(["echo", "child"])
        for number in range(2_000):
            print("line", number)
        print("grüße", end="")
        assert not sys.stdout.isatty()
        idist.barrier()
        if how == "dies" and local_rank == 1:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises" and local_rank == 1:
            raise LookupError
        idist.barrier()

    if __name__ == "__main__":
        start_method, how = sys.argv[1:]
        try:
            options = {"start_method": start_method, "prefix_output": True}
            idist.spawn("gloo", writes, (how,), nproc_per_node=2, **options)
        except idist.RankFailedError as error:
            print(error.rank)
        print("launcher")
"""
WRITTEN = ["multi", "line", "C++", "child", *(f"line {number}" for number in range(2_000)), "grüße"]


@pytest.mark.parametrize(
    ("start_method", "how"),
    [
        *((start_method, "returns") for start_method in ("forkserver", "fork")),
        pytest.param("spawn", "returns", marks=pytest.mark.long),
        ("forkserver", "dies"),
        ("forkserver", "raises"),
    ],
)
def test_each_line_has_its_rank_and_none_is_lost(start_method: str, how: str, tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, ENDS)
    command = [helpers.python_that_forks(), str(script), start_method, how]
    ended = subprocess.run(
        command, capture_output=True, env=helpers.plain_environ(), timeout=280, text=True, encoding="utf-8"
    )
    assert ended.returncode == 0, ended.stderr
    out = helpers.without_gloos(ended.stdout).splitlines()
    ranks = [1] if how != "returns" else [0, 1]
    for rank in ranks:
        own = [line.removeprefix(f"[rank {rank}] ") for line in out if line.startswith(f"[rank {rank}] ")]
        assert [line for line in own if line] == WRITTEN
    assert out[-1] == "launcher" and all(re.match(r"\[rank [01]\] ", line) for line in out[:-2])
    assert {f"[rank {rank}] to stderr" for rank in ranks} <= set(ended.stderr.splitlines())


REDIRECTED = """
    import contextlib, io, os, sys
    import ignite_dist as idist

    def writes(local_rank):
        print("printed")
        os.write(1, b"x" + "\u00fc".encode() * 40_000)  # two parts: a pipe holds 65,536 bytes
        print("to stderr", file=sys.stderr)

    if __name__ == "__main__":
        with contextlib.redirect_stdout(io.StringIO()) as text:
            idist.spawn("gloo", writes, start_method=sys.argv[1], prefix_output=sys.argv[2] == "prefix")
        expected = {"none": "printed\\nx", "prefix": "[rank 0] printed\\n[rank 0] x"}[sys.argv[2]]
        seen = text.getvalue().rstrip("\\n")
        assert seen == expected + "\u00fc" * 40_000, seen[:50] + seen[-50:]
"""


@pytest.mark.parametrize("prefix", ["none", "prefix"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_replaced_stdout_gets_the_output(start_method: str, prefix: str, tmp_path: Path) -> None:
    """As in a notebook. stderr is the launcher's own, so it is passed on as it was."""
    ended = helpers.run_python(helpers.write_script(tmp_path, REDIRECTED), start_method, prefix)
    assert ended.returncode == 0, ended.stdout
    expected = {"none": "to stderr\n", "prefix": "[rank 0] to stderr\n"}[prefix]
    assert helpers.without_gloos(ended.stdout) == expected


TERMINAL = """
    import os, sys
    import ignite_dist as idist

    def writes(local_rank):
        os.write(1, b"hello\\n")
        return os.isatty(1)

    if __name__ == "__main__":
        prefix = sys.argv[1] == "prefix"
        assert idist.spawn("gloo", writes, prefix_output=prefix) == [not prefix]
"""


@pytest.mark.parametrize(
    ("prefix", "environ", "expected"),
    [
        ("prefix", {}, "\033[31m[rank 0]\033[0m hello"),
        ("prefix", {"NO_COLOR": "1"}, "[rank 0] hello"),
        ("none", {}, "hello"),
    ],
)
def test_on_a_terminal(prefix: str, environ: dict[str, str], expected: str, tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, TERMINAL)
    main, other = pty.openpty()
    complete = helpers.plain_environ(**{"NO_COLOR": "", **environ})
    launcher = subprocess.Popen(
        [helpers.python_that_forks(), str(script), prefix], stdout=other, stderr=other, env=complete
    )
    os.close(other)
    output = b""
    with suppress(OSError):  # at the end
        while data := os.read(main, 1_000):
            output += data
    os.close(main)
    assert launcher.wait(60) == 0, output
    lines = helpers.without_gloos(output.decode().replace("\r\n", "\n")).splitlines()
    assert expected in lines, lines


def test_what_an_interrupted_worker_writes_at_the_end_is_there(tmp_path: Path) -> None:
    text = """
        import os, threading
        import ignite_dist as idist

        def waits(local_rank):
            try:
                os.write(1, b"ready\\n")
                threading.Event().wait()
            finally:
                print("saved")

        if __name__ == "__main__":
            idist.spawn("gloo", waits, nproc_per_node=2, prefix_output=True)
    """
    launcher = subprocess.Popen(
        [helpers.python_that_forks(), str(helpers.write_script(tmp_path, text))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=helpers.plain_environ(),
        text=True,
    )
    seen: Counter[str] = Counter()
    assert launcher.stdout is not None
    for line in launcher.stdout:
        seen[line] += 1
        if line.endswith("ready\n") and sum("ready" in line for line in seen) == 2:
            launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert {f"[rank {rank}] {what}\n" for rank in range(2) for what in ("ready", "saved")} <= set(seen)


LOGS = """
    import logging, sys
    import ignite_dist as idist

    class Formatter(logging.Formatter):
        def format(self, record):
            return "own " + super().format(record)

    def logs(local_rank, configures):
        if configures:
            logging.basicConfig(format="worker's %(message)s", level=logging.ERROR, force=True)
        logging.getLogger("some").info("message")
        logging.getLogger("some").debug("not to be seen")
        logging.getLogger("some").error("error")

    if __name__ == "__main__":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(Formatter("%(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        idist.spawn("gloo", logs, (sys.argv[1] == "configures",), start_method=sys.argv[2])
"""


@pytest.mark.parametrize("start_method", ["forkserver", OTHERS["spawn"]])
def test_workers_log_as_the_launcher_does(start_method: str, tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, LOGS)
    ended = helpers.run_python(script, "", start_method)
    assert ended.stdout.splitlines() == ["own some: message", "own some: error"], ended.stdout
    ended = helpers.run_python(script, "configures", start_method)
    assert ended.stdout.splitlines() == ["worker's error"], ended.stdout


LOGS_OF_ANOTHER_CLASS = """
    import logging
    import ignite_dist as idist

    class Lines(logging.Handler):
        def emit(self, record):
            print("launcher:", record.getMessage())

    def logs(local_rank):
        logging.getLogger("some").info("message of %d", local_rank)

    if __name__ == "__main__":
        logging.basicConfig(level=logging.INFO, handlers=[Lines()])
        logging.info("first")
        idist.spawn("gloo", logs, nproc_per_node=2)
"""


def test_records_for_a_handler_that_cannot_be_sent_are_on_stderr(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, LOGS_OF_ANOTHER_CLASS))
    found = sorted(ended.stdout.splitlines())  # run_python() writes stderr into it
    assert found == ["INFO:some:message of 0", "INFO:some:message of 1", "launcher: first"]


LOGS_OF_FILES = """
    import logging, sys
    import ignite_dist as idist

    def logs(local_rank):
        logging.getLogger("some").info("message of %d", local_rank)
        logging.getLogger("named").info("named %d", local_rank)
        logging.getLogger("named.quiet").info("not to be seen")
        logging.getLogger("off").error("not to be seen")
        logging.info("root %d", local_rank)

    if __name__ == "__main__":
        if sys.argv[1] == "root":
            logging.basicConfig(filename="a.log", filemode="w", level=logging.INFO, format="%(message)s")
            logging.info("launcher")
        handler = logging.FileHandler("b.log")
        logging.getLogger("named").addHandler(handler)
        logging.getLogger("named").setLevel(logging.INFO)
        logging.getLogger("named.quiet").setLevel(logging.ERROR)
        handler.addFilter(lambda record: "root" not in record.getMessage())
        logging.getLogger("off").addHandler(logging.NullHandler())
        logging.getLogger("off").propagate = False
        idist.spawn("gloo", logs, nproc_per_node=2, start_method=sys.argv[2])
        logging.info("end")
"""


@pytest.mark.parametrize("start_method", ["forkserver", OTHERS["spawn"], "fork"])
@pytest.mark.parametrize("root", ["root", ""])
def test_what_the_launcher_logs_to_a_file(root: str, start_method: str, tmp_path: Path) -> None:
    script = helpers.write_script(tmp_path, LOGS_OF_FILES)
    ended = helpers.run_python(script, root, start_method, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    named = ["named 0", "named 1"]
    assert sorted((tmp_path / "b.log").read_text().splitlines()) == named
    if root:
        first, *middle, last = (tmp_path / "a.log").read_text().splitlines()
        assert (first, last) == ("launcher", "end")
        assert sorted(middle) == ["message of 0", "message of 1", *named, "root 0", "root 1"]


def _warns(local_rank: int) -> None:
    logging.getLogger("of the worker").warning("warning of %d", local_rank)


@pytest.mark.parametrize("start_method", ["forkserver", OTHERS["spawn"]])  # after a fork they are the same
def test_warnings_of_workers_are_seen_in_a_test(
    start_method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pytest's handlers keep the launcher's records; those of a worker have only the terminal."""

    class Keeps(logging.NullHandler):
        pass

    monkeypatch.setattr(logging.getLogger(), "handlers", [Keeps()])
    spawn("gloo", _warns, nproc_per_node=2, start_method=start_method)
    assert sorted(capfd.readouterr().err.splitlines()) == ["warning of 0", "warning of 1"]


LOGS_NOWHERE = """
    import io, logging, shutil, tempfile
    import ignite_dist as idist

    class Memory(logging.FileHandler):
        def _open(self):
            return io.StringIO()

    def logs(local_rank):
        logging.getLogger("gone").error("not to be written")
        return local_rank

    if __name__ == "__main__":
        folder = tempfile.mkdtemp()
        logging.getLogger("gone").addHandler(logging.FileHandler(folder + "/a.log"))
        shutil.rmtree(folder)
        closed = logging.FileHandler("b.log")
        closed.stream.close()
        logging.getLogger("closed").addHandler(closed)
        logging.getLogger("memory").addHandler(Memory("c.log"))
        print(idist.spawn("gloo", logs, nproc_per_node=2))
"""


def test_a_file_that_cannot_be_opened_is_no_failure(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, LOGS_NOWHERE), cwd=tmp_path)
    assert ended.returncode == 0 and "[0, 1]" in ended.stdout, ended.stdout
    assert ended.stdout.count("--- Logging error ---") == 2  # Python's own report, of each worker


class _Minimal:
    """A stream with no more than ``print`` needs, which fails at its second write."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        if self.texts:
            raise RuntimeError("the stream is full")
        self.texts.append(text)

    def flush(self) -> None:
        pass


def _print_much(local_rank: int) -> str:
    for _ in range(3000):
        print("x" * 100, flush=True)
    return "done"


def test_a_stream_that_is_no_file_and_raises_does_not_stop_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = _Minimal()
    monkeypatch.setattr("sys.stdout", stream)
    assert spawn("gloo", _print_much, nproc_per_node=1) == ["done"]
    assert stream.texts[0].startswith("xxx")
