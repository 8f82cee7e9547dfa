"""Checkpoints of several models, optimizers, schedulers and loaders, and of other objects with a state."""

from __future__ import annotations

from collections import OrderedDict
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


@pytest.mark.parametrize("kind", ["dict", pytest.param("list", marks=pytest.mark.long)])
def test_everything_by_name_or_by_number_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    wanted, _ = on_ranks(saved, path, kind)
    assert wanted[4] == [1, 2] and wanted[5] == 8.0
    assert on_ranks(loaded, path, kind) == [wanted] * 2
    assert loaded(0, path, kind) == wanted


def test_the_order_of_a_dict_does_not_matter(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    wanted, of = saved(0, path, "dict"), parts(5)
    turned = {kind: OrderedDict(reversed(part.items())) for kind, part in of.items()}
    more = others(of, 5)
    idist.load_checkpoint(path, **turned, **more)
    assert facts(of, more) == wanted


def _turned_on_rank_1(rank: int, path: str) -> list[list[float]]:
    torch.manual_seed(1)
    models = [Linear(2, 2) for _ in range(2)]
    optimizers = [SGD(one.parameters(), lr=0.1 * (number + 1)) for number, one in enumerate(models)]
    names = "ab" if rank == 0 else "ba"
    kinds = {"model": models, "optimizer": optimizers}
    named = {
        kind: dict(zip(names, part if rank == 0 else part[::-1], strict=True)) for kind, part in kinds.items()
    }
    idist.save_checkpoint(path, **named)
    wanted = [one.weight.tolist() for one in models]
    for one in models:
        torch.nn.init.zeros_(one.weight)
    idist.load_checkpoint(path, **named)
    assert [one.weight.tolist() for one in models] == wanted
    return [group["lr"] for one in optimizers for group in one.param_groups]


def test_ranks_may_give_a_dict_in_different_orders(tmp_path: Path) -> None:
    assert on_ranks(_turned_on_rank_1, str(tmp_path / "run.pt")) == [[0.1, 0.2]] * 2


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler", "loader"])
def test_an_empty_dict_or_list_is_loaded_as_one(kind: str, tmp_path: Path) -> None:
    for empty in ({}, []):
        idist.save_checkpoint(tmp_path / "run.pt", **{kind: empty}, epoch=1)
        assert idist.load_checkpoint(tmp_path / "run.pt", **{kind: empty}) == {"epoch": 1}


def test_a_model_may_have_the_name_of_a_method(tmp_path: Path) -> None:
    path, names = tmp_path / "run.pt", ("train", "eval", "keys", "type", "forward", "pop", "module", "gen")
    models, others = ({name: Linear(1, 1) for name in names} for _ in range(2))
    idist.save_checkpoint(path, model=models)
    state = torch.load(path, weights_only=True)["model"]
    assert state.keys() == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    idist.load_checkpoint(path, model=others)
    for name in names:
        assert others[name].weight.equal(models[name].weight)


def _wrong_parts(rank: int, path: str) -> None:
    net = Linear(1, 1)
    one = SGD(net.parameters(), lr=0.1)
    idist.save_checkpoint(path, epoch=1)
    before = Path(path).read_bytes()
    needed = "must be a torch optimizer, or a wrapper with its methods, or a dict or list of several; got"
    for wrong, kind, message in (
        ({"optimizer": {1: one, "1": one}}, TypeError, r"optimizer=\{...\} must be str, got 1"),
        ({"optimizer": {"a": {"b": one}}}, TypeError, f"optimizer {needed} a dict as 'a'"),
        ({"optimizer": [[one]]}, TypeError, f"optimizer {needed} a list as '0'"),
        ({"optimizer": [one, None]}, TypeError, f"optimizer {needed} a NoneType as '1'"),
        ({"scheduler": 3}, TypeError, r"with state_dict\(\) and load_state_dict\(\), or .* got a int"),
        ({"scheduler": StepLR}, TypeError, "got the class StepLR"),
        ({"loader": [[1, 2]]}, TypeError, "must be the result of auto_dataloader.* got a list"),
        ({"model": [net, one]}, TypeError, "instance of torch.nn.Module.* got a SGD as '1'"),
        ({"model": {"a.b": net}}, ValueError, "has the name 'a.b'.* must have no dot"),
        ({"model": {"_modules": net}}, ValueError, "has the name '_modules'"),
        ({"optimizer": {"": one}}, ValueError, "must not be empty"),
    ):
        for function in (idist.save_checkpoint, idist.load_checkpoint):
            with pytest.raises(kind, match=message):
                function(path, **(wrong if rank == 1 else {}))  # type: ignore[operator]
    assert Path(path).read_bytes() == before


def test_wrong_parts_on_one_rank_are_refused_on_every_rank(tmp_path: Path) -> None:
    on_ranks(_wrong_parts, str(tmp_path / "run.pt"))


def _other_parts_on_rank_1(rank: int, path: str) -> None:
    optimizers = {name: SGD(Linear(1, 1).parameters(), lr=0.1) for name in "ab"}
    idist.save_checkpoint(path, optimizer=optimizers)
    if rank == 1:
        del optimizers["a"]
    with pytest.raises(ValueError, match="rank 0: optimizers a, b; rank 1: optimizers b"):
        idist.load_checkpoint(path, optimizer=optimizers)


def test_ranks_that_load_different_objects_are_told_so(tmp_path: Path) -> None:
    on_ranks(_other_parts_on_rank_1, str(tmp_path / "run.pt"))


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
        ({"scheduler": {}}, "is loaded with no scheduler"),
        ({"ema": torch.amp.GradScaler("cpu")}, "has no ema"),
    ):
        with pytest.raises(ValueError, match=message):
            idist.load_checkpoint(path, **wrong)
    with pytest.raises(RuntimeError, match=r"unexpected gen\.weight"):
        idist.load_checkpoint(path, model={"other": of["model"]["gen"]})
    assert facts(of, others(of, 5)) == before


