"""Objects of any type between ranks: as bytes, over the tensor primitives of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ignite_dist.comp_models.transport import Group, Transport
from ignite_dist.values import serialization

__all__ = ["LocalObjects", "Objects"]

_CPU = torch.device("cpu")


class Objects:
    """Gathers and broadcasts objects in one context.

    Args:
        transport: carries their bytes.
        rank: gives the rank of the caller.
        device: gives the device of the caller.
    """

    def __init__(
        self, transport: Transport, rank: Callable[[], int], device: Callable[[], torch.device]
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._device = device

    def gather(self, value: Any, group: Group) -> list[Any]:
        """``value`` of every rank in the group's order. One collective where all fit the header, else two.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: after ``safe_objects()``, what a rank sent could run code. On every rank of the
                group, because all of them get it; nothing has run, and the group is as usable as before.
            CollectiveMismatchError: a rank made another call.
        """
        return self.gather_packed(self.packed(value), group)

    def packed(self, value: Any) -> Any:
        """``value`` as :meth:`gather_packed` takes it: what the caller does with it later changes nothing.

        Raises:
            TypeError: it cannot be serialised.
        """
        return serialization.pack(value)

    def gather_packed(self, payload: Any, group: Group) -> list[Any]:
        """See :meth:`gather`."""
        width = serialization.HEADER_BYTES
        gathered = memoryview(self.gather_bytes(serialization.write_header(payload), group))
        headers = [
            serialization.read_header(gathered[width * row : width * (row + 1)], rank)
            for row, rank in enumerate(group.ranks)
        ]
        if all(inline is not None for _, inline in headers):
            return [
                serialization.unpack(inline, rank)
                for (_, inline), rank in zip(headers, group.ranks, strict=True)
                if inline is not None
            ]
        width = max(size for size, _ in headers)
        padded = bytearray(width)
        own = payload[:width]  # a rank outside may have more than any member, and nobody looks at it
        padded[: len(own)] = own
        rows = memoryview(self.gather_bytes(padded, group))
        return [
            serialization.unpack(rows[width * row : width * row + size], rank)
            for row, ((size, _), rank) in enumerate(zip(headers, group.ranks, strict=True))
        ]

    def broadcast(self, value: Any, src: int, group: Group) -> Any:
        """``value`` of the global rank ``src`` on every rank of the group. One collective or two, as above.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: as above, on every rank.
            CollectiveMismatchError: ``src`` made another call.
        """
        return self.broadcast_packed(self.packed(value) if self._rank() == src else b"", src, group)

    def broadcast_packed(self, payload: Any, src: int, group: Group) -> Any:
        """See :meth:`broadcast`."""
        return serialization.unpack(self.broadcast_bytes(payload, src, group), src)

    def broadcast_bytes(self, payload: bytes, src: int, group: Group) -> bytes | memoryview:
        """``payload`` of the global rank ``src``; what the others give is not looked at."""
        is_src = self._rank() == src
        header = serialization.write_header(payload) if is_src else bytearray(serialization.HEADER_BYTES)
        size, inline = serialization.read_header(memoryview(self._broadcast(header, src, group)), src)
        if inline is not None:
            return inline
        return memoryview(self._broadcast(bytearray(payload) if is_src else bytearray(size), src, group))

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        """``buffer``, of the same length on every rank, from all ranks of the group in its order."""
        device = self.device
        gathered = bytearray(len(group.ranks) * len(buffer))
        rows = serialization.as_tensor(gathered).view(len(group.ranks), len(buffer))
        sent = serialization.as_tensor(buffer)
        if device.type == "cpu":
            self._transport.all_gather(sent, group, out=rows).wait()
        else:
            rows.copy_(self._transport.all_gather(sent.to(device), group).wait())
        return gathered

    def _broadcast(self, buffer: bytearray, src: int, group: Group) -> bytearray:
        device = self.device
        tensor = serialization.as_tensor(buffer)
        if device.type == "cpu":
            self._transport.broadcast(tensor, src, group).wait()
        else:
            tensor.copy_(self._transport.broadcast(tensor.to(device), src, group).wait())
        return buffer

    @property
    def device(self) -> torch.device:
        """Where bytes are sent from: the CPU, if the backend takes them there."""
        return _CPU if self._transport.supports("all_gather", None, torch.uint8, _CPU) else self._device()


class LocalObjects(Objects):
    """In a world of one there is nobody to send anything to, so nothing is serialised."""

    def packed(self, value: Any) -> Any:  # noqa: D102
        return value

    def gather_packed(self, payload: Any, group: Group) -> list[Any]:  # noqa: D102
        return [payload]

    def broadcast_packed(self, payload: Any, src: int, group: Group) -> Any:  # noqa: D102
        return payload

    def broadcast_bytes(self, payload: bytes, src: int, group: Group) -> bytes | memoryview:  # noqa: D102
        return payload
