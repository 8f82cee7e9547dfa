"""Optimizers and handles over process sets that change, on the real Horovod."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import ignite_dist as idist
from horovod_training import Net, data, values

pytestmark = pytest.mark.horovod


@pytest.fixture(autouse=True)
def dynamic_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


def mean_over(net: Net, *ranks: int, layers: str = "ab", number: int = 0) -> list[Tensor]:
    """The gradients of the mean of these ranks' losses at the parameters of ``net``."""
    losses = [net(data(rank, number), layers) for rank in ranks]
    return list(torch.autograd.grad(torch.stack(losses).mean(), list(net.parameters())))


def have(net: Net, wanted: list[Tensor]) -> None:
    torch.testing.assert_close([one.grad for one in net.parameters()], wanted, rtol=1e-9, atol=1e-12)


# --- handles of the same ranks ---------------------------------------------------------------------------


def remove_one(local_rank: int, removes_first: bool) -> None:
    import horovod.torch as hvd

    rank = idist.get_rank()
    one, other = idist.new_group([0, 1]), idist.new_group([0, 1])
    for group in (one, other, [0, 1]):
        assert idist.all_reduce(torch.ones(2), group=group).tolist() == [2 - rank // 2] * 2
    removed, left = (one, other) if removes_first else (other, one)
    hvd.remove_process_set(removed)
    with pytest.raises(ValueError, match=r"was removed.*\[0, 1\]"):
        idist.all_reduce(torch.ones(2), group=left)
    later = idist.new_group([0, 2])
    assert later.process_set_id is not None
    for group in (removed, left):
        with pytest.raises(ValueError, match="was removed"):  # not the ranks that have its number now
            idist.all_reduce(torch.ones(2), group=group)
    value = float(1 + rank)
    assert idist.all_reduce(torch.tensor([value]), group=later).item() == (2.0 if rank == 1 else 4.0)
    for _ in range(2):  # a list makes a new one
        assert idist.all_reduce(torch.tensor([value]), group=[0, 1]).item() == 3.0
    assert idist.all_reduce(1) == 3


@pytest.mark.parametrize("removes_first", [True, False])
def test_a_handle_whose_ranks_another_handle_has_removed(removes_first: bool) -> None:
    idist.spawn("horovod", remove_one, (removes_first,), nproc_per_node=3)


def number_of_a_removed_set(local_rank: int) -> None:
    """Horovod gives the next set the number of one that was removed."""
    import horovod.torch as hvd

    rank = idist.get_rank()
    first = hvd.add_process_set([0, 1])
    net = idist.auto_model(Net("ab"))
    old: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5), process_set=first)
    net(data(rank), "ab").backward()
    have(net, mean_over(net, *((0, 1) if rank < 2 else (2,))))
    old.step()
    old.zero_grad()
    hvd.remove_process_set(first)
    second = hvd.add_process_set([0, 2])
    if rank < 2:
        with pytest.raises(RuntimeError, match=r"\[0, 1\].*removed"):
            net(data(rank), "ab").backward()
        with pytest.raises(RuntimeError, match=r"\[0, 1\].*removed"):
            old.step()
    net = idist.auto_model(Net("ab"))
    new: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5), process_set=second)
    for number in range(2):
        new.zero_grad()
        net(data(rank, number), "ab").backward()
        have(net, mean_over(net, *((1,) if rank == 1 else (0, 2)), number=number))
        new.step()


def test_an_optimizer_over_the_number_of_a_removed_set() -> None:
    idist.spawn("horovod", number_of_a_removed_set, nproc_per_node=3)


def same_ranks_again(local_rank: int) -> None:
    import horovod.torch as hvd

    rank = idist.get_rank()
    net = idist.auto_model(Net("ab"))
    optimizers = []
    for number in range(3):
        process_set = hvd.add_process_set([0, 1])
        optimizers.append(idist.auto_optim(SGD(net.parameters(), lr=0.5), process_set=process_set))
        net(data(rank, number), "ab").backward()
        have(net, mean_over(net, *((0, 1) if rank < 2 else (2,)), number=number))
        idist.clip_grad_norm(net, 1e9)  # which asks the earlier optimizers too
        optimizers[-1].step()
        optimizers[-1].zero_grad()
        hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="was removed"):
        idist.auto_optim(SGD(net.parameters(), lr=0.5), process_set=process_set)
    assert idist.all_reduce(1) == 3


def test_a_set_that_is_removed_and_added_again() -> None:
    idist.spawn("horovod", same_ranks_again, nproc_per_node=3)


# --- optimizers of the same parameters -------------------------------------------------------------------


