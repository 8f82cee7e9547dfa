from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models import ComputationModel, NativeModel, SerialModel
from ignite_dist.comp_models.registry import Registry
from store_model import StoreModel


def test_the_built_in_models_are_registered_in_order() -> None:
    models = idist.registered_computation_models
    assert isinstance(models, Sequence)
    assert list(models)[:2] == [SerialModel, NativeModel]
    assert models[0] is SerialModel
    assert list(models[:2]) == [SerialModel, NativeModel]
    assert len(models) == len(list(models))
    assert NativeModel in models
    for name in ("append", "__setitem__", "clear"):
        assert not hasattr(models, name)
    assert "serial" in repr(models)


def test_registering_the_same_class_twice_is_fine() -> None:
    before = list(idist.registered_computation_models)
    assert idist.register_computation_model(NativeModel) is NativeModel
    assert list(idist.registered_computation_models) == before


def test_a_name_clash_names_both_classes_and_replaces_nothing() -> None:
    class Other(StoreModel):
        name = "native-dist"

    before = list(idist.registered_computation_models)
    with pytest.raises(ValueError, match="native-dist") as info:
        idist.register_computation_model(Other)
    for text in (f"{NativeModel.__module__}.NativeModel", "Other"):
        assert text in str(info.value)
    assert list(idist.registered_computation_models) == before


@pytest.mark.parametrize("wrong", [None, 3, "store", str, object(), StoreModel.__init__])
def test_only_computation_models_are_registered(wrong: Any) -> None:
    with pytest.raises(TypeError, match="ComputationModel"):
        idist.register_computation_model(wrong)


def test_a_registry_is_a_sequence_of_what_was_registered() -> None:
    registry = Registry()
    assert registry.register(StoreModel) is StoreModel
    assert registry.register(StoreModel) is StoreModel
    assert list(registry).count(StoreModel) == 1


# --- a model of a third party ------------------------------------------------------------------------


def _third_party() -> dict[str, Any]:
    assert idist.register_computation_model(StoreModel) is StoreModel
    assert "store" in idist.available_backends()
    assert idist.model_name() == "serial"
    idist.initialize("store")
    rank = idist.get_rank()
    facts = idist.model_name(), idist.backend(), idist.get_world_size(), idist.device().type
    topology = idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()
    reduced: dict[str, Any] = {}
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int16, torch.uint16, torch.complex64):
        for op in ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"):
            try:
                reduced[f"{op} {dtype}"] = idist.all_reduce(
                    torch.tensor([rank + 2, 5]).to(dtype), op
                ).tolist()
            except TypeError:
                continue
    for op in ("AND", "OR"):
        reduced[op] = idist.all_reduce(torch.tensor([True, rank == 0]), op).tolist()
    found = {
        "facts": facts,
        "topology": topology,
        "reduced": reduced,
        "tree": idist.all_reduce({"loss": rank + 0.5, "n": [rank, torch.tensor([rank, 1])], "ok": 2**80}),
        "gathered": [
            idist.all_gather("x" * 600 * rank),
            idist.all_gather(torch.tensor([[rank, 1.5]])).tolist(),
        ],
        "ragged": [one.tolist() for one in idist.all_gather_ragged(torch.arange(rank + 1))],
        "broadcast": idist.broadcast(torch.full((2,), float(rank)), src=1).tolist(),
        "group": idist.all_reduce(rank + 1, group=[rank]),
        "handle": idist.all_gather(rank, group=idist.new_group([1])),
        "only": idist.one_rank_only(rank=1, broadcast=True)(lambda: {"from": idist.get_rank()})(),
    }
    with idist.one_rank_first(local=True):
        idist.barrier([rank])
    idist.finalize()
    assert idist.model_name() == "serial"
    StoreModel.live = StoreModel(rank, 2)  # as that library's own call would make it
    idist.sync()
    found["picked up"] = idist.model_name()
    idist.finalize()
    found["spawn"] = idist.spawn("store", _spawned, (1,), nproc_per_node=7, colour="blue")
    with pytest.raises(TypeError, match=r"color.*Did you mean 'colour'"):
        idist.spawn("store", _spawned, (1,), color="blue")
    found["tree"]["n"][1] = found["tree"]["n"][1].tolist()
    return found


def _spawned(local_rank: int, one: int) -> tuple[Any, ...]:
    return local_rank, one, idist.model_name()


