"""Models on a mesh of 2 x 2 ranks: what they learn is what one process learns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import ignite_dist as idist

WORDS, WIDTH, LENGTH, STEPS = 17, 16, 6, 4


class Block(nn.Module):
    """A layer of a transformer, with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [
            one(y).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN: dict[str, Any] = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
}


def make(seed: int = 0) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer()


def batches() -> Tensor:
    return torch.randint(WORDS, (STEPS, 8, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), (words * 3 % WORDS).flatten())


MESHES: dict[str, dict[str, int]] = {
    "dp x tp": {"dp": 2, "tp": 2},
    "fsdp x tp": {"fsdp": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ddp": {"dp": 2, "data2": 2},
}


def adapt(kind: str, net: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    if "tp" in kind:
        parallelize_module(net, mesh["tp"], PLAN)
    if kind in ("fsdp x tp", "hsdp"):
        options.update(strategy="fsdp", wrap=[Block])
    return idist.auto_model(net, mesh=mesh, **options)


def share(mesh: Any, rank: int) -> slice:
    """This rank's part of a batch of 8."""
    rows = rank // 2 if "tp" in mesh.mesh_dim_names else rank
    size = 4 if "tp" in mesh.mesh_dim_names else 2
    return slice(rows * size, (rows + 1) * size)


def whole(model: nn.Module, *, is_gradient: bool = False) -> dict[str, Tensor]:
    named = {
        name: one.grad if is_gradient else one.detach()
        for name, one in idist.unwrap_model(model).named_parameters()
    }
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in named.items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _trained(rank: int, kind: str) -> list[float]:
    mesh = idist.mesh(**MESHES[kind])
    model = adapt(kind, make(seed=rank), mesh)
    _same(whole(model), dict(make().named_parameters()))  # of the first rank
    alone = make()
    optimizer = idist.auto_optim(AdamW(model.parameters(), lr=0.01))
    lone_optimizer = AdamW(alone.parameters(), lr=0.01)
    losses = []
    for words in batches():
        for one, part, its in ((alone, words, lone_optimizer), (model, words[share(mesh, rank)], optimizer)):
            its.zero_grad()
            loss = loss_of(one, part)
            loss.backward()
        _same(whole(model, is_gradient=True), whole(alone, is_gradient=True))
        norm, lone_norm = idist.clip_grad_norm(model, 0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.testing.assert_close(norm, lone_norm)
        assert norm > 0.5
        _same(whole(model, is_gradient=True), whole(alone, is_gradient=True))
        optimizer.step()
        lone_optimizer.step()
        losses.append(idist.all_reduce(loss.item(), "AVERAGE"))
    _same(whole(model), whole(alone))
    return losses


def lone_losses() -> list[float]:
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.01)
    losses = []
    for words in batches():
        loss = loss_of(model, words)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", MESHES)
def test_it_learns_what_one_process_learns(kind: str) -> None:
    """Values, gradients, norms and losses, with ranks that began with values of their own."""
    for losses in idist.spawn("gloo", _trained, (kind,), nproc_per_node=4):
        assert losses == pytest.approx(lone_losses(), abs=1e-4)


# --- states ---


def _round_trip(kind: str, mesh: Any, rank: int) -> None:
    model = adapt(kind, make(), mesh)
    optimizer = idist.auto_optim(AdamW(model.parameters(), lr=0.01))
    alone = make()
    lone_optimizer = AdamW(alone.parameters(), lr=0.01)

    def step(number: int) -> None:
        words = batches()[number]
        for one, part, its in ((alone, words, lone_optimizer), (model, words[share(mesh, rank)], optimizer)):
            its.zero_grad()
            loss_of(one, part).backward()
            its.step()

    step(0)
    state, optimizer_state = idist.model_state(model), idist.optimizer_state(optimizer)
    if rank == 0:
        _same(state, alone.state_dict())
        moments = optimizer_state["state"].values(), lone_optimizer.state_dict()["state"].values()
        for mine, theirs in zip(*moments, strict=True):
            _same(mine, theirs)
    else:
        assert state == optimizer_state == {}
    model = adapt(kind, make(seed=5), mesh, state=state)
    _same(whole(model), dict(alone.named_parameters()))
    optimizer = idist.auto_optim(AdamW(model.parameters(), lr=1.0))
    idist.load_optimizer_state(optimizer, optimizer_state)
    step(1)
    _same(whole(model), dict(alone.named_parameters()))
    idist.load_model_state(model, make(seed=7).state_dict() if rank == 0 else None)
    _same(whole(model), dict(make(seed=7).named_parameters()))


def _round_trips(rank: int) -> str:
    for kind, sizes in MESHES.items():
        _round_trip(kind, idist.mesh(**sizes), rank)
    return "done"


@pytest.mark.long
def test_states_are_those_of_one_process() -> None:
    """Saved, loaded into another model of the kind, and trained further."""
    assert idist.spawn("gloo", _round_trips, nproc_per_node=4) == ["done"] * 4


# --- the meta device ---


def on_meta() -> Transformer:
    with torch.device("meta"):
        return Transformer()


def _from_meta(rank: int) -> list[dict[str, Any]]:
    found = []
    for kind, sizes in MESHES.items():
        torch.manual_seed(rank)
        mesh = idist.mesh(**sizes)
        model = adapt(kind, on_meta(), mesh)
        found.append({name: one.tolist() for name, one in whole(model).items()})
        loss_of(model, batches()[0][share(mesh, rank)]).backward()  # it can be trained
    return found


@pytest.mark.long
def test_shards_are_initialised_as_in_one_process() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = idist.auto_model(on_meta())
    expected = {name: one.tolist() for name, one in alone.named_parameters()}
    assert alone.blocks[0].up.weight.std() > 0.05
    for found in idist.spawn("gloo", _from_meta, nproc_per_node=4):
        assert found == [expected] * len(MESHES)


# --- accumulation ---


def _accumulated(rank: int) -> str:
    for kind, sizes in MESHES.items():
        mesh = idist.mesh(**sizes)
        model, alone = adapt(kind, make(), mesh), make()
        number = rank // 2 if "tp" in kind else rank
        parts = 2 if "tp" in kind else 4

        def microbatches(number: int) -> list[Tensor]:
            return [words[: 1 + (number + k) % 3] for k, words in enumerate(batches())]

        everything = torch.cat([one for other in range(parts) for one in microbatches(other)])
        loss_of(alone, everything).backward()
        for words, sync in idist.accumulate_gradients(microbatches(number), model, STEPS, weight=len):
            with sync:
                loss_of(model, words).backward()
        _same(whole(model, is_gradient=True), whole(alone, is_gradient=True))
    return "done"


@pytest.mark.long
def test_accumulated_gradients_are_those_of_one_process() -> None:
    assert idist.spawn("gloo", _accumulated, nproc_per_node=4) == ["done"] * 4


def _skipped(rank: int) -> str:
    """Some ranks make no backward pass in the last block, and no_sync() averages nothing."""
    mesh = idist.mesh(dp=2, tp=2)
    for strategy in idist.DDPSyncStrategy:
        model, alone = adapt("dp x tp", make(), mesh), make()
        words = batches()[0]
        for number in range(2):
            with idist.grad_sync(model, is_final_microbatch=number == 1, strategy=strategy):
                if rank >= 2 and number == 1 and strategy is not idist.DDPSyncStrategy.MULTI_AUTO_SYNC:
                    continue
                loss_of(model, words[share(mesh, rank)]).backward()
            if number == 0 and strategy is not idist.DDPSyncStrategy.MULTI_AUTO_SYNC:
                local = whole(model, is_gradient=True)["head.bias"]
                assert not torch.equal(local, idist.all_reduce(local, "AVERAGE", mesh["dp"], inplace=False))
        first, second = loss_of(alone, words[:4]), loss_of(alone, words[4:])
        passes = 2 if strategy is idist.DDPSyncStrategy.MULTI_AUTO_SYNC else 1
        (first * 2 + second * passes).div(2).backward()
        _same(whole(model, is_gradient=True), whole(alone, is_gradient=True))
    return "done"


@pytest.mark.long
def test_gradients_are_averaged_when_grad_sync_says() -> None:
    assert idist.spawn("gloo", _skipped, nproc_per_node=4) == ["done"] * 4


# --- a tensor-parallel model without a wrapper ---


def _unwrapped(rank: int) -> str:
    mesh = idist.mesh(dp=2, tp=2)
    for finds_unused in (False, True):
        net = make()
        net.head.unused = nn.Linear(2, 2)
        model = adapt("dp x tp", net, mesh, find_unused_parameters=finds_unused)
        (twin,) = copy.deepcopy([model])
        words = batches()[0][share(mesh, rank)]
        if rank < 2:  # a copy averages nothing, so no other rank is needed
            loss_of(twin, words).backward()
        loss_of(model, words).backward()
        unused = net.head.unused.weight.grad
        assert unused is None if finds_unused else not unused.any()
        before = whole(model, is_gradient=True)["head.bias"].clone()
        with pytest.raises(ZeroDivisionError):
            failing(loss_of(model, words)).backward()
        model.zero_grad()
        loss_of(model, words).backward()  # the pass that failed has left nothing behind
        _same({"": whole(model, is_gradient=True)["head.bias"]}, {"": before})
        idist.auto_model(model, mesh=mesh)  # again: the hooks of the first call are gone
        model.zero_grad()
        with idist.no_sync(model):
            loss_of(model, words).backward()
        assert not torch.equal(whole(model, is_gradient=True)["head.bias"], before)
        model.zero_grad()
        loss_of(model, words).backward()
        _same({"": whole(model, is_gradient=True)["head.bias"]}, {"": before})
    return "done"


def failing(loss: Tensor) -> Tensor:
    """``loss``, whose backward pass fails on every rank before any gradient is there."""

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    loss.register_hook(fail)
    return loss


@pytest.mark.long
def test_a_tensor_parallel_model_averages_its_own_gradients() -> None:
    assert idist.spawn("gloo", _unwrapped, nproc_per_node=4) == ["done"] * 4


def _frozen(rank: int) -> None:
    mesh = idist.mesh(dp=2, tp=2)
    torch.manual_seed(rank)
    net = parallelize_module(Transformer(), mesh["tp"], PLAN).requires_grad_(False)
    _same(whole(idist.auto_model(net, mesh=mesh)), idist.broadcast(whole(net)))


@pytest.mark.long
def test_a_frozen_model_becomes_the_same_on_all_ranks() -> None:
    idist.spawn("gloo", _frozen, nproc_per_node=4)


def _of_first_ranks(rank: int) -> list[dict[str, Any]]:
    """The first rank of each data group has values, the others none."""
    found = []
    for kind in ("dp x tp", "fsdp x tp"):
        mesh = idist.mesh(**MESHES[kind])
        torch.manual_seed(0)
        model = adapt(kind, make() if rank < 2 else on_meta(), mesh)
        found.append({name: one.tolist() for name, one in whole(model).items()})
    return found


@pytest.mark.long
def test_the_first_rank_of_a_data_group_has_the_values() -> None:
    expected = {name: one.tolist() for name, one in make().named_parameters()}
    for found in idist.spawn("gloo", _of_first_ranks, nproc_per_node=4):
        assert found == [expected] * 2


# --- the current mesh ---


def _current(rank: int) -> str:
    samples = list(range(8))
    with idist.mesh(dp=2, tp=2) as mesh:
        net = make(seed=rank // 2)
        parallelize_module(net, mesh["tp"], PLAN)
        model = idist.auto_model(net)
        drawn = torch.cat(list(idist.auto_dataloader(samples, batch_size=4, shuffle=False)))
        shuffled = torch.cat(list(idist.auto_dataloader(samples, batch_size=4)))
    _same(whole(model), dict(make().named_parameters()))
    assert sorted(idist.all_gather(drawn, mesh["dp"]).tolist()) == samples
    for draws in (drawn, shuffled):
        by_rank = idist.all_gather(draws).view(4, -1).tolist()
        assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3]
        assert set(by_rank[0]).isdisjoint(by_rank[2])
    with idist.mesh(dp_replicate=2, dp_shard=-1):
        assert len(idist.auto_dataloader(samples, batch_size=4)) == 2
        assert idist.sampler_kwargs() == {"num_replicas": 4, "rank": rank}
        assert len(idist.split_by_rank(samples)) == 2
    with idist.mesh(tp=-1):
        assert torch.cat(list(idist.auto_dataloader(samples, shuffle=False))).tolist() == samples
        assert idist.split_by_rank(samples) == samples
        assert idist.sampler_kwargs() == {"num_replicas": 1, "rank": 0}
    with idist.mesh(pp=4):  # each stage keeps its own model
        stage = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(stage.weight, float(rank))
        trained = idist.auto_model(stage)
        trained(torch.ones(1, 1)).mul(rank + 1).sum().backward()
        assert (stage.weight.item(), stage.weight.grad.item()) == (rank, rank + 1)
    assert len(torch.cat(list(idist.auto_dataloader(samples)))) == 2

    tensor_mesh = mesh["tp"]  # torch 2.9 cannot compile this

    def double(x: Tensor) -> Tensor:
        return idist.all_reduce(x * 2, group="dp") + idist.all_reduce(x * 3, group=tensor_mesh)

    with mesh:
        assert torch.compile(double, backend="eager")(torch.ones(2)).tolist() == [10.0, 10.0]
    return "done"


@pytest.mark.long
def test_a_current_mesh_is_the_default() -> None:
    assert idist.spawn("gloo", _current, nproc_per_node=4) == ["done"] * 4


# --- arguments ---


def _refused(rank: int) -> str:
    mesh, tensor = idist.mesh(dp=2, tp=2), idist.mesh(fsdp=2, dp2=2)
    cube = idist.mesh(dp=2, dp2=2, dp3=1)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "'blocks.0.query.weight' is a DTensor", lambda: idist.auto_model(split(mesh))),
        (ValueError, "is sharded over ranks", lambda: idist.auto_model(split(tensor, "dp2"), mesh=tensor)),
        (ValueError, "comm_hook", lambda: idist.auto_model(split(mesh), mesh=mesh, comm_hook="fp16")),
        (ValueError, "two: first", lambda: idist.auto_model(make(), strategy="fsdp", mesh=cube)),
        (ValueError, "no data dimension", lambda: idist.auto_model(make(), mesh=mesh["tp"])),
        (TypeError, "must be a DeviceMesh", lambda: idist.auto_model(make(), mesh="dp")),
        (
            ValueError,
            "only one of them",
            lambda: idist.auto_model(make(), mesh=mesh, process_group=idist.world_group()),
        ),
    ]
    swapped = idist.mesh(shard=2, replicate=2)
    cases.append((ValueError, "two: first", lambda: idist.auto_model(make(), strategy="fsdp", mesh=swapped)))
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    assert idist.all_reduce(1) == 4
    return "done"


def split(mesh: Any, name: str = "tp") -> nn.Module:
    return parallelize_module(make(), mesh[name], PLAN)


def test_what_a_mesh_cannot_do_is_refused_before_anything_is_sent() -> None:
    assert idist.spawn("gloo", _refused, nproc_per_node=4) == ["done"] * 4
