"""``group=`` of data loaders and of the gather of their results, on every model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.utils.data import IterableDataset, SequentialSampler

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.data.samplers import ExactSampler
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(13))


def data_parallel_groups() -> list[list[int]]:
    """Two groups in a world of two or four ranks, as beside two tensor-parallel ranks; else one per rank."""
    world_size = idist.get_world_size()
    num_groups = 2 if world_size % 2 == 0 else world_size
    return [list(range(first, world_size, num_groups)) for first in range(num_groups)]


def own_group(groups: list[list[int]]) -> list[int]:
    if current_model().name == "horovod-dist":  # there every rank of the world makes every group
        for ranks in groups:
            idist.new_group(ranks)
    return next(ranks for ranks in groups if idist.get_rank() in ranks)


def takes_parts_of_the_world() -> bool:
    return not current_model().transport.groups_need_all_ranks or idist.get_world_size() == 1


def loader_of(data: Any, group: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch sizes that do not divide
        return idist.auto_dataloader(data, group=group, **kwargs)


def drawn_by(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["shuffled", "in order", "sampler", "stream", "drop_last"])
@on_every_rank
def test_a_group_shares_the_data_and_other_groups_get_the_same_batches(kind: str) -> None:
    groups = data_parallel_groups()
    group = own_group(groups)
    data: Any = list(range(13))
    options: dict[str, Any] = {
        "shuffled": {"shuffle": True},
        "in order": {"shuffle": False},
        "sampler": {"sampler": SequentialSampler(data)},
        "stream": {"shard": True},
        "drop_last": {"drop_last": True},
    }[kind]
    loader = loader_of(Stream() if kind == "stream" else data, group, batch_size=2 * len(group), **options)
    passes = [drawn_by(loader), drawn_by(loader)]
    size = 2 if idist.get_world_size() > 1 else 2 * len(group)
    assert all(len(batch) == size for batch in passes[0][:-1])
    by_rank = idist.all_gather(passes)
    for position in range(len(group)):
        same = [by_rank[ranks[position]] for ranks in groups if position < len(ranks)]
        assert all(one == same[0] for one in same)
    indices = [index for rank in group for batch in by_rank[rank][0] for index in batch]
    if kind == "drop_last":
        assert len(indices) == len(set(indices))
    else:
        assert set(indices) == set(data)
    if kind == "shuffled" and idist.get_world_size() > 1:
        assert indices != sorted(indices) and passes[0] != passes[1]  # another order in each pass
    if kind in ("in order", "stream") and len(group) == 1:
        assert indices == data


@on_every_rank
def test_the_batch_size_is_that_of_the_group_and_a_small_one_is_said_aloud() -> None:
    group = own_group(data_parallel_groups())
    if len(group) == 1:
        return
    loader = idist.auto_dataloader(list(range(12)), batch_size=2 * len(group) + 1, shuffle=False, group=group)
    assert loader.batch_size == (3 if idist.get_rank() == group[0] else 2)
    with pytest.warns(UserWarning, match="smaller than the group's size"):
        idist.auto_dataloader(list(range(12)), batch_size=1, group=group)


@pytest.mark.parametrize("exact", [True, "padded"])
@pytest.mark.parametrize("shuffle", [False, True])
@on_every_rank
def test_each_group_gathers_its_own_results(shuffle: bool, exact: bool | str) -> None:
    if not takes_parts_of_the_world():
        return
    group = own_group(data_parallel_groups())
    offset = 100 * group[0]
    for size in (0, 1, 5):
        loader = loader_of(list(range(size)), group, batch_size=2, shuffle=shuffle, exact=exact)
        for given in (None, group):
            drawn = drawn_by(loader)
            values = torch.tensor([one + offset for batch in drawn for one in batch], dtype=torch.int64)
            names = [f"é{one}" for one in values.tolist()]
            gathered = idist.gather_in_order((values, names), loader, group=given)
            wanted = [one + offset for one in range(size)]
            if size:
                assert gathered[0].tolist() == wanted and gathered[1] == [f"é{one}" for one in wanted]
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_a_pass_of_some_ranks_only() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    group = list(range(max(world_size - 1, 1)))
    if not takes_parts_of_the_world():
        with raises(ValueError, "every rank takes part"):
            if rank in group:
                idist.auto_dataloader([1, 2], exact=True, group=group)
            else:
                idist.gather_in_order([1], None, group=group)
        return
    handle = idist.new_group(group)
    values: Any = ["mine"]
    if rank in group:
        loader = loader_of(list(range(5)), handle, exact=True)
        drawn = [one for batch in drawn_by(loader) for one in batch]
        assert idist.gather_in_order(drawn, loader) == list(range(5))
    else:
        with count_collectives() as counted:
            assert idist.gather_in_order(values, None, group=handle) is values
            assert idist.gather_in_order(values, None, group=group) is values
        assert counted.count == 0
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_a_sampler_of_ones_own_for_a_group() -> None:
    if not takes_parts_of_the_world():
        return
    group = own_group(data_parallel_groups())
    data: Any = list(range(7))
    sampler = ExactSampler(data, **idist.sampler_kwargs(group), shuffle=True)
    loader = torch.utils.data.DataLoader(data, sampler=sampler)
    drawn = [one for batch in drawn_by(loader) for one in batch]
    assert idist.gather_in_order(drawn, loader, group=group) == data
    if len(group) < idist.get_world_size():
        with count_collectives() as counted, raises(ValueError, "Pass the group="):
            idist.gather_in_order(drawn, loader)
        assert counted.count == 0


class Normed(Module):
    """Running statistics, which each rank has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


@on_every_rank
def test_a_pass_of_a_group_shares_buffers_inside_of_the_group_only() -> None:
    """Whatever the group that trains the model: here all ranks do."""
    if not takes_parts_of_the_world():
        return
    rank = idist.get_rank()
    group = own_group(data_parallel_groups())
    model = idist.auto_model(Normed())
    idist.unwrap_model(model).get_buffer("norm.running_mean").fill_(rank + 1.0)
    for _ in loader_of([1, 2, 3], group, exact=True):
        pass
    mean = idist.unwrap_model(model).get_buffer("norm.running_mean").tolist()
    assert mean == [group[0] + 1.0] * 2
    assert idist.all_reduce(1) == idist.get_world_size()
