"""Run code on one rank or on one rank first, and share failures with the other ranks."""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ignite_dist.collectives.broadcast import broadcast_anything
from ignite_dist.collectives.checks import check_dense
from ignite_dist.collectives.interrupts import counts_interrupts, one_call
from ignite_dist.collectives.path import is_member, perform, takes_part
from ignite_dist.collectives.tree_reduction import reduce_tree
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import recorder_of
from ignite_dist.environments.rendezvous.connections import last_lines
from ignite_dist.errors import CollectiveMismatchError, RankFailedError, without_link
from ignite_dist.internals.arguments import as_int
from ignite_dist.internals.ranks import describe_by_rank
from ignite_dist.internals.tracing import untraced
from ignite_dist.values import serialization
from ignite_dist.values.calls import Call, whole_call

_logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Outcome(NamedTuple):
    """The result or the error of one rank. ``error_type`` is empty after success.

    It is sent as a plain tuple.
    """

    rank: int
    time: float
    error_type: str = ""
    traceback: str = ""
    value: Any = None


def _outcome(rank: int, error: BaseException | None, value: Any) -> _Outcome:
    if error is None:
        return _Outcome(rank, time.time(), value=value)
    return _Outcome(rank, time.time(), type(error).__name__, _traceback_of(error))


def _traceback_of(error: BaseException) -> str:
    from ignite_dist.workers.failures import text_of

    return text_of(error, error.__traceback__)


class Caller(NamedTuple):
    """The public function that exchanges outcomes, and the arguments that must be equal on all ranks."""

    name: str
    arguments: str = ""


_GRADIENTS = Caller("the agreement on gradients")


@counts_interrupts
def exchange_outcomes(
    model: ComputationModel,
    group: Group,
    error: BaseException | None,
    value: Any = None,
    caller: Caller = _GRADIENTS,
) -> list[Any]:
    """Gather the outcomes of all ranks of ``group``. Returns their values.

    Ranks meet only if they pass the same ``caller``. With the default, a rank that fails in a microbatch
    meets the ranks that average their gradients.

    Raises:
        RankFailedError: another rank of the group failed, and this rank did not. The error names the rank
            that failed first.
        CollectiveMismatchError: another rank called a different collective.
    """
    model.groups.check_not_joining()

    def gather(group: Group) -> list[Any]:
        recorder = recorder_of(model)
        if error is not None and recorder is not None:  # for the reports of ranks that wait in another call
            recorder.log_of(model.get_rank()).error = without_link(last_lines(error))[:200]
        return model.objects.gather(tuple(_outcome(model.get_rank(), error, value)), group)

    rows = perform(
        model,
        caller.name,
        group,
        lambda group: Steps(lambda: gather(group)),
        outside=[],
        op=caller.arguments,
    )
    outcomes = [_Outcome(*row) for row in rows]
    failed = [outcome for outcome in outcomes if outcome.error_type]
    if failed and error is None and model.get_rank() in group.ranks:
        first = min(failed, key=lambda outcome: outcome.time)
        raise RankFailedError(first.rank, first.error_type, first.traceback)
    return [outcome.value for outcome in outcomes]


def check_same(
    model: ComputationModel,
    compared: Iterable[tuple[Group, Sequence[str]]],
    caller: Caller,
    needed: str,
    values: Sequence[Sequence[str]] = (),
) -> list[list[Sequence[str]]]:
    """Raise on every rank of a group whose ranks pass different texts. Every rank of the groups calls this.

    The ranks of a group exchange a digest each, and the texts only if the digests differ. Where ranks outside
    the group take part (XLA), they exchange the texts at once.

    Args:
        model: the context.
        compared: groups with this rank's texts, in an order that all ranks share. An error is raised only
            after the last exchange, for which ranks of other groups may wait.
        caller: the public function, with arguments that must be equal on all ranks.
        needed: what the function needs, for the error: ``"the same model on every rank"``.
        values: texts for each group that may differ. They are in the same exchange.

    Returns:
        For each group the ``values`` of its ranks if they differ; else an empty list.

    Raises:
        CollectiveMismatchError: texts differ (the error shows the first), or a rank has made another call.
    """
    given = list(compared)
    errors, different = [], []
    for (group, texts), own in zip(given, values or [()] * len(given), strict=True):
        rows = _rows_if_different(model, group, (list(texts), list(own)), caller)
        errors.append(_difference(group, [texts for texts, _ in rows], caller, needed))
        different.append([values for _, values in rows])
    found = [*filter(None, errors)]
    if found:
        errors.clear()
        raise found.pop(0)  # a variable would keep the error, in a cycle with its traceback and this frame
    return different


