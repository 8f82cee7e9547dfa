"""``group=`` of what is not a collective of values, on every model: getters, shares, seeds, one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Linear, Module
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist import RankFailedError
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, has_join, on_every_rank, raises


class Broken(Exception):
    """What the failing rank raises."""


def _fail() -> None:
    raise Broken("on purpose")


def some_groups() -> list[list[int]]:
    last = idist.get_world_size() - 1
    return [[0], [last], sorted({0, last}), list(range(1, last + 1)) or [0], list(range(last + 1))]


# --- getters -------------------------------------------------------------------------------------------


@on_every_rank
def test_the_rank_and_the_size_in_a_group() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for ranks in some_groups():
        handle = idist.new_group(ranks)
        position = ranks.index(rank) if rank in ranks else -1
        with count_collectives() as counted:
            for group in (ranks, tuple(ranks), ranks[::-1], handle):
                assert idist.get_rank(group) == idist.get_rank(group=group) == position
            assert idist.get_world_size(ranks) == idist.get_world_size(group=ranks[::-1]) == len(ranks)
            if rank in ranks or current_model().groups.ranks_of(handle):
                assert idist.get_world_size(handle) == len(ranks)
        assert counted.count == 0
    assert idist.get_rank(idist.world_group()) == idist.get_rank(None) == rank
    assert idist.get_world_size(idist.world_group()) == idist.get_world_size(None) == world_size
    for empty in ([], idist.new_group([])):
        assert (idist.get_rank(empty), idist.get_world_size(empty)) == (-1, 0)


@on_every_rank
def test_to_ask_for_a_rank_makes_no_group() -> None:
    """A rank may then ask alone, about groups that it is outside of too."""
    groups = current_model().groups
    known = dict(groups._by_ranks)
    for ranks in some_groups():
        idist.get_rank(ranks), idist.get_world_size(ranks)
        if idist.get_rank() in ranks:
            idist.sampler_kwargs(ranks), idist.split_by_rank([1, 2, 3], ranks)
            idist.auto_dataloader([1, 2, 3], group=ranks)
        idist.one_rank_only(rank=ranks[-1], group=ranks)(lambda: None)()
    assert groups._by_ranks == known


@on_every_rank
def test_groups_that_are_none_are_refused_by_the_getters() -> None:
    world_size = idist.get_world_size()
    for wrong in ([0, 0], [world_size], [-1], [0.5], ["0"], "no such group", 3.5, object()):
        for getter in (idist.get_rank, idist.get_world_size, idist.sampler_kwargs):
            with raises(ValueError, "group"):
                getter(wrong)


@on_every_rank
def test_ranks_are_known_inside_of_join() -> None:
    if not has_join():
        return
    model = idist.auto_model(Linear(1, 1))
    handle = idist.world_group()
    with idist.uneven_inputs(model, idist.auto_optim(SGD(model.parameters(), lr=0.1))):
        assert idist.get_rank(handle) == idist.get_rank()
        assert idist.get_world_size([0]) == 1


@on_every_rank
def test_the_ranks_of_this_node_are_a_group() -> None:
    world_size = idist.get_world_size()
    everyone = list(range(world_size))
    assert idist.node_group() == everyone  # here all ranks are on one node
    with count_collectives() as counted:
        idist.node_group()
    assert counted.count == 0
    assert idist.all_reduce(1, group=idist.node_group()) == world_size
    assert idist.get_rank(idist.node_group()) == idist.get_local_rank()


# --- shares and seeds ------------------------------------------------------------------------------------


@on_every_rank
def test_shares_of_the_ranks_of_a_group() -> None:
    rank = idist.get_rank()
    for ranks in some_groups():
        if rank not in ranks:
            with raises(ValueError, f"Rank {rank} is outside the group {ranks}"):
                idist.split_by_rank([1], ranks)
            with raises(ValueError, f"Rank {rank} is outside the group {ranks}"):
                idist.sampler_kwargs(ranks)
            with raises(ValueError, "has no share"):
                idist.auto_dataloader([1], group=ranks)
            continue
        place = {"num_replicas": len(ranks), "rank": ranks.index(rank)}
        assert idist.sampler_kwargs(ranks) == idist.sampler_kwargs(group=idist.new_group(ranks)) == place
        assert idist.split_by_rank(list(range(len(ranks))), group=ranks) == [ranks.index(rank)]
    parts = idist.all_gather(idist.split_by_rank([*"abcde"], [rank]))
    assert parts == [[*"abcde"]] * idist.get_world_size()


@on_every_rank
def test_a_seed_of_a_group() -> None:
    rank = idist.get_rank()
    for ranks in some_groups():
        for group in (ranks, idist.new_group(ranks)):
            seeds = idist.all_gather(idist.shared_seed(group))
            assert all(0 <= seed < 1 << 32 for seed in seeds)
            assert {seeds[member] for member in ranks} == {seeds[ranks[0]]}
            outside = [seed for number, seed in enumerate(seeds) if number not in ranks]
            assert len({*outside, seeds[ranks[0]]}) == len(outside) + 1
    assert 0 <= idist.shared_seed([]) < 1 << 32
    assert idist.all_gather(rank) == list(range(idist.get_world_size()))


# --- one rank ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["", "with_barrier", "broadcast"])
@on_every_rank
def test_one_rank_of_a_group(option: str) -> None:
    rank = idist.get_rank()
    options = {option: True} if option else {}
    for ranks in some_groups():
        for group in (ranks, idist.new_group(ranks)):
            for chosen, one in ((0, ranks[0]), (ranks[-1], ranks[-1])):
                ran: list[int] = []
                function = idist.one_rank_only(rank=chosen, group=group, **options)(
                    lambda value, ran=ran: ran.append(rank) or f"é{value}"
                )
                has_result = rank == one or (option == "broadcast" and rank in ranks)
                assert function(7) == ("é7" if has_result else None)
                assert ran == [rank] * (rank == one)
    assert idist.one_rank_only(group=[], **options)(_fail)() is None


@on_every_rank
def test_a_tensor_of_one_rank_of_a_group() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    group = sorted({0, last})
    make = idist.one_rank_only(rank=last, broadcast=True, group=group)(
        lambda: torch.arange(400, device=idist.device())
    )
    result = make()
    assert (result.tolist() if rank in group else result) == (list(range(400)) if rank in group else None)


@on_every_rank
def test_when_the_one_rank_fails_its_group_hears_of_it() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    group = sorted({max(last - 1, 0), last})
    for options in ({"with_barrier": True}, {"broadcast": True}):
        failing = idist.one_rank_only(rank=last, group=group, **options)(_fail)
        if rank == last:
            with raises(Broken, "on purpose"):
                failing()
        elif rank in group:
            with raises(RankFailedError, "Broken: on purpose") as info:
                failing()
            assert info.value.rank == last
        else:
            assert failing() is None
    assert idist.all_reduce(1) == last + 1


@on_every_rank
def test_one_rank_of_a_group_is_first(tmp_path: Path) -> None:
    rank = idist.get_rank()
    for number, ranks in enumerate(some_groups()):
        for chosen, first in ((0, ranks[0]), (ranks[-1], ranks[-1])):
            path = tmp_path / f"made-{number}-{chosen}"
            with idist.one_rank_first(rank=chosen, group=ranks):
                if rank == first:
                    path.write_text("data")
                if rank in ranks:
                    assert path.read_text() == "data"
            idist.barrier()  # so that a file of this step is never read for one of the next
    ran = False
    with idist.one_rank_first(group=[]):
        ran = True
    assert ran


@on_every_rank
def test_when_the_first_rank_of_a_group_fails_the_others_do_not_start() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    group = sorted({max(last - 1, 0), last})
    started = False
    if rank == last or rank not in group:
        with raises(Broken, "on purpose"), idist.one_rank_first(last, group=group):
            started = True
            _fail()
    else:
        with raises(RankFailedError, "on purpose") as info, idist.one_rank_first(last, group=group):
            started = True
        assert info.value.rank == last
    assert started == (rank == last or rank not in group)
    assert idist.all_reduce(1) == last + 1


@on_every_rank
def test_a_rank_outside_of_the_group_cannot_be_the_one() -> None:
    last = idist.get_world_size() - 1
    with count_collectives() as counted:
        for wrong in (-1, last + 1, 1 if last > 1 else 5):
            for options in ({}, {"broadcast": True}, {"with_barrier": True}):
                with raises(ValueError, "rank must be an int in"):
                    idist.one_rank_only(rank=wrong, group=[last], **options)(_fail)()
            with raises(ValueError, "rank must be an int in"), idist.one_rank_first(wrong, group=[last]):
                raise AssertionError("not reached")
        with raises(ValueError, "not both"), idist.one_rank_first(local=True, group=[0]):
            raise AssertionError("not reached")
    assert counted.count == 0


@on_every_rank
def test_decisions_and_failures_of_a_group() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    group = sorted({max(last - 1, 0), last})
    assert idist.any_true(rank == last, group=group) is (rank in group)
    assert idist.all_true(rank == last, group=group) is (rank == last and len(group) == 1)
    kind: Any = Broken if rank == last else RankFailedError
    if rank in group:
        with raises(kind, "on purpose"), idist.raise_together(group=group):
            if rank == last:
                _fail()
    else:
        with idist.raise_together(group=group):
            pass
    assert idist.all_reduce(1) == last + 1


# --- clip_grad_norm ----------------------------------------------------------------------------------------


def part_of_a_model(number: int, dtype: torch.dtype = torch.float32) -> tuple[Module, Tensor]:
    """One rank's part, with gradients, and these gradients."""
    model = Linear(2, number + 1).to(idist.device(), dtype)
    gradients = []
    for position, parameter in enumerate(model.parameters()):
        gradients.append(torch.full(parameter.shape, float(3 * number + position + 1)))
        parameter.grad = gradients[-1].to(idist.device(), dtype)
    return model, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_every_rank
