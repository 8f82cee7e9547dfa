"""Communication out of band: over a store, not over the backend, which may be stuck in a collective."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import PrefixStore, Store, TCPStore

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.errors import MissingRanksError
from ignite_dist.rendezvous.stores import serve_store
from ignite_dist.values.ranks import describe_ranks

__all__ = [
    "ENDS_COME",
    "END_OUTCOME",
    "NTH_END",
    "SILENT",
    "Side",
    "ask",
    "barrier",
    "exchanged_side",
    "missing_ranks",
    "side_of",
    "sides_lock",
    "tell_ended",
]

# Timeout and polling interval for the reports of other ranks.
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02

ENDS_COME, NTH_END, END_OUTCOME = "end/come", "end/{}", "end/outcome"
"""Keys of the store: number of ended ranks; report of the n-th; "all", or why a wait cannot succeed."""
# How often a rank in a barrier checks for ended ranks.
_LOOK_SECONDS = 1.0


# --- the out-of-band store -------------------------------------------------------------------------------


class Side:
    """The out-of-band store of one context.

    Args:
        store: a store whose keys nobody else uses.
        server: the rank that serves the store and must use it last. None if the store outlives the context.
    """

    def __init__(self, store: Store, server: int | None = None) -> None:
        self.server = server
        self._store = store
        self._connections = threading.local()
        self._rounds: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def connection(self) -> Store:
        """The calling thread's own connection: a request blocks the connection until its answer arrives."""
        found: Store | None = getattr(self._connections, "store", None)
        if found is None:
            with self._lock:
                found = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            self._connections.store = found
        return found

    @property
    def is_served(self) -> bool:
        """True if a process serves the store. Else the store is a file, which grows with each request."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return isinstance(store, TCPStore)

    def next_round(self, rank: int, name: str) -> int:
        """Sequence number of the barrier that ``rank`` enters in the group ``name``, from 1."""
        with self._lock:
            self._rounds[rank, name] += 1
            return self._rounds[rank, name]


_sides: WeakKeyDictionary[ComputationModel, Side] = WeakKeyDictionary()
sides_lock = threading.RLock()


def side_of(model: ComputationModel) -> Side | None:
    """The out-of-band store of a context; None if the backend has no store. Never communicates."""
    with sides_lock:
        found = _sides.get(model)
        if found is None and (store := model.transport.store()) is not None:
            found = _sides[model] = Side(PrefixStore("ignite_dist/side", store))
        return found


def exchanged_side(model: ComputationModel) -> Side | None:
    """Make the out-of-band store: rank 0 serves it. Every rank must call this. None if world_size is 1."""
    if model.get_world_size() == 1:
        return None
    world = model.groups.world
    hosts = model.objects.gather(socket.gethostname(), world)
    store: Store | None = None
    address = ""
    if model.get_rank() == 0:
        here = "127.0.0.1" if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR") or hosts[0]
        store, port = serve_store(here, 0)
        address = f"{here}:{port}"
    host, _, port_text = model.objects.broadcast(address, 0, world).rpartition(":")
    with sides_lock:
        if model not in _sides:
            connected = store or TCPStore(host, int(port_text), wait_for_workers=False)
            _sides[model] = Side(connected, server=0)
        return _sides[model]


# --- a barrier with a timeout ----------------------------------------------------------------------------


def barrier(model: ComputationModel, group: Group, timeout: timedelta) -> None:
    """Return when every rank of ``group`` has called ``barrier``. Uses only the store, not the backend.

    Raises:
        MissingRanksError: ``timeout`` has passed, or a rank has ended without calling ``barrier``. Raised on
            every rank that calls ``barrier``, also on a late rank.
        RuntimeError: the context has no store.
    """
    if len(group.ranks) == 1:
        return
    side = side_of(model)
    if side is None:
        raise RuntimeError(
            "barrier(timeout=) needs an out-of-band store, and this context, which idist did not make, has "
            "none. Call idist.watch() once on every rank before."
        )
    rank, store = model.get_rank(), side.connection()
    name = _name(model.transport.group_key(group))
    key = f"barrier/{name}/{side.next_round(rank, name)}"
    end = f"{key}/end"
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/come", 1) == len(group.ranks):
        store.compare_set(end, "", "all")
    ended: dict[str, str] = {}
    if not _comes(store, end, timeout.total_seconds(), lambda: _find_ended(store, key, group, ended)):
        missing = [one for one in group.ranks if not store.check([f"{key}/{one}"])]
        store.compare_set(end, "", json.dumps([missing, str(timeout), ended]) if missing else "all")
    ending = store.get(end).decode()
    if ending != "all":
        missing, given_up_after, ended = json.loads(ending)
        if ended:
            where = {int(one): how for one, how in ended.items()}
            told = tell_ended(store, where, "the barrier", rank)
            raise MissingRanksError(told["text"], told["ranks"], where)
        raise _missed(store, missing, given_up_after, group, rank)
    num_left = store.add(f"{key}/left", 1)
    if rank == side.server:  # the store ends with this rank: let the other ranks read first
        patience = time.monotonic() + _ANSWER_SECONDS
        while num_left < len(group.ranks) and time.monotonic() < patience:
            time.sleep(_POLL_SECONDS)
            num_left = store.add(f"{key}/left", 0)
    if num_left == len(group.ranks) and (rank == side.server or side.server not in group.ranks):
        for name in (*map(str, group.ranks), "come", "end", "left"):
            store.delete_key(f"{key}/{name}")


def _name(group_key: str) -> str:
    """A short unique name of the group: every request contains the name."""
    return hashlib.sha1(group_key.encode(), usedforsecurity=False).hexdigest() if group_key else "all"


def _missed(store: Store, missing: list[int], timeout: str, group: Group, rank: int) -> MissingRanksError:
    if rank in missing:
        return MissingRanksError(
            f"Rank {rank} came to the barrier when the others had given up after their timeout of {timeout}."
        )
    what = f"of {len(group.ranks)} did not come to the barrier within {timeout}"
    return missing_ranks(missing, what, ask(store, missing))


def _find_ended(store: Store, key: str, group: Group, ended: dict[str, str]) -> bool:
    """Add the ranks that have ended without calling the barrier to ``ended``; True if there are any."""
    for number in range(1, store.add(ENDS_COME, 0) + 1):
        if store.check([NTH_END.format(number)]):
            said = json.loads(store.get(NTH_END.format(number)))
            if said["rank"] in group.ranks and not store.check([f"{key}/{said['rank']}"]):
                ended[str(said["rank"])] = said["where"]
    return bool(ended)


def tell_ended(store: Store, where: Mapping[int, str], waiting: str, rank: int) -> dict[str, Any]:
    """Inform the ended ranks that ``rank`` waits for them; returns the explanation for all ranks.

    Args:
        store: this thread's connection.
        where: how each of the ended ranks has ended, by rank.
        waiting: the call in which ``rank`` waits.
        rank: the waiting rank.
    """
    ranks = sorted(where)
    hows = "; ".join(f"rank {one}: {where[one]}" if len(ranks) > 1 else where[one] for one in ranks)
    who = describe_ranks(ranks).capitalize()
    text = (
        f"{who} did not come to {waiting}, where rank {rank} waits: {hows}. The missing call is this one "
        "or an earlier one: idist.debug() shows which."
    )
    told = {"rank": rank, "ranks": ranks, "where": dict(where), "text": text}
    store.compare_set(END_OUTCOME, "", json.dumps(told))
    return told


def _comes(store: Store, key: str, seconds: float, is_vain: Callable[[], bool] | None = None) -> bool:
    """Wait until the store has ``key``. False after ``seconds``, or if ``is_vain`` returns True."""
    # Polls, because Store.wait() ignores Ctrl-C and logs a warning when it times out.
    started = looked = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        waited = now - started
        if waited > seconds:
            return False
        if is_vain is not None and now - looked > _LOOK_SECONDS:
            looked = now
            if is_vain():
                return False
        time.sleep(min(_POLL_SECONDS, 0.0005 + waited / 10, seconds - waited))
    return True


# --- asking where ranks are ------------------------------------------------------------------------------

SILENT = (
    "does not answer: its process has ended, is stopped or is not watched (call idist.watch() on every rank)."
)


def ask(
    store: Store, ranks: Sequence[int], known: Mapping[int, dict[str, Any]] | None = None
) -> dict[int, dict[str, Any]]:
    """The ``known`` reports, and the reports of ``ranks`` whose watchdogs answer within a few seconds."""
    reports = dict(known or {})
    number = store.add("asked", 1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    for rank in ranks:
        key = f"report/{number}/{rank}"
        if rank not in reports and _comes(store, key, max(0.0, deadline - time.monotonic())):
            reports[rank] = json.loads(store.get(key))
    return {rank: reports[rank] for rank in sorted(reports)}


def missing_ranks(
    missing: Sequence[int], what: str, reports: Mapping[int, Mapping[str, Any]]
) -> MissingRanksError:
    """The error "<missing ranks> <what>", with the place of each missing rank."""
    where = {rank: _place(reports[rank]) for rank in missing if rank in reports}
    lines = "".join(f"\nRank {rank} {where.get(rank, SILENT)}" for rank in missing)
    return MissingRanksError(f"{describe_ranks(missing).capitalize()} {what}.{lines}", missing, where)


def _place(report: Mapping[str, Any]) -> str:
    """Where a rank is: one line and the stack."""
    doing = f"waits in {report['waits_in']} at" if report["waits_in"] else "is at"
    last = f" Its last call: {report['last']}." if report["last"] else ""
    process = f"pid {report['pid']} on {report['host']}"
    return f"{doing} {report['site']} ({process}).{last}\n{report['stack'].rstrip()}"
