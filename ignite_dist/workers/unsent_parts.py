"""The part of a call that cannot be sent to a worker, for the text of the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ignite_dist.internals.call_sites import is_library_path, site_of_place

_LONGEST_PATH = 20
# Classes that picklers raise. Their names say nothing that the text does not say.
_OF_PICKLERS = ("AttributeError", "PicklingError", "TypeError")


@dataclass(eq=False)
class UserCall:
    """A call of a function of the user, without the local rank, which comes first."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> dict[str, Any]:
        """The function and the arguments, by their names in errors."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return {
            f"The function {name}": self.function,
            **{f"Argument {number} of {name}": value for number, value in enumerate(self.args, start=1)},
            **{f"Argument {key!r} of {name}": value for key, value in self.kwargs.items()},
        }


def error_of_sending(
    call: Callable[..., Any], error: TypeError, encode: Callable[[Any], object]
) -> TypeError:
    """The error after ``encode(call)`` has raised ``error``. It names the part of a :class:`UserCall`.

    Its ``__cause__`` is the exception of the user's code (``__reduce__``), if that has raised one.
    """
    entry = call.func if isinstance(call, partial) else call
    parts: dict[str, Any] = entry.parts() if isinstance(entry, UserCall) else {}
    for name, value in parts.items():
        found = _error_of(value, encode)
        if found is not None:
            return _named(name, found, _sentence_about_path(value, encode))
    return _named("The function given to spawn, or one of its arguments,", error, "")


def _named(name: str, error: BaseException, path: str) -> TypeError:
    reason = error.__cause__ or error
    text = str(reason).rstrip(".") or "no text"
    if type(reason).__name__ not in _OF_PICKLERS:
        text = f"{type(reason).__name__}: {text}"
    site = _users_site(reason)
    named = TypeError(
        f"{name} cannot be sent to a worker: {text}{f' ({site})' if site else ''}.{path} "
        "Send the underlying data instead."
    )
    named.__cause__ = reason if site else None
    return named


def _error_of(value: Any, encode: Callable[[Any], object]) -> TypeError | None:
    """The error that ``encode(value)`` raises; None if it raises none."""
    try:
        encode(value)
    except TypeError as error:
        return error
    return None


def _users_site(error: BaseException) -> str:
    """The place that has raised ``error``; empty if that is not in code of the user."""
    import cloudpickle

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    path = "" if trace is None else trace.tb_frame.f_code.co_filename
    if trace is None or is_library_path(path) or path.startswith(cloudpickle.__path__[0]):
        return ""
    return site_of_place(path, trace.tb_lineno)


def _sentence_about_path(value: Any, encode: Callable[[Any], object]) -> str:
    try:
        path = "".join(_path_in(value, encode))
    except Exception:  # raised by code of an object, for example by its __repr__
        return ""
    return f" Found in it: {path}." if path else ""


def _path_in(value: Any, encode: Callable[[Any], object]) -> Iterator[str]:
    """The steps to the innermost value in ``value`` that cannot be sent, as in an expression of Python."""
    seen: list[Any] = []
    while len(seen) < _LONGEST_PATH:
        seen.append(value)
        for step, child in _children(value):
            if all(child is not one for one in seen) and _error_of(child, encode) is not None:
                yield step if seen[1:] else step.removeprefix(".")
                value = child
                break
        else:
            return


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The values in a container or an object, each with the step to it."""
    if isinstance(value, (type, ModuleType)):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        yield from _variables_of(value)
    else:
        yield from ((f".{name}", child) for name, child in getattr(value, "__dict__", {}).items())


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of outer functions and of the module that ``function`` uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # not assigned yet
            yield f".{name}", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]
