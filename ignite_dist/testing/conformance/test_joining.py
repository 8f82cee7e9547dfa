"""In uneven_inputs() ranks make different numbers of steps: calls that all ranks must make raise there."""

from __future__ import annotations

import torch
from torch.nn import Linear
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import has_join, on_every_rank, raises


@on_every_rank
def test_accumulation_belongs_outside() -> None:
    """Whether it begins there or before, with a weight or without."""
    if not has_join() or idist.get_world_size() == 1:
        return
    model = idist.auto_model(Linear(2, 1))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    batches = [torch.ones(1, 2, device=idist.device())] * (1 + idist.get_rank())
    not_begun, begun_before = (idist.accumulate_gradients(batches, model, 2) for _ in range(2))
    batch, sync = next(begun_before)
    with idist.uneven_inputs(model, optimizer):
        for weight in (None, len):
            with raises(RuntimeError, "Make collectives after the block"):
                idist.accumulate_gradients(batches, model, 2, weight=weight)
        with raises(RuntimeError, "Make collectives after the block"):
            next(not_begun)
        with raises(RuntimeError, "Make collectives after the block"), sync:
            model(batch).sum().backward()
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_the_state_of_a_sharded_optimizer_is_gathered_outside() -> None:
    live = current_model()
    if live.name != "native-dist" or live.get_world_size() == 1:
        return
    model = idist.auto_model(Linear(2, 1))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1, momentum=0.9), zero=True)
    with idist.uneven_inputs(model, optimizer), raises(RuntimeError, "Make collectives after the block"):
        idist.optimizer_state(optimizer)
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_options_that_differ_are_refused_on_every_rank() -> None:
    """Horovod has no options; XLA has no uneven_inputs()."""
    if current_model().name != "native-dist" or idist.get_world_size() == 1:
        return
    model = idist.auto_model(Linear(2, 1))
    rank = idist.get_rank()
    for name in ("divide_by_initial_world_size", "throw_on_early_termination"):
        with (
            raises(idist.CollectiveMismatchError, f"difference is: rank 0: {name}=True; rank"),
            idist.uneven_inputs(model, **{name: rank == 0}),
        ):
            raise AssertionError("not reached")
    assert idist.all_reduce(1) == idist.get_world_size()
