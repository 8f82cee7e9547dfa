"""A small training run, the same under every launcher: ``main(config)``, or ``python job.py OUT [FAILING]``.

Each rank writes what it found to ``OUT/RANK.json``. The rank FAILING raises in the middle, and leaves
``OUT/failed`` to tell when.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ignite_dist as idist


def main(config: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with idist.Parallel("auto", nproc_per_node="auto") as parallel:  # as in README
            found = parallel.run(train, config)
    found["warnings"] = [str(warning.message) for warning in caught]
    Path(config["out"], f"{found['rank']}.json").write_text(json.dumps(found), encoding="utf-8")


def train(local_rank: int, config: dict[str, Any]) -> dict[str, Any]:
    environment = idist.environment()
    losses = fit(config)
    idist.barrier()
    return {
        "pid": os.getpid(),
        "launcher": environment.launcher,
        "reason": environment.reason,
        "rank": idist.get_rank(),
        "world_size": idist.get_world_size(),
        "local_rank": local_rank,
        "nproc_per_node": idist.get_nproc_per_node(),
        "node_rank": idist.get_node_rank(),
        "nnodes": idist.get_nnodes(),
        "losses": losses,
        "sum": idist.all_reduce(idist.get_rank() + 1),
        "everyone": idist.all_gather({"rank": idist.get_rank()}),
    }


def fit(config: dict[str, Any]) -> list[float]:
    """The mean loss of each batch, which has the same samples whether one rank, two or three share it."""
    with idist.one_rank_first():
        inputs = torch.linspace(-1, 1, 60).reshape(60, 1)
    loader = idist.auto_dataloader(TensorDataset(inputs, 3 * inputs + 0.5), batch_size=12, shuffle=False)
    torch.manual_seed(0)
    model = idist.auto_model(torch.nn.Linear(1, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch, (x, y) in enumerate(loader):
        if batch == 2 and idist.get_rank() == config["failing"]:
            Path(config["out"], "failed").touch()
            raise LookupError("this rank has no data")
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(idist.all_reduce(loss.item()) / idist.get_world_size())
    return losses


if __name__ == "__main__":
    out, *failing = sys.argv[1:]
    main({"out": out, "failing": int(failing[0]) if failing else None})
