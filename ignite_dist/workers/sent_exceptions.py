"""Exceptions as bytes, for the launcher on the same machine."""

from __future__ import annotations

from typing import Any, NamedTuple

from ignite_dist.values import serialization

# A larger exception is not sent to the launcher.
_MAX_BYTES = 1 << 20


class _Parts(NamedTuple):
    """An exception whose class has its own ``__init__``, which pickle would call with other arguments."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def rebuild(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        error.__dict__.update(self.attributes)
        return error


def encode_exception(error: BaseException) -> bytes | None:
    """``error`` as bytes, without its traceback. None if it is too large or cannot be pickled."""
    for value in (error, _Parts(type(error), error.args, vars(error))):
        try:
            encoded = bytes(serialization.encode(value))
            if len(encoded) <= _MAX_BYTES:
                serialization.decode(encoded)  # its class may need other arguments
                return encoded
        except Exception:  # raised by the user's class
            continue
    return None


def decode_exception(encoded: bytes | None) -> BaseException | None:
    """The exception that was passed to :func:`encode_exception`; None if this process cannot make it."""
    if encoded is None:
        return None
    try:
        value = serialization.decode(encoded)
        error = value.rebuild() if isinstance(value, _Parts) else value
    except Exception:  # this process cannot import the class
        return None
    return error if isinstance(error, BaseException) else None
