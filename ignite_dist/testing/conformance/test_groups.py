"""Groups, on every model: a handle or a list of ranks, on every collective."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psutil
import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


def some_groups() -> list[list[int]]:
    last = idist.get_world_size() - 1
    return [[0], [last], sorted({0, last}), list(range(last + 1)), list(range(last)) or [0]]


@on_every_rank
def test_every_collective_takes_a_list_and_a_handle() -> None:
    rank = idist.get_rank()
    for ranks in some_groups():
        for group in (ranks, tuple(ranks), idist.new_group(ranks), ranks):
            inside, size = rank in ranks, len(ranks)
            tensor = torch.full((5,), rank + 1, device=idist.device())
            assert idist.all_reduce(tensor, group=group) is tensor
            assert tensor.tolist() == [sum(r + 1 for r in ranks) if inside else rank + 1] * 5
            assert idist.all_reduce(rank, "MAX", group) == (max(ranks) if inside else rank)
            gathered = idist.all_gather(torch.tensor([rank], device=idist.device()), group)
            assert gathered.tolist() == (ranks if inside else [rank])
            assert idist.all_gather(f"é{rank}", group=group) == (
                [f"é{r}" for r in ranks] if inside else f"é{rank}"
            )
            ragged = idist.all_gather_ragged(torch.full((rank,), rank, device=idist.device()), group=group)
            assert [len(one) for one in ragged] == (ranks if inside else [rank])
            shapes = [[r, 2] for r in ranks]
            shaped = idist.all_gather_tensors_with_shapes(
                torch.ones(rank, 2, device=idist.device()), shapes, group
            )
            assert [list(one.shape) for one in shaped] == (shapes if inside else [[rank, 2]])
            src = ranks[-1]
            assert idist.broadcast(rank, src=src, group=group) == (src if inside else rank)
            sent = torch.tensor([rank], device=idist.device())
            assert idist.broadcast(sent, src=src, group=group) is sent and sent.item() == (
                src if inside else rank
            )
            safe = idist.broadcast({"r": rank}, src=src, safe_mode=True, group=group)
            assert safe == {"r": src if inside else rank}
            idist.barrier(group=group)
            assert size == len(gathered) or not inside


@on_every_rank
def test_ranks_that_made_different_groups_before_do_not_wait_for_each_other() -> None:
    """And a rank outside need not call, but for the backends whose groups are everybody's call."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    pairs = [[first, first + 1] for first in range(0, world_size - 1, 2)]
    if idist.model_name() == "horovod-dist":  # there every rank of the world makes a group, once
        for pair in pairs:
            idist.new_group(pair)
    else:
        for _ in range(rank):
            idist.new_group([rank])
    for pair in pairs * 3:
        if rank not in pair and current_model().transport.groups_need_all_ranks:
            idist.all_reduce(1, group=pair)
            idist.all_gather(torch.tensor(rank, device=idist.device()), pair)
        if rank in pair:
            assert idist.all_reduce(1, group=pair) == 2
            assert idist.all_gather(torch.tensor(rank, device=idist.device()), pair).tolist() == pair
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_nobody_leaves_a_barrier_before_all_have_come(tmp_path: Path) -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for ranks in ([*range(world_size)], [0, world_size - 1] if world_size > 2 else [0]):
        for step in range(20):
            path = tmp_path / f"{len(ranks)} {step} {rank}"
            if rank in ranks:
                path.touch()
            assert idist.barrier(group=ranks if len(ranks) < world_size or step % 2 else None) is None
            if rank in ranks:
                assert all(path.with_name(f"{len(ranks)} {step} {other}").exists() for other in ranks)
    assert idist.barrier(async_op=True).wait() is None


@on_every_rank
def test_the_order_of_a_list_is_ascending() -> None:
    everyone = list(range(idist.get_world_size()))
    assert idist.all_gather(idist.get_rank(), group=everyone[::-1]) == everyone
    some = everyone[1:][::-1] or [0]
    rank = idist.get_rank()
    assert idist.all_gather(rank, group=some) == (some[::-1] if rank in some else rank)


