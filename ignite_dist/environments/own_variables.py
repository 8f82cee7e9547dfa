"""Set environment variables of this process, and remove them again."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The variables that set_missing has set: the new value, and True if the variable was empty before.
_set: dict[str, tuple[str, bool]] = {}


def set_missing(wanted: Mapping[str, object]) -> None:
    """Set each variable in ``wanted`` that is missing or empty. A value of None sets nothing."""
    for name, value in wanted.items():
        if value is not None and not os.environ.get(name):
            _set[name] = (str(value), name in os.environ)
            os.environ[name] = str(value)


def restore() -> None:
    """Undo :func:`set_missing`, except for variables that were changed afterwards."""
    for name, (value, was_empty) in _set.items():
        if os.environ.get(name) == value:
            if was_empty:
                os.environ[name] = ""
            else:
                del os.environ[name]
    _set.clear()


def given() -> dict[str, str]:
    """The environment of this process without the variables that :func:`set_missing` has set."""
    ours = {name: value for name, (value, _) in _set.items()}
    return {name: value for name, value in os.environ.items() if ours.get(name) != value}
