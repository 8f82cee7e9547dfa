"""Trees of plain values, which ``torch.load(weights_only=True)`` reads.

In the tree of a sharded state, a dict of plain values stands for each sharded tensor: its mark.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ignite_dist.collectives.checks import is_sharded

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
_MARK = "ignite_dist.shard"


def plain(value: Any, name: str, on_cpu: Callable[[Tensor], Tensor] | None = None) -> Any:
    """``value`` with tensors on the CPU, without classes that ``weights_only`` refuses.

    Args:
        value: None, a bool, number, str, bytes, dtype or device; a tensor; a numpy scalar, which becomes a
            number; or a dict, list or tuple of these.
        name: for the error message.
        on_cpu: returns a tensor on the CPU for each tensor. By default, a copy.

    Raises:
        TypeError: another type. The message gives its place in ``value``.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, Tensor) and not is_sharded(value):
        detached = value.detach()
        tensor = detached.to("cpu", copy=True) if on_cpu is None else on_cpu(detached)
        if type(tensor) is Tensor:
            return tensor
    if isinstance(value, dict):
        children = {
            _plain_key(key, name): plain(child, f"{name}[{key!r}]", on_cpu) for key, child in value.items()
        }
        if kind is not OrderedDict:
            return Counter(children) if kind is Counter else children
        ordered = copy(value)  # keeps the versions of the modules, which are an attribute of a state dict
        ordered.clear()
        ordered.update(children)
        return ordered
    if kind in (list, tuple):
        return kind(plain(child, f"{name}[{number}]", on_cpu) for number, child in enumerate(value))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return plain(value.item(), name)
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}. A checkpoint holds tensors, numbers, strings, "
        f"None, and dicts, lists and tuples of these: reading it runs no code. {_advice(value)}"
    )


def _plain_key(key: Any, name: str) -> Any:
    parts = key if type(key) is tuple else (key,)
    if all(type(part) in _LEAVES for part in parts):
        return key
    raise TypeError(
        f"{name} has the key {key!r}, a {type(key).__qualname__}. Use a str, a number or a tuple."
    )


def _advice(value: Any) -> str:
    if is_sharded(value):
        return "Pass tensor.full_tensor()."
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return "Pass it under a name of its own: name=..."
    if hasattr(value, "__array__"):
        return "Pass torch.as_tensor(...)."
    return "Pass its data."


# --- marks of sharded tensors --------------------------------------------------------------------------


def split_shards(tree: Any, name: str, shards: dict[str, Any]) -> Any:
    """``tree`` with marks in place of its sharded tensors, which are put into ``shards`` by name."""
    if is_sharded(tree):
        shards[name] = tree.detach()
        return {_MARK: name, "shape": list(tree.shape), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, dict):
        children = copy(tree)
        for key, child in tree.items():  # update() of a Counter would add
            children[key] = split_shards(child, f"{name}.{key}", shards)
        return children
    if type(tree) in (list, tuple):
        return type(tree)(
            split_shards(child, f"{name}.{number}", shards) for number, child in enumerate(tree)
        )
    return tree


def is_mark(value: Any) -> bool:
    """True if ``value`` stands for a sharded tensor."""
    return isinstance(value, dict) and _MARK in value


def fill_marks(tree: Any, fill: Callable[[str, Tensor], Any]) -> Any:
    """``tree`` with ``fill(name, tensor)`` for each mark; ``tensor`` has its shape and dtype, on "meta"."""
    if is_mark(tree):
        dtype = getattr(torch, tree["dtype"])
        return fill(tree[_MARK], torch.empty(tree["shape"], dtype=dtype, device="meta"))
    if isinstance(tree, dict):
        children = copy(tree)
        for key, child in tree.items():
            children[key] = fill_marks(child, fill)
        return children
    if type(tree) in (list, tuple):
        return type(tree)(fill_marks(child, fill) for child in tree)
    return tree


def as_meta(tree: Any) -> Any:
    """``tree`` with a tensor on the meta device for each mark."""
    return fill_marks(tree, lambda _, tensor: tensor)


def names_of_shards(tree: Any) -> dict[str, Tensor]:
    """The sharded tensors of ``tree`` by name, on the meta device."""
    found: dict[str, Tensor] = {}
    fill_marks(tree, found.__setitem__)
    return found
