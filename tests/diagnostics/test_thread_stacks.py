"""The watchdog finds the threads that wait by the text of their stacks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import ignite_dist as idist
from ignite_dist.diagnostics.hang_reports import waiting_parts
from ignite_dist.diagnostics.thread_stacks import Line, stacks_of_threads
from ignite_dist.diagnostics.watchdog import _running
from spawned import spawn


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
        assert waiting_parts(stacks_of_threads(), [thread.ident]) == {}
    finally:
        event.set()
        thread.join()


def _looks(rank: int, folder: Path) -> list[Any]:
    """What three looks find while a thread of rank 0 waits: twice in the first barrier, and in the second."""
    steps = [folder / name for name in ("first", "second")]
    idist.barrier()
    if rank == 1:
        for step in steps:
            while not step.exists():
                time.sleep(0.01)
            idist.barrier()
        return []
    (watchdog,) = _running
    watchdog.stop()  # this test looks in its place
    log = watchdog._recorder.logs[0]

    def meets_twice() -> None:
        for _ in steps:
            idist.barrier()

    thread = threading.Thread(target=meets_twice)

    def place_after(num_calls: int) -> Any:
        while True:
            parts = waiting_parts(stacks_of_threads(), [thread.ident or 0])
            if parts and log.num_calls > num_calls:
                return parts
            time.sleep(0.01)

    before = log.num_calls
    thread.start()
    first = place_after(before)
    found = [watchdog._blocked_threads(1.0)]
    before = log.num_calls
    steps[0].touch()
    assert place_after(before) == first
    found += [watchdog._blocked_threads(2.0), watchdog._blocked_threads(3.0)]
    steps[1].touch()
    thread.join()
    return [[{since for _, _, by_thread in blocked for since in by_thread.values()} for blocked in found]]


def test_a_thread_that_goes_on_is_not_blocked_by_the_same_line(tmp_path: Path) -> None:
    (found,), _ = spawn(_looks, tmp_path)
    assert found == [set(), set(), {2.0}]


def test_the_last_call_may_be_that_of_a_thread_that_has_ended() -> None:
    stacks = {1: [Line("a.py", "1", "f")]}
    assert waiting_parts(stacks, [2]) == {}
    assert 2 in waiting_parts({}, [2])  # without any text the watchdog looks at the frames
