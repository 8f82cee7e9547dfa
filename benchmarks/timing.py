"""Timing contenders side by side: short blocks of calls in turn, so that noise meets all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

Samples = dict[str, list[float]]
"""Seconds per call of each contender, one entry per round. The n-th entries were measured side by side."""

_MAX_CALLS = 100_000
_MIN_ROUNDS, _MAX_ROUNDS = 5, 1_000
# A contender that is declared slow gets this many rounds of one call; it is shown, no bar hangs on it.
_SLOW_ROUNDS = 3


class Effort(NamedTuple):
    """How long to measure.

    Attributes:
        row_seconds: for a row of the table, all contenders together.
        block_seconds: for a block of calls of the slowest contender of a row.
        repeats: of what is measured in fresh processes.
        workers: numbers of workers for the curve of launches.
        ignite_workers: the same for pytorch-ignite, whose launches take seconds.
    """

    row_seconds: float
    block_seconds: float
    repeats: int
    workers: tuple[int, ...]
    ignite_workers: tuple[int, ...]


QUICK = Effort(0.5, 0.004, 2, (2, 4, 8, 16, 32), (2,))
# 32 workers of pytorch-ignite take more than 6 GB.
FULL = Effort(6.0, 0.008, 7, (2, 4, 8, 16, 32), (2, 4, 8, 16))


class Party(NamedTuple):
    """Those who time together: the ranks of a world, or one process alone.

    Attributes:
        agree: rank 0's value, on every rank.
        barrier: returns when every rank has called it.
        synchronize: returns when the device has done what it was given.
    """

    agree: Callable[[Any], Any]
    barrier: Callable[[], None]
    synchronize: Callable[[], None]


ALONE = Party(agree=lambda value: value, barrier=lambda: None, synchronize=lambda: None)


def time_in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    effort: Effort,
    party: Party = ALONE,
    slow: Collection[str] = (),
    weight: float = 1.0,
) -> Samples:
    """Time the contenders in turn, in short blocks; every rank calls it with the same names.

    A block is a barrier, one call that is not timed and as many timed calls as fit ``effort.block_seconds``,
    the same number for all contenders of a row. Every round has each contender once, in a new order, so that
    none of them always comes after the same one.

    Args:
        contenders: what is timed, by name; called without arguments.
        effort: how long.
        party: who times together.
        slow: names of contenders that get a few rounds of one call only.
        weight: this row's share of time, relative to others.
    """
    names = list(contenders)
    calls, rounds = _calibrate(
        {name: contenders[name] for name in names if name not in slow}, effort, party, weight
    )
    samples: Samples = {name: [] for name in names}
    shuffle = random.Random(0).shuffle  # the same orders on every rank
    gc.collect()
    gc.disable()
    try:
        for position in range(rounds):
            shuffle(names)
            for name in names:
                if name not in slow:
                    samples[name].append(_block(contenders[name], calls, party))
                elif position < _SLOW_ROUNDS:
                    samples[name].append(_block(contenders[name], 1, party))
    finally:
        gc.enable()
    return samples


def _calibrate(
    contenders: Mapping[str, Callable[[], Any]], effort: Effort, party: Party, weight: float
) -> tuple[int, int]:
    """Calls per block and number of rounds, the same on every rank."""
    costs = []
    for call in contenders.values():
        _block(call, 2, party)
        calls, seconds = 3, 0.0
        while seconds < effort.block_seconds / 4 and calls < _MAX_CALLS:
            seconds = party.agree(_block(call, calls, party) * calls)
            costs_per_call = seconds / calls
            calls *= 4
        costs.append(costs_per_call)
    calls = max(1, min(_MAX_CALLS, round(effort.block_seconds / max(costs))))
    one_round = sum(costs) * (calls + 1) + len(costs) * _block(party.barrier, 3, party)
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, round(weight * effort.row_seconds / one_round)))
    return party.agree((calls, rounds))


def _block(call: Callable[[], Any], calls: int, party: Party) -> float:
    """Seconds per call."""
    party.barrier()
    call()  # ranks leave a barrier one after the other; this brings them into step
    party.synchronize()
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    party.synchronize()
    return (time.perf_counter() - start) / calls


def summarize(values: Sequence[float]) -> dict[str, float]:
    """The numbers that are kept of a series."""
    return {
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
        "rounds": len(values),
    }


def memory_of(field: str) -> int:
    """Bytes of this process by a field of Linux's ``/proc``: ``VmHWM``, ``Pss``, ``Private_Dirty``, ..."""
    path = "/proc/self/status" if field.startswith("Vm") else "/proc/self/smaps_rollup"
    with open(path) as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
