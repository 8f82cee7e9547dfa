"""Private names of libraries: a description of each, and a search for missing names."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """A private name of a library, which may change in any release."""

    name: str
    """Dotted path from the module. The last part may be a name in the code of the object before it, for
    example an attribute that ``__init__`` sets."""
    why: str
    """Why no public name is enough."""
    fallback: str
    """What the package does if the name is missing."""
    since: str
    """The oldest known release with this name."""


def missing(names: Iterable[PrivateName]) -> list[PrivateName]:
    """The members of ``names`` that the installed libraries lack."""
    return [entry for entry in names if not _is_found(entry.name)]


def _is_found(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
        return True
    except (ImportError, AttributeError):
        owner, _, last = name.rpartition(".")
    try:
        return last in _names_in_code_of(pkgutil.resolve_name(owner))
    except (ImportError, AttributeError):
        return False


def _names_in_code_of(owner: Any) -> Iterator[str]:
    """The parameters, names and strings in the code of a function or of the methods of a class."""
    for member in vars(owner).values() if isinstance(owner, type) else (owner,):
        function = getattr(member, "__func__", member)  # unwrap a class method
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if isinstance(function, FunctionType):
            yield from _names_in(function.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):  # an inner function
            yield constant.co_name
            yield from _names_in(constant)
