"""What ``safe_objects`` promises, on every model; and what comes of ranks in different collectives."""

from __future__ import annotations

import os
import pickle
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError, RankFailedError, UnsafeObjectError
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import Group
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises, safe_mode
from ignite_dist.values import message_header


@dataclass
class Score:
    value: float
    rank: int


class Runs:
    """Makes a directory when plain pickle reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@contextmanager
def safe_on_every_rank(*classes: Any) -> Iterator[None]:
    """``safe_objects`` in the block, and no longer: replicas of XLA turn it on and off for each other."""
    idist.barrier()
    with safe_mode(*classes):
        idist.barrier()
        yield
        idist.barrier()
    idist.barrier()


def new_folder() -> Path:
    """A folder that is not there, the same on every rank."""
    return Path(tempfile.gettempdir(), f"idist-{idist.broadcast(uuid.uuid4().hex)}")


@pytest.mark.parametrize("large", [False, True])
@on_every_rank
def test_objects(large: bool) -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    values = [
        None if r == 1 else {"rank": r, "day": date(2026, 1, 1 + r), "text": "é" * (3000 * large)}
        for r in range(world_size)
    ]
    with safe_on_every_rank():
        with count_collectives() as counted:
            assert idist.all_gather(values[rank]) == values
        assert world_size == 1 or counted.count == 1 + large
        assert idist.broadcast(("of", rank, values[rank])) == ("of", 0, values[0])
        tensors = idist.all_gather({"t": torch.full((200 * large + 1,), rank), "p": Path("x")})
        assert [one["t"].unique().tolist() for one in tensors] == [[r] for r in range(world_size)]


@on_every_rank
def test_what_the_package_itself_sends() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    device = idist.device()
    with safe_on_every_rank():
        tree = {"loss": 0.5, "n": rank, "large": 10**1000, "t": torch.ones(2, device=device)}
        reduced = idist.all_reduce(tree)
        assert reduced["loss"] == 0.5 * world_size and reduced["n"] == sum(range(world_size))
        assert reduced["large"] == 10**1000 * world_size and reduced["t"].tolist() == [world_size] * 2
        ragged = idist.all_gather_ragged(torch.full((rank + 1,), rank, device=device))
        assert [one.tolist() for one in ragged] == [[r] * (r + 1) for r in range(world_size)]
        source = torch.arange(3, device=device) if rank == 0 else None
        assert idist.broadcast(source, safe_mode=True).tolist() == [0, 1, 2]
        assert idist.any_true(rank == 0) and not idist.any_true(False)
        assert len(set(idist.all_gather(idist.shared_seed()))) == 1
        assert idist.get_nnodes() == 1 and len(current_model().node_ranks()) == world_size
        last = [world_size - 1]
        assert idist.all_gather(rank, group=last) == (last if rank in last else rank)


@on_every_rank
def test_results_in_order() -> None:
    loader = idist.auto_dataloader(torch.arange(11), batch_size=2, shuffle=True, exact=True)
    with safe_on_every_rank():
        seen = torch.cat(list(loader)).cpu()
        gathered = idist.gather_in_order({"x": seen, "names": [f"n{x}" for x in seen.tolist()]}, loader)
        assert gathered["x"].tolist() == list(range(11))
        assert gathered["names"] == [f"n{x}" for x in range(11)]


@on_every_rank
def test_a_class_has_to_be_registered() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    if world_size == 1:
        return
    with safe_on_every_rank():
        with raises(UnsafeObjectError, "idist.safe_objects(Score)"):
            idist.all_gather(Score(0.5, rank))
        assert idist.all_gather(rank) == list(range(world_size))
    with safe_on_every_rank(Score):
        assert idist.all_gather(Score(0.5, rank)) == [Score(0.5, r) for r in range(world_size)]
        assert idist.broadcast(Score(0.5, rank), src=1) == Score(0.5, 1)


@pytest.mark.parametrize("size", [0, 1000])
@on_every_rank
def test_what_would_run_is_refused_on_every_rank_before_it_does(size: int) -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    if world_size == 1:
        return
    folder = new_folder()
    value: Any = ["x" * size, Runs(folder)] if rank == world_size - 1 else "harmless"
    with safe_on_every_rank():
        for collective in (idist.all_gather, lambda one: idist.broadcast(one, src=world_size - 1)):
            with raises(UnsafeObjectError, "mkdir") as refused:
                collective(value)
            assert (refused.value.rank, refused.value.type_name) == (world_size - 1, "posix.mkdir")
            assert idist.all_gather(rank) == list(range(world_size))
    assert not folder.exists()


@on_every_rank
def test_a_rank_where_objects_are_not_safe_is_named() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    if world_size == 1:
        return
    folder, model = new_folder(), current_model()
    with safe_on_every_rank():
        if rank == 0:  # replicas of XLA share the mode, so by hand
            payload = pickle.dumps(Runs(folder))

            def send(world: Group) -> Work:
                header = message_header.write_header(payload, world.call)
                return Completed(model.objects.gather_bytes(header, world))

            perform(model, "all_gather", model.groups.world, send, None, value="an object")
        else:
            with raises(UnsafeObjectError, "Rank 0 sent a plain pickle"):
                idist.all_gather(rank)
        assert idist.all_gather(rank) == list(range(world_size))
    assert not folder.exists()


@on_every_rank
def test_a_tensor_where_the_others_send_objects_is_noticed_by_them() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    if world_size == 1:
        return
    if rank == 0:
        device = current_model().objects.device  # over gloo, tensors on a GPU and on the CPU never meet
        with suppress(CollectiveMismatchError):  # over shared memory this rank notices it too
            idist.all_gather(torch.full((message_header.HEADER_BYTES,), 7, dtype=torch.uint8, device=device))
    else:
        with raises(CollectiveMismatchError, "rank 0"):
            idist.all_gather(rank)
    assert idist.all_gather(rank) == list(range(world_size))


@on_every_rank
def test_outcomes_and_states() -> None:
    """Outcomes, their values, the states of models and optimizers; and what ``compare_calls`` compares."""
    rank, world_size = idist.get_rank(), idist.get_world_size()

    def fail() -> None:
        raise ValueError("on purpose")

    with safe_on_every_rank(), idist.compare_calls():
        assert idist.one_rank_only(broadcast=True)(lambda: {"a": 1})() == {"a": 1}
        with idist.one_rank_first():
            pass
        with idist.raise_together():
            pass
        if world_size > 1:
            with raises(ValueError if rank == 0 else RankFailedError, "on purpose"):
                idist.one_rank_only(with_barrier=True)(fail)()
            with raises(TypeError if rank == 0 else RankFailedError, "cannot be sent"):
                idist.one_rank_only(broadcast=True)(lambda: fail if rank else lambda: None)()
        net = idist.auto_model(torch.nn.Linear(2, 1))
        optimizer = idist.auto_optim(torch.optim.AdamW(net.parameters(), lr=0.1))
        net(torch.ones(1, 2, device=idist.device())).sum().backward()
        optimizer.step()
        idist.load_optimizer_state(optimizer, idist.optimizer_state(optimizer))
        idist.load_model_state(net, idist.model_state(net))
