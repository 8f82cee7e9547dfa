"""``record_timeline()`` records the calls of all ranks, and saves them as one trace."""

from __future__ import annotations

import json
import logging
import os
import socket
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ignite_dist.comp_models.work import Completed
from ignite_dist.context.live import current_model
from ignite_dist.diagnostics.announcing import announce, get_or_create_recorder
from ignite_dist.diagnostics.profiler.clocks import Clock, compare_clocks, time_barriers
from ignite_dist.diagnostics.profiler.timed_calls import CallTimes, now
from ignite_dist.diagnostics.profiler.trace_events import RankCalls, Row, events_of, row_of
from ignite_dist.internals.arguments import as_int, check_counts

_logger = logging.getLogger(__name__)

MAX_CALLS = 50_000


class record_timeline:  # used as a function and as a context manager
    """Record the collectives of all ranks as one trace: who waits for whom, how long, and at which line.

    Every rank of the world must call this. The recording ends with the ``with`` block, or else with the
    context (:func:`finalize`). All ranks then send their calls to rank 0, which writes ``path``. Open the
    file in https://ui.perfetto.dev, or show a table with ``ignite-dist timeline trace.json``.

    A rank whose block raises, or whose context ends after a failure, waits for no other rank. It saves its
    own calls, for example rank 1 in ``trace.rank1.json``.

    A recorded call takes about 2 us longer. Collectives of other libraries are not recorded, such as the
    gradient reduction of ``DistributedDataParallel``. With NCCL the trace shows when ranks call, not when
    GPUs work. The guide ``docs/timeline.md`` says how to read the trace.

    Args:
        path: a file, which rank 0 replaces when the recording ends.
        max_calls: number of calls that each rank keeps. Later calls are only counted.

    Raises:
        TypeError, ValueError: an argument is wrong, or rank 0 cannot write ``path``. Raised on all ranks.
        RuntimeError: a timeline is recorded already; at the end of the block: the context is another one than
            at its begin.
        OSError: at the end: rank 0 could not write the file. Raised on all ranks.

    Example::

        with idist.record_timeline("trace.json"):
            train_one_epoch(model, loader)
    """

    def __init__(self, path: str | os.PathLike[str], *, max_calls: int = MAX_CALLS) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"record_timeline takes the path of a file, got {path!r}. record_timeline is no decorator."
            )
        max_calls = as_int(max_calls)
        check_counts(max_calls=max_calls)
        self._path = Path(path).absolute()
        self._model = model = current_model()
        model.groups.check_not_joining()
        self._rank = model.get_rank()
        self._recorder = get_or_create_recorder(model, keep_calls=False)
        if self._rank in self._recorder.timelines:
            raise RuntimeError("A timeline is recorded already. End it before you begin another.")
        announce(model, "record_timeline", model.groups.world, Completed)
        problem = why_not_writable(self._path) if self._rank == 0 else ""
        problem = model.objects.broadcast(problem, 0, model.groups.world)
        if problem:
            raise ValueError(f"record_timeline: {problem}")
        self._barriers = time_barriers(model)
        self._times = CallTimes(max_calls, self._finish)
        self._recorder.begin_timeline(self._rank, self._times)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder.timelines.get(self._rank) is not self._times:  # the context has ended in the block
            return
        has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if not has_failed and current_model() is not self._model:
            self._recorder.end_timeline(self._rank)
            raise RuntimeError(
                "The context of the timeline is not live any more, so no trace is saved. Call "
                "idist.record_timeline() in the context, for example in the function that spawn() runs."
            )
        self._finish(has_failed)

    def _finish(self, has_failed: bool) -> None:
        self._recorder.end_timeline(self._rank)
        if has_failed:
            self._save_own()
            return
        try:
            self._save_all()
        except RuntimeError:  # another rank has failed
            self._save_own()
            raise

    def _save_own(self) -> None:
        path = self._path.with_name(f"{self._path.stem}.rank{self._rank}{self._path.suffix}")
        try:
            _write(path, [self._own_calls()], {"incomplete": f"only rank {self._rank}, after a failure"})
        except OSError as error:  # the user must see the exception of the block
            _logger.warning("The timeline of rank %s was not saved: %s", self._rank, error)

    def _own_calls(self) -> RankCalls:
        rows = [row_of(call) for call in self._times.calls]
        return RankCalls(self._rank, socket.gethostname(), rows, now())

    def _save_all(self) -> None:
        """Send the calls to rank 0, which writes the file. Every rank of the world must call this."""
        model, world = self._model, self._model.groups.world
        announce(model, "record_timeline", world, Completed)
        end_barriers = time_barriers(model)
        sent = (*self._own_calls(), (self._barriers, end_barriers), self._times.num_dropped)
        packed = zlib.compress(json.dumps(sent).encode(), 1)
        received = []
        for rank in world.ranks:  # one after another: only rank 0 keeps the calls of all ranks
            payload = model.objects.broadcast(packed if rank == self._rank else b"", rank, world)
            if self._rank == 0:
                received.append(json.loads(zlib.decompress(payload)))
        problem = ""
        if self._rank == 0:
            try:
                _write(self._path, *_aligned(received))
            except Exception as error:  # the other ranks wait for the answer
                problem = str(error) or repr(error)
        problem = model.objects.broadcast(problem, 0, world)
        if problem:
            raise OSError(f"Rank 0 could not write the timeline: {problem}")


def why_not_writable(path: Path) -> str:
    """Why a trace cannot be written to ``path``, for an error message; empty if it can."""
    if not os.path.isdir(path.parent):  # Path.is_dir() raises without permission
        return f"there is no folder {path.parent}."
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        return f"{path} cannot be written."
    return ""


def _aligned(received: Sequence[Any]) -> tuple[list[RankCalls], dict[str, str]]:
    """The calls of all ranks in times of rank 0's clock, and notes for the reader of the trace."""
    ranks, notes = [], {}
    _, host_0, _, _, barriers_0, _ = received[0]
    for rank, host, rows, end, barriers, num_dropped in received:
        clock = compare_clocks(barriers_0, barriers, host == host_0)
        calls = [_translated(Row(*row), clock) for row in rows]
        ranks.append(RankCalls(rank, host, calls, clock.translate(end)))
        if clock.error:
            error = f"{clock.error / 1e3:.0f} us"
            notes[f"clock of rank {rank}"] = (
                f"its times are those of rank 0's clock, with an error <= {error}"
            )
        if num_dropped:
            notes[f"calls of rank {rank}"] = f"the last {num_dropped} are missing: raise max_calls"
    return ranks, notes


def _translated(row: Row, clock: Clock) -> Row:
    begin, end, wait_begin, wait_end = (
        clock.translate(time) if time else 0 for time in (row.begin, row.end, row.wait_begin, row.wait_end)
    )
    return row._replace(begin=begin, end=end, wait_begin=wait_begin, wait_end=wait_end)


def _write(path: Path, ranks: Sequence[RankCalls], notes: dict[str, str]) -> None:
    """Replace the file ``path`` by the trace.

    Raises:
        OSError: the file cannot be written. The previous file is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"otherData": ' + json.dumps(notes) + ',\n"traceEvents": [')
            for number, event in enumerate(events_of(ranks)):
                file.write(("," if number else "") + "\n" + json.dumps(event))
            file.write("\n]}\n")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