def _rows_if_different(
    model: ComputationModel, group: Group, row: tuple[list[str], list[str]], caller: Caller
) -> list[Any]:
    """The row of each rank of the group; empty if all are equal."""
    digest = hashlib.sha1(repr(row).encode(), usedforsecurity=False).digest()
    # Ranks outside the group see no rows, so they cannot know of a second exchange.
    first: Any = row if model.transport.groups_need_all_ranks else digest
    rows = exchange_outcomes(model, group, None, first, caller)
    if all(one == first for one in rows):
        return []
    return exchange_outcomes(model, group, None, row, caller) if first is digest else rows


def _difference(
    group: Group, rows: Sequence[Sequence[str]], caller: Caller, needed: str
) -> CollectiveMismatchError | None:
    columns = zip_longest(*rows, fillvalue="nothing")
    different = next((column for column in columns if len(set(column)) > 1), None)
    if different is None:
        return None
    by_rank = describe_by_rank(group.ranks, different)
    return CollectiveMismatchError(f"{caller.name} needs {needed}. The first difference is: {by_rank}.")


@contextmanager
def _shared_outcome(model: ComputationModel, group: Group, caller: Caller) -> Iterator[None]:
    """If the block raises on one rank, the other ranks raise at the end of their blocks."""
    with _reported_errors(model, group, caller):
        yield
    exchange_outcomes(model, group, None, caller=caller)


@contextmanager
def _reported_errors(model: ComputationModel, group: Group, caller: Caller) -> Iterator[None]:
    """If the block raises, report the error to the other ranks, which call :func:`exchange_outcomes`."""
    try:
        yield
    except BaseException as error:
        try:
            exchange_outcomes(model, group, error, caller=caller)
        except RuntimeError as exchange_error:  # the user must see the first error
            kind = type(error).__name__
            if not isinstance(error, KeyboardInterrupt):  # the launcher interrupts ranks after a failure
                _logger.warning("Could not report a %s to the other ranks: %s", kind, exchange_error)
        raise


@contextmanager
def _block(model: ComputationModel, name: str) -> Iterator[None]:
    """While this rank runs the block, for which the other ranks wait, their wait is no hang."""
    recorder = recorder_of(model)
    if recorder is None:
        yield
        return
    log = recorder.log_of(model.get_rank())
    before, log.block = log.block, name
    try:
        yield
    finally:
        log.block = before


def same_outcome(
    model: ComputationModel, function: Callable[[], Any], caller: str = "agreement"
) -> list[Any]:
    """``function()`` of every rank of the world. Every rank calls this, in the public function ``caller``.

    ``function`` makes no collectives, or only such that raise on every rank.

    Raises:
        ValueError, TypeError, OSError, RuntimeError: a function raised it. Every rank raises such an error,
            with the same text where only one function raised. On a rank whose function did not raise, its
            ``__cause__`` is a :class:`RankFailedError` with the traceback.
        RankFailedError: another rank's function raised any other error.
    """
    world, own = model.groups.resolve(None), []
    row: tuple[str, Any, str, str]
    with _reported_errors(model, world, Caller(caller)):
        try:
            row = "", function(), "", ""
        except tuple(_KINDS.values()) as error:
            own, kind = [error], next(name for name, kind in _KINDS.items() if isinstance(error, kind))
            row = kind, _arguments(error), type(error).__name__, _traceback_of(error)
    rows = exchange_outcomes(model, world, None, row, Caller(caller))
    if own:
        raise own.pop()  # see check_same
    for rank, (kind, value, error_type, trace) in enumerate(rows):
        if kind:
            raise _KINDS[kind](*value) from RankFailedError(rank, error_type, trace)
    return [value for _, value, *_ in rows]