def replaced(local_rank: int, is_world_first: bool) -> None:
    """The old optimizer still exists, and nobody uses it."""
    import horovod.torch as hvd

    rank = idist.get_rank()
    part = hvd.add_process_set([0, 1])
    net = idist.auto_model(Net("ab"))
    sets = [{}, {"process_set": part}] if is_world_first else [{"process_set": part}, {}]
    old: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5), **sets[0])
    new: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5), **sets[1])
    mine = (0, 1, 2) if not is_world_first else (0, 1) if rank < 2 else (2,)
    for number in range(2):
        net(data(rank, number), "ab").backward()
        have(net, mean_over(net, *mine, number=number))
        idist.clip_grad_norm(net, 1e9)
        have(net, mean_over(net, *mine, number=number))
        with pytest.raises(RuntimeError, match=r"averages over the ranks.*over other ranks, \[0, 1"):
            old.step()
        with pytest.raises(RuntimeError, match=r"averages over the ranks.*over other ranks, \[0, 1"):
            old.step(lambda: None)
        with pytest.raises(RuntimeError, match=r"averages over the ranks.*over other ranks, \[0, 1"):
            old.synchronize()
        have(net, mean_over(net, *mine, number=number))
        new.step()
        new.zero_grad()
    assert idist.all_reduce(1) == 3


@pytest.mark.parametrize("is_world_first", [True, False])
def test_an_optimizer_whose_parameters_another_one_averages_over_other_ranks(is_world_first: bool) -> None:
    idist.spawn("horovod", replaced, (is_world_first,), nproc_per_node=3)


def replaced_in_turn(local_rank: int) -> None:
    """The parameters have come back to the ranks that the first optimizer was made for."""
    import horovod.torch as hvd

    rank = idist.get_rank()
    part = hvd.add_process_set([0, 1])
    net, alone = idist.auto_model(Net("ab")), Net("ab")
    sets: list[dict[str, Any]] = [{}, {"process_set": part}, {}]
    optimizers = [idist.auto_optim(SGD(net.parameters(), lr=0.5), **one) for one in sets]
    for number in range(2):
        net.zero_grad()
        net(data(rank, number), "ab").backward()
        optimizers[0].step()
        for one, gradient in zip(alone.parameters(), mean_over(alone, 0, 1, 2, number=number), strict=True):
            one.grad = gradient
        SGD(alone.parameters(), lr=0.5).step()
        torch.testing.assert_close(values(net), values(alone), rtol=1e-9, atol=1e-12)
    with pytest.raises(RuntimeError, match="other ranks"):
        optimizers[1].step()


def test_an_optimizer_whose_parameters_have_come_back_to_its_ranks() -> None:
    idist.spawn("horovod", replaced_in_turn, nproc_per_node=3)


def sums_of_another(local_rank: int) -> None:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    old: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    new: Any = idist.auto_optim(SGD(net.parameters(), lr=0.5), op=hvd.Sum)
    net(data(idist.get_rank()), "ab").backward()
    have(net, [2 * one for one in mean_over(net, 0, 1)])
    with pytest.raises(RuntimeError, match="op="):
        old.step()
    new.step()


def test_an_optimizer_whose_parameters_another_one_sums() -> None:
    idist.spawn("horovod", sums_of_another, nproc_per_node=2)


def each_its_own_order(local_rank: int) -> None:
    """One backward pass through parameters of two optimizers, in another order on each rank."""
    import horovod.torch as hvd

    rank = idist.get_rank()
    part = hvd.add_process_set([0, 1])
    one, other = idist.auto_model(Net("a")), idist.auto_model(Net("b"))
    optimizers = [
        idist.auto_optim(SGD(one.parameters(), lr=0.5)),
        idist.auto_optim(SGD(other.parameters(), lr=0.5), process_set=part),
    ]
    for number in range(2):
        nets = [(one, "a"), (other, "b")]
        losses = [net(data(rank, number), layer) for net, layer in (nets if rank == 0 else reversed(nets))]
        (losses[0] + losses[1]).backward()
        have(one, mean_over(one, 0, 1, 2, layers="a", number=number))
        have(other, mean_over(other, *((0, 1) if rank < 2 else (2,)), layers="b", number=number))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both = torch.nn.ModuleList([one, other])
    # The ranks that train together are not compared.
    for _, sync in idist.accumulate_gradients([1], both, 1 + (rank == 2)):
        with sync:
            (one(data(rank), "a") + other(data(rank), "b")).backward()
    have(one, mean_over(one, 0, 1, 2, layers="a"))
    have(other, mean_over(other, *((0, 1) if rank < 2 else (2,)), layers="b"))


def test_a_pass_through_optimizers_of_two_process_sets() -> None:
    idist.spawn("horovod", each_its_own_order, nproc_per_node=3)
