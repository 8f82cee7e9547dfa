"""What editors and mypy know of the facade. Checked by `make type`: an unused "type: ignore" is an error."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.utils.data import Dataset

import ignite_dist as idist

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from ignite_dist.workers.supervisor.processes import Workers


def train(local_rank: int, config: dict[str, int], epochs: int = 1) -> float:
    return config["seed"] * epochs + 0.5


def collectives(tensor: Tensor, tree: dict[str, float]) -> None:
    assert_type(idist.all_reduce(tensor), Tensor)
    assert_type(idist.all_reduce(1.5), float)
    assert_type(idist.all_reduce(tree, "AVERAGE"), dict[str, float])
    assert_type(idist.all_reduce(tensor, async_op=True), idist.Work)
    assert_type(idist.all_reduce([tensor], inplace=True), list[Tensor])
    assert_type(idist.all_reduce(tensor, inplace=None, async_op=True), idist.Work)
    assert_type(idist.all_gather(tensor), Tensor)
    assert_type(idist.all_gather("text"), list[str])
    assert_type(idist.all_gather("text", async_op=True), idist.Work)
    assert_type(idist.all_gather_ragged(tensor), list[Tensor])
    assert_type(idist.broadcast(tensor), Tensor)
    assert_type(idist.broadcast("text"), str)
    assert_type(idist.broadcast(None, safe_mode=True), Any)
    assert_type(idist.broadcast(tensor, async_op=True), idist.Work)
    assert_type(idist.barrier(async_op=True), idist.Work)
    assert_type(idist.reduce(1.5), float | None)
    assert_type(idist.gather(tensor), Tensor | None)
    assert_type(idist.gather("text", dst=1), list[str] | None)
    assert_type(idist.scatter(["text"]), str)
    assert_type(idist.scatter([tensor], async_op=True), idist.Work)
    assert_type(idist.reduce_scatter([tensor]), Tensor)
    assert_type(idist.reduce_scatter(tensor, async_op=True), idist.Work)
    assert_type(idist.all_to_all(tensor, out=tensor), Tensor)
    assert_type(idist.all_to_all(["text"]), list[str])
    idist.barrier(timeout=timedelta(seconds=1))
    assert_type(idist.save_checkpoint("run.pt", keep=3, epoch=1), idist.Work)
    assert_type(idist.load_checkpoint("run.pt"), dict[str, Any])
    idist.all_reduce(tensor, inplce=False)  # type: ignore[call-overload]
    idist.all_reduce(tensor, sync_grads=True, async_op=True)  # type: ignore[call-overload]
    idist.all_gather("text", out=tensor)  # type: ignore[call-overload]
    idist.barrier(timeout=timedelta(seconds=1), async_op=True)  # type: ignore[call-overload]


def groups(tensor: Tensor, model: Module, data: Dataset[int]) -> None:
    assert_type(idist.node_group(), list[int])
    ranks = idist.node_group()
    assert_type(idist.get_rank(ranks), int)
    assert_type(idist.get_world_size(group=ranks), int)
    assert_type(idist.shared_seed(ranks), int)
    assert_type(idist.sampler_kwargs(group=ranks), dict[str, int])
    assert_type(idist.clip_grad_norm(model, 1.0, group=ranks), Tensor)
    idist.auto_dataloader(data, exact=True, group=ranks)
    idist.split_by_rank([1, 2], group=ranks)
    idist.gather_in_order(tensor, None, group=ranks)
    idist.average_parameters(model, group=ranks)
    idist.average_parameters(model.parameters())  # type: ignore[arg-type]
    idist.get_rank(ranks=ranks)  # type: ignore[call-arg]


def output(items: list[int]) -> None:
    idist.print("loss", 0.5, sep=" ", local=True)
    for _ in idist.progress_bar(items, desc="epoch"):
        pass
    idist.progress_bar(3)  # type: ignore[arg-type]

    @idist.one_rank_only(group=[0, 1])
    def log(message: str) -> int:
        return len(message)

    assert_type(log("text"), int)


def launching(config: dict[str, int]) -> None:
    assert_type(idist.spawn("gloo", train, (config,), nproc_per_node=2), list[float])
    assert_type(idist.spawn("gloo", train, (config,), nproc_per_node=2, join=False), Workers)
    idist.spawn("gloo", train, (config,), timeout=timedelta(minutes=1), start_method="spawn")
    idist.spawn("gloo", train, (config,), nprocs=2)  # type: ignore[call-overload]
    with idist.Parallel("gloo", nproc_per_node=2, timeout=timedelta(minutes=1)) as parallel:
        assert_type(parallel.run(train, config, epochs=2), float)
        parallel.run(train, config, epoch=2)  # type: ignore[call-arg]
        parallel.run(train, "no config")  # type: ignore[arg-type]
    idist.Parallel("gloo", nproc_per_nodes=2)  # type: ignore[call-arg]


def unknown_names() -> None:
    idist.all_redcue  # type: ignore[attr-defined]  # noqa: B018
