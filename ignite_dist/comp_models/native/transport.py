"""The transport over torch.distributed's process groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    DeviceMesh,
    GroupMember,
    ProcessGroup,
    Store,
)
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.native import gloo, narrow_floats, waits
from ignite_dist.comp_models.native.group_factory import GroupFactory
from ignite_dist.comp_models.native.reducer_group import ReducerGroup
from ignite_dist.comp_models.native.works import TorchWork, TorchWorks
from ignite_dist.comp_models.shared_memory.opening import name_of_separate_group, separate_group_row
from ignite_dist.comp_models.transport import CollectiveKind, Group, Sizes, Transport, Wait
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.environments.rendezvous import connections
from ignite_dist.internals import _torch
from ignite_dist.values import meshes
from ignite_dist.values.carriers import find_carrier
from ignite_dist.values.reduce_ops import BITWISE, adds_rows, is_inexact, is_rounded, reduce_rows
from ignite_dist.values.serialization import as_bytes, as_tensor


def _all_reduce_options(op: Any, is_async: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = is_async
    return options


def _all_gather_options(is_async: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = is_async
    return options


_OPS = {
    "SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "AND": dist.ReduceOp.BAND,
    "OR": dist.ReduceOp.BOR,
    "XOR": dist.ReduceOp.BXOR,
}
# Options by is_async. If is_async is False, NCCL works in the caller's stream.
_ALL_REDUCE = {
    is_async: {name: _all_reduce_options(op, is_async) for name, op in _OPS.items()}
    for is_async in (False, True)
}
_ALL_GATHER = {is_async: _all_gather_options(is_async) for is_async in (False, True)}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_ARITHMETIC = frozenset({"SUM", "PRODUCT", "MIN", "MAX"})
# Supported dtypes and ops. For gloo: tested. For MPI: from torch's documentation. Other backends: like NCCL.
_CARRIED_DTYPES = {
    "gloo": _FLOATS | _INTS | {torch.bool},
    "mpi": (_INTS - {torch.int8}) | {torch.float32, torch.float64},
}
_CARRIED_OPS = {"gloo": _ARITHMETIC | set(BITWISE)}

_OF_GPUS = ("nccl", "xccl")

# All backends that carry floats are exact for sums of narrow floats in float64, and for MIN and MAX of ints.
_EXACT = (torch.float64, torch.int32, torch.int64)
# Up to this size the latency of a collective counts, and a reduction in parts has two.
_CARRIED_BYTES = 1 << 16
_CARRIED_NUMEL = 1 << 21  # of a piece, to save memory

# gloo does not split so small a tensor into segments, so one exchange is not faster than gloo's all-reduce.
_UNCUT_NUMEL = 2


class NativeTransport(Transport):
    """The process groups of one context.

    Args:
        world: the default process group.
        rank: this rank.
        backends: the backend of each device type.
        device: returns the device of this rank.
        connecting: makes a context manager for code that opens connections between the ranks.
        own_store: True if only this package uses the context's store.
    """

    has_meshes: ClassVar[bool] = True

    def __init__(
        self,
        world: ProcessGroup,
        rank: int,
        backends: Mapping[str, str],
        device: Callable[[], torch.device],
        connecting: Callable[[], AbstractContextManager[None]],
        own_store: bool,
    ) -> None:
        self._world = world
        self._rank = rank
        self._backends = backends
        self._device = device
        self._own_store = own_store
        self._has_separate_groups = backends.get("cpu", "gloo") == "gloo"  # no other backend on CPUs has
        self._world_ranks = tuple(range(world.size()))
        self._scratch = gloo.ScratchBuffers()
        self._groups = GroupFactory(world, rank, device, connecting)
        self.world_connections = connections.Connections()  # recorded only if open() has made the context

    # --- groups ---

    def world_handle(self) -> ProcessGroup:
        return self._world

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        return self._groups.make(ranks, **options)

    def overlaps(self, group: Group) -> bool:
        return self._has_separate_groups

    def separate_group(self, group: Group) -> Work:
        if not self._has_separate_groups or len(group.ranks) == 1:
            return Completed(group)
        # All members have called when they have each other's rows.
        gathered = self.all_gather(as_tensor(separate_group_row(self._rank, group.call.text)), group)
        gathered.start()
        handle = self.handle_of(group)

        def connect(rows: Tensor) -> Group:
            name = name_of_separate_group(bytes(rows.flatten().tolist()))
            return self._groups.connect_again(group, handle, key=name)

        return gathered.then(connect)

    def is_alive(self, handle: Any) -> bool:
        return _torch.is_live(handle) or handle == GroupMember.NON_GROUP_MEMBER

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if not isinstance(handle, ProcessGroup):
            if isinstance(handle, int) and handle == GroupMember.NON_GROUP_MEMBER:
                return ()
            raise ValueError(f"A group is a list of ranks or a ProcessGroup, got {handle!r}.")
        try:
            ranks = tuple(dist.get_process_group_ranks(handle))
        except KeyError:
            raise ValueError(
                "This ProcessGroup was destroyed, or belongs to a context that has ended."
            ) from None
        if ranks != tuple(sorted(ranks)):
            raise ValueError(
                f"The ranks of a group are in ascending order, and this ProcessGroup has {list(ranks)}. Omit "
                "sort_ranks=False in new_group()."
            )
        return ranks

    def make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        return self._groups.make_mesh(sizes)

    def group_of_mesh(self, mesh: DeviceMesh, dimensions: Collection[int]) -> Any:
        ranks = meshes.ranks_along(mesh, dimensions, self._rank)
        if len(dimensions) != 1 or not ranks:
            return ranks
        try:
            handle = mesh.get_group(next(iter(dimensions)))
            is_live = tuple(dist.get_process_group_ranks(handle)) == ranks
        except (KeyError, RuntimeError, ValueError):
            is_live = False
        if not is_live:
            raise ValueError(
                f"The {meshes.describe(mesh)} belongs to a context that has ended: call idist.mesh() again."
            )
        return handle

    def reducer_group(self, group: Group, wrapper: DistributedDataParallel) -> ReducerGroup | None:
        """A faster process group for DDP's reducer on the CPU. All ranks of ``group`` call this."""
        return None

    def group_key(self, group: Group) -> str:
        handle = group.handle
        return "" if handle is None or handle is self._world else handle.group_name

    def forget(self) -> None:
        """Drop the connections to the store, because the context has ended."""
        self._groups.forget()
        connections.to_other_machines.discard(self.world_connections)

    # --- primitives ---

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        backend = self._backends.get(device.type)
        if kind == "reduce_exactly":
            if self._is_gloo_on_cpu(device):
                return is_inexact(str(op), dtype)
            return backend in _OF_GPUS and is_rounded(str(op), dtype)  # MIN and MAX go as ints
        if kind == "reduce_scatter" and self._is_gloo_on_cpu(device):
            return adds_rows(str(op), dtype)
        if backend is None or dtype not in _CARRIED_DTYPES.get(backend, _FLOATS | _INTS):
            return False
        if kind == "all_reduce":
            return op in _CARRIED_OPS.get(backend, _ARITHMETIC)
        if kind == "reduce_scatter":
            return backend not in ("gloo", "mpi") and op in _ARITHMETIC and not is_inexact(op, dtype)
        return kind in ("all_gather", "all_to_all", "broadcast")

    # The primitives call the process group's methods. torch.distributed's functions also log and count calls,
    # which takes 15-25 us per call if the CPU's caches are cold after waiting for other ranks.

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        handle = self.handle_of(group)
        group_size = len(group.ranks)
        if (
            tensor.numel() > _UNCUT_NUMEL
            and self._is_gloo_on_cpu(tensor.device)
            and gloo.fits_one_round(tensor.nbytes, group_size)
        ):
            exchange, reduce = self._scratch.all_reduce(handle, tensor, op, group_size)
            return TorchWork(exchange, None, handle, group.ranks).then(reduce)
        lent = [gloo.lend(tensor)]
        return TorchWork(
            lambda is_async: handle.allreduce(lent, _ALL_REDUCE[is_async][op]), tensor, handle, group.ranks
        )

    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        group_size = len(group.ranks)
        if group_size == 1 or not tensor.numel():
            return Completed(tensor)
        is_gloo = self._is_gloo_on_cpu(tensor.device)
        if not is_gloo and tensor.nbytes <= _CARRIED_BYTES:
            return self._reduce_carried(tensor, op, group)
        if not (is_gloo and gloo.fits_one_round(tensor.nbytes, group_size)):
            way = self._reduce_in_parts if is_rounded(op, tensor.dtype) else self._reduce_carried_in_pieces
            return Steps(lambda: way(tensor, op, group))
        if tensor.numel() > _UNCUT_NUMEL and tensor.dtype in _FLOATS:
            return self.all_reduce(tensor, op, group)  # which also gathers and reduces at this size
        rows = tensor.new_empty((group_size, *tensor.shape))
        gathered = self.all_gather(as_bytes(tensor), group, out=as_bytes(rows).view(group_size, -1))
        return gathered.then(lambda _: reduce_rows(rows.unbind(), op, out=tensor))

    def _reduce_carried(self, tensor: Tensor, op: str, group: Group) -> Work:
        """Begin to reduce ``tensor`` in a dtype in which the library's arithmetic is exact."""
        carrier = find_carrier(op, tensor.dtype, lambda _, dtype: dtype in _EXACT)
        assert carrier is not None

        def finish(total: Tensor) -> Tensor:
            if op == "AVERAGE":
                total /= len(group.ranks)
            return tensor.copy_(carrier.decode(total))

        return self.all_reduce(carrier.encode(tensor), carrier.op, group).then(finish)

    def _reduce_carried_in_pieces(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        for piece in torch.split(tensor.view(-1), _CARRIED_NUMEL):
            self._reduce_carried(piece, op, group).wait()
        return tensor

    def _reduce_in_parts(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        handle, group_size = self.handle_of(group), len(group.ranks)

        def exchange(sent: Tensor, received: Tensor) -> None:
            TorchWork(lambda _: gloo.exchange(handle, sent, received), None, handle, group.ranks).wait()

        def gather(sent: Tensor, received: Tensor) -> None:
            self.all_gather(sent, group, out=received.view(group_size, -1)).wait()

        return narrow_floats.reduce_in_parts(tensor, op, group_size, exchange, gather)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        handle = self.handle_of(group)
        group_size = len(group.ranks)
        if out is None:
            out = torch.empty((group_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() == 0:
            return Completed(out)
        if self._is_gloo_on_cpu(tensor.device):
            if gloo.fits_one_round(tensor.nbytes, group_size):
                sent = tensor.expand(out.shape).contiguous()
                return TorchWork(lambda _: gloo.exchange(handle, sent, out), out, handle, group.ranks)
            out[group.position(self._rank)].copy_(tensor)
            works = gloo.begin_broadcasts(handle, out.unbind())
            if works is not None:
                return TorchWorks(works, out, handle, group.ranks)
        lent_out, lent = gloo.lend(out.view(-1)), gloo.lend(tensor.view(-1))
        return TorchWork(
            lambda is_async: _torch.all_gather_into(handle, lent_out, lent, _ALL_GATHER[is_async]),
            out,
            handle,
            group.ranks,
        )

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        group_size = len(group.ranks)
        if self._backends.get("cpu") != "gloo" or not gloo.fits_one_round(len(buffer), group_size):
            return super().gather_bytes(buffer, group)
        handle, gathered = self.handle_of(group), bytearray(group_size * len(buffer))
        # Copies of bytes take less time than torch's operators on tensors.
        sent, received = as_tensor(buffer * group_size), as_tensor(gathered)
        TorchWork(lambda _: gloo.exchange(handle, sent, received), None, handle, group.ranks).wait()
        return gathered

    def fill_rows(self, rows: Sequence[Tensor], position: int, group: Group) -> None:
        handle = self.handle_of(group)
        works = gloo.begin_broadcasts(handle, rows) if self._backends.get("cpu") == "gloo" else None
        if works is None:
            super().fill_rows(rows, position, group)
        else:
            TorchWorks(works, None, handle, group.ranks).wait()

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        root = group.position(src)
        assert root is not None
        handle = self.handle_of(group)
        lent, is_src = [gloo.lend(tensor)], src == self._rank
        return TorchWork(
            lambda is_async: handle.broadcast(lent, gloo.broadcast_options(root, is_async)),
            tensor,
            handle,
            group.ranks if is_src else (src,),
            needs_all=not is_src,
        )

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        handle = self.handle_of(group)
        sent, received = ((), ()) if sizes is None else sizes
        return TorchWork(
            lambda _: gloo.exchange(handle, tensor, out, sent, received), out, handle, group.ranks
        )

    def reduce_scatter(self, tensor: Tensor, op: str, group: Group, out: Tensor) -> Work:
        if self._is_gloo_on_cpu(tensor.device):  # gloo's reduces all rows on all ranks
            rows = tensor.view(len(group.ranks), -1)
            received = torch.empty_like(rows)
            exchanged = NativeTransport.all_to_all(self, as_bytes(rows), group, as_bytes(received), None)
            reduced = exchanged.then(lambda _: reduce_rows(received.unbind(), op, out.view(-1)))
            return reduced.then(lambda _: out)
        handle, rows, row = self.handle_of(group), tensor.view(-1), out.view(-1)
        return TorchWork(
            lambda is_async: dist.reduce_scatter_tensor(row, rows, _OPS[op], handle, is_async),
            out,
            handle,
            group.ranks,
        )

    def barrier(self, group: Group) -> Work:
        # Without device_ids NCCL guesses a device.
        device_ids = None if "cpu" in self._backends else [self._device().index]
        handle = self.handle_of(group)
        return TorchWork(
            lambda is_async: dist.barrier(group=handle, async_op=is_async, device_ids=device_ids),
            None,
            handle,
            group.ranks,
        )

    def handle_of(self, group: Group) -> ProcessGroup:
        """The process group of ``group``."""
        handle: ProcessGroup | None = group.handle
        return self._world if handle is None else handle

    def _is_gloo_on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._backends.get("cpu") == "gloo"

    # --- for the watchdog ---

    def store(self) -> Store | None:
        return self.world_store() if self._own_store else None

    def world_store(self) -> Store | None:
        """The store of the default process group, even if other code has made the group."""
        _, store = _torch.backend_and_store(self._world)
        return store if isinstance(store, Store) else None

    def num_collectives(self) -> int:
        numbers = [_torch.sequence_number(group) for group, _ in _torch.groups_and_stores()]
        return 0 if None in numbers else sum(filter(None, numbers))

    def calls_begun(self) -> dict[str, int | None]:
        return waits.calls_begun()

    def find_wait(self, frame: FrameType) -> Wait:
        return waits.find_wait(frame, self._world, self._rank, self._device())

    def is_broken(self) -> bool | None:
        return self.world_connections.has_closed() if "gloo" in self._backends.values() else None

    def end_waits(self) -> None:
        self.world_connections.shut_down()
        self._groups.connections.shut_down()
