"""A collective that has begun, and the marks by which the watchdog knows who waits for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = ["Completed", "Steps", "Work", "is_marked_as_waiting", "waits_for_ranks", "work_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Work(ABC):
    """A collective that has begun on this rank.

    It owns the memory that it reads and writes until it has completed: also if nobody has a reference to it
    any longer, say because a ``KeyboardInterrupt`` came while it was waited for. Any thread of the rank may
    wait for it, more than once, and two may at once. A subclass marks its :meth:`wait` with
    :func:`waits_for_ranks`.
    """

    __slots__ = ("__weakref__",)

    ranks: tuple[int, ...] = ()
    """Those without which it cannot complete; empty if that is not known."""

    needs_all: bool = True
    """True if each of :attr:`ranks` is needed until it completes, rather than any of them."""

    call: str = ""
    """What the user calls it, if it was given to the user: ``"all_reduce begun at file.py:12"``."""

    @property
    def group_name(self) -> str:
        """The name of its group, as in :meth:`Transport.calls_begun`."""
        return ""

    def start(self) -> None:  # noqa: B027  # not abstract: most have begun when they are made
        """Begin, if the collective has not begun yet, because the caller does something else before it waits.

        Called once, before :meth:`wait`, or not at all. A library that can wait in the caller's own thread
        does so where it is not called.
        """

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> Any:
        """Return the result when the collective has completed.

        Args:
            timeout: None waits for as long as it takes. For the works of a transport it always is None.

        Raises:
            RuntimeError: the backend has failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """True if :meth:`wait` would return, or raise, without waiting for another rank."""

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """This work, with ``finish(result)`` as its result. ``finish`` runs once, in a thread that waits."""
        return _Then(self, finish)


class Completed(Work):
    """A collective that was complete when it returned."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> Any:  # noqa: D102
        return self._result

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def then(self, finish: Callable[[Any], Any]) -> Work:  # noqa: D102
        return Completed(finish(self._result))


class Steps(Work):
    """Several collectives, each of which follows from the one before: they begin when somebody waits.

    Args:
        run: makes them all, and gives the result.
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
    __slots__ = ("_finish", "_inner")

    def __init__(self, inner: Work, finish: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._finish = finish

    def start(self) -> None:
        self._inner.start()

    def wait(self, timeout: timedelta | None = None) -> Any:
        return self._finish(self._inner.wait())

    def is_completed(self) -> bool:
        return self._inner.is_completed()


# --- who waits -------------------------------------------------------------------------------------------

# The code of the functions that wait for other ranks. Whoever waits marks it: where its file lies is nothing
# that anybody may rely on.
_WAITING: set[CodeType] = set()


def waits_for_ranks(function: _Function) -> _Function:
    """Decorator: a thread inside of ``function`` waits for other ranks. It costs a call nothing.

    The watchdog looks for such functions in this package and in the modules of registered backends, up to the
    first frame of other code.
    """
    _WAITING.add(function.__code__)
    return function


def is_marked_as_waiting(frame: FrameType) -> bool:
    """True if the function of ``frame`` is marked."""
    return frame.f_code in _WAITING


def work_of(frame: FrameType) -> Work | None:
    """The work whose ``wait()`` is ``frame``."""
    found = frame.f_locals.get("self") if frame.f_code in _WAITING else None
    return found if isinstance(found, Work) else None
