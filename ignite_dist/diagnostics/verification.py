"""What users call to have their ranks watched and their calls compared."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from ignite_dist.arguments import check_timeout
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import compare_in_new_contexts, recorder_of
from ignite_dist.diagnostics.flight_recorder import Comparison
from ignite_dist.diagnostics.out_of_band import (
    exchanged_side,
    side_of,
)
from ignite_dist.diagnostics.watchdog import DEFAULT_THRESHOLD, start

__all__ = ["debug", "watch"]


def watch(threshold: timedelta = DEFAULT_THRESHOLD) -> None:
    """Say on the standard error, once, where every rank is when a collective has waited for ``threshold``.

    What is printed: the stack that most ranks share, the stacks of the others, and the last 20 collectives of
    each rank. It covers what other libraries call (a ``DistributedDataParallel``, ``torch.distributed``
    itself) as well. Workers of :func:`spawn` are watched from their start, with 60 seconds; call it there to
    change that. So are ranks of gloo and NCCL after :func:`initialize` or in :class:`Parallel` (without a
    ``file://``), but their last collectives are kept only from this call on. Every rank of the world calls
    it. It goes through a store, never through the backend: the one that the context was made with, else one
    that rank 0 serves from this call on.

    A rank whose call needs another which has come to the end of its context, or whose process has ended, gets
    a ``MissingRanksError`` within 10 seconds, whatever the threshold. Where it cannot be told whether that
    one is needed (a gather in which others still take part, the ``wait()`` of an asynchronous call, a
    backward pass on a GPU), what is printed has to do.

    Args:
        threshold: a ``datetime.timedelta``.

    Raises:
        TypeError, ValueError: not a timedelta, or not a positive one. Nothing was sent.
    """
    check_timeout("threshold", threshold)
    model = current_model()
    model.groups.check_not_joining()
    start(model, threshold, side_of(model) or exchanged_side(model))


class debug:  # used as a function, and in a with statement
    """Compare the ranks' calls before each collective: what does not go together is an error with a table.

    Sequence number, operation, op, dtype, shape, group and the caller's line. Where they differ every rank
    raises ``CollectiveMismatchError``, instead of waiting, or of adding up what does not belong together. A
    rank that has skipped a call is named when it makes its next one (the end of the context is one), and if
    it makes none, after 30 seconds: see :func:`watch`, which this turns on as well.

    Every rank of the world calls it; before a context is made it holds for those to come, in workers of
    :func:`spawn` too, and so does ``IGNITE_DIST_DEBUG=1`` in the environment. It costs another small
    collective for each; where nothing is watched, about 0.1 us. As a context manager it is off again
    after the block. Collectives of other libraries (DDP's) are not compared.

    Args:
        verify: whether calls are compared.
        call_sites: whether the lines that they come from count. They alone tell apart calls that look alike.
            A script that makes one collective from two lines (``if rank == 0: ... else: ...``) needs False.

    Example::

        with idist.debug():
            train_one_epoch(model, loader)
    """

    def __init__(self, verify: bool = True, *, call_sites: bool = True) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"debug(verify=...) is True or False, got {verify!r}; it is no decorator.")
        comparison = Comparison(call_sites) if verify else None
        model = current_model()
        model.groups.check_not_joining()
        found = recorder_of(model)
        if found is None or not found.keeps_calls or found.watchdog is None:
            start(model, DEFAULT_THRESHOLD, side_of(model) or exchanged_side(model))
            found = recorder_of(model)
        assert found is not None
        self._log = found.log_of(model.get_rank())
        self._before, self._log.comparison = self._log.comparison, comparison
        self._log.by_group.clear()  # the ranks count from here: before, one may have been refused a call
        self._holds_later = model.backend() is None  # without a context it is for those to come
        if self._holds_later:
            compare_in_new_contexts(comparison)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.comparison = self._before
        if self._holds_later:
            compare_in_new_contexts(self._before)
            model = current_model()  # one that was made in the block
            found = recorder_of(model)
            if found is not None:
                found.log_of(model.get_rank()).comparison = self._before
