"""How ``torch.compile`` treats the functions of this package. Its tracer is called dynamo.

By default, the tracer follows a call into the process group and fails with an internal error. So this
package lets it trace only two kinds of public functions. Getters become constants under a guard. Collectives
of tensors become operators of the graph (:mod:`ignite_dist.collectives.compiled`). Every other function is a
graph break and runs uncompiled.

Attributes on the functions control the tracer, so eager calls get no slower. They are set by
:mod:`ignite_dist.internals._torch`, because torch's public functions for them (``torch.compiler.disable``,
``assume_constant_result`` and ``substitute_in_graph``) import the tracer, which takes half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, TypeVar

from ignite_dist.internals import _torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

eager_functions: dict[str, Callable[..., Any]] = {}
"""The original functions that have a replacement (:func:`traced_as`), by name."""


def untraced(function: _Function) -> _Function:
    """Decorator: in a compiled function, a call is a graph break and runs uncompiled."""
    _mark_uncompiled(function)
    _torch.mark_as_untraced(function, "ignite_dist runs this function outside of the graph")
    return function


def _mark_uncompiled(function: _Function) -> _Function:
    """Decorator: after a graph break, the function runs uncompiled."""
    inner: Any = function
    while inner is not None:  # a function made by contextmanager or wraps has inner functions
        if isinstance(inner, FunctionType):
            _torch.run_without_compiler(inner.__code__)
        inner = getattr(inner, "__wrapped__", None)
    return function


def traced_as(replacement: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorator: the tracer traces ``replacement`` instead of the function."""

    def mark(function: _Function) -> _Function:
        _mark_uncompiled(function)
        eager_functions[function.__name__] = function
        _torch.mark_replacement(function, replacement)
        return function

    return mark


def resolved_while_tracing(function: _Function) -> _Function:
    """Decorator: the tracer calls the function and uses the result as a constant. The caller adds guards."""
    _torch.mark_as_constant(function)
    return function


def traced(function: _Function) -> _Function:
    """Decorator: the tracer traces the function. For getters and replacements."""
    _mark_uncompiled(function)
    function._ignite_dist_traced = True  # type: ignore[attr-defined]
    return function


def _has_mark(function: FunctionType) -> bool:
    return _torch.has_mark_of_compiler(function) or hasattr(function, "_ignite_dist_traced")


def untrace_class(cls: type, traced_methods: Collection[str] = ()) -> None:
    """Make unmarked methods of ``cls`` :func:`untraced`, or :func:`traced` if in ``traced_methods``."""
    for name, member in vars(cls).items():
        method = getattr(member, "__func__", member)  # unwrap a class method
        if isinstance(method, FunctionType) and not _has_mark(method):
            (traced if name in traced_methods else untraced)(method)


_finished_modules: set[str] = set()


def leave_traced(module: str) -> None:
    """Let the tracer trace the functions of ``module``, although :func:`untrace_package` would mark them."""
    _finished_modules.add(module)


def untrace_package(package: str) -> None:
    """Make all unmarked functions and methods in the package's imported modules :func:`untraced`."""
    prefix = f"{package}."
    for name, module in list(sys.modules.items()):  # a copy: another thread may import
        if name in _finished_modules or not name.startswith(prefix):
            continue
        if getattr(module.__spec__, "_initializing", False):
            continue
        _finished_modules.add(name)
        for member in list(vars(module).values()):
            if getattr(member, "__module__", None) != name:
                continue
            if isinstance(member, type):
                untrace_class(member)
            elif isinstance(member, FunctionType) and not _has_mark(member):
                untraced(member)


@untraced
def call_eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(...)`` uncompiled. For replacements that cannot trace a call; see :func:`traced_as`."""
    return function(*args, **kwargs)
