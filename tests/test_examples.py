"""The example, in every way to start it that the documents show, and resumed, evaluated, misused."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.image import imread

import ignite_dist as idist
from commands import BIN, at_a_shell, documented, forks_on_path, open_mpi, with_examples, with_markers
from helpers import ROOT, free_port, run_python, without_gloos
from machines import machines, needs_namespaces

pytestmark = pytest.mark.long

DIGITS = ROOT / "examples" / "digits.py"
EPOCHS = 5  # the script's default
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
        content = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        return {**content, **content["values"]}

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor([metrics["loss"] for metrics in self.checkpoint["history"]], dtype=torch.float64)

    def shows_epochs(self, first: int, last: int, of: int) -> bool:
        """Whether one process, and no other, showed a progress bar for each of these epochs."""
        started = re.findall(r"epoch +(\d+)/(\d+): +0%", self.progress)
        return started == [(str(epoch), str(of)) for epoch in range(first, last + 1)]


def train(folder: Path, *options: Any) -> Run:
    """The example with other options than a document shows."""
    command = ["python", DIGITS, "--output-dir", folder, *options]
    return _run(shlex.join(map(str, command)), folder, folder)


def as_shown(command: str, folder: Path, **environ: str) -> Run:
    """The command of a document, run where only its ``examples/`` is."""
    programs = BIN if "run " in command else None  # under torchrun and horovodrun, new Pythons
    return _run(command, with_examples(folder), folder / "runs" / "digits", programs, **environ)


def _run(command: str, folder: Path, results: Path, programs: Path | None = None, **environ: str) -> Run:
    ended = at_a_shell(command, folder, programs=programs, **environ)
    assert ended.returncode == 0, ended.errors
    return Run(ended.output, ended.errors, results)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, all epochs: what every other run is held against."""
    return as_shown(documented("python examples/digits.py"), tmp_path_factory.mktemp("serial"))


# --- the ways to start it that the documents show ------------------------------------------------------


def assert_learns(run: Run) -> None:
    assert run.accuracy >= 97.0
    assert run.shows_epochs(1, EPOCHS, of=EPOCHS)
    assert run.checkpoint["epoch"] == len(run.losses) == EPOCHS


def assert_same(run: Run, serial: Run) -> None:
    assert_learns(run)
    assert abs(run.accuracy - serial.accuracy) <= 1.0
    torch.testing.assert_close(run.losses, serial.losses, rtol=0, atol=1e-4)


def test_serial_run_learns(serial: Run) -> None:
    assert_learns(serial)


COMMANDS = with_markers(
    documented("python examples/digits.py --nproc-per-node 2"),
    documented("torchrun --nproc-per-node 2 examples/digits.py"),
    documented("python examples/digits.py --backend horovod --nproc-per-node 2"),
    documented("PJRT_DEVICE=CPU python examples/digits.py --backend xla-tpu"),
    documented(
        "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/digits.py --backend xla-tpu --nproc-per-node 2"
    ),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_started_otherwise_it_learns_the_same(command: str, serial: Run, tmp_path: Path) -> None:
    assert_same(as_shown(command, tmp_path), serial)


@pytest.mark.horovod
def test_horovodrun(serial: Run, tmp_path: Path) -> None:
    run = as_shown(documented("horovodrun -np 2 python examples/digits.py --backend horovod"), tmp_path)
    (accuracy,) = re.findall(r"^\[0\]<stdout>:test accuracy: (\d+\.\d)%$", run.output, re.MULTILINE)
    assert abs(float(accuracy) - serial.accuracy) <= 1.0
    torch.testing.assert_close(run.losses, serial.losses, rtol=0, atol=1e-4)


@pytest.mark.mpi4py
def test_mpirun(serial: Run, tmp_path: Path) -> None:
    command = documented("mpirun -np 2 python examples/digits.py --backend mpi4py")
    assert_same(as_shown(command, tmp_path, **open_mpi(tmp_path)), serial)


NODES = [
    documented("python examples/digits.py --nproc-per-node 1 --nnodes 2 --node-rank 0 --master-port 29500 &"),
    documented("python examples/digits.py --nproc-per-node 1 --nnodes 2 --node-rank 1 --master-port 29500"),
]


def test_two_nodes_on_one_machine(serial: Run, tmp_path: Path) -> None:
    """Rank 0 alone prints and writes. The port is another one: it has to be free here."""
    lines = "\n".join([NODES[0], "first=$!", NODES[1], "second=$?", "wait $first && exit $second"])
    assert_same(as_shown(lines.replace("29500", str(free_port())), tmp_path), serial)


ON_10_0_0_1 = documented(
    "python examples/digits.py --nproc-per-node 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 "
    "--master-port 29500"
)
ON_THE_OTHER = documented(
    "python examples/digits.py --nproc-per-node 1 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 "
    "--master-port 29500"
)


@pytest.mark.launchers
@needs_namespaces
def test_two_machines(tmp_path: Path) -> None:
    """Three ranks: their batches are not those of one, two or four. Each node warns of that."""
    environ = {"CUDA_VISIBLE_DEVICES": "", **forks_on_path()}
    folders, jobs = [], []
    with machines(2, subnet="10.0.0") as hosts:
        for host, command in zip(hosts, (ON_10_0_0_1, ON_THE_OTHER), strict=True):
            folder = tmp_path / host.name
            folder.mkdir()
            folders.append(with_examples(folder))
            jobs.append(host.start("bash", "-c", f'cd "$0" && {command}', folder, **environ))
        (first, output), (second, other_output) = [job.end(250) for job in jobs]
    assert (first, second) == (0, 0), output + other_output
    text = without_gloos(output)
    assert_learns(Run(text, text, folders[0] / "runs" / "digits"))
    assert "epoch" not in other_output and "accuracy" not in other_output  # rank 0 alone prints and writes
    assert not (folders[1] / "runs").exists()


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
