"""Keyword arguments that are passed on: refused with a hint where nobody takes them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["check_keywords", "did_you_mean", "keywords_of"]


def keywords_of(function: Callable[..., Any]) -> set[str]:
    """The names of ``function``'s keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def check_keywords(function: str, given: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Refuse the keywords that ``function`` does not have.

    Raises:
        TypeError: names the keyword, what it may be a misspelling of, and what is allowed.
    """
    for name in given:
        if name not in allowed:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}.{did_you_mean(name, allowed)} "
                f"Allowed: {', '.join(sorted(allowed))}."
            )


def did_you_mean(name: str, allowed: Collection[str]) -> str:
    """`` Did you mean 'x'?``, or nothing if nothing is like ``name``."""
    close = difflib.get_close_matches(name, allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
