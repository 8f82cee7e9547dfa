"""Trees of values: nested dicts, lists, tuples and named tuples.

The keys of a dict are visited in one order whatever their order of insertion, so that ranks that filled
the same dict in different orders still mean the same leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["is_tree", "leaves", "rebuild", "structure"]


def is_tree(value: Any) -> bool:
    """Whether ``value`` is a node of a tree rather than a leaf."""
    return isinstance(value, (dict, list, tuple))


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of ``value``, in an order that depends on its structure alone."""
    if not is_tree(value):
        yield value
    else:
        for _, child in _children(value):
            yield from leaves(child)


def rebuild(value: Any, new_leaves: Iterator[Any]) -> Any:
    """A new tree of the structure of ``value``, its leaves taken from ``new_leaves`` in turn."""
    if not is_tree(value):
        return next(new_leaves)
    children = {key: rebuild(child, new_leaves) for key, child in _children(value)}
    if isinstance(value, dict):
        return _like_dict(value, {key: children[key] for key in value})
    items = [children[index] for index in range(len(value))]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def structure(value: Any, describe: Callable[[Any], str]) -> str:
    """A text that is equal for two trees if and only if they pair up leaf by leaf."""
    if not is_tree(value):
        return describe(value)
    inner = ",".join(f"{key!r}:{structure(child, describe)}" for key, child in _children(value))
    return f"{'dict' if isinstance(value, dict) else 'sequence'}({inner})"


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: (type(item[0]).__name__, repr(item[0])))
    return list(enumerate(value))


def _like_dict(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(original) is dict:
        return items
    copy = original.copy()  # keeps what a subclass carries besides its items, a default factory for example
    copy.update(items)
    return copy
