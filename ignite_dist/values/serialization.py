"""Convert values to bytes and back.

A launcher and its workers exchange pickles over pipes (:func:`encode`, :func:`decode`). Ranks exchange
messages in collectives, possibly over a network (:func:`pack`, :func:`unpack`): pickles, or, after
:func:`safe_objects`, the format of ``torch.save``. ``torch.load(weights_only=True)`` reads this format
without running unregistered code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ignite_dist.errors import UnsafeObjectError
from ignite_dist.values import safe_objects

# --- pipes: between a launcher and its workers -------------------------------------------------------


# Like ``pickle.Pickler.reducer_override``. It returns NotImplemented for objects without a special reduction.
Override = Callable[[Any], Any]


def encode(value: Any, override: Override | None = None) -> bytes:
    """``value`` as bytes.

    Plain pickle sends functions and classes by reference; scripts rely on this. cloudpickle handles objects
    that pickle refuses: lambdas, closures, notebook cells.

    Raises:
        TypeError: neither library can serialise ``value``. Nothing has been sent.
    """
    try:
        return _pickled(pickle.Pickler, value, override)
    except Exception:  # a __reduce__ may raise anything
        return encode_by_value(value, override)


def encode_by_value(value: Any, override: Override | None = None) -> bytes:
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


def _pickled(base: Any, value: Any, override: Override | None) -> bytes:
    """The pickle of ``value`` by ``base``, or by a pickler that first asks ``override``."""

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            found = override(obj)  # type: ignore[misc]
            return (
                found
                if found is not NotImplemented or base is pickle.Pickler
                else super().reducer_override(obj)
            )

    file = io.BytesIO()
    (base if override is None else Pickler)(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def decode(payload: bytes | memoryview) -> Any:
    """The value that was passed to :func:`encode`. Use this only for data from processes of this job."""
    return pickle.loads(payload)


# --- messages: between the ranks of a collective -----------------------------------------------------


def pack(value: Any) -> bytes:
    """``value`` as the payload of a message: a pickle, or the format of ``torch.save`` in safe mode.

    Raises:
        TypeError: ``value`` cannot be sent. Nothing has been sent.
    """
    return safe_objects.save(value) if safe_objects.is_safe() else encode(value)


def unpack(payload: bytes | memoryview, rank: int) -> Any:
    """The value that the global ``rank`` passed to :func:`pack`.

    Raises:
        UnsafeObjectError: in safe mode, the payload could run code. No code was run.
        CollectiveMismatchError: the payload is not a complete message.
    """
    if safe_objects.is_message(payload):  # always decoded safely, in either mode
        return safe_objects.load(payload, rank)
    if safe_objects.is_safe():
        raise UnsafeObjectError(
            f"Rank {rank} sent a plain pickle, which could run any code in this process. It was not decoded: "
            "this rank accepts only safe objects. Call idist.safe_objects() on every rank, or set "
            f"{safe_objects.VARIABLE}=1 for all ranks.",
            rank,
        )
    try:
        return decode(payload)
    except (pickle.UnpicklingError, EOFError) as error:
        raise safe_objects.decoding_error(rank, error) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a uint8 view, for libraries that do not know its dtype."""
    # view(-1) of one element may keep a stride of 0, with which torch views no bytes.
    flat = tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.view(-1)
    return flat.view(torch.uint8)


def as_tensor(buffer: bytearray) -> Tensor:
    """A uint8 tensor that shares the memory of ``buffer``."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
