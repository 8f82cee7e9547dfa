"""Convert values to bytes and back.

A launcher and its workers exchange pickles over pipes (:func:`encode`, :func:`decode`). Ranks exchange
messages in collectives, possibly over a network (:func:`pack`, :func:`unpack`): pickles, or, after
:func:`safe_objects`, the format of ``torch.save``. ``torch.load(weights_only=True)`` reads this format
without running unregistered code.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ignite_dist.errors import UnsafeObjectError
from ignite_dist.internals import _torch
from ignite_dist.values import safe_objects
from ignite_dist.values.arrivals import OwnDevice, arrive, arriving_on, no_accelerator
from ignite_dist.values.views import Views, pickler_of

# --- pipes: between a launcher and its workers -------------------------------------------------------


# ``bytes`` if the value has no large tensor or array; else memory that can be written to.
Payload = bytes | bytearray | memoryview
# Like ``pickle.Pickler.reducer_override``. It returns NotImplemented for objects without a special reduction.
Override = Callable[[Any], Any]


def encode(value: Any, override: Override | None = None) -> Payload:
    """``value`` as bytes. A tensor is sent with the part of its storage that it uses; see :class:`Views`.

    Plain pickle sends functions and classes by reference; scripts rely on this. cloudpickle handles objects
    that pickle refuses: lambdas, closures, notebook cells.

    Raises:
        TypeError: neither library can serialise ``value``. Nothing has been sent.
    """
    with suppress(Exception):  # a __reduce__ may raise anything
        return _pickled(pickle.Pickler, value, override)
    return encode_by_value(value, override)


def encode_by_value(value: Any, override: Override | None = None) -> Payload:
    """``value`` as bytes that can be decoded without this process's main module.

    Raises:
        TypeError: cloudpickle cannot serialise ``value``.
    """
    import cloudpickle

    try:
        return _pickled(cloudpickle.Pickler, value, override)
    except Exception as error:
        raise TypeError(
            f"A value of type {type(value).__qualname__} cannot be sent to another process: "
            f"{str(error).rstrip('.')}. "
            "Neither pickle nor cloudpickle can serialise it. Send the underlying data instead."
        ) from error


def _pickled(base: Any, value: Any, override: Override | None) -> Payload:
    """The pickle of ``value`` by ``base``, or by a pickler that first asks ``override``."""

    def stays_whole(storage: UntypedStorage) -> bool:
        return override is not None and override(storage) is not NotImplemented

    views = Views(stays_whole, for_pickle=True)
    needs_copies = False

    def reduce(obj: Any) -> Any:
        nonlocal needs_copies
        if override is not None and (found := override(obj)) is not NotImplemented:
            return found
        if isinstance(obj, Tensor):
            return views.reduce(obj)
        if not isinstance(obj, (UntypedStorage, torch.TypedStorage)):
            return NotImplemented
        if not is_cut and isinstance(obj, UntypedStorage) and obj.device.type not in ("cpu", "meta"):
            needs_copies = True
            return UntypedStorage, ()  # not copied before its parts are known
        return _reduce_storage(obj)

    for is_cut in (False, True):
        file, buffers = io.BytesIO(), _LargeBuffers()
        pickler_of(base, reduce, file, buffers.add).dump(value)
        if is_cut or not (views.cut() or needs_copies):
            break
    return buffers.framed(file) if buffers.found else file.getvalue()


def _reduce_storage(obj: torch.TypedStorage | UntypedStorage) -> Any:
    if isinstance(obj, torch.TypedStorage):
        return _torch.typed, (_torch.untyped(obj), obj.dtype)
    if obj.device.type == "meta":
        return NotImplemented
    on_cpu: UntypedStorage = obj.cpu()  # type: ignore[no-untyped-call]  # no copy if it is there
    size = on_cpu.nbytes()
    memory: Any
    if size < _LARGE_BYTES:
        memory = bytearray(ctypes.string_at(on_cpu.data_ptr(), size)) if size else b""
    else:
        memory = (ctypes.c_ubyte * size).from_address(on_cpu.data_ptr())
        memory.owner = on_cpu
        memory = pickle.PickleBuffer(memory)
    return _storage, (memory, str(obj.device))


def _storage(memory: Any, device: str) -> UntypedStorage:
    """A storage with the bytes of ``memory``. It shares the memory of a large buffer."""
    tensor = as_tensor(memory)
    storage = (tensor if len(memory) >= _LARGE_BYTES else tensor.clone()).untyped_storage()
    return arrive(storage, device)  # type: ignore[no-any-return]


# --- large buffers: beside the pickle, which has only references to them ----------------------------------

_LARGE_BYTES = 1 << 14
_MAPPED_BYTES = 1 << 20
_MAGIC = b"\x00idp"  # no pickle starts with it
_FRAME = struct.Struct("<4sqq")  # _MAGIC, number of buffers, length of the pickle
_ALIGNMENT = 64


class _LargeBuffers:
    """The large buffers of one pickle: the bytes of storages, numpy arrays and other objects."""

    def __init__(self) -> None:
        self.found: list[memoryview] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """The ``buffer_callback`` of a pickler. True if ``buffer`` is small: the pickle contains it."""
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        self.found.append(raw)
        return False

    def framed(self, file: io.BytesIO) -> memoryview:
        """The pickle in ``file`` and the buffers, each of which is copied once."""
        sizes = [buffer.nbytes for buffer in self.found]
        pickled = file.getbuffer()
        extents = _extents(sizes, len(pickled))
        payload = memoryview(new_buffer(extents[-1][1]))
        _FRAME.pack_into(payload, 0, _MAGIC, len(sizes), len(pickled))
        struct.pack_into(f"<{len(sizes)}q", payload, _FRAME.size, *sizes)
        for (start, end), part in zip(extents, [pickled, *self.found], strict=True):
            payload[start:end] = part
        return payload


def _extents(sizes: Sequence[int], pickle_size: int) -> list[tuple[int, int]]:
    """Start and end of the pickle, and of the buffers of these sizes."""
    end = _FRAME.size + 8 * len(sizes)
    extents = [(end, end := end + pickle_size)]
    for size in sizes:
        start = end + -end % _ALIGNMENT
        extents.append((start, end := start + size))
    return extents


def _unframed(payload: memoryview) -> tuple[memoryview, list[memoryview]]:
    """The pickle in ``payload`` and its buffers.

    Raises:
        UnpicklingError: ``payload`` is not complete.
    """
    try:
        _, num_buffers, pickle_size = _FRAME.unpack_from(payload)
        sizes = struct.unpack_from(f"<{num_buffers}q", payload, _FRAME.size)
    except struct.error as error:
        raise pickle.UnpicklingError(f"its table is not complete: {error}") from error
    extents = _extents(sizes, pickle_size)
    if min(pickle_size, *sizes) < 0 or extents[-1][1] != len(payload):
        raise pickle.UnpicklingError("its buffers are not complete")
    pickled, *buffers = (payload[start:end] for start, end in extents)
    return pickled, buffers


def decode(payload: Payload, own_device: OwnDevice = no_accelerator) -> Any:
    """The value that was passed to :func:`encode`. Use this only for data from processes of this job.

    Large tensors and arrays share the memory of ``payload`` if it can be written to. So do not use it again.

    Args:
        payload: the bytes.
        own_device: returns the device on which tensors of its type arrive. Others arrive on the CPU.
    """
    with arriving_on(own_device):
        if bytes(payload[: len(_MAGIC)]) != _MAGIC:
            return pickle.loads(payload)
        view = memoryview(payload)
        pickled, buffers = _unframed(memoryview(bytearray(view)) if view.readonly else view)
        return pickle.loads(pickled, buffers=buffers)


# --- messages: between the ranks of a collective -----------------------------------------------------


def pack(value: Any) -> Payload:
    """``value`` as the payload of a message: a pickle, or the format of ``torch.save`` in safe mode.

    Raises:
        TypeError: ``value`` cannot be sent. Nothing has been sent.
    """
    return safe_objects.save(value) if safe_objects.is_safe() else encode(value)


def unpack(payload: Payload, rank: int, own_device: OwnDevice = no_accelerator) -> Any:
    """The value that the global ``rank`` passed to :func:`pack`. For ``own_device`` see :func:`decode`.

    Raises:
        UnsafeObjectError: in safe mode, the payload could run code. No code was run.
        CollectiveMismatchError: the payload is not a complete message.
    """
    if safe_objects.is_message(payload):  # always decoded safely, in either mode
        return safe_objects.load(payload, rank, own_device)
    if safe_objects.is_safe():
        raise UnsafeObjectError(
            f"Rank {rank} sent a plain pickle, which could run any code in this process. It was not decoded: "
            "this rank accepts only safe objects. Call idist.safe_objects() on every rank, or set "
            f"{safe_objects.VARIABLE}=1 for all ranks.",
            rank,
        )
    try:
        return decode(payload, own_device)
    except (pickle.UnpicklingError, EOFError) as error:
        raise safe_objects.decoding_error(rank, error) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a uint8 view, for libraries that do not know its dtype."""
    # torch refuses a view of another dtype if a stride is 0, and view(-1) of no or one element may keep it.
    size = tensor.numel()
    flat = tensor.as_strided((size,), (1,)) if size < 2 else tensor.view(-1)
    return flat.view(torch.uint8)


def new_buffer(size: int) -> bytearray | memoryview:
    """Memory for a message. A large one has huge pages where the system allows it: a third of the time."""
    if size < _MAPPED_BYTES:
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def writable(payload: Payload) -> bytearray | memoryview:
    """``payload`` itself, or a copy of ``bytes``."""
    return bytearray(payload) if isinstance(payload, bytes) else payload


def as_tensor(buffer: bytearray | memoryview) -> Tensor:
    """A uint8 tensor that shares the memory of ``buffer``."""
    return (
        torch.frombuffer(buffer, dtype=torch.uint8)
        if buffer
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
