"""Trees of values: nested dicts, lists, tuples and named tuples.

The keys of a dict are visited in one order whatever their order of insertion, so that ranks that filled
the same dict in different orders still mean the same leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from typing import Any

__all__ = ["flatten", "rebuild"]


def flatten(value: Any) -> tuple[list[Any], str]:
    """The leaves of ``value``, and a text that two trees share if and only if their leaves pair up."""
    leaves: list[Any] = []
    words: list[str] = []
    _flatten(value, leaves, words)
    return leaves, " ".join(words)


def _flatten(value: Any, leaves: list[Any], words: list[str]) -> None:
    if isinstance(value, dict):
        words.append("{")
        for key in _ordered(value):
            words.append(repr(key))
            _flatten(value[key], leaves, words)
        words.append("}")
    elif isinstance(value, (list, tuple)):
        words.append("[")
        for child in value:
            _flatten(child, leaves, words)
        words.append("]")
    else:
        leaves.append(value)
        words.append(".")


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """A new tree of the structure of ``value``, its leaves taken from ``leaves`` in turn."""
    if isinstance(value, dict):
        children = {key: rebuild(value[key], leaves) for key in _ordered(value)}
        if type(value) is dict:
            return {key: children[key] for key in value}
        new = copy(value)  # keeps what a subclass carries besides its items, a default factory for example
        for key, child in children.items():
            new[key] = child
        return new
    if isinstance(value, (list, tuple)):
        items = [rebuild(child, leaves) for child in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else type(value)(items)  # torch.Size takes ints only
    return next(leaves)


def _ordered(keys: Collection[Any]) -> list[Any]:
    """``keys`` in an order that depends on them alone."""
    if all(type(key) is str for key in keys):
        return sorted(keys)
    return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))
