"""Signals that the launcher passes on to a worker, each at most once.

At Ctrl-C a terminal sends SIGINT to the launcher and to the workers. Other senders reach the launcher only,
which then tells the workers. A worker must not get a second KeyboardInterrupt while it saves after the first.

After a failure, the launcher interrupts the ranks that still run the user's function.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM})
OTHER_RANK_FAILED = 0
"""What the launcher sends in place of a signal's number."""


# The main thread makes these calls while it waits for replicas of XLA, which are threads.
main_thread_calls: SimpleQueue[Callable[[], object]] | None = None


def call_in_main_thread(function: Callable[[], object]) -> None:
    """Call ``function`` in the main thread, where Python sets handlers of signals. It must not raise.

    Raises:
        RuntimeError: the caller is another thread than the main thread and no replica.
    """
    if threading.current_thread() is threading.main_thread():
        function()
        return
    calls = main_thread_calls
    if calls is None:
        raise RuntimeError(
            "Python sets handlers of signals in the main thread only, and this is another thread."
        )
    done = threading.Event()

    def call() -> None:
        try:
            function()
        finally:
            done.set()

    calls.put(call)
    while not done.wait(0.1) and main_thread_calls is calls:  # Python code, which can be interrupted
        pass


class ReceivedSignals:
    """Records the signals that this process receives. To be made in the main thread.

    Python writes the number of each signal into a pipe before it calls the handler, whoever has set it.
    """

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._lock = threading.Lock()
        self._is_function_over = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._ignore_child)  # data loaders, for example

    def _ignore_child(self) -> None:
        fd = signal.set_wakeup_fd(-1)
        if fd != self._writer:  # somebody else's
            signal.set_wakeup_fd(fd)

    @staticmethod
    def block_in_this_thread() -> None:
        """Leave the signals to the main thread. Needed before :meth:`raise_once`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)

    def raise_once(self, number: int) -> None:
        """Send a signal to this process, unless the process has received it already.

        Args:
            number: of the signal. ``OTHER_RANK_FAILED`` is SIGINT, unless :meth:`end_function` was called.
        """
        with self._lock:
            if number == OTHER_RANK_FAILED:
                if self._is_function_over:
                    return
                number = signal.SIGINT
            with suppress(BlockingIOError):
                self._received.update(os.read(self._reader, 65_536))
            # A signal is pending until the main thread runs. It is seen here because this thread blocks it.
            if number not in self._received | signal.sigpending():
                os.kill(os.getpid(), number)

    def end_function(self) -> None:
        """From now on a failure of another rank does not interrupt this process, which is about to end."""
        with self._lock:
            self._is_function_over = True
