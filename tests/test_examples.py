"""The example, run as a user runs it: as a script, in every way that it can be started."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.image import imread

import ignite_dist as idist
from helpers import ROOT, free_port, loopback, plain_environ, run_python, without_gloos

DIGITS = ROOT / "examples" / "digits.py"
EPOCHS = 10  # the script's default
NUM_TEST = 360


class Run(NamedTuple):
    """What a run of the example printed and left behind."""

    output: str
    progress: str
    folder: Path

    @property
    def accuracy(self) -> float:
        """What the last line says, in percent."""
        lines = self.output.splitlines()
        last = re.fullmatch(r"test accuracy: (\d{1,3}\.\d)%", lines[-1])
        assert last is not None and self.output.count("test accuracy") == 1, self.output
        return float(last[1])

    @property
    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.folder / "checkpoint.pt")

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor([metrics["loss"] for metrics in self.checkpoint["history"]], dtype=torch.float64)

    def shows_epochs(self, first: int, last: int, of: int) -> bool:
        """Whether one process, and no other, showed a progress bar for each of these epochs."""
        started = re.findall(r"epoch +(\d+)/(\d+): +0%", self.progress)
        return started == [(str(epoch), str(of)) for epoch in range(first, last + 1)]


def start(folder: Path, *options: Any, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The example as a process, on the CPU; the bars on accuracy and equality are meant for it."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(DIGITS), "--output-dir", str(folder), *map(str, options)],
        env=plain_environ(CUDA_VISIBLE_DEVICES="", **loopback()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Run:
    """Wait for the process, which must succeed."""
    try:
        output, progress = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, progress
    return Run(without_gloos(output), progress, folder)


def train(folder: Path, *options: Any, launcher: tuple[str, ...] = ()) -> Run:
    return finish(start(folder, *options, launcher=launcher), folder)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, all epochs: what every other run is held against."""
    return train(tmp_path_factory.mktemp("serial"))


# --- four ways to start it ---------------------------------------------------------------------------


def test_serial_run_learns(serial: Run) -> None:
    assert serial.accuracy >= 97.0
    assert serial.shows_epochs(1, EPOCHS, of=EPOCHS)
    assert serial.checkpoint["epoch"] == len(serial.losses) == EPOCHS


def test_two_processes_learn_the_same(serial: Run, tmp_path: Path) -> None:
    run = train(tmp_path, "--nproc-per-node", 2)
    assert run.accuracy >= 97.0
    assert abs(run.accuracy - serial.accuracy) <= 1.0
    assert run.shows_epochs(1, EPOCHS, of=EPOCHS)
    assert len(run.losses) == EPOCHS
    torch.testing.assert_close(run.losses, serial.losses, rtol=0, atol=1e-4)


