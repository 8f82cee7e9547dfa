"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits, on one process or on many.

    python examples/digits.py                           # one process
    python examples/digits.py --nproc-per-node 2        # starts two processes
    torchrun --nproc-per-node 2 examples/digits.py      # joins torchrun's two processes
    python examples/digits.py --nproc-per-node 2 --max-restarts 3                   # survives three crashes
    torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/digits.py    # and under torchrun
    python examples/digits.py --backend horovod --nproc-per-node 2        # the same with Horovod
    horovodrun -np 2 python examples/digits.py --backend horovod
    PJRT_DEVICE=CPU python examples/digits.py --backend xla-tpu           # XLA, on the CPU
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/digits.py --backend xla-tpu --nproc-per-node 2
    mpirun -np 2 python examples/digits.py --backend mpi4py               # a third-party backend

Start two nodes like this, both on one machine. Give a port that is free on node 0. On two machines, also give
the address of node 0 as --master-addr:

    python examples/digits.py --nproc-per-node 1 --nnodes 2 --node-rank 0 --master-port 29500 &
    python examples/digits.py --nproc-per-node 1 --nnodes 2 --node-rank 1 --master-port 29500

Every launch trains on the same batches in the same order: the losses differ by rounding only.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

import ignite_dist as idist

NUM_TRAIN, NUM_TEST = 1437, 360
CHECKPOINT, PLOT = "checkpoint.pt", "digits.png"  # in --output-dir


# --- data and model ----------------------------------------------------------------------------------


def load_data():
    """The training set and the test set: images ``(1, 8, 8)`` in [-1, 1] with labels in [0, 10)."""
    # scikit-learn contains the images. Put a download under `with idist.one_rank_first(local=True):`.
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    # The split does not depend on --seed, so a resumed run never tests on its training images.
    train, test = train_test_split(
        range(len(labels)), train_size=NUM_TRAIN, test_size=NUM_TEST, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Net(nn.Sequential):
    """``(batch, 1, 8, 8) -> (batch, 10)``, the same on any number of processes.

    It uses GroupNorm, because BatchNorm would see only one process's share of a batch. It uses GELU and
    AvgPool, which are smooth: at a ReLU's zero or a MaxPool's tie a rounding error grows ten-thousandfold.
    """

    def __init__(self):
        super().__init__(
            *self.block(1, 16),
            *self.block(16, 32),
            nn.AvgPool2d(2),
            *self.block(32, 64),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 10),
        )

    @staticmethod
    def block(channels, out_channels):
        return nn.Conv2d(channels, out_channels, 3, padding=1), nn.GroupNorm(4, out_channels), nn.GELU()


# --- training ----------------------------------------------------------------------------------------


def train(local_rank, config):
    """Every process calls this function. ``idist`` knows the ranks, the device and the backend."""
    torch.set_num_threads(1)  # more threads would not make this small net faster
    rank = idist.get_rank()
    train_set, test_set = load_data()

    # Any number of processes train on the same batches: each takes its part of every batch.
    train_loader = idist.auto_dataloader(
        train_set, batch_size=config.batch_size, shuffle=True, seed=config.seed, drop_last=True
    )

    # Replicas of XLA are threads of one process, which share its random state. So rank 0 draws the weights
    # while the other ranks wait. Then auto_model copies rank 0's weights to all ranks.
    with idist.one_rank_first():
        torch.manual_seed(config.seed)
        net = Net()
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first_epoch, history = 0, []
    if continues(config):
        values = idist.load_checkpoint(config.output_dir / CHECKPOINT, **parts)
        first_epoch, history = values["epoch"], values["history"]

    for epoch in range(first_epoch, config.epochs):
        train_loader.set_epoch(epoch)
        name = f"epoch {epoch + 1:2}/{config.epochs}"
        with tqdm(total=len(train_loader), desc=name, disable=rank != 0) as progress:
            metrics = train_epoch(model, train_loader, optimizer, progress)
            metrics["test_accuracy"] = accuracy(evaluate(net, test_set))
            progress.set_postfix(metrics)
        scheduler.step()
        history.append(metrics)
        values = {"epoch": epoch + 1, "history": history, "job": job_of(config)}
        idist.save_checkpoint(config.output_dir / CHECKPOINT, **parts, **values)

    report(history, evaluate(net, test_set).cpu(), config.output_dir / PLOT)


