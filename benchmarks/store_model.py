"""A model of start-up: ranks that meet at one store, as events in time.

The store is one thread that answers requests in the order of their arrival, like torch's TCPStore. A rank
makes the requests that were counted at a real store (:func:`requests_of`), one after the other, and computes
in between. On a machine with few cores the ranks and the store share the cores. In worlds beyond this
machine every rank and the store have their own cores. The network takes no time.
"""

from __future__ import annotations

import heapq
import math
import socket
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

# Counted sizes of a rank's address in gloo and of gloo's keys in the store. An address contains a number
# ("ticket") for each rank, because gloo's listener knows every other rank by such a number.
_ADDRESS_BYTES, _KEY_BYTES, _TICKET_BYTES = 154, 28, 8
_LENGTH_BYTES = 8  # before each string
# A rank's key in the roll call without the rank's number, the rank's host name, and the key of the outcome.
_ARRIVAL_BYTES, _HOST_BYTES, _OUTCOME_BYTES = 22, len(socket.gethostname()), 24
_ALL_RANKS = -1  # in a Key: the keys of all ranks

Key = tuple[str, int]


class Costs(NamedTuple):
    """Computing times in seconds, measured on this machine.

    Attributes:
        request: the store's time for a request.
        key: the store's time for each key after the first in a request.
        byte: the store's time for a byte received or sent.
        rank: a rank's time, independent of the number of ranks.
        peer: a rank's time for each connection to another rank.
    """

    request: float
    key: float
    byte: float
    rank: float
    peer: float


class Request(NamedTuple):
    """One request of a rank.

    Attributes:
        nbytes: bytes of the request and the answer.
        keys: number of keys in the request.
        needs: the key, of one rank or of all ranks, that must exist before the answer; None if no key must.
        writes: the rank's own key that the request writes.
        peers: number of ranks that the rank connects to after the answer.
    """

    nbytes: int
    keys: int = 1
    needs: Key | None = None
    writes: Key | None = None
    peers: int = 0


class Prediction(NamedTuple):
    """The model's result for one start: time until all ranks are ready, the store's work and traffic."""

    seconds: float
    store_seconds: float
    requests: int
    nbytes: int


def requests_of(rank: int, world_size: int, variant: str) -> Iterator[Request]:
    """Requests of ``rank`` to the store, from ``initialize`` to the end of the first barrier."""
    named = 1 + 2 * _LENGTH_BYTES + _KEY_BYTES  # a request that names one key
    has_tickets = variant in ("one by one", "at once")
    address = _ADDRESS_BYTES + (_TICKET_BYTES * world_size if has_tickets else 0)
    yield Request(5, keys=0)  # validate
    yield Request(5 + 4, keys=0)  # ping
    yield Request(22 + 8)  # add: one more client
    yield from _roll_call(rank, world_size)
    yield Request(named + address, writes=("address", rank))
    if variant.startswith("at once"):
        keys = 1 + _LENGTH_BYTES + world_size * (_LENGTH_BYTES + _KEY_BYTES)
        yield Request(keys + 1, world_size, needs=("address", _ALL_RANKS))
        answer = world_size * (_LENGTH_BYTES + address)
        yield Request(keys + answer, world_size, peers=world_size)
        return
    for peer in peers_of(rank, world_size) if variant == "lazy" else range(world_size):
        yield Request(named + 1, needs=("address", peer))  # torch's wait
        yield Request(named + 1)  # gloo's own wait
        yield Request(named + address, peers=1)


def _roll_call(rank: int, world_size: int) -> Iterator[Request]:
    """``rendezvous/roll_call.py``: rank 0 waits for all ranks, the others for rank 0's answer."""
    arrivals = [_LENGTH_BYTES + _ARRIVAL_BYTES + len(str(peer)) for peer in range(world_size)]
    outcome = _LENGTH_BYTES + 2  # an empty list
    key = 1 + _LENGTH_BYTES + _OUTCOME_BYTES
    yield Request(1 + arrivals[rank] + _LENGTH_BYTES + _HOST_BYTES, writes=("arrival", rank))
    if rank == 0:
        yield Request(1 + _LENGTH_BYTES + sum(arrivals) + 1, world_size, needs=("arrival", _ALL_RANKS))
        yield Request(key + _LENGTH_BYTES + outcome + outcome, writes=("outcome", 0))
    else:
        yield Request(key + _LENGTH_BYTES + 1, needs=("outcome", 0))
        yield Request(key + _LENGTH_BYTES + 1)  # torch waits before each get
        yield Request(key + outcome)


