"""Optimizers over shards, of ZeRO and of FSDP2: what decides by a loss or by a gradient decides alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import ignite_dist as idist

FSDP: dict[str, Any] = {"strategy": "fsdp"}


def make_model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(3, 5), Tanh(), Linear(5, 2)).double()  # 5 rows are no two halves


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return x, (rank + 1) * torch.randn(4, 2, generator=generator, dtype=torch.float64)


class Halving(SGD):
    """An optimizer that takes the loss of a closure, if there is one, into account."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1 if float(loss) < 1.5 else 0.05
        super().step()
        return loss


def go(model: Module, optimizer: Optimizer, mean_of: list[int]) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [mse_loss(model(x), y) for x, y in map(data, mean_of)]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(4)]  # type: ignore[arg-type]


def _refused(_: int, line_search: str | None) -> None:
    model = idist.auto_model(make_model())
    with pytest.raises(ValueError, match=r"LBFGS needs a closure .* zero=True shards its state"):
        idist.auto_optim(LBFGS(model.parameters(), line_search_fn=line_search), zero=True)
    sharded = idist.auto_model(make_model(), **FSDP)
    with pytest.raises(ValueError, match=r"LBFGS needs a closure .* strategy='fsdp' shards its parameters"):
        idist.auto_optim(LBFGS(sharded.parameters(), line_search_fn=line_search))
    assert idist.all_reduce(1) == 2


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_of_all_parameters_together_is_refused_over_shards(line_search: str | None) -> None:
    idist.spawn("gloo", _refused, (line_search,), nproc_per_node=2)


def test_alone_it_is_not() -> None:
    model = make_model()
    optimizer = LBFGS(model.parameters())
    assert idist.auto_optim(optimizer, zero=True) is optimizer
    go(model, optimizer, [0])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, 1),
    "plateau": ReduceLROnPlateau,
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
}


def _scheduled(_: int, kind: str) -> None:
    model = idist.auto_model(make_model())
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    assert idist.auto_optim(optimizer) is optimizer, "without zero it is the same optimizer"
    with pytest.raises(ValueError, match=r"scheduler was made for this SGD before auto_optim\(zero=True\)"):
        idist.auto_optim(optimizer, zero=True)
    del scheduler
    if kind != "plateau":  # which leaves no mark
        with pytest.raises(ValueError, match="Make the scheduler after auto_optim"):
            idist.auto_optim(optimizer, zero=True)
    sharded = idist.auto_optim(SGD(model.parameters(), lr=0.1), zero=True)
    SCHEDULERS[kind](sharded)
    if idist.get_world_size() > 1:
        assert idist.auto_optim(sharded, zero=True) is sharded, "no other optimizer is made"


@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_a_scheduler_of_the_optimizer_that_zero_replaces_is_refused(kind: str) -> None:
    idist.spawn("gloo", _scheduled, (kind,), nproc_per_node=2)
    _scheduled(0, kind)


def _closures(_: int, zero: bool, options: dict[str, Any]) -> None:
    size = idist.get_world_size()
    model = idist.auto_model(make_model(), **options)
    optimizer = idist.auto_optim(Halving(model.parameters(), lr=0.1), zero=zero)
    found = go(model, optimizer, [idist.get_rank()])
    alone = make_model()
    wanted = go(alone, Halving(alone.parameters(), lr=0.1), list(range(size)))
    assert found == pytest.approx(wanted)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(whole.detach(), other.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_a_closure_s_loss_is_the_mean(kind: str) -> None:
    """The ranks' own losses are on both sides of the bound by which the optimizer decides."""
    idist.spawn("gloo", _closures, (kind == "zero", FSDP if kind == "fsdp" else {}), nproc_per_node=2)


def _scaled(_: int, zero: bool, options: dict[str, Any]) -> list[float]:
    """One rank overflows: every rank skips the step and halves the scale.

    Under FSDP2 in the shard of the last rank alone: the others have to hear of it.
    """
    torch.manual_seed(0)
    model = idist.auto_model(Linear(3, 2).double(), **options)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=0.1), zero=zero)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [one.detach().clone() for one in model.parameters()]
    x, y = data(idist.get_rank())
    loss = mse_loss(model(x), y)
    output = model(x)[0, 1]  # of the second row, which is the shard of the last rank
    scaler.scale(loss + (output * float("inf") if idist.get_rank() == 0 else 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = [one.detach() for one in model.parameters()]
    same = all(
        torch.equal(
            getattr(one, "to_local", lambda one=one: one)(), getattr(other, "to_local", lambda o=other: o)()
        )
        for one, other in zip(before, after, strict=True)
    )
    return [float(same), scaler.get_scale()]


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp"])
def test_a_gradient_that_overflows_on_one_rank(kind: str) -> None:
    options = FSDP if kind == "fsdp" else {}
    assert idist.spawn("gloo", _scaled, (kind == "zero", options), nproc_per_node=2) == [[1.0, 4.0]] * 2


def _of_a_part(_: int) -> list[float]:
    """Each pair of ranks has a model of its own, and averages with nobody else."""
    rank = idist.get_rank()
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    pair = rank // 2
    model = idist.auto_model(make_model(), process_group=pairs[pair])
    optimizer = idist.auto_optim(Halving(model.parameters(), lr=0.1))
    found = []
    if pair == 0:  # the others make no step
        found = go(model, optimizer, [rank])
        alone = make_model()
        assert found == pytest.approx(go(alone, Halving(alone.parameters(), lr=0.1), [0, 1]))
    idist.barrier()
    return found


def test_the_loss_is_the_mean_over_the_ranks_of_the_model() -> None:
    found = idist.spawn("gloo", _of_a_part, nproc_per_node=4)
    assert found[0] == found[1] and len(found[0]) == 4
