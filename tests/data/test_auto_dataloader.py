"""auto_dataloader: shares, samplers, epochs."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import UserDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import DataParallel, Linear, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

import ignite_dist as idist
from ignite_dist.comp_models.serial import SerialModel
from ignite_dist.context import live
from ignite_dist.data.samplers import DistributedProxySampler, EpochSampler
from on_ranks import SIZE, on_ranks, warned


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * idist.get_rank(), 4 * idist.get_rank() + 4))


def indices(loader: DataLoader[int]) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


# --- auto_dataloader: what is divided ----------------------------------------------------------------


def _divisions(_: int) -> dict[str, Any]:
    def make(**kwargs: Any) -> tuple[int | None, int, list[str]]:
        loader, messages = warned(lambda: idist.auto_dataloader(Numbers(), shuffle=False, **kwargs))
        return loader.batch_size, loader.num_workers, messages

    return {
        "even": make(batch_size=6),
        "odd": make(batch_size=5),
        "small": make(batch_size=1),
        "none": make(batch_size=None),
        "default": make(),
        "workers": make(num_workers=4)[1],
        "odd workers": make(num_workers=3)[1],
        "one worker": make(num_workers=1)[1],
        "no workers": make(num_workers=0)[1],
    }


def test_batch_size_and_workers_are_divided_and_a_small_batch_is_said_aloud() -> None:
    for rank, found in enumerate(on_ranks(_divisions)):
        assert found["even"] == (3, 0, [])
        assert found["default"] == (1, 0, [])
        assert found["none"] == (None, 0, [])
        assert found["odd"] == (3 - rank, 0, [])
        size, _, messages = found["small"]
        assert size == 1
        assert len(messages) == 1
        for text in ("batch_size=1", "world size 2", "on every rank", "2 samples"):
            assert text in messages[0]
        assert (found["workers"], found["odd workers"], found["one worker"], found["no workers"]) == (
            2,
            2,
            1,
            0,
        )


def _of_others(rank: int) -> str:
    sampler = DistributedSampler(Numbers(), num_replicas=3, rank=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was made for") as info:
        idist.auto_dataloader(Numbers(), sampler=sampler)
    return str(info.value)


def test_a_sampler_that_was_made_for_other_ranks_is_refused() -> None:
    for rank, message in enumerate(on_ranks(_of_others)):
        assert "rank 2 of 3" in message and f"rank {rank} of 2" in message and "sampler_kwargs()" in message


def test_the_warning_points_at_the_callers_line() -> None:
    for found in on_ranks(_divisions):
        assert found["small"][2][0].startswith("test_auto_dataloader.py:")


def test_alone_it_is_a_plain_data_loader() -> None:
    loader, messages = warned(
        lambda: idist.auto_dataloader(Numbers(), batch_size=5, num_workers=0, shuffle=False)
    )
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.pin_memory, messages) == (5, False, [])
    assert indices(loader) == list(range(SIZE))


# --- auto_dataloader: samplers -----------------------------------------------------------------------


def _sampler_kinds(_: int) -> dict[str, Any]:
    rank = idist.get_rank()
    own = DistributedSampler(Numbers(), num_replicas=2, rank=rank, shuffle=False)
    left_out, complaints = warned(lambda: idist.auto_dataloader(Numbers(), batch_size=4))
    shuffled = idist.auto_dataloader(Numbers(), batch_size=4, shuffle=True)
    unshuffled = idist.auto_dataloader(Numbers(), batch_size=4, shuffle=False)
    taken = idist.auto_dataloader(Numbers(), batch_size=4, sampler=own)
    shared = idist.auto_dataloader(Numbers(), batch_size=4, sampler=SubsetRandomSampler([1, 3, 5, 7]))
    mine = BatchSampler(SequentialSampler(range(SIZE)), batch_size=5, drop_last=False)
    batched = idist.auto_dataloader(Numbers(), batch_sampler=mine)
    stream = idist.auto_dataloader(Stream(), batch_size=4)
    with pytest.raises(ValueError, match=r"sampler.*shuffle"):
        idist.auto_dataloader(Numbers(), sampler=own, shuffle=True)
    return {
        "types": [type(one.sampler) for one in (left_out, unshuffled, shared)],
        "taken as it is": taken.sampler is own,
        "indices": [indices(one) for one in (shuffled, left_out, unshuffled, taken, shared, batched, stream)],
        "complaints": complaints,
    }


def test_every_kind_of_sampler() -> None:
    first, second = on_ranks(_sampler_kinds)
    for found in (first, second):
        assert found["types"] == [EpochSampler, EpochSampler, DistributedProxySampler]
        assert found["taken as it is"]
    both = list(zip(first["indices"], second["indices"], strict=True))
    shuffled, left_out, unshuffled, taken, shared, batched, stream = both
    assert sorted(shuffled[0] + shuffled[1]) == list(range(SIZE))
    assert shuffled[0] != sorted(shuffled[0]) or shuffled[1] != sorted(shuffled[1])
    assert left_out == unshuffled == taken == (list(range(0, SIZE, 2)), list(range(1, SIZE, 2)))
    assert sorted(shared[0] + shared[1]) == [1, 3, 5, 7]
    assert batched == ([0, 2, 4, 5, 7, 9, 10], [1, 3, 6, 8, 11])
    assert stream == ([0, 1, 2, 3], [4, 5, 6, 7])
    for found in (first, second):
        (complaint,) = found["complaints"]
        assert "pass shuffle=True, or shuffle=False" in complaint


def _global_random_state(_: int) -> bool:
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    loaders = [
        idist.auto_dataloader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator()),
        idist.auto_dataloader(
            Numbers(), batch_size=4, generator=torch.Generator(), sampler=SubsetRandomSampler([1, 2])
        ),
    ]
    for (
        loader
    ) in loaders:  # with a generator of its own, because torch's DataLoader draws a seed for its workers
        indices(loader)
        indices(loader)
    return torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_the_samplers_do_not_touch_the_global_random_state() -> None:
    assert on_ranks(_global_random_state) == [True, True]


# --- auto_dataloader: epochs -------------------------------------------------------------------------


def _epochs(_: int, num_workers: int, persistent: bool, own_sampler: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 2 * num_workers,
        "persistent_workers": persistent,
    }
    if num_workers:  # fork: else every pass of the loader waits for torch to be imported in its workers
        kwargs["multiprocessing_context"] = "fork"
    kwargs["shuffle"] = not own_sampler
    if own_sampler:
        kwargs["sampler"] = SubsetRandomSampler(range(SIZE))
    loader = idist.auto_dataloader(Numbers(), **kwargs)
    sampler, seen = loader.sampler, [loader.sampler.epoch]
    if idist.get_rank() == 0:
        next(iter(loader))  # a preview: with workers it has emptied the sampler
        for batch in loader:
            assert len(batch) == 2
            break
    seen.append(sampler.epoch)
    passes = [indices(loader)]
    seen.append(sampler.epoch)
    passes.append(indices(loader))
    seen.append(sampler.epoch)
    sampler.set_epoch(0)
    passes += [indices(loader), indices(loader)]
    seen.append(sampler.epoch)
    return {"passes": passes, "epochs": seen}


@pytest.mark.parametrize(
    ("num_workers", "persistent", "own_sampler"),
    [(0, False, False), (2, False, False), (2, True, False), (0, False, True)],
    ids=["no-workers", "workers", "persistent-workers", "own-sampler"],
)
def test_a_pass_over_the_loader_is_an_epoch_and_a_preview_is_not(
    num_workers: int, persistent: bool, own_sampler: bool
) -> None:
    first, second = on_ranks(_epochs, num_workers, persistent, own_sampler)
    for found in (first, second):
        assert found["epochs"] == [0, 0, 1, 2, 0]
        passes = found["passes"]
        assert passes[0] != passes[1]
        assert passes[0] == passes[2] == passes[3]  # epoch 0 again, and it stays
    for one, other in zip(first["passes"], second["passes"], strict=True):
        assert sorted(one + other) == list(range(SIZE))


def _break_after_the_last_batch(_: int) -> int:
    loader = idist.auto_dataloader(Numbers(), batch_size=4)
    for _batch, _step in zip(loader, range(2), strict=False):
        pass
    return int(loader.sampler.epoch)


def test_a_pass_that_was_broken_off_is_no_epoch() -> None:
    assert on_ranks(_break_after_the_last_batch) == [0, 0]


# --- to_device and unwrap_model ------------------------------------------------------------------------


class Sample(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    more: Any = None


class Movable(UserDict[str, Any]):
    """As a tokenizer's batch: no dict, but with a method to move it."""

    moved_to: Any = None

    def to(self, device: torch.device) -> Movable:
        new = Movable(self)
        new.moved_to = device
        return new