def test_a_model_that_carries_only_bytes_does_everything() -> None:
    for rank, found in enumerate(helpers.run_ranks(_third_party)):
        reduced = found.pop("reduced")
        assert found == {
            "facts": ("store-dist", "store", 2, "cpu"),
            "topology": (rank, 2, 1, 0),
            "tree": {"loss": 2.0, "n": [1, [1, 2]], "ok": 2**81},
            "gathered": [["", "x" * 600], [[0.0, 1.5], [1.0, 1.5]]],
            "ragged": [[0], [0, 1]],
            "broadcast": [1.0, 1.0],
            "group": rank + 1,
            "handle": [1] if rank == 1 else 0,
            "only": {"from": 1},
            "picked up": "store-dist",
            "spawn": [("blue", 7, (0, 1, "store-dist"))],
        }
        for dtype in ("float16", "float32", "float64", "int16", "uint16", "complex64"):
            assert reduced[f"SUM torch.{dtype}"] == [5, 10]
            assert reduced[f"PRODUCT torch.{dtype}"] == [6, 25]
            if dtype != "complex64":
                assert reduced[f"MIN torch.{dtype}"] == [2, 5]
                assert reduced[f"MAX torch.{dtype}"] == [3, 5]
            if "int" not in dtype:
                assert reduced[f"AVERAGE torch.{dtype}"] == [2.5, 5]
        assert (reduced["AND"], reduced["OR"]) == ([True, False], [True, True])


# --- entry points ------------------------------------------------------------------------------------


def _run_with_entry_point(folder: Path, value: str, source: str) -> tuple[int, str]:
    info = folder / "some_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-backend\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[ignite_dist.computation_models]\nanything = {value}\n", encoding="utf-8"
    )
    environ = helpers.plain_environ()
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(helpers.TESTS), environ["PYTHONPATH"]])
    ended = helpers.run_python("-c", source, env=environ)
    return ended.returncode, ended.stdout


def test_a_model_that_another_package_declares_as_an_entry_point(tmp_path: Path) -> None:
    source = (
        "import json, sys, ignite_dist as idist; before = 'store_model' in sys.modules;"
        "names = [model.name for model in idist.registered_computation_models];"
        "print(json.dumps([before, idist.available_backends(), names, idist.model_name()]))"
    )
    code, output = _run_with_entry_point(tmp_path, "store_model:StoreModel", source)
    assert code == 0, output
    before, backends, names, name = json.loads(output)
    assert before is False  # importing the package loads nobody else's code
    assert backends[-1] == "store"
    assert names == ["serial", "native-dist", "horovod-dist", "xla-dist", "store-dist"]
    assert name == "serial"


# The last one fails to import, with an error that a text alone does not make.
@pytest.mark.parametrize("value", ["json:dumps", "no_such_module:Model", "not_utf_8:Model"])
def test_an_entry_point_that_is_no_model_is_named(value: str, tmp_path: Path) -> None:
    (tmp_path / "not_utf_8.py").write_text("b'\\xff'.decode()")
    source = "import ignite_dist as idist; idist.get_rank()"
    code, output = _run_with_entry_point(tmp_path, value, source)
    assert code != 0
    assert f"Entry point anything = {value}: " in output.splitlines()[-1]
    assert "AttributeError" not in output.splitlines()[-1]


def test_an_entry_point_that_is_no_model_is_named_at_every_call(tmp_path: Path) -> None:
    """Who catches the first error would else run without the backend, and without a word."""
    source = (
        "import contextlib, ignite_dist as idist\n"
        "with contextlib.suppress(ImportError):\n    idist.get_rank()\n"
        "idist.get_rank()"
    )
    code, output = _run_with_entry_point(tmp_path, "no_such_module:Model", source)
    assert code != 0
    assert "Entry point anything = no_such_module:Model: " in output.splitlines()[-1]


def test_an_entry_point_may_ask_for_the_context_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import ignite_dist as idist\nassert idist.get_rank() == 0\nfrom store_model import StoreModel\n"
    )
    source = "import ignite_dist as idist; print(idist.available_backends())"
    code, output = _run_with_entry_point(tmp_path, "asks:StoreModel", source)
    assert code == 0 and "'store'" in output, output


def test_the_interface_cannot_be_instantiated_half_done() -> None:
    class Half(ComputationModel):
        name = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
