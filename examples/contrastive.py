"""Learn features of digits without labels, then classify digits with fifty labels.

    python examples/contrastive.py                         # one process
    python examples/contrastive.py --nproc-per-node 2      # starts two processes
    torchrun --nproc-per-node 2 examples/contrastive.py    # joins torchrun's two processes
    python examples/contrastive.py --backend horovod --nproc-per-node 2
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/contrastive.py --backend xla-tpu --nproc-per-node 2

The encoder gets two distorted views of each image and learns which views of the whole batch belong
together (InfoNCE, https://arxiv.org/abs/1807.03748). The encoder learns more from larger batches, so each
rank compares its own images with the images of all ranks: the embeddings are gathered with a gradient.
A test image then gets the label of the nearest of fifty labelled images.

Every launch trains on the same batches and the same views: results differ by rounding only.
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
BATCH_SIZE = 128  # images over all processes
TEMPERATURE = 0.1


def load_data():
    """The training set and the test set: images ``(1, 8, 8)`` in [-1, 1] with labels in [0, 10)."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    train, test = train_test_split(
        range(len(labels)), train_size=NUM_TRAIN, test_size=NUM_TEST, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Encoder(nn.Sequential):
    """``(batch, 1, 8, 8) -> (batch, 32)``, vectors of length 1.

    It uses GroupNorm, because BatchNorm would see only one process's share of a batch.
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
    """Every process calls this function."""
    torch.set_num_threads(1)  # more threads would not make this small net faster
    train_set, test_set = load_data()
    # Rank r takes every world_size-th image, so all ranks' k-th batches are one process's k-th batch.
    sampler = DistributedSampler(train_set, **idist.sampler_kwargs(), drop_last=True)
    loader = idist.auto_dataloader(train_set, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    with idist.one_rank_first():  # replicas of XLA are threads, which share one random state
        torch.manual_seed(0)
        encoder = Encoder()
    model = idist.auto_model(encoder)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=3e-3))
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same numbers from it

    untrained = accuracy(encoder, train_set, test_set)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, _ in loader:
            first, second = distorted(images, generator), distorted(images, generator)
            # One forward pass per backward pass, as DistributedDataParallel requires.
            loss = info_nce(*model(torch.cat([first, second])).chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # The last loss only, because item() waits for the device.
        loss = idist.all_reduce(loss.item(), "AVERAGE")
        if idist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}/{epochs}: loss {loss:.4f}")
    trained = accuracy(encoder, train_set, test_set)
    if idist.get_rank() == 0:
        print(f"without training: {untrained:.1%}")
        print(f"test accuracy: {trained:.1%}")


def distorted(images, generator):
    """This rank's images with noise, and slightly turned, sheared, stretched and shifted."""
    # Draw for the whole batch. Each rank uses the numbers that one process would draw for the same images.
    rank, world_size = idist.get_rank(), idist.get_world_size()
    size = len(images) * world_size
    affine = torch.eye(2, 3) + 0.2 * torch.randn(size, 2, 3, generator=generator)
    noise = 0.1 * torch.randn(size, *images.shape[1:], generator=generator)
    affine, noise = idist.to_device((affine[rank::world_size], noise[rank::world_size]))
    grid = F.affine_grid(affine, images.shape, align_corners=False)
    return F.grid_sample(idist.to_device(images), grid, padding_mode="border", align_corners=False) + noise


def info_nce(first, second):
    """The mean loss of this rank's images, two views each: ``(batch, 32), (batch, 32) -> ()``.

    All ranks have the same number of images, so the mean of their gradients is the whole batch's gradient.
    """
    all_views = idist.all_gather(torch.stack([first, second], dim=1), sync_grads=True)
    targets = idist.get_rank() * len(first) + torch.arange(len(first), device=first.device)
    first_logits = first @ all_views[:, 1].T / TEMPERATURE
    second_logits = second @ all_views[:, 0].T / TEMPERATURE
    return (F.cross_entropy(first_logits, targets) + F.cross_entropy(second_logits, targets)) / 2


# --- evaluation --------------------------------------------------------------------------------------


def accuracy(encoder, train_set, test_set):
    """The share of test images whose nearest labelled image has the same digit."""
    labelled = TensorDataset(*(tensor[:NUM_LABELLED] for tensor in train_set.tensors))
    labelled_features, labels = embed(encoder, labelled)
    test_features, test_labels = embed(encoder, test_set)
    nearest = (test_features @ labelled_features.T).argmax(dim=1)
    return (labels[nearest] == test_labels).float().mean().item()


@torch.no_grad()
def embed(encoder, dataset):
    """The embeddings of all images in the order of ``dataset``, and their labels, on every rank.

    Each image is on one rank. Ranks may have different numbers of batches, or none, so ``encoder`` is not
    auto_model's result: a forward pass of the wrapped model may wait for every rank.
    """
    loader = idist.auto_dataloader(dataset, batch_size=256, exact=True)
    batches = [(encoder(idist.to_device(images)), idist.to_device(labels)) for images, labels in loader]
    share = tuple(map(torch.cat, zip(*batches, strict=True))) if batches else None
    return idist.gather_in_order(share, loader)


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
        parallel.run(train, epochs)


def default_backend(nproc_per_node):
    if "HOROVOD_SIZE" in os.environ:
        return "horovod"
    needed = nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "nccl" if torch.cuda.device_count() >= needed else "gloo"


if __name__ == "__main__":
    main()
