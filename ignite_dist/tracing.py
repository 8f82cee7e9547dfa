"""What ``torch.compile`` does with the functions of this package; its tracer is called dynamo.

Left alone, the tracer follows a call into the process group, which it cannot trace: an internal error. So it
follows no function of the facade, with two exceptions. Getters become constants under a guard. Collectives of
tensors become operators of the graph (:mod:`ignite_dist.collectives.compiled`). Everything else is a graph
break, and runs as without a compiler.

All of it are marks on functions, which cost a call without a compiler nothing. torch's public functions that
set them (``torch.compiler.disable``, ``assume_constant_result`` and ``substitute_in_graph``) import the
tracer, which takes half a second, so the marks are set by :mod:`ignite_dist._torch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, TypeVar

from ignite_dist import _torch

__all__ = [
    "eager_functions",
    "eagerly",
    "resolved_while_tracing",
    "traced",
    "traced_as",
    "untrace_class",
    "untrace_package",
    "untraced",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

eager_functions: dict[str, Callable[..., Any]] = {}
"""Those that are :func:`traced_as` another, by name."""


def untraced(function: _Function) -> _Function:
    """Decorator: in a compiled function a call is a graph break, and runs as without a compiler."""
    _runs_alone(function)
    _torch.mark_as_untraced(function, "ignite_dist runs it outside of the graph")
    return function


def _runs_alone(function: _Function) -> _Function:
    """Decorator: where a graph broke and the function is called in earnest, it runs as without a compiler."""
    inner: Any = function
    while inner is not None:  # what contextmanager and wraps have put around it, too
        if isinstance(inner, FunctionType):
            _torch.run_without_compiler(inner.__code__)
        inner = getattr(inner, "__wrapped__", None)
    return function


def traced_as(replacement: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorator: the tracer follows ``replacement`` in place of the function."""

    def mark(function: _Function) -> _Function:
        _runs_alone(function)
        eager_functions[function.__name__] = function
        _torch.mark_replacement(function, replacement)
        return function

    return mark


def resolved_while_tracing(function: _Function) -> _Function:
    """Decorator: the tracer calls it, and takes its result for a constant. Guards are the caller's task."""
    _torch.mark_as_constant(function)
    return function


def traced(function: _Function) -> _Function:
    """Decorator: the tracer follows the function. For getters."""
    _runs_alone(function)
    function._ignite_dist_traced = True  # type: ignore[attr-defined]
    return function


def _has_mark(function: FunctionType) -> bool:
    return _torch.has_mark_of_compiler(function) or hasattr(function, "_ignite_dist_traced")


def untrace_class(one: type, traced_methods: Collection[str] = ()) -> None:
    """All methods of a class that bear no mark are :func:`untraced`; those of these names, :func:`traced`."""
    for name, member in vars(one).items():
        method = getattr(member, "__func__", member)  # of a class method
        if isinstance(method, FunctionType) and not _has_mark(method):
            (traced if name in traced_methods else untraced)(method)


def untrace_package(package: str) -> None:
    """All functions and methods of the package's modules that bear no mark are :func:`untraced`."""
    modules = [(name, one) for name, one in sys.modules.items() if name.startswith(f"{package}.")]
    for name, module in modules:
        for member in list(vars(module).values()):
            if getattr(member, "__module__", None) != name:
                continue
            if isinstance(member, type):
                untrace_class(member)
            elif isinstance(member, FunctionType) and not _has_mark(member):
                untraced(member)


@untraced
def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(...)`` as without a compiler. For what :func:`traced_as` names, to give the call up."""
    return function(*args, **kwargs)
