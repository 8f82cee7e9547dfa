"""When gradients are synchronised, on every model, against one process that has all the data.

Where they are averaged differs, so what is compared is what a step makes of them: the weights after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.optim import SGD, Optimizer

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError, DDPSyncStrategy, RankFailedError
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises

WIDTH = 3
STRATEGIES = [strategy.value for strategy in DDPSyncStrategy]


class Broken(Exception):
    """What the failing rank raises."""


def drawn(model: Module, scale: float = 1.0) -> Module:
    """``model`` in double precision, with parameters that are the same in every process."""
    generator = torch.Generator().manual_seed(5)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return model


class Branches(Module):
    """Uses ``extra`` where it is told to, and ``never`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.extra, self.never = (Linear(WIDTH, WIDTH) for _ in range(3))
        drawn(self, scale=1 / 3)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        x = self.always(x).tanh()
        return (self.extra(x) if use_extra else x).pow(2).sum(1)


Sample = tuple[Tensor, bool]  # what the model is called with


def samples(number: int, rank: int, size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def of_all_ranks(use_extra: Callable[[int, int], bool], count: int) -> list[list[Sample]]:
    """The microbatches of each rank."""
    ranks = range(idist.get_world_size())
    return [[(samples(number, rank), use_extra(number, rank)) for number in range(count)] for rank in ranks]


def make_optimizer(parameters: Any) -> SGD:
    # A decay tells a gradient of zero from none at all; no rate to hide behind.
    return SGD(parameters, lr=1.0, weight_decay=0.1)


def adapted(**kwargs: Any) -> tuple[Module, Optimizer]:
    model = idist.auto_model(Branches(), **kwargs)
    return model, idist.auto_optim(make_optimizer(model.parameters()))


def step_of_one_process(
    losses: Callable[[Module], Tensor], max_norm: float | None = None
) -> dict[str, Tensor]:
    model = Branches()
    losses(model).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    make_optimizer(model.parameters()).step()
    return model.state_dict()


def sum_of_means(microbatches: Sequence[Sequence[Sample]]) -> Callable[[Module], Tensor]:
    """The mean over the ranks of the sums of each one's losses."""
    return lambda model: sum(model(*one).mean() for rank in microbatches for one in rank) / len(microbatches)


def assert_equal(model: Module, wanted: dict[str, Tensor]) -> None:
    found = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    for parameter in idist.unwrap_model(model).never.parameters():
        assert parameter.grad is None


def here(one: Sample) -> tuple[Tensor, bool]:
    return one[0].to(idist.device()), one[1]


def always(number: int, rank: int) -> bool:
    return True


def now_and_then(number: int, rank: int) -> bool:
    """Not in the last microbatch, and on some ranks not at all."""
    return number == rank % 2


# --- no_sync and grad_sync -----------------------------------------------------------------------------


@on_every_rank
def test_in_no_sync_gradients_are_each_rank_s_own() -> None:
    model, optimizer = adapted(find_unused_parameters=True)
    microbatches = of_all_ranks(always, 3)
    first, second, last = microbatches[idist.get_rank()]
    with idist.no_sync(model):
        model(*here(first)).mean().backward()
        own = next(model.parameters()).grad
        assert own is not None
        alone = Branches()
        alone(*first).mean().backward()
        torch.testing.assert_close(own.cpu(), next(alone.parameters()).grad)
        model(*here(second)).mean().backward()
    model(*here(last)).mean().backward()
    optimizer.step()
    assert_equal(model, step_of_one_process(sum_of_means(microbatches)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_each_strategy_where_every_microbatch_uses_the_same(strategy: str) -> None:
    model, optimizer = adapted(find_unused_parameters=True)
    for first in (0, 3):  # two steps
        microbatches = [rank[first:] for rank in of_all_ranks(always, first + 3)]
        if first == 0:
            wanted = step_of_one_process(sum_of_means(microbatches))
        for number, one in enumerate(microbatches[idist.get_rank()]):
            with idist.grad_sync(model, optimizer, number == 2, DDPSyncStrategy(strategy)):
                model(*here(one)).mean().backward()
        optimizer.step()
        if first == 0:
            assert_equal(model, wanted)
        optimizer.zero_grad()
    after = [parameter.detach().cpu() for parameter in model.parameters()]
    assert all(
        one.equal(mine) for rank in idist.all_gather(after) for one, mine in zip(rank, after, strict=True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_microbatches_and_ranks_that_use_different_parameters(strategy: str) -> None:
    """The known trap of ``no_sync``; optimizers are found by the model's parameters."""
    forced = strategy == "forced_sync"
    model, optimizer = adapted(**({} if forced else {"find_unused_parameters": True}))
    microbatches = of_all_ranks(now_and_then, 3)
    for number, one in enumerate(microbatches[idist.get_rank()]):
        with idist.grad_sync(model, None, number == 2, DDPSyncStrategy(strategy)):
            model(*here(one)).mean().backward()
    optimizer.step()
    assert_equal(model, step_of_one_process(sum_of_means(microbatches)))


@pytest.mark.parametrize("failing", [0, 1])
@on_every_rank
def test_forced_sync_tells_all_ranks_when_one_fails(failing: int) -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    model, optimizer = adapted()
    data = of_all_ranks(always, 2)[rank]

    def backward(number: int) -> None:
        with idist.grad_sync(model, optimizer, number == 1, DDPSyncStrategy.FORCED_SYNC):
            model(*here(data[number])).mean().backward()
            if rank == last and number == failing:
                raise Broken("on purpose")

    def step() -> None:
        for number in range(2):
            backward(number)

    if rank == last:
        with raises(Broken, "on purpose"):
            step()
    else:
        with raises(RankFailedError, "on purpose") as caught:
            step()
        assert caught.value.rank == last
        alone = Branches()  # no gradient was touched
        for one in data:
            alone(*one).mean().backward()
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert (parameter.grad is None) is (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad.cpu(), other.grad)
    assert idist.all_reduce(1) == idist.get_world_size()  # and nobody is out of step
    optimizer.zero_grad()
    for number in range(2):
        with idist.grad_sync(model, optimizer, number == 1, DDPSyncStrategy.FORCED_SYNC):
            model(*here(data[number])).mean().backward()
    optimizer.step()
    assert_equal(model, step_of_one_process(sum_of_means(of_all_ranks(always, 2))))


@on_every_rank
def test_forced_sync_leaves_nothing_to_the_step() -> None:
    """Of two models with one optimizer too, of which only one is given."""
    model, other = idist.auto_model(Branches()), idist.auto_model(Branches(), find_unused_parameters=True)
    optimizer = idist.auto_optim(make_optimizer([*model.parameters(), *other.parameters()]))
    one, second = of_all_ranks(always, 2)[idist.get_rank()]
    other(*here(second)).mean().backward()
    with idist.grad_sync(model, optimizer, strategy=DDPSyncStrategy.FORCED_SYNC):
        model(*here(one)).mean().backward()
    if idist.model_name() == "horovod-dist":
        optimizer.synchronize = None
    with count_collectives() as counted:
        optimizer.step()
    assert counted.count == 0
    microbatches = of_all_ranks(always, 2)
    assert_equal(model, step_of_one_process(sum_of_means([rank[:1] for rank in microbatches])))
    assert_equal(other, step_of_one_process(sum_of_means([rank[1:] for rank in microbatches])))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_buffers_stay_equal_where_the_wrapper_keeps_them_so(strategy: str) -> None:
    model = idist.auto_model(Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH)).double())
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))
    for number in range(4):
        x = samples(number, idist.get_rank(), size=4).to(idist.device()) + 9 * idist.get_rank()
        with idist.grad_sync(model, optimizer, number % 2 == 1, DDPSyncStrategy(strategy)):
            model(x).pow(3).mean().backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    evaluated = model(samples(0, 0).to(idist.device())).tolist()
    if current_model().training.averages_in_backward:
        assert idist.all_gather(evaluated) == [evaluated] * idist.get_world_size()


@on_every_rank
def test_a_backward_pass_that_was_averaged_before_one_that_is_not() -> None:
    live = current_model()
    if live.training.averages_in_backward and live.get_world_size() > 1:
        return  # torch leaves the second as each rank's own, as no_sync() says
    model, optimizer = adapted()
    microbatches = of_all_ranks(always, 2)
    first, second = microbatches[idist.get_rank()]
    model(*here(first)).mean().backward()
    with idist.no_sync(model):
        model(*here(second)).mean().backward()
    optimizer.step()
    assert_equal(model, step_of_one_process(sum_of_means(microbatches)))


# --- accumulate_gradients ----------------------------------------------------------------------------


def of_uneven_sizes() -> list[list[Sample]]:
    return [
        [(samples(number, rank, size=1 + (number + rank) % 3), True) for number in range(5)]
        for rank in range(idist.get_world_size())
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weighed", [False, True])
@on_every_rank
def test_accumulated_gradients_are_those_of_the_mean(weighed: bool, strategy: str) -> None:
    """Two steps of three and of two microbatches."""
    microbatches = of_uneven_sizes()
    model, optimizer = adapted(find_unused_parameters=True)
    weight = (lambda batch: len(batch[0])) if weighed else None
    seen = []
    batches = microbatches[idist.get_rank()]
    for batch, sync in idist.accumulate_gradients(batches, model, 3, weight, DDPSyncStrategy(strategy)):
        with sync:
            model(*here(batch)).mean().backward()
        seen.append((sync.number, sync.is_final))
        if sync.is_final:
            optimizer.step()
            if len(seen) == 3:
                assert_equal(model, step_of_one_process(_mean(microbatches, range(3), weighed)))
            before = copy.deepcopy(idist.unwrap_model(model).state_dict())
            optimizer.zero_grad()
    assert seen == [(0, False), (1, False), (2, True), (0, False), (1, True)]
    # the second step, from where the first has left the weights
    alone = Branches()
    alone.load_state_dict(step_of_one_process(_mean(microbatches, range(3), weighed)))
    _mean(microbatches, range(3, 5), weighed)(alone).backward()
    make_optimizer(alone.parameters()).step()
    after = {name: value.cpu() for name, value in before.items()}
    torch.testing.assert_close(after, alone.state_dict(), rtol=1e-9, atol=1e-12)


def _mean(microbatches: list[list[Sample]], numbers: range, weighed: bool) -> Callable[[Module], Tensor]:
    used = [rank[number] for rank in microbatches for number in numbers]

    def loss(model: Module) -> Tensor:
        losses = [model(*one) for one in used]
        return torch.cat(losses).mean() if weighed else torch.stack([one.mean() for one in losses]).mean()

    return loss


@on_every_rank
def test_weights_that_are_none() -> None:
    model, _ = adapted()
    for steps in (0, -1, 1.5, True):
        with raises(ValueError, "steps must be a positive int"):
            idist.accumulate_gradients([], model, steps)
    with raises(ValueError, "finite number >= 0"):
        next(idist.accumulate_gradients([1], model, 2, weight=lambda batch: -1))
    assert list(idist.accumulate_gradients([], model, 2)) == []
    _, sync = next(idist.accumulate_gradients([1], model, 2, weight=lambda batch: 0))
    with raises(ValueError, "are zero"), sync:
        pass


@on_every_rank
def test_ranks_that_accumulate_in_other_ways_are_refused() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    model, optimizer = adapted(find_unused_parameters=True)

    def begin(steps: int = 2, weight: Any = None, strategy: str = "single_auto_sync") -> None:
        next(idist.accumulate_gradients([1, 2], model, steps, weight, DDPSyncStrategy(strategy)))

    for of_rank_0, says in (
        ({"steps": 3}, "rank 0: steps=3, no weight; rank"),
        ({"weight": len}, "rank 0: a weight; rank"),
        ({"strategy": "forced_sync"}, "rank 0: strategy=FORCED_SYNC; rank"),
    ):
        if size > 1:
            with raises(CollectiveMismatchError, f"The first difference is: {says}"):
                begin(**of_rank_0 if rank == 0 else {})  # type: ignore[arg-type]

    # With weights a rank may have more microbatches in a step.
    microbatches = of_all_ranks(always, 2)
    microbatches[0] = microbatches[0][:1]
    for one, sync in idist.accumulate_gradients(
        microbatches[rank], model, 1 + bool(rank), weight=lambda _: 1
    ):
        with sync:
            model(*here(one)).mean().backward()
    optimizer.step()

    def loss(model: Module) -> Tensor:
        return torch.stack([model(*one).mean() for rank in microbatches for one in rank]).mean()

    assert_equal(model, step_of_one_process(loss))


@on_every_rank
def test_a_step_s_last_block_is_not_left_out() -> None:
    model, _ = adapted()
    microbatches = idist.accumulate_gradients([1, 2, 3], model, 2)
    next(microbatches)
    next(microbatches)
    with raises(RuntimeError, "was not entered"):
        next(microbatches)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_a_backward_pass_outside_of_its_block_is_refused(strategy: str) -> None:
    model, optimizer = adapted(find_unused_parameters=True)
    microbatches = of_all_ranks(always, 2)

    def gradients() -> list[Any]:
        return [None if one.grad is None else one.grad.tolist() for one in model.parameters()]

    def step(outside: int | None) -> None:
        batches = microbatches[idist.get_rank()]
        for one, sync in idist.accumulate_gradients(batches, model, 2, strategy=DDPSyncStrategy(strategy)):
            with sync:
                loss = model(*here(one)).mean()
                if sync.number != outside:
                    loss.backward()
            if sync.number == outside:
                before = gradients()
                with raises(RuntimeError, "Make both in one block"):
                    loss.backward()
                assert gradients() == before
                break

    for outside in (0, 1):
        step(outside)
        optimizer.zero_grad()
    step(None)  # nothing is left of the errors
    optimizer.step()
    assert_equal(model, step_of_one_process(_mean(microbatches, range(2), weighed=False)))


@on_every_rank
def test_a_microbatch_of_no_weight_counts_nothing() -> None:
    microbatches = of_all_ranks(always, 2)
    model, optimizer = adapted(find_unused_parameters=True)
    weights = {0: float(idist.get_rank() == 0), 1: 2.0}  # the first of rank 0 counts half, of others nothing
    numbered = list(enumerate(microbatches[idist.get_rank()]))
    for (number, one), sync in idist.accumulate_gradients(
        numbered, model, 2, weight=lambda batch: weights[batch[0]]
    ):
        with sync:
            loss = model(*here(one)).mean()
            (loss if weights[number] else loss * float("nan")).backward()  # as the mean of no samples
    optimizer.step()

    def loss(model: Module) -> Tensor:
        total = model(*microbatches[0][0]).mean() + sum(2 * model(*rank[1]).mean() for rank in microbatches)
        return total / (1 + 2 * len(microbatches))

    assert_equal(model, step_of_one_process(loss))


# --- clip_grad_norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.25, 1e9])
@on_every_rank
def test_the_norm_is_that_of_the_mean_gradient(max_norm: float) -> None:
    model, optimizer = adapted(find_unused_parameters=True)
    microbatches = of_all_ranks(always, 1)
    model(*here(microbatches[idist.get_rank()][0])).mean().backward()
    norm = idist.clip_grad_norm(model, max_norm)
    alone = Branches()
    sum_of_means(microbatches)(alone).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.testing.assert_close(norm.cpu(), wanted, rtol=1e-9, atol=1e-12)

    def refuse() -> None:
        raise AssertionError("averaged twice")

    if idist.model_name() == "horovod-dist":
        optimizer.synchronize = refuse
    with count_collectives() as counted:
        optimizer.step()
    assert counted.count == 0  # what was averaged for the norm is not averaged again
    assert_equal(model, step_of_one_process(sum_of_means(microbatches), max_norm))


@on_every_rank
def test_gradients_that_changed_after_the_clipping_are_averaged_again() -> None:
    model, optimizer = adapted(find_unused_parameters=True)
    thrown_away, microbatches = of_all_ranks(always, 1), of_all_ranks(always, 3)
    model(*here(thrown_away[idist.get_rank()][0])).mean().backward()
    idist.clip_grad_norm(model, 0.1)
    optimizer.zero_grad()  # a step that was skipped
    model(*here(microbatches[idist.get_rank()][2])).mean().backward()
    optimizer.step()
    wanted = step_of_one_process(sum_of_means([[rank[2]] for rank in microbatches]))
    assert_equal(model, wanted)


@on_every_rank
def test_clipping_after_accumulation() -> None:
    microbatches = of_uneven_sizes()
    model, optimizer = adapted()
    batches = microbatches[idist.get_rank()]
    strategy = DDPSyncStrategy.FORCED_SYNC
    for batch, sync in idist.accumulate_gradients(batches, model, 5, lambda batch: len(batch[0]), strategy):
        with sync:
            model(*here(batch)).mean().backward()
    idist.clip_grad_norm(model, 0.1)
    optimizer.step()
    assert_equal(model, step_of_one_process(_mean(microbatches, range(5), weighed=True), 0.1))


@on_every_rank
def test_the_norm_is_one_on_all_ranks_where_no_optimizer_has_some_parameters() -> None:
    model = idist.auto_model(Branches(), find_unused_parameters=True)
    inner = idist.unwrap_model(model)
    optimizer = idist.auto_optim(make_optimizer(inner.extra.parameters()))
    microbatches = of_all_ranks(always, 1)
    for _ in range(2):  # what is averaged is not averaged twice
        if inner.extra.weight.grad is None:
            model(*here(microbatches[idist.get_rank()][0])).mean().backward()
        norm = idist.clip_grad_norm(model, 1e9).item()
        assert idist.all_gather(norm) == [norm] * idist.get_world_size()
    alone = Branches()
    sum_of_means(microbatches)(alone).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
    assert norm == pytest.approx(wanted)
    optimizer.step()


@on_every_rank
def test_without_the_optimizer_that_averages_it_is_refused() -> None:
    live = current_model()
    model = idist.auto_model(Branches())
    if live.training.averages_in_backward or live.get_world_size() == 1:
        idist.clip_grad_norm(model, 1.0)
        return
    with raises(ValueError, "auto_optim"):
        idist.clip_grad_norm(model, 1.0)
    if live.training.averages_gradients:  # Horovod, whose hooks sit on the optimizer
        with raises(ValueError, "auto_optim"), idist.no_sync(model):
            pass
