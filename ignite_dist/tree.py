"""Trees of values: nested dicts, lists, tuples and named tuples.

The keys of a dict are visited in one order whatever their order of insertion, so that ranks that filled
the same dict in different orders still mean the same leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import copy
from typing import Any

from ignite_dist.tracing import traced

__all__ = ["flatten", "map_children", "rebuild"]


def flatten(value: Any, atom: type | tuple[()] = ()) -> tuple[list[Any], str]:
    """The leaves of ``value``, and a text that two trees share if and only if their leaves pair up.

    Args:
        value: the tree.
        atom: a kind of container that is a leaf here.
    """
    leaves: list[Any] = []
    words: list[str] = []
    _flatten(value, atom, leaves, words)
    return leaves, " ".join(words)


def _flatten(value: Any, atom: type | tuple[()], leaves: list[Any], words: list[str]) -> None:
    if isinstance(value, dict):
        words.append("{")
        for key in _ordered(value):
            words.append(repr(key))
            _flatten(value[key], atom, leaves, words)
        words.append("}")
    elif isinstance(value, (list, tuple)) and not isinstance(value, atom):
        words.append("[")
        for child in value:
            _flatten(child, atom, leaves, words)
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


def _ordered(keys: Collection[Any]) -> list[Any]:
    """``keys`` in an order that depends on them alone."""
    if all(type(key) is str for key in keys):
        return sorted(keys)
    return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))