@on_every_rank
def test_a_list_is_made_into_a_group_once() -> None:
    """10,000 calls (500 where one takes longer) leave the numbers of threads and open files as they are."""
    last = idist.get_world_size() - 1
    group = [0, last] if last else [0]
    process = psutil.Process()
    idist.all_reduce(torch.ones(1, device=idist.device()), group=group)
    before = process.num_threads(), process.num_fds()
    for _ in range(10_000 if last <= 1 and idist.backend() != "horovod" else 500):
        idist.all_reduce(torch.ones(1, device=idist.device()), group=group)
    threads, files = process.num_threads(), process.num_fds()
    others = (
        last if idist.model_name() == "xla-dist" else 0
    )  # of this process, each counting with an open file
    assert threads <= before[0] and files <= before[1] + others


@on_every_rank
def test_a_handle_is_found_again_by_its_ranks() -> None:
    ranks = [0, idist.get_world_size() - 1] if idist.get_world_size() > 2 else [0]
    handle = idist.new_group(ranks)
    assert current_model().groups.resolve(ranks).handle is handle


@on_every_rank
def test_wrong_groups() -> None:
    world_size = idist.get_world_size()
    for wrong in ([0, 0], [world_size], [-1], [0.5], ["0"], [[0]]):
        with raises(ValueError, "Ranks of a group"):
            idist.all_reduce(torch.ones(1), group=wrong)
        with raises(ValueError, "Ranks of a group"):
            idist.new_group(wrong)
    for wrong in ("world", 3.5, object()):
        with raises(ValueError, "group"):
            idist.barrier(group=wrong)
    if world_size > 1:
        with raises(ValueError, "of the group"):
            idist.broadcast("text", src=1, group=[0])
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_a_group_without_members_is_one_that_every_rank_is_outside_of() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    handles = [[], (), range(0), idist.new_group([]), idist.new_group(range(world_size, world_size))]
    if world_size == 1:
        handles.append(idist.new_group(range(1, world_size)))
    device = idist.device()
    with count_collectives() as counted:
        for group in [*handles, *handles]:
            tensor = torch.full((3,), float(rank), device=device)
            assert idist.all_reduce(tensor, group=group) is tensor and tensor.tolist() == [rank] * 3
            assert idist.all_reduce(tensor, group=group, sync_grads=True) is tensor
            assert idist.all_reduce(rank, "MAX", group) == rank
            tree = {"a": tensor, "b": 0.5}
            assert idist.all_reduce(tree, group=group) is tree
            assert idist.all_gather(tensor, group) is tensor
            assert idist.all_gather("text", group) == "text"
            assert idist.all_gather_ragged(tensor, group)[0] is tensor
            assert idist.all_gather_tensors_with_shapes(tensor, [], group)[0] is tensor
            assert idist.broadcast(tensor, group=group) is tensor and tensor.tolist() == [rank] * 3
            assert idist.broadcast(rank, world_size - 1, group=group) == rank
            if rank:
                assert idist.broadcast(None, safe_mode=True, group=group) is None
            idist.barrier(group)
            idist.barrier(group, timeout=timedelta(seconds=60))
            assert idist.any_true(rank == 0, group) is (rank == 0)
            assert idist.all_true(rank == 0, group) is (rank == 0)
            with idist.raise_together(group):
                pass
            with raises(LookupError, "mine"), idist.raise_together(group):
                raise LookupError("mine")
    assert counted.count == 0
    assert idist.all_gather(rank) == list(range(world_size))  # and the world is what it was


@on_every_rank
def test_the_options_of_a_group_without_members_are_those_of_any_other() -> None:
    if idist.model_name() == "serial":  # which takes those of any backend
        return
    if idist.model_name() == "native-dist":
        assert idist.all_reduce(1, group=idist.new_group([], timeout=timedelta(seconds=60))) == 1
    for ranks in ([0], []):
        with raises(TypeError, "no_such_option"):
            idist.new_group(ranks, no_such_option=1)
