"""Steps whose last microbatch some ranks skip, or a part of it, against one process that skips the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ReLU, Sequential
from torch.optim import Optimizer

import ignite_dist as idist
from ignite_dist import DDPSyncStrategy
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import on_every_rank
from ignite_dist.testing.conformance.test_gradients import (
    WIDTH,
    Sample,
    adapted,
    assert_equal,
    drawn,
    here,
    make_optimizer,
    of_all_ranks,
    samples,
    step_of_one_process,
)

STRATEGIES = [strategy.value for strategy in DDPSyncStrategy]
STEPS = 3

Who = Callable[[int], bool]
WHO: dict[str, Who] = {
    "one": lambda rank: rank == idist.get_world_size() - 1,
    "all but one": lambda rank: rank != idist.get_world_size() - 1,
    "all": lambda rank: True,
}


def make_model() -> Sequential:
    """Each parameter of which every forward pass uses."""
    return drawn(Sequential(Linear(WIDTH, WIDTH), ReLU(), Linear(WIDTH, 1)))  # type: ignore[return-value]


def plain() -> tuple[Module, Optimizer]:
    model = idist.auto_model(make_model())
    return model, idist.auto_optim(make_optimizer(model.parameters()))


def loss_of(model: Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def alone(skips: Callable[[int, int], bool], step: int = 0) -> dict[str, Tensor]:
    """The weights after the steps until ``step``, of which every one of ``STEPS`` microbatches counts."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    size = idist.get_world_size()
    for number in range(step + 1):
        numbers = range(number * STEPS, (number + 1) * STEPS)
        used = [samples(one, rank) for rank in range(size) for one in numbers if not skips(one, rank)]
        optimizer.zero_grad()
        if used:
            (sum(loss_of(model, x) for x in used) / (STEPS * size)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return model.state_dict()


def is_equal(model: Module, wanted: dict[str, Tensor]) -> None:
    found = {name: value.cpu() for name, value in idist.unwrap_model(model).state_dict().items()}
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["nothing", "forward only"])
@pytest.mark.parametrize("who", list(WHO))
@on_every_rank
def test_the_last_microbatch_of_a_step_is_skipped(who: str, how: str, strategy: str) -> None:
    """Three steps, because torch makes new buckets after the first and may find it out only in the next."""
    rank = idist.get_rank()
    model, optimizer = plain()

    def skips(number: int, rank: int) -> bool:
        return number % STEPS == STEPS - 1 and number != 2 * STEPS - 1 and WHO[who](rank)

    data = [samples(number, rank).to(idist.device()) for number in range(3 * STEPS)]
    for number, (x, sync) in enumerate(
        idist.accumulate_gradients(data, model, STEPS, strategy=DDPSyncStrategy(strategy))
    ):
        with sync:
            if skips(number, rank):
                if how == "forward only":
                    loss_of(model, x)
            else:
                loss_of(model, x).backward()
        if sync.is_final:
            optimizer.step()
            is_equal(model, alone(skips, number // STEPS))
            optimizer.zero_grad()
    assert idist.all_reduce(1) == idist.get_world_size()  # and nobody is out of step


@pytest.mark.parametrize("weighed", [False, True])
@on_every_rank
def test_a_rank_skips_a_whole_step(weighed: bool) -> None:
    """With weights: a step in which it has nothing to count."""
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    if last == 0:
        return
    model, optimizer = plain()
    data = [(number, samples(number, rank).to(idist.device())) for number in range(STEPS)]
    weight = (lambda batch: 0.0 if rank == last else 1.0) if weighed else None
    for (_, x), sync in idist.accumulate_gradients(data, model, STEPS, weight):
        with sync:
            if rank != last:
                loss_of(model, x).backward()
    optimizer.step()
    other = make_model()
    used = [samples(number, one) for one in range(last) for number in range(STEPS)]
    count = STEPS * (last if weighed else last + 1)
    (sum(loss_of(other, x) for x in used) / count).backward()  # type: ignore[union-attr]
    make_optimizer(other.parameters()).step()
    is_equal(model, other.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["nothing", "forward only"])
@on_every_rank
def test_unused_parameters_keep_no_gradient_where_a_rank_skips(how: str, strategy: str) -> None:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    model, optimizer = adapted(find_unused_parameters=True)
    microbatches: list[list[Sample]] = of_all_ranks(lambda number, rank: number == 0, 2)
    for number, one in enumerate(microbatches[rank]):
        with idist.grad_sync(model, optimizer, number == 1, DDPSyncStrategy(strategy)):
            if number == 0 and rank == last and last > 0:
                continue  # its first too
            if number == 1 and rank == last:
                if how == "forward only":
                    model(*here(one))
                continue
            model(*here(one)).mean().backward()
    optimizer.step()

    def losses(model: Module) -> Tensor:
        used = [one for rank in microbatches[:last] for one in rank] or microbatches[0][:1]
        return sum(model(*one).mean() for one in used) / len(microbatches)  # type: ignore[return-value]

    assert_equal(model, step_of_one_process(losses))


class Halves(Module):
    """Two layers, the first of which a forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Linear(WIDTH, WIDTH) for _ in range(2))
        drawn(self)

    def forward(self, x: Tensor, with_first: bool) -> Tensor:
        return self.second(self.first(x) if with_first else x).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", list(WHO))
@on_every_rank
def test_a_last_microbatch_leaves_parameters_out(who: str, strategy: str) -> None:
    """Without ``find_unused_parameters``: torch alone averages nothing then, and raises one step later."""
    rank, size = idist.get_rank(), idist.get_world_size()
    model, other = idist.auto_model(Halves()), Halves()
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))
    optimizer_alone = make_optimizer(other.parameters())

    def uses_first(number: int, rank: int) -> bool:
        return number % 2 == 0 or not WHO[who](rank)

    for number in range(4):
        with idist.grad_sync(model, optimizer, number % 2 == 1, DDPSyncStrategy(strategy)):
            model(samples(number, rank).to(idist.device()), uses_first(number, rank)).backward()
        for one in range(size):
            (other(samples(number, one), uses_first(number, one)) / size).backward()
        if number % 2 == 1:
            for each in (optimizer, optimizer_alone):
                each.step()
                each.zero_grad()
            is_equal(model, other.state_dict())


@pytest.mark.parametrize("how", ["nothing", "forward only"])
@on_every_rank
def test_buffers_are_those_of_rank_zero_where_a_rank_skips(how: str) -> None:
    """DDP broadcasts them in its forward pass, which a rank that skips does not call."""
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    model = idist.auto_model(Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH)).double())
    optimizer = idist.auto_optim(make_optimizer(model.parameters()))
    for step in range(4):
        x = samples(step, rank, size=4).to(idist.device()) + 9 * rank
        before = [buffer.tolist() for buffer in model.buffers()]
        with idist.grad_sync(model, optimizer):
            if rank != last or step % 2 == 0:
                model(x).pow(3).mean().backward()
            elif how == "forward only":
                model(x)
        optimizer.step()
        optimizer.zero_grad()
    values = [parameter.tolist() for parameter in model.parameters()]
    assert idist.all_gather(values) == [values] * idist.get_world_size()
    of_rank_zero = idist.broadcast(before)
    if rank == last > 0 and how == "nothing" and current_model().training.averages_in_backward:
        assert [buffer.tolist() for buffer in model.buffers()] == of_rank_zero
    assert idist.all_reduce(1) == idist.get_world_size()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", ["one", "all but one", "all"])
@on_every_rank
def test_what_reads_gradients_before_the_step_has_the_averages_where_a_rank_skips(
    who: str, strategy: str
) -> None:
    """A scaler divides them, and looks for infinite ones. XLA averages in the step."""
    rank, size = idist.get_rank(), idist.get_world_size()
    model, optimizer = plain()
    other = make_model()
    in_step = not current_model().training.averages_gradients
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def skips(number: int, rank: int) -> bool:
        return number % STEPS == STEPS - 1 and WHO[who](rank)

    data = [samples(number, rank).to(idist.device()) for number in range(2 * STEPS)]
    for number, (x, sync) in enumerate(
        idist.accumulate_gradients(data, model, STEPS, strategy=DDPSyncStrategy(strategy))
    ):
        with sync:
            if not skips(number, rank):
                loss = loss_of(model, x)
                (loss * 256.0 if in_step else scaler.scale(loss)).backward()
        if sync.is_final:
            other.load_state_dict(idist.unwrap_model(model).state_dict())
            other.zero_grad()
            for past in range(number - STEPS + 1, number + 1):
                for one in range(size):
                    if not skips(past, one):
                        (loss_of(other, samples(past, one)) / (STEPS * size)).backward()
            if in_step:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(256.0)
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
                    assert found.grad is not None
                    torch.testing.assert_close(found.grad.cpu(), wanted.grad, rtol=1e-9, atol=1e-12)
                scaler.step(optimizer)
                scaler.update()
            make_optimizer(other.parameters()).step()
            is_equal(model, other.state_dict())
            optimizer.zero_grad()
    assert idist.all_reduce(1) == size


@on_every_rank
def test_a_rank_skips_the_second_of_two_blocks_before_a_step() -> None:
    """Two losses with a block of their own each."""
    rank, size = idist.get_rank(), idist.get_world_size()
    model, optimizer = plain()
    other = make_model()
    for number in range(2):
        with idist.grad_sync(model, optimizer):
            if number == 0 or rank == 0:
                loss_of(model, samples(number, rank).to(idist.device())).backward()
        for one in range(size):
            if number == 0 or one == 0:
                (loss_of(other, samples(number, one)) / size).backward()
    optimizer.step()
    make_optimizer(other.parameters()).step()
    is_equal(model, other.state_dict())
    assert idist.all_reduce(1) == size
