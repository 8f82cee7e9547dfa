"""Checkpoints between strategies and numbers of ranks, their files, and what goes wrong with them."""

from __future__ import annotations

import enum
import os
import pickle
import shutil
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import BatchNorm1d, LayerNorm, Linear, Module, Sequential
from torch.optim import AdamW, Optimizer

import ignite_dist as idist
from helpers import run_python, write_script
from ignite_dist.context.live import current_model
from ignite_dist.training.checkpointing import rank_states, shard_files
from ignite_dist.training.checkpointing.trees import plain
from on_ranks import on_ranks

WIDTH = 5  # not divisible by the numbers of ranks


def made(strategy: str, fill: float = 1.0) -> tuple[Module, Optimizer]:
    net = Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH), Linear(WIDTH, 2))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) / 9 + number + fill)
    options = {"strategy": "fsdp", "wrap": [Linear]} if strategy == "fsdp" else {}
    model = idist.auto_model(net, **options)
    optimizer = AdamW(
        [{"params": model[0].parameters()}] if strategy == "part" else model.parameters(), lr=0.1
    )
    return model, idist.auto_optim(optimizer, zero=strategy == "zero")


def train(model: Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(4.0 * WIDTH).view(4, WIDTH) / 10).pow(2).mean().backward()
    optimizer.step()


def states(model: Module, optimizer: Optimizer) -> list[Any]:
    """Whole, on rank 0."""
    return [idist.model_state(model), idist.optimizer_state(optimizer)]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- other strategies, other numbers of ranks ------------------------------------------------------------


def _save(_: int, path: Path, strategy: str, asynchronous: bool) -> list[Any]:
    model, optimizer = made(strategy)
    train(model, optimizer)
    idist.save_checkpoint(
        path, model=model, optimizer=optimizer, asynchronous=asynchronous, step=torch.tensor([3])
    )
    saved = states(model, optimizer)
    train(model, optimizer)
    return saved


