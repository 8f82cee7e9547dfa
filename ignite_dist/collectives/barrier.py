"""Barriers, and the groups that collectives take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, overload

from ignite_dist.arguments import check_timeout
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.comp_models.work import Work
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics import out_of_band
from ignite_dist.tracing import traced, traced_as

__all__ = ["barrier", "new_group"]


@traced
def _barrier_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.barrier(*args, **kwargs)


@overload
def barrier(group: Any = ..., timeout: timedelta | None = ..., *, async_op: Literal[False] = ...) -> None: ...


@overload
def barrier(group: Any = ..., *, async_op: Literal[True]) -> Work: ...


@traced_as(_barrier_in_a_graph)
def barrier(group: Any = None, timeout: timedelta | None = None, *, async_op: bool = False) -> Work | None:
    """Return when every rank of the group has called it.

    Args:
        group: as in :func:`all_reduce`. A rank outside returns at once (with XLA: when all have come).
        timeout: a ``datetime.timedelta`` after which it raises and says which ranks have not come, and where
            they are, if they are watched (:func:`watch`; workers of :func:`spawn` are). It goes through a
            store beside the backend, with which collectives go on afterwards as if nothing had been.
        async_op: True returns a :class:`Work` at once, whose ``wait()`` returns when every rank has come. Not
            with ``timeout``: give that to ``wait(timeout)``.

    Raises:
        MissingRanksError: ``timeout`` has passed; also on a rank that comes later.
        TypeError, ValueError: a ``timeout`` that is not a timedelta, or not positive.
        RuntimeError: ``timeout`` in a context that idist did not make, before :func:`watch`.
    """
    if isinstance(group, timedelta):
        raise TypeError(f"barrier takes its timeout by name: barrier(timeout={group!r}).")
    model = current_model()
    members = model.groups.resolve(group)
    if timeout is not None:
        check_timeout("timeout", timeout)
        if async_op:
            raise ValueError("barrier(async_op=True) takes no timeout: give it to wait(timeout).")
        if is_member(model, members):
            out_of_band.barrier(model, members, timeout)
        return None
    return perform(  # type: ignore[no-any-return]
        model, "barrier", members, lambda: model.transport.barrier(members), outside=None, async_op=async_op
    )


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """A handle for a group of ranks, to pass as ``group=``. A list of ranks does as well, and is cached.

    Without options only the members need to call it (Horovod, MPI, and a default group bound to a device by
    ``device_id=``: every rank of the world); with options every rank of the world does, in the same order.
    The same holds for the first use of a list. With Horovod all ranks make their groups in the same order.
    With XLA making one costs nothing, and every collective of it is a call of every rank of the world.

    Threads of one rank may make collectives at once if each uses groups of its own (not with XLA, whose ranks
    are threads). Two handles of the same ranks are two groups; make them in the same order on all ranks, so
    before the threads begin. A list of ranks is no third one: it means the handle that was made last.

    Args:
        ranks: distinct global ranks; the group's order is ascending. Of none it is a group without members,
            which every rank is outside of.
        kwargs: options of ``torch.distributed.new_group``: ``backend``, ``timeout``, ``pg_options``, ...

    Returns:
        What the backend calls a group: for torch a ``ProcessGroup``, and
        ``GroupMember.NON_GROUP_MEMBER`` on a rank outside; for Horovod a ``ProcessSet``; for XLA the ranks.
        Each of them, and a list of the ranks, is a ``group=``.

    Raises:
        ValueError: ranks that are not ints, given twice or out of range.
    """
    return current_model().groups.new(ranks, **kwargs)
