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
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import PrefixStore, Store, TCPStore

from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.environments.rendezvous import connections
from ignite_dist.environments.rendezvous.stores import root_of, serve_store
from ignite_dist.errors import MissingRanksError
from ignite_dist.internals.ranks import describe_ranks

# Timeout and polling interval for the reports of other ranks.
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02

NUM_ENDED, END_REPORT, END_OUTCOME = "end/num", "end/report/{}", "end/outcome"
"""Keys: number of ended ranks; report of the n-th ended rank; "all", or why a wait cannot succeed."""
FIRST_FAILURE = "end/failure"
"""Key: the error of the rank that failed first."""
# How often a rank in a barrier checks for ended ranks.
_END_POLL_SECONDS = 1.0


# --- the out-of-band store -------------------------------------------------------------------------------


class OutOfBandStore:
    """The out-of-band store of one context.

    Args:
        store: a store whose keys no other code uses.
        server: the rank that serves the store, and must use it last. None if the store outlives the context.
    """

    def __init__(self, store: Store, server: int | None = None) -> None:
        self.server = server
        self._store = store
        self._connections = threading.local()
        self._rounds: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def connection(self) -> Store:
        """The calling thread's own connection: a request blocks the connection until its answer arrives."""
        store: Store | None = getattr(self._connections, "store", None)
        if store is None:
            with self._lock, connections.keepalive() if self._is_remote() else nullcontext():
                store = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            self._connections.store = store
        return store

    def _is_remote(self) -> bool:
        """True if another machine may serve the store."""
        host = getattr(root_of(self._store), "host", "localhost")
        return host not in ("localhost", "127.0.0.1", "::1")

    @property
    def is_served(self) -> bool:
        """True if a process serves the store. False for a store in a file, which grows with each request."""
        return isinstance(root_of(self._store), TCPStore)

    def next_round(self, rank: int, name: str) -> int:
        """Count a barrier of ``rank`` in the group ``name``. Returns the barrier's number, from 1."""
        with self._lock:
            self._rounds[rank, name] += 1
            return self._rounds[rank, name]


_oob_stores: WeakKeyDictionary[ComputationModel, OutOfBandStore] = WeakKeyDictionary()
oob_stores_lock = threading.RLock()


def oob_store_of(model: ComputationModel) -> OutOfBandStore | None:
    """The out-of-band store of a context; None if the backend has no store. Never communicates."""
    with oob_stores_lock:
        oob_store = _oob_stores.get(model)
        if oob_store is None and (store := model.transport.store()) is not None:
            oob_store = _oob_stores[model] = OutOfBandStore(PrefixStore("ignite_dist/side", store))
        return oob_store


