"""Train, get killed, and go on with another number of processes: the losses are those of one process.

python examples/any_number.py --folder alone                        # one process, to compare
python examples/any_number.py --nproc-per-node 2 --killed-at 25     # rank 1 ends within an epoch
python examples/any_number.py --nproc-per-node 3                    # goes on at the next batch
python examples/any_number.py --compare alone                       # draws both, in any_number.svg
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ignite_dist as idist

EPOCHS, BATCH_SIZE = 3, 100  # three ranks do not divide a batch
CHECKPOINT = "run.pt"


def train(local_rank, config):
    torch.set_num_threads(1)
    idist.seed_everything(0, per_rank=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images) / 16, torch.tensor(labels))
    loader = idist.auto_dataloader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double())
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    parts = {"model": model, "optimizer": optimizer, "loader": loader}

    losses = []
    if (path := idist.latest_checkpoint(config.folder)) is not None:
        losses = idist.load_checkpoint(path, **parts)["losses"]
        idist.print(f"{idist.get_world_size()} ranks go on at step {len(losses)}")
    while loader.epoch < EPOCHS:
        for batch in loader:
            losses.append(step(model, optimizer, idist.to_device(batch)))
            idist.save_checkpoint(config.folder / CHECKPOINT, **parts, losses=losses)
            if len(losses) == config.killed_at and idist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    idist.print(f"{len(losses)} steps, last loss {losses[-1]:.6f}")


def step(model, optimizer, batch):
    """A step with the mean over the whole batch: the ranks' parts may have different sizes."""
    x, y = batch
    optimizer.zero_grad()
    num_samples = idist.all_reduce(len(y))
    # The gradients are averaged over the ranks, so each rank scales its sum for the mean over all samples.
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * idist.get_world_size() / num_samples
    loss.backward()
    optimizer.step()
    return idist.all_reduce(loss.item(), "AVERAGE")


def compare(config):
    curves = {
        str(folder): torch.load(folder / CHECKPOINT)["values"]["losses"]
        for folder in (config.compare, config.folder)
    }
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "o"), strict=True):
        axes.plot(losses, style, label=name, markersize=3)
    axes.set(xlabel="step", ylabel="loss", ylim=0)
    axes.legend()
    figure.savefig("any_number.svg")
    print(f"largest difference {max(abs(a - b) for a, b in zip(*curves.values(), strict=True)):.0e}")


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nproc-per-node", type=int, help="processes to start")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint")
    parser.add_argument("--killed-at", type=int, metavar="STEP", help="kill rank 1 after this step")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="draw the losses of two folders")
    config = parser.parse_args()
    if config.compare is not None:
        compare(config)
        return
    with idist.Parallel("auto", nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(train, config)


if __name__ == "__main__":
    main()
