"""``watch_for_hangs()`` finds hangs, and ``compare_calls()`` compares the calls of the ranks."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import recorder_of, set_comparison_in_new_contexts
from ignite_dist.diagnostics.flight_recorder import Comparison
from ignite_dist.diagnostics.out_of_band import make_oob_store, oob_store_of
from ignite_dist.diagnostics.watchdog import DEFAULT_THRESHOLD, start
from ignite_dist.internals.arguments import check_timeout


def watch_for_hangs(threshold: timedelta = DEFAULT_THRESHOLD) -> None:
    """Log once, as a warning, where every rank is when a collective has waited for ``threshold``.

    The warning has the stack of each rank, the most common stack first, and the last 20 collectives of each
    rank. Stacks also cover other libraries, such as ``DistributedDataParallel`` and ``torch.distributed``.
    Every rank of the world must call ``watch_for_hangs()``.

    Workers of :func:`spawn` are watched from their start, with a threshold of 60 seconds. With gloo and NCCL,
    :func:`initialize` and :class:`Parallel` start the watchdog (except with ``file://``), but the flight
    recorder starts with this call.

    If a collective needs a rank that has ended its context or its process, the waiting ranks raise
    ``MissingRanksError`` within 10 seconds, whatever the threshold. The guide ``docs/reliability.md``
    names the calls in which the watchdog cannot know whether the ended rank is needed, and only logs the
    warning.

    Args:
        threshold: a ``datetime.timedelta``.

    Raises:
        TypeError: ``threshold`` is not a ``timedelta``.
        ValueError: ``threshold`` is not positive.
    """
    check_timeout("threshold", threshold)
    model = current_model()
    model.groups.check_not_joining()
    start(model, threshold, oob_store_of(model) or make_oob_store(model))


class compare_calls:  # used as a function and as a context manager
    """Compare the calls of all ranks before each collective.

    Ranks compare sequence number, function, reduction (or source rank), dtype, shape, group and the caller's
    line. If these differ, every rank raises ``CollectiveMismatchError`` with a table, instead of a hang or a
    wrong result. A rank that has skipped a call is named at its next call (the end of the context is also a
    call). If that rank makes no more calls, :func:`watch_for_hangs`, which ``compare_calls()`` calls, reports
    the rank after 30 seconds.

    Every rank of the world must call this. Before :func:`initialize` or :func:`spawn`, ``compare_calls()``
    and the environment variable ``IGNITE_DIST_DEBUG=1`` apply to all later contexts. Each collective costs
    one more small collective. A ``with`` block turns the comparison off at its end. Collectives of other
    libraries (DDP for example) are not compared.

    Args:
        verify: True to compare calls.
        call_sites: True to compare the callers' lines too. Lines distinguish calls with equal arguments.
            False if ranks call one collective from different lines (``if rank == 0: ... else: ...``).

    Example::

        with idist.compare_calls():
            train_one_epoch(model, loader)
    """

    def __init__(self, verify: bool = True, *, call_sites: bool = True) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be True or False, got {verify!r}. compare_calls is no decorator.")
        comparison = Comparison(call_sites) if verify else None
        model = current_model()
        model.groups.check_not_joining()
        recorder = recorder_of(model)
        if recorder is None or not recorder.keeps_calls or recorder.watchdog is None:
            start(model, DEFAULT_THRESHOLD, oob_store_of(model) or make_oob_store(model))
            recorder = recorder_of(model)
        assert recorder is not None
        self._log = recorder.log_of(model.get_rank())
        self._previous, self._log.comparison = self._log.comparison, comparison
        self._log.num_by_group.clear()  # earlier calls may have failed on some ranks
        self._applies_later = model.backend() is None
        if self._applies_later:
            set_comparison_in_new_contexts(comparison)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.comparison = self._previous
        if self._applies_later:
            set_comparison_in_new_contexts(self._previous)
            model = current_model()  # the context may have begun in the block
            recorder = recorder_of(model)
            if recorder is not None:
                recorder.log_of(model.get_rank()).comparison = self._previous
