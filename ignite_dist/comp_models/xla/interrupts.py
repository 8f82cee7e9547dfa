"""Threads in which the main thread's KeyboardInterrupt and SystemExit are raised, too.

Python calls signal handlers in the main thread only, and raises their exceptions there. The main thread of a
worker waits for its replicas. Without this module, the replicas' ``except`` and ``finally`` blocks never run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType

from ignite_dist.workers import interrupts as main_thread

_lock = threading.Lock()  # guards the attributes of every Interrupt


def run_in_threads(
    functions: Mapping[str, Callable[[], None]], sending: AbstractContextManager[None]
) -> None:
    """Call each function in a thread with the given name. Returns when all functions have returned.

    To be called in the main thread. Its KeyboardInterrupt or SystemExit is raised in the :func:`allowed`
    block of each thread instead. A second one is raised by this function. ``sending`` is a context manager
    in which the threads are interrupted. Meanwhile the main thread serves ``call_in_main_thread``.

    A thread raises the exception when it next runs Python code. So one call that blocks without running
    Python code, for example ``time.sleep(100)``, is not interrupted.
    """
    interrupts = {name: Interrupt() for name in functions}
    calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
    main_thread.main_thread_calls = calls

    def wait() -> None:
        # Not join(): bpo-45274, an interrupted join() marks the thread as ended.
        while not all(interrupt.ended.is_set() for interrupt in interrupts.values()):
            calls.get()()

    threads = [
        threading.Thread(target=interrupts[name].run, args=(function, calls), name=name)
        for name, function in functions.items()
    ]
    try:
        for thread in threads:
            thread.start()
        wait()
    except (KeyboardInterrupt, SystemExit) as error:
        kind = _class_of(error)
        with sending, _lock:
            for interrupt in interrupts.values():
                interrupt.send(kind)
        if not all(thread.ident for thread in threads):  # not all threads have started
            raise
        wait()
    finally:
        main_thread.main_thread_calls = None


def _class_of(error: BaseException) -> type[BaseException]:
    """A class whose instances are like ``error``. Python calls the class in the thread, without arguments."""
    kind, args = type(error), error.args
    if not args:
        return kind
    return type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *args)})


class Interrupt:
    """The exception that one thread is to raise: at most one, and at most once.

    A second exception would break off a save. After a second Ctrl-C the launcher ends the whole process.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._was_sent = False
        self._delayed: type[BaseException] | None = None
        self._thread: int | None = None  # the thread's id, while Python may raise the exception there

    def run(self, function: Callable[[], None], calls: SimpleQueue[Callable[[], object]]) -> None:
        """Call ``function`` in this thread, which is to raise the exception.

        Args:
            function: the function.
            calls: wakes the main thread at the end.
        """
        _own.interrupt = self
        try:
            function()
        finally:
            self.ended.set()
            calls.put(lambda: None)  # so that the main thread sees the end

    def send(self, kind: type[BaseException]) -> None:
        """Raise an exception of class ``kind`` in the thread. The caller holds the lock."""
        if self._was_sent:
            return
        self._was_sent = True
        if self._thread is None:
            self._delayed = kind
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(kind))

    def switch(self, thread: int | None) -> int | None:
        """Allow the exception in this thread, whose id is given, or delay it. Returns the previous value."""
        with _lock:
            # If the exception was sent while this thread waited for the lock, Python raises it in this call.
            return self._switch(thread)

    def _switch(self, thread: int | None) -> int | None:
        previous, self._thread = self._thread, thread
        if thread is not None and (kind := self.pop()) is not None:
            raise kind
        return previous

    def pop(self) -> type[BaseException] | None:
        """The class of the delayed exception, to be raised now. The caller holds the lock."""
        kind, self._delayed = self._delayed, None
        return kind


class _Own(threading.local):
    """The interrupt of the calling thread. Nothing is sent to a thread of other code."""

    def __init__(self) -> None:
        self.interrupt = Interrupt()


_own = _Own()


def allowed() -> AbstractContextManager[None]:
    """Context manager: this thread may be interrupted anywhere in the block."""
    return _Switch(threading.get_ident())


def delayed() -> AbstractContextManager[None]:
    """Context manager: within :func:`allowed`, this thread is interrupted at the end of the block only.

    In the block, call :func:`raise_delayed` at each point where this thread may be interrupted.
    """
    return _Switch(None)


class _Switch(AbstractContextManager[None]):
    def __init__(self, thread: int | None) -> None:
        self._interrupt, self._thread = _own.interrupt, thread

    def __enter__(self) -> None:
        self._previous = self._interrupt.switch(self._thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupt.switch(self._previous)


def raise_delayed() -> None:
    """Raise the exception that was sent to this thread during a :func:`delayed` block, if any."""
    with _lock:
        kind = _own.interrupt.pop()
    if kind is not None:
        raise kind
