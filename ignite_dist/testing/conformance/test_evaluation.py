"""An exact evaluation after training: every rank evaluates with the buffers of rank 0."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.testing.conformance.cases import count_collectives, has_join, on_every_rank, raises

WIDTH = 3


class Normed(Module):
    """BatchNorm, and buffers of other kinds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm, self.last = BatchNorm1d(WIDTH), Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1 + idist.get_rank()
        return self.last(self.norm(x))


def samples(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) + number


def train(model: Module, steps: int = 2) -> None:
    """Each rank sees other samples, and so has other running statistics afterwards."""
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    model.train()
    for _ in range(steps):
        model(samples(idist.get_rank()).to(idist.device())).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert_different(model)


def buffers(model: Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in idist.unwrap_model(model).named_buffers()}


def assert_different(model: Module) -> None:
    if idist.get_world_size() > 1:
        buffers_by_rank = idist.all_gather(buffers(model))
        assert any(one != buffers_by_rank[0] for one in buffers_by_rank), "the case is none"


def loader_of(data: Any, exact: bool | str = True) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch sizes that do not divide
        return idist.auto_dataloader(data, batch_size=4, exact=exact)


def begin_a_pass(size: int = 4) -> None:
    for _ in loader_of(list(range(size))):
        pass


def assert_equal_to_rank_0(model: Module, before: dict[str, Any]) -> None:
    """``before``: the buffers of this rank before the pass."""
    assert idist.all_gather(buffers(model)) == [idist.broadcast(before)] * idist.get_world_size()


@pytest.mark.parametrize("exact", [True, "padded"])
@on_every_rank
def test_predictions_are_those_of_rank_0_s_model(exact: bool | str) -> None:
    model = idist.auto_model(Normed())
    train(model)
    data = torch.cat([samples(number) for number in range(3)])[:11]
    alone = Normed()
    alone.load_state_dict(idist.broadcast(idist.model_state(model)))

    loader = loader_of(data, exact)
    with torch.no_grad():
        predicted = [idist.unwrap_model(model)(idist.to_device(x)) for x in loader]
        everything = idist.gather_in_order(torch.cat(predicted) if predicted else None, loader)
        torch.testing.assert_close(everything.cpu(), alone.eval()(data), rtol=1e-9, atol=1e-12)


@on_every_rank
def test_every_kind_of_buffer_whatever_has_changed_it() -> None:
    model = idist.auto_model(Normed())
    train(model)
    before = buffers(model)
    begin_a_pass()
    assert_equal_to_rank_0(model, before)

    with torch.no_grad():  # no step, nor anything that torch would notice
        for value in idist.unwrap_model(model).buffers():
            value.data.add_(1 + idist.get_rank())
    before = buffers(model)
    begin_a_pass(1)  # most ranks have no sample
    assert_equal_to_rank_0(model, before)


@on_every_rank
def test_all_models_that_are_trained_and_not_those_that_are_gone() -> None:
    first, second = idist.auto_model(Normed(1)), idist.auto_model(Sequential(Normed(2)))
    gone = idist.auto_model(Normed(3))
    for model in (first, second, gone):
        train(model)
    before = buffers(first), buffers(second)
    if idist.get_rank() == 0:  # on the others it goes when it goes
        del model, gone
        gc.collect()
    begin_a_pass()
    assert_equal_to_rank_0(first, before[0])
    assert_equal_to_rank_0(second, before[1])


@on_every_rank
def test_the_wrapper_is_made_once_more() -> None:
    """As after unfreezing a part: there is one model, and its buffers are sent once."""
    net = Normed()
    model = idist.auto_model(net)
    train(model)
    model = idist.auto_model(idist.unwrap_model(model))
    train(model)
    before = buffers(model)
    with count_collectives() as seen:
        begin_a_pass()
    assert seen.count == (3 if idist.get_world_size() > 1 else 0)  # with that of the loader
    assert_equal_to_rank_0(model, before)


@on_every_rank
def test_one_rank_alone_may_unwrap_and_save() -> None:
    model = idist.auto_model(Normed())
    train(model)
    if idist.get_rank() == 0:
        with count_collectives() as seen:
            copy.deepcopy(idist.unwrap_model(model).state_dict())
        assert seen.count == 0
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_buffers_that_are_each_rank_s_own_stay() -> None:
    model = idist.auto_model(Normed(), broadcast_buffers=False)
    some = Normed()
    some._ddp_params_and_buffers_to_ignore = ["seen"]
    partly = idist.auto_model(some)
    train(model)
    train(partly)
    before, partly_before = buffers(model), buffers(partly)
    begin_a_pass()
    assert buffers(model) == before
    wanted = {**idist.broadcast(partly_before), "seen": partly_before["seen"]}
    assert buffers(partly) == wanted


@on_every_rank
def test_a_rank_without_samples_may_leave_its_loop_out() -> None:
    model = idist.auto_model(Normed())
    train(model)
    before = buffers(model)
    for _ in range(2):
        loader = loader_of([10])
        batches = list(loader) if loader.sampler.num_samples else []
        drawn = torch.cat(batches) if batches else None
        assert idist.gather_in_order(drawn, loader).tolist() == [10]
        assert_equal_to_rank_0(model, before)


@on_every_rank
def test_ranks_with_different_buffers_are_told_so() -> None:
    if idist.get_world_size() == 1:
        return
    model = idist.auto_model(Normed())
    last = idist.get_world_size() - 1
    if idist.get_rank() == last:
        idist.unwrap_model(model).register_buffer("cache", torch.zeros(2, device=idist.device()))
    with raises(CollectiveMismatchError, "'cache'") as info:
        begin_a_pass()
    assert "Normed" in str(info.value) and "broadcast_buffers=False" in str(info.value)
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_ranks_with_different_numbers_of_passes_are_told_so() -> None:
    if idist.get_world_size() == 1:
        return
    model = idist.auto_model(Normed())
    loader = loader_of(list(range(8)))
    is_once_more = idist.get_rank() == 0
    with raises(CollectiveMismatchError, "pass"):
        for _ in range(1 + is_once_more):
            drawn = torch.cat(list(loader))
        idist.gather_in_order(drawn, loader)
    assert idist.all_reduce(1) == idist.get_world_size()
    del model


@on_every_rank
def test_not_where_ranks_run_out_of_data() -> None:
    model = idist.auto_model(Normed())
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    if not has_join() or idist.get_world_size() == 1:
        return
    with idist.uneven_inputs(model, optimizer), raises(RuntimeError, "Make collectives after the block"):
        begin_a_pass()
