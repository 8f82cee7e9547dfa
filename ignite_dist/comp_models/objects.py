"""Gathers and broadcasts objects of any type as bytes, with the tensor primitives of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ignite_dist.comp_models.transport import Group, Transport
from ignite_dist.comp_models.work import communicates
from ignite_dist.values import message_header, serialization

_CPU = torch.device("cpu")


class Objects:
    """Gathers and broadcasts objects in one context.

    Args:
        transport: carries the bytes of the objects.
        rank: returns the rank of the caller.
        device: returns the device of the caller.
    """

    def __init__(
        self, transport: Transport, rank: Callable[[], int], device: Callable[[], torch.device]
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._device = device
        self._on_cpu: bool | None = None  # None: the transport has not been asked

    @communicates
    def gather(self, value: Any, group: Group) -> list[Any]:
        """``value`` of every rank, in the group's order. Large values need two collectives, small values one.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: after ``safe_objects()``, a rank sent bytes that could run code. Every rank of
                the group raises; no code has run, and the group remains usable.
            CollectiveMismatchError: a rank called a different collective.
        """
        return self.gather_packed(self.packed(value), group)

    def packed(self, value: Any) -> Any:
        """``value`` serialised for :meth:`gather_packed`. Later changes of ``value`` have no effect.

        Raises:
            TypeError: ``value`` cannot be serialised.
        """
        return serialization.pack(value)

    @communicates
    def gather_packed(self, payload: Any, group: Group) -> list[Any]:
        """See :meth:`gather`."""
        width, call = message_header.HEADER_BYTES, group.call
        gathered = memoryview(self.gather_bytes(message_header.write_header(payload, call), group))
        headers = [
            message_header.read_header(gathered[width * row : width * (row + 1)], rank, call)
            for row, rank in enumerate(group.ranks)
        ]
        if all(inline is not None for _, inline in headers):
            return [
                serialization.unpack(inline, rank, self._device)
                for (_, inline), rank in zip(headers, group.ranks, strict=True)
                if inline is not None
            ]
        rows = self._gather_large(payload, [size for size, _ in headers], group)
        return [
            serialization.unpack(row, rank, self._device) for row, rank in zip(rows, group.ranks, strict=True)
        ]

    def _gather_large(
        self, payload: serialization.Payload, sizes: Sequence[int], group: Group
    ) -> Sequence[bytearray | memoryview]:
        """The payloads of all ranks, of these sizes."""
        position = group.position(self._rank())
        if position is not None and self.device.type == "cpu":
            rows = [
                serialization.writable(payload) if row == position else serialization.new_buffer(size)
                for row, size in enumerate(sizes)
            ]
            self._transport.fill_rows(list(map(serialization.as_tensor, rows)), position, group)
            return rows
        width = max(sizes)
        padded = bytearray(width)
        sent = payload[:width]  # a rank outside of the group may have more bytes, which no rank reads
        padded[: len(sent)] = sent
        gathered = memoryview(self.gather_bytes(padded, group))
        # Each row is a copy, because the large tensors of an object stay in the memory of its row.
        return [bytearray(gathered[width * row : width * row + size]) for row, size in enumerate(sizes)]

    @communicates
    def broadcast(self, value: Any, src: int, group: Group) -> Any:
        """``value`` of the global rank ``src``, on every rank of the group. One or two collectives.

        Raises:
            TypeError: ``value`` cannot be serialised; nothing was sent.
            UnsafeObjectError: see :meth:`gather`.
            CollectiveMismatchError: ``src`` called a different collective.
        """
        return self.broadcast_packed(self.packed(value) if self._rank() == src else b"", src, group)

    @communicates
    def broadcast_packed(self, payload: Any, src: int, group: Group) -> Any:
        """See :meth:`broadcast`."""
        return serialization.unpack(self.broadcast_bytes(payload, src, group), src, self._device)

    @communicates
    def broadcast_bytes(
        self, payload: serialization.Payload, src: int, group: Group
    ) -> serialization.Payload:
        """``payload`` of the global rank ``src``. The payloads of other ranks are ignored."""
        is_src = self._rank() == src
        call = group.call
        header = (
            message_header.write_header(payload, call) if is_src else bytearray(message_header.HEADER_BYTES)
        )
        size, inline = message_header.read_header(memoryview(self._broadcast(header, src, group)), src, call)
        if inline is not None:
            return inline
        buffer = serialization.writable(payload) if is_src else serialization.new_buffer(size)
        return memoryview(self._broadcast(buffer, src, group))

    @communicates
    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        """The buffers of all ranks, concatenated in the group's order. All buffers have the same length."""
        device = self.device
        if device.type == "cpu":
            return self._transport.gather_bytes(buffer, group)
        gathered = bytearray(len(group.ranks) * len(buffer))
        sent = serialization.as_tensor(buffer).to(device)
        rows = self._transport.all_gather(sent, group).wait()
        serialization.as_tensor(gathered).view(rows.shape).copy_(rows)
        return gathered

    def _broadcast(self, buffer: bytearray | memoryview, src: int, group: Group) -> bytearray | memoryview:
        device = self.device
        tensor = serialization.as_tensor(buffer)
        if device.type == "cpu":
            self._transport.broadcast(tensor, src, group).wait()
        else:
            tensor.copy_(self._transport.broadcast(tensor.to(device), src, group).wait())
        return buffer

    @property
    def device(self) -> torch.device:
        """The device of tensors of bytes: the CPU if the backend supports it, else the caller's device."""
        if self._on_cpu is None:
            self._on_cpu = self._transport.supports("all_gather", None, torch.uint8, _CPU)
        return _CPU if self._on_cpu else self._device()


class LocalObjects(Objects):
    """Objects in a world of one rank. Nothing is sent, so nothing is serialised."""

    def packed(self, value: Any) -> Any:  # noqa: D102
        return value

    def gather_packed(self, payload: Any, group: Group) -> list[Any]:  # noqa: D102
        return [payload]

    def broadcast_packed(self, payload: Any, src: int, group: Group) -> Any:  # noqa: D102
        return payload

    def broadcast_bytes(
        self, payload: serialization.Payload, src: int, group: Group
    ) -> serialization.Payload:
        """See :meth:`Objects.broadcast_bytes`."""
        return payload
