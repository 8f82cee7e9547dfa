"""Calls that are interrupted before they have sent anything, which the other ranks could not notice."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import get_ident
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, TypeVar

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import pending_calls
from ignite_dist.internals.call_sites import reported_as
from ignite_dist.values.calls import Call, new_token, own_token, whole_call

_Function = TypeVar("_Function", bound=Callable[..., Any])

latest_tokens: dict[int, int] = {}
"""The token of the call that each thread has begun last: see :class:`~ignite_dist.comp_models.Group`."""


def one_call(function: _Function) -> _Function:
    """Decorator: the collectives of the function are one call, which an interrupt ends as a whole.

    Without it, the next call of an interrupted rank would be matched with the second collective of the other
    ranks, and the rank would stay one call ahead of them.
    """
    return _with_token(new_token, function)


def own_call(function: _Function) -> _Function:
    """Decorator: as :func:`one_call`, and a call of its own also inside of another function.

    For a function that one rank may call in a :func:`one_call`, and another rank outside of it.
    """
    return _with_token(own_token, function)


def _with_token(token: Callable[[], int], function: _Function) -> _Function:
    @wraps(function)
    @reported_as(function.__name__)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, whole_call.token = whole_call.token, token()
        try:
            return function(*args, **kwargs)
        finally:
            whole_call.token = outer

    return call  # type: ignore[return-value]


def counts_interrupts(function: _Function) -> _Function:
    """Decorator for a collective: an interrupt before ``perform()`` has begun counts as a call of the group.

    Otherwise this rank's next call would meet the call of the other ranks that it has left. ``perform()``
    itself counts later interrupts. Calls with a timeout do not count: they are not in the order of the
    other calls.
    """
    signature = inspect.signature(function)

    @wraps(function)
    @reported_as(function.__name__)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = None
        try:
            before = latest_tokens.get(get_ident(), 0)
            return function(*args, **kwargs)
        except BaseException as error:
            has_begun = before is not None and latest_tokens.get(get_ident(), 0) != before
            if not has_begun and is_interrupt(error):
                # If the arguments are wrong, or there is no context, there is nothing to count.
                with suppress(TypeError, ValueError, RuntimeError):
                    bound = signature.bind(*args, **kwargs)
                    bound.apply_defaults()
                    arguments = bound.arguments
                    if arguments.get("timeout") is None:
                        model, group = current_model(), arguments.get("group")
                        name = getattr(arguments.get("caller"), "name", function.__name__)
                        group = group if isinstance(group, Group) else model.groups.resolve(group)
                        called = group.in_call(Call(f"{name}()"), whole_call.token)
                        count_interrupted(model, called, bool(arguments.get("async_op")))
            raise

    return call  # type: ignore[return-value]


def count_interrupted(model: ComputationModel, group: Group, async_op: bool) -> None:
    """Count ``group.call``, in which this rank was interrupted."""
    if async_op:
        pending_calls.count_interrupted(model, group)
    else:
        model.transport.count_interrupted(group)


def is_interrupt(error: BaseException) -> bool:
    """True if a signal (also through the handler of the user) or a lack of memory has ended the call."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    handlers = _codes_of_handlers()
    return any(frame.f_code in handlers for frame in frames) or any(map(_got_caller, frames[1:], frames))


def _codes_of_handlers() -> set[CodeType]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions: list[Any] = [getattr(handler, "__func__", handler) for handler in handlers]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def _got_caller(frame: FrameType, caller: FrameType) -> bool:
    """True for a handler of a signal, which Python passes the interrupted frame.

    Finds handlers without code of their own, such as a ``partial``, and those that are no handlers any more.
    """
    values: list[Any] = list(frame.f_locals.values())
    rest = [value for some in values if type(some) is tuple for value in some]  # of *args
    return any(value is caller for value in [*values, *rest])
