"""The environment variables that this package sets, so that it can give back just those."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["give_back", "given", "set_missing"]

# What was set, and whether the variable was there before, empty.
_set: dict[str, tuple[str, bool]] = {}


def set_missing(wanted: Mapping[str, object]) -> None:
    """Set the variables in ``wanted`` that are missing or empty; None is not a value."""
    for name, value in wanted.items():
        if value is not None and not os.environ.get(name):
            _set[name] = (str(value), name in os.environ)
            os.environ[name] = str(value)


def give_back() -> None:
    """Take back what was set, but for what somebody has changed since."""
    for name, (value, was_empty) in _set.items():
        if os.environ.get(name) == value:
            if was_empty:
                os.environ[name] = ""
            else:
                del os.environ[name]
    _set.clear()


def given() -> dict[str, str]:
    """The environment as it was given to this process: without what was set here."""
    ours = {name: value for name, (value, _) in _set.items()}
    return {name: value for name, value in os.environ.items() if ours.get(name) != value}
