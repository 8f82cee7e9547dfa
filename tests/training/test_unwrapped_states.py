"""States of models with wrappers inside: the same names on any number of ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, DataParallel, Linear, Module, ModuleDict, Sequential

import ignite_dist as idist
from on_ranks import on_ranks


def filled(net: Module, fill: float) -> Module:
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(fill + number)
    return net


def linear(fill: float) -> Module:
    return filled(Linear(2, 2), fill)


class Counting(Linear):
    """Has extra state."""

    def __init__(self, count: float) -> None:
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self) -> float:
        return self.count

    def set_extra_state(self, state: float) -> None:
        self.count = state


class Unusual(Module):
    """A container with every kind of child."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.net = idist.auto_model(linear(fill))
        self.again = self.net
        self.nothing = None
        self.register_module("absent", None)
        self.module = linear(fill)  # no wrapper is around these two
        self._orig_mod = Sequential(idist.auto_model(linear(fill)))
        self.counting = idist.auto_model(filled(Counting(fill), fill))
        self.count = fill

    def get_extra_state(self) -> float:
        return self.count

    def set_extra_state(self, state: float) -> None:
        self.count = state


class WithModule(Linear):
    """Has two tensors of the same name, apart from a part that looks like a wrapper's."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.module = Linear(2, 2)


def compiled(net: Module) -> Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def sharded(net: Module) -> Module:
    return idist.auto_model(net, strategy="fsdp", wrap=[Linear])


def nested(fill: float) -> Module:
    inner = Sequential(compiled(linear(fill)), BatchNorm1d(2))
    return Sequential(compiled(idist.auto_model(inner)), idist.auto_model(linear(fill)))


MODELS: dict[str, Callable[[float], Module]] = {
    "plain": linear,
    "wrapped": lambda fill: idist.auto_model(linear(fill)),
    "dict": lambda fill: ModuleDict({"a": idist.auto_model(linear(fill)), "b": linear(fill)}),
    "sequential": lambda fill: Sequential(idist.auto_model(linear(fill)), linear(fill)),
    "unusual": Unusual,
    "with module": lambda fill: Sequential(idist.auto_model(filled(WithModule(), fill))),
    "compiled child": lambda fill: Sequential(compiled(linear(fill)), BatchNorm1d(2)),
    "compiled": lambda fill: compiled(idist.auto_model(Sequential(compiled(linear(fill))))),
    "nested": nested,
    "fsdp": lambda fill: sharded(Sequential(linear(fill), compiled(Sequential(linear(fill))))),
}
NAMES = {
    "plain": ["weight", "bias"],
    "wrapped": ["weight", "bias"],
    "dict": ["a.weight", "a.bias", "b.weight", "b.bias"],
    "sequential": ["0.weight", "0.bias", "1.weight", "1.bias"],
    "unusual": [
        *("_extra_state", "net.weight", "net.bias", "again.weight", "again.bias"),
        *("module.weight", "module.bias", "_orig_mod.0.weight", "_orig_mod.0.bias"),
        *("counting.weight", "counting.bias", "counting._extra_state"),
    ],
    "with module": ["0.weight", "0.bias", "0.module.weight", "0.module.bias"],
    "compiled child": ["0.weight", "0.bias", *(f"1.{name}" for name in BatchNorm1d(2).state_dict())],
    "compiled": ["0.weight", "0.bias"],
    "nested": [
        *("0.0.weight", "0.0.bias", *(f"0.1.{name}" for name in BatchNorm1d(2).state_dict())),
        *("1.weight", "1.bias"),
    ],
    "fsdp": ["0.weight", "0.bias", "1.0.weight", "1.0.bias"],
}


def numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}


def loads(kind: str, path: Path) -> None:
    """Load the checkpoint and every state of the same model into other models."""
    model, other = MODELS[kind](3.0), MODELS[kind](0.0)
    expected = numbers(idist.model_state(model))
    assert list(expected) == (NAMES[kind] if idist.get_rank() == 0 else [])
    idist.load_checkpoint(path, model=other)
    assert numbers(idist.model_state(other)) == expected
    given = [idist.model_state(model)]
    if kind != "fsdp":  # the state of the model itself has shards
        given += [model.state_dict(), idist.unwrap_model(model).state_dict()]
    for state in given:
        other = MODELS[kind](0.0)
        idist.load_model_state(other, state)
        assert numbers(idist.model_state(other)) == expected


def _saved(_: int, folder: Path) -> None:
    for kind, make in MODELS.items():
        idist.save_checkpoint(folder / f"{kind}.pt", model=make(3.0))
        loads(kind, folder / f"{kind}.pt")


def _loaded(_: int, folder: Path) -> None:
    for kind in MODELS:
        loads(kind, folder / f"{kind}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(_saved, folder)
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_of_two_ranks_loads_in_one_process(saved: Path, kind: str) -> None:
    loads(kind, saved / f"{kind}.pt")


def test_a_checkpoint_of_one_process_loads_on_two_ranks(tmp_path: Path) -> None:
    for kind, make in MODELS.items():
        idist.save_checkpoint(tmp_path / f"{kind}.pt", model=make(3.0))
    on_ranks(_loaded, tmp_path)


# --- states of other programs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("module.{}", linear(0.0)),
        ("_orig_mod.module.{}", linear(0.0)),
        ("module.0.module.{}", Sequential(linear(0.0))),
        ("module.0.module.{}", Sequential(DataParallel(linear(0.0)))),
        ("0._orig_mod.{}", Sequential(linear(0.0))),
        ("0._orig_mod.{}", Sequential(DataParallel(linear(0.0)))),
        ("0.module._orig_mod.{}", Sequential(compiled(linear(0.0)))),
        ("module.module.{}", ModuleDict({"module": linear(0.0)})),
        ("module.{}", DataParallel(ModuleDict({"module": linear(0.0)}))),
    ],
)
def test_other_wrappers(given: str, model: Module) -> None:
    """Where the model has none, or others."""
    state = {given.format(name): value for name, value in linear(5.0).state_dict().items()}
    idist.load_model_state(model, state)
    assert [parameter.unique().tolist() for parameter in model.parameters()] == [[5], [6]]


PAIRS: dict[str, Callable[[Module, Module], Module]] = {
    "wrapped": lambda one, other: Sequential(DataParallel(one), DataParallel(other)),
    "second compiled": lambda one, other: Sequential(one, compiled(other)),
    "around": lambda one, other: DataParallel(Sequential(DataParallel(one), other)),
    "all compiled": lambda one, other: compiled(Sequential(DataParallel(one), other)),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [*((kind, kind) for kind in PAIRS), ("around", "wrapped"), ("second compiled", "wrapped")],
)
def test_names_of_the_model_that_look_like_those_of_wrappers(source: str, target: str) -> None:
    def made(kind: str, fill: float) -> Module:
        return PAIRS[kind](filled(WithModule(), fill), linear(fill))

    state, model = made(source, 5.0).state_dict(), made(target, 0.0)
    idist.load_model_state(model, state)
    assert list(numbers(model.state_dict()).values()) == list(numbers(state).values())


def test_names_that_mean_the_same_are_refused() -> None:
    state = {
        prefix + name: value
        for prefix in ("0.module.", "0._orig_mod.")
        for name, value in linear(5.0).state_dict().items()
    }
    with pytest.raises(RuntimeError, match=r"missing 0\.weight; .*unexpected 0\._orig_mod\.weight"):
        idist.load_model_state(Sequential(linear(0.0)), state)


def _shards_of_other_wrappers(_: int, path: Path) -> None:
    idist.save_checkpoint(path, model=sharded(Sequential(ModuleDict({"_orig_mod": linear(5.0)}))))
    model = sharded(Sequential(compiled(linear(0.0))))
    idist.load_checkpoint(path, model=model)
    expected = {"0.weight": [[5, 5], [5, 5]], "0.bias": [6, 6]}
    assert numbers(idist.model_state(model)) == (expected if idist.get_rank() == 0 else {})


def test_a_folder_of_shards_with_the_names_of_other_wrappers(tmp_path: Path) -> None:
    on_ranks(_shards_of_other_wrappers, tmp_path / "run.pt")
    alone = Sequential(linear(0.0))
    idist.load_checkpoint(tmp_path / "run.pt", model=alone)
    assert numbers(alone.state_dict()) == {"0.weight": [[5, 5], [5, 5]], "0.bias": [6, 6]}


class Versioned(Linear):
    _version = 3

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen.append(dict(local_metadata))
        local_metadata["version"] = None
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("source", [DataParallel, compiled, lambda net: net])
@pytest.mark.parametrize("around", [DataParallel, lambda net: net])
def test_the_state_is_not_changed_and_has_the_versions(source: Any, around: Any) -> None:
    state: Any = around(Sequential(source(Versioned()))).state_dict()
    before = OrderedDict(state), copy.deepcopy(state._metadata)
    model = Sequential(DataParallel(Versioned()))
    idist.load_model_state(model, state)
    assert model[0].module.seen == [{"version": 3}]
    assert list(state) == list(before[0]) and state._metadata == before[1]
    assert all(value is before[0][name] for name, value in state.items())
    saved: Any = idist.model_state(model)
    assert {path: one["version"] for path, one in saved._metadata.items()} == {"": 1, "0": 3}


# --- the user's own code ---------------------------------------------------------------------------------


class Hooked(Linear):
    """Counts the calls of its hooks, and does not save its bias."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[str] = []
        self.register_state_dict_post_hook(self.without_bias)
        self.register_load_state_dict_pre_hook(self.with_bias)

    @staticmethod
    def without_bias(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        module.calls.append("save")
        del state[f"{prefix}bias"]

    @staticmethod
    def with_bias(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.calls.append("load")
        if state[f"{prefix}weight"].sum() != 0:
            state[f"{prefix}bias"] = torch.ones(2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("state_dict")
        return super().state_dict(*args, **kwargs)


class Recording(Sequential):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.names = list(state_dict)
        return super().load_state_dict(state_dict)


def test_hooks_and_overridden_methods_are_called() -> None:
    hooked = Hooked()
    model = Recording(DataParallel(hooked))
    state = idist.model_state(model)
    assert list(state) == ["0.weight"] and hooked.calls == ["state_dict", "save"]
    idist.load_model_state(model, state)
    assert hooked.calls[-1] == "load" and hooked.calls.count("load") == 1
    assert hooked.bias.tolist() == [1, 1] and model.names == ["0.module.weight"]


def test_faults_have_the_names_without_wrappers() -> None:
    model = Sequential(compiled(DataParallel(Hooked())), DataParallel(linear(1.0)))
    state = idist.model_state(model)
    short = {name: value for name, value in model.state_dict().items() if "bias" not in name}
    with pytest.raises(RuntimeError, match=r"a Sequential: missing 1\.bias\.$"):
        idist.load_model_state(model, short)
    state["0.weight"] = torch.zeros(2, 2)  # so the hook adds no bias
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.bias"'):
        idist.load_model_state(model, state)