class Elsewhere(SerialModel):
    """A serial context whose device is the meta device, to see what moves."""

    def device(self) -> torch.device:
        return torch.device("meta")


def test_a_batch_of_any_structure_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    move = idist.to_device  # the serial model is replaced after an import
    monkeypatch.setattr(live, "_model", Elsewhere(len(sys.modules)))
    one = torch.ones(2)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {
        "sample": Sample(one, [one, "text", None]),
        "data": Batch(one, more=Batch(one)),
        "words": Movable(a=1),
        "default": defaultdict(list, a=[one]),
        "type": Movable,
        "deque": deque([one], maxlen=3),
        "shape": one.shape,
        3: {1, 2},
    }
    moved = move(batch)
    assert list(moved) == list(batch) and type(moved["sample"]) is Sample
    found = [moved["sample"].x, moved["sample"].y[0], moved["data"].images, moved["data"].more.images]
    assert all(tensor.is_meta for tensor in [*found, moved["default"]["a"][0]])
    assert moved["sample"].y[1:] == ["text", None] and moved[3] == {1, 2} and moved["type"] is Movable
    assert moved["words"].moved_to == torch.device("meta") and batch["words"].moved_to is None
    assert moved["default"].default_factory is list
    assert moved["deque"][0].is_meta and moved["deque"].maxlen == 3 and type(moved["shape"]) is torch.Size
    assert move(UserDict(a=one))["a"].is_meta
    assert move(packed).data.is_meta and not move(packed).batch_sizes.is_meta
    assert not one.is_meta and not batch["data"].images.is_meta  # the batch itself is as it was