def _arguments(error: Exception) -> tuple[Any, ...]:
    """Arguments for an error of the same text, and of the same ``errno``."""
    from ignite_dist.workers.sent_exceptions import message_of

    text, number = message_of(error), getattr(error, "errno", None)
    prefix = f"[Errno {number}] "
    is_numbered = isinstance(error, OSError) and type(number) is int and text.startswith(prefix)
    return (number, text.removeprefix(prefix)) if is_numbered else (text,)


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (FileNotFoundError, PermissionError, OSError, ValueError, TypeError, RuntimeError)
}


@contextmanager
def raise_together(group: Any = None) -> Iterator[None]:
    """Context manager: if the block raises on one rank, every rank raises at the end of the block.

    Use it for code that may fail on one rank between collectives, for example reading a file. Without it, the
    other ranks would wait for the failed rank in the next collective. The block must not call collectives,
    because a failed rank would skip them. Every rank of the group must enter the block. The end of the block
    costs one collective.

    Args:
        group: as in :func:`all_reduce`. A rank outside the group only runs the block (with XLA it also takes
            part in the collective).

    Raises:
        RankFailedError: on the ranks that did not raise. It names the rank that failed first, with its
            traceback. If a process ends in the block, the other ranks get the backend's error within seconds.

    Example::

        with idist.raise_together():
            batch = read(files[idist.get_rank()])
    """
    model = current_model()
    members = model.groups.resolve(group)
    if not takes_part(model, members):
        yield
        return
    with _shared_outcome(model, members, Caller("raise_together")):
        yield


def any_true(flag: bool, group: Any = None) -> bool:
    """True on every rank if ``flag`` is true on any rank of the group.

    Every rank of the group must call this function. Use it for early stopping, for example.

    Args:
        flag: True or False, or a tensor of one element.
        group: as in :func:`all_reduce`. A rank outside the group gets its own ``flag`` as the result.

    Raises:
        ValueError: the group is unknown. Nothing was sent.
        RuntimeError: ``flag`` is a tensor with no element or with several. Nothing was sent.

    Example::

        for batch in loader:
            loss = train_step(batch)
            if idist.any_true(math.isnan(loss)):  # if the loss is NaN on one rank, all ranks stop
                break
    """
    return agree_on_flag(flag, "OR", group, Caller("any_true"))


def all_true(flag: bool, group: Any = None) -> bool:
    """True if ``flag`` is true on every rank of the group. See :func:`any_true`."""
    return agree_on_flag(flag, "AND", group, Caller("all_true"))


@counts_interrupts
def agree_on_flag(flag: Any, op: str, group: Any, caller: Caller) -> bool:
    """The flags of all ranks of ``group``, reduced by ``op``, in the public function ``caller``."""
    return bool(reduce_tree(current_model(), bool(flag), op, group, function=caller.name))