def make_oob_store(model: ComputationModel) -> OutOfBandStore | None:
    """Make the out-of-band store: rank 0 serves it. Every rank must call this. None if world_size is 1."""
    if model.get_world_size() == 1:
        return None
    world = model.groups.world
    hosts = model.objects.gather(socket.gethostname(), world)
    store: Store | None = None
    address = ""
    if model.get_rank() == 0:
        own_host = "127.0.0.1" if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR") or hosts[0]
        store, port = serve_store(own_host, 0)
        address = f"{own_host}:{port}"
    host, _, port_text = model.objects.broadcast(address, 0, world).rpartition(":")
    with oob_stores_lock:
        if model not in _oob_stores:
            with nullcontext() if host == "127.0.0.1" else connections.keepalive():
                connected = store or TCPStore(host, int(port_text), wait_for_workers=False)
            _oob_stores[model] = OutOfBandStore(connected, server=0)
        return _oob_stores[model]


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
    oob_store = oob_store_of(model)
    if oob_store is None:
        raise RuntimeError(
            "barrier(timeout=) needs an out-of-band store. A context that idist did not make has no such "
            "store. Call idist.watch_for_hangs() once on every rank before barrier()."
        )
    rank, store = model.get_rank(), oob_store.connection()
    name = _short_name(model.transport.group_key(group))
    key = f"barrier/{name}/{oob_store.next_round(rank, name)}"
    end = f"{key}/end"
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/num", 1) == len(group.ranks):
        store.compare_set(end, "", "all")
    ended: dict[str, str] = {}  # how each rank that will not call the barrier has ended
    if not _wait_for_key(store, end, timeout.total_seconds(), lambda: _find_ended(store, key, group, ended)):
        missing = [other for other in group.ranks if not store.check([f"{key}/{other}"])]
        store.compare_set(end, "", json.dumps([missing, str(timeout), ended]) if missing else "all")
    outcome = store.get(end).decode()
    if outcome != "all":
        missing, given_timeout, ended = json.loads(outcome)
        if ended:
            where = {int(ended_rank): how for ended_rank, how in ended.items()}
            explanation = report_wait(store, where, "the barrier", rank)
            raise MissingRanksError(explanation["text"], explanation["ranks"], where)
        raise _timeout_error(store, missing, given_timeout, group, rank)
    num_left = store.add(f"{key}/left", 1)
    if rank == oob_store.server:  # the store ends with this rank: let the other ranks read first
        deadline = time.monotonic() + _ANSWER_SECONDS
        while num_left < len(group.ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            num_left = store.add(f"{key}/left", 0)
    if num_left == len(group.ranks) and (rank == oob_store.server or oob_store.server not in group.ranks):
        for name in (*map(str, group.ranks), "num", "end", "left"):
            store.delete_key(f"{key}/{name}")


def _short_name(group_key: str) -> str:
    """A short unique name of the group: every request contains the name."""
    return hashlib.sha1(group_key.encode(), usedforsecurity=False).hexdigest() if group_key else "all"


def _timeout_error(
    store: Store, missing: list[int], timeout: str, group: Group, rank: int
) -> MissingRanksError:
    if rank in missing:
        return MissingRanksError(
            f"Rank {rank} came to the barrier when the others had given up after their timeout of {timeout}."
        )
    what = f"of {len(group.ranks)} did not come to the barrier within {timeout}"
    return missing_ranks_error(missing, what, collect_reports(store, missing))


def _find_ended(store: Store, key: str, group: Group, ended: dict[str, str]) -> bool:
    """Add the ranks that ended without calling the barrier to ``ended``. True if ``ended`` is not empty."""
    for number in range(1, store.add(NUM_ENDED, 0) + 1):
        if store.check([END_REPORT.format(number)]):
            report = json.loads(store.get(END_REPORT.format(number)))
            if report["rank"] in group.ranks and not store.check([f"{key}/{report['rank']}"]):
                ended[str(report["rank"])] = report["where"]
    return bool(ended)


def report_wait(store: Store, where: Mapping[int, str], waiting: str, rank: int) -> dict[str, Any]:
    """Report to the ended ranks that ``rank`` waits for them. Returns the explanation for all ranks.

    Args:
        store: this thread's connection.
        where: how each of the ended ranks has ended, by rank.
        waiting: the call in which ``rank`` waits.
        rank: the waiting rank.
    """
    ranks = sorted(where)
    hows = [f"rank {ended}: {where[ended]}" if len(ranks) > 1 else where[ended] for ended in ranks]
    text = (
        f"{describe_ranks(ranks).capitalize()} did not come to {waiting}, where rank {rank} waits: "
        f"{'; '.join(hows)}. The missing call is this call or an earlier call: idist.compare_calls() shows "
        "which."
    )
    explanation = {"rank": rank, "ranks": ranks, "where": dict(where), "text": text}
    store.compare_set(END_OUTCOME, "", json.dumps(explanation))
    return explanation


def _wait_for_key(
    store: Store, key: str, seconds: float, is_hopeless: Callable[[], bool] | None = None
) -> bool:
    """Wait until the store has ``key``. False after ``seconds``, or if ``is_hopeless`` returns True."""
    # Polls, because Store.wait() ignores Ctrl-C and logs a warning when it times out.
    started = checked = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        waited = now - started
        if waited > seconds:
            return False
        if is_hopeless is not None and now - checked > _END_POLL_SECONDS:
            checked = now
            if is_hopeless():
                return False
        time.sleep(min(_POLL_SECONDS, 0.0005 + waited / 10, seconds - waited))
    return True


# --- asking where ranks are ------------------------------------------------------------------------------

SILENT = (
    "does not answer: its process has ended, is stopped or is not watched (call idist.watch_for_hangs() on "
    "every rank)."
)


def collect_reports(
    store: Store, ranks: Sequence[int], known: Mapping[int, dict[str, Any]] | None = None
) -> dict[int, dict[str, Any]]:
    """The ``known`` reports, and the reports of ``ranks`` whose watchdogs answer within a few seconds."""
    reports = dict(known or {})
    number = store.add("asked", 1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    for rank in ranks:
        key = f"report/{number}/{rank}"
        if rank not in reports and _wait_for_key(store, key, max(0.0, deadline - time.monotonic())):
            reports[rank] = json.loads(store.get(key))
    return {rank: reports[rank] for rank in sorted(reports)}


def missing_ranks_error(
    missing: Sequence[int], what: str, reports: Mapping[int, Mapping[str, Any]]
) -> MissingRanksError:
    """The error "<missing ranks> <what>", with the place of each missing rank."""
    where = {rank: _describe_place(reports[rank]) for rank in missing if rank in reports}
    lines = "".join(f"\nRank {rank} {where.get(rank, SILENT)}" for rank in missing)
    return MissingRanksError(f"{describe_ranks(missing).capitalize()} {what}.{lines}", missing, where)


def _describe_place(report: Mapping[str, Any]) -> str:
    """Where a rank is: one line and the stack."""
    activity = f"waits in {report['waits_in']} at" if report["waits_in"] else "is at"
    last = f" Its last call: {report['last']}." if report["last"] else ""
    process = f"pid {report['pid']} on {report['host']}"
    return f"{activity} {report['site']} ({process}).{last}\n{report['stack'].rstrip()}"
