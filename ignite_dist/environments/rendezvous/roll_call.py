"""The roll call: wait until all ranks have reached a store, or name the missing ranks."""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

from torch.distributed import Store

from ignite_dist.environments import Environment
from ignite_dist.environments.rendezvous import connections
from ignite_dist.errors import MissingRanksError
from ignite_dist.internals.ranks import describe_ranks

_logger = logging.getLogger(__name__)

# Time limit for a rank to write or to read the outcome of the roll call.
_ANSWER_SECONDS = 5.0
# Polling interval of rank 0 at the end of a cancelled roll call.
_CANCEL_POLL_SECONDS = 0.02
# Polling interval of a long wait, in which Ctrl-C works.
_POLL_SECONDS = 0.5
# Maximum rate of all ranks together.
_POLLS_PER_SECOND = 2000
# Maximum number of hosts in an error message.
_MAX_HOSTS = 16


def call(store: Store, place: Environment, where: str, deadline: float, hint: str) -> None:
    """Return when all ranks have reached ``store``: each rank sets a key, and rank 0 waits for all keys.

    The first rank that reaches its deadline cancels the roll call for all ranks. All keys are then deleted,
    so that the same ranks can try again in the same store.

    Args:
        store: a store that nothing else uses.
        place: the caller's place in the job.
        where: the store's address, for errors.
        deadline: when to give up, as :func:`time.monotonic`.
        hint: text to add to the error.

    Raises:
        MissingRanksError: a rank did not reach the store in time. Late ranks raise too.
    """
    ranks = range(place.world_size)
    awaited = [f"here/{rank}" for rank in ranks] if place.rank == 0 else ["outcome"]
    store.set(f"here/{place.rank}", socket.gethostname())
    has_cancelled = False
    if not _await(store, place, awaited, where, deadline):
        has_cancelled, outcome = _cancel(store, place)
    elif place.rank == 0:
        outcome = store.compare_set("outcome", "", "[]")  # unless another rank has just cancelled
    else:
        outcome = store.get("outcome")
    if outcome == b"[]":
        return
    missing, hosts, num_hosts = json.loads(outcome)
    arrived = [rank for rank in ranks if rank not in missing]
    _delete_keys(store, place, missing, arrived, has_cancelled)
    if place.rank in missing:
        raise MissingRanksError(
            f"Rank {place.rank} of {place.world_size} reached {where} after the others had given up.", missing
        )
    more = f" and {num_hosts - len(hosts)} more" if num_hosts > len(hosts) else ""
    raise MissingRanksError(
        f"{describe_ranks(missing).capitalize()} of {place.world_size} did not reach {where} in time; "
        f"{describe_ranks(arrived)} did ({', '.join(hosts)}{more}).{hint}",
        missing,
    )


def waiting_message(place: Environment, awaited: str) -> str:
    """The warning that this rank still waits for ``awaited``."""
    return f"Rank {place.rank} of {place.world_size} ({socket.gethostname()}) is still waiting for {awaited}."


def logging_wait(place: Environment, awaited: str) -> AbstractContextManager[None]:
    """Context manager: log once if this rank waits long for ``awaited`` in the block."""
    return connections.log_long_wait(lambda: waiting_message(place, awaited))


def _await(store: Store, place: Environment, keys: list[str], where: str, deadline: float) -> bool:
    """Wait for ``keys``, and log a long wait. False if the deadline passes or the roll call is cancelled."""
    if _wait(store, keys, min(connections.LONG_WAIT_SECONDS, deadline - time.monotonic())):
        return True
    period = max(_POLL_SECONDS, place.world_size / _POLLS_PER_SECOND)
    is_logged = False
    while (left := deadline - time.monotonic()) > 0:
        if store.check(keys):
            return True
        if store.check(["outcome"]):
            return False
        if not is_logged:
            # Only rank 0 looks for each rank: a thousand such ranks would send too many requests.
            missing = describe_ranks(_missing(store, place)) if place.rank == 0 else "all others"
            _logger.warning("%s", waiting_message(place, f"{missing} at {where}"))
            is_logged = True
        time.sleep(min(period, left))
    return False


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait for ``keys``. False at the timeout."""
    if seconds <= 0.0:
        return store.check(keys)  # without torch's warning of the timeout
    try:
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:  # FileStore's timeout; other errors recur at the next request
        return False
    return True


def _cancel(store: Store, place: Environment) -> tuple[bool, bytes]:
    """Cancel the roll call. Returns True if this rank wrote the outcome, and the outcome."""
    canceller = store.compare_set("called off by", "", str(place.rank))
    if canceller != str(place.rank).encode() and _wait(store, ["outcome"], _ANSWER_SECONDS):
        return False, store.get("outcome")
    missing = _missing(store, place)
    arrived = [f"here/{rank}" for rank in range(place.world_size) if rank not in missing]
    hosts = sorted({host.decode() for host in store.multi_get(arrived)})
    own_outcome = json.dumps([missing, hosts[:_MAX_HOSTS], len(hosts)] if missing else [])
    outcome = store.compare_set("outcome", "", own_outcome)
    for rank in missing:  # ends the wait of rank 0
        store.set(f"here/{rank}", "")
    return True, outcome


def _missing(store: Store, place: Environment) -> list[int]:
    return [rank for rank in range(place.world_size) if not store.check([f"here/{rank}"])]


def _delete_keys(
    store: Store, place: Environment, missing: list[int], arrived: list[int], has_cancelled: bool
) -> None:
    """Delete the keys of a cancelled roll call, after all ranks have read the outcome."""
    store.delete_key(f"here/{place.rank}")
    if place.rank in arrived:
        store.set(f"told/{place.rank}", "")
    if has_cancelled:
        readers = [f"told/{rank}" for rank in arrived]
        _wait(store, readers, _ANSWER_SECONDS)
        with suppress(RuntimeError):  # the store is gone
            for name in (*readers, *(f"here/{rank}" for rank in missing), "called off by", "outcome"):
                store.delete_key(name)
    elif place.rank == 0:  # the store may end with rank 0
        limit = time.monotonic() + 2 * _ANSWER_SECONDS
        while store.check(["outcome"]) and time.monotonic() < limit:
            time.sleep(_CANCEL_POLL_SECONDS)
