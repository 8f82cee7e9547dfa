"""What is sent over NCCL, without a GPU.

The transport believes that NCCL carries the CPU, and takes the routes of NCCL. Process groups of gloo carry
what it sends, so the values are real. What NCCL itself does, and on which stream, is not proven here.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.comp_models.transport import Group
from ignite_dist.context.live import current_model
from ignite_dist.values import reduce_ops
from on_ranks import on_ranks

WORLD_SIZE = 4
NUMEL = 1 << 18


class Recorder:
    """A process group that notes the bytes which each rank sends. A ring reduces, gathers and scatters."""

    def __init__(self, group: Any, sent: Counter[str]) -> None:
        self._group, self._sent = group, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self._sent[f"all_reduce {tensors[0].dtype}"] += 2 * _share(tensors[0])
        return self._group.allreduce(tensors, options)

    def alltoall_base(self, received: Tensor, sent: Tensor, *others: Any) -> Any:
        self._sent["all_to_all"] += _share(sent)
        return self._group.alltoall_base(received, sent, *others)

    def all_gather_single(self, gathered: Tensor, *others: Any) -> Any:
        self._sent["all_gather"] += _share(gathered)
        return self._group.all_gather_single(gathered, *others)

    def _allgather_base(self, gathered: Tensor, *others: Any) -> Any:
        self._sent["all_gather"] += _share(gathered)
        return self._group._allgather_base(gathered, *others)


def _share(tensor: Tensor) -> float:
    return tensor.nbytes * (WORLD_SIZE - 1) / WORLD_SIZE


class Recorded(NativeTransport):
    """Takes the routes of NCCL, and notes what it sends."""

    sent: Counter[str]

    def handle_of(self, group: Group) -> Any:
        return Recorder(super().handle_of(group), self.sent)


def _record() -> Counter[str]:
    model, cpu = current_model(), torch.device("cpu")
    transport = Recorded(
        idist.world_group(), idist.get_rank(), {"cpu": "nccl"}, lambda: cpu, nullcontext, own_store=True
    )
    transport.sent = Counter()
    model.transport = transport  # type: ignore[misc]
    return transport.sent


def _reduces(rank: int, dtype: torch.dtype, op: str, numel: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    torch.manual_seed(rank)
    tensor = torch.randn(numel).to(dtype)
    rows = idist.all_gather(tensor).view(WORLD_SIZE, -1)
    sent = _record()
    reduced = idist.all_reduce(tensor, op)
    return reduced, rows, dict(sent)


def _expected(rows: Tensor, op: str) -> Tensor:
    wide = rows.double()
    return {"SUM": wide.sum(0), "AVERAGE": wide.mean(0), "MAX": wide.amax(0)}[op]


@pytest.mark.parametrize("numel", [3, NUMEL, NUMEL + 1])
@pytest.mark.parametrize(("dtype", "op"), [(torch.bfloat16, "SUM"), (torch.float16, "AVERAGE")], ids=str)
def test_narrow_floats_are_rounded_once_and_send_no_wider_floats(
    dtype: torch.dtype, op: str, numel: int
) -> None:
    results = on_ranks(_reduces, dtype, op, numel, world_size=WORLD_SIZE)
    for reduced, rows, sent in results:
        exact = _expected(rows, op)
        assert torch.equal(reduced, results[0][0]), "the same bits on every rank"
        assert torch.equal(reduced, reduce_ops.round_to_odd(exact).to(dtype))
        own = 2 * numel * dtype.itemsize * (WORLD_SIZE - 1) / WORLD_SIZE
        if numel > 3:
            assert set(sent) == {"all_to_all", "all_gather"} and sum(sent.values()) <= 1.01 * own
        else:
            assert set(sent) == {"all_reduce torch.float64"}, "one collective"


@pytest.mark.parametrize(
    ("dtype", "op", "sent_as"),
    [
        (torch.float32, "SUM", torch.float32),
        (torch.float32, "MAX", torch.int32),
        (torch.int64, "SUM", torch.int64),
        (torch.int16, "SUM", torch.int32),
        (torch.float8_e4m3fn, "MAX", torch.int32),
    ],
    ids=str,
)
def test_others_are_one_all_reduce(dtype: torch.dtype, op: str, sent_as: torch.dtype) -> None:
    for reduced, rows, sent in on_ranks(_reduces, dtype, op, NUMEL, world_size=WORLD_SIZE):
        torch.testing.assert_close(reduced.double(), _expected(rows, op), atol=1e-5, rtol=1e-5)
        own = 2 * NUMEL * sent_as.itemsize * (WORLD_SIZE - 1) / WORLD_SIZE
        assert sent == {f"all_reduce {sent_as}": own}


def _scatters(rank: int, dtype: torch.dtype) -> tuple[bool, dict[str, float]]:
    torch.manual_seed(rank)
    rows = torch.randn(WORLD_SIZE, NUMEL).to(dtype)
    expected = idist.all_reduce(rows.clone())[rank]
    sent = _record()
    return torch.equal(idist.reduce_scatter(rows).view(-1), expected), dict(sent)


def test_a_reduce_scatter_of_narrow_floats_sends_each_row_once() -> None:
    for is_equal, sent in on_ranks(_scatters, torch.bfloat16, world_size=WORLD_SIZE):
        assert is_equal and sent == {"all_to_all": 2 * NUMEL * (WORLD_SIZE - 1)}


def _trains_contrastively(rank: int) -> tuple[list[float], dict[str, float]]:
    sent = _record()
    x = torch.full((NUMEL,), float(rank + 1), dtype=torch.bfloat16, requires_grad=True)
    rows = idist.all_gather(x, sync_grads=True).view(WORLD_SIZE, -1)
    sent.clear()
    (rows * torch.arange(1.0, WORLD_SIZE + 1)[:, None]).sum().backward()
    assert x.grad is not None
    return x.grad.unique().tolist(), dict(sent)


def test_the_gradient_of_gathered_rows_moves_each_row_once() -> None:
    for rank, (gradient, sent) in enumerate(on_ranks(_trains_contrastively, world_size=WORLD_SIZE)):
        assert gradient == [WORLD_SIZE * (rank + 1.0)]
        assert sum(sent.values()) == 2 * NUMEL * (WORLD_SIZE - 1), sent
