"""Accumulate gradients over microbatches with each of the three strategies, and compare their costs.

    python examples/accumulate.py                          # one process
    python examples/accumulate.py --nproc-per-node 2       # starts two processes
    torchrun --nproc-per-node 2 examples/accumulate.py     # joins torchrun's two processes
    python examples/accumulate.py --backend horovod --nproc-per-node 2
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/accumulate.py --backend xla-tpu --nproc-per-node 2

With gloo, two processes on two busy cores print:

    strategy           find_unused_parameters   ms per step   gradient off by
    SINGLE_AUTO_SYNC   False                           82.0   2.3e-07
    SINGLE_AUTO_SYNC   True                            80.6   2.3e-07
    MULTI_AUTO_SYNC    True                           119.5   2.3e-07
    FORCED_SYNC        False                           92.7   2.3e-07

"Gradient off by" is the largest error of an element, relative to the largest element, in the first step.

The images of a step's last microbatch have no labels, so this microbatch does not use the classifier. With
SINGLE_AUTO_SYNC ``DistributedDataParallel`` averages in the backward pass of this microbatch. Without
``accumulate_gradients``, DDP would wait for the classifier's gradient, average nothing and report this only
in the next step. The block of ``accumulate_gradients`` provides the missing gradients, so the gradients are
right in each row, with ``find_unused_parameters=True`` or without.
"""

import argparse
import os
from copy import deepcopy
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ignite_dist as idist

NUM_MICROBATCHES = 4  # per step
BATCH_SIZE = 32  # images of a microbatch, over all processes
WIDTH = 512  # a third of a million parameters, so that the averaging of their gradients takes some time


SINGLE, MULTI, FORCED = idist.DDPSyncStrategy
ROWS = [(SINGLE, False), (SINGLE, True), (MULTI, True), (FORCED, False)]  # with find_unused_parameters or not


class Net(nn.Module):
    """``(batch, 64) ->`` a loss: images with labels are classified, others are reconstructed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.classifier = nn.Linear(WIDTH, 10)
        self.decoder = nn.Linear(WIDTH, 64)

    def forward(self, images, labels=None):
        features = self.body(images)
        if labels is None:
            return F.mse_loss(self.decoder(features), images)
        return F.cross_entropy(self.classifier(features), labels)


def load_data():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels))


def compare(local_rank, epochs):
    """Every process calls this function. All strategies start with the same weights and the same images."""
    torch.set_num_threads(1)  # processes that share the cores would wait for each other
    rows = [measure(*row, epochs) for row in ROWS]
    if idist.get_rank() == 0:
        print("strategy           find_unused_parameters   ms per step   gradient off by")
        for (strategy, find_unused), (seconds, distance) in zip(ROWS, rows, strict=True):
            print(f"{strategy.name:16}   {find_unused!s:22}   {1000 * seconds:>11.1f}   {distance:.1e}")


def measure(strategy, find_unused, epochs):
    """Train with ``strategy``. Returns the median seconds per step, and the error of the first gradient."""
    data_set = load_data()
    loader = idist.auto_dataloader(data_set, batch_size=BATCH_SIZE, shuffle=False, drop_last=True)
    with idist.one_rank_first():  # replicas of XLA are threads, which share one random state
        torch.manual_seed(0)
        net = Net()
    model = idist.auto_model(net, find_unused_parameters=find_unused)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = gradient_of_one_process(idist.unwrap_model(model), data_set, loader.batch_size)

    distance, ends = None, []
    for _ in range(epochs):
        for batch, sync in idist.accumulate_gradients(loader, model, NUM_MICROBATCHES, strategy=strategy):
            images, labels = idist.to_device(batch)
            with sync:
                model(images, None if sync.is_final else labels).backward()
            if not sync.is_final:
                continue
            # If optimizer.step() would average the gradients, clip_grad_norm averages them before that.
            norm = idist.clip_grad_norm(model, inf)
            if distance is None:
                distance = distance_to(expected, model)
            optimizer.step()
            optimizer.zero_grad()
            norm.item()  # waits for the device
            ends.append(perf_counter())
    return median(end - start for start, end in pairwise(ends)), distance


def gradient_of_one_process(net, data_set, batch_size):
    """Gradient of the first step's mean loss, over the images of all ranks, in double precision."""
    net = deepcopy(net).cpu().double()
    # Rank r has every world_size-th image, so all ranks' k-th batches are one process's k-th batch.
    images, labels = (tensor.split(batch_size * idist.get_world_size()) for tensor in data_set.tensors)
    for number in range(NUM_MICROBATCHES):
        is_final = number == NUM_MICROBATCHES - 1
        loss = net(images[number].double(), None if is_final else labels[number])
        (loss / NUM_MICROBATCHES).backward()
    return flat_gradient(net)


def distance_to(expected, model):
    """The largest error of an element, on any rank, relative to the largest element."""
    error = (flat_gradient(model).cpu().double() - expected).abs().max() / expected.abs().max()
    return idist.all_reduce(error.item(), "MAX")


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# --- command line ------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="Compare the three strategies of gradient accumulation.")
    add = parser.add_argument
    add("--epochs", type=int, default=2, help="passes over the images with each strategy (%(default)s)")
    add("--backend", help=f"{', '.join(idist.available_backends())} (gloo; nccl with a GPU per process)")
    add("--nproc-per-node", type=int, help="number of processes to start on this node")
    add("--nnodes", type=int, help="number of nodes (1)")
    add("--node-rank", type=int, help="number of this node, from 0")
    add("--master-addr", help="address of node 0")
    add("--master-port", type=int, help="a free port on node 0")
    options = vars(parser.parse_args())
    epochs = options.pop("epochs")

    # torchrun, horovodrun or another launcher has set one of these variables.
    launched = "WORLD_SIZE" in os.environ or "HOROVOD_SIZE" in os.environ
    if launched and options["nproc_per_node"]:
        parser.error("leave out --nproc-per-node: a launcher has started this process")
    if options["backend"] is None and (launched or options["nproc_per_node"]):
        options["backend"] = default_backend(options["nproc_per_node"])
    try:
        parallel = idist.Parallel(**options)
    except (ValueError, RuntimeError) as error:  # the message says what is missing, and how to install it
        parser.error(str(error))
    with parallel:
        parallel.run(compare, epochs)


def default_backend(nproc_per_node):
    if "HOROVOD_SIZE" in os.environ:
        return "horovod"
    needed = nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "nccl" if torch.cuda.device_count() >= needed else "gloo"


if __name__ == "__main__":
    main()
