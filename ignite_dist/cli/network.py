"""The links between hosts: the time of a message on each link, and the slow hosts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

import ignite_dist as idist

_SLOW_FACTOR = 3.0
_NUM_BYTES = 1 << 20  # large enough to measure bandwidth; takes 1 s on a link of 10 Mbit/s
_SMALL_CALLS, _LARGE_CALLS = 10, 3


class Link(NamedTuple):
    """The time of a broadcast between the first ranks of two hosts.

    Attributes:
        hosts: the names of the two hosts.
        ranks: the ranks that measured the link.
        latency_seconds: the time for 4 bytes.
        seconds: the time for 1 MiB.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    latency_seconds: float
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Bandwidth of the larger message, in 10**6 bytes per second."""
        return _NUM_BYTES / self.seconds / 1e6


def measure(hosts: Sequence[str]) -> list[Link]:
    """The links between neighbours in a ring of all hosts. Every rank must call this, and gets all links.

    Args:
        hosts: the host of each rank.
    """
    first_ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(pairwise(first_ranks))
    if len(first_ranks) > 2:
        pairs.append((first_ranks[-1], first_ranks[0]))
    own_links: list[Link] = []
    # Neighbouring pairs share a host, so even pairs run before odd pairs.
    for pair in pairs[::2] + pairs[1::2]:
        latency, seconds = _time(pair, 4, _SMALL_CALLS), _time(pair, _NUM_BYTES, _LARGE_CALLS)
        if idist.get_rank() == pair[0]:
            own_links.append(Link((hosts[pair[0]], hosts[pair[1]]), pair, latency, seconds))
    return [link for links in idist.all_gather(own_links) for link in links] if pairs else []


def _time(pair: tuple[int, int], num_bytes: int, num_calls: int) -> float:
    """Half of the median time of a message from one rank of ``pair`` to the other and back."""
    group = list(pair)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=idist.device())
    samples = []
    for _ in range(num_calls + 1):
        started = time.perf_counter()
        for src in pair:
            idist.broadcast(tensor, src=src, group=group)
        tensor[0].item()  # waits until the device has finished
        samples.append((time.perf_counter() - started) / 2)
    # The first sample includes the wait for the peer and the connection.
    return statistics.median(samples[1:])


def slow_hosts(links: Sequence[Link]) -> list[str]:
    """The hosts whose best link takes more than three times as long as the median host's best link.

    Only the best link of a host counts, because the link to a slow host is slow for its neighbour too. With
    two hosts there is only one link, so the result is empty.
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
        found.update(host for host in hosts if best[host] > _SLOW_FACTOR * usual)
    return [host for host in hosts if host in found]
