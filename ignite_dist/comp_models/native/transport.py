"""The transport over torch.distributed's process groups."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import count
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, GroupMember, ProcessGroup, Store
from torch.distributed.distributed_c10d import AllgatherOptions

from ignite_dist import _torch
from ignite_dist.comp_models.native import gloo, narrow_floats, waits
from ignite_dist.comp_models.native.works import TorchWork, TorchWorks
from ignite_dist.comp_models.transport import CollectiveKind, Group, Transport, WaitedFor
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.rendezvous import connections
from ignite_dist.values.ranks import describe_ranks
from ignite_dist.values.reduce_ops import reduce_rows
from ignite_dist.values.serialization import as_bytes, as_tensor

__all__ = ["NativeTransport"]


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
}
# Options by is_async. If is_async is False, gloo works in the caller's thread, and NCCL in its stream.
_ALL_REDUCE = {
    is_async: {name: _all_reduce_options(op, is_async) for name, op in _OPS.items()}
    for is_async in (False, True)
}
_ALL_GATHER = {is_async: _all_gather_options(is_async) for is_async in (False, True)}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_ARITHMETIC = frozenset({"SUM", "PRODUCT", "MIN", "MAX"})
# What a backend supports: tested for gloo, from torch's documentation for MPI. Any other one is like NCCL.
_CARRIED_DTYPES = {
    "gloo": _FLOATS | _INTS | {torch.bool},
    "mpi": (_INTS - {torch.int8}) | {torch.float32, torch.float64},
}
_CARRIED_OPS = {"gloo": _ARITHMETIC | {"AND", "OR"}}

# gloo does not split so few elements into segments. Then one exchange is not faster than gloo's all-reduce.
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

    overlap: ClassVar[bool] = True

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
        self._connecting = connecting
        self._own_store = own_store
        self._world_ranks = tuple(range(world.size()))
        # For each tuple of ranks, a counter of the groups made of them; and the store connections that no
        # thread is using. No lock is needed, because next(), pop() and append() are atomic.
        self._generations: dict[tuple[int, ...], Iterator[int]] = {}
        self._free_connections: list[Store] = []
        self._scratch = gloo.ScratchBuffers()
        # gloo's connections in the world and in groups; recorded only if open() has made the context
        self.to_all, self._to_groups = connections.Connections(), connections.Connections()

    # --- groups ---

    def world_handle(self) -> ProcessGroup:
        return self._world

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        if not ranks:  # torch treats an empty list as all ranks
            inspect.signature(dist.new_group).bind([], **options)
            return GroupMember.NON_GROUP_MEMBER
        with self._connecting(), self._to_groups.noted():
            return dist.new_group(list(ranks), **options) if options else self._make_group_by_name(ranks)

    def _make_group_by_name(self, ranks: tuple[int, ...]) -> Any:
        # torch names a group by the number of groups that this rank has made, so ranks with different numbers
        # would wait for each other forever. A name made of the ranks needs calls from the members only.
        generation = next(self._generations.setdefault(ranks, count(1)))
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
        backend, worlds_store = _torch.backend_and_store(self._world)
        store = self._connection(worlds_store) if self._rank in ranks else worlds_store
        handle = _torch.new_group_by_name(
            f"ignite_dist:{digest}:{generation}",
            ranks,
            self._rank,
            backend,
            store,
            # torch would not pass the world's timeout on to the group.
            timeout=_torch.timeout_of(self._world, self._device()),
            description=f"ignite_dist:{describe_ranks(ranks)}",
        )
        if handle is not GroupMember.NON_GROUP_MEMBER:
            self._free_connections.append(store)  # not after an error: a reply may still be unread
        return handle

    def _connection(self, worlds_store: Any) -> Any:
        """A connection to the store that no other thread is using.

        A thread keeps its connection while it waits for the other members. Two threads with one connection
        would deadlock if two ranks made their groups in opposite orders.
        """
        try:
            return self._free_connections.pop()
        except IndexError:
            return _connected_again(worlds_store)

    def is_alive(self, handle: Any) -> bool:
        return _torch.is_live(handle) or handle == GroupMember.NON_GROUP_MEMBER

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if not isinstance(handle, ProcessGroup):
            if isinstance(handle, int) and handle == GroupMember.NON_GROUP_MEMBER:
                return ()
            raise ValueError(f"A group is a list of ranks or a ProcessGroup, got {handle!r}.")
        try:
            return tuple(dist.get_process_group_ranks(handle))
        except KeyError:
            raise ValueError(
                "This ProcessGroup was destroyed, or belongs to a context that has ended."
            ) from None

    def group_key(self, group: Group) -> str:
        handle = group.handle
        return "" if handle is None or handle is self._world else handle.group_name

    def forget(self) -> None:
        """Drop the connections to the store, because the context has ended."""
        self._free_connections.clear()

    # --- primitives ---

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        backend = self._backends.get(device.type)
        if kind == "reduce_narrow":
            # Tested with gloo only. For large jobs on GPUs, NCCL's tree algorithm uses the network better.
            return self._is_gloo_on_cpu(device)
        if kind not in ("all_reduce", "all_gather", "broadcast") or backend is None:
            return False
        if dtype not in _CARRIED_DTYPES.get(backend, _FLOATS | _INTS):
            return False
        return op is None or op in _CARRIED_OPS.get(backend, _ARITHMETIC)

    # The primitives call the process group's methods. torch.distributed's functions also log and count calls,
    # which takes 15-25 us per call if the CPU's caches are cold after waiting for other ranks.

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        handle = self._handle(group)
        group_size = len(group.ranks)
        if (
            tensor.numel() > _UNCUT_NUMEL
            and self._is_gloo_on_cpu(tensor.device)
            and gloo.in_one_round(tensor.nbytes, group_size)
        ):
            exchange, reduce = self._scratch.all_reduce(handle, tensor, op, group_size)
            return TorchWork(exchange, None, handle, group.ranks).then(reduce)
        lent = [gloo.lend(tensor)]
        return TorchWork(
            lambda is_async: handle.allreduce(lent, _ALL_REDUCE[is_async][op]), tensor, handle, group.ranks
        )

    def reduce_narrow(self, tensor: Tensor, op: str, group: Group) -> Work:
        group_size = len(group.ranks)
        if group_size == 1 or not tensor.numel():
            return Completed(tensor)
        if not gloo.in_one_round(tensor.nbytes, group_size):
            return Steps(lambda: self._reduce_in_parts(tensor, op, group))
        if tensor.numel() > _UNCUT_NUMEL and tensor.dtype in _FLOATS:
            return self.all_reduce(tensor, op, group)  # at this size it gathers and reduces, too
        rows = tensor.new_empty((group_size, *tensor.shape))
        gathered = self.all_gather(as_bytes(tensor), group, out=as_bytes(rows).view(group_size, -1))
        return gathered.then(lambda _: reduce_rows(rows.unbind(), op, out=tensor))

    def _reduce_in_parts(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        handle, group_size = self._handle(group), len(group.ranks)

        def exchange(sent: Tensor, received: Tensor) -> None:
            TorchWork(lambda _: gloo.exchange(handle, sent, received), None, handle, group.ranks).wait()

        def gather(sent: Tensor, received: Tensor) -> None:
            self.all_gather(sent, group, out=received.view(group_size, -1)).wait()

        return narrow_floats.reduce_in_parts(tensor, op, group_size, exchange, gather)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        handle = self._handle(group)
        group_size = len(group.ranks)
        if out is None:
            out = torch.empty((group_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() == 0:
            return Completed(out)
        if self._is_gloo_on_cpu(tensor.device):
            if gloo.in_one_round(tensor.nbytes, group_size):
                sent = tensor.expand(out.shape).contiguous()
                return TorchWork(lambda _: gloo.exchange(handle, sent, out), out, handle, group.ranks)
            out[group.position(self._rank)].copy_(tensor)
            works = gloo.stream(handle, out)
            if works is not None:
                return TorchWorks(works, out, handle, group.ranks)
        into, lent = gloo.lend(out.view(-1)), gloo.lend(tensor.view(-1))
        return TorchWork(
            lambda is_async: _torch.all_gather_into(handle, into, lent, _ALL_GATHER[is_async]),
            out,
            handle,
            group.ranks,
        )

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        group_size = len(group.ranks)
        if self._backends.get("cpu") != "gloo" or not gloo.in_one_round(len(buffer), group_size):
            return super().gather_bytes(buffer, group)
        handle, gathered = self._handle(group), bytearray(group_size * len(buffer))
        # Copies of bytes take less time than torch's operators on tensors.
        sent, received = as_tensor(buffer * group_size), as_tensor(gathered)
        TorchWork(lambda _: gloo.exchange(handle, sent, received), None, handle, group.ranks).wait()
        return gathered

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        root = group.position(src)
        assert root is not None
        handle = self._handle(group)
        lent, is_src = [gloo.lend(tensor)], src == self._rank
        return TorchWork(
            lambda is_async: handle.broadcast(lent, gloo.from_root(root, is_async)),
            tensor,
            handle,
            group.ranks if is_src else (src,),
            needs_all=not is_src,
        )

    def barrier(self, group: Group) -> Work:
        # Without device_ids NCCL guesses a device.
        device_ids = None if "cpu" in self._backends else [self._device().index]
        handle = self._handle(group)
        return TorchWork(
            lambda is_async: dist.barrier(group=handle, async_op=is_async, device_ids=device_ids),
            None,
            handle,
            group.ranks,
        )

    def _handle(self, group: Group) -> ProcessGroup:
        handle: ProcessGroup | None = group.handle
        return self._world if handle is None else handle

    def _is_gloo_on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._backends.get("cpu") == "gloo"

    # --- for the watchdog ---

    def store(self) -> Store | None:
        return self.worlds_store() if self._own_store else None

    def worlds_store(self) -> Store | None:
        """The store of the default process group, even if other code has made the group."""
        _, store = _torch.backend_and_store(self._world)
        return store if isinstance(store, Store) else None

    def num_collectives(self) -> int:
        numbers = [_torch.sequence_number(group) for group, _ in _torch.groups_and_stores()]
        return 0 if None in numbers else sum(filter(None, numbers))

    def calls_begun(self) -> dict[str, int | None]:
        return waits.calls_begun()

    def waited_for(self, frame: FrameType) -> WaitedFor:
        return waits.waited_for(frame, self._world, self._rank, self._device())

    def is_broken(self) -> bool | None:
        return self.to_all.one_is_gone() if "gloo" in self._backends.values() else None

    def end_waits(self) -> None:
        self.to_all.cut()
        self._to_groups.cut()


def _connected_again(store: Any) -> Any:
    """A new connection to ``store``, or ``store`` if it cannot be cloned; None without a store (MPI)."""
    if store is None:
        return None
    try:
        return store.clone()
    except DistError:  # the store's server is gone
        raise
    except RuntimeError:  # a user's store, written in Python, has no clone()
        return store