def test_the_norm_of_parts_of_a_model(norm_type: float) -> None:
    rank = idist.get_rank()
    for ranks in some_groups():
        members = ranks if rank in ranks else [rank]
        every = torch.cat([part_of_a_model(member)[1] for member in members])
        wanted = torch.linalg.vector_norm(every, norm_type).item()
        for max_norm in (wanted / 2, wanted * 2):
            model, own = part_of_a_model(rank)
            norm = idist.clip_grad_norm(model, max_norm, norm_type, group=ranks)
            assert norm.shape == () and norm.item() == pytest.approx(wanted, rel=1e-5)
            clipped = torch.cat([one.grad.flatten().cpu() for one in model.parameters()])  # type: ignore[union-attr]
            torch.testing.assert_close(clipped, own * min(1.0, max_norm / wanted), rtol=1e-4, atol=1e-6)


@on_every_rank
def test_parts_of_other_dtypes_and_without_gradients() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    model, _ = part_of_a_model(rank, torch.float64 if rank % 2 else torch.float32)
    if rank == last and last:
        model = Linear(1, 1).to(idist.device())
    wanted = torch.cat([part_of_a_model(member)[1] for member in range(max(last, 1))]).norm().item()
    norm = idist.clip_grad_norm(model, 1.0, group=list(range(last + 1)))
    assert norm.item() == pytest.approx(wanted, rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters()) == (rank == last and last > 0)


