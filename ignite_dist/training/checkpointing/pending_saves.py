"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ignite_dist.collectives.coordination import same_outcome
from ignite_dist.collectives.interrupts import own_call
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import KeptError, Work
from ignite_dist.context.live import before_end_hooks, end_hooks
from ignite_dist.errors import MissingRanksError
from ignite_dist.internals.arguments import check_timeout

_logger = logging.getLogger(__name__)


class PendingSave(Work):
    """A checkpoint that a thread writes. A process that exits waits for this thread.

    Args:
        model: the context.
        path: the checkpoint, the result of :meth:`wait`.
        write: writes this rank's part.
    """

    __slots__ = ("_error", "_is_agreed", "_model", "_path", "_thread", "_write", "call")

    def __init__(self, model: ComputationModel, path: Path, write: Callable[[], None]) -> None:
        self._model, self._path = model, path
        self._write: Callable[[], None] | None = write
        self.call = f"save_checkpoint of {path}"
        self._error: KeptError | None = None
        self._is_agreed = False
        self._thread = threading.Thread(target=self._run, name=f"ignite_dist's {self.call}")
        _pending.setdefault(model, {})[model.get_rank()] = self
        self._thread.start()

    def _run(self) -> None:
        write, self._write = self._write, None  # it holds copies of the states
        assert write is not None
        try:
            write()
        except Exception as error:
            self._error = KeptError(error)
            link: BaseException | None = error
            while link is not None:  # the frames hold them too
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
            _logger.error("The checkpoint %s could not be written: %s", self._path, error)

    # Without @waits_for_ranks: a slow disk is not a missing rank.
    def wait(self, timeout: timedelta | None = None) -> Path:
        """The path, when the checkpoint is written. Every rank calls this, or none.

        The ranks compare their outcomes in the first call, so a rank that calls this alone waits for ever.

        Raises:
            OSError, RuntimeError: a rank could not write; raised on every rank.
            MissingRanksError: ``timeout`` has passed on this rank. The checkpoint is still being written.
        """
        if timeout is not None:
            check_timeout("timeout", timeout)
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise MissingRanksError(
                f"The {self.call} has not completed within {timeout} and still runs. Call wait() again."
            )
        if not self._is_agreed:
            self._is_agreed = True
            _forget(self._model)
            try:
                self._compare_outcomes()
            except Exception as error:
                self._error = KeptError(error)
        self._raise()
        return self._path

    @own_call
    def _compare_outcomes(self) -> None:
        same_outcome(self._model, self._raise, "wait() of a save_checkpoint")

    def _raise(self) -> None:
        if self._error is not None:
            self._error.throw()

    def is_completed(self) -> bool:
        """True if this rank's part is written."""
        return not self._thread.is_alive()


_pending: PerContext[dict[int, PendingSave]] = PerContext()
"""The latest save of each context, by rank: replicas of XLA share a context."""


def wait_for_pending(model: ComputationModel) -> None:
    """Wait for the checkpoint that is being written, if any. Every rank calls this."""
    pending = (_pending.get(model) or {}).get(model.get_rank())
    if pending is not None:
        pending.wait()


def _forget(model: ComputationModel) -> None:
    (_pending.get(model) or {}).pop(model.get_rank(), None)


def _forget_all(model: Any) -> None:
    _pending.pop(model)


before_end_hooks.insert(0, wait_for_pending)
end_hooks.append(_forget_all)
