"""Trees of values: nested dicts, lists, tuples and named tuples.

The keys of a dict are visited in one order whatever their order of insertion, so that ranks that filled
the same dict in different orders still mean the same leaves. Keys of which all ranks can tell that are str,
int, bool, members of enums, and tuples of these. Two of them are one key where Python takes them for equal: 1
and True, a member of an ``IntEnum`` and its value, an int and an int of numpy's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from copy import copy
from enum import Enum, Flag
from itertools import pairwise
from operator import index, itemgetter
from typing import Any

from ignite_dist.tracing import traced

__all__ = ["flatten", "map_children", "rebuild"]

_Meaning = tuple[str, Any]  # the kind of a key, and what orders keys of one kind


def flatten(value: Any, atom: type | tuple[()] = (), *, is_local: bool = False) -> tuple[list[Any], str]:
    """The leaves of ``value``, and a text that two trees share if and only if their leaves pair up.

    Args:
        value: the tree.
        atom: a kind of container that is a leaf here.
        is_local: the leaves are not paired with those of other ranks, so any key will do. The text means
            nothing then.

    Raises:
        TypeError: a key that is not known to mean the same on all ranks, unless ``is_local``.
    """
    leaves: list[Any] = []
    words: list[str] = []
    _flatten(value, atom, is_local, leaves, words)
    return leaves, " ".join(words)


def _flatten(value: Any, atom: type | tuple[()], is_local: bool, leaves: list[Any], words: list[str]) -> None:
    if isinstance(value, dict):
        words.append("{")
        for key in _ordered(value, is_local):
            words.append(repr(key) if is_local or type(key) is str else _word(_meaning(key)))
            _flatten(value[key], atom, is_local, leaves, words)
        words.append("}")
    elif isinstance(value, (list, tuple)) and not isinstance(value, atom):
        words.append("[")
        for child in value:
            _flatten(child, atom, is_local, leaves, words)
        words.append("]")
    else:
        leaves.append(value)
        words.append(".")


def rebuild(value: Any, leaves: Iterator[Any], atom: type | tuple[()] = ()) -> Any:
    """A new tree of the structure of ``value``, its leaves, as of :func:`flatten`, taken from ``leaves``."""
    if isinstance(value, (dict, list, tuple)) and not isinstance(value, atom):
        return map_children(lambda child: rebuild(child, leaves, atom), value)
    return next(leaves)


@traced
def map_children(function: Callable[[Any], Any], value: Any) -> Any:
    """A dict, list or tuple of the type of ``value``, of what ``function`` makes of each of its children.

    The children of a dict are visited in the order of its keys that :func:`flatten` has.
    """
    if isinstance(value, dict):
        children = {key: function(value[key]) for key in _ordered(value)}
        if type(value) is dict:
            return {key: children[key] for key in value}
        new = copy(value)  # keeps what a subclass carries besides its items, a default factory for example
        for key, child in children.items():
            new[key] = child
        return new
    items = [function(child) for child in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else type(value)(items)  # torch.Size takes ints only


# --- the keys of a dict ------------------------------------------------------------------------------


def _ordered(keys: Collection[Any], is_local: bool = True) -> list[Any]:
    """``keys`` in an order that depends on them alone. Those that other ranks could not tell come last.

    Raises:
        TypeError: there are such keys, and ``is_local`` is False.
    """
    if all(type(key) is str for key in keys):
        return sorted(keys)
    known: list[tuple[_Meaning, Any]] = []
    others: list[Any] = []
    for key in keys:
        meaning = _meaning(key)
        if meaning is not None:
            known.append((meaning, key))
        elif is_local:
            others.append(key)
        else:
            raise TypeError(
                f"The key {key!r} of a dict is a {type(key).__name__}. Ranks pair the values of a dict by "
                "keys that are str, int, bool, members of an enum, or tuples of these. Use such keys."
            )
    known.sort(key=itemgetter(0))
    if not is_local:
        _check_distinct(known)
    return [key for _, key in known] + others


def _check_distinct(known: list[tuple[_Meaning, Any]]) -> None:
    for (meaning, key), (next_meaning, next_key) in pairwise(known):
        if meaning == next_meaning:
            raise TypeError(
                f"The keys {key!r} and {next_key!r} of a dict cannot be told apart by their names. Use other "
                "keys, or a list."
            )


def _meaning(key: Any) -> _Meaning | None:
    """What other ranks know a key by, and sort it by; None if they do not."""
    if isinstance(key, str):
        text = str.__str__(key)
        if type(key) is str or _is_same_key(key, text):
            return "str", text
    elif isinstance(key, int):
        number = int.__index__(key)
        if type(key) in (int, bool) or _is_same_key(key, number):
            return "int", number
    elif isinstance(key, tuple) and not isinstance(key, Enum):
        parts = tuple(map(_meaning, key))
        if None not in parts and (type(key) is tuple or _is_same_key(key, tuple(key))):
            return "tuple", parts
        return None
    if isinstance(key, Enum):
        kind = type(key)
        name = f"{key._value_:#x}" if isinstance(key, Flag) else key._name_  # of flags together there is none
        return "enum", (kind.__module__, kind.__qualname__, name)
    return _meaning_to_numpy(key)


def _is_same_key(key: Any, plain: Any) -> bool:
    """Whether a dict takes ``key``, of a class derived from that of ``plain``, for ``plain``."""
    return bool(key == plain) and hash(key) == hash(plain)


def _meaning_to_numpy(key: Any) -> _Meaning | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(key, numpy.generic) or key.dtype.kind not in "biu":  # no times
        return None
    number = index(key.item())
    return ("int", number) if _is_same_key(key, number) else None


def _word(meaning: _Meaning | None) -> str:
    """A key in words, which no other key has."""
    assert meaning is not None
    kind, value = meaning
    if kind == "tuple":
        return f"({' '.join(map(_word, value))})"
    if kind == "int":  # Python writes no int of more than 4300 digits
        return str(value) if value.bit_length() < 64 else hex(value)
    return f"<{' '.join(map(repr, value))}>" if kind == "enum" else repr(value)
