"""Learn to see digits without their names, then learn the names from fifty of them.

    python examples/contrastive.py                         # this process alone
    python examples/contrastive.py --nproc-per-node 2      # starts two processes
    torchrun --nproc-per-node 2 examples/contrastive.py    # joins the two that torchrun has started
    python examples/contrastive.py --backend horovod --nproc-per-node 2
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/contrastive.py --backend xla-tpu --nproc-per-node 2

The encoder is shown two distorted views of each image and learns to tell which of the whole batch belong
together (InfoNCE, https://arxiv.org/abs/1807.03748). The more images to choose from, the more there is to
learn, so each rank compares its own with those of all ranks: their embeddings are gathered with a gradient.
A test image then gets the label of the nearest among fifty labelled ones.

However it is started, it trains on the same batches and the same views: results differ by rounding only.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import ignite_dist as idist

NUM_TRAIN, NUM_TEST, NUM_LABELLED = 1437, 360, 50
BATCH_SIZE = 128  # of all processes together
TEMPERATURE = 0.1


def load_data():
    """Images ``(1, 8, 8)`` in [-1, 1] with labels in [0, 10): for training, and for the test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    train, test = train_test_split(
        range(len(labels)), train_size=NUM_TRAIN, test_size=NUM_TEST, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Encoder(nn.Sequential):
    """``(batch, 1, 8, 8) -> (batch, 32)``, of length 1.

    With GroupNorm, because BatchNorm would see only one process's share of a batch.
    """

    def __init__(self):
        super().__init__(
            *self.block(1, 16),
            *self.block(16, 32),
            nn.AvgPool2d(2),
            *self.block(32, 64),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 32),
        )

    @staticmethod
    def block(channels, out_channels):
        return nn.Conv2d(channels, out_channels, 3, padding=1), nn.GroupNorm(4, out_channels), nn.GELU()

    def forward(self, images):
        return F.normalize(super().forward(images))


# --- training ----------------------------------------------------------------------------------------


def train(local_rank, epochs):
    """What every process runs."""
    torch.set_num_threads(1)  # the net is too small to gain from more
    train_set, test_set = load_data()
    # All ranks' k-th batches make up the k-th of a single process: rank r takes every world_size-th image.
    sampler = DistributedSampler(train_set, **idist.sampler_kwargs(), drop_last=True)
    loader = idist.auto_dataloader(train_set, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    with idist.one_rank_first():  # replicas of XLA are threads, which share one random state
        torch.manual_seed(0)
        encoder = Encoder()
    model = idist.auto_model(encoder)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=3e-3))
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same from it

    untrained = accuracy(encoder, train_set, test_set)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, _ in loader:
            first, second = distorted(images, generator), distorted(images, generator)
            # One forward pass, as DistributedDataParallel wants it.
            loss = info_nce(*model(torch.cat([first, second])).chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # One number, and outside the loop: to read it is to wait for the device.
        loss = idist.all_reduce(loss.item(), "AVERAGE")
        if idist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}/{epochs}: loss {loss:.4f}")
    trained = accuracy(encoder, train_set, test_set)
    if idist.get_rank() == 0:
        print(f"without training: {untrained:.1%}")
        print(f"test accuracy: {trained:.1%}")


def distorted(images, generator):
    """This rank's images turned, sheared, stretched and shifted a little, and noisy."""
    # Drawn for the whole batch: each rank takes what a single process would draw for the rank's images.
    rank, world_size = idist.get_rank(), idist.get_world_size()
    size = len(images) * world_size
    affine = torch.eye(2, 3) + 0.2 * torch.randn(size, 2, 3, generator=generator)
    noise = 0.1 * torch.randn(size, *images.shape[1:], generator=generator)
    affine, noise = idist.to_device((affine[rank::world_size], noise[rank::world_size]))
    grid = F.affine_grid(affine, images.shape, align_corners=False)
    return F.grid_sample(idist.to_device(images), grid, padding_mode="border", align_corners=False) + noise


def info_nce(first, second):
    """The mean loss of this rank's images, two views each: ``(batch, 32), (batch, 32) -> ()``.

    Every rank's mean is over equally many, so the mean of the ranks' gradients is that of the whole batch.
    """
    everyones = idist.all_gather(torch.stack([first, second], dim=1), sync_grads=True)
    own = idist.get_rank() * len(first) + torch.arange(len(first), device=first.device)
    to_second, to_first = first @ everyones[:, 1].T, second @ everyones[:, 0].T
    return (F.cross_entropy(to_second / TEMPERATURE, own) + F.cross_entropy(to_first / TEMPERATURE, own)) / 2


# --- evaluation --------------------------------------------------------------------------------------


def accuracy(encoder, train_set, test_set):
    """The share of test images whose nearest labelled image has the same digit."""
    labelled = TensorDataset(*(tensor[:NUM_LABELLED] for tensor in train_set.tensors))
    known, labels = embed(encoder, labelled)
    asked, wanted = embed(encoder, test_set)
    nearest = (asked @ known.T).argmax(dim=1)
    return (labels[nearest] == wanted).float().mean().item()


@torch.no_grad()
def embed(encoder, dataset):
    """The embeddings of all images in the order of ``dataset``, and their labels, on every rank.

    Each image is on one rank. Ranks may have different numbers of batches, or none, so ``encoder`` is not
    what auto_model made of it, whose forward pass may wait for every rank.
    """
    loader = idist.auto_dataloader(dataset, batch_size=256, exact=True)
    found = [(encoder(idist.to_device(images)), idist.to_device(labels)) for images, labels in loader]
    own = tuple(map(torch.cat, zip(*found, strict=True))) if found else None
    return idist.gather_in_order(own, loader)


# --- command line ------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(
        description="Learn an embedding of handwritten digits from pairs of views."
    )
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="passes over the images (%(default)s)")
    add("--backend", help=f"{', '.join(idist.available_backends())} (gloo; nccl with a GPU per process)")
    add("--nproc-per-node", type=int, help="number of processes to start on this node")
    add("--nnodes", type=int, help="number of nodes (1)")
    add("--node-rank", type=int, help="number of this node, from 0")
    add("--master-addr", help="address of node 0")
    add("--master-port", type=int, help="a free port on node 0")
    where = vars(parser.parse_args())
    epochs = where.pop("epochs")

    # torchrun or horovodrun, or whatever started us, has set one of them.
    launched = "WORLD_SIZE" in os.environ or "HOROVOD_SIZE" in os.environ
    if launched and where["nproc_per_node"]:
        parser.error("--nproc-per-node starts processes, but a launcher has started this one: leave it out")
    if where["backend"] is None and (launched or where["nproc_per_node"]):
        where["backend"] = default_backend(where["nproc_per_node"])
    try:
        parallel = idist.Parallel(**where)
    except (ValueError, RuntimeError) as error:  # says what cannot be had here, and how to get it
        parser.error(str(error))
    with parallel:
        parallel.run(train, epochs)


def default_backend(nproc_per_node):
    if "HOROVOD_SIZE" in os.environ:
        return "horovod"
    needed = nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "nccl" if torch.cuda.device_count() >= needed else "gloo"


if __name__ == "__main__":
    main()
