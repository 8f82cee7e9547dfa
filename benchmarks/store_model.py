"""A model of start-up: ranks that meet at one store, as events in time.

The store is one thread that answers requests in the order in which they come: that is what torch's TCPStore
is. A rank makes the requests that were counted on the way to a real store (:func:`requests_of`), one after
the other, and computes in between. On a machine with few cores the ranks and the store take turns on them;
in the world that is modelled beyond this machine every rank has a core of its own, and so has the store. The
network takes no time.
"""

from __future__ import annotations

import heapq
import math
import socket
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

# What a rank's address in gloo takes, and a key of gloo's in the store, as counted; and what the address
# grows by for each rank, because gloo has a listener's ticket for every other rank in it.
_ADDRESS_BYTES, _KEY_BYTES, _TICKET_BYTES = 154, 28, 8
_LENGTH_BYTES = 8  # before each string
# Where a rank says that it is here, less its number, and that host's name; where rank 0 says that all are.
_HERE_BYTES, _HOST_BYTES, _ROLL_BYTES = 22, len(socket.gethostname()), 24
_EVERYBODY = -1  # a request that waits until all ranks have written theirs

Key = tuple[str, int]


class Costs(NamedTuple):
    """Seconds of computing, measured on this machine.

    Attributes:
        request: the store's, for a request.
        key: the store's, for each key after the first in a request.
        byte: the store's, for a byte that comes or goes.
        rank: a rank's, whatever the number of ranks.
        peer: a rank's, for each other rank that it connects to.
    """

    request: float
    key: float
    byte: float
    rank: float
    peer: float


class Request(NamedTuple):
    """One request of a rank.

    Attributes:
        nbytes: what goes there and comes back.
        keys: how many it names.
        needs: what must be there before it is answered: something of a rank, or of all; None if nothing must.
        writes: what of the rank's own it brings.
        peers: how many ranks the rank connects to when it has the answer.
    """

    nbytes: int
    keys: int = 1
    needs: Key | None = None
    writes: Key | None = None
    peers: int = 0


class Prediction(NamedTuple):
    """What the model says of one start: until all ranks are there, the store's part, and its traffic."""

    seconds: float
    store_seconds: float
    requests: int
    nbytes: int


def requests_of(rank: int, world_size: int, variant: str) -> Iterator[Request]:
    """What ``rank`` asks of the store, from ``initialize`` to the end of the first barrier."""
    named = 1 + 2 * _LENGTH_BYTES + _KEY_BYTES  # a request that names one key
    has_tickets = variant in ("one by one", "at once")
    address = _ADDRESS_BYTES + (_TICKET_BYTES * world_size if has_tickets else 0)
    yield Request(5, keys=0)  # validate
    yield Request(5 + 4, keys=0)  # ping
    yield Request(22 + 8)  # add: a client more
    yield from _roll_call(rank, world_size)
    yield Request(named + address, writes=("address", rank))
    if variant.startswith("at once"):
        keys = 1 + _LENGTH_BYTES + world_size * (_LENGTH_BYTES + _KEY_BYTES)
        yield Request(keys + 1, world_size, needs=("address", _EVERYBODY))
        answer = world_size * (_LENGTH_BYTES + address)
        yield Request(keys + answer, world_size, peers=world_size)
        return
    for peer in peers_of(rank, world_size) if variant == "lazy" else range(world_size):
        yield Request(named + 1, needs=("address", peer))  # torch waits
        yield Request(named + 1)  # and gloo does
        yield Request(named + address, peers=1)


def _roll_call(rank: int, world_size: int) -> Iterator[Request]:
    """``ignite_dist/roll_call.py``: rank 0 waits for all, and the others for what it says."""
    here = [_LENGTH_BYTES + _HERE_BYTES + len(str(one)) for one in range(world_size)]
    said = _LENGTH_BYTES + 2  # an empty list
    key = 1 + _LENGTH_BYTES + _ROLL_BYTES
    yield Request(1 + here[rank] + _LENGTH_BYTES + _HOST_BYTES, writes=("here", rank))
    if rank == 0:
        yield Request(1 + _LENGTH_BYTES + sum(here) + 1, world_size, needs=("here", _EVERYBODY))
        yield Request(key + _LENGTH_BYTES + said + said, writes=("roll", 0))
    else:
        yield Request(key + _LENGTH_BYTES + 1, needs=("roll", 0))
        yield Request(key + _LENGTH_BYTES + 1)  # torch waits before it gets
        yield Request(key + said)