# --- values --------------------------------------------------------------------------------------------


def test_values_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    scaler, of = torch.amp.GradScaler("cpu"), parts(3)
    kept = {
        "averaged": AveragedModel(Linear(2, 2)),
        "scaler": scaler,
        "adam": Adam(Linear(1, 1).parameters()),
    }
    idist.save_checkpoint(path, **of, **kept, epoch=7, none=None)
    of = parts(5)
    before = facts(of, others(of, 5))
    for wrong, kind, message in (
        ({"averaged": AveragedModel(Linear(3, 3))}, RuntimeError, r"weight of shape \(2, 2\) for \(3, 3\)"),
        (
            {"epoch": 0},
            TypeError,
            r"a int as epoch.* leave out epoch=, and use load_checkpoint\(...\)\['epoch'\]",
        ),
        ({"scaler": torch.amp.GradScaler}, TypeError, "got the class GradScaler as scaler"),
        ({"epoch": scaler}, ValueError, "has a int as epoch, which is not the state of a GradScaler"),
        ({"none": scaler}, ValueError, "has a NoneType as none"),
        ({"scaler": SGD(Linear(1, 1).parameters(), lr=0.1)}, ValueError, "state must be the result"),
        ({"adam": SGD(Linear(1, 1).parameters(), lr=0.1)}, ValueError, "does not fit a SGD: it lacks"),
        ({"adam": scaler}, ValueError, "does not fit a GradScaler: it lacks"),
    ):
        with pytest.raises(kind, match=message):
            idist.load_checkpoint(path, **of, **wrong)
    assert facts(of, others(of, 5)) == before


class _FailsOnRank1:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: Any) -> None:
        if idist.get_rank() == 1:
            raise ValueError("not here")


def _fails_on_rank_1(_: int, path: str) -> None:
    for kind in ("scheduler", "thing"):
        idist.save_checkpoint(path, **{kind: _FailsOnRank1()})
        with pytest.raises(ValueError, match="not here"):
            idist.load_checkpoint(path, **{kind: _FailsOnRank1()})


def test_an_object_that_one_rank_cannot_fill_raises_on_every_rank(tmp_path: Path) -> None:
    on_ranks(_fails_on_rank_1, str(tmp_path / "run.pt"))


class _GathersItsState(torch.amp.GradScaler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": sum(idist.all_gather(self.get_scale()))}


def _gathers_its_state(rank: int, path: str) -> float:
    idist.save_checkpoint(path, scaler=_GathersItsState("cpu", init_scale=2.0 + rank))
    scaler = _GathersItsState("cpu")
    idist.load_checkpoint(path, scaler=scaler)
    return scaler.get_scale()


def test_a_state_that_all_ranks_gather(tmp_path: Path) -> None:
    assert on_ranks(_gathers_its_state, str(tmp_path / "run.pt")) == [5.0, 5.0]


# --- files of other versions ---------------------------------------------------------------------------


def test_a_file_without_names_is_one_of_an_older_package(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    of = {kind: part["gen"] for kind, part in parts(3).items()}
    of["optimizer"].step()
    of["scheduler"].step()
    next(iter(of["loader"]))
    idist.save_checkpoint(path, **of, epoch=7)
    content = torch.load(path, weights_only=True)
    assert content["version"] == 1  # which an older package reads
    del content["names"]
    torch.save(content, path)
    other = {kind: part["gen"] for kind, part in parts(5).items()}
    assert idist.load_checkpoint(path, **other) == {"epoch": 7}
    assert idist.unwrap_model(other["model"]).weight.equal(idist.unwrap_model(of["model"]).weight)
    assert (other["scheduler"].last_epoch, other["loader"].position()["batches"]) == (1, 1)
    with pytest.raises(ValueError, match="saved with one optimizer, and is loaded with optimizers a"):
        idist.load_checkpoint(path, optimizer={"a": other["optimizer"]})


@pytest.mark.parametrize("kind", ["optimizer", "scheduler", "loader"])
def test_a_file_that_an_older_package_cannot_read_has_a_newer_version(kind: str, tmp_path: Path) -> None:
    idist.save_checkpoint(tmp_path / "run.pt", **{kind: parts(3)[kind]})
    assert torch.load(tmp_path / "run.pt", weights_only=True)["version"] == 2


# --- sharded tensors -----------------------------------------------------------------------------------


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


def _follows_the_advice(_: int, path: str) -> None:
    model, averaged = (idist.auto_model(Linear(4, 4), strategy="fsdp") for _ in range(2))
    with pytest.raises(TypeError, match=r"averaged is .* with sharded tensors. Pass it among several models"):
        idist.save_checkpoint(path, model=model, averaged=averaged)
    wanted = idist.model_state(averaged)
    models = {"model": model, "averaged": averaged}
    idist.save_checkpoint(path, model=models, state=idist.model_state(averaged))
    with pytest.raises(TypeError, match=r"state is .* with sharded tensors"):
        idist.load_checkpoint(path, state=averaged)
    for load in (
        lambda: idist.load_checkpoint(path, model=models),
        lambda: idist.load_model_state(averaged, idist.load_checkpoint(path)["state"]),
    ):
        torch.nn.init.zeros_(averaged.weight)
        load()
        found = idist.model_state(averaged)
        assert all(found[name].equal(value) for name, value in wanted.items())


@pytest.mark.long
def test_a_sharded_value_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    on_ranks(_follows_the_advice, str(tmp_path / "run.pt"))
