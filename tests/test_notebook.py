"""Cells of a notebook, in a real kernel: the example, output, failures, interrupts, and the kernel's end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import notebooks
from helpers import end_of_processes, without_gloos

# --- the example ---------------------------------------------------------------------------------------


def described(notebook: Any) -> list[list[tuple[str, str]]]:
    """The outputs of each cell: type and stream, and the text of stdout without numbers."""
    return [
        sorted(
            (
                one.output_type + one.get("name", ""),
                re.sub(r"\d+", "N", one.text) if one.get("name") == "stdout" else "",
            )
            for one in cell.get("outputs", ())
        )
        for cell in notebook.cells
    ]


@pytest.mark.long
def test_the_example_runs_and_its_stored_outputs_are_of_this_version() -> None:
    ran, num_updates = notebooks.executed(notebooks.EXAMPLE)
    *_, training, _, evaluation, _, failure = ran.cells
    plot, *streams = training.outputs
    printed, progress = sorted(streams, key=lambda one: one.name, reverse=True)
    assert "image/png" in plot.data and num_updates >= 2
    assert printed.text == "trained on 2 ranks\n"
    assert re.match(r"epochs: 100%.* 15/15 ", progress.text), progress.text
    (accuracy,) = re.findall(r"^test accuracy: (\d+\.\d)%$", evaluation.outputs[0].text)
    assert float(accuracy) > 88
    (error,) = failure.outputs
    shown = "\n".join(error.traceback)
    assert "WorkerRaisedError: Rank 1 (pid " in shown and "ValueError: the loss of rank 1 is NaN" in shown
    assert len(shown.splitlines()) < 15, shown
    stored = notebooks.read(notebooks.EXAMPLE)
    assert described(stored) == described(ran), "python tests/notebooks.py stores the outputs"


# --- output --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel() -> Iterator[notebooks.Kernel]:
    with notebooks.kernel() as started:
        yield started


SAY = """
def say(local_rank, text, path=None):
    print(text, "print")
    print(text, "stderr", file=sys.stderr)
    logging.getLogger("x").warning("%s logging", text)
    os.system(f"echo {text} child")
    for _ in idist.progress_bar(range(2), mininterval=0, miniters=1):
        while path is not None and not os.path.exists(path):
            time.sleep(0.01)
    print(text, "end")
"""
OUT, ERROR = ("print", "child", "end"), ("stderr", "logging")


def test_output_is_in_order_in_the_cell(kernel: notebooks.Kernel) -> None:
    kernel.run(SAY)
    cell = kernel.run(
        "print('first')\nidist.spawn('gloo', say, ('a',))\nprint('second')\nidist.spawn('gloo', say, ('b',))"
    )
    a, b = ([f"{name} {word}" for word in OUT] for name in "ab")
    assert without_gloos(cell.stdout).splitlines() == ["first", *a, "second", *b]
    # A bar ends with "it/s]" or "s/it]", and perhaps with spaces.
    parts = re.findall(r"[ab] \w+|(?<=\]) *\n", cell.stderr)
    expected = [*(f"a {word}" for word in ERROR), "", *(f"b {word}" for word in ERROR), ""]
    assert [part.strip() for part in parts] == expected


def test_output_comes_while_the_cell_runs(kernel: notebooks.Kernel, tmp_path: Path) -> None:
    kernel.run(SAY)
    cell = kernel.start(f"idist.spawn('gloo', say, ('a', {str(tmp_path / 'go')!r}))")
    kernel.read_until(lambda: "a child\n" in cell.stdout and "0/2" in cell.stderr)
    assert not cell.is_done and "end" not in cell.stdout
    (tmp_path / "go").touch()
    kernel.read_until(lambda: cell.is_done)
    assert cell.stdout.endswith("a end\n")


def test_output_after_the_end_of_the_cell_is_still_its_own(kernel: notebooks.Kernel, tmp_path: Path) -> None:
    """The worker goes on when the next cell runs, and has ended when that cell ends."""
    kernel.run(SAY)
    first = kernel.run(f"workers = idist.spawn('gloo', say, ('a', {str(tmp_path / 'go')!r}), join=False)")
    second = kernel.run(f"print('b')\nopen({str(tmp_path / 'go')!r}, 'w').close()\nworkers.join()")
    assert second.stdout == "b\n" and not second.stderr
    assert without_gloos(first.stdout).splitlines() == [f"a {word}" for word in OUT]
    assert "2/2" in first.stderr


@pytest.mark.parametrize(
    "start_method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.long)]
)
def test_captured_output(start_method: str, kernel: notebooks.Kernel) -> None:
    kernel.run(SAY)
    cell = kernel.run(f"%%capture captured\nidist.spawn('gloo', say, ('a',), start_method={start_method!r})")
    assert not cell.stdout and not cell.stderr and not cell.error
    shown = kernel.run("print(captured.stdout)").stdout
    assert without_gloos(shown).split("\n")[:3] == [f"a {word}" for word in OUT]


# --- failures ------------------------------------------------------------------------------------------

FAILING = """
def divide(local_rank):
    return 1 / local_rank

