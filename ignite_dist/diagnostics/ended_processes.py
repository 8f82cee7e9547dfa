"""Finds ranks whose processes have ended without a report, for example by SIGKILL.

Every rank adds its process to a list in the store. There is one list per machine. When a collective has
failed and no rank has reported an error, the ranks look which processes of their machine have ended.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch.distributed import Store

from ignite_dist.internals.processes import Peer, start_time

_PROCESSES, _CONSEQUENCES = "processes/{}", "processes/{}/consequences"
_FIRST_RANK = "processes/rank 0"


def add_process(store: Store, rank: int) -> None:
    """Add this process, which is ``rank``'s. Does nothing if the system does not show processes."""
    start = start_time(os.getpid())
    if start is None or not _machine():
        return
    line = json.dumps([rank, os.getpid(), start]) + "\n"
    store.append(_PROCESSES.format(_machine()), line)  # type: ignore[attr-defined]  # not in torch's stubs
    if rank == 0:
        store.set(_FIRST_RANK, json.dumps([_machine(), line]))


def mark_consequence(store: Store, rank: int) -> None:
    """Mark ``rank``, which has failed because of another rank: its process may end, and is not the cause."""
    store.append(_CONSEQUENCES.format(_machine()), f"{rank}\n")  # type: ignore[attr-defined]


def find_ended(store: Store) -> list[Peer]:
    """The processes of this machine that have ended and are not marked."""
    processes, consequences = _PROCESSES.format(_machine()), _CONSEQUENCES.format(_machine())
    if not store.check([processes]):
        return []
    peers = [Peer(*json.loads(line)) for line in store.get(processes).splitlines()]
    ended = [peer for peer in peers if peer.has_ended()]
    # Read after the look: a process writes this before it ends.
    marked = set(map(int, store.get(consequences).split())) if store.check([consequences]) else set()
    return [peer for peer in ended if peer.rank not in marked]


def is_first_rank_known(store: Store) -> bool:
    """True once rank 0 has added its process."""
    return store.check([_FIRST_RANK])


def first_rank(store: Store) -> Peer | None:
    """The process of rank 0; None if it runs on another machine."""
    machine, line = json.loads(store.get(_FIRST_RANK))
    return Peer(*json.loads(line)) if machine == _machine() else None


def failure_of(ended: Sequence[Peer], what: str) -> dict[str, Any]:
    """The arguments of the ``RankFailedError`` about processes that have ended."""
    host = socket.gethostname()
    names = ", ".join(f"rank {peer.rank} (pid {peer.pid} on {host})" for peer in ended)
    text = f"{names.capitalize()} {'have' if len(ended) > 1 else 'has'} ended {what}"
    return {"rank": ended[0].rank, "error_type": "", "traceback": "", "message": text, "host": host}


WITHOUT_REPORT = (
    "without a report of an error, as after a signal or when memory is short. See the output of the rank and "
    "of its launcher."
)
WITH_STORE = "and the store with it. The output of the rank says why."


@cache
def _machine() -> str:
    """Identifies the running system and the namespace in which process ids are unique. "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
