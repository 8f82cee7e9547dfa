"""A computation model as a third party would write it: slow, correct, and over a key-value store alone.

It carries bytes and nothing else, gathers and broadcasts them, and cannot reduce.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from ignite_dist.comp_models.base import ComputationModel, Group
from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.comp_models.transport import CollectiveKind, Transport
from ignite_dist.comp_models.work import Completed, Work


class StoreModel(ComputationModel):
    name: ClassVar[str] = "store-dist"
    available_backends: ClassVar[tuple[str, ...]] = ("store",)
    library: ClassVar[str] = __name__

    live: ClassVar[StoreModel | None] = None
    num_contexts: ClassVar[int] = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        StoreModel.num_contexts += 1
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False)
        # Keys of its own in each context.
        super().__init__(StoreTransport(PrefixStore(str(StoreModel.num_contexts), store), rank))

    @classmethod
    def find(cls) -> StoreModel | None:
        return cls.live

    @classmethod
    def open(cls, backend: str, **options: Any) -> StoreModel:
        StoreModel.live = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return StoreModel.live

    class launcher(Launcher):
        @classmethod
        def start(  # type: ignore[override]
            cls, entry: Callable[..., Any], *, backend: str, nproc_per_node: int, colour: str = "red"
        ) -> list[Any]:
            return [(colour, nproc_per_node, entry(0))]

    def is_current(self) -> bool:
        return StoreModel.live is self

    def close(self) -> None:
        StoreModel.live = None

    def abort(self) -> None:
        StoreModel.live = None

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world_size

    def device(self) -> torch.device:
        return torch.device("cpu")

    def backend(self) -> str | None:
        return "store"


class StoreTransport(Transport):
    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self.rank = rank
        self.counts: dict[tuple[int, ...], int] = {}

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        return frozenset(ranks)

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if not isinstance(handle, frozenset):
            raise ValueError(f"no group: {handle!r}")
        return tuple(sorted(handle))

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        return kind in ("all_gather", "broadcast") and dtype is torch.uint8 and device.type == "cpu"

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        raise AssertionError("never called: it supports nothing")

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        assert tensor.dtype is torch.uint8
        assert tensor.is_contiguous()
        rows = torch.stack([self._exchange(tensor, rank, group) for rank in self._next(group)])
        return Completed(rows if out is None else out.copy_(rows))

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        assert tensor.dtype is torch.uint8
        self._next(group)
        return Completed(tensor.copy_(self._exchange(tensor, src, group)))

    def barrier(self, group: Group) -> Work:
        return self.all_gather(torch.zeros(1, dtype=torch.uint8), group)

    def _next(self, group: Group) -> tuple[int, ...]:
        assert self.rank in group.ranks
        self.counts[group.ranks] = self.counts.get(group.ranks, 0) + 1
        return group.ranks

    def _exchange(self, tensor: Tensor, src: int, group: Group) -> Tensor:
        key = f"{group.ranks}/{self.counts[group.ranks]}"
        if f"{key}/{self.rank}" != getattr(self, "_sent", ""):
            self._sent = f"{key}/{self.rank}"
            self._store.set(self._sent, bytes(tensor.flatten().tolist()).hex())
        received = bytearray.fromhex(self._store.get(f"{key}/{src}").decode())
        return torch.frombuffer(received, dtype=torch.uint8).view(tensor.shape) if received else tensor
