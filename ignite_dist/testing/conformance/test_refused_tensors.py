"""Tensors without dense memory or arithmetic: one sentence before anything is sent, on every model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.masked import masked_tensor

import ignite_dist as idist
from ignite_dist.collectives.buckets import average_tensors, broadcast_tensors
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def sharded() -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (idist.get_world_size(),))
    return DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)


class Pair(Tensor):
    """A tensor that is made of two others."""

    @staticmethod
    def __new__(cls, one: Tensor) -> Pair:
        made = Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)
        made.one = one
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was called")


# What there is, and what the message has to name.
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "to_dense()"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "to_dense()"),
    "quantized": (quantized, "dequantize()"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind()"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "unbind()",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device"),
    "masked": (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor"),
    "wrapper": (lambda: Pair(torch.ones(2)), "Pair"),
    "bits": (lambda: torch.empty(4, dtype=torch.bits8), "view(torch.uint8)"),
    "four bits": (lambda: torch.empty(4, dtype=torch.uint4), "view(torch.uint8)"),
}


def calls(tensor: Tensor) -> dict[str, Callable[[], Any]]:
    model = current_model()
    world = model.groups.world
    shapes = [(2,)] * idist.get_world_size()
    return {
        "all_reduce": lambda: idist.all_reduce(tensor),
        "all_reduce not in place": lambda: idist.all_reduce(tensor, inplace=False, exact=False),
        "all_reduce of a tree": lambda: idist.all_reduce({"n": 1, "t": [torch.ones(2), tensor]}),
        "all_reduce with gradients": lambda: idist.all_reduce(tensor, sync_grads=True),
        "all_gather": lambda: idist.all_gather(tensor),
        "all_gather into a buffer": lambda: idist.all_gather(tensor, out=torch.ones(2)),
        "all_gather with gradients": lambda: idist.all_gather(tensor, sync_grads=True),
        "all_gather_ragged": lambda: idist.all_gather_ragged(tensor),
        "all_gather_tensors_with_shapes": lambda: idist.all_gather_tensors_with_shapes(tensor, shapes),
        "broadcast": lambda: idist.broadcast(tensor),
        "broadcast, safe": lambda: idist.broadcast(tensor, safe_mode=True),
        "buffers": lambda: broadcast_tensors(model, [torch.ones(2), tensor], 0, world),
        "gradients": lambda: average_tensors(model, [torch.ones(2), tensor], world),
    }


def check_refused(name: str, make: Callable[[], Tensor], text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about prototypes and deprecations
        tensor = make()
    for operation, call in calls(tensor).items():
        with count_collectives() as counted, raises(TypeError, text) as info:
            call()
        assert counted.count == 0, (name, operation)
        assert "\n" not in str(info.value) and len(str(info.value)) < 200, str(info.value)


@on_every_rank
def test_what_has_no_dense_memory_is_refused_everywhere() -> None:
    for name, (make, text) in REFUSED.items():
        check_refused(name, make, text)
    if dist.is_initialized():
        check_refused("sharded", sharded, "to_local()")
        check_refused("sharded", sharded, "full_tensor()")
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_numbers_without_sign_and_zero_are_moved_and_not_reduced() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        tensor = torch.tensor([rank + 100, 128], dtype=torch.uint8).view(dtype)
        for op in ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"):
            with count_collectives() as counted:
                for value in (tensor, [tensor]):
                    with raises(TypeError, str(dtype)):
                        idist.all_reduce(value, op)
            assert counted.count == 0
        with raises(TypeError, str(dtype)):
            idist.all_gather(tensor, sync_grads=True)
        wanted = [byte for one in range(world_size) for byte in (one + 100, 128)]
        assert idist.all_gather(tensor).view(torch.uint8).tolist() == wanted
        out = torch.zeros(2 * world_size, dtype=torch.uint8).view(dtype)
        assert idist.all_gather(tensor, out=out) is out and out.view(torch.uint8).tolist() == wanted
        rows = idist.all_gather_ragged(tensor[: 1 + rank % 2])
        assert [row.view(torch.uint8)[0].item() for row in rows] == [one + 100 for one in range(world_size)]
        assert idist.all_gather(tensor[0]).view(torch.uint8).tolist() == wanted[::2]
        assert idist.broadcast(tensor, src=world_size - 1) is tensor and tensor.dtype == dtype
        assert tensor.view(torch.uint8).tolist() == [world_size + 99, 128]
        received = idist.broadcast(tensor if rank == 0 else None, safe_mode=True)
        assert received.view(torch.uint8).tolist() == [world_size + 99, 128] and received.dtype == dtype


class Named(Tensor):
    """A user's own tensor, with memory like any other."""


@on_every_rank
def test_subclasses_with_memory_are_tensors() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for numel in (2, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.full((numel,), rank + 1.0, dtype=dtype).as_subclass(Named)
            gathered = idist.all_gather(tensor)
            assert gathered.view(world_size, -1)[:, -1].tolist() == [one + 1 for one in range(world_size)]
            assert idist.all_reduce(tensor) is tensor and type(tensor) is Named
            assert tensor[-1].item() == sum(range(1, world_size + 1))
            assert idist.all_reduce({"t": tensor})["t"][-1].item() == tensor[-1].item() * world_size
            tensor.fill_(rank)
            assert (
                idist.broadcast(tensor, src=world_size - 1) is tensor and tensor[0].item() == world_size - 1
            )
    buffer = torch.nn.Buffer(torch.ones(3, device=idist.device()))
    parameter = torch.nn.Parameter(torch.ones(3, device=idist.device()))
    for one in (buffer, parameter):
        assert idist.all_reduce(one) is one and one.tolist() == [world_size] * 3
        assert idist.broadcast(one) is one
        assert idist.all_gather(one).shape == (3 * world_size,)
