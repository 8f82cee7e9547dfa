"""The examples of accumulation and of a contrastive loss: what they print, however they are started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import ROOT, loopback, plain_environ, run_python

ROWS = {
    ("SINGLE_AUTO_SYNC", False),
    ("SINGLE_AUTO_SYNC", True),
    ("MULTI_AUTO_SYNC", True),
    ("FORCED_SYNC", False),
}
ROUNDING = 1e-5

TWO = ("--nproc-per-node", 2)
WITH_XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}


def run(name: str, *options: Any, seconds: float = 280, **environ: str) -> str:
    """What the example prints, on the CPU; nothing else, and no other rank, may print."""
    environment = plain_environ(CUDA_VISIBLE_DEVICES="", **loopback(), **environ)
    path: Path = ROOT / "examples" / name
    ended = run_python(path, *options, seconds=seconds, env=environment)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


# --- accumulate.py -------------------------------------------------------------------------------------


def table(output: str) -> dict[tuple[str, bool], tuple[str, float]]:
    """By strategy and ``find_unused_parameters``: milliseconds per step, as printed, and the error."""
    found = re.findall(r"^([A-Z_]+) +(True|False) +(\d+\.\d) +(\S+)$", output, re.MULTILINE)
    assert len(output.splitlines()) == 1 + len(found) == 1 + len(ROWS), output
    rows = {(name, unused == "True"): (time, float(error)) for name, unused, time, error in found}
    assert set(rows) == ROWS, output
    return rows


def assert_all_right(output: str) -> None:
    for time, error in table(output).values():
        assert float(time) > 0 and error < ROUNDING, output


def test_one_process_accumulates_the_same_with_each_strategy() -> None:
    assert_all_right(run("accumulate.py", "--epochs", 1))


def test_two_processes_accumulate_the_same_with_each_strategy() -> None:
    assert_all_right(run("accumulate.py", "--epochs", 1, *TWO))


@pytest.mark.horovod
def test_horovod_accumulates_the_same_with_each_strategy() -> None:
    assert_all_right(run("accumulate.py", "--epochs", 1, "--backend", "horovod", *TWO))


@pytest.mark.xla
@pytest.mark.parametrize("options", [(), TWO], ids=["alone", "2-replicas"])
def test_xla_accumulates_the_same_with_each_strategy(options: tuple[Any, ...]) -> None:
    assert_all_right(run("accumulate.py", "--epochs", 1, "--backend", "xla-tpu", *options, **WITH_XLA))


# --- contrastive.py ------------------------------------------------------------------------------------


class Learned(NamedTuple):
    """What a run has printed: the loss of each epoch, and both accuracies in percent."""

    losses: list[float]
    untrained: float
    trained: float


def learned(output: str) -> Learned:
    *epochs, untrained, trained = output.splitlines()
    losses = [re.fullmatch(r"epoch +\d+/\d+: loss (\d+\.\d{4})", line) for line in epochs]
    before = re.fullmatch(r"without training: (\d+\.\d)%", untrained)
    after = re.fullmatch(r"test accuracy: (\d+\.\d)%", trained)
    assert all(losses) and before and after, output
    return Learned([float(loss[1]) for loss in losses if loss], float(before[1]), float(after[1]))


@pytest.fixture(scope="module")
def serial() -> Learned:
    return learned(run("contrastive.py"))


def assert_same(one: Learned, other: Learned) -> None:
    assert one.losses[:3] == pytest.approx(other.losses[:3], abs=1e-3)
    assert abs(one.untrained - other.untrained) <= 0.6  # two of the 360 images
    assert abs(one.trained - other.trained) <= 1.5


def test_one_process_learns_without_labels(serial: Learned) -> None:
    assert serial.losses[-1] < serial.losses[0] - 0.5
    assert serial.trained >= 88.0
    assert serial.trained >= serial.untrained + 5.0


def test_two_processes_learn_the_same(serial: Learned) -> None:
    """More negatives than a rank has images of its own, or the losses would not be those of one process."""
    assert_same(learned(run("contrastive.py", *TWO)), serial)


@pytest.mark.horovod
def test_horovod_learns_the_same(serial: Learned) -> None:
    assert_same(learned(run("contrastive.py", "--backend", "horovod", *TWO)), serial)


@pytest.mark.xla
@pytest.mark.parametrize("options", [(), TWO], ids=["alone", "2-replicas"])
def test_xla_learns_the_same(serial: Learned, options: tuple[Any, ...]) -> None:
    assert_same(learned(run("contrastive.py", "--backend", "xla-tpu", *options, **WITH_XLA)), serial)


# --- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accumulate.py", "contrastive.py"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "ncl", *TWO), "error: Unknown backend 'ncl'"),
        (("--nnodes", 2), "error: backend=None runs in this process"),
    ],
)
def test_misuse(name: str, options: tuple[Any, ...], message: str) -> None:
    ended = run_python(ROOT / "examples" / name, *options)
    assert ended.returncode == 2 and "Traceback" not in ended.stdout
    assert message in ended.stdout, ended.stdout


@pytest.mark.parametrize("name", ["accumulate.py", "contrastive.py"])
def test_misuse_under_torchrun(name: str) -> None:
    ended = run_python(ROOT / "examples" / name, *TWO, env=plain_environ(RANK="0", WORLD_SIZE="1"))
    assert ended.returncode == 2 and "a launcher has started this process" in ended.stdout, ended.stdout
