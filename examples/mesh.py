"""Train a small transformer on a mesh of processes: data parallel, tensor parallel, or both.

    python examples/mesh.py                                                # one process
    python examples/mesh.py --nproc-per-node 4 --tp 2                      # 2 x 2 processes
    python examples/mesh.py --nproc-per-node 4 --tp 2 --strategy fsdp      # FSDP2 over the other two
    torchrun --nproc-per-node 4 examples/mesh.py --tp 2

Each of them prints the same losses, because each takes the same steps:

    mesh(dp=2, tp=2), strategy ddp
    epoch  1   loss 3.6498
    epoch  2   loss 3.0421
    epoch  3   loss 2.5463
    epoch  4   loss 2.1209
    epoch  5   loss 1.7455
    epoch  6   loss 1.3881
    epoch  7   loss 1.1087
    epoch  8   loss 0.8935
    epoch  9   loss 0.7112
    epoch 10   loss 0.5491

The model predicts the next number of sequences such as 19, 23, 27, 31, 3, ... (modulo 32).

``idist.mesh`` makes the mesh. ``parallelize_module``, of torch, splits the layers over the dimension ``tp``.
In the block ``with idist.mesh(...)``, ``auto_model`` averages gradients over the dimension ``dp`` (with
``--strategy fsdp`` it shards over it), and ``auto_dataloader`` shares the data between its processes.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import ignite_dist as idist

NUM_WORDS = 32
LENGTH = 8
STEPS = range(1, 9)
WIDTH = 64
HEAD_WIDTH = 16
BATCH_SIZE = 64  # sequences, over all processes


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norms[0](x)
        # Each process has some of the heads: -1 stands for as many as it has.
        heads = [
            layer(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """``(batch, 1 + LENGTH) ->`` the mean loss of all words from the third on."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words):
        places = torch.arange(LENGTH, device=words.device)
        logits = self.head(self.blocks(self.words(words[:, :-1]) + self.places(places)))
        return F.cross_entropy(logits[:, 1:].flatten(0, 1), words[:, 2:].flatten())


# The first layer of a pair has its outputs split over the processes, the second its inputs.
PLAN = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
}


def sequences():
    """All sequences, in random order."""
    pairs = torch.cartesian_prod(torch.arange(NUM_WORDS), torch.tensor(STEPS))
    start, step = pairs[torch.randperm(len(pairs))].T[..., None]
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % NUM_WORDS)


def train(local_rank, epochs, tp, strategy):
    torch.manual_seed(0)
    with idist.mesh(dp=-1, tp=tp) as mesh:
        net = parallelize_module(Transformer().to(idist.device()), mesh["tp"], PLAN)
        model = idist.auto_model(net, strategy=strategy)
        optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=3e-3))
        loader = idist.auto_dataloader(sequences(), batch_size=BATCH_SIZE, shuffle=False)
        idist.print(f"mesh(dp={mesh['dp'].size()}, tp={mesh['tp'].size()}), strategy {strategy}")
        for epoch in range(1, epochs + 1):
            total = 0.0
            for (words,) in loader:
                loss = model(idist.to_device(words))
                optimizer.zero_grad()
                loss.backward()
                idist.clip_grad_norm(model, 1.0)
                optimizer.step()
                total += loss.item()
            mean = idist.all_reduce(total / len(loader), "AVERAGE", group="dp")
            idist.print(f"epoch {epoch:2}   loss {mean:.4f}")


def main():
    parser = argparse.ArgumentParser(description="Train a small transformer on a mesh of processes.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="passes over the sequences (%(default)s)")
    add("--tp", type=int, default=1, help="number of processes that split each layer (%(default)s)")
    add("--strategy", choices=["ddp", "fsdp"], default="ddp", help="of data parallelism (%(default)s)")
    add("--nproc-per-node", type=int, help="number of processes to start on this node")
    options = parser.parse_args()
    needed = options.nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    backend = "nccl" if torch.cuda.device_count() >= needed else "gloo"
    with idist.Parallel(backend=backend, nproc_per_node=options.nproc_per_node) as parallel:
        parallel.run(train, options.epochs, options.tp, options.strategy)


if __name__ == "__main__":
    main()
