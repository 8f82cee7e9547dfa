"""State dicts with the names that a model has without wrappers: the same on any number of ranks.

No module is copied or changed. The names of the model's own ``state_dict()`` are replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch.nn import Module

from ignite_dist.internals import _torch
from ignite_dist.training.wrapped_models import module_inside, unwrap_model

Rename = Callable[[str], str]

_DDP = "module"  # the name of the module in a DistributedDataParallel or DataParallel
_OF_WRAPPERS = (_DDP, _torch.INSIDE_OF_COMPILED)


def unwrapped_state(model: Module) -> dict[str, Any]:
    """The ``state_dict`` of the unwrapped model, with names without the wrappers of its submodules."""
    inner = unwrap_model(model)
    state, short_paths = inner.state_dict(), _short_paths(inner)
    if all(path == short for path, short in short_paths.items()):
        return state
    return _torch.renamed_state(state, lambda name: _shortened(name, short_paths))


def load_unwrapped_state(model: Module, state: Mapping[str, Any], **options: Any) -> None:
    """Load a state with the names of :func:`unwrapped_state`; ``options`` are those of ``load_state_dict``.

    Raises:
        RuntimeError: the module refuses the state. Names in the message are without wrappers, too.
    """
    inner = unwrap_model(model)
    short_paths = _short_paths(inner)
    names = [*short_paths, *inner.state_dict()]  # of modules and of tensors
    # A wrapper and the module in it have one short name. The dict keeps the module's, which comes later.
    own_names = {_shortened(name, short_paths): name for name in names}
    try:
        inner.load_state_dict(_torch.renamed_state(state, lambda name: own_names.get(name, name)), **options)
    except RuntimeError as error:
        error.args = tuple(
            re.sub(r"[^\s\"']+", lambda word: _shortened(word[0], short_paths), str(arg))
            for arg in error.args
        )
        raise


def names_of_extra_state(model: Module) -> set[str]:
    """The names in :func:`unwrapped_state` that come from ``get_extra_state()``."""
    inner = unwrap_model(model)
    short_paths = _short_paths(inner)
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    return unwrapped_state(inner).keys() - {_shortened(name, short_paths) for name, _ in named}


# --- states with other names ---------------------------------------------------------------------------


def as_unwrapped_state(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``state`` with the names of :func:`unwrapped_state`; see :func:`name_reader`."""
    return _torch.renamed_state(state, name_reader(model, state.keys()))


def name_reader(model: Module, names: Collection[str]) -> Rename:
    """A function that gives each of a state's ``names`` the name that :func:`unwrapped_state` has for it.

    The state may be of the unwrapped model, of ``model``, of a ``DistributedDataParallel`` around either, or
    of a model with other wrappers inside. Of these readings, the one that finds the most names is taken. A
    name that it does not find is unchanged.
    """
    own = unwrapped_state(model).keys()
    best = max(_readings(model, own), key=lambda read: len(own & {read(str(name)) for name in names}))
    is_unique = len({best(str(name)) for name in names}) == len(names)
    return best if is_unique else str


def _readings(model: Module, own: Collection[str]) -> Iterator[Rename]:
    """What the names of a state may mean, the likeliest first."""
    inner = unwrap_model(model)
    path_of_inner = next(path for path, module in model.named_modules() if module is inner)
    short_paths = _short_paths(inner)
    for outer in ("", path_of_inner, _DDP):
        for paths in ({"": ""}, short_paths):
            yield partial(_read, outer=outer, short_paths=paths)
    found = {*own, *short_paths.values()}
    counts = Counter(map(bare_name, found))
    by_bare_name = {bare_name(name): name for name in found if counts[bare_name(name)] == 1}
    yield lambda name: by_bare_name.get(bare_name(name), name)


def _read(name: str, outer: str, short_paths: Mapping[str, str]) -> str:
    """The short form of ``name``, of a module or tensor in the module ``outer``."""
    is_inside = f"{name}.".startswith(f"{outer}.")
    return _shortened(name[len(outer) + 1 :] if is_inside else name, short_paths)


def bare_name(name: str) -> str:
    """``name`` without any part that may be that of a wrapper."""
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


# --- shared ------------------------------------------------------------------------------------------


def _short_paths(model: Module) -> dict[str, str]:
    """The path of each module in ``model``, which is no wrapper, with its path without wrappers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    short = {"": ""}
    for path, module in modules.items():  # outer modules come first
        outer, _, name = path.rpartition(".")
        is_wrapped = module_inside(modules[outer]) is module
        short[path] = short[outer] if is_wrapped else f"{short[outer]}.{name}".removeprefix(".")
    return short


def _shortened(name: str, short_paths: Mapping[str, str]) -> str:
    """``name`` of a module or tensor with the short path of the module that it is in."""
    path = name
    while path not in short_paths:
        path = path.rpartition(".")[0]
    return short_paths[path] + name[len(path) :]