def one_rank_only(
    rank: int = 0, with_barrier: bool = False, broadcast: bool = False, group: Any = None
) -> Callable[[_Function], _Function]:
    """Decorator: the function runs on one rank. On the other ranks a call returns None at once.

    If the function calls another function of ``one_rank_only`` for the same rank, that one runs without the
    other ranks.

    Args:
        rank: the global rank that runs the function, a rank of the group. If the group lacks rank 0, the
            default 0 stands for the group's first rank.
        with_barrier: True makes all ranks of the group wait for the end of the function. All of them must
            call it.
        broadcast: True returns the result on every rank of the group (see :func:`broadcast`; None is
            allowed). Implies ``with_barrier``.
        group: as in :func:`all_reduce`, resolved at each call. A call returns None on a rank outside the
            group (with XLA after it has taken part in the collectives). Without ``with_barrier`` and
            ``broadcast`` no group of a list is made.

    Raises:
        TypeError: with ``with_barrier`` or ``broadcast``, at the decoration: the function is asynchronous or
            a generator.
        RuntimeError: the function calls a function of ``one_rank_only`` for another rank, with
            ``with_barrier`` or ``broadcast``.
        RankFailedError: on every other rank if the function raises, with ``with_barrier`` or ``broadcast``.
        CollectiveMismatchError: the ranks call functions of different names with ``broadcast``.
        ValueError: ``rank`` is not an int, or not in the group (without a group: not in the world, with
            ``with_barrier`` or ``broadcast``); or ``group`` is not a group. Nothing was sent.

    Example::

        @idist.one_rank_only()
        def log(message):
            print(message)

        @idist.one_rank_only(broadcast=True)
        def make_run_directory():
            return tempfile.mkdtemp()

        log("training begins")  # rank 0 prints
        folder = make_run_directory()  # the folder that rank 0 has made
    """
    if callable(rank):
        raise TypeError("one_rank_only needs parentheses: write @one_rank_only().")
    rank = as_int(rank)
    if type(rank) is not int:
        raise ValueError(f"rank must be an int, got {rank!r}.")

    def decorate(function: _Function) -> _Function:
        if (with_barrier or broadcast) and _runs_later(function):
            name = getattr(function, "__name__", function)
            raise TypeError(
                f"{name} is asynchronous or a generator: its body runs after the call, when the other ranks "
                "have gone on. Decorate a function that runs it to its end, for example with "
                "asyncio.run."
            )

        @wraps(function)
        def one_rank_only(*args: Any, **kwargs: Any) -> Any:  # reports of hangs show this name
            model = current_model()
            needs_others = with_barrier or broadcast
            is_skipped = not needs_others or _running.is_alone
            members = model.groups.resolve(None if is_skipped else group)  # makes no group to skip a call

            @wraps(function)  # the ranks compare the name
            def run() -> Any:
                with _only_this_rank():
                    return function(*args, **kwargs)

            if is_skipped:
                ranks = model.groups.ranks_of(group)
                one = rank if group is None else _one_of(ranks, rank)
                if model.get_rank() == one:
                    return run()
                if needs_others and model.get_rank() in ranks:
                    raise RuntimeError(
                        f"Rank {model.get_rank()} alone runs a function of one_rank_only, which calls one "
                        f"for rank {one}. Call the second function on all ranks."
                    )
                return None
            one = _one_of(members.ranks, rank)
            return _run_on_one(model, members, one, run, broadcast)

        return untraced(one_rank_only)  # type: ignore[return-value]

    return decorate


def _runs_later(function: Callable[..., Any]) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


class _Running(threading.local):
    is_alone = False  # True in a function of one_rank_only, which this rank runs without the others


_running = _Running()


@contextmanager
def _only_this_rank() -> Iterator[None]:
    before, _running.is_alone = _running.is_alone, True
    token, whole_call.token = whole_call.token, 0  # the user's code makes calls of its own
    try:
        yield
    finally:
        _running.is_alone, whole_call.token = before, token


def _one_of(ranks: Sequence[int], rank: Any) -> int:
    """``rank``, which must be in ``ranks``. 0 stands for the first of ``ranks`` if these lack rank 0.

    Returns:
        The rank; -1 if ``ranks`` is empty: the group has no members, or this rank does not know them.

    Raises:
        ValueError: ``rank`` is not an int or not in ``ranks``.
    """
    if not ranks:
        return -1
    if type(rank) is int and (rank in ranks or rank == 0):
        return rank if rank in ranks else ranks[0]
    allowed = f"[0, {len(ranks)})" if ranks == tuple(range(len(ranks))) else f"the group {list(ranks)}"
    raise ValueError(f"rank must be an int in {allowed}, got {rank!r}.")