def _load(_: int, path: Path, strategy: str) -> list[Any]:
    model, optimizer = made(strategy, fill=9.0)
    values = idist.load_checkpoint(path, model=model, optimizer=optimizer)
    assert_same(values, {"step": torch.tensor([3])})
    loaded = states(model, optimizer)
    train(model, optimizer)
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each strategy, with the states."""
    folder = tmp_path_factory.mktemp("saved")
    found = {"alone": _save(0, folder / "alone.pt", "alone", False)}
    for strategy, world_size, asynchronous in (("ddp", 2, True), ("fsdp", 2, False), ("zero", 2, False)):
        path = folder / f"{strategy}.pt"
        found[strategy] = on_ranks(_save, path, strategy, asynchronous, world_size=world_size)[0]
    found["fsdp-3"] = on_ranks(_save, folder / "fsdp-3.pt", "fsdp", True, world_size=3)[0]
    return {"folder": folder, **found}


@pytest.mark.long
@pytest.mark.parametrize("source", ["alone", "ddp", "fsdp", "zero", "fsdp-3"])
@pytest.mark.parametrize(("strategy", "world_size"), [("alone", 1), ("ddp", 3), ("fsdp", 2), ("zero", 2)])
def test_loaded_with_another_strategy(
    saved: dict[str, Any], source: str, strategy: str, world_size: int
) -> None:
    path = saved["folder"] / f"{source}.pt"
    args = path, strategy
    found = _load(0, *args) if world_size == 1 else on_ranks(_load, *args, world_size=world_size)[0]
    assert_same(found, saved[source])


@pytest.mark.long
def test_only_sharded_tensors_are_beside_the_file(saved: dict[str, Any]) -> None:
    folders = [path.name.partition(".shards-")[0] for path in saved["folder"].iterdir() if path.is_dir()]
    assert sorted(folders) == ["fsdp-3.pt", "fsdp.pt"]
    content = torch.load(saved["folder"] / "fsdp.pt", weights_only=True)
    assert_same(content["model"]["1.running_mean"], saved["fsdp"][0]["1.running_mean"])


# Tensor parallel over 2 ranks, and FSDP2 over these and 2 others.
WORLDS = {"alone": 1, "tp": 2, "fsdp-tp": 4}


def made_on_mesh(kind: str) -> tuple[Module, Optimizer]:
    net = Sequential(Linear(6, 8), Linear(8, 6), LayerNorm(6))
    if kind != "alone":
        shape = (WORLDS[kind] // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if kind == "fsdp-tp":
            fully_shard(net, mesh=mesh["dp"])
    return net, AdamW(net.parameters(), lr=0.1, foreach=False)


def whole(model: Module) -> dict[str, Any]:
    values = model.state_dict().items()
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in values}


def train_on_mesh(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    optimizer.zero_grad()
    model(torch.arange(24.0).view(4, 6) / 10).pow(2).mean().backward()
    optimizer.step()
    return whole(model)


def _save_on_mesh(_: int, path: Path, kind: str) -> list[Any]:
    torch.manual_seed(0)
    model, optimizer = made_on_mesh(kind)
    trained = train_on_mesh(model, optimizer)
    idist.save_checkpoint(path, model=model, optimizer=optimizer, asynchronous=kind == "tp")
    return [trained, train_on_mesh(model, optimizer)]


def _load_on_mesh(_: int, path: Path, kind: str) -> list[Any]:
    torch.manual_seed(1)
    model, optimizer = made_on_mesh(kind)
    train_on_mesh(model, optimizer)
    idist.load_checkpoint(path, model=model, optimizer=optimizer)
    return [whole(model), train_on_mesh(model, optimizer)]


def on_mesh(function: Any, path: Path, kind: str) -> list[Any]:
    if kind == "alone":
        return function(0, path, kind)  # type: ignore[no-any-return]
    return on_ranks(function, path, kind, world_size=WORLDS[kind])[0]  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", WORLDS)
def test_tensor_parallel_models(source: str, tmp_path: Path) -> None:
    saved, trained = on_mesh(_save_on_mesh, tmp_path / "run.pt", source)
    for kind in WORLDS:
        loaded, trained_on = on_mesh(_load_on_mesh, tmp_path / "run.pt", kind)
        assert_same(loaded, saved)
        torch.testing.assert_close(trained_on, trained, rtol=1e-4, atol=1e-5)


# --- files -----------------------------------------------------------------------------------------------


def _over_others(_: int, folder: Path) -> None:
    model, optimizer = made("fsdp")
    parts = {"model": model, "optimizer": optimizer}
    for number in range(3):
        idist.save_checkpoint(folder / "same.pt", **parts, number=number)
    rank = idist.get_rank()
    if rank == 0:  # as of jobs that were killed
        (folder / "same.pt.shards-4").mkdir()
        (folder / "same.pt.shards-4" / "__0_0.distcp").write_bytes(b"half")
        (folder / "same.pt.tmp").write_bytes(b"half")
        (folder / "gone.pt.shards-2").mkdir()  # of a job that will write gone.pt, perhaps
        (folder / "mine.txt").write_text("mine")
        (folder / "mine.pt.shards-x").mkdir()
    idist.barrier()
    train(model, optimizer)
    idist.save_checkpoint(folder / "same.pt", **parts, number=3)
    wanted = states(model, optimizer)
    train(model, optimizer)
    assert idist.load_checkpoint(folder / "same.pt", **parts) == {"number": 3}
    assert_same(states(model, optimizer), wanted)
    assert idist.latest_checkpoint(folder) == folder / "same.pt"
    for number in range(4):
        idist.save_checkpoint(folder / f"{number}.pt", **parts, keep=2)
    idist.barrier()


def test_what_is_replaced_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    on_ranks(_over_others, tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    own = ["2.pt", "2.pt.shards-7", "3.pt", "3.pt.shards-8"]
    assert left == [*own, "gone.pt.shards-2", "mine.pt.shards-x", "mine.txt"]


def test_the_latest_is_that_of_the_last_save_whatever_the_clock_says(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        idist.save_checkpoint(tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    idist.save_checkpoint(tmp_path / "a")
    os.utime(tmp_path / "a", (0, 0))
    torch.save({"epoch": 1}, tmp_path / "another.pt")
    shutil.copy(tmp_path / "a", tmp_path / "z.tmp")
    assert idist.latest_checkpoint(tmp_path) == tmp_path / "a"
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-30])
    assert idist.latest_checkpoint(str(tmp_path)) == tmp_path / "c"


NO_ROOM = """
    import resource, signal, sys
    import torch
    import ignite_dist as idist

    idist.save_checkpoint(sys.argv[1], epoch=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for asynchronous in (False, True):
        try:
            work = idist.save_checkpoint(
                sys.argv[1], epoch=2, big=torch.ones(1_000_000), asynchronous=asynchronous
            )
            work.wait()
        except (OSError, RuntimeError) as error:
            assert "run.pt cannot be written" in str(error) and "large" in str(error), error
            print("refused", flush=True)
    print(idist.load_checkpoint(sys.argv[1])["epoch"])
"""


def test_no_room_on_the_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ended = run_python(write_script(tmp_path, NO_ROOM), tmp_path / "run.pt")
    lines = ended.stdout.splitlines()
    assert (lines.count("refused"), lines[-1]) == (2, "1"), ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.pt", "script.py"]


AT_EXIT = """
    import sys
    import torch
    import ignite_dist as idist

    idist.save_checkpoint(sys.argv[1], big=torch.ones(5_000_000), asynchronous=True)
"""


def test_the_end_of_the_process_waits_for_the_write(tmp_path: Path) -> None:
    assert run_python(write_script(tmp_path, AT_EXIT), tmp_path / "run.pt").returncode == 0
    assert idist.load_checkpoint(tmp_path / "run.pt")["big"].sum() == 5_000_000


def _fails_later(rank: int, folder: Path) -> list[str]:
    path = folder / "run.pt"
    found = []
    for check in (
        lambda: idist.save_checkpoint(path, asynchronous=True).wait(),
        lambda: [idist.save_checkpoint(path, asynchronous=True), idist.save_checkpoint(folder / "other")],
        lambda: [idist.save_checkpoint(path, asynchronous=True), idist.load_checkpoint(folder / "other")],
        lambda: [idist.save_checkpoint(path, asynchronous=True), idist.finalize()],
    ):
        with pytest.raises(OSError, match=r"run\.pt\.tmp") as info:
            check()
        found.append(type(info.value).__name__)
    assert not (folder / "other").exists()
    idist.save_checkpoint(folder / "other", asynchronous=True)
    return found


def test_an_error_of_the_write_is_raised_by_the_next_that_waits_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run.pt.tmp").mkdir()  # in the way
    first, second = on_ranks(_fails_later, tmp_path)
    assert first == second == ["IsADirectoryError"] * 4, "the errno is the same on every rank"
    assert (tmp_path / "other").exists(), "the end of the context waits"


def _meanwhile(rank: int, path: Path) -> str:
    gate = path.with_name(f"{path.name}.tmp")
    if rank == 0:
        os.mkfifo(gate)  # the write waits until someone reads
    idist.barrier()
    work = idist.save_checkpoint(path, asynchronous=True, epoch=1)
    assert idist.all_reduce(1) == 2
    if rank == 0:
        assert not work.is_completed()
        with pytest.raises(idist.MissingRanksError, match=r"save_checkpoint of .*run\.pt has not completed"):
            work.wait(timedelta(milliseconds=1))
        gate.read_bytes()
    with pytest.raises((OSError, RuntimeError)) as info:  # a pipe is no file
        work.wait()
    assert work.is_completed()
    return type(info.value).__name__


def test_training_goes_on_before_the_file_is_written(tmp_path: Path) -> None:
    assert len(on_ranks(_meanwhile, tmp_path / "run.pt")) == 2
    assert list(tmp_path.iterdir()) == []


# --- torn, or not safe -----------------------------------------------------------------------------------


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TEST_RAN"],)


def _refused(_: int, path: Path, text: str) -> str:
    model, optimizer = made("fsdp", fill=9.0)
    before = states(model, optimizer)
    with pytest.raises(ValueError, match=text) as info:
        idist.load_checkpoint(path, model=model, optimizer=optimizer)
    assert_same(states(model, optimizer), before)
    assert idist.latest_checkpoint(path.parent) is None
    return str(info.value)


@pytest.mark.long
@pytest.mark.parametrize("how", ["short", "missing", "no metadata", "code", "bytes", "another"])
def test_a_folder_of_shards_that_is_torn(
    how: str, saved: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_RAN", str(tmp_path / "ran"))
    folder = tmp_path / "run"
    folder.mkdir()
    path = Path(shutil.copy(saved["folder"] / "fsdp.pt", folder))
    name = next(saved["folder"].glob("fsdp.pt.shards-*")).name
    shards = Path(shutil.copytree(saved["folder"] / name, folder / name))
    data, metadata = shards / "__1_0.distcp", shards / ".metadata"
    text = "is torn"
    if how == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "missing":
        data.unlink()
    elif how == "no metadata":
        metadata.unlink()
    elif how == "code":
        metadata.write_bytes(pickle.dumps(Code()))
        text = r"it contains (posix|nt)\.mkdir"
    elif how == "bytes":  # torch would unpickle the values of such entries without limits
        found = pickle.loads(metadata.read_bytes())
        found.state_dict_metadata["more"] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
        metadata.write_bytes(pickle.dumps(found))
        text = "BytesStorageMetadata"
    else:
        metadata.write_bytes(pickle.dumps([1]))
    messages = on_ranks(_refused, path, text)
    assert messages[0] == messages[1]
    assert not (tmp_path / "ran").exists()


class _MembersByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_every_python_is_read(tmp_path: Path) -> None:
    linear = Linear(2, 2)
    shard_files.writer(tmp_path / "shards", linear.state_dict())()
    file = tmp_path / "shards" / ".metadata"
    with file.open("rb") as old:
        metadata = pickle.load(old)
    with file.open("wb") as new:
        _MembersByName(new).dump(metadata)
    assert b"getattr" in file.read_bytes()
    shard_files.check(tmp_path / "shards", linear.state_dict())
    properties = metadata.state_dict_metadata["weight"].properties
    format = next(type(value) for value in properties.__getstate__() if isinstance(value, enum.Enum))
    for kind, attribute in ((format, "mro"), (format, "no_member"), (type(metadata), "__init__")):
        file.write_bytes(pickle.dumps(_Attribute(kind, attribute)))
        with pytest.raises(ValueError, match=f"it contains {attribute} of .*not data of a checkpoint"):
            shard_files.check(tmp_path / "shards", linear.state_dict())


class _Attribute:
    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


# --- values ----------------------------------------------------------------------------------------------


def test_plain_values_are_copies_that_weights_only_reads(tmp_path: Path) -> None:
    ordered = OrderedDict(a=torch.ones(2))
    values = {
        "numbers": [1, 1.5, True, None, 2j, 2**100, "text", b"bytes", torch.float16, torch.Size([1])],
        "numpy": [numpy.float64(0.5), numpy.int32(3), numpy.bool_(True)],
        "keys": {1: 2, "x": (3, 4), (1, "y"): 5},
        "ordered": ordered,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "device": torch.device("cpu"),
    }
    idist.save_checkpoint(tmp_path / "run.pt", **values)
    found = idist.load_checkpoint(tmp_path / "run.pt")
    assert found["numbers"] == values["numbers"] and found["keys"] == values["keys"]
    assert found["numpy"] == [0.5, 3, True]
    assert type(found["parameter"]) is torch.Tensor and found["device"] == torch.device("cpu")
    copied = plain(ordered, "ordered")
    ordered["a"].zero_()
    assert copied["a"].sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128])
def test_a_large_tensor_is_copied_with_its_values_and_its_layout(dtype: torch.dtype) -> None:
    whole = (torch.arange(3 << 20) % 2).to(dtype).view(3, 4, 512, 512)
    for tensor in (whole, whole.to(memory_format=torch.channels_last), whole[1:, :, ::2], whole[1:].conj()):
        copied = plain(tensor, "x")
        assert copied.dtype is dtype and copied.stride() == tensor.clone().stride()
        assert torch.equal(copied.double(), tensor.double()) if not dtype.is_complex else copied.equal(tensor)
        assert copied.untyped_storage().nbytes() == tensor.nbytes
        copied.zero_()
    assert whole.double().sum() if not dtype.is_complex else whole.abs().sum()


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path: Path) -> None:
    model = Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(1_000_000)[:4].view(2, 2))
    idist.save_checkpoint(tmp_path / "run.pt", model=model, part=torch.ones(1_000_000)[3:])
    assert (tmp_path / "run.pt").stat().st_size < 4_100_000
    idist.save_checkpoint(tmp_path / "run.pt", model=model)
    assert (tmp_path / "run.pt").stat().st_size < 50_000


def test_rows_and_columns_are_saved_alone(tmp_path: Path) -> None:
    batch = torch.arange(1_000_000.0).view(1000, 1000)
    parts = {"rows": list(batch[:9]), "column": batch[:, 3], "row": batch[500]}
    for asynchronous in (False, True):
        idist.save_checkpoint(tmp_path / "run.pt", **parts, asynchronous=asynchronous).wait()
        assert (tmp_path / "run.pt").stat().st_size < 80_000
        found = idist.load_checkpoint(tmp_path / "run.pt")
        assert all(map(torch.equal, found["rows"], parts["rows"]))
        assert torch.equal(found["column"], batch[:, 3]) and torch.equal(found["row"], batch[500])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_shares_memory_is_saved_once(asynchronous: bool, tmp_path: Path) -> None:
    model = Sequential(Linear(500, 500, bias=False), Linear(500, 500, bias=False))
    model[1].weight = model[0].weight
    halves = torch.arange(500_000.0).chunk(2)
    tied = model[0].weight  # of another part of the file
    parts: dict[str, Any] = {"model": model, "halves": halves, "tied": tied}
    work = idist.save_checkpoint(tmp_path / "run.pt", **parts, asynchronous=asynchronous)
    expected = [part.clone() for part in halves]
    if asynchronous:
        halves[0].zero_()
    work.wait()
    assert (tmp_path / "run.pt").stat().st_size < 3_050_000
    first, second = idist.load_checkpoint(tmp_path / "run.pt")["halves"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([first, second]), torch.cat(expected))


def test_both_ways_to_save_give_one_file(tmp_path: Path) -> None:
    """Views that overlap, touch, have gaps, are equal, expanded, empty, or of another layout."""
    base, other = torch.arange(10_000.0).view(100, 100), torch.arange(100.0)
    tensors = [
        *(base[:3], base[2:4], base[4], base[:, 7], base[:, 7], base.t()[60:62], base[50].expand(3, 100)),
        *(base[:0], other, other[3:], other[:3], torch.tensor(1.0)),
        *(torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, 2).to_sparse(), torch.ones(2)[1]),
        torch.ones(2, dtype=torch.bool),
    ]
    found, sizes = [], []
    for asynchronous in (False, True):
        idist.save_checkpoint(tmp_path / "run.pt", tensors=tensors, asynchronous=asynchronous).wait()
        sizes.append((tmp_path / "run.pt").stat().st_size)
        found.append(idist.load_checkpoint(tmp_path / "run.pt")["tensors"])
    assert sizes[0] == sizes[1]
    places = [[_storage_of(one) for one in some] for some in found]
    assert [[one == other for other in places[0]] for one in places[0]] == [
        [one == other for other in places[1]] for one in places[1]
    ]
    for one, synchronous, asynchronous in zip(tensors, *found, strict=True):
        for loaded in (synchronous, asynchronous):
            assert torch.equal(one.to_dense(), loaded.to_dense())
        assert synchronous.is_sparse or synchronous.stride() == asynchronous.stride()


def test_two_dtypes_of_one_memory(tmp_path: Path) -> None:
    """``torch.save`` refuses them. Copies need not share their memory."""
    floats = torch.arange(4.0)
    parts = {"floats": floats, "bits": floats.view(torch.int32)}
    idist.save_checkpoint(tmp_path / "run.pt", **parts, asynchronous=True).wait()
    found = idist.load_checkpoint(tmp_path / "run.pt")
    assert all(torch.equal(found[name], part) for name, part in parts.items())


def _storage_of(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_sparse or not tensor.numel() else tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [Path("x")]}, r"x\['a'\]\[0\] is a pathlib\.\w+\. .* Pass its data"),
        (torch.nn.Linear(1, 1), r"x is a torch.nn.modules.linear.Linear.* Pass it under a name of its own"),
        (numpy.ones(2), r"x is a numpy.ndarray.* Pass torch.as_tensor"),
        ({frozenset(): 1}, r"x has the key frozenset\(\), a frozenset"),
        ({1, 2}, "x is a builtins.set"),
    ],
)
def test_other_values_are_refused_with_their_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plain(value, "x")


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    model = BatchNorm1d(2)
    idist.save_checkpoint(tmp_path / "run.pt", model=model)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert saved._metadata == model.state_dict()._metadata


def _at_other_batches(rank: int, folder: Path) -> None:
    loader = idist.auto_dataloader(list(range(12)), batch_size=4)  # type: ignore[arg-type]
    begun = iter(loader)
    for _ in range(1 + rank):
        next(begun)
    with pytest.raises(ValueError, match=r"have received \[1, 2\] batches"):
        idist.save_checkpoint(folder / "run.pt", loader=loader)


def test_ranks_at_other_batches_are_refused(tmp_path: Path) -> None:
    on_ranks(_at_other_batches, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _other_paths(_: int, folder: Path) -> None:
    rank = idist.get_rank()
    idist.save_checkpoint(folder / "all.pt", own=1)
    got = [rf"rank {number}: .*{folder.name}/{number}(.pt)?" for number in (0, 1)]
    says = rf"same path on every rank. Got {'; '.join(got)}\. Rank 0 reads"
    with pytest.raises(
        ValueError, match=r"same asynchronous on every rank. Got rank 0: True; rank 1: False\."
    ):
        idist.save_checkpoint(folder / "one.pt", own=rank, asynchronous=rank == 0)
    with pytest.raises(ValueError, match=f"save_checkpoint needs the {says}"):
        idist.save_checkpoint(folder / f"{rank}.pt", own=rank)
    with pytest.raises(ValueError, match=f"save_checkpoint needs the {says}"):
        idist.save_checkpoint(folder / f"{rank}.pt", own=rank, asynchronous=True)
    for name in "01":
        if rank == 0:
            shutil.copy(folder / "all.pt", folder / f"{name}.pt")
    with pytest.raises(ValueError, match=f"load_checkpoint needs the {says}"):
        idist.load_checkpoint(folder / f"{rank}.pt")
    with pytest.raises(ValueError, match=f"latest_checkpoint needs the {says}"):
        idist.latest_checkpoint(folder / f"{rank}")


def test_a_path_of_each_rank_is_refused(tmp_path: Path) -> None:
    on_ranks(_other_paths, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "all.pt"]


# --- several models --------------------------------------------------------------------------------------


def two_models(fill: float) -> Module:
    nets = {name: Linear(2, 1) for name in ("gen", "judge")}
    for number, net in enumerate(nets.values()):
        torch.nn.init.constant_(net.weight, fill + number)
    nested = Sequential(idist.auto_model(nets["judge"]))
    return torch.nn.ModuleDict({"gen": idist.auto_model(nets["gen"]), "judge": nested})


def saves_two_models(_: int, path: str) -> None:
    both = two_models(3.0)
    idist.save_checkpoint(path, model=both)
    whole = two_models(0.0)
    idist.load_checkpoint(path, model=whole)
    assert_same(whole.state_dict(), both.state_dict())


def test_a_container_of_models_loads_in_one_process(tmp_path: Path) -> None:
    on_ranks(saves_two_models, str(tmp_path / "run.pt"))
    alone = two_models(0.0)
    idist.load_checkpoint(tmp_path / "run.pt", model=alone)
    assert list(alone.state_dict()) == ["gen.weight", "gen.bias", "judge.0.weight", "judge.0.bias"]
    assert alone["gen"].weight.tolist() == [[3.0, 3.0]]
    assert alone["judge"][0].weight.tolist() == [[4.0, 4.0]]


def follows_the_advice(_: int, path: str) -> None:
    student, teacher = (idist.auto_model(Linear(2, 1)) for _ in range(2))
    with pytest.raises(TypeError, match="Pass it under a name of its own: name="):
        idist.save_checkpoint(path, model=student, others=[teacher])
    idist.save_checkpoint(path, model=student, teacher=teacher)
    expected = idist.model_state(teacher)
    torch.nn.init.zeros_(idist.unwrap_model(teacher).weight)
    idist.load_checkpoint(path, model=student, teacher=teacher)
    assert_same(idist.model_state(teacher), expected)


def test_the_advice_for_a_second_model_leads_to_a_file_that_loads(tmp_path: Path) -> None:
    on_ranks(follows_the_advice, str(tmp_path / "run.pt"))


def saves_as_torch_does(_: int, path: str) -> None:
    wrapped = idist.auto_model(Linear(2, 1))
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    if idist.get_rank() == 0:
        torch.save(wrapped.state_dict(), path)
    idist.barrier()
    for strategy in ("ddp", "fsdp"):
        model = idist.auto_model(Linear(2, 1), strategy=strategy)
        idist.load_model_state(model, torch.load(path) if idist.get_rank() == 0 else None)
        expected = idist.model_state(wrapped)
        assert_same(dict(idist.model_state(model)), dict(expected))


def test_a_file_of_a_wrapped_model_loads_anywhere(tmp_path: Path) -> None:
    on_ranks(saves_as_torch_does, str(tmp_path / "old.pt"))
    alone, state = Linear(2, 1), torch.load(tmp_path / "old.pt")
    idist.load_model_state(alone, state)
    assert_same(alone.weight.detach(), state["module.weight"])


# --- a step of several microbatches ----------------------------------------------------------------------


def saves_in_steps(_: int, folder: Path) -> list[list[str]]:
    """The warnings of each save."""
    model = idist.auto_model(Linear(1, 1))
    found: list[list[str]] = []

    def loader() -> Any:
        return idist.auto_dataloader(torch.ones(12, 1), batch_size=2)  # type: ignore[arg-type]

    def save(*loaders: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            idist.save_checkpoint(folder / "run.pt", loader=list(loaders))
        assert all(one.filename == __file__ for one in caught), "it points at the script"
        found.append([str(one.message) for one in caught])

    saved, other, third = loader(), loader(), loader()
    for x, sync in idist.accumulate_gradients(saved, model, steps=4):
        with sync:
            model(x).sum().backward()
        save(saved)
    save(saved)
    for (x, _), sync in idist.accumulate_gradients(zip(saved, other, strict=True), model, steps=3):
        with sync:
            model(x).sum().backward()
        save(third)  # no pass of this one is accumulated
        save(third, other)
        if sync.number == 1:
            break
    save(saved)
    rest = iter(third)
    for x, sync in idist.accumulate_gradients(rest, model, steps=2):
        with sync:
            model(x).sum().backward()
        break
    save(third)
    next(rest)
    save(third)  # the script goes on without accumulation
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_in_the_middle_of_a_step_is_told(world_size: int, tmp_path: Path) -> None:
    wanted = [
        *("1 of 4", "2 of 4", "3 of 4", "", "1 of 4", "", ""),  # six microbatches, and after the pass
        *("", "1 of 3", "", "2 of 3", "2 of 3"),
        *("1 of 2", ""),
    ]
    first, *others = on_ranks(saves_in_steps, tmp_path, world_size=world_size)
    for texts, microbatch in zip(first, wanted, strict=True):
        says = f"after microbatch {microbatch} of a step. "
        assert [says in text for text in texts] == ([True] if microbatch else []), (texts, microbatch)
    assert all(texts == [[]] * len(wanted) for texts in others), "rank 0 tells it"


# --- what each rank has of its own -----------------------------------------------------------------------


def gathers_and_restores(local_rank: int, folder: Path) -> list[Any]:
    """True if the load restores the random state of the save; and what the rank gathers."""
    rank, loader = idist.get_rank(), idist.auto_dataloader(range(6), batch_size=3)  # type: ignore[arg-type]
    torch.manual_seed(rank)
    idist.save_checkpoint(folder / "run.pt", loader=loader)
    expected = torch.rand(3).tolist()
    idist.load_checkpoint(folder / "run.pt", loader=loader)
    live = current_model()
    states = rank_states.gather_on_rank_0(live, {"loader": None, "random_states": rank})
    return [torch.rand(3).tolist() == expected, states]


def test_no_rank_but_the_first_gets_the_states_of_the_others(tmp_path: Path) -> None:
    of_all = {"loader": [None] * 3, "random_states": [0, 1, 2]}
    of_others = {"loader": [], "random_states": []}
    found = on_ranks(gathers_and_restores, tmp_path, world_size=3)
    assert found == [[True, of_all], [True, of_others], [True, of_others]]
