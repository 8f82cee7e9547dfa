"""Trees of values: nested dicts, lists, tuples and named tuples.

All ranks visit the keys of a dict in the same order, whatever the insertion order, so the leaves of all
ranks pair up. Keys that every rank can compare are str, int, bool, enum members, and tuples of these. Keys
that Python treats as equal count as one: 1 and True, a member of an ``IntEnum`` and its value, an int and a
numpy int.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from copy import copy
from enum import Enum, Flag
from itertools import pairwise
from operator import index, itemgetter
from typing import Any

from torch import Tensor

from ignite_dist.internals.tracing import traced

_NO_CONTAINERS = frozenset({float, int, bool, Tensor})  # the usual leaves, whose test should be fast

_SortKey = tuple[str, Any]  # the kind of a key, and a value that orders keys of the same kind


def flatten(value: Any, atom: type | tuple[()] = (), *, is_local: bool = False) -> tuple[list[Any], str]:
    """The leaves of ``value``, and a text that is equal for two trees if and only if their leaves pair up.

    Args:
        value: the tree.
        atom: a container type that counts as a leaf.
        is_local: True if the leaves are not paired with those of other ranks. Any key is then allowed, and
            the text has no meaning.

    Raises:
        TypeError: ``is_local`` is False and ranks cannot compare a key.
    """
    leaves: list[Any] = []
    words: list[str] = []
    _flatten(value, atom, is_local, leaves, words)
    return leaves, " ".join(words)


def _flatten(value: Any, atom: type | tuple[()], is_local: bool, leaves: list[Any], words: list[str]) -> None:
    if type(value) in _NO_CONTAINERS:
        leaves.append(value)
        words.append(".")
    elif isinstance(value, dict):
        words.append("{")
        for key in _sorted_keys(value, is_local):
            words.append(repr(key) if is_local or type(key) is str else _key_text(_sort_key(key)))
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
    """A new tree with the structure of ``value``. ``leaves`` are in the order of :func:`flatten`."""
    if type(value) in _NO_CONTAINERS:
        return next(leaves)
    if isinstance(value, (dict, list, tuple)) and not isinstance(value, atom):
        return map_children(lambda child: rebuild(child, leaves, atom), value)
    return next(leaves)


@traced
def map_children(function: Callable[[Any], Any], value: Any) -> Any:
    """A new dict, list or tuple of the type of ``value``, with ``function`` applied to each child.

    The children of a dict are visited in the key order of :func:`flatten`.
    """
    if isinstance(value, dict):
        # A copy keeps the attributes of a subclass, for example a default factory.
        children = dict(value) if type(value) is dict else copy(value)
        for key in _sorted_keys(value):
            children[key] = function(value[key])
        return children
    items = [function(child) for child in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else type(value)(items)  # torch.Size accepts only ints


# --- the keys of a dict ------------------------------------------------------------------------------


def _sorted_keys(keys: Collection[Any], is_local: bool = True) -> list[Any]:
    """``keys`` in an order that does not depend on insertion. Keys that ranks cannot compare come last.

    Raises:
        TypeError: ``is_local`` is False and ranks cannot compare a key.
    """
    if all(type(key) is str for key in keys):
        return sorted(keys)
    sortable: list[tuple[_SortKey, Any]] = []
    others: list[Any] = []
    for key in keys:
        sort_key = _sort_key(key)
        if sort_key is not None:
            sortable.append((sort_key, key))
        elif is_local:
            others.append(key)
        else:
            raise TypeError(
                f"The key {key!r} of a dict is a {type(key).__name__}. Ranks pair the values of a dict by "
                "key. Use keys that are str, int, bool, members of an enum, or tuples of these."
            )
    sortable.sort(key=itemgetter(0))
    if not is_local:
        _check_distinct(sortable)
    return [key for _, key in sortable] + others


def _check_distinct(sortable: list[tuple[_SortKey, Any]]) -> None:
    for (sort_key, key), (next_sort_key, next_key) in pairwise(sortable):
        if sort_key == next_sort_key:
            raise TypeError(
                f"The keys {key!r} and {next_key!r} of a dict have the same name on other ranks. Use other "
                "keys, or a list."
            )


def _sort_key(key: Any) -> _SortKey | None:
    """The kind and sort value of a key, the same on all ranks; None if ranks cannot compare the key."""
    if isinstance(key, str):
        text = str.__str__(key)
        if type(key) is str or _is_same_key(key, text):
            return "str", text
    elif isinstance(key, int):
        number = int.__index__(key)
        if type(key) in (int, bool) or _is_same_key(key, number):
            return "int", number
    elif isinstance(key, tuple) and not isinstance(key, Enum):
        parts = tuple(map(_sort_key, key))
        if None not in parts and (type(key) is tuple or _is_same_key(key, tuple(key))):
            return "tuple", parts
        return None
    if isinstance(key, Enum):
        kind = type(key)
        name = f"{key._value_:#x}" if isinstance(key, Flag) else key._name_  # combined flags have no name
        return "enum", (kind.__module__, kind.__qualname__, name)
    return _numpy_sort_key(key)


def _is_same_key(key: Any, plain: Any) -> bool:
    """True if a dict treats ``key``, an instance of a subclass, and ``plain`` as the same key."""
    return bool(key == plain) and hash(key) == hash(plain)


def _numpy_sort_key(key: Any) -> _SortKey | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(key, numpy.generic) or key.dtype.kind not in "biu":
        return None
    number = index(key.item())
    return ("int", number) if _is_same_key(key, number) else None


def _key_text(sort_key: _SortKey | None) -> str:
    """A text that differs for each key."""
    assert sort_key is not None
    kind, value = sort_key
    if kind == "tuple":
        return f"({' '.join(map(_key_text, value))})"
    if kind == "int":  # str() raises for ints of more than 4300 digits
        return str(value) if value.bit_length() < 64 else hex(value)
    return f"<{' '.join(map(repr, value))}>" if kind == "enum" else repr(value)
