"""Barriers and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, overload

from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.comp_models.work import Work
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import out_of_band
from ignite_dist.internals.arguments import check_timeout
from ignite_dist.internals.tracing import traced, traced_as


@traced
def _barrier_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.barrier(*args, **kwargs)


@overload
def barrier(group: Any = ..., timeout: timedelta | None = ..., *, async_op: Literal[False] = ...) -> None: ...


@overload
def barrier(group: Any = ..., *, async_op: Literal[True]) -> Work: ...


@traced_as(_barrier_in_a_graph)
@counts_interrupts
def barrier(group: Any = None, timeout: timedelta | None = None, *, async_op: bool = False) -> Work | None:
    """Return when every rank of the group has called this function.

    Args:
        group: as in :func:`all_reduce`. A rank outside the group returns at once (with XLA: after all ranks
            have called).
        timeout: a ``datetime.timedelta``. After this time the call raises. The error lists the missing ranks,
            and where they are if :func:`watch_for_hangs` is on (always in workers of :func:`spawn`). A
            barrier with a timeout uses a store, not the backend, so collectives still work after the error.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns when every rank
            has called. Not allowed with ``timeout``: use ``wait(timeout)``.

    Raises:
        MissingRanksError: ``timeout`` has passed. A rank that calls later gets this error too.
        TypeError, ValueError: ``timeout`` is not a timedelta or is not positive.
        RuntimeError: ``timeout`` without :func:`watch_for_hangs`, in a context that idist did not make.
    """
    if isinstance(group, timedelta):
        raise TypeError(f"barrier takes timeout as a keyword: barrier(timeout={group!r}).")
    model = current_model()
    members = model.groups.resolve(group)
    if timeout is not None:
        check_timeout("timeout", timeout)
        if async_op:
            raise ValueError("barrier(async_op=True) takes no timeout: use wait(timeout).")
        if is_member(model, members):
            out_of_band.barrier(model, members, timeout)
        return None
    return perform(  # type: ignore[no-any-return]
        model, "barrier", members, model.transport.barrier, outside=None, async_op=async_op
    )


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """Make a group of ranks for ``group=``. Collectives also accept a list of ranks, and cache its group.

    Usually only the members must call this function. Every rank of the world must call it if options are
    given, if the backend is Horovod or MPI, or if the default group has a ``device_id``. All ranks must then
    make their groups in the same order. The same rules apply to the first collective with a list of ranks.
    With XLA a group costs nothing, but every rank of the world must call each collective of the group.

    Threads of one rank may run collectives at the same time if each thread uses its own groups (not with XLA,
    whose ranks are threads). Make these groups in the same order on all ranks, before the threads start.

    Args:
        ranks: distinct global ranks, sorted in the group. An empty list makes a group without members. Two
            calls with the same ranks make two groups, and a list of ranks as ``group=`` selects the latest.
        kwargs: options of ``torch.distributed.new_group``: ``backend``, ``timeout``, ``pg_options``, ...

    Returns:
        The backend's object for the group. torch: a ``ProcessGroup``, or ``GroupMember.NON_GROUP_MEMBER`` on
        a rank outside the group. Horovod: a ``ProcessSet``. XLA: the ranks.

    Raises:
        ValueError: a rank is not an int, is given twice, or is out of range.
    """
    return current_model().groups.new(ranks, **kwargs)
