"""What torch's own examples show (pytorch/examples, ``distributed/``), with the calls of this package.

``tensor_parallelism``: a multilayer perceptron with tensor and with sequence parallelism, and a transformer
on a mesh of two dimensions. ``FSDP2``: a transformer from the meta device, with mixed precision, prefetching
and checkpoints. Each learns here what one process learns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW

import ignite_dist as idist

pytestmark = pytest.mark.long

STEPS = 3


def seeded(make: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def words(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, batches: Any) -> list[float]:
    """The loss of each step, averaged over the ranks, and the norms of the gradients."""
    optimizer = idist.auto_optim(AdamW(model.parameters(), lr=0.02))
    losses, norms = [], []
    for batch in batches:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(idist.clip_grad_norm(model, 1.0).item())
        optimizer.step()
        losses.append(idist.all_reduce(loss.item(), "AVERAGE"))
    return losses + norms


# --- tensor_parallelism: a perceptron ----------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))).square().mean()


def _tensor_parallel(_: int, plan: dict[str, Any], is_sequence: bool) -> list[float]:
    with idist.mesh(tp=-1) as mesh:
        model = idist.auto_model(parallelize_module(seeded(Perceptron), mesh["tp"], plan))
        size, number = idist.get_world_size(), idist.get_rank()
        batches = [data(step, 8, 6) for step in range(STEPS)]
        if is_sequence:  # each rank has a part of the sequence
            batches = [batch.chunk(size)[number] for batch in batches]
        return train(model, batches)


PERCEPTRONS: dict[str, tuple[dict[str, Any], bool]] = {
    "tensor": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, False),
    "sequence": (
        {
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        },
        True,
    ),
}


@pytest.mark.parametrize("kind", PERCEPTRONS)
def test_tensor_and_sequence_parallelism(kind: str) -> None:
    plan, is_sequence = PERCEPTRONS[kind]
    expected = train(seeded(Perceptron), [data(step, 8, 6) for step in range(STEPS)])
    for losses in idist.spawn("gloo", _tensor_parallel, (plan, is_sequence), nproc_per_node=2):
        if (
            not is_sequence
        ):  # the loss is a mean over a rank's part, and its gradients are sums over the parts
            assert losses == pytest.approx(expected, abs=1e-4)
        assert losses[0] == pytest.approx(expected[0], abs=1e-4) and losses[STEPS - 1] < losses[0]


# --- tensor_parallelism: a transformer on two dimensions ---------------------------------------------

VOCABULARY, LENGTH, WIDTH = 16, 8, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


def plan() -> dict[str, Any]:
    """Between the parts of a layer, each rank of ``tp`` has a part of the sequence."""
    whole, part = (Replicate(),), (Shard(1),)
    layer: dict[str, Any] = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        "feed_forward": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
    }
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **{f"layers.*.{name}": style for name, style in layer.items()},
    }


def _two_dimensions(rank: int, strategy: str) -> list[float]:
    with idist.mesh(dp=2, tp=2) as mesh:
        net = parallelize_module(seeded(Transformer), mesh["tp"], plan())
        options: dict[str, Any] = {"wrap": [Layer]} if strategy == "fsdp" else {}
        model = idist.auto_model(net, strategy=strategy, **options)
        return train(model, [words(step).chunk(2)[rank // 2] for step in range(STEPS)])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_transformer_on_two_dimensions(strategy: str) -> None:
    expected = train(seeded(Transformer), map(words, range(STEPS)))
    for losses in idist.spawn("gloo", _two_dimensions, (strategy,), nproc_per_node=4):
        assert losses == pytest.approx(expected, abs=1e-4)


# --- FSDP2 -------------------------------------------------------------------------------------------


def _fully_sharded(rank: int, path: Path, is_mixed: bool) -> list[float]:
    torch.manual_seed(0)
    with torch.device("meta"):
        net = Transformer()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else MixedPrecisionPolicy()
    model: Any = idist.auto_model(net, strategy="fsdp", wrap=[Layer], mp_policy=policy)
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    assert first.attention.out.weight.to_local().shape == (WIDTH // 2, WIDTH)
    optimizer = idist.auto_optim(AdamW(model.parameters(), lr=0.02))
    losses = []
    for step in range(STEPS):
        loss = model(words(step).chunk(2)[rank])
        optimizer.zero_grad()
        loss.backward()
        idist.clip_grad_norm(model, 1.0)
        optimizer.step()
        losses.append(idist.all_reduce(loss.item(), "AVERAGE"))
    saved = {"model": idist.model_state(model), "optimizer": idist.optimizer_state(optimizer)}
    if rank == 0:
        torch.save(saved, path)
    return losses


def _continued(rank: int, path: Path) -> list[float]:
    saved = torch.load(path, weights_only=True) if rank == 0 else {"model": {}, "optimizer": {}}
    with torch.device("meta"):
        net = Transformer()
    model = idist.auto_model(net, strategy="fsdp", wrap=[Layer], state=saved["model"])
    optimizer = idist.auto_optim(AdamW(model.parameters()))
    idist.load_optimizer_state(optimizer, saved["optimizer"])
    loss = model(words(STEPS).chunk(2)[rank])
    loss.backward()
    idist.clip_grad_norm(model, 1.0)
    optimizer.step()
    losses = [loss.item(), model(words(STEPS).chunk(2)[rank]).item()]
    return [idist.all_reduce(one, "AVERAGE") for one in losses]


def alone() -> Any:
    """The model as one process initialises it, from the meta device too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            net = Transformer()
        return idist.auto_model(net)


def test_a_fully_sharded_transformer(tmp_path: Path) -> None:
    expected = train(model := alone(), map(words, [*range(STEPS), STEPS]))[: STEPS + 1]
    expected.append(model(words(STEPS)).item())
    path = tmp_path / "checkpoint.pt"
    assert (
        idist.spawn("gloo", _fully_sharded, (path, False), nproc_per_node=2)
        == [pytest.approx(expected[:STEPS], abs=1e-4)] * 2
    )
    assert (
        idist.spawn("gloo", _continued, (path,), nproc_per_node=2)
        == [pytest.approx(expected[STEPS:], abs=1e-4)] * 2
    )


def test_mixed_precision(tmp_path: Path) -> None:
    expected = train(alone(), map(words, range(STEPS)))[:STEPS]
    for losses in idist.spawn("gloo", _fully_sharded, (tmp_path / "checkpoint.pt", True), nproc_per_node=2):
        assert losses == pytest.approx(expected, abs=0.1) and losses != pytest.approx(expected, abs=1e-6)