def test_what_is_there_already_is_not_copied() -> None:
    one = torch.ones(2)
    assert idist.to_device([one])[0] is one


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 1)


def _unwrapped(_: int) -> list[bool]:
    net = Net()
    ddp = idist.auto_model(net)
    wrapped = [
        ddp,
        DataParallel(net),
        torch.compile(net),
        torch.compile(ddp),
        DistributedDataParallel(torch.compile(net)),
        torch.compile(DataParallel(torch.compile(net))),
    ]
    return [type(ddp) is DistributedDataParallel, *(idist.unwrap_model(one) is net for one in wrapped)]


@pytest.mark.long
def test_the_model_inside_of_its_wrappers_in_any_order() -> None:
    for found in on_ranks(_unwrapped):
        assert all(found)
    net = Net()
    assert idist.unwrap_model(net) is net and idist.unwrap_model(idist.auto_model(net)) is net


# --- shares of a stream ----------------------------------------------------------------------------------


class Counting(IterableDataset[int]):
    def __init__(self, size: int, has_length: bool) -> None:
        self.size = size
        self.has_length = has_length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError("no length")
        return self.size


def _stream(_: int, size: int, num_workers: int) -> list[int]:
    loader = idist.auto_dataloader(
        Counting(size, True), batch_size=2, shard=True, num_workers=num_workers * idist.get_world_size()
    )
    assert loader.num_workers == num_workers
    batches = [batch.tolist() for batch in loader]
    assert len(loader) == len(batches)
    return [number for batch in batches for number in batch]


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stream_is_shared_out_among_ranks_and_workers(num_workers: int) -> None:
    for size in (0, 1, 11):
        shares = on_ranks(_stream, size, num_workers)
        assert sorted(shares[0] + shares[1]) == list(range(size))
        assert {number % 2 for number in shares[0]} <= {0}  # every other item of each batch of two


def test_a_stream_without_a_length_has_none() -> None:
    loader = idist.auto_dataloader(Counting(3, False), shard=True)
    assert list(loader) == [0, 1, 2]
    with pytest.raises(TypeError, match="no length"):
        len(loader)
