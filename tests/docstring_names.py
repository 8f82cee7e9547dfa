"""The names that the examples of docstrings assume: each of them continues this module."""

import math  # noqa: F401
import os  # noqa: F401
import tempfile  # noqa: F401
from dataclasses import dataclass  # noqa: F401

import pytest  # noqa: F401
import torch
from torch import tensor  # noqa: F401
from torch.distributed.tensor.parallel import (  # noqa: F401
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ignite_dist as idist
from ignite_dist.testing import faults  # noqa: F401

rank, world_size = idist.get_rank(), idist.get_world_size()
criterion = torch.nn.functional.cross_entropy


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def training_step(self, batch):
        return criterion(self(batch[0]), batch[1])


# 32 batches, of two samples in all
data_set = torch.utils.data.TensorDataset(torch.arange(256.0).view(64, 4) / 256, torch.arange(64) % 4)
loader = idist.auto_dataloader(data_set, batch_size=max(2, world_size), shuffle=True)
net = Net()
model = idist.auto_model(Net())
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
batch = next(iter(loader))
first = second = batch[0]
epoch, first_epoch, num_epochs, loss = 0, 0, 2, 0.5
files = ["a.txt", "b.txt", "c.txt", "d.txt"]
config = {"batch_size": 64}
read = download = str


def step(model, batch):
    loss = criterion(model(batch[0]), batch[1])
    loss.backward()
    return loss.item()


def train_step(batch):
    optimizer.zero_grad()
    loss = step(model, batch)
    optimizer.step()
    return loss


def train_one_epoch(model, loader):
    for batch in loader:
        train_step(batch)


def train(local_rank, config):
    if config["batch_size"] > 1000:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    return 0.9


def run_epoch():
    for _ in range(4):
        idist.all_reduce(1.0)


train_step(batch)  # the model has gradients
