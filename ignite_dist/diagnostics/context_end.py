"""The ranks' end: all of them come to it, and none of them waits for a rank that has.

A rank that comes to the end of its context says so in a store, with the number of calls that it has made in
each group, and waits there until all have come. The watchdog of a rank that waits in a collective looks
there. If the collective needs a rank that has ended without it, the wait can never end: the watchdog lets it
fail, and tells the rank that has ended.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError, Store

from ignite_dist.call_sites import site_of, users_frame
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.transport import WaitedFor
from ignite_dist.diagnostics.flight_recorder import Recorder
from ignite_dist.diagnostics.out_of_band import END_OUTCOME, ENDS_COME, NTH_END, Side, ask, tell_ended
from ignite_dist.errors import MissingRanksError, RankFailedError
from ignite_dist.values.ranks import describe_ranks
from ignite_dist.workers import failures

__all__ = ["Endings"]

_logger = logging.getLogger(__name__)

# How long a rank has to have waited, and another to have ended. What is under way then takes milliseconds.
_SECONDS_TO_BE_SURE = 2.0
# For a message, which may be under way for longer, and where it is not known which call a rank waits in.
_SECONDS_TO_BE_SURER = 4.0

# How often a rank at its end looks whether all have come: soon at first, then less often. More ranks share
# one store.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS, _LOOKS_PER_SECOND = 0.0005, 0.1, 10_000
# How often the others are asked whether they are still there, if the backend would not notice.
_ASK_SECONDS = 300.0
# How long a failed collective waits for what the store knows of it.
_ANSWER_SECONDS = 2.0


@dataclass
class _Ended:
    """A rank that has come to its end: what it said, and when that was seen here."""

    rank: int
    has_left: bool  # without finalize(), with its process
    calls: Mapping[str, int | None]
    where: str
    seen: float = field(default_factory=time.monotonic)


class Endings:
    """The end of the ranks in one context, as the ranks of this process see it."""

    def __init__(self, model: ComputationModel, record: Recorder, side: Side) -> None:
        self._model = model
        self._recorder = record
        self._side = side
        self._world_size = model.get_world_size()
        self._here: set[int] = set()  # ranks of this process that have come to their end
        self._ended: list[_Ended] = []
        self._reading = threading.Lock()
        self._told: dict[str, Any] | None = None  # of a wait that cannot end
        self._cpu_times: dict[int, str] = {}

    # --- in a rank that comes to its end ---------------------------------------------------------------

    def meet(self, rank: int) -> None:
        """Return when all ranks have come to their end, or one of them is gone.

        Raises:
            RankFailedError: another rank waits in a collective that this one has not made.
        """
        try:
            store = self._side.connection()
            self._say(store, rank, has_left=False)
            outcome = self._outcome(store)
        except DistError:  # the rank that serves the store is gone; the backend will say so
            return
        if outcome is not None and self._told is None:  # else this rank has heard of it where it waited
            reason = f"{outcome['text']} So rank {rank} has ended its context without the others."
            raise RankFailedError(outcome["rank"], MissingRanksError.__name__, outcome["text"], reason)

    def leave(self, rank: int) -> None:
        """Say that the process of a rank ends, which has not called ``finalize()``."""
        if rank not in self._here:
            with suppress(DistError):
                self._say(self._side.connection(), rank, has_left=True)

    def _say(self, store: Store, rank: int, has_left: bool) -> None:
        self._here.add(rank)
        position = store.add(ENDS_COME, 1)
        frame = users_frame(sys._getframe(1))
        is_users = frame is not None and not frame.f_code.co_filename.startswith("<")  # none started by spawn
        at = f" at {site_of(frame)}" if is_users and not has_left else ""
        how = "its process has ended" if has_left else f"it has come to the end of its context{at}"
        said = {
            "rank": rank,
            "has_left": has_left,
            "calls": self._model.transport.calls_begun(),
            "where": f"{how} (pid {os.getpid()} on {socket.gethostname()})",
        }
        store.set(NTH_END.format(position), json.dumps(said))
        if position == self._world_size:
            store.compare_set(END_OUTCOME, "", "all")

    def _outcome(self, store: Store) -> dict[str, Any] | None:
        """Which wait cannot end; None if all have come, or one is gone."""
        if not self._has_outcome(store):
            return None
        text = store.get(END_OUTCOME)
        found: dict[str, Any] | None = None if text == b"all" else json.loads(text)
        return found

    def _has_outcome(self, store: Store) -> bool:
        # A wait of torch's hears of no Ctrl-C, and warns when it has been in vain.
        started = asked = time.monotonic()
        while not store.check([END_OUTCOME]):
            is_broken = self._model.transport.is_broken()
            if is_broken:
                return store.check([END_OUTCOME])  # the others may have left after it
            now = time.monotonic()
            if is_broken is None and now - asked > _ASK_SECONDS:
                if not self._all_answer(store):
                    return False
                asked = now
            least = max(_FIRST_LOOK_SECONDS, self._world_size / _LOOKS_PER_SECOND)
            time.sleep(max(least, min(_LOOK_SECONDS, (now - started) / 10)))
        return True

    def _all_answer(self, store: Store) -> bool:
        self._read(store)
        come = {one.rank for one in self._ended}
        others = [rank for rank in range(self._world_size) if rank not in come]
        return len(ask(store, others)) == len(others)

    # --- in the watchdog of a rank that waits ------------------------------------------------------------

    def look(
        self,
        store: Store,
        rank: int,
        thread: int,
        since: float,
        wanted: WaitedFor,
        waiting: Callable[[], str],
    ) -> None:
        """See whether what a thread of ``rank`` waits for can still come.

        An error needs a proof: a rank has ended, and the call needs it. Where another rank could still do
        what is waited for, the report of long waits has to do.

        Args:
            store: the watchdog's connection.
            rank: has waited for a while.
            thread: the identity of the thread that waits.
            since: when it was first seen to wait there, as ``time.monotonic()`` has it.
            wanted: what it waits for.
            waiting: gives that in words.
        """
        if self._told is not None or rank in self._here:
            return
        self._read(store)
        if not self._ended:
            return
        is_idle = self._is_idle(thread)
        is_sure = wanted.is_known and not wanted.is_message
        patience = _SECONDS_TO_BE_SURE if is_sure else _SECONDS_TO_BE_SURER
        now = time.monotonic()
        gone = [one for one in self._ended if now - max(one.seen, since) > patience]
        all_gone = {one.rank for one in gone}.issuperset(set(wanted.ranks) - {rank})
        if wanted.is_known and not (wanted.needs_all or wanted.is_message or all_gone):
            return
        missing = [one for one in gone if one.rank in wanted.ranks and self._lacks(one, wanted, is_idle)]
        if missing:
            self._tell(store, rank, missing, waiting())

    def _read(self, store: Store) -> None:
        """Take what other ranks have said since."""
        with self._reading:
            num_come = store.add(ENDS_COME, 0)
            while len(self._ended) < num_come:
                key = NTH_END.format(len(self._ended) + 1)
                if not store.check([key]):  # it is about to
                    return
                self._ended.append(_Ended(**json.loads(store.get(key))))

    def _lacks(self, ended: _Ended, wanted: WaitedFor, is_idle: bool) -> bool:
        """Whether a rank has ended without the call that is waited for."""
        begun = self._model.transport.calls_begun()
        if not wanted.is_known:  # some call of some group that this rank has begun and that one has not
            numbers = [(number, ended.calls.get(name)) for name, number in begun.items()]
            return is_idle and any(own and other is not None and own > other for own, other in numbers)
        if wanted.name not in begun:  # a group that is being made, a message, gradients of Horovod
            return wanted.name not in ended.calls
        own, other = begun[wanted.name], ended.calls.get(wanted.name)
        return own is None or other is None or own > other  # None: not counted, or destroyed

    def _is_idle(self, thread: int) -> bool:
        """Whether the thread has not computed since the last look, as far as this system tells."""
        native_ids = [one.native_id for one in threading.enumerate() if one.ident == thread]
        try:
            with open(f"/proc/self/task/{native_ids[0]}/stat", encoding="utf-8") as file:
                used = " ".join(file.read().rpartition(")")[2].split()[11:13])
        except (OSError, IndexError):
            return True
        before, self._cpu_times[thread] = self._cpu_times.get(thread), used
        return before == used

    def _tell(self, store: Store, rank: int, missing: list[_Ended], waiting: str) -> None:
        """Tell the ranks that have ended, and this one, which then waits no longer."""
        where = {one.rank: one.where for one in missing}
        told = tell_ended(store, where, waiting, rank)
        self._told = told
        _logger.error("%s", told["text"])
        self._model.transport.end_waits()

    # --- in a rank whose collective has failed -----------------------------------------------------------

    def explained(self, error: RuntimeError) -> BaseException | None:
        """What is behind an error of the backend, if it is that a rank has ended."""
        if not failures.is_consequence(error):
            return None
        told = self._told or self._ask_store()
        if told is None:
            return None
        where = {int(rank): how for rank, how in told["where"].items()}
        found = MissingRanksError(told["text"], told["ranks"], where)
        # A rank that is at its end has lost nothing: what failed here is the cause, and not the connection.
        found.__cause__ = error if told.get("has_left") else None
        return found

    def _ask_store(self) -> dict[str, Any] | None:
        """What the store knows, in a thread of its own: it may be at a machine that does not answer."""
        answers: list[dict[str, Any]] = []

        def look() -> None:
            with suppress(DistError):
                store = self._side.connection()
                if store.check([END_OUTCOME]) and (outcome := store.get(END_OUTCOME)) != b"all":
                    answers.append(json.loads(outcome))
                    return
                self._read(store)
                left = [one for one in self._ended if one.has_left]
                if left:
                    ranks = sorted(one.rank for one in left)
                    where = {one.rank: one.where for one in left}
                    text = f"{describe_ranks(ranks).capitalize()} did not come: {'; '.join(where.values())}."
                    answers.append({"ranks": ranks, "where": where, "text": text, "has_left": True})

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        return answers[0] if answers else None
