"""Whether all ranks have come to a store, and which have not."""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store

from ignite_dist.environments import Environment
from ignite_dist.errors import MissingRanksError
from ignite_dist.rendezvous import connections
from ignite_dist.values.ranks import describe_ranks

__all__ = ["call", "waiting"]

_logger = logging.getLogger(__name__)

# How long a rank may take to say, or to hear, what became of the call.
_ANSWER_SECONDS = 5.0
# How often rank 0 looks whether all have.
_LOOK_SECONDS = 0.02
# A long wait is one of many short ones, which let Ctrl-C through; all ranks together may ask that often.
_POLL_SECONDS, _POLLS_PER_SECOND = 0.5, 2000
# How many hosts an error names.
_MAX_HOSTS = 16


def call(store: Store, place: Environment, where: str, deadline: float, hint: str) -> None:
    """Return when all ranks have come to the ``store``: each says so there, and rank 0 waits for all.

    The first rank that has waited to its deadline calls it off for all that have come, and takes away what
    is in the store, so that the same ranks may try again: some stores outlive them.

    Args:
        store: its keys are nobody else's.
        place: of this rank.
        where: the store is, for errors.
        deadline: when to give up, by :func:`time.monotonic`.
        hint: what else the error is to say.

    Raises:
        MissingRanksError: some have not come in time; on every rank that has, and those that come too late.
    """
    ranks = range(place.world_size)
    awaited = [f"here/{rank}" for rank in ranks] if place.rank == 0 else ["outcome"]
    store.set(f"here/{place.rank}", socket.gethostname())
    has_called_off = False
    if not _await(store, place, awaited, where, deadline):
        has_called_off, outcome = _call_off(store, place)
    elif place.rank == 0:
        outcome = store.compare_set("outcome", "", "[]")  # unless another rank has called it off just before
    else:
        outcome = store.get("outcome")
    if outcome == b"[]":
        return
    missing, hosts, num_hosts = json.loads(outcome)
    come = [rank for rank in ranks if rank not in missing]
    _leave(store, place, missing, come, has_called_off)
    if place.rank in missing:
        raise MissingRanksError(
            f"Rank {place.rank} of {place.world_size} came to {where} when the others had given up.", missing
        )
    more = f" and {num_hosts - len(hosts)} more" if num_hosts > len(hosts) else ""
    raise MissingRanksError(
        f"{describe_ranks(missing).capitalize()} of {place.world_size} did not come to {where} in time; "
        f"{describe_ranks(come)} did ({', '.join(hosts)}{more}).{hint}",
        missing,
    )


def waiting(place: Environment, whom: str) -> str:
    """That this rank waits for ``whom``."""
    return f"Rank {place.rank} of {place.world_size} ({socket.gethostname()}) is still waiting for {whom}."


def _await(store: Store, place: Environment, keys: list[str], where: str, deadline: float) -> bool:
    """Whether ``keys`` are there in time, and before the call is off. A long wait is told of."""
    if _wait(store, keys, min(connections.SECONDS_WITHOUT_A_WORD, deadline - time.monotonic())):
        return True
    period = max(_POLL_SECONDS, place.world_size / _POLLS_PER_SECOND)
    is_told = False
    while (left := deadline - time.monotonic()) > 0:
        if store.check(keys):
            return True
        if store.check(["outcome"]):
            return False
        if not is_told:
            # Rank 0 alone looks for each rank, because a thousand ranks would ask too much.
            whom = describe_ranks(_missing(store, place)) if place.rank == 0 else "all others"
            _logger.warning("%s", waiting(place, f"{whom} at {where}"))
            is_told = True
        time.sleep(min(period, left))
    return False


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all ``keys`` are there within that time."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:  # a plain one from torch's FileStore; what else is wrong shows in the next request
        return False
    return True


def _call_off(store: Store, place: Environment) -> tuple[bool, bytes]:
    """What became of the call, and whether it was this rank that looked and said so."""
    first = store.compare_set("called off by", "", str(place.rank))
    if first != str(place.rank).encode() and _wait(store, ["outcome"], _ANSWER_SECONDS):
        return False, store.get("outcome")
    missing = _missing(store, place)
    come = [f"here/{rank}" for rank in range(place.world_size) if rank not in missing]
    hosts = sorted({host.decode() for host in store.multi_get(come)})
    wanted = json.dumps([missing, hosts[:_MAX_HOSTS], len(hosts)] if missing else [])
    outcome = store.compare_set("outcome", "", wanted)
    for rank in missing:  # so that rank 0 waits no longer
        store.set(f"here/{rank}", "")
    return True, outcome


def _missing(store: Store, place: Environment) -> list[int]:
    return [rank for rank in range(place.world_size) if not store.check([f"here/{rank}"])]


def _leave(
    store: Store, place: Environment, missing: list[int], come: list[int], has_called_off: bool
) -> None:
    """Take away what a call that is off has left in the store, when all have heard of it."""
    store.delete_key(f"here/{place.rank}")
    if place.rank in come:
        store.set(f"told/{place.rank}", "")
    if has_called_off:
        told = [f"told/{rank}" for rank in come]
        _wait(store, told, _ANSWER_SECONDS)
        with suppress(RuntimeError):  # the store has gone
            for name in (*told, *(f"here/{rank}" for rank in missing), "called off by", "outcome"):
                store.delete_key(name)
    elif place.rank == 0:  # with which the store may go
        patience = time.monotonic() + 2 * _ANSWER_SECONDS
        while store.check(["outcome"]) and time.monotonic() < patience:
            time.sleep(_LOOK_SECONDS)
