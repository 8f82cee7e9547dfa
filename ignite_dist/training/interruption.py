"""Signals that end the loops of all ranks after the same step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from ignite_dist.collectives.coordination import Caller, agree_on_flag
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.serial import SerialModel
from ignite_dist.context.live import current_model, end_hooks
from ignite_dist.workers.interrupts import call_in_main_thread

# torchrun sends its workers the Ctrl-C that the terminal has sent them already.
_REPEAT_SECONDS = 3.0


class _Handler:
    """Notes the signals of this process in place of their own handlers."""

    def __init__(self) -> None:
        self.received_at: float | None = None
        self.previous: dict[int, Any] = {}  # the handlers of the signals, by number
        self._pid = os.getpid()

    def add(self, numbers: set[int]) -> None:
        """Handle these signals from now on. To be called in the main thread."""
        for number in numbers - self.previous.keys():
            self.previous[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._receive)

    def begin_in_fork(self) -> None:
        """A fork has the handlers of its parent, but has received nothing."""
        if os.getpid() != self._pid:
            self._pid, self.received_at = os.getpid(), None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork that has not called any_interrupted()
            # A terminal interrupts the workers of a data loader too. The last step needs them.
            is_handled = number == signal.SIGINT
        else:
            now = time.monotonic()
            self.received_at = self.received_at or now
            is_handled = now < self.received_at + _REPEAT_SECONDS
        if not is_handled:
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)

    def end(self) -> None:
        """Give the signals their own handlers again. To be called in the main thread."""
        for number, previous in self.previous.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, previous)
        self.previous, self.received_at = {}, None


_handler = _Handler()


def any_interrupted(signals: Iterable[int] = (signal.SIGINT, signal.SIGTERM)) -> bool:
    """True on every rank from the step on in which any rank has received one of the signals.

    Call it on every rank, after a step. All ranks then leave the loop after the same step, and can save a
    checkpoint together. A handler or an ``except KeyboardInterrupt`` cannot do that: the signal comes at
    another moment on each rank.

    The first call sets handlers. So call it once before a long first step. The handlers stay until the
    context ends; without a context, until the process ends. Until then a Ctrl-C is no KeyboardInterrupt. A
    second one, 3 s later or more, is.

    The call costs one small collective. With short steps, or on a GPU, which it waits for, call it in every
    tenth step.

    Args:
        signals: numbers of signals. Slurm sends those of ``--signal``.

    Raises:
        ValueError: no process can handle one of ``signals``. Nothing was sent.
        RuntimeError: the first call was made in a thread other than the main thread, where Python sets no
            handlers. (Replicas of XLA that :func:`spawn` starts may call it.) Nothing was sent.

    Example::

        for batch in loader:
            train_step(batch)
            if idist.any_interrupted():
                idist.save_checkpoint("run/last.pt", model=model, optimizer=optimizer, loader=loader)
                break
    """
    current_model()  # the handlers belong to this context, not to an earlier one
    numbers = set(signals)
    _handler.begin_in_fork()
    if not numbers <= _handler.previous.keys():
        for number in numbers:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise ValueError(
                    f"signals must be numbers of signals that a process can handle, got {number!r}."
                )
        call_in_main_thread(lambda: _handler.add(numbers))
    return agree_on_flag(_handler.received_at is not None, "OR", None, Caller("any_interrupted"))


def _end(model: ComputationModel) -> None:
    # A serial model is replaced after each import. Replicas may end at different times.
    has_ended = not isinstance(model, SerialModel) and model.ranks_in_process() == 1
    if _handler.previous and has_ended:
        with suppress(RuntimeError):  # in another thread than the one that has set the handlers
            call_in_main_thread(_handler.end)


end_hooks.append(_end)