def test_torchrun(serial: Run, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = train(tmp_path, "--epochs", 2, launcher=launcher)
    assert run.accuracy > 50.0
    assert run.shows_epochs(1, 2, of=2)
    torch.testing.assert_close(run.losses, serial.losses[:2], rtol=0, atol=1e-4)


@pytest.mark.horovod
def test_horovod_learns_the_same(serial: Run, tmp_path: Path) -> None:
    run = train(tmp_path, "--backend", "horovod", "--nproc-per-node", 2, "--epochs", 2)
    assert run.accuracy > 50.0
    assert run.shows_epochs(1, 2, of=2)
    torch.testing.assert_close(run.losses, serial.losses[:2], rtol=0, atol=1e-4)


@pytest.mark.xla
@pytest.mark.parametrize("options", [(), ("--nproc-per-node", 2)], ids=["alone", "2-replicas"])
def test_xla_learns_the_same(
    serial: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...]
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    run = train(tmp_path, "--backend", "xla-tpu", "--epochs", 2, *options)
    assert run.accuracy > 50.0
    assert run.shows_epochs(1, 2, of=2)
    torch.testing.assert_close(run.losses, serial.losses[:2], rtol=0, atol=1e-4)


@pytest.mark.horovod
def test_horovodrun(serial: Run, tmp_path: Path) -> None:
    launcher = ("-m", "horovod.runner.launch", "-np", "2", sys.executable)
    run = train(tmp_path, "--backend", "horovod", "--epochs", 2, launcher=launcher)
    (accuracy,) = re.findall(r"^\[0\]<stdout>:test accuracy: (\d+\.\d)%$", run.output, re.MULTILINE)
    assert float(accuracy) > 50.0
    torch.testing.assert_close(run.losses, serial.losses[:2], rtol=0, atol=1e-4)


def test_two_nodes(serial: Run, tmp_path: Path) -> None:
    options = ("--epochs", 2, "--nproc-per-node", 1, "--nnodes", 2, "--master-port", free_port())
    folders = tmp_path / "node0", tmp_path / "node1"
    nodes = [start(folder, *options, "--node-rank", rank) for rank, folder in enumerate(folders)]
    try:
        first, second = (finish(node, folder) for node, folder in zip(nodes, folders, strict=True))
    finally:
        for node in nodes:
            node.kill()
    assert first.accuracy > 50.0
    assert first.shows_epochs(1, 2, of=2)
    torch.testing.assert_close(first.losses, serial.losses[:2], rtol=0, atol=1e-4)
    assert (second.output, second.folder.exists()) == ("", False)  # rank 0 alone prints and writes


# --- the checkpoint ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("interrupted"), "--epochs", EPOCHS - 2)


@pytest.mark.parametrize("options", [(), ("--nproc-per-node", 2)], ids=["serial", "2-processes"])
def test_resume_ends_as_if_never_interrupted(
    serial: Run, interrupted: Run, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    shutil.copytree(interrupted.folder, tmp_path, dirs_exist_ok=True)
    resumed = train(tmp_path, "--resume", *options)
    assert resumed.shows_epochs(EPOCHS - 1, EPOCHS, of=EPOCHS)
    assert resumed.checkpoint["epoch"] == EPOCHS
    exactly = {} if options else {"rtol": 0, "atol": 0}
    for part in ("model", "optimizer", "scheduler", "history"):
        torch.testing.assert_close(resumed.checkpoint[part], serial.checkpoint[part], **exactly)


def test_resume_with_nothing_left_to_train(serial: Run, tmp_path: Path) -> None:
    shutil.copytree(serial.folder, tmp_path, dirs_exist_ok=True)
    resumed = train(tmp_path, "--resume")
    assert resumed.accuracy == serial.accuracy
    assert resumed.progress == ""


def test_interrupted_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint = runpy.run_path(str(DIGITS))["save_checkpoint"]
    path = tmp_path / "new" / "checkpoint.pt"
    save_checkpoint({"epoch": 1}, path)

    def break_off(checkpoint: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint({"epoch": 2}, path)
    assert torch.load(path) == {"epoch": 1}


# --- evaluation and plot -----------------------------------------------------------------------------


def confusions(local_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The confusion matrices of all test images and of the first two."""
    digits = runpy.run_path(str(DIGITS))
    torch.manual_seed(0)
    net, (_, test_set) = digits["Net"]().to(idist.device()), digits["load_data"]()
    subsets = (torch.utils.data.Subset(test_set, range(size)) for size in (NUM_TEST, 2))
    return tuple(digits["evaluate"](net, subset).cpu() for subset in subsets)


def test_evaluation_counts_every_image_once() -> None:
    alone = confusions(0)
    assert [confusion.sum() for confusion in alone] == [NUM_TEST, 2]
    for of_rank in idist.spawn("gloo", confusions, nproc_per_node=3):  # of two images one rank gets none
        torch.testing.assert_close(of_rank, alone, rtol=0, atol=0)


def test_plot_is_not_blank(serial: Run) -> None:
    image = imread(serial.folder / "digits.png")[..., :3]
    height, width, _ = image.shape
    assert height >= 400 and width >= 800
    for half in (image[:, : width // 2], image[:, width // 2 :]):
        white = (half > 0.99).all(axis=-1).mean()
        assert 0.1 < white < 0.95
        assert half.std() > 0.05


# --- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "1"], "--nnodes 2 needs --master-port"),
        (["--nnodes", "2"], "--nnodes 2 needs --nproc-per-node, --node-rank, --master-port"),
        (["--epochs", "0"], "argument --epochs: must be positive, got 0"),
        (["--batch-size", "2000"], "--batch-size 2000 is more than the 1437 training images"),
        (["--resume", "--output-dir", "missing"], "--resume: there is no missing"),
    ],
)
def test_misuse(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_arguments = runpy.run_path(str(DIGITS))["parse_arguments"]
    monkeypatch.setattr(sys, "argv", ["digits.py", *options])
    with pytest.raises(SystemExit):
        parse_arguments(launched=False)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "message"),
    [("ncl", "Unknown backend 'ncl'"), ("xla-tpu", "Backend 'xla-tpu' cannot run here")],
)
def test_a_backend_that_cannot_run(backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend in idist.available_backends():
        message = "PJRT_DEVICE is not set"
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    ended = run_python(DIGITS, "--backend", backend, "--nproc-per-node", 1)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout
    assert f"digits.py: error: {message}" in ended.stdout, ended.stdout


def test_misuse_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parse_arguments = runpy.run_path(str(DIGITS))["parse_arguments"]
    monkeypatch.setattr(sys, "argv", ["digits.py", "--nproc-per-node", "2"])
    with pytest.raises(SystemExit):
        parse_arguments(launched=True)
    assert "a launcher has started this process" in capsys.readouterr().err
