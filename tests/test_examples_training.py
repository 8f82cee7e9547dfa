"""The examples of accumulation and of a contrastive loss: what they print, however they are started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from commands import at_a_shell, documented, with_examples, with_markers
from helpers import ROOT, plain_environ, run_python

pytestmark = pytest.mark.long

ROWS = {
    ("SINGLE_AUTO_SYNC", False),
    ("SINGLE_AUTO_SYNC", True),
    ("MULTI_AUTO_SYNC", True),
    ("FORCED_SYNC", False),
}
ROUNDING = 1e-5

TWO = ("--nproc-per-node", 2)


def run(command: str, folder: Path) -> str:
    """What the command of a document prints, on the CPU; nothing else, and no other rank, may print."""
    ended = at_a_shell(command, with_examples(folder))
    assert ended.returncode == 0, ended.errors
    return ended.output


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


ACCUMULATE = with_markers(
    documented("python examples/accumulate.py"),
    documented("python examples/accumulate.py --nproc-per-node 2"),
    documented("torchrun --nproc-per-node 2 examples/accumulate.py"),
    documented("python examples/accumulate.py --backend horovod --nproc-per-node 2"),
    documented(
        "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/accumulate.py --backend xla-tpu --nproc-per-node 2"
    ),
)


@pytest.mark.parametrize("command", ACCUMULATE)
def test_each_strategy_accumulates_the_same(command: str, tmp_path: Path) -> None:
    assert_all_right(run(command, tmp_path))


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
def serial(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    return learned(run(documented("python examples/contrastive.py"), tmp_path_factory.mktemp("serial")))


def assert_same(one: Learned, other: Learned) -> None:
    assert one.losses[:3] == pytest.approx(other.losses[:3], abs=1e-3)
    assert abs(one.untrained - other.untrained) <= 0.6  # two of the 360 images
    assert abs(one.trained - other.trained) <= 1.5


def test_one_process_learns_without_labels(serial: Learned) -> None:
    assert serial.losses[-1] < serial.losses[0] - 0.5
    assert serial.trained >= 88.0
    assert serial.trained >= serial.untrained + 5.0


CONTRASTIVE = with_markers(
    documented("python examples/contrastive.py --nproc-per-node 2"),
    documented("torchrun --nproc-per-node 2 examples/contrastive.py"),
    documented("python examples/contrastive.py --backend horovod --nproc-per-node 2"),
    documented(
        "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/contrastive.py --backend xla-tpu "
        "--nproc-per-node 2"
    ),
)


@pytest.mark.parametrize("command", CONTRASTIVE)
def test_started_otherwise_it_learns_the_same(command: str, serial: Learned, tmp_path: Path) -> None:
    """Two ranks have more negatives than images of their own: else the losses would not be those of one."""
    assert_same(learned(run(command, tmp_path)), serial)


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


# --- mesh.py -------------------------------------------------------------------------------------------

MESH = [
    documented("python examples/mesh.py"),
    documented("python examples/mesh.py --nproc-per-node 4 --tp 2"),
    documented("python examples/mesh.py --nproc-per-node 4 --tp 2 --strategy fsdp"),
    documented("torchrun --nproc-per-node 4 examples/mesh.py --tp 2"),
]


@pytest.mark.parametrize("command", MESH)
def test_every_mesh_has_the_losses_that_are_shown(command: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "mesh.py").read_text(encoding="utf-8")
    shown, found = (
        [float(loss) for loss in re.findall(r"^ *epoch +\d+   loss (\d\.\d{4})$", one, re.MULTILINE)]
        for one in (text, run(command, tmp_path))
    )
    assert len(found) == 10 and found[-1] < found[0] / 5
    assert found == pytest.approx(shown, abs=2e-3)


# --- any_number.py -------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_more_ranks_as_one_process_does(tmp_path: Path) -> None:
    folder = with_examples(tmp_path)
    alone, killed, resumed, compared = (
        at_a_shell(command, folder)
        for command in (
            documented("python examples/any_number.py --folder alone"),
            documented("python examples/any_number.py --nproc-per-node 2 --killed-at 25"),
            documented("python examples/any_number.py --nproc-per-node 3"),
            documented("python examples/any_number.py --compare alone"),
        )
    )
    assert alone.returncode == 0, alone.errors
    assert killed.returncode != 0 and "was ended by SIGKILL" in killed.errors
    assert "3 ranks go on at step 25\n51 steps" in resumed.output, resumed.errors
    assert float(compared.output.split()[-1]) < 1e-12
    assert (folder / "any_number.svg").exists()
