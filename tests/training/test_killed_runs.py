"""A run that is killed again and again, at moments of chance, ends with the bits of a run that was not."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers import ROOT, end_of_processes, loopback, plain_environ, python_that_forks, write_script

pytestmark = pytest.mark.long

KILLS, STEPS = 10, 72
SECONDS_PER_EVENT = 60

SCRIPT = """
    import os
    import sys
    import time

    import torch
    from torch import nn

    import ignite_dist as idist

    EPOCHS, SIZE, LAST = 12, 48, 66  # of 6 steps each, and with a checkpoint after every second or third step


    def say(text):
        print(text, flush=True)


    def train(local_rank, folder, strategy):
        say(f"worker {os.getpid()}")
        idist.seed_everything(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        model = idist.auto_model(net, strategy=strategy)
        optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.05))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        loader = idist.auto_dataloader(torch.arange(float(SIZE)), batch_size=8, shuffle=True)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        values = {"epoch": 0, "step": 0}
        path = idist.latest_checkpoint(folder)
        if path is not None:
            values = idist.load_checkpoint(path, **parts)
        epoch, step = values["epoch"], values["step"]
        filler = torch.zeros(500_000)  # so that a write takes a while
        while epoch < EPOCHS:
            for batch in loader:
                x = batch[:, None] / SIZE + torch.rand(len(batch), 8)
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
                step += 1
                if step % 3 != 1:
                    values = {"epoch": epoch, "step": step, "filler": filler}
                    options = {"keep": 2, "asynchronous": step % 2 == 0}
                    idist.save_checkpoint(f"{folder}/{step}.pt", **parts, **options, **values)
                if idist.get_rank() == 0:
                    say(f"step {step}")
                while step == LAST and idist.get_rank() == 0 and not os.path.exists(f"{folder}.may-end"):
                    say("step again")  # there are kills to come
                    time.sleep(0.05)
            scheduler.step()
            epoch += 1
        end = [idist.model_state(model), idist.optimizer_state(optimizer), scheduler.state_dict()]
        idist.all_reduce(1)
        if idist.get_rank() == 0:
            torch.save([*end, step, torch.rand(3)], f"{folder}/end")


    if __name__ == "__main__":
        launcher, folder, strategy = sys.argv[1:]
        if launcher == "spawn":
            idist.spawn("gloo", train, (folder, strategy), nproc_per_node=2, max_restarts=100)
        else:
            with idist.Parallel("gloo") as parallel:
                parallel.run(train, folder, strategy)
"""


class Attempt(NamedTuple):
    """What the ranks have said since the last kill."""

    workers: list[int]
    steps: int
    waits: bool  # before its last steps, for the last kill


class Job:
    """A launcher with two ranks, started again when it was killed."""

    def __init__(self, folder: Path, launcher: str, strategy: str) -> None:
        self.folder = folder / "run"
        self._script = write_script(folder, SCRIPT)
        self._log = folder / "log"
        self._read_from = 0
        self._outlive_launcher = launcher == "torchrun"
        options = ["--standalone", "--max-restarts", "100", "--nproc-per-node", "2"]
        torchrun = ["-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
        self._python = python_that_forks()
        self._command = [
            self._python,
            *(torchrun if launcher == "torchrun" else ()),
            str(self._script),
            launcher,
            str(self.folder),
            strategy,
        ]
        self.start()

    def start(self) -> None:
        environ = plain_environ(
            OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHON_EXEC=self._python, **loopback()
        )
        with self._log.open("a") as log:
            self.launcher = subprocess.Popen(
                self._command, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def attempt(self) -> Attempt:
        with self._log.open(errors="replace") as log:
            log.seek(self._read_from)
            text = log.read()
        workers = list(re.finditer(r"worker (\d+)", text))
        if len(workers) < 2:
            return Attempt([], 0, False)
        text = text[workers[1].end() :]
        return Attempt([int(one[1]) for one in workers], text.count("step"), "step again" in text)

    def may_end(self) -> None:
        """Let it make its last steps."""
        self.folder.with_name(f"{self.folder.name}.may-end").touch()

    def files(self) -> set[str]:
        """Unfinished files, and folders of sharded tensors."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        return {name for name in names if name.endswith(".tmp") or ".shards-" in name}

    def wait_until(self, has_come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS_PER_EVENT
        while not has_come():
            assert self.launcher.poll() is None, f"it has ended:\n{self.tail()}"
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.0005)

    def wait_for_steps(self, steps: int) -> None:
        """Until both ranks have begun, and rank 0 has said so many steps."""

        def has_come() -> bool:
            now = self.attempt()
            return bool(now.workers) and now.steps >= steps

        self.wait_until(has_come)

    def wait_for_write(self) -> None:
        """Until a checkpoint is being written."""
        seen = self.files()
        self.wait_until(lambda: bool(self.files() - seen) or self.attempt().waits)

    def kill(self, victim: str, choice: random.Random) -> None:
        """Kill a rank, all ranks, or the launcher, which ends the job: then it is started again."""
        workers = self.attempt().workers
        self._read_from = self._log.stat().st_size
        if victim != "launcher":
            for pid in [choice.choice(workers)] if victim == "rank" else workers:
                os.kill(pid, signal.SIGKILL)
            return
        self.launcher.kill()
        self.launcher.wait()
        if self._outlive_launcher:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        assert end_of_processes(workers, 30) == []
        self._read_from = self._log.stat().st_size
        self.start()

    def end(self) -> Any:
        """What the run ends with."""
        assert self.launcher.wait(120) == 0, self.tail()
        return torch.load(self.folder / "end", weights_only=True)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        for pid in self.attempt().workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def job(folder: Path, launcher: str, strategy: str) -> Iterator[Job]:
    folder.mkdir()
    started = Job(folder, launcher, strategy)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "strategy"), [("spawn", "ddp"), ("torchrun", "fsdp")])
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    launcher: str, strategy: str, tmp_path: Path
) -> None:
    with job(tmp_path / "undisturbed", "spawn", strategy) as undisturbed:
        undisturbed.may_end()
        wanted = undisturbed.end()
    assert wanted[3] == STEPS
    choice = random.Random(launcher)
    victims = ["rank", "all", "launcher"] * 3 + ["rank"]
    choice.shuffle(victims)
    with job(tmp_path / "killed", launcher, strategy) as killed:
        for victim in victims:
            killed.wait_for_steps(choice.randrange(5))
            if choice.random() < 0.5:
                killed.wait_for_write()
            killed.kill(victim, choice)
        killed.may_end()
        found = killed.end()
    assert len(victims) == KILLS
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    left = sorted(os.listdir(killed.folder))
    assert len([name for name in left if name.endswith(".pt")]) == 2, left  # keep=2, whatever was killed
