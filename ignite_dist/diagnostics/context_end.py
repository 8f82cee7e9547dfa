"""The end of a context: every rank reports its end, and no rank waits forever for a rank that has ended.

A rank that ends its context writes this to the store, with its number of calls in each group. The rank then
waits until all ranks have ended. If a rank waits in a collective that an ended rank never called, the wait
cannot succeed. The watchdog of the waiting rank then fails the collective and informs the ended rank.
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

# The watchdog fails a wait this long after its start and after the other rank's end. By then, data in transit
# has arrived.
_SECONDS_TO_BE_SURE = 2.0
# The same for point-to-point messages, which may take longer, and for unknown calls.
_SECONDS_TO_BE_SURER = 4.0

# The polling interval of an ended rank starts short and grows. The limit on the rate protects the store,
# which all ranks share.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS, _LOOKS_PER_SECOND = 0.0005, 0.1, 10_000
# How often an ended rank checks that the other ranks are alive, if the backend cannot detect a lost rank.
_ASK_SECONDS = 300.0
# How long a rank whose collective has failed waits for the store's explanation.
_ANSWER_SECONDS = 2.0


@dataclass
class _Ended:
    """The report of a rank that has ended its context."""

    rank: int
    has_left: bool  # the process has exited without finalize()
    calls: Mapping[str, int | None]
    where: str
    seen: float = field(default_factory=time.monotonic)  # when this process read the report


class Endings:
    """The ended ranks of one context, as seen by this process."""

    def __init__(self, model: ComputationModel, record: Recorder, side: Side) -> None:
        self._model = model
        self._recorder = record
        self._side = side
        self._world_size = model.get_world_size()
        self._here: set[int] = set()  # ended ranks of this process
        self._ended: list[_Ended] = []
        self._reading = threading.Lock()
        self._told: dict[str, Any] | None = None  # the explanation of a wait that cannot succeed
        self._cpu_times: dict[int, str] = {}

    # --- in a rank that ends its context ---------------------------------------------------------------

    def meet(self, rank: int) -> None:
        """Report the end of ``rank``. Return when all ranks have ended their contexts, or one rank is lost.

        Raises:
            RankFailedError: another rank waits in a collective that ``rank`` has not called.
        """
        try:
            store = self._side.connection()
            self._say(store, rank, has_left=False)
            outcome = self._outcome(store)
        except DistError:  # the rank that serves the store is lost; the backend reports this
            return
        if outcome is not None and self._told is None:  # else the failed collective has raised the error
            reason = f"{outcome['text']} So rank {rank} has ended its context without the others."
            raise RankFailedError(outcome["rank"], MissingRanksError.__name__, outcome["text"], reason)

    def leave(self, rank: int) -> None:
        """Report that the process of ``rank`` exits without ``finalize()``."""
        if rank not in self._here:
            with suppress(DistError):
                self._say(self._side.connection(), rank, has_left=True)

    def _say(self, store: Store, rank: int, has_left: bool) -> None:
        self._here.add(rank)
        position = store.add(ENDS_COME, 1)
        frame = users_frame(sys._getframe(1))
        # "<string>" is the start code of multiprocessing.
        is_users = frame is not None and not frame.f_code.co_filename.startswith("<")
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
        """The explanation of a wait that cannot succeed; None if all ranks have ended or one is lost."""
        if not self._has_outcome(store):
            return None
        text = store.get(END_OUTCOME)
        found: dict[str, Any] | None = None if text == b"all" else json.loads(text)
        return found

    def _has_outcome(self, store: Store) -> bool:
        # Polls, because Store.wait() ignores Ctrl-C and logs a warning when it times out.
        started = asked = time.monotonic()
        while not store.check([END_OUTCOME]):
            is_broken = self._model.transport.is_broken()
            if is_broken:
                return store.check([END_OUTCOME])  # ranks may exit after the outcome is set
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

    # --- in the watchdog of a waiting rank ---------------------------------------------------------------

    def look(
        self,
        store: Store,
        rank: int,
        thread: int,
        since: float,
        wanted: WaitedFor,
        waiting: Callable[[], str],
    ) -> None:
        """Fail the collective in which a thread of ``rank`` waits, if an ended rank makes success impossible.

        The error needs a proof: an ended rank has not made the call, and the call needs this rank. Without a
        proof, only the watchdog's report of long waits informs the user.

        Args:
            store: the watchdog's connection.
            rank: the waiting rank, a rank of this process.
            thread: the identity of the waiting thread.
            since: when the watchdog first saw this wait, in seconds of ``time.monotonic()``.
            wanted: the call in which the thread waits.
            waiting: describes the call for the error message.
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
        """Read the reports of ranks that have ended since the last call."""
        with self._reading:
            num_come = store.add(ENDS_COME, 0)
            while len(self._ended) < num_come:
                key = NTH_END.format(len(self._ended) + 1)
                if not store.check([key]):  # the rank has taken its number but not written its report yet
                    return
                self._ended.append(_Ended(**json.loads(store.get(key))))

    def _lacks(self, ended: _Ended, wanted: WaitedFor, is_idle: bool) -> bool:
        """True if the rank has ended without making the ``wanted`` call."""
        begun = self._model.transport.calls_begun()
        if not wanted.is_known:
            # In one of the groups, this rank must have begun more calls than the ended rank.
            numbers = [(number, ended.calls.get(name)) for name, number in begun.items()]
            return is_idle and any(own and other is not None and own > other for own, other in numbers)
        if wanted.name not in begun:  # a new group, a message, or gradients of Horovod
            return wanted.name not in ended.calls
        own, other = begun[wanted.name], ended.calls.get(wanted.name)
        return own is None or other is None or own > other  # None: no count, or a destroyed group

    def _is_idle(self, thread: int) -> bool:
        """True if the thread has used no CPU time since the last check, or the system cannot tell."""
        native_ids = [one.native_id for one in threading.enumerate() if one.ident == thread]
        try:
            with open(f"/proc/self/task/{native_ids[0]}/stat", encoding="utf-8") as file:
                used = " ".join(file.read().rpartition(")")[2].split()[11:13])
        except (OSError, IndexError):
            return True
        before, self._cpu_times[thread] = self._cpu_times.get(thread), used
        return before == used

    def _tell(self, store: Store, rank: int, missing: list[_Ended], waiting: str) -> None:
        """Inform the ended ranks, and fail the collectives in which this process waits."""
        where = {one.rank: one.where for one in missing}
        told = tell_ended(store, where, waiting, rank)
        self._told = told
        _logger.error("%s", told["text"])
        self._model.transport.end_waits()

    # --- in a rank whose collective has failed -----------------------------------------------------------

    def explained(self, error: RuntimeError) -> BaseException | None:
        """The error that names the ended rank that caused ``error``; None if no rank has ended."""
        if not failures.is_consequence(error):
            return None
        told = self._told or self._ask_store()
        if told is None:
            return None
        where = {int(rank): how for rank, how in told["where"].items()}
        found = MissingRanksError(told["text"], told["ranks"], where)
        # After an early finalize(), this error is the root cause. With a connection error as __cause__,
        # failures.is_consequence() would be True.
        found.__cause__ = error if told.get("has_left") else None
        return found

    def _ask_store(self) -> dict[str, Any] | None:
        """The store's explanation. A separate thread asks, because the store's host may not answer."""
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
