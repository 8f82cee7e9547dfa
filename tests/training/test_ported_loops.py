"""Loops as people write them, with one import changed: they end with the parameters of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential, Tanh
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import Sampler, TensorDataset

import ignite_dist as idist
from on_ranks import on_ranks

SIZE = 48


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(SIZE, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long(), noise)


def net(*widths: int) -> Sequential:
    """With other values on each rank: those of rank 0 count."""
    generator = torch.Generator().manual_seed(sum(widths) + 100 * idist.get_rank())
    layers: list[Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [Linear(inputs, outputs).double(), Tanh()]
    model = Sequential(*layers[:-1])
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return model


def parameters(*models: Module) -> list[Any]:
    return [one.tolist() for model in models for one in idist.unwrap_model(model).parameters()]


def shuffled(**kwargs: Any) -> Any:
    idist.seed_everything(1, per_rank=False)
    return idist.auto_dataloader(data(), **{"batch_size": 12, "shuffle": True, **kwargs})


def gan(_: int) -> list[Any]:
    """Two models and two optimizers; the judge has a backward pass for each loss."""
    generator, judge = idist.auto_model(net(2, 6, 4)), idist.auto_model(net(4, 6, 1))
    of_generator = idist.auto_optim(Adam(generator.parameters(), lr=0.01))
    of_judge = idist.auto_optim(Adam(judge.parameters(), lr=0.01))
    loader = shuffled()
    for _ in range(2):
        for real, _labels, noise in loader:
            ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
            fake = generator(noise)
            of_judge.zero_grad()
            binary_cross_entropy_with_logits(judge(real), ones).backward()
            binary_cross_entropy_with_logits(judge(fake.detach()), zeros).backward()
            of_judge.step()
            of_generator.zero_grad()
            binary_cross_entropy_with_logits(judge(fake), ones).backward()
            of_generator.step()
    return parameters(generator, judge)


class Proxies(Module):
    """A metric loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = Parameter(torch.eye(2, 3, dtype=torch.float64) + idist.get_rank())
        self.temperature = Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(embedded @ self.proxies.t() * self.temperature, labels)


def metric_loss(_: int) -> list[Any]:
    embed, loss = idist.auto_model(net(4, 6, 3)), idist.auto_model(Proxies())
    optimizer = idist.auto_optim(SGD([*embed.parameters(), *loss.parameters()], lr=0.1, momentum=0.9))
    loader = shuffled()
    for _ in range(2):
        for x, labels, _noise in loader:
            optimizer.zero_grad()
            loss(embed(x), labels).backward()
            optimizer.step()
    return parameters(embed, loss)


def teacher_and_student(_: int) -> list[Any]:
    teacher = idist.auto_model(net(4, 8, 2).requires_grad_(False))
    student = idist.auto_model(net(4, 3, 2))
    optimizer = idist.auto_optim(SGD(student.parameters(), lr=0.1))
    for x, _labels, _noise in shuffled():
        optimizer.zero_grad()
        mse_loss(student(x), teacher(x)).backward()
        optimizer.step()
    return parameters(teacher, student)


class Buckets(Sampler[list[int]]):
    """Batches of samples of one length, in another order each time."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for bucket in torch.randperm(2).tolist():
            order = torch.randperm(SIZE // 2) + bucket * SIZE // 2
            yield from order.view(-1, 12).tolist()


def buckets(_: int) -> list[Any]:
    model = idist.auto_model(net(4, 5, 2))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    idist.seed_everything(1, per_rank=False)
    loader = idist.auto_dataloader(data(), batch_sampler=Buckets())
    for _ in range(3):
        for x, labels, _noise in loader:
            step(model, optimizer, x, labels)
    return parameters(model)


def step(model: Any, optimizer: Any, x: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), labels).backward()
    optimizer.step()


def steps_per_epoch(_: int) -> list[Any]:
    """Epochs of three steps, with one iterator that goes on."""
    model = idist.auto_model(net(4, 5, 2))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    loader = shuffled()

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()
    for _ in range(4):
        for _step in range(3):
            x, labels, _noise = next(batches)
            step(model, optimizer, x, labels)
    return parameters(model)


def two_losses(_: int) -> list[Any]:
    """Of one forward pass, and a regularization by another one."""
    model = idist.auto_model(net(4, 5, 2))
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1))
    for (x, labels, _noise), scale in zip(shuffled(), cycle([0.1, 0.2]), strict=False):
        optimizer.zero_grad()
        output, shifted = model(x), model(x + 0.1)
        cross_entropy(output, labels).backward(retain_graph=True)
        (scale * output.pow(2).mean()).backward()
        mse_loss(shifted, output.detach()).backward()
        optimizer.step()
    return parameters(model)


LOOPS: dict[str, Callable[[int], list[Any]]] = {
    function.__name__: function
    for function in (gan, metric_loss, teacher_and_student, buckets, steps_per_epoch, two_losses)
}


def check(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LOOPS)
def test_it_ends_with_the_parameters_of_one_process(name: str, world_size: int) -> None:
    alone = LOOPS[name](0)
    for found in on_ranks(LOOPS[name], world_size=world_size):
        check(found, alone)


@pytest.mark.horovod
@pytest.mark.parametrize("name", LOOPS)
def test_under_horovod_too(name: str) -> None:
    alone = LOOPS[name](0)
    for found in idist.spawn("horovod", LOOPS[name], nproc_per_node=2):
        check(found, alone)