def peers_of(rank: int, world_size: int) -> list[int]:
    """The peers of ``rank`` in a barrier: gloo's barrier has log2(n) rounds, each with twice the distance."""
    rounds = math.ceil(math.log2(world_size))
    found = {(rank + sign * 2**power) % world_size for power in range(rounds) for sign in (1, -1)}
    return sorted(found - {rank})


def service(request: Request, costs: Costs) -> float:
    """The store's computing seconds for ``request``."""
    return costs.request + costs.key * max(0, request.keys - 1) + costs.byte * request.nbytes


def add_up(world_size: int, variant: str, costs: Costs) -> Prediction:
    """The least time of a start: the store is never idle.

    Ranks other than 0 make the same number of requests, so one of them represents all.
    """
    first, other = (list(requests_of(rank, world_size, variant)) for rank in (0, 1))
    store_seconds = _total(first, costs) + (world_size - 1) * _total(other, costs)
    rank_seconds = costs.rank + costs.peer * sum(request.peers for request in other)
    return Prediction(
        max(store_seconds, rank_seconds),
        store_seconds,
        len(first) + (world_size - 1) * len(other),
        sum(request.nbytes for request in first)
        + (world_size - 1) * sum(request.nbytes for request in other),
    )


def _total(requests: list[Request], costs: Costs) -> float:
    return sum(service(request, costs) for request in requests)


class _Simulation:
    """Simulates one start, event by event."""

    def __init__(self, world_size: int, variant: str, costs: Costs, cores: int | None) -> None:
        self.now, self.store_seconds, self.num_requests, self.nbytes = 0.0, 0.0, 0, 0
        self._costs, self._world_size = costs, world_size
        self._free_cores = cores if cores is not None else math.inf
        self._ready: deque[tuple[float, int, Request | None]] = deque()  # work that waits for a core
        self._running: list[tuple[float, int, int, Request | None]] = []
        self._count = 0
        self._programs = [requests_of(rank, world_size, variant) for rank in range(world_size)]
        self._queue: deque[tuple[int, Request]] = deque()  # requests at the store
        self._is_serving = False
        self._written: set[Key] = set()
        self._num_written: Counter[str] = Counter()
        self._parked: dict[Key, list[int]] = {}  # the waiting ranks, by key

    def run(self) -> Prediction:
        for rank in range(self._world_size):
            self._compute(self._costs.rank, rank, None)
        while self._running:
            self.now, _, rank, request = heapq.heappop(self._running)
            self._free_cores += 1
            if request is None:  # the rank has finished computing: its next request goes to the store
                following = next(self._programs[rank], None)
                if following is not None:
                    self._queue.append((rank, following))
            else:
                self._is_serving = False
                self._answer(rank, request)
            self._serve()
            self._start()
        return Prediction(self.now, self.store_seconds, self.num_requests, self.nbytes)

    def _compute(self, seconds: float, rank: int, request: Request | None) -> None:
        """Queue ``seconds`` of computation by the rank, or by the store for the rank's ``request``."""
        self._ready.append((seconds, rank, request))
        self._start()

    def _start(self) -> None:
        while self._ready and self._free_cores > 0:
            seconds, rank, request = self._ready.popleft()
            self._free_cores -= 1
            self._count += 1
            heapq.heappush(self._running, (self.now + seconds, self._count, rank, request))

    def _serve(self) -> None:
        if self._queue and not self._is_serving:
            self._is_serving = True
            rank, request = self._queue.popleft()
            seconds = service(request, self._costs)
            self.store_seconds += seconds
            self.num_requests += 1
            self.nbytes += request.nbytes
            self._compute(seconds, rank, request)

    def _answer(self, rank: int, request: Request) -> None:
        if request.writes is not None:
            kind, _ = request.writes
            self._num_written[kind] += 1
            self._add(request.writes)
            if self._num_written[kind] == self._world_size:
                self._add((kind, _ALL_RANKS))
        needs = request.needs
        if needs is None or needs in self._written:
            self._compute(self._costs.peer * request.peers, rank, None)
        else:
            self._parked.setdefault(needs, []).append(rank)

    def _add(self, key: Key) -> None:
        self._written.add(key)
        for rank in self._parked.pop(key, ()):
            self._compute(0.0, rank, None)


def simulate(world_size: int, variant: str, costs: Costs, cores: int | None = None) -> Prediction:
    """One start of ``world_size`` ranks that arrive at the same moment.

    Args:
        world_size: the number of ranks.
        variant: how gloo reads the addresses, one of ``scale.VARIANTS``.
        costs: the computing times.
        cores: number of cores that all ranks and the store share; None gives each of them its own core.
    """
    return _Simulation(world_size, variant, costs, cores).run()
