"""Checkpoints in folders with other files: renamed, linked, damaged; and what a failed save leaves."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

import ignite_dist as idist
from on_ranks import on_ranks


def _renamed(rank: int, folder: Path) -> None:
    model = idist.auto_model(Linear(4, 4), strategy="fsdp")
    idist.save_checkpoint(folder / "last.pt", model=model)
    saved = idist.model_state(model)
    if rank == 0:
        shutil.copy(folder / "last.pt", folder / "best.pt")
        shutil.copytree(folder / "last.pt.shards-1", folder / "best.pt.shards-1")
        (folder / "link.pt").symlink_to("best.pt")
    idist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    idist.save_checkpoint(folder / "last.pt", model=model)
    for name in ("best.pt", "link.pt"):
        other = idist.auto_model(Linear(4, 4), strategy="fsdp")
        idist.load_checkpoint(folder / name, model=other)
        torch.testing.assert_close(idist.model_state(other), saved, rtol=0, atol=0)


def test_a_sharded_checkpoint_is_renamed_with_its_folder(tmp_path: Path) -> None:
    on_ranks(_renamed, tmp_path)


def test_links_do_not_count(tmp_path: Path) -> None:
    for number in range(4):
        idist.save_checkpoint(tmp_path / f"{number}.pt", keep=2)
        (tmp_path / "latest.pt").unlink(missing_ok=True)
        (tmp_path / "latest.pt").symlink_to(f"{number}.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.pt", "3.pt", "latest.pt"]
    assert idist.latest_checkpoint(tmp_path) == tmp_path / "3.pt"


# --- what is saved ---------------------------------------------------------------------------------------


class Refusing(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 2)

    def get_extra_state(self) -> Any:
        if idist.get_rank() == 1:
            raise ValueError("no state")
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def _refusing(_: int, folder: Path, zero: bool) -> None:
    model = Refusing()
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1), zero=zero)
    with pytest.raises(ValueError, match="no state"):
        idist.save_checkpoint(folder / "run.pt", model=model, optimizer=optimizer)
    assert idist.all_reduce(1) == 2


@pytest.mark.parametrize("zero", [False, True])
def test_a_model_whose_state_raises_on_one_rank_is_refused_on_every_rank(tmp_path: Path, zero: bool) -> None:
    on_ranks(_refusing, tmp_path, zero)
    assert list(tmp_path.iterdir()) == []


def _dtypes(_: int, folder: Path) -> None:
    values = {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES}
    idist.save_checkpoint(folder / "run.pt", tensors=values)
    found = idist.load_checkpoint(folder / "run.pt")["tensors"]
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert found[name].float().tolist() == [1.0] * 3


DTYPES = (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)


def test_values_keep_their_dtypes_on_every_rank(tmp_path: Path) -> None:
    on_ranks(_dtypes, tmp_path)


def _scheduler(_: int, folder: Path) -> None:
    def make() -> dict[str, Any]:
        optimizer = SGD(Linear(1, 1).parameters(), lr=1.0)
        return {"optimizer": optimizer, "scheduler": MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)}

    def step(parts: dict[str, Any]) -> float:
        parts["optimizer"].step()
        parts["scheduler"].step()
        return parts["optimizer"].param_groups[0]["lr"]  # type: ignore[no-any-return]

    first, other = make(), make()
    step(first)
    idist.save_checkpoint(folder / "run.pt", **first)
    idist.load_checkpoint(folder / "run.pt", **other)
    assert [step(first), step(first)] == [step(other), step(other)] == [0.5, 0.125]


def test_a_scheduler_with_milestones_goes_on(tmp_path: Path) -> None:
    on_ranks(_scheduler, tmp_path)


# --- what is in the folder -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"version": None},
        {"version": "1"},
        {"number": "7"},
        {"number": None},
        {"shards": 3},
        {"values": [1]},
        {"model": 1},
    ],
)
def test_a_damaged_header_is_refused_and_does_not_block_the_folder(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    idist.save_checkpoint(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save({**content, **changes}, tmp_path / "changed.pt")
    for name in changes:
        del content[name]
    torch.save(content, tmp_path / "lacking.pt")
    for name in ("changed.pt", "lacking.pt"):
        with pytest.raises(ValueError, match=r"is not a checkpoint of idist\.save_checkpoint: its '"):
            idist.load_checkpoint(tmp_path / name)
    idist.save_checkpoint(tmp_path / "b.pt", keep=1)
    assert idist.latest_checkpoint(tmp_path) == tmp_path / "b.pt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt", "changed.pt", "lacking.pt"]


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    os.mkfifo("run.pt.tmp")  # the write waits until someone reads
    work = idist.save_checkpoint("run.pt", asynchronous=True)
    os.chdir("elsewhere")
    (tmp_path / "run.pt.tmp").read_bytes()
    with pytest.raises(OSError, match="Invalid argument"):  # a pipe is no file
        work.wait()
    assert not (tmp_path / "run.pt.tmp").exists()
    work = idist.save_checkpoint("run.pt", asynchronous=True)
    assert work.wait() == Path("run.pt")
    assert [path.name for path in Path().iterdir()] == ["run.pt"]


def test_a_completed_write_holds_no_states(tmp_path: Path) -> None:
    model = Linear(2, 2)
    (tmp_path / "bad.pt.tmp").mkdir()  # in the way
    works = [idist.save_checkpoint(tmp_path / "run.pt", model=model, asynchronous=True)]
    works[0].wait()
    works.append(idist.save_checkpoint(tmp_path / "bad.pt", model=model, asynchronous=True))
    with pytest.raises(OSError, match=r"bad\.pt"):
        works[1].wait()
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (2, 2)]
    # Other tests may have left tensors of this shape in the process; none has these random values.
    assert not any(torch.equal(one, model.weight) for one in tensors)


def _no_file(rank: int, folder: Path) -> None:
    model = idist.auto_model(Linear(4, 4), strategy="fsdp")
    if rank == 0:
        (folder / "run.pt.tmp").mkdir()  # in the way
    for asynchronous in (False, True):
        with pytest.raises(OSError, match=r"run\.pt\.tmp"):
            idist.save_checkpoint(folder / "run.pt", model=model, asynchronous=asynchronous).wait()
    idist.barrier()
    assert [path.name for path in folder.iterdir()] == ["run.pt.tmp"]


def test_a_failed_write_leaves_no_folder_of_shards(tmp_path: Path) -> None:
    on_ranks(_no_file, tmp_path)
