"""Which rank runs what, and how the others learn how it went."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ignite_dist.arguments import as_int
from ignite_dist.collectives.all_reduce import all_reduce
from ignite_dist.collectives.broadcast import broadcast_anything
from ignite_dist.collectives.checks import check_dense
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import announce, recorder_of
from ignite_dist.errors import CollectiveMismatchError, RankFailedError
from ignite_dist.tracing import untraced
from ignite_dist.values import serialization
from ignite_dist.workers.failures import users_part

__all__ = ["all_true", "any_true", "exchange_outcomes", "one_rank_first", "one_rank_only", "raise_together"]

_logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Outcome(NamedTuple):
    """How a rank's part went, and what came of it; ``error_type`` is empty where it went well.

    It travels as the plain tuple that it is, with ``kind`` to tell it from what other calls send.
    """

    kind: str
    rank: int
    time: float
    error_type: str = ""
    traceback: str = ""
    value: Any = None


_KIND = "ignite_dist.outcome"


def _outcome(rank: int, error: BaseException | None, value: Any) -> _Outcome:
    if error is None:
        return _Outcome(_KIND, rank, time.time(), value=value)
    text = "".join(traceback.format_exception(type(error), error, users_part(error.__traceback__)))
    return _Outcome(_KIND, rank, time.time(), type(error).__name__, text)


def exchange_outcomes(
    model: ComputationModel, group: Group, error: BaseException | None, value: Any = None
) -> list[Any]:
    """Meet the other ranks of ``group`` and tell each other how it went: the value of each.

    Raises:
        RankFailedError: another rank of the group failed and this one did not. It is about the first.
        CollectiveMismatchError: another rank has made another call.
    """
    model.groups.check_not_joining()
    announce(model, "agreement", group)
    recorder = recorder_of(model)
    if error is not None and recorder is not None:  # those that wait elsewhere want to know
        recorder.log_of(model.get_rank()).error = "".join(traceback.format_exception_only(error))[:200]
    rows = model.objects.gather(tuple(_outcome(model.get_rank(), error, value)), group)
    if not all(isinstance(row, tuple) and row[:1] == (_KIND,) for row in rows):
        raise CollectiveMismatchError("Some ranks tell each other how it went, and others make another call.")
    outcomes = [_Outcome(*row) for row in rows]
    failed = [outcome for outcome in outcomes if outcome.error_type]
    if failed and error is None and model.get_rank() in group.ranks:
        first = min(failed, key=lambda outcome: outcome.time)
        raise RankFailedError(first.rank, first.error_type, first.traceback)
    return [outcome.value for outcome in outcomes]


@contextmanager
def _shared_outcome(model: ComputationModel, group: Group) -> Iterator[None]:
    """A rank that raises in the block tells the others, which raise as well when they have left it."""
    try:
        yield
    except BaseException as error:
        try:
            exchange_outcomes(model, group, error)
        except RuntimeError as lost:  # what the user has to see is the error
            _logger.warning("The other ranks could not be told of a %s here: %s", type(error).__name__, lost)
        raise
    exchange_outcomes(model, group, None)


@contextmanager
def raise_together(group: Any = None) -> Iterator[None]:
    """Context manager: if the block raises on one rank, every rank raises when it has come to its end.

    For what may fail on one rank between collectives (reading a file, a batch that is broken), after which
    that rank would be missing in the next one. The block itself makes no collectives: those that a failed
    rank leaves out would not be made good. Every rank of the group enters it; at its end it costs one
    exchange.

    Args:
        group: as in :func:`all_reduce`. A rank outside runs the block alone (with XLA it takes part).

    Raises:
        RankFailedError: on the ranks that did not raise themselves: the rank that failed first, with its
            traceback. A rank whose process has ended in the block is the backend's own error, in seconds.

    Example::

        with idist.raise_together():
            batch = read(files[idist.get_rank()])
    """
    model = current_model()
    members = model.groups.resolve(group)
    is_outside = members.handle is not None and members.position(model.get_rank()) is None
    if is_outside and not (model.transport.groups_need_everyone and members.ranks):
        yield
        return
    with _shared_outcome(model, members):
        yield


def any_true(flag: bool, group: Any = None) -> bool:
    """Whether ``flag`` is true on any rank of the group: a decision that all of them share.

    Every rank of the group calls it, and the answer is the same on all of them. For early stopping, say.

    Args:
        flag: True or False, or a tensor of one element.
        group: as in :func:`all_reduce`. A rank outside gets its own flag back.

    Raises:
        ValueError: an unknown group. Nothing was sent.
        RuntimeError: a tensor of more elements, or of none. Nothing was sent.

    Example::

        if idist.any_true(loss_is_nan):  # on one rank is enough, and all stop
            break
    """
    return bool(all_reduce(bool(flag), "OR", group=group))


def all_true(flag: bool, group: Any = None) -> bool:
    """Whether ``flag`` is true on every rank of the group. Otherwise as :func:`any_true`."""
    return bool(all_reduce(bool(flag), "AND", group=group))


def one_rank_only(
    rank: int = 0, with_barrier: bool = False, broadcast: bool = False
) -> Callable[[_Function], _Function]:
    """Decorator: the function runs on one rank; on the others it returns None at once.

    Args:
        rank: the global rank that runs it.
        with_barrier: all ranks wait until it has run, and all ranks have to call it.
        broadcast: its result is returned on every rank, as by :func:`broadcast` (None too). Implies
            ``with_barrier``.

    Raises:
        RankFailedError: with ``with_barrier`` or ``broadcast``, on every other rank if the function raises.
        ValueError: a ``rank`` that is not an int; with either of them, one that is not in the world.

    Example::

        @idist.one_rank_only()
        def log(message): ...

        @idist.one_rank_only(broadcast=True)
        def make_run_directory(): ...
    """
    if callable(rank):
        raise TypeError("one_rank_only is called before it decorates: write @one_rank_only().")
    rank = as_int(rank)
    if type(rank) is not int:
        raise ValueError(f"rank must be an int, got {rank!r}.")

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            model = current_model()
            group = model.groups.resolve(None)
            if not (with_barrier or broadcast):
                return function(*args, **kwargs) if model.get_rank() == rank else None
            _check_rank(rank, model.get_world_size())
            return _run_on_one(model, group, rank, lambda: function(*args, **kwargs), broadcast)

        return untraced(wrapper)  # type: ignore[return-value]

    return decorate


def _run_on_one(
    model: ComputationModel, group: Group, rank: int, function: Callable[[], Any], share_result: bool
) -> Any:
    result: Any = None
    with _shared_outcome(model, group):
        if model.get_rank() == rank:
            result = function()
            if share_result:  # if it cannot be sent, the others have to hear of that instead
                result = _sendable(result)
    if not share_result:
        return result
    return broadcast_anything(model, result, rank, group)


def _sendable(result: Any) -> Any:
    """``result``, if it can be sent; a tensor in memory that it does not share with itself."""
    if isinstance(result, Tensor):
        check_dense("one_rank_only", result)
        return result.contiguous()
    serialization.pack(result)
    return result


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Context manager: the block runs on one rank, and on the others when it is through there.

    Every rank enters it, and the block makes no collectives. For a download, say, that the others then find
    on the disk.

    Args:
        rank: the rank that goes first.
        local: ``rank`` is a local rank, and goes first on each node; nodes do not wait for each other
            (with XLA they do).

    Raises:
        ValueError: ``rank`` is not in [0, world_size), or [0, nproc_per_node) with ``local``.
        RankFailedError: on every other rank (of the node) if the block raises on the first; they do not run
            it. What they raise in the block themselves later is theirs alone.

    Example::

        with idist.one_rank_first():
            dataset = download()
    """
    model = current_model()
    group = model.groups.resolve(None)
    first = rank = as_int(rank)
    if local:
        on_node = model.node_ranks()
        _check_rank(rank, len(on_node))
        first = on_node[rank]
        if (
            not model.transport.groups_need_everyone
        ):  # else each node's group would be a call of the other nodes too
            group = model.groups.resolve(sorted(on_node.values()))
    _check_rank(first, model.get_world_size())
    if model.get_rank() != first:
        exchange_outcomes(model, group, None)
        yield
        return
    with _shared_outcome(model, group):
        yield


def _check_rank(rank: int, size: int) -> None:
    if type(rank) is not int or not 0 <= rank < size:
        raise ValueError(f"rank must be an int in [0, {size}), got {rank!r}.")
