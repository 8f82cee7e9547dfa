"""One object, or several by name: what each part of ``save_checkpoint`` and ``load_checkpoint`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList

from ignite_dist.arguments import check_module
from ignite_dist.training.unwrapped_states import load_unwrapped_state, unwrapped_state

_ONE = ""  # the name of a single object


def named(part: Any) -> dict[str, Any]:
    """The objects of ``part`` by name: those of a dict, of a list by number, or one without a name."""
    if part is None:
        return {}
    if type(part) is dict:
        return {str(name): one for name, one in part.items()}
    if type(part) in (list, tuple):
        return {str(number): one for number, one in enumerate(part)}
    return {_ONE: part}


def as_module(function: str, model: Any) -> Module | None:
    """A model, or a container of several models with the names of :func:`named`.

    Raises:
        TypeError: one of them is not a module.
    """
    for one in named(model).values():
        check_module(function, one)
    if type(model) is dict:
        return ModuleDict(named(model))
    return ModuleList(model) if type(model) in (list, tuple) else model


def content_of(states: Mapping[str, Any]) -> Any:
    """What a file holds of the states of named objects: None, the state of the only one, or all by name."""
    return states[_ONE] if _ONE in states else dict(states) or None


def names_in(parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the objects of each part that has several."""
    several = {kind: list(named(part)) for kind, part in parts.items() if part is not None}
    return {kind: names for kind, names in several.items() if names != [_ONE]}


def states_for(kind: str, part: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """The states in a file's ``content`` for the objects of ``part``, by name.

    Raises:
        ValueError: the file has another number of objects, or other names.
    """
    own, saved = list(named(part)), content.get("names", {}).get(kind, [_ONE])
    if own != saved:
        raise ValueError(
            f"The checkpoint was saved with {_described(kind, saved)}, and is loaded with "
            f"{_described(kind, own)}. Pass the same."
        )
    return {_ONE: content[kind]} if own == [_ONE] else dict(content[kind] or {})


def _described(kind: str, names: list[str]) -> str:
    return f"one {kind}" if names == [_ONE] else f"{kind}s {', '.join(names)}"


# --- other objects -------------------------------------------------------------------------------------


def state_of(value: Any) -> Any:
    """The state of an object that has one (a GradScaler, averaged weights); else ``value`` itself."""
    if isinstance(value, Module):
        return unwrapped_state(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def load_state(value: Any, state: Any) -> None:
    """The inverse of :func:`state_of`, in place."""
    if isinstance(value, Module):
        load_unwrapped_state(value, state)
    else:
        value.load_state_dict(state)
