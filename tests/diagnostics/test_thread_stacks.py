"""The watchdog takes the frames of threads that wait, and of no thread that runs."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import ignite_dist as idist
from ignite_dist.diagnostics.hang_reports import WAITING_MODULES
from ignite_dist.diagnostics.thread_stacks import part_that_waits, stacks_of_threads
from spawned import spawn

SECONDS = 3.5  # the watchdog looks once per second


def test_a_stack_names_the_files_lines_and_functions(tmp_path: Path) -> None:
    path = tmp_path / "é中 \\ x.py"
    code = compile("def waits(event):\n\n    event.wait()\n", str(path), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    event = threading.Event()
    thread = threading.Thread(target=names["waits"], args=(event,))
    thread.start()
    try:
        while thread.ident is None or "waits" not in str(stacks_of_threads().get(thread.ident)):
            time.sleep(0.01)
        lines = stacks_of_threads()[thread.ident]
        found = next(line for line in lines if line.function == "waits")
        assert (found.path, found.number) == (str(path), "3")
        assert lines.index(found) < [line.function for line in lines].index("run")  # the innermost is first
        assert part_that_waits(lines, WAITING_MODULES) == ()
    finally:
        event.set()
        thread.join()


def _num_looks(rank: int) -> tuple[int, int]:
    """How often frames were taken while this rank trained, and while rank 0 waited for rank 1."""
    looks, take = [], sys._current_frames

    def taken() -> Any:
        looks.append(threading.current_thread().name)
        return take()

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    data = torch.ones(64, 300)
    model(data).sum().backward()  # ranks wait for the imports of others
    idist.barrier()
    sys._current_frames = taken
    until = time.monotonic() + SECONDS
    while idist.all_reduce(float(time.monotonic() < until), "MIN"):
        for _ in range(20):
            model(data).sum().backward()
    num_in_training = len(looks)
    if rank == 1:
        time.sleep(SECONDS)
    idist.barrier()
    return num_in_training, len(looks) - num_in_training


def test_frames_are_taken_only_of_threads_that_wait() -> None:
    (in_training, while_waiting), others = spawn(_num_looks)
    assert in_training == others[0] == 0
    assert while_waiting > 0
