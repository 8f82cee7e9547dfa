"""Exceptions as bytes, for the launcher on the same machine.

Pickle would call the class with ``error.args``, which may fail, run code or change the text, and it leaves
out causes. So an exception is sent in parts: its class, its arguments, its attributes, and the other
exceptions of its chain and its group. A part that cannot be sent is replaced; the others arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import Repr
from types import MemberDescriptorType
from typing import Any

from ignite_dist.values import serialization

# Limit of all values together. Larger values are left out.
_MAX_BYTES = 1 << 20
# Limit of the exceptions in a chain and its groups. Further ones are left out.
_MAX_EXCEPTIONS = 1000
_repr = Repr()
_repr.maxstring = _repr.maxother = 200


@dataclass(frozen=True)
class LeftOut:
    """Stands for a value in an exception that cannot be sent, or is too large.

    Attributes:
        text: the value's ``repr()``, shortened.
    """

    text: str

    def __repr__(self) -> str:
        return self.text


def encode_exception(error: BaseException) -> bytes | None:
    """``error`` as bytes, with its chain and its group, without tracebacks. None if its class is too odd."""
    sent = _SentErrors([error])
    encoded: bytes | None = _try(lambda: _encoded([*map(sent.parts_of, sent.errors)]))
    return encoded


def decode_exception(encoded: bytes | None) -> BaseException | None:
    """The exception that was passed to :func:`encode_exception`; None if ``encoded`` is None.

    If this process cannot make its class, a class of the same name, derived from the same built-in class.
    """
    error: BaseException | None = None if encoded is None else _try(_rebuilt, serialization.decode(encoded))
    return error


def _rebuilt(parts: list[_Parts]) -> BaseException:
    """The first exception."""
    made: dict[int, BaseException] = {}

    def make(position: int) -> BaseException:
        if position not in made:
            made[position] = parts[position].rebuild([make(member) for member in parts[position].members])
        return made[position]

    for position, one in enumerate(parts):
        error = make(position)
        for name, other in one.links.items():
            object.__setattr__(error, name, make(other))
        object.__setattr__(error, "__suppress_context__", one.is_context_hidden)
    return made[0]


def message_of(error: BaseException) -> str:
    """``str(error)``, shortened, even if that raises."""
    text = _try(str, error)
    return "<exception str() failed>" if text is None else str(text)[:_MAX_BYTES]


def _try(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function``; None if it raises. Code of a user's class may even call ``sys.exit()``."""
    try:
        return function(*args)
    except BaseException:
        return None


def _slots_of(error: BaseException) -> dict[str, Any]:
    """The values in the ``__slots__`` of the classes that are not built in."""
    classes = (one for one in type(error).__mro__ if one.__module__ != "builtins")
    names = (
        key for one in classes for key, value in vars(one).items() if type(value) is MemberDescriptorType
    )
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _encoded(value: Any) -> bytes:
    return bytes(serialization.encode(value))


def _decode(encoded: bytes) -> Any:
    decoded = _try(serialization.decode, encoded)
    return decoded[0] if decoded else LeftOut("<a value that this process cannot decode>")


def _new(kind: type[BaseException], base: type[BaseException], args: Sequence[Any]) -> BaseException:
    """An exception of the class ``kind``, without a call of the class's own ``__init__``."""
    error = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


@dataclass
class _Parts:
    """An exception. Others are given by their positions in the list of all.

    Attributes:
        kind: the class.
        name: the class's module and name.
        base: the built-in class from which it derives, whose instances have the same layout.
        text: ``str()`` of the exception.
        args: arguments for ``base``.
        attributes: the attributes, with the notes.
        members: the exceptions of a group.
        links: the exceptions in ``__cause__`` and ``__context__``.
        is_context_hidden: its ``__suppress_context__``.
        whole: the exception as pickle sends it, if ``base`` cannot make it.
    """

    kind: bytes
    name: tuple[str, str]
    base: type[BaseException]
    text: str
    args: list[bytes]
    attributes: dict[str, bytes]
    members: list[int]
    links: dict[str, int]
    is_context_hidden: bool
    whole: bytes

    def rebuild(self, members: list[BaseException]) -> BaseException:
        """The exception without links. ``members`` are those of the group."""
        args = [*map(_decode, self.args), *([members] if members else [])]
        error = _try(_new, _decode(self.kind), self.base, args)
        if error is None and self.whole:
            error = _decode(self.whole)
        if not isinstance(error, BaseException):
            error = self._stand_in(args)
        for name, value in self.attributes.items():
            _try(object.__setattr__, error, name, _decode(value))
        return error

    def _stand_in(self, args: list[Any]) -> BaseException:
        module, name = self.name
        names = {"__module__": module, "__str__": lambda _: self.text}
        bases = self.base.__mro__[:-1]  # a base may refuse a value that was left out
        made = (_try(_new, type(name, (base,), names), base, args) for base in bases)
        found: BaseException = next(error for error in made if error is not None)
        return found


class _SentErrors:
    """The exceptions that are sent together.

    Attributes:
        errors: the exceptions. :meth:`parts_of` appends those to which an exception refers.
    """

    def __init__(self, errors: list[BaseException]) -> None:
        self.errors = errors
        self._positions = {id(error): position for position, error in enumerate(errors)}
        self._bytes_left = _MAX_BYTES

    def parts_of(self, error: BaseException) -> _Parts:
        """The parts of one exception."""
        kind = base = type(error)
        while base.__module__ != "builtins":
            base = base.__base__  # type: ignore[assignment]
        members = getattr(error, "exceptions", ()) if hasattr(base, "derive") else ()  # a group (Python 3.11)
        reduced: Any = base.__reduce__(error)
        args = (error.message,) if members else reduced[1]  # type: ignore[attr-defined]  # args may be others
        attributes = {**vars(error), **(reduced[2] if len(reduced) > 2 else {}), **_slots_of(error)}
        is_plain = _try(_new, kind, base, [*args, *([members] if members else [])]) is not None
        links = {name: getattr(error, name) for name in ("__cause__", "__context__")}
        positions = {name: self._position(other) for name, other in links.items() if other is not None}
        return _Parts(
            self._encode(kind),
            (kind.__module__, kind.__name__),
            base,
            message_of(error),
            [self._encode(value) for value in args],
            {name: self._encode(value) for name, value in attributes.items()},
            [found for member in members if (found := self._position(member)) is not None],
            {name: found for name, found in positions.items() if found is not None},
            error.__suppress_context__,
            b"" if is_plain else self._encode(error),
        )

    def _position(self, error: BaseException) -> int | None:
        if id(error) not in self._positions:
            if len(self.errors) == _MAX_EXCEPTIONS:
                return None
            self._positions[id(error)] = len(self.errors)
            self.errors.append(error)
        return self._positions[id(error)]

    def _encode(self, value: Any) -> bytes:
        encoded: bytes | None = _try(_encoded, [value])
        if encoded is None or len(encoded) > self._bytes_left or not _try(serialization.decode, encoded):
            encoded = _encoded([LeftOut(str(_try(_repr.repr, value)))])
        self._bytes_left -= len(encoded)
        return encoded
