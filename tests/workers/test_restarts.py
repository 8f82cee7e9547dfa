"""The example with restarts, of torchrun or its own: a rank is killed, and it learns what it would have."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist

import ignite_dist as idist
from commands import BIN, documented
from helpers import (
    ROOT,
    end_of_ranks,
    loopback,
    plain_environ,
    python_that_forks,
    torchrun_environs,
    without_gloos,
    write_script,
)

DIGITS = ROOT / "examples" / "digits.py"
EPOCHS = 3
SURVIVES = shlex.split(
    documented("torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/digits.py")
)

# The example, with a rank 0 that dies once in the middle of the checkpoint of an epoch, half of it written.
DIES_WHILE_WRITING = """
    import io
    import os
    import runpy
    import signal
    import sys

    import torch

    digits, marker, fatal_epoch, *arguments = sys.argv[1:]
    whole = torch.save

    def save(value, file, **kwargs):  # torch calls it as well, to pickle a tensor
        epoch = value["values"]["epoch"] if isinstance(value, dict) else None
        if epoch != int(fatal_epoch) or os.path.exists(marker):
            return whole(value, file, **kwargs)
        buffer = io.BytesIO()
        whole(value, buffer)
        file.write(buffer.getvalue()[: buffer.tell() // 2])
        file.flush()
        open(marker, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save
    sys.argv = [digits, *arguments]
    runpy.run_path(digits, run_name="__main__")
"""


class Run(NamedTuple):
    """What a run printed and left behind."""

    output: str
    progress: str
    checkpoint: dict[str, Any]

    @property
    def accuracies(self) -> set[str]:
        """Of each time that it came to the end: a rank can be killed behind that."""
        return set(re.findall(r"^test accuracy: (\d+\.\d)%$", self.output, re.MULTILINE))

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor(
            [metrics["loss"] for metrics in self.checkpoint["values"]["history"]], dtype=torch.float64
        )

    @property
    def epochs_begun(self) -> list[int]:
        """A bar is one line. It shows 0% when it begins, and again if it ends before the first batch."""
        bars = (re.search(rf"epoch +(\d+)/{EPOCHS}: +0%", line) for line in self.progress.split("\n"))
        return [int(bar[1]) for bar in bars if bar]


class Watched:
    """The example as a process of its own, whose checkpoint is read whenever it has changed.

    The ranks of torchrun are forks, and end with the processes that torchrun has started for them.
    """

    def __init__(self, folder: Path, *command: Any, programs: Path = BIN) -> None:
        self.path = folder / "checkpoint.pt"
        self.epoch = 0  # of the checkpoint
        self._seen: tuple[int, ...] = ()
        self._output, self._progress = folder / "output.txt", folder / "progress.txt"
        arguments = [*command, "--epochs", EPOCHS, "--output-dir", folder]
        with self._output.open("w") as output, self._progress.open("w") as progress:
            self._process = subprocess.Popen(
                list(map(str, arguments)),
                env=plain_environ(
                    CUDA_VISIBLE_DEVICES="",
                    OMP_NUM_THREADS="1",
                    PATH=f"{programs}:{os.environ['PATH']}",
                    PYTHON_EXEC=python_that_forks(),
                    **loopback(),
                ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=progress,
            )

    @property
    def progress(self) -> str:
        return self._progress.read_bytes().decode()  # read_text() would replace each \r by \n

    def watch_until(self, is_over: Callable[[], bool], seconds: float = 200) -> None:
        """Look at the checkpoint until ``is_over()``: whenever it is there, it is whole."""
        deadline = time.monotonic() + seconds
        while True:
            over = is_over()
            self._look()  # what was there when it was over has been seen, too
            if over:
                return
            assert time.monotonic() < deadline, self.progress[-4000:]
            time.sleep(0.03)

    def _look(self) -> None:
        if self.path.exists():
            stat = self.path.stat()
            seen = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if seen != self._seen:
                self.epoch = torch.load(self.path)["values"]["epoch"]
                self._seen = seen

    def workers(self) -> list[psutil.Process]:
        """The ranks that torchrun has started."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children()
        return []

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> Run:
        """Wait for the process, which must succeed."""
        self.watch_until(self.has_ended)
        assert self._process.returncode == 0, self.progress[-4000:]
        return Run(without_gloos(self._output.read_text()), self.progress, torch.load(self.path))

    def end(self) -> None:
        """End what is still running of it, if the test has failed."""
        for process in [*self.workers(), self._process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


@contextmanager
def watched(folder: Path, *command: Any, programs: Path = BIN) -> Iterator[Watched]:
    run = Watched(folder, *command, programs=programs)
    try:
        yield run
    finally:
        run.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    command = ("python", DIGITS, "--nproc-per-node", 2)
    forks = Path(python_that_forks()).parent
    with watched(tmp_path_factory.mktemp("undisturbed"), *command, programs=forks) as run:
        return run.finish()


# --- ways to die -------------------------------------------------------------------------------------


def kill_while_starting(folder: Path, undisturbed: Run, choice: random.Random) -> tuple[Run, int]:
    """Before the first epoch, or soon after. An earlier job has left a checkpoint there, not to be taken."""
    values = {**undisturbed.checkpoint["values"], "job": "an earlier one"}
    torch.save({**undisturbed.checkpoint, "values": values}, folder / "checkpoint.pt")
    with watched(folder, *SURVIVES) as run:
        run.watch_until(lambda: len(run.workers()) == 2)
        _kill_one(run, choice, after=choice.uniform(0, 4))
        return run.finish(), 0


def kill_while_training(folder: Path, undisturbed: Run, choice: random.Random) -> tuple[Run, int]:
    """Anywhere in an epoch, or in what comes before the next. Not the last, which may be over soon."""
    epoch = choice.randrange(1, EPOCHS)
    with watched(folder, *SURVIVES) as run:
        run.watch_until(lambda: f"epoch {epoch:2}/{EPOCHS}" in run.progress)
        saved = _kill_one(run, choice, after=choice.uniform(0, 0.4))
        return run.finish(), saved


def kill_while_writing(folder: Path, undisturbed: Run, choice: random.Random) -> tuple[Run, int]:
    """In the middle of a checkpoint."""
    epoch = choice.randrange(1, EPOCHS + 1)
    script = write_script(folder, DIES_WHILE_WRITING)
    with watched(folder, *SURVIVES[:-1], script, DIGITS, folder / "has-died", epoch) as run:
        run.watch_until((folder / "has-died").exists)
        saved = run.epoch
        assert saved == epoch - 1
        return run.finish(), saved


def kill_at_the_end(folder: Path, undisturbed: Run, choice: random.Random) -> tuple[Run, int]:
    """Behind the last checkpoint: nothing is left to train."""
    with watched(folder, *SURVIVES) as run:
        run.watch_until(lambda: run.epoch == EPOCHS)
        _kill_one(run, choice, after=choice.uniform(0, 0.3))
        return run.finish(), EPOCHS


def _kill_one(run: Watched, choice: random.Random, after: float) -> int:
    """Kill one of the ranks. Returns the epoch of the checkpoint that was there."""
    moment = time.monotonic() + after
    run.watch_until(lambda: time.monotonic() > moment)
    worker = choice.choice(run.workers())
    worker.kill()
    return run.epoch


WAYS_TO_DIE = (kill_while_training, kill_while_writing, kill_while_starting, kill_at_the_end)


@pytest.mark.long
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_training_survives_the_death_of_a_rank(
    undisturbed: Run, tmp_path: Path, repetitions: Callable[[int, int], int], tally: Callable[[str], None]
) -> None:
    choice = random.Random(0)
    for number in range(repetitions(2, 20)):
        kill = WAYS_TO_DIE[number % len(WAYS_TO_DIE)]
        folder = tmp_path / str(number)
        folder.mkdir()
        run, saved = kill(folder, undisturbed, choice)
        assert run.progress.count("(exitcode: -9)") == 1, f"{kill.__name__} killed nobody:\n{run.progress}"
        assert len(run.accuracies) == 1 and run.accuracies == undisturbed.accuracies
        torch.testing.assert_close(run.losses, undisturbed.losses, rtol=0, atol=1e-4)
        assert_only_the_current_epoch_was_lost(run.epochs_begun, saved)
        tally(f"digits.py under torchrun, {kill.__name__}")


@pytest.mark.long
def test_training_survives_without_torchrun(undisturbed: Run, tmp_path: Path) -> None:
    command = documented("python examples/digits.py --nproc-per-node 2 --max-restarts 3")
    with watched(tmp_path, *shlex.split(command)) as run:
        run.watch_until(lambda: run.epoch == 1)
        saved = run.epoch
        (server,) = [child for child in run.workers() if child.children()]  # the fork server
        server.children()[-1].kill()
        ended = run.finish()
    assert ended.accuracies == undisturbed.accuracies
    torch.testing.assert_close(ended.losses, undisturbed.losses, rtol=0, atol=1e-4)
    assert ended.progress.count("Restart 1 of at most 3") == ended.progress.count("was ended by SIGKILL") == 1
    assert_only_the_current_epoch_was_lost(ended.epochs_begun, saved)


def assert_only_the_current_epoch_was_lost(begun: list[int], saved: int) -> None:
    """``begun`` are the epochs in their order, ``saved`` is that of the checkpoint when a rank was killed."""
    again = [epoch for epoch, following in pairwise(begun) if epoch == following]
    assert begun == sorted([*range(1, EPOCHS + 1), *again])
    assert len(again) <= 1 and all(epoch > saved for epoch in again), (begun, saved)


# --- several nodes -----------------------------------------------------------------------------------


def _meet(seconds: float) -> int:
    idist.initialize("gloo", timeout=timedelta(seconds=seconds))
    total: int = idist.all_reduce(1)
    return total  # and it ends without finalize(), as a rank that is killed


@pytest.mark.parametrize("came_before", [(0, 1), (0,), (1,)], ids=str)
def test_ranks_of_two_nodes_meet_whatever_their_agents_have_counted(came_before: tuple[int, ...]) -> None:
    """An agent counts the failures on its own node only. All starts of the ranks share one store."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environs = torchrun_environs(2, agent.port, nproc_per_node=1)
    seconds = 30 if came_before == (0, 1) else 1
    before = end_of_ranks(_meet, seconds, environs=[environs[rank] for rank in came_before])
    assert all((rank.result == 2) == (came_before == (0, 1)) for rank in before), before
    for restarted in environs:
        restarted["TORCHELASTIC_RESTART_COUNT"] = "1"
        both = end_of_ranks(_meet, 30, environs=environs)
        assert [rank.result for rank in both] == [2, 2], both
