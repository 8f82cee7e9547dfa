"""``any_interrupted()``: a signal to one rank ends the loops of all ranks after the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import helpers
import ignite_dist as idist
import interrupted_jobs
from spawned import spawn

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


def _steps_until_interrupted(_: int, folder: Path, signals: tuple[int, ...]) -> tuple[int, bool, list[Any]]:
    """The number of steps, whether it is still said afterwards, and the handlers after the context."""
    before, steps = [signal.getsignal(number) for number in signals], 1
    while not idist.any_interrupted(signals):
        if steps == 3:
            (folder / str(idist.get_rank())).write_text("")
        time.sleep(0.001 * idist.get_rank())  # the ranks are in different places
        steps += 1
    again = idist.any_interrupted(signals)
    idist.finalize()
    return steps, again, [signal.getsignal(number) for number in signals] == before


@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda one: one.name)
def test_all_ranks_stop_after_the_same_step(number: int, receiver: int, tmp_path: Path) -> None:
    workers = spawn(_steps_until_interrupted, tmp_path, tuple(SIGNALS), join=False)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(workers.pids()[receiver], number)
    (first, *said), (second, *said_too) = workers.join()
    assert first == second > 3 and said == said_too == [True, True]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("horovod", marks=pytest.mark.horovod),
        pytest.param("xla-tpu", marks=pytest.mark.xla),  # replicas are threads
    ],
)
def test_other_backends(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    assert len(set(idist.spawn(backend, _is_told, nproc_per_node=2))) == 1


def _is_told(_: int) -> int:
    steps = 0
    while not idist.any_interrupted():
        steps += 1
        if steps == 3 and idist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    return steps


# --- one process -------------------------------------------------------------------------------------------


@pytest.fixture
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    idist.initialize("gloo")
    yield
    idist.finalize()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_one_process(own_handlers: None) -> None:
    assert not idist.any_interrupted()
    signal.raise_signal(signal.SIGINT)
    assert idist.any_interrupted()


def test_a_second_one_soon_is_the_same_one_and_a_late_one_is_not(
    own_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    idist.any_interrupted()
    for _ in range(2):  # torchrun sends the workers the Ctrl-C that they have received from the terminal
        signal.raise_signal(signal.SIGINT)
    now += 10
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_set_meanwhile_stays(own_handlers: None) -> None:
    received: list[int] = []
    idist.any_interrupted((signal.SIGUSR1,))
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    idist.finalize()
    signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert callable(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0, 1000, "SIGINT"])
def test_signals_that_cannot_be_handled(number: Any) -> None:
    with pytest.raises(ValueError, match="signals must be numbers of signals that a process can handle"):
        idist.any_interrupted((signal.SIGINT, number))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread() -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            idist.any_interrupted()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread only" in str(errors)


def test_a_forked_child_has_its_own_handlers(own_handlers: None) -> None:
    """What ends a child by SIGTERM, ``Process.terminate()`` for example, waits for its end."""
    idist.any_interrupted()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        time.sleep(600)
        os._exit(1)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


# Without a context. The handlers stay, so these scripts have a process of their own.
SERIAL = """
    import importlib
    import signal
    import ignite_dist as idist

    def work(local_rank):
        before = idist.any_interrupted()
        signal.raise_signal(signal.SIGTERM)
        return before, idist.any_interrupted()

    if __name__ == "__main__":
        print(idist.any_interrupted())
        signal.raise_signal(signal.SIGTERM)
        import wave  # any import ends the serial model
        print(idist.any_interrupted())
        print(idist.spawn("gloo", work, nproc_per_node=2, start_method="fork"))
        print(idist.any_interrupted())
        idist.initialize("gloo")
        print(idist.any_interrupted())
        idist.finalize()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, idist.any_interrupted())
"""


def test_a_signal_before_an_import_a_fork_and_a_context(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, SERIAL))
    workers = [(False, True)] * 2
    assert ended.stdout.splitlines() == ["False", "True", str(workers), "True", "True", "True False"], ended


def test_an_interrupt_by_a_terminal_leaves_the_workers_of_a_loader_alone(own_handlers: None) -> None:
    """The terminal interrupts them too."""
    loader = DataLoader(torch.arange(8), batch_size=1, num_workers=1, multiprocessing_context="fork")
    idist.any_interrupted()
    batches: Any = iter(loader)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGINT)
    seen = [int(batch) for batch in batches]
    assert seen == list(range(8)) and not idist.any_interrupted()


# --- whole jobs --------------------------------------------------------------------------------------------

SCRIPT = """
    import os, sys
    import ignite_dist as idist

    def train(local_rank, folder):
        idist.any_interrupted()
        os.write(1, f"worker {os.getpid()}\\n".encode())
        steps = 0
        while not idist.any_interrupted():
            steps += 1
        with open(f"{folder}/{idist.get_rank()}", "w") as file:
            file.write(str(steps))
        idist.barrier()  # the ranks can still meet

    if __name__ == "__main__":
        with idist.Parallel("gloo", **({} if "RANK" in os.environ else {"nproc_per_node": 2})) as parallel:
            parallel.run(train, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
@pytest.mark.parametrize("receiver", ["launcher", pytest.param("group", marks=pytest.mark.long)])
def test_a_signal_to_the_launcher(number: int, receiver: str, tmp_path: Path) -> None:
    with interrupted_jobs.job(SCRIPT, folder=tmp_path, seconds=600) as found:
        found.signal(receiver, number)
        code, (first, second), _ = found.end()
    assert code == -number and first == second != []


@pytest.mark.long
def test_an_interrupt_of_torchrun(tmp_path: Path) -> None:
    """As from a terminal: to torchrun and to its workers, which get it twice."""
    script = helpers.write_script(tmp_path, SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path),
    ]
    job = subprocess.Popen(
        command,
        env=helpers.plain_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    try:
        shown = ""
        while shown.count("worker ") < 2:
            line = job.stdout.readline()
            assert line, shown
            shown += line
        os.killpg(job.pid, signal.SIGINT)
        job.communicate(timeout=120)
    finally:
        job.kill()
        job.communicate()
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() != ""