def train_epoch(model, loader, optimizer, progress):
    """Train for one pass over the training set. Returns the metrics over the images of all ranks."""
    model.train()
    device = idist.device()
    loss_sum = torch.zeros((), device=device)
    num_correct = torch.zeros((), device=device, dtype=torch.int64)
    num_images = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # The sums are tensors, because .item() would make every step wait for the GPU.
        loss_sum += loss.detach() * len(labels)
        num_correct += (logits.argmax(dim=1) == labels).sum()
        num_images += len(labels)
        progress.update()

    # One collective for all metrics.
    totals = {"loss": loss_sum.item(), "correct": num_correct.item(), "images": num_images}
    totals = idist.all_reduce(totals)
    return {"loss": totals["loss"] / totals["images"], "train_accuracy": totals["correct"] / totals["images"]}


@torch.no_grad()
def evaluate(net, dataset):
    """Confusion matrix over ``dataset``, ``(10, 10)``: true digit by predicted digit. Call on all ranks.

    Each image is on one rank. There is no sampler, because it would repeat some images to make the shares
    equal. So ranks may have different numbers of batches, or none, and ``net`` must not be auto_model's
    result: a forward pass of the wrapped model may communicate, and then waits for every rank.
    """
    net.eval()
    device = idist.device()
    share = Subset(dataset, range(idist.get_rank(), len(dataset), idist.get_world_size()))
    confusion = torch.zeros(10 * 10, dtype=torch.int64, device=device)
    for images, labels in DataLoader(share, batch_size=128):
        predicted = net(images.to(device)).argmax(dim=1)
        confusion += torch.bincount(10 * labels.to(device) + predicted, minlength=10 * 10)
    return idist.all_reduce(confusion).view(10, 10)


def accuracy(confusion):
    return (confusion.trace() / confusion.sum()).item()


# --- checkpoint and report ---------------------------------------------------------------------------


@idist.one_rank_only(broadcast=True)
def continues(config):
    """True if this run continues from the checkpoint. Only rank 0 looks: other nodes may have other disks.

    When a rank dies, ``--max-restarts`` starts all ranks again, with the same arguments. So this job resumes
    from its own checkpoint without ``--resume``, but not from the checkpoint of an earlier job.
    """
    path, job = config.output_dir / CHECKPOINT, job_of(config)
    if config.resume or job is None or not path.exists():
        return config.resume
    return torch.load(path, weights_only=True).get("values", {}).get("job") == job


