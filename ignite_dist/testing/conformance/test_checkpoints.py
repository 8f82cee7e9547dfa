"""Checkpoints of a training run: saved and loaded on every model, and refused on every rank."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn import Linear, Module
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import on_every_rank, raises

WIDTH, SIZE = 3, 24


class Run:
    """What a script trains, with values of ``fill``."""

    def __init__(self, fill: float, width: int = WIDTH, make: Any = Adam) -> None:
        net = Linear(width, 2).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(fill)
        self.model: Module = idist.auto_model(net)
        self.optimizer = idist.auto_optim(make(self.model.parameters(), lr=0.1))
        self.scheduler = ExponentialLR(self.optimizer, gamma=0.5)

    def step(self, batch: Any = (1, 2)) -> None:
        x = torch.as_tensor(batch, device=idist.device()).double().mean() * torch.ones(2, WIDTH).double().to(
            idist.device()
        )
        self.optimizer.zero_grad()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def states(self) -> Any:
        """Of this rank, on the CPU."""
        model = {
            name: value.cpu().clone() for name, value in idist.unwrap_model(self.model).state_dict().items()
        }
        return [model, idist.optimizer_state(self.optimizer), self.scheduler.state_dict()]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@on_every_rank
def test_model_optimizer_scheduler_and_values(tmp_path: Path) -> None:
    run, values = Run(1.0), {"epoch": 3, "history": [{"loss": 0.5}], "best": torch.ones(2), "none": None}
    run.step()
    idist.save_checkpoint(tmp_path / "new" / "run.pt", **run.parts(), **values)
    saved = run.states()
    run.step()
    other = Run(9.0)
    assert_same(idist.load_checkpoint(tmp_path / "new" / "run.pt", **other.parts()), values)
    assert_same(other.states(), saved)
    other.step()
    assert_same(other.states(), run.states())


@on_every_rank
def test_parameters_that_the_ranks_have_trained_apart_are_told(tmp_path: Path) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    run, other = Run(1.0), Run(2.0)
    own = Linear(WIDTH, 2 + rank, device=idist.device())  # no model of auto_model: a head of each rank

    def save() -> list[str]:
        """The warnings of rank 0. Only rank 0 records them, because replicas of XLA share one recorder."""
        with warnings.catch_warnings(record=True) if rank == 0 else nullcontext([]) as caught:
            if rank == 0:
                warnings.simplefilter("always")
            models = {"one": run.model, "other": other.model, "own": own}
            idist.save_checkpoint(tmp_path / "run.pt", model=models)
        idist.barrier()
        return [str(one.message) for one in caught if "for example 'other" in str(one.message)]

    run.step()
    assert save() == []
    with torch.no_grad():
        [*other.model.parameters()][1].add_(float(rank == size - 1))
    told = save()
    if rank == 0 and size > 1:
        assert len(told) == 1, told
        assert f"of rank {size - 1} differ from those of rank 0, for example 'other.bias'" in told[0], told
    else:
        assert told == []

    # Rank 0 alone passes a model: there is nothing to compare.
    with torch.no_grad():
        [*other.model.parameters()][1].add_(float(rank == size - 1))
    with warnings.catch_warnings(record=True) if rank == 0 else nullcontext([]) as caught:
        if rank == 0:
            warnings.simplefilter("always")
        idist.save_checkpoint(
            tmp_path / "run.pt", model=idist.unwrap_model(other.model) if rank == 0 else None
        )
    idist.barrier()
    assert not [one for one in caught if "for example" in str(one.message)]


@on_every_rank
def test_it_is_read_without_this_package(tmp_path: Path) -> None:
    run = Run(1.0)
    run.step()
    idist.save_checkpoint(tmp_path / "run.pt", **run.parts(), epoch=3)
    content = torch.load(tmp_path / "run.pt", weights_only=True)
    net = Linear(WIDTH, 2).double()
    net.load_state_dict(content["model"])
    optimizer = Adam(net.parameters())
    optimizer.load_state_dict(content["optimizer"])
    ExponentialLR(optimizer, gamma=0.5).load_state_dict(content["scheduler"])
    assert_same(net.state_dict(), run.states()[0])
    assert content["values"] == {"epoch": 3}


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


@on_every_rank
def test_the_loader_goes_on_behind_the_last_batch_that_was_received(tmp_path: Path) -> None:
    def loader() -> Any:
        return idist.auto_dataloader(list(range(SIZE)), batch_size=2 * idist.get_world_size(), shuffle=True)

    first = loader()
    drawn = []
    for batch in first:
        drawn.append(numbers(batch))
        if len(drawn) == 2:
            idist.save_checkpoint(tmp_path / "run.pt", loader=first)
    drawn += map(numbers, first)  # the next epoch
    other = loader()
    idist.load_checkpoint(tmp_path / "run.pt", loader=other)
    again = [*map(numbers, other), *map(numbers, other)]
    assert again == drawn[2:]


def draws() -> list[Any]:
    state = torch.get_rng_state()
    return [state.tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


@on_every_rank
def test_the_random_states_of_each_rank(tmp_path: Path) -> None:
    device, run = idist.device(), Run(1.0)
    idist.save_checkpoint(tmp_path / "run.pt", model=run.model, optimizer=run.optimizer)
    idist.barrier()  # ranks that are threads of one process share these states
    before = draws()
    on_device = torch.rand(3, device=device).tolist() if device.type != "cpu" else []
    idist.barrier()
    torch.rand(1), random.random(), numpy.random.random()
    idist.barrier()
    later = draws()
    assert later != before
    idist.barrier()
    idist.load_checkpoint(tmp_path / "run.pt", model=run.model)
    idist.barrier()
    assert draws() == later, "a model alone is another run's"
    idist.barrier()
    idist.load_checkpoint(tmp_path / "run.pt", optimizer=run.optimizer)
    idist.barrier()
    assert draws() == before
    assert (torch.rand(3, device=device).tolist() if device.type != "cpu" else []) == on_device


@on_every_rank
def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    run = Run(1.0)
    run.step()
    saved = run.states()
    work = idist.save_checkpoint(tmp_path / "1.pt", **run.parts(), asynchronous=True)
    run.step()
    assert work.wait() == tmp_path / "1.pt"
    assert work.is_completed()
    later = run.states()
    idist.save_checkpoint(tmp_path / "2.pt", **run.parts(), asynchronous=True)
    run.step()
    idist.save_checkpoint(tmp_path / "3.pt", **run.parts(), asynchronous=True)  # waits for the second
    other = Run(9.0)
    for name, wanted in (("1.pt", saved), ("2.pt", later), ("3.pt", run.states())):
        idist.load_checkpoint(tmp_path / name, **other.parts())
        assert_same(other.states(), wanted)


@on_every_rank
def test_the_latest_of_those_that_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert idist.latest_checkpoint(folder) is None
    for name in ("c.pt", "b.pt", "a.pt", "b.pt"):
        idist.save_checkpoint(folder / name, keep=2)
        idist.barrier()
        assert idist.latest_checkpoint(folder) == folder / name
    idist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["a.pt", "b.pt"]


# --- what is refused -----------------------------------------------------------------------------------


@on_every_rank
def test_a_checkpoint_of_another_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    idist.save_checkpoint(path, **Run(1.0).parts())
    run, wide, sgd = Run(9.0), Run(9.0, width=4), Run(9.0, make=SGD)
    before = run.states(), wide.states(), sgd.states()
    with raises(RuntimeError, r"weight of shape (2, 3) for (2, 4)"):
        idist.load_checkpoint(path, **wide.parts())
    with raises(ValueError, "does not fit a"):
        idist.load_checkpoint(path, **sgd.parts())
    loader = idist.auto_dataloader(list(range(SIZE)), batch_size=6)
    with raises(ValueError, "has no loader"):
        idist.load_checkpoint(path, **run.parts(), loader=loader)
    idist.save_checkpoint(path, model=run.model)
    with raises(ValueError, "has no optimizer and no scheduler: it was saved with model only"):
        idist.load_checkpoint(path, **run.parts())
    assert_same((run.states(), wide.states(), sgd.states()), before)
    assert len(list(loader)) > 0


@on_every_rank
def test_a_rank_with_other_objects_changes_nothing(tmp_path: Path) -> None:
    if idist.get_world_size() == 1:
        return
    path, run = tmp_path / "run.pt", Run(9.0)
    idist.save_checkpoint(path, **Run(1.0).parts())
    before = run.states()
    model = run.model if idist.get_rank() == 0 else torch.nn.Sequential(run.model, Linear(2, 2).double())
    with raises(idist.CollectiveMismatchError, "load_checkpoint needs the same model on every rank"):
        idist.load_checkpoint(path, model=model)
    groups = [{"params": [parameter]} for parameter in run.model.parameters()]
    optimizer = run.optimizer if idist.get_rank() == 0 else Adam(groups, lr=0.1)
    with raises(ValueError, "load_checkpoint needs the same objects on every rank"):
        idist.load_checkpoint(path, model=run.model, optimizer=optimizer)
    assert_same(run.states(), before)


@on_every_rank
def test_what_is_no_whole_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    run, path = Run(1.0), tmp_path / "run.pt"
    before = run.states()
    idist.save_checkpoint(path, **run.parts(), big=torch.ones(100))
    if idist.get_rank() == 0:
        whole = path.read_bytes()
        newer = torch.load(path, weights_only=True)
        (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "empty.pt").write_bytes(b"")
        torch.save({**newer, "version": 3}, tmp_path / "newer.pt")
        torch.save({"epoch": 3}, tmp_path / "other.pt")
        torch.save({"code": random.Random}, tmp_path / "code.pt")
    idist.barrier()
    for name, kind, text in (
        ("torn.pt", ValueError, "is torn"),
        ("empty.pt", ValueError, "is not a checkpoint"),
        ("newer.pt", ValueError, "has format version 3, and this ignite_dist reads versions up to 2"),
        ("other.pt", ValueError, "is not a checkpoint"),
        ("code.pt", ValueError, "it contains random.Random"),
        ("none.pt", FileNotFoundError, "There is no checkpoint"),
        (".", ValueError, "is a folder"),
    ):
        with raises(kind, text):
            idist.load_checkpoint(tmp_path / name, **run.parts())
    assert_same(run.states(), before)
    assert idist.latest_checkpoint(tmp_path) == path


@on_every_rank
def test_what_cannot_be_saved_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run, path = Run(1.0), tmp_path / "run.pt"
    idist.save_checkpoint(path, **run.parts(), epoch=1)
    last = idist.get_world_size() - 1
    if idist.get_rank() == last:
        bad: Any = pytest.raises(TypeError, match=r"args\['folder'\] is a pathlib.*Pass its data")
    else:
        bad = pytest.raises(TypeError, match=r"args\['folder'\]")
    values = {"folder": tmp_path} if idist.get_rank() == last else {}
    with bad:
        idist.save_checkpoint(path, **run.parts(), epoch=2, args=values)
    with raises(ValueError, "keep must be"):
        idist.save_checkpoint(path, epoch=2, keep=0)
    with raises(TypeError, "got a DataLoader"):
        idist.save_checkpoint(path, epoch=2, loader=torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
    with raises(ValueError, "is a folder"):
        idist.save_checkpoint(tmp_path, epoch=2)
    with raises((OSError, RuntimeError), ""):
        idist.save_checkpoint(path / "under a file", epoch=2)
    assert idist.load_checkpoint(path) == {"epoch": 1}
