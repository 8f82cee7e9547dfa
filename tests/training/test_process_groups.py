"""A model that some of the ranks train: ``auto_model(net, process_group=...)`` or ``mesh=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.optim import SGD

import ignite_dist as idist
from ignite_dist import DDPSyncStrategy

MEMBERS = [1, 2]  # of a world of three, so that rank 0 of the group is not rank 0


def make() -> Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Sequential(Linear(3, 3), Linear(3, 1)).double()


def sample(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(2 + rank + number, 3, generator=generator, dtype=torch.float64)


def gradients(model: Module) -> list[Tensor]:
    return [one.grad for one in idist.unwrap_model(model).parameters()]


def on_ranks(function: Callable[..., Any], *args: Any) -> None:
    assert idist.spawn("gloo", function, args, nproc_per_node=3) == ["done"] * 3


def _forced(rank: int) -> str:
    group = idist.new_group(MEMBERS)
    if rank in MEMBERS:
        model = idist.auto_model(make(), process_group=group)
        for number in range(2):
            with idist.grad_sync(
                model, is_final_microbatch=number == 1, strategy=DDPSyncStrategy.FORCED_SYNC
            ):
                model(sample(rank, number)).mean().backward()
        alone = make()
        losses = [alone(sample(other, number)).mean() for other in MEMBERS for number in range(2)]
        (sum(losses) / len(MEMBERS)).backward()
        torch.testing.assert_close(gradients(model), gradients(alone))
    idist.barrier()
    return "done"


def test_forced_sync_averages_over_the_group() -> None:
    on_ranks(_forced)


def _weighed(rank: int, strategy: str) -> str:
    group = idist.new_group(MEMBERS)
    if rank in MEMBERS:
        model = idist.auto_model(make(), process_group=group)
        batches = [sample(rank, number) for number in range(2)]
        for batch, sync in idist.accumulate_gradients(
            batches, model, 2, weight=len, strategy=DDPSyncStrategy(strategy)
        ):
            with sync:
                model(batch).mean().backward()
        alone = make()
        all_samples = torch.cat([sample(other, number) for other in MEMBERS for number in range(2)])
        alone(all_samples).mean().backward()
        torch.testing.assert_close(gradients(model), gradients(alone))
    idist.barrier()
    return "done"


@pytest.mark.parametrize("strategy", ["single_auto_sync", "forced_sync"])
def test_weights_count_in_the_group_alone(strategy: str) -> None:
    on_ranks(_weighed, strategy)


def _parts(rank: int) -> str:
    pairs = [idist.new_group(MEMBERS), idist.new_group([0, 2])]
    parts = {1: [pairs[0]], 0: [pairs[1]], 2: pairs}[rank]
    model = Sequential(*[idist.auto_model(make(), process_group=one) for one in parts])
    if rank == 2:  # nothing is sent, so no other rank is needed
        with pytest.raises(ValueError, match=r"different ranks: \[\[1, 2\], \[0, 2\]\]"):
            idist.grad_sync(model, strategy=DDPSyncStrategy.FORCED_SYNC).__enter__()
    idist.barrier()
    return "done"


def test_parts_that_are_averaged_over_different_ranks_are_refused() -> None:
    on_ranks(_parts)


def _evaluated(rank: int, strategy: str) -> str:
    group: Any = idist.new_group(MEMBERS)
    world_model = idist.auto_model(Sequential(BatchNorm1d(3), Linear(3, 1)))
    world_model(torch.randn(4, 3))
    own = world_model.module[0].running_mean.tolist()
    model: Any = None
    if rank in MEMBERS:
        options: Any = {"process_group": group}
        if strategy == "fsdp":
            options = {"mesh": DeviceMesh("cpu", MEMBERS), "strategy": "fsdp"}
        net = Sequential(BatchNorm1d(3), Linear(3, 1))
        torch.nn.init.constant_(net[1].weight, rank)
        model = idist.auto_model(net, **options)
        model(torch.randn(4, 3) + rank)
        weight: Any = idist.unwrap_model(model).state_dict()["1.weight"]
        whole = weight.full_tensor() if strategy == "fsdp" else weight
        assert whole.tolist() == [[MEMBERS[0]] * 3]
    before = idist.unwrap_model(model)[0].running_mean.tolist() if model else []
    for _ in idist.auto_dataloader(list(range(5)), exact=True, batch_size=3):
        pass
    assert world_model.module[0].running_mean.tolist() == idist.broadcast(own)
    of_first = idist.broadcast(before, src=MEMBERS[0])
    if model:
        assert idist.unwrap_model(model)[0].running_mean.tolist() == of_first
        assert (before == of_first) == (rank == MEMBERS[0])
    return "done"


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_buffers_are_those_of_the_first_rank_of_the_group(strategy: str) -> None:
    on_ranks(_evaluated, strategy)


def _zero(rank: int) -> str:
    group = idist.new_group(MEMBERS)
    if rank in MEMBERS:
        model = idist.auto_model(make(), process_group=group)
        with pytest.raises(ValueError, match=r"ranks \[1, 2\]"):
            idist.auto_optim(SGD(model.parameters(), lr=0.1), zero=True)
    idist.barrier()
    return "done"


def test_zero_is_not_for_a_part_of_the_ranks() -> None:
    on_ranks(_zero)