@on_every_rank
def test_a_norm_that_is_not_finite_on_one_rank_raises_on_every_rank() -> None:
    model, _ = part_of_a_model(idist.get_rank())
    if idist.get_rank() == 0:
        next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
    everyone = list(range(idist.get_world_size()))
    with raises(RuntimeError, "norm"):
        idist.clip_grad_norm(model, 1.0, error_if_nonfinite=True, group=everyone)
    assert idist.clip_grad_norm(model, 1.0, group=everyone).isnan()


@on_every_rank
def test_sharded_parts_of_a_model() -> None:
    """Stages of a pipeline, each sharded over two ranks (FSDP2)."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    if current_model().name != "native-dist" or world_size % 2:
        return
    mesh = init_device_mesh(idist.device().type, (world_size // 2, 2), mesh_dim_names=("stage", "shard"))
    own_stage, stages = rank // 2, list(range(rank % 2, world_size, 2))

    def stage(number: int) -> Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            return Linear(4, 2)

    def backward(model: Module, number: int) -> Module:
        model(torch.full((1, 4), number + 1.0, device=idist.device())).pow(2).sum().backward()
        return model

    whole = [
        one.grad.flatten()
        for number in range(world_size // 2)
        for one in backward(stage(number).to(idist.device()), number).parameters()
        if one.grad is not None
    ]
    wanted = torch.cat(whole).norm().item()
    model = idist.auto_model(stage(own_stage), strategy="fsdp", mesh=mesh["shard"])
    backward(model, own_stage)
    with count_collectives() as counted, raises(ValueError, "norm includes these ranks already"):
        idist.clip_grad_norm(model, 1.0, group=list(range(world_size)))
    assert counted.count == 0
    norm = idist.clip_grad_norm(model, wanted / 2, group=stages)
    assert norm.item() == pytest.approx(wanted, rel=1e-5)
    clipped = idist.clip_grad_norm(model, wanted, group=stages)
    assert clipped.item() == pytest.approx(wanted / 2, rel=1e-4)
