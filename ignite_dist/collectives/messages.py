"""Messages of any type and size: each rank of a group sends its own to each other rank.

Every rank first sends a header to each rank. A header contains the message if it is small, so the exchange
of small messages takes one collective. If any message is larger, all ranks exchange the larger ones in a
second collective. Only the receiver of a message gets its bytes (in groups of XLA, all ranks gather all
bytes, and the receiver keeps its own).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_dist.collectives.arguments import copy_of
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.path import is_member
from ignite_dist.collectives.primitives import to_message
from ignite_dist.collectives.sending import plain, to_device
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.all_to_all import exchange_parts
from ignite_dist.comp_models.transport import Sizes
from ignite_dist.comp_models.work import Completed, Steps, Work
from ignite_dist.values import message_header, serialization
from ignite_dist.values.calls import Call

NOTHING: Any = object()
"""Stands for a rank to which nothing is sent, or from which nothing has come."""

# Kind, whether the sender has a larger message, length of the layout, size of data.
_START = struct.Struct("<B?hq")
_NO_MESSAGE, _OBJECT, _TENSOR, _LOCAL = range(4)
_INLINE_BYTES = message_header.INLINE_BYTES - _START.size
_CPU = torch.device("cpu")
# Parts of a buffer begin at multiples of the largest item size, so that they can be viewed in any dtype.
_ALIGNMENT = 16


class Message(NamedTuple):
    """A value for one rank.

    Attributes:
        kind: ``_NO_MESSAGE``, ``_OBJECT``, ``_TENSOR``, or ``_LOCAL`` in a world of one rank.
        layout: dtype, device type and shape of a tensor.
        data: the bytes of the value, as a 1-d uint8 tensor; for ``_LOCAL`` the value itself.
    """

    kind: int
    layout: bytes
    data: Any

    @property
    def is_inline(self) -> bool:
        """True if the message fits into a header."""
        return len(self.layout) + len(self.data) <= _INLINE_BYTES


def encode(model: ComputationModel, function: str, value: Any) -> Message:
    """The message of ``value``. The data of a tensor is not copied.

    Raises:
        TypeError: ``value`` cannot be sent. The message names ``function``.
    """
    if value is NOTHING:
        return _EMPTY
    if isinstance(value, Tensor):
        check_dense(function, value)
    if model.get_world_size() == 1:
        return Message(_LOCAL, b"", value)
    if isinstance(value, Tensor):
        shape = ",".join(map(str, value.shape))
        layout = f"{str(value.dtype).removeprefix('torch.')} {value.device.type} {shape}".encode()
        if len(layout) < _INLINE_BYTES:  # else the tensor has dozens of dimensions
            return Message(_TENSOR, layout, _bytes_of(plain(value)))
    return Message(_OBJECT, b"", serialization.as_tensor(serialization.writable(serialization.pack(value))))


_EMPTY = Message(_NO_MESSAGE, b"", torch.empty(0, dtype=torch.uint8, device=_CPU))


def begin_messages(model: ComputationModel, messages: Sequence[Message], group: Group) -> Work:
    """Begin to send ``messages[i]`` to the rank at position ``i``. The result: what each rank has sent here.

    Args:
        model: the model of the context.
        messages: one message per rank of ``group``, in its order. None on a rank outside the group, which
            takes part with XLA.
        group: the group.

    Raises:
        CollectiveMismatchError: a rank called a different collective.
    """
    messages = messages or [_EMPTY] * len(group.ranks)
    if messages[0].kind == _LOCAL:
        return Completed([copy_of(messages[0].data)])
    return Steps(lambda: _exchange_messages(model, messages, group))


def _exchange_messages(model: ComputationModel, messages: Sequence[Message], group: Group) -> list[Any]:
    headers = _exchange_headers(model, messages, group)
    larger: list[Tensor | None] = [None] * len(headers)
    if any(header.has_larger for header in headers):
        larger = _exchange_larger(model, messages, headers, group)
    if not is_member(model, group):
        return [NOTHING] * len(headers)
    return [
        _decode(model, header, header.inline if data is None else data, rank)
        for header, data, rank in zip(headers, larger, group.ranks, strict=True)
    ]


class _Header(NamedTuple):
    kind: int
    has_larger: bool  # the sender has a larger message for any rank
    layout: bytes
    nbytes: int
    inline: Tensor | None  # the data; None if it comes in the second collective

    @property
    def padded_bytes(self) -> int:
        """Bytes of the second collective."""
        return 0 if self.inline is not None else _padded(self.nbytes)


def _exchange_headers(model: ComputationModel, messages: Sequence[Message], group: Group) -> list[_Header]:
    has_larger = not all(message.is_inline for message in messages)
    rows = bytearray()
    for kind, layout, data in messages:
        start = _START.pack(kind, has_larger, len(layout), len(data)) + layout
        is_inline = len(start) + len(data) <= message_header.INLINE_BYTES
        inline = to_message([data]) if is_inline else b""
        rows += message_header.write_header(start + inline, group.call)
    sent = serialization.as_tensor(rows).to(model.objects.device)
    received = exchange_parts(model.transport, model.get_rank(), sent, group).wait()
    table = bytearray(len(rows))
    serialization.as_tensor(table).copy_(received)
    width = message_header.HEADER_BYTES
    return [
        _read_header(memoryview(table)[width * row : width * (row + 1)], rank, group.call)
        for row, rank in enumerate(group.ranks)
    ]


def _read_header(row: memoryview, rank: int, call: Call) -> _Header:
    _, content = message_header.read_header(row, rank, call)
    assert content is not None  # a header always fits
    kind, has_larger, layout_size, nbytes = _START.unpack_from(content)
    end = _START.size + layout_size
    rest = bytearray(content[end:])
    inline = serialization.as_tensor(rest) if len(rest) == nbytes else None
    return _Header(kind, has_larger, bytes(content[_START.size : end]), nbytes, inline)


def _exchange_larger(
    model: ComputationModel, messages: Sequence[Message], headers: Sequence[_Header], group: Group
) -> list[Tensor | None]:
    """The data of the larger messages for this rank; None from a rank without one."""
    device = model.objects.device
    padding = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [padding]
    for message in messages:
        if not message.is_inline:
            parts += [to_device(message.data, device), padding.new_zeros(-len(message.data) % _ALIGNMENT)]
    sent_sizes = [0 if message.is_inline else _padded(len(message.data)) for message in messages]
    received_sizes = [header.padded_bytes for header in headers]
    sent = torch.cat(parts)
    sizes = Sizes(sent_sizes, received_sizes)
    received = exchange_parts(model.transport, model.get_rank(), sent, group, sizes=sizes).wait()
    larger = [
        part[: header.nbytes] if len(part) else None
        for part, header in zip(torch.split(received, received_sizes), headers, strict=True)
    ]
    if sum(data is not None for data in larger) > 1:  # views would keep the whole buffer in memory
        larger = [  # _decode copies objects
            data.clone() if data is not None and header.kind == _TENSOR else data
            for data, header in zip(larger, headers, strict=True)
        ]
    return larger


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _decode(model: ComputationModel, header: _Header, data: Tensor | None, rank: int) -> Any:
    if header.kind == _NO_MESSAGE:
        return NOTHING
    assert data is not None
    if header.kind == _OBJECT:
        payload = serialization.new_buffer(len(data))
        serialization.as_tensor(payload).copy_(data)
        return serialization.unpack(payload, rank, model.device)
    dtype_name, device_type, shape = header.layout.decode().split(" ")
    dtype: torch.dtype = getattr(torch, dtype_name)
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    device = _CPU if device_type == "cpu" else model.device()
    if not data.numel():
        return torch.empty(sizes, dtype=dtype, device=device)
    if dtype.is_complex:
        return torch.view_as_complex(to_device(data.view(dtype.to_real()).view(*sizes, 2), device))
    return to_device(data.view(dtype).view(sizes), device)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous ``tensor``. XLA would change the bits of a complex number."""
    return serialization.as_bytes(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