def job_of(config):
    """The launcher's id of this job, and its arguments: equal in all its attempts, different in other jobs.

    None without a launcher. torch 2.9's torchrun also gives no id without --standalone or --rdzv-id.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("IGNITE_DIST_JOB_ID") or "none"
    return None if job == "none" else f"{job} {sorted(vars(config).items())}"


@idist.one_rank_only(with_barrier=True)
def report(history, confusion, path):
    """Plot the loss curve and the confusion matrix, and print the result, on rank 0."""
    title = f"test accuracy: {accuracy(confusion):.1%}"
    figure = Figure(figsize=(11, 4.8), layout="constrained")  # not pyplot, which may need a display
    left, right = figure.subplots(1, 2, width_ratios=[6, 5])

    epochs = range(1, len(history) + 1)
    left.plot(epochs, [metrics["loss"] for metrics in history], marker="o")
    left.set(title="loss on the training set", xlabel="epoch", ylabel="cross-entropy", yscale="log")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(which="both", alpha=0.3)

    # Logarithmic colours, because one mistake among 36 images would be white on a linear scale.
    right.imshow(confusion.log1p(), cmap="Blues")
    right.set(title=f"{title} of {confusion.sum()} images", xlabel="predicted digit", ylabel="true digit")
    right.set(xticks=range(10), yticks=range(10))
    for true, predicted in confusion.nonzero().tolist():
        color = "white" if true == predicted else "black"
        right.text(predicted, true, f"{confusion[true, predicted]}", color=color, ha="center", va="center")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")
    print(title)


# --- command line ------------------------------------------------------------------------------------


def parse_arguments(launched):
    parser = argparse.ArgumentParser(
        description="Train on scikit-learn's handwritten digits, on one process or on many."
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=5, help="total, with epochs before --resume (%(default)s)")
    add("--batch-size", type=positive_int, default=32, help="images over all processes (%(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of the first epoch (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and image order (%(default)s)")
    add("--output-dir", type=Path, default=Path("runs/digits"), help="for checkpoint and plot (%(default)s)")
    add("--resume", action="store_true", help="continue from the checkpoint in the output directory")
    add("--backend", help=f"{', '.join(idist.available_backends())} (gloo; nccl with a GPU per process)")
    add("--nproc-per-node", type=positive_int, help="number of processes to start on this node")
    add("--max-restarts", type=int, default=0, help="after failures, with --nproc-per-node (%(default)s)")
    add("--nnodes", type=positive_int, help="number of nodes (1)")
    add("--node-rank", type=int, help="number of this node, from 0")
    add("--master-addr", help="address of node 0 (127.0.0.1)")
    add("--master-port", type=int, help="a free port on node 0")
    args = parser.parse_args()

    if launched and args.nproc_per_node:
        parser.error("leave out --nproc-per-node: a launcher has started this process")
    if args.nnodes is not None and args.nnodes > 1:
        required = ("nproc_per_node", "node_rank", "master_port")
        missing = ["--" + name.replace("_", "-") for name in required if getattr(args, name) is None]
        if missing:
            parser.error(f"--nnodes {args.nnodes} needs {', '.join(missing)}")
        args.master_addr = args.master_addr or "127.0.0.1"
    if args.max_restarts and not args.nproc_per_node:
        parser.error("--max-restarts needs --nproc-per-node")
    if args.batch_size > NUM_TRAIN:
        parser.error(f"--batch-size {args.batch_size} is more than the {NUM_TRAIN} training images")
    checkpoint = args.output_dir / CHECKPOINT
    # Only rank 0 reads the checkpoint. If this is certainly rank 0's node, report a missing checkpoint early.
    if args.resume and not launched and not args.node_rank and not checkpoint.exists():
        parser.error(f"--resume: there is no {checkpoint}")
    return args


def positive_int(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {number}")
    return number


def default_backend(nproc_per_node):
    if "HOROVOD_SIZE" in os.environ:
        return "horovod"
    return "nccl" if torch.cuda.device_count() >= nproc_per_node else "gloo"


def main():
    # torchrun, horovodrun, mpirun or another launcher has set one of these variables.
    launched = any(name in os.environ for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    args = parse_arguments(launched)
    backend = args.backend
    if backend == "mpi4py":
        import mpi4py_backend  # noqa: F401  # in this file's folder; the import registers the backend
    if backend is None and (launched or args.nproc_per_node):
        backend = default_backend(args.nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    # Parallel starts processes if nproc_per_node is given, and joins a launcher's processes otherwise.
    # With backend=None, Parallel trains in this process.
    try:
        parallel = idist.Parallel(
            backend=backend,
            nproc_per_node=args.nproc_per_node,
            nnodes=args.nnodes,
            node_rank=args.node_rank,
            master_addr=args.master_addr,
            master_port=args.master_port,
            max_restarts=args.max_restarts,
        )
    except (ValueError, RuntimeError) as error:  # the message says what is missing, and how to install it
        raise SystemExit(f"digits.py: error: {error}") from None
    with parallel:
        parallel.run(train, args)


if __name__ == "__main__":
    main()
