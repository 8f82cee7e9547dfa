"""Embeddings with sparse gradients and FORCED_SYNC: the mean over the ranks, which stays sparse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.optim import SGD, SparseAdam

import ignite_dist as idist
from ignite_dist import DDPSyncStrategy
from ignite_dist.testing.conformance.cases import on_every_rank

ROWS, WIDTH = 7, 3


class Words(Module):
    """An embedding with a sparse gradient, and a layer; which may share their weight."""

    def __init__(self, is_tied: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = Embedding(ROWS, WIDTH, sparse=True)
        self.last = Linear(WIDTH, ROWS if is_tied else 2, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if is_tied:
            self.last.weight = self.words.weight
        self.to(idist.device(), dtype)

    def forward(self, x: Tensor, with_last: bool = True) -> Tensor:
        rows = self.words(x)
        return (self.last(rows) if with_last else rows).pow(2).mean()  # type: ignore[no-any-return]


def tokens(rank: int, number: int) -> Tensor:
    return torch.tensor([rank % ROWS, (rank + number) % ROWS, 5], device=idist.device())


def without_sparse_tensors() -> bool:
    return idist.device().type == "xla"


@pytest.mark.parametrize("who", ["all", "all but one", "one", "none"])
@on_every_rank
def test_the_mean_over_the_ranks(who: str) -> None:
    if without_sparse_tensors():
        return
    size = idist.get_world_size()
    skips = {"all": [], "all but one": [0], "one": list(range(1, size)), "none": list(range(size))}[who]
    model, other = idist.auto_model(Words()), Words()
    inner = idist.unwrap_model(model)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0))  # with Horovod it is that which averages
    for number in range(3):
        with idist.grad_sync(model, optimizer, number == 2, DDPSyncStrategy.FORCED_SYNC):
            if idist.get_rank() not in skips:
                model(tokens(idist.get_rank(), number)).backward()
        for rank in range(size):
            if rank not in skips:
                (other(tokens(rank, number)) / size).backward()
    gradient, wanted = inner.words.weight.grad, other.words.weight.grad
    assert (gradient is None) == (wanted is None)
    if gradient is not None and wanted is not None:
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), wanted.to_dense(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(inner.last.weight.grad, other.last.weight.grad, rtol=1e-9, atol=1e-12)
        SparseAdam([inner.words.weight]).step()  # which takes none but sparse ones
        SparseAdam([other.words.weight]).step()
        torch.testing.assert_close(inner.words.weight, other.words.weight, rtol=1e-9, atol=1e-12)


@on_every_rank
def test_sparse_on_one_rank_and_dense_on_another() -> None:
    """A weight that is an embedding's and a layer's, of which some ranks use the embedding alone."""
    if without_sparse_tensors():
        return
    size = idist.get_world_size()
    model, other = Words(is_tied=True), Words(is_tied=True)
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0))
    with idist.grad_sync(model, optimizer, strategy=DDPSyncStrategy.FORCED_SYNC):
        if idist.get_rank() != 1:
            model(tokens(idist.get_rank(), 0), with_last=idist.get_rank() == 0).backward()
    for rank in range(size):
        if rank != 1:
            (other(tokens(rank, 0), with_last=rank == 0) / size).backward()
    gradient = model.words.weight.grad
    assert gradient is not None and other.words.weight.grad is not None
    torch.testing.assert_close(gradient.to_dense(), other.words.weight.grad.to_dense(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["single_auto_sync", "forced_sync"])
@on_every_rank
def test_accumulated_where_a_rank_skips_the_last_microbatch(strategy: str) -> None:
    if without_sparse_tensors():
        return
    rank, size = idist.get_rank(), idist.get_world_size()
    model, other = idist.auto_model(Words()), Words()
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0))
    data = [tokens(rank, number) for number in range(3)]
    for x, sync in idist.accumulate_gradients(data, model, 3, strategy=DDPSyncStrategy(strategy)):
        with sync:
            if not (sync.is_final and rank == size - 1):
                model(x).backward()
    optimizer.step()
    for one in range(size):
        for number in range(2 if one == size - 1 else 3):
            (other(tokens(one, number)) / size / 3).backward()
    SGD(other.parameters(), lr=1.0).step()
    found = idist.unwrap_model(model).state_dict()
    torch.testing.assert_close(found, other.state_dict(), rtol=1e-9, atol=1e-12)


@on_every_rank
def test_halves_are_rounded_once() -> None:
    """The mean of a large number and of small ones, which bfloat16 would lose one by one (of two or more)."""
    if without_sparse_tensors():
        return
    rank, size = idist.get_rank(), idist.get_world_size()
    weight = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.bfloat16))
    model = Module()
    model.weight = weight
    optimizer = idist.auto_optim(SGD(model.parameters(), lr=1.0))
    with idist.grad_sync(model, optimizer, strategy=DDPSyncStrategy.FORCED_SYNC):
        value = torch.tensor([[256.0 if rank == 0 else 1.0]], dtype=torch.bfloat16)
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), value, (4, 1), check_invariants=True)
    assert weight.grad is not None
    exact = torch.tensor((256.0 + 1.0 * (size - 1)) / size).to(torch.bfloat16)
    assert weight.grad.to_dense()[2].item() == exact.item()
