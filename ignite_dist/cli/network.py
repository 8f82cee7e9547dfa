"""The links between hosts: how long a message takes on each, and which host is slow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

import ignite_dist as idist

__all__ = ["Link", "measure", "slow_hosts"]

_SLOW = 3.0
_NUM_BYTES = 1 << 20  # large enough that bandwidth counts, and soon through on a link of 10 Mbit/s
_SMALL_CALLS, _LARGE_CALLS = 10, 3


class Link(NamedTuple):
    """What a broadcast between the first ranks of two hosts takes.

    Attributes:
        hosts: their names.
        ranks: the ranks that measured it.
        latency_seconds: of 4 bytes.
        seconds: of 1 MB.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    latency_seconds: float
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Of the larger message."""
        return _NUM_BYTES / self.seconds / 1e6


def measure(hosts: Sequence[str]) -> list[Link]:
    """The links between neighbouring hosts, in a ring. Every rank calls it.

    Args:
        hosts: the host of each rank.
    """
    first_ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(pairwise(first_ranks))
    if len(first_ranks) > 2:
        pairs.append((first_ranks[-1], first_ranks[0]))
    own: list[Link] = []
    for pair in pairs[::2] + pairs[1::2]:  # a half at once, then the other: no wave goes through all hosts
        latency, seconds = _time(pair, 4, _SMALL_CALLS), _time(pair, _NUM_BYTES, _LARGE_CALLS)
        if idist.get_rank() == pair[0]:
            own.append(Link((hosts[pair[0]], hosts[pair[1]]), pair, latency, seconds))
    return [link for links in idist.all_gather(own) for link in links] if pairs else []


def _time(pair: tuple[int, int], num_bytes: int, num_calls: int) -> float:
    """The median time of a message there and back, halved."""
    group = list(pair)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=idist.device())
    samples = []
    for _ in range(num_calls + 1):
        started = time.perf_counter()
        for src in pair:
            idist.broadcast(tensor, src=src, group=group)
        tensor[0].item()  # what is still on its way, on a device
        samples.append((time.perf_counter() - started) / 2)
    return statistics.median(samples[1:])  # in the first one the pair has met, and made the connection


def slow_hosts(links: Sequence[Link]) -> list[str]:
    """The hosts of which even the best link takes more than three times what the best of most hosts take.

    The best, because a slow host's links make its neighbours look slow too. With two hosts there is one link,
    and nothing to compare it with.
    """
    hosts = list(dict.fromkeys(host for link in links for host in link.hosts))
    if len(hosts) < 3:
        return []
    found: set[str] = set()
    for times in ([link.latency_seconds for link in links], [link.seconds for link in links]):
        best = {
            host: min(time for time, link in zip(times, links, strict=True) if host in link.hosts)
            for host in hosts
        }
        usual = statistics.median(best.values())
        found.update(host for host in hosts if best[host] > _SLOW * usual)
    return [host for host in hosts if host in found]
