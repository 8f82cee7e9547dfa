"""Time contenders side by side: short blocks of calls in turn, so that noise affects all of them alike."""

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
# Number of rounds, of one call each, for a slow contender. The table shows the contender, but no bar uses it.
_SLOW_ROUNDS = 3


class Effort(NamedTuple):
    """The duration of measurements.

    Attributes:
        row_seconds: time for a row of the table, over all contenders.
        block_seconds: time for a block of calls of a contender.
        repeats: repetitions of measurements in fresh processes.
        workers: numbers of workers for the curve of launches.
        ignite_workers: numbers of workers for pytorch-ignite; fewer, because its launches take seconds.
    """

    row_seconds: float
    block_seconds: float
    repeats: int
    workers: tuple[int, ...]
    ignite_workers: tuple[int, ...]


QUICK = Effort(0.5, 0.004, 2, (2, 4, 8, 16, 32), (2,))
# 32 workers of pytorch-ignite take more than 6 GB.
FULL = Effort(6.0, 0.008, 7, (2, 4, 8, 16, 32), (2, 4, 8, 16))


class Processes(NamedTuple):
    """The processes that measure together: the ranks of a world, or one process.

    Attributes:
        agree: returns rank 0's value, on every rank.
        barrier: returns when every rank has called it.
        synchronize: returns when the device has finished its work.
    """

    agree: Callable[[Any], Any]
    barrier: Callable[[], None]
    synchronize: Callable[[], None]


ONE_PROCESS = Processes(agree=lambda value: value, barrier=lambda: None, synchronize=lambda: None)


def time_in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    effort: Effort,
    processes: Processes = ONE_PROCESS,
    slow: Collection[str] = (),
    weight: float = 1.0,
) -> Samples:
    """Time the contenders in turn, in short blocks. Every rank calls this with the same names.

    A block is a barrier, one untimed call and as many timed calls as fit ``effort.block_seconds``: a fast
    contender makes more calls than a slow one, because short blocks are noisy. Every round times each
    contender once, in a new order, so that no contender always follows the same other contender.

    Args:
        contenders: the timed functions by name, called without arguments.
        effort: the duration of the measurement.
        processes: the processes that measure together.
        slow: names of contenders that get only a few rounds of one call.
        weight: this row's share of time, relative to others.
    """
    names = list(contenders)
    calls, rounds = _calibrate(
        {name: contenders[name] for name in names if name not in slow}, effort, processes, weight
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
                    samples[name].append(_block(contenders[name], calls[name], processes))
                elif position < _SLOW_ROUNDS:
                    samples[name].append(_block(contenders[name], 1, processes))
    finally:
        gc.enable()
    return samples


def _calibrate(
    contenders: Mapping[str, Callable[[], Any]], effort: Effort, processes: Processes, weight: float
) -> tuple[dict[str, int], int]:
    """Calls per block of each contender, and number of rounds. Both are the same on every rank."""
    num_calls, one_round = {}, 0.0
    for name, call in contenders.items():
        _block(call, 2, processes)
        calls, seconds = 3, 0.0
        while seconds < effort.block_seconds / 4 and calls < _MAX_CALLS:
            seconds = processes.agree(_block(call, calls, processes) * calls)
            seconds_per_call = seconds / calls
            calls *= 4
        num_calls[name] = max(1, min(_MAX_CALLS, round(effort.block_seconds / seconds_per_call)))
        one_round += seconds_per_call * (num_calls[name] + 1) + _block(processes.barrier, 3, processes)
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, round(weight * effort.row_seconds / one_round)))
    return processes.agree((num_calls, rounds))


def _block(call: Callable[[], Any], calls: int, processes: Processes) -> float:
    """Seconds per call."""
    processes.barrier()
    call()  # untimed: synchronises the ranks, because they leave a barrier one after the other
    processes.synchronize()
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    processes.synchronize()
    return (time.perf_counter() - start) / calls


def summarize(values: Sequence[float]) -> dict[str, float]:
    """The summary of a series of numbers."""
    return {
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
        "rounds": len(values),
    }


def memory_of(field: str) -> int:
    """Bytes of this process in a field of Linux's ``/proc``: ``VmHWM``, ``Pss``, ``Private_Dirty``, ..."""
    path = "/proc/self/status" if field.startswith("Vm") else "/proc/self/smaps_rollup"
    with open(path) as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
