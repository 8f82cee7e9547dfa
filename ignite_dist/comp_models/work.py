"""A collective that has begun, and the marks by which the watchdog recognizes a waiting thread."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch

from ignite_dist.internals.call_sites import function_called, is_library, local_of, site_of, users_frame
from ignite_dist.values.calls import NO_CALL

_Function = TypeVar("_Function", bound=Callable[..., Any])


def communicates(function: _Function) -> _Function:
    """Mark a method of a role: it communicates, or prepares to. A forked child refuses every marked method.

    The mark is for overrides of the method too.
    """
    function._ignite_dist_communicates = True  # type: ignore[attr-defined]
    return function


def communicating(role: object) -> set[str]:
    """The names of the methods of ``role`` that :func:`communicates` has marked."""
    return {
        name
        for kind in type(role).__mro__
        for name, member in vars(kind).items()
        if hasattr(member, "_ignite_dist_communicates")
    }


class Work(ABC):
    """A collective that has begun on this rank.

    A work owns the memory that the collective reads and writes until the collective has completed. This holds
    even if no reference to the work is left, for example after a ``KeyboardInterrupt`` in :meth:`wait`. Any
    thread of the rank may call :meth:`wait`, more than once, also while another thread is in :meth:`wait`. A
    subclass marks its :meth:`wait` with :func:`waits_for_ranks`.
    """

    __slots__ = ("__weakref__",)

    ranks: tuple[int, ...] = ()
    """The ranks that the collective needs to complete; empty if they are not known."""

    needs_all: bool = True
    """True if the collective cannot complete on this rank before all of :attr:`ranks` have begun it."""

    call: str = ""
    """The description for the user, if the user holds this work: ``"all_reduce begun at file.py:12"``."""

    @property
    def group_name(self) -> str:
        """The name of the collective's group, as in :meth:`Transport.calls_begun`."""
        return ""

    def start(self) -> None:  # noqa: B027  # not abstract: most works have begun when they are made
        """Begin the collective if it has not begun yet. Called if the caller computes before it waits.

        Called at most once, and before :meth:`wait`. Without this call, :meth:`wait` may run the collective
        in the caller's thread, if the library can.
        """

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> Any:
        """Return the result when the collective has completed.

        Args:
            timeout: None waits without a limit. A transport's works always get None.

        Raises:
            RuntimeError: the backend has failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """True if :meth:`wait` would return or raise without waiting for another rank."""

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Return a work with the result ``finish(result)``. :meth:`wait` of that work calls ``finish``."""
        return _Then(self, finish)


class Completed(Work):
    """A collective that has already completed."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        return self._result

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def then(self, finish: Callable[[Any], Any]) -> Work:  # noqa: D102
        return Completed(finish(self._result))


class KeptError:
    """An error that each ``wait()`` of a work raises.

    What was raised is not kept: its traceback has the frames of the callers, and these may have open files.
    """

    __slots__ = ("_next",)

    def __init__(self, error: BaseException) -> None:
        self._next = error

    def throw(self) -> NoReturn:
        """Raise the error. The next call raises a copy."""
        errors = [self._next]
        self._next = _copy_of(errors[0])
        raise errors.pop()  # a variable would keep the error, in a cycle with its traceback and this frame


def _copy_of(error: BaseException) -> BaseException:
    """A copy without a traceback; ``error`` itself if its class cannot be copied."""
    with suppress(Exception):  # raised by code of the class
        copied = copy(error)
        if type(copied) is type(error) and str(copied) == str(error):
            copied.__cause__, copied.__suppress_context__ = error.__cause__, error.__suppress_context__
            return copied
    return error


class Failed(Work):
    """A collective that has failed when it began."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = KeptError(error)

    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        self._error.throw()

    def is_completed(self) -> bool:  # noqa: D102
        return True


class Steps(Work):
    """Several collectives in sequence; each needs the result of the previous one. The first begins in wait().

    Args:
        run: runs all the collectives and returns the result.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        return self._run()

    def is_completed(self) -> bool:  # noqa: D102
        return False

    def then(self, finish: Callable[[Any], Any]) -> Work:  # noqa: D102
        return Steps(lambda: finish(self._run()))


class _Then(Work):
    __slots__ = ("_finish", "_inner", "_is_inference", "_result", "needs_all")

    def __init__(self, inner: Work, finish: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._finish: Callable[[Any], Any] | None = finish  # None once the result is there
        self._is_inference = torch.is_inference_mode_enabled()
        self.needs_all = inner.needs_all

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]  # they change while a call is pending
        return self._inner.ranks

    @property
    def group_name(self) -> str:
        return self._inner.group_name

    def start(self) -> None:
        self._inner.start()

    def wait(self, timeout: timedelta | None = None) -> Any:
        finish = self._finish
        if finish is not None:
            result = self._inner.wait()
            self._finish = _raise_interrupted  # not finish again: an AVERAGE would be divided twice
            if self._is_inference == torch.is_inference_mode_enabled():
                self._result = finish(result)
            else:
                with torch.inference_mode(self._is_inference):  # only there are the call's tensors writable
                    self._result = finish(result)
            self._finish = None
        return self._result

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def _raise_interrupted(_: Any) -> NoReturn:
    raise RuntimeError(
        "An earlier wait() of this collective was interrupted while it made the result, which is lost. Make "
        "the call again on every rank, with the original values."
    )


def never_free(objects: Iterable[object]) -> None:
    """Keep groups or works until the process ends: their destructors would need their threads or the GPU."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


# --- waiting threads -------------------------------------------------------------------------------------

# The code objects of the functions that wait for other ranks. Such a function is marked by a decorator,
# because the path of its file is not reliable.
_WAITING: set[CodeType] = set()


def waits_for_ranks(function: _Function) -> _Function:
    """Decorator: mark that a thread inside ``function`` waits for other ranks. Calls do not become slower.

    The watchdog searches the stack for such functions in this package and in the modules of registered
    backends, up to the first frame of other code.
    """
    _WAITING.add(function.__code__)
    return function


def is_marked_as_waiting(frame: FrameType) -> bool:
    """True if the function of ``frame`` is marked."""
    return frame.f_code in _WAITING


def marked_as_waiting() -> set[tuple[str, str]]:
    """The file and the name of each marked function."""
    return {(code.co_filename, code.co_name) for code in _WAITING}


def work_of(frame: FrameType) -> Work | None:
    """The work whose method, for example ``wait()``, runs in ``frame``."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, Work) else None


def begun_call(frame: FrameType | None) -> str:
    """``call`` of the asynchronous collective that a thread waits for or runs; ``""`` if there is none."""
    while frame is not None and is_library(frame):
        call: str = getattr(work_of(frame), "call", "")
        if call:
            return call
        frame = frame.f_back
    return ""


def place_of(frame: FrameType | None) -> str:
    """The call that a thread waits in, for example ``"all_reduce at folder/file.py:12"``.

    For an asynchronous collective, the place where the collective began, for example
    ``"all_reduce begun at folder/file.py:12"``.
    """
    if begun := begun_call(frame):
        return begun
    users = users_frame(frame)
    if users is None and _ends_context(frame):
        call = getattr(local_of(frame, "group"), "call", NO_CALL)
        return f"{call.text} at the end of the context" if call.text else "the end of the context"
    return f"{function_called(frame)} at {site_of(users)}"


def _ends_context(frame: FrameType | None) -> bool:
    """True if a worker ends its context, after the user's function."""
    while frame is not None:
        if frame.f_code.co_name == "conclude" and is_library(frame):
            return True
        frame = frame.f_back
    return False