def run():
    with idist.Parallel("gloo", nproc_per_node=1) as parallel:
        parallel.run(divide)

def start():
    idist.spawn("gloo", divide, join=False).join()
"""


@pytest.mark.parametrize(
    ("name", "line"), [("run", "parallel.run(divide)"), ("start", 'idist.spawn("gloo",')]
)
def test_a_failure_shows_the_users_frames(name: str, line: str, kernel: notebooks.Kernel) -> None:
    kernel.run(FAILING)
    error = kernel.run(f"{name}()").error
    # Pythons differ in which lines they mark with "~~~^^".
    lines = [text for text in error.splitlines() if text.strip(" ~^")]
    start, call, in_function, called, message, *rest = lines
    assert re.fullmatch(r"  Cell In\[\d+\], line 1, in <module>", start) and call == f"    {name}()", error
    assert re.fullmatch(rf"  Cell In\[\d+\], line \d+, in {name}", in_function) and line in called, error
    assert message.startswith("WorkerRaisedError: Rank 0 (pid "), error
    frames = [text for text in rest if "line" in text]
    assert len(frames) == 1 and re.fullmatch(r"  Cell In\[\d+\], line 2, in divide", frames[0]), error
    assert rest[-2] == "ZeroDivisionError: division by zero" and len(rest) <= 7, error
    assert rest[-1].startswith("See "), error


# --- interrupts, and the kernel's end ------------------------------------------------------------------

WAIT = """
def wait(local_rank, how):
    print("pid", os.getpid(), flush=True)
    while how == "sleep" or local_rank == 1:
        time.sleep(0.1)
    idist.barrier()
"""
BUSY = "idist.spawn('gloo', wait, ('sleep',), nproc_per_node=2)"
IDLE = "workers = idist.spawn('gloo', wait, ('sleep',), nproc_per_node=2, join=False)"
CELLS = {
    "sleep": BUSY,
    "collective": "idist.spawn('gloo', wait, ('barrier',), nproc_per_node=2)",
    "timeout": f"{IDLE}\nwhile workers.join(0.2) is None:\n    pass",
}


def start_waiting(kernel: notebooks.Kernel, code: str) -> tuple[notebooks.Cell, list[int]]:
    """Start a cell whose two workers wait for ever. Returns their process ids too."""
    kernel.run(WAIT)
    cell = kernel.start(code)
    kernel.read_until(lambda: len(re.findall(r"pid \d+\n", cell.stdout)) == 2)
    return cell, [int(pid) for pid in re.findall(r"pid (\d+)\n", cell.stdout)]


@pytest.mark.parametrize("code", CELLS.values(), ids=CELLS)
def test_an_interrupt_ends_the_workers(code: str, kernel: notebooks.Kernel) -> None:
    cell, pids = start_waiting(kernel, code)
    kernel.manager.interrupt_kernel()
    kernel.read_until(lambda: cell.is_done, seconds=10)
    assert "KeyboardInterrupt" in cell.error.splitlines()[-1] and len(cell.error.splitlines()) < 16
    assert end_of_processes(pids, 0) == []
    assert kernel.run("print(idist.spawn('gloo', lambda rank: rank, nproc_per_node=2))").stdout == "[0, 1]\n"


@pytest.mark.long
def test_an_interrupt_during_the_first_imports() -> None:
    """The fork server gets the signal too. It survives, so that the next cell has it."""
    with notebooks.kernel() as kernel:
        before = {child.pid for child in psutil.Process(kernel.pid).children()}
        cell = kernel.start("idist.spawn('gloo', lambda rank: time.sleep(600), nproc_per_node=2)")

        def servers() -> list[psutil.Process]:
            children = [child for child in psutil.Process(kernel.pid).children() if child.pid not in before]
            return [child for child in children if "forkserver" in " ".join(child.cmdline())]

        while not (first := servers()):
            assert not cell.is_done
        kernel.manager.interrupt_kernel()
        kernel.read_until(lambda: cell.is_done, seconds=20)
        assert "KeyboardInterrupt" in cell.error and not cell.stderr
        after = kernel.run("print(idist.spawn('gloo', lambda rank: rank, nproc_per_node=2))")
        assert after.stdout == "[0, 1]\n" and not after.stderr
        assert servers() == first


@pytest.mark.long
@pytest.mark.parametrize("code", [BUSY, IDLE], ids=["busy", "idle"])
@pytest.mark.parametrize("end", ["shutdown", "kill", "restart"])
def test_the_end_of_the_kernel_ends_the_workers(code: str, end: str) -> None:
    with notebooks.kernel() as kernel:
        _, pids = start_waiting(kernel, code)
        if end == "restart":
            kernel.manager.restart_kernel()
        else:
            kernel.manager.shutdown_kernel(now=end == "kill")
        assert end_of_processes(pids, 10) == []