def peers_of(rank: int, world_size: int) -> list[int]:
    """The ranks that meet ``rank`` in a barrier: gloo's has log2(n) rounds, each of twice the distance."""
    rounds = math.ceil(math.log2(world_size))
    found = {(rank + sign * 2**power) % world_size for power in range(rounds) for sign in (1, -1)}
    return sorted(found - {rank})


def service(request: Request, costs: Costs) -> float:
    """How long the store computes for ``request``."""
    return costs.request + costs.key * max(0, request.keys - 1) + costs.byte * request.nbytes


def add_up(world_size: int, variant: str, costs: Costs) -> Prediction:
    """What a start takes where the store never waits for work: the least that it can take.

    Ranks other than 0 ask the same number of times, so one of them stands for all.
    """
    first, other = (list(requests_of(rank, world_size, variant)) for rank in (0, 1))
    busy = _total(first, costs) + (world_size - 1) * _total(other, costs)
    alone = costs.rank + costs.peer * sum(request.peers for request in other)
    return Prediction(
        max(busy, alone),
        busy,
        len(first) + (world_size - 1) * len(other),
        sum(one.nbytes for one in first) + (world_size - 1) * sum(one.nbytes for one in other),
    )


def _total(requests: list[Request], costs: Costs) -> float:
    return sum(service(request, costs) for request in requests)


class _Simulation:
    """One start, event by event."""

    def __init__(self, world_size: int, variant: str, costs: Costs, cores: int | None) -> None:
        self.now, self.busy, self.num_requests, self.nbytes = 0.0, 0.0, 0, 0
        self._costs, self._world_size = costs, world_size
        self._free = cores if cores is not None else math.inf
        self._ready: deque[tuple[float, int, Request | None]] = deque()  # wait for a core
        self._running: list[tuple[float, int, int, Request | None]] = []
        self._count = 0
        self._programs = [requests_of(rank, world_size, variant) for rank in range(world_size)]
        self._queue: deque[tuple[int, Request]] = deque()  # at the store
        self._is_serving = False
        self._written: set[Key] = set()
        self._num_written: Counter[str] = Counter()
        self._parked: dict[Key, list[int]] = {}  # who waits for what

    def run(self) -> Prediction:
        for rank in range(self._world_size):
            self._compute(self._costs.rank, rank, None)
        while self._running:
            self.now, _, rank, request = heapq.heappop(self._running)
            self._free += 1
            if request is None:  # the rank has computed: its next request goes to the store
                following = next(self._programs[rank], None)
                if following is not None:
                    self._queue.append((rank, following))
            else:
                self._is_serving = False
                self._answer(rank, request)
            self._serve()
            self._start()
        return Prediction(self.now, self.busy, self.num_requests, self.nbytes)

    def _compute(self, seconds: float, rank: int, request: Request | None) -> None:
        """A rank, or the store with a ``request`` of it, has ``seconds`` of work for a core."""
        self._ready.append((seconds, rank, request))
        self._start()

    def _start(self) -> None:
        while self._ready and self._free > 0:
            seconds, rank, request = self._ready.popleft()
            self._free -= 1
            self._count += 1
            heapq.heappush(self._running, (self.now + seconds, self._count, rank, request))

    def _serve(self) -> None:
        if self._queue and not self._is_serving:
            self._is_serving = True
            rank, request = self._queue.popleft()
            seconds = service(request, self._costs)
            self.busy += seconds
            self.num_requests += 1
            self.nbytes += request.nbytes
            self._compute(seconds, rank, request)

    def _answer(self, rank: int, request: Request) -> None:
        if request.writes is not None:
            kind, _ = request.writes
            self._num_written[kind] += 1
            self._add(request.writes)
            if self._num_written[kind] == self._world_size:
                self._add((kind, _EVERYBODY))
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
    """One start of ``world_size`` ranks that come at the same moment.

    Args:
        world_size: the number of ranks.
        variant: how gloo reads the addresses, one of ``scale.VARIANTS``.
        costs: what the steps take.
        cores: shared by all ranks and the store; None gives each of them one.
    """
    return _Simulation(world_size, variant, costs, cores).run()
