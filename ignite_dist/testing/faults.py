"""Faults on purpose: a rank is killed, raises, is late or loses its connections at a chosen collective.

Each function returns a context manager. All ranks may enter it; the fault happens on one of them::

    from ignite_dist.testing import faults

    def train(local_rank):
        if idist.restart_count() == 0:
            with faults.kill(rank=1, at="all_reduce", call=3):
                run_epoch()
        else:
            run_epoch()

    idist.spawn("gloo", train, nproc_per_node=2, max_restarts=1)

The module needs no pytest and works in any context.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import get_or_create_recorder

__all__ = ["COLLECTIVES", "delay", "disconnect", "kill", "raise_"]

COLLECTIVES = (
    *("all_gather", "all_gather_ragged", "all_gather_tensors_with_shapes", "all_reduce", "all_to_all"),
    *("average_parameters", "barrier", "broadcast", "gather", "gather_in_order", "reduce", "reduce_scatter"),
    "scatter",
)
"""The functions at which a fault may happen."""


def kill(*, rank: int, at: str, call: int = 1) -> AbstractContextManager[None]:
    """Kill the process of ``rank`` (SIGKILL) when it makes a collective.

    Args:
        rank: the rank.
        at: the function that begins the collective, one of :data:`COLLECTIVES`; ``"any"`` also counts the
            collectives of other functions, such as ``one_rank_first``.
        call: number of the call, from 1, counted from the beginning of the block.

    Raises:
        ValueError: a rank that does not exist, another name, or ``call`` less than 1; raised on all ranks,
            before the block.

    Example::

        with faults.kill(rank=1, at="all_reduce", call=3):
            for batch in loader:
                idist.all_reduce(train_step(batch))  # rank 1 dies before its third
    """
    return _fault(rank, at, call, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def raise_(error: BaseException, *, rank: int, at: str, call: int = 1) -> AbstractContextManager[None]:
    """Raise ``error`` on ``rank`` instead of making a collective. The arguments are those of :func:`kill`.

    Raises:
        TypeError: ``error`` is not an exception.

    Example::

        with faults.raise_(OSError("disk full"), rank=0, at="barrier"):
            idist.barrier()  # rank 0 raises; the others wait until rank 0 has ended
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"raise_() takes an exception, got {error!r}.")

    def act(_: ComputationModel) -> None:
        raise error

    return _fault(rank, at, call, act)


def delay(seconds: float, *, rank: int, at: str, call: int = 1) -> AbstractContextManager[None]:
    """Let ``rank`` sleep before it makes a collective. The arguments are those of :func:`kill`.

    Raises:
        ValueError: ``seconds`` is negative.

    Example::

        with faults.delay(0.5, rank=1, at="all_gather"):
            idist.all_gather(1)  # rank 0 waits for half a second
    """
    if seconds < 0:
        raise ValueError(f"delay() takes seconds, got {seconds!r}.")
    return _fault(rank, at, call, lambda _: time.sleep(seconds))


def disconnect(*, rank: int, at: str, call: int = 1) -> AbstractContextManager[None]:
    """Close the connections of ``rank`` before it makes a collective. It has the arguments of :func:`kill`.

    This collective and all later ones raise, on this rank and on the ranks that need it. Only gloo contexts
    that ``initialize`` or ``spawn`` has made can close their connections.

    Example::

        with faults.disconnect(rank=1, at="barrier"), pytest.raises(RuntimeError):
            idist.barrier()
    """
    if not isinstance(current_model().transport, NativeTransport):
        raise ValueError("disconnect() needs a context of torch.distributed.")
    return _fault(rank, at, call, lambda model: model.transport.end_waits())


@contextmanager
def _fault(rank: int, at: str, call: int, act: Callable[[ComputationModel], None]) -> Iterator[None]:
    model = current_model()
    _check(rank, at, call, model.get_world_size())
    recorder = get_or_create_recorder(model, keep_calls=True)
    outer, record, num_calls = vars(recorder).get("record"), recorder.record, 0

    def record_or_fail(calling: int, operation: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if calling == rank and at in ("any", operation):
            num_calls += 1
            if num_calls == call:
                act(model)
        return record(calling, operation, *args, **kwargs)

    vars(recorder)["record"] = record_or_fail
    try:
        yield
    finally:
        if outer is None:
            del vars(recorder)["record"]
        else:
            vars(recorder)["record"] = outer


def _check(rank: int, at: str, call: int, world_size: int) -> None:
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank= is one of the {world_size} ranks, from 0; got {rank!r}.")
    if at != "any" and at not in COLLECTIVES:
        raise ValueError(f"at= is 'any' or one of {', '.join(COLLECTIVES)}; got {at!r}.")
    if type(call) is not int or call < 1:
        raise ValueError(f"call= is the number of a call, from 1; got {call!r}.")
