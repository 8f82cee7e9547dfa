"""Whether all ranks have come to a store, and which have not."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, Store

from ignite_dist import links
from ignite_dist.environments import Environment
from ignite_dist.errors import MissingRanksError
from ignite_dist.recorder import describe_ranks

__all__ = ["call", "waiting"]

# How long a rank may take to hear what became of the call.
_ANSWER_SECONDS = 5.0
# How many hosts an error names.
_MAX_HOSTS = 16


def call(store: Store, place: Environment, where: str, deadline: float, hint: str) -> None:
    """Return when all ranks have come to the ``store``: each says so there, and rank 0 waits for all.

    Args:
        store: one whose keys nobody has used.
        place: of this rank.
        where: the store is, for errors.
        deadline: when to give up, by :func:`time.monotonic`.
        hint: what else the error is to say.

    Raises:
        MissingRanksError: some have not come in time; on every rank that has.
    """
    ranks = range(place.world_size)
    store.set(f"here/{place.rank}", socket.gethostname())
    awaited, patience = [f"here/{rank}" for rank in ranks], deadline - time.monotonic()
    if place.rank > 0:  # rank 0 may have come later, and knows more
        awaited, patience = ["missing"], patience + _ANSWER_SECONDS
    with links.wait_told(lambda: waiting(place, f"{_whom(store, place)} at {where}")):
        have_come = _wait(store, awaited, patience)
    if place.rank > 0 and have_come:
        outcome = store.get("missing")
    else:
        outcome = store.compare_set("missing", "", json.dumps([] if have_come else _missing(store, place)))
    missing = json.loads(outcome)
    if not missing:
        return
    come = [rank for rank in ranks if rank not in missing]
    hosts = sorted({store.get(f"here/{rank}").decode() for rank in come})
    store.set(f"told/{place.rank}", "")
    if place.rank == 0:  # the store goes with it
        _wait(store, [f"told/{rank}" for rank in come], _ANSWER_SECONDS)
    more = f" and {len(hosts) - _MAX_HOSTS} more" if len(hosts) > _MAX_HOSTS else ""
    raise MissingRanksError(
        f"{describe_ranks(missing).capitalize()} of {place.world_size} did not come to {where} in time; "
        f"{describe_ranks(come)} did ({', '.join(hosts[:_MAX_HOSTS])}{more}).{hint}",
        missing,
    )


def waiting(place: Environment, whom: str) -> str:
    """That this rank waits for ``whom``."""
    return f"Rank {place.rank} of {place.world_size} ({socket.gethostname()}) is still waiting for {whom}."


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all ``keys`` are there within that time."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:  # a plain one from torch's FileStore; what else is wrong shows in the next request
        return False
    return True


def _missing(store: Store, place: Environment) -> list[int]:
    return [rank for rank in range(place.world_size) if not store.check([f"here/{rank}"])]


def _whom(store: Store, place: Environment) -> str:
    """Whom all wait for: rank 0 alone asks for each rank, because a thousand ranks would ask too much."""
    if place.rank == 0:
        with suppress(DistError):
            # Another connection: this one is busy waiting.
            return describe_ranks(_missing(store.clone(), place))  # type: ignore[attr-defined]  # not in stubs
    return "all others"
