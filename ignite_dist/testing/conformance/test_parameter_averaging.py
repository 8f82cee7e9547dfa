"""``average_parameters`` (local SGD), on every model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Parameter, Sequential
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


class Mixed(Module):
    """Parameters and buffers of several dtypes, a tied and a transposed one."""

    def __init__(self, number: float) -> None:
        super().__init__()
        number = float(number)
        self.weight = Parameter(torch.full((3, 2), number))
        self.tied = self.weight
        self.turned = Parameter(torch.full((2, 3), number).t())
        self.frozen = Parameter(torch.full((5,), number), requires_grad=False)
        self.narrow = Parameter(torch.full((2,), number, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.full((2,), number, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(int(number)))
        self.register_buffer("mask", torch.tensor([number > 1]))


def values_of(model: Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def filled(number: float) -> Mixed:
    return Mixed(number).to(idist.device())


@on_every_rank
def test_parameters_and_buffers_become_their_means() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    model = filled(rank + 1)
    kept = dict(model.named_parameters())
    idist.average_parameters(model)
    wanted = values_of(filled((world_size + 1) / 2)) | {"count": 1, "mask": [False]}  # of the first rank
    assert values_of(model) == wanted
    assert all(one is kept[name] for name, one in model.named_parameters())
    assert model.tied is model.weight or idist.device().type == "xla"  # where to() makes a new one of each
    assert all(parameter._version > 0 for parameter in kept.values()) or world_size == 1


@on_every_rank
def test_only_the_ranks_of_the_group() -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for ranks in ([last], sorted({max(last - 1, 0), last}), []):
        model = filled(rank + 1)
        idist.average_parameters(model, group=ranks)
        if rank in ranks:
            mean, first = sum(ranks) / len(ranks) + 1, ranks[0] + 1
            assert values_of(model) == values_of(filled(mean)) | {"count": first, "mask": [first > 1]}
        else:
            assert values_of(model) == values_of(filled(rank + 1))
    assert idist.all_reduce(1) == last + 1


@on_every_rank
def test_steps_on_each_rank_s_own_and_then_a_mean() -> None:
    """Two ranks that start equal: the mean of their models is one step with the mean of their gradients."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    data = torch.arange(float(8 * world_size)).view(world_size, 4, 2)

    def model_of_all() -> Module:
        model = Sequential(Linear(2, 3), Linear(3, 1)).double()
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.1 * (number + 1))
        return model.to(idist.device())

    def step(model: Module, batch: Tensor) -> None:
        optimizer = SGD(model.parameters(), lr=1e-3)
        model(batch.double().to(idist.device())).pow(2).mean().backward()
        optimizer.step()

    alone, model = model_of_all(), model_of_all()
    step(alone, data.flatten(0, 1))
    step(model, data[rank])
    idist.average_parameters(model)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@on_every_rank
def test_a_wrapped_model_is_averaged_too() -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    model = idist.auto_model(Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    idist.average_parameters(model)
    assert {value for one in model.parameters() for value in one.flatten().tolist()} == {(world_size - 1) / 2}


@on_every_rank
def test_many_small_parameters_share_a_collective() -> None:
    model = Sequential(*(Linear(4, 4) for _ in range(20)), BatchNorm1d(4)).to(idist.device())
    idist.average_parameters(model)
    with count_collectives() as counted:
        idist.average_parameters(model)
    # One compares the models, one has the parameters and running statistics, one the count of batches.
    assert counted.count <= 3


@on_every_rank
def test_different_models_are_refused_on_every_rank_and_stay_as_they_are() -> None:
    world_size = idist.get_world_size()
    if world_size == 1:
        return
    is_last = idist.get_rank() == world_size - 1
    for one, other in (
        (Linear(2, 3), Linear(3, 2)),
        (Linear(2, 3), Linear(2, 3).double()),
        (Linear(2, 3), Sequential(Linear(2, 3))),
    ):
        model = (other if is_last else one).to(idist.device())
        before = values_of(model)
        with raises(CollectiveMismatchError, "different models"):
            idist.average_parameters(model)
        assert values_of(model) == before
    with raises(CollectiveMismatchError):
        idist.all_reduce(1) if is_last else idist.average_parameters(model)
    assert idist.all_reduce(1) == world_size


@on_every_rank
def test_what_has_no_mean_is_refused_before_anything_is_sent() -> None:
    with count_collectives() as counted:
        with raises(TypeError, "average_parameters takes a model"):
            idist.average_parameters([torch.ones(1)])  # type: ignore[arg-type]
        with raises(TypeError, "meta device"):
            idist.average_parameters(Linear(2, 2, device="meta"))
        shared = Linear(2, 2)
        shared.weight = Parameter(torch.zeros(1).expand(2, 2))
        with raises(ValueError, "share memory"):
            idist.average_parameters(shared)
        with raises(ValueError, "group"):
            idist.average_parameters(Linear(1, 1), group="no such group")
    assert counted.count == 0


@pytest.mark.at_most_two_ranks
@on_every_rank
def test_sharded_parameters_are_refused_before_anything_is_sent() -> None:
    if current_model().name != "native-dist" or idist.get_world_size() == 1:  # one rank keeps it whole
        return
    model = idist.auto_model(Linear(4, 4), strategy="fsdp")
    with count_collectives() as counted, raises(TypeError, "weight is a DTensor"):
        idist.average_parameters(model)
    assert counted.count == 0
