"""Checkpoints of several models, optimizers, schedulers and loaders, and of other objects with a state."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import ignite_dist as idist
from on_ranks import on_ranks


def parts(seed: int, kind: str = "dict") -> dict[str, Any]:
    torch.manual_seed(seed)
    models = {"gen": idist.auto_model(Linear(2, 3)), "judge": idist.auto_model(Linear(3, 1))}
    optimizers = {
        name: idist.auto_optim(one(models[name].parameters(), lr=0.1 * seed))
        for name, one in (("gen", Adam), ("judge", SGD))
    }
    schedulers = {name: StepLR(one, 1, gamma=0.5) for name, one in optimizers.items()}
    loaders = {
        name: idist.auto_dataloader(list(range(16)), batch_size=size, shuffle=True, seed=seed)
        for name, size in (("gen", 2), ("judge", 4))
    }
    found = {"model": models, "optimizer": optimizers, "scheduler": schedulers, "loader": loaders}
    return found if kind == "dict" else {name: list(part.values()) for name, part in found.items()}


def others(of: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(100 + seed)
    (first, *_) = of["model"].values() if isinstance(of["model"], dict) else of["model"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    return {"scaler": scaler, "averaged": AveragedModel(idist.unwrap_model(first))}


def facts(of: dict[str, Any], more: dict[str, Any]) -> list[Any]:
    named = {kind: list(part.values()) if isinstance(part, dict) else part for kind, part in of.items()}
    return [
        [idist.unwrap_model(one).weight.tolist() for one in named["model"]],
        [one.state_dict()["param_groups"][0]["lr"] for one in named["optimizer"]],
        [len(one.state_dict()["state"]) for one in named["optimizer"]],
        [one.last_epoch for one in named["scheduler"]],
        [one.position()["batches"] for one in named["loader"]],
        more["scaler"].get_scale(),
        more["averaged"].module.weight.tolist(),
    ]


def saved(_: int, path: str, kind: str) -> list[Any]:
    of = parts(3, kind)
    more = others(of, 3)
    named = list(of["model"].values()) if kind == "dict" else of["model"]
    optimizers = list(of["optimizer"].values()) if kind == "dict" else of["optimizer"]
    named[1](named[0](torch.ones(1, 2))).sum().backward()
    for one in optimizers:
        one.step()
    for one in of["scheduler"].values() if kind == "dict" else of["scheduler"]:
        one.step()
    for number, loader in enumerate(of["loader"].values() if kind == "dict" else of["loader"]):
        for _ in islice(loader, number + 1):
            pass
    idist.save_checkpoint(path, **of, **more, epoch=7)
    return facts(of, more)


def loaded(_: int, path: str, kind: str) -> list[Any]:
    of = parts(5, kind)
    more = others(of, 5)
    assert idist.load_checkpoint(path, **of, **more)["epoch"] == 7
    return facts(of, more)


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_everything_by_name_or_by_number_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    wanted, _ = on_ranks(saved, path, kind)
    assert wanted[4] == [1, 2] and wanted[5] == 8.0
    assert on_ranks(loaded, path, kind) == [wanted] * 2
    assert loaded(0, path, kind) == wanted


def test_other_names_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    saved(0, path, "dict")
    of = parts(5)
    before = facts(of, others(of, 5))
    for wrong, message in (
        ({"optimizer": of["optimizer"]["gen"]}, "optimizers gen, judge, and is loaded with one optimizer"),
        ({"optimizer": {"gen": of["optimizer"]["gen"]}}, "is loaded with optimizers gen"),
        ({"scheduler": list(of["scheduler"].values())}, "schedulers 0, 1"),
        ({"loader": of["loader"]["gen"]}, "one loader"),
        ({"ema": torch.amp.GradScaler("cpu")}, "has no ema"),
    ):
        with pytest.raises(ValueError, match=message):
            idist.load_checkpoint(path, **wrong)
    with pytest.raises(RuntimeError, match=r"unexpected gen\.weight"):
        idist.load_checkpoint(path, model={"other": of["model"]["gen"]})
    assert facts(of, others(of, 5)) == before


def _sharded(_: int, path: str, resume: bool) -> list[Any]:
    torch.manual_seed(1 + resume)
    models = [idist.auto_model(Linear(4, 4), strategy="fsdp") for _ in range(2)]
    optimizers = [idist.auto_optim(Adam(one.parameters(), lr=0.1)) for one in models]
    if resume:
        idist.load_checkpoint(path, model=models, optimizer=optimizers)
    else:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        idist.save_checkpoint(path, model=models, optimizer=optimizers)
    states = [idist.optimizer_state(one) for one in optimizers]
    found = [{name: value.tolist() for name, value in idist.model_state(one).items()} for one in models]
    return [found, [state["state"][0]["exp_avg"].tolist() for state in states if state]]


@pytest.mark.long
def test_sharded_parts_too(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    wanted = on_ranks(_sharded, path, False)
    assert wanted[0][1] and on_ranks(_sharded, path, True) == wanted
    assert _sharded(0, path, True) == wanted[0]