@one_call
def _run_on_one(
    model: ComputationModel, group: Group, rank: int, function: Callable[[], Any], share_result: bool
) -> Any:
    # With another function on this rank, the caller would get the result of the other one.
    arguments = f"rank={rank}{f', broadcast=True, {function.__qualname__}' * share_result}"
    called = Caller("one_rank_only", arguments)
    if not is_member(model, group):
        return perform(
            model,
            called.name,
            group,
            lambda group: Steps(lambda: _follow(model, group, rank, share_result)),
            None,
            op=called.arguments,
        )
    result: Any = None
    with _shared_outcome(model, group, called):
        if model.get_rank() == rank:
            with _block(model, "the function of one_rank_only"):
                result = function()
            if share_result:  # raise an error in this block, so that the other ranks get it
                result = _sendable(result)
    if not share_result:
        return result
    return broadcast_anything(model, result, rank, group.in_call(_RESULT))


_RESULT = Call("the result of one_rank_only")


def _follow(model: ComputationModel, group: Group, rank: int, share_result: bool) -> None:
    """Take part in the collectives of :func:`_run_on_one` outside of ``group``, with XLA."""
    rows = model.objects.gather(tuple(_outcome(model.get_rank(), None, None)), group)
    if share_result and all(isinstance(row, tuple) and not _Outcome(*row).error_type for row in rows):
        broadcast_anything(model, None, rank, group.in_call(_RESULT))


def _sendable(result: Any) -> Any:
    """``result``, contiguous if it is a tensor. Raises if ``result`` cannot be sent."""
    if isinstance(result, Tensor):
        check_dense("one_rank_only", result)
        return result.contiguous()
    serialization.pack(result)
    return result


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False, group: Any = None) -> Iterator[None]:
    """Context manager: the block runs on one rank first, then on the other ranks.

    For example, the first rank downloads a file and the other ranks read it from the disk. Every rank of the
    group must enter the block. The block must not call collectives.

    Args:
        rank: the global rank that runs the block first, a rank of the group. If the group lacks rank 0, the
            default 0 stands for the group's first rank.
        local: True means that ``rank`` is a local rank, which runs first on its node. Nodes do not wait for
            each other (with XLA they do). Not allowed with ``group``.
        group: as in :func:`all_reduce`. A rank outside the group only runs the block (with XLA after it has
            taken part in the collective).

    Raises:
        ValueError: ``rank`` is not in the group (without a group: in [0, world_size), or in
            [0, nproc_per_node) with ``local``); or both ``local`` and ``group`` are given. Nothing was sent.
        RankFailedError: on every other rank (of the node, or of the group) if the block raises on the first
            rank. The other ranks then skip the block. An error on a later rank is not shared.

    Example::

        with idist.one_rank_first():
            dataset = download()
    """
    if local and group is not None:
        raise ValueError(
            "one_rank_first takes local=True or group, not both. For the ranks of this node pass "
            "group=idist.node_group()."
        )
    model = current_model()
    members = model.groups.resolve(group)
    rank = as_int(rank)
    if local:
        ranks_on_node = model.node_ranks()
        first = ranks_on_node[_one_of(tuple(range(len(ranks_on_node))), rank)]
        if not model.transport.groups_need_all_ranks:  # XLA needs every rank in each collective
            members = model.groups.resolve(sorted(ranks_on_node.values()))
    else:
        first = _one_of(members.ranks, rank)
    if not takes_part(model, members):
        yield
        return
    called = Caller("one_rank_first", f"rank={rank}{', local=True' * local}")
    if model.get_rank() != first:
        exchange_outcomes(model, members, None, caller=called)
        yield
        return
    with _shared_outcome(model, members, called), _block(model, "the block of one_rank_first"):
        yield
