"""Finds ranks whose processes have ended without a report, for example by SIGKILL.

Every rank adds its process to a list in the store. There is one list per machine. When a collective has
failed and no rank has reported an error, the ranks look which processes of their machine have ended.
"""

from __future__ import annotations

import json
import os
import socket
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
    """Say that the process of ``rank`` may end now, and that this is not the cause of other ranks' errors."""
    store.append(_CONSEQUENCES.format(_machine()), f"{rank}\n")  # type: ignore[attr-defined]


def find_ended(store: Store) -> Peer | None:
    """A process of this machine that has ended without a report; None if there is none."""
    processes, consequences = _PROCESSES.format(_machine()), _CONSEQUENCES.format(_machine())
    if not store.check([processes]):
        return None
    peers = [Peer(*json.loads(line)) for line in store.get(processes).splitlines()]
    ended = [peer for peer in peers if peer.has_ended()]
    # Read after the look: a process writes this before it ends.
    others = set(map(int, store.get(consequences).split())) if store.check([consequences]) else set()
    return next((peer for peer in ended if peer.rank not in others), None)


def first_rank(store: Store) -> Peer | None:
    """The process of rank 0; None if it runs on another machine, or is not known yet."""
    if not store.check([_FIRST_RANK]):
        return None
    machine, line = json.loads(store.get(_FIRST_RANK))
    return Peer(*json.loads(line)) if machine == _machine() else None


def failure_of(peer: Peer) -> dict[str, Any]:
    """The arguments of the ``RankFailedError`` about a process that has ended without a report."""
    host = socket.gethostname()
    text = (
        f"Rank {peer.rank} (pid {peer.pid} on {host}) has ended without a report of an error, as after a "
        "signal or when memory is short. See its output, and its launcher's."
    )
    return {"rank": peer.rank, "error_type": "", "traceback": "", "message": text, "host": host}


@cache
def _machine() -> str:
    """A name for what shares this process's numbers: the running system and its namespace. "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
