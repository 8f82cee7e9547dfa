"""Measure the costs of start-up, topology, groups and objects by the number of ranks: docs/scale.md.

    python benchmarks/scale.py                     # 10 minutes on two idle cores
    python benchmarks/scale.py --ranks 2 4 8       # fewer ranks, nothing is written

The script measures real ranks on this machine, over gloo. A proxy in front of the store counts the ranks'
requests. The script measures the work that one rank does alone in worlds of up to 100,000 ranks. It runs the
model of `store_model.py`, first against the measurement and then beyond this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

import fresh
import ignite_dist as idist
from ignite_dist.comp_models.topology import Topology, read_places, write_place
from ignite_dist.context.live import current_model
from ignite_dist.rendezvous import stores
from ignite_dist.values import message_header, serialization

_RANKS = (2, 4, 8, 16, 32, 64)
_MANY = (1_000, 10_000, 100_000)
# Variables of the topology, besides the local rank.
_FACTS = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK")
# How gloo reads the addresses of all ranks: one request for each address (gloo's default); one request for
# all (the setting of initialize()); addresses of a fixed size; each address at the ranks' first message.
_ONE_BY_ONE = {"GLOO_ENABLE_STORE_V2_API": "0"}
VARIANTS = {
    "one by one": _ONE_BY_ONE,
    "at once": {},
    "at once, fixed size": {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"},
    "lazy": {"TORCH_GLOO_LAZY_INIT": "1"},
}


class Span(NamedTuple):
    """A rank's start and end of a step, and its computing time, in seconds. All ranks share one clock."""

    start: float
    end: float
    cpu: float


# --- in the ranks --------------------------------------------------------------------------------------


def _timed(spans: dict[str, list[Span]], name: str, step: Callable[[], Any]) -> None:
    cpu, start = time.process_time(), time.perf_counter()
    step()
    spans.setdefault(name, []).append(Span(start, time.perf_counter(), time.process_time() - cpu))


def _measure(local_rank: int, repeats: int) -> dict[str, Any]:
    """The steps of a rank, several times, and its keys and sockets at the end."""
    spans: dict[str, list[Span]] = {}
    facts = {name: os.environ[name] for name in _FACTS}
    for _ in range(repeats):
        _measure_context(spans, "topology, from the environment")
        for name in _FACTS:
            del os.environ[name]
        _measure_context(spans, "topology, by an exchange")
        os.environ.update(facts)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    held = {
        "keys in the store": store.num_keys() / (2 * repeats + 1),
        "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{one}") for one in _files()),
    }
    idist.barrier()  # so all ranks still run while the sockets are counted
    return {"spans": spans, "held": held}


def _files() -> list[str]:
    return [one for one in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{one}")]


def _measure_context(spans: dict[str, list[Span]], topology: str) -> None:
    """Time a context from its start: steps that are slow only once come first."""
    idist.finalize()
    _timed(spans, "initialize", lambda: idist.initialize("gloo"))
    _timed(spans, "first barrier", idist.barrier)
    _timed(spans, topology, idist.get_nnodes)
    half = list(range(0, idist.get_world_size(), 2))
    idist.barrier()
    _timed(spans, "a group of every second rank: first use", lambda: idist.all_reduce(1, group=half))
    idist.barrier()
    _timed(spans, "a group of every second rank: later", lambda: idist.all_reduce(1, group=half))
    steps = {
        "barrier": idist.barrier,
        "barrier(timeout=)": lambda: idist.barrier(timeout=_LONG),
        "all_gather: a small dict": lambda: idist.all_gather({"rank": idist.get_rank()}),
        "broadcast: a small dict": lambda: idist.broadcast({"step": 1}),
        "one_rank_first": _one_rank_first,
    }
    for name, step in steps.items():
        idist.barrier()
        _timed(spans, name, step)


_LONG = stores.default_pg_timeout


def _one_rank_first() -> None:
    with idist.one_rank_first():
        pass


def _meet_at(local_rank: int, port: int, contexts: int, uses_group: bool) -> list[Span]:
    """Spans of ``initialize`` in contexts at a store that the caller can observe."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    where = f"tcp://127.0.0.1:{port}"
    spans: dict[str, list[Span]] = {}
    for _ in range(contexts):
        idist.finalize()
        _timed(
            spans,
            "initialize",
            lambda: idist.initialize("gloo", init_method=where, rank=rank, world_size=world_size),
        )
        idist.barrier()
        if uses_group:
            idist.all_reduce(1, group=list(range(0, world_size, 2)))
            idist.barrier()
    return spans["initialize"]


# --- measuring -----------------------------------------------------------------------------------------


def measure_ranks(num_ranks: int, repeats: int) -> dict[str, float]:
    """Seconds of each step, from the last rank's start until the last rank's end; keys and sockets."""
    ranks = idist.spawn("gloo", _measure, args=(repeats,), nproc_per_node=num_ranks)
    found: dict[str, float] = {}
    for name in ranks[0]["spans"]:
        rounds = zip(*(rank["spans"][name] for rank in ranks), strict=True)
        found[name] = statistics.median(
            max(span.end for span in spans) - max(span.start for span in spans) for spans in rounds
        )
    found["initialize: computing, per rank"] = statistics.median(
        span.cpu for rank in ranks for span in rank["spans"]["initialize"]
    )
    for name in ranks[0]["held"]:
        found[name] = statistics.median(rank["held"][name] for rank in ranks)
    return found


def count_requests(num_ranks: int, variant: str, uses_group: bool = False) -> dict[str, float]:
    """All requests of a context's ranks to the store, counted by a proxy."""
    from store_proxy import StoreProxy

    store, port = stores.serve_store("127.0.0.1", 0)
    proxy = StoreProxy(port)
    _launch(num_ranks, variant, proxy.port, 1, uses_group)
    requests = [request for client in proxy.clients for request in client]
    return {
        "connections": len(proxy.clients),
        "requests": len(requests),
        "requests of the busiest rank": max(map(len, proxy.clients)),
        "bytes": proxy.replied + sum(request.nbytes for request in requests),
        "keys": store.num_keys(),  # type: ignore[attr-defined]  # a TCPStore
        **Counter(request.name for request in requests),
    }


def measure_start(num_ranks: int, variant: str, repeats: int) -> dict[str, float]:
    """``initialize``: seconds from the last rank's start until all ranks end, and a rank's computing time."""
    store, port = stores.serve_store("127.0.0.1", 0)
    ranks = _launch(num_ranks, variant, port, repeats, False)
    del store
    return {
        "seconds": statistics.median(
            max(span.end for span in spans) - max(span.start for span in spans)
            for spans in zip(*ranks, strict=True)
        ),
        "computing, per rank": statistics.median(span.cpu for spans in ranks for span in spans),
    }


def _launch(num_ranks: int, variant: str, port: int, contexts: int, uses_group: bool) -> list[list[Span]]:
    variables = VARIANTS[variant]
    os.environ.update(variables)
    try:
        found: list[list[Span]] = idist.spawn(
            "gloo", _meet_at, args=(port, contexts, uses_group), nproc_per_node=num_ranks
        )
    finally:
        for name in variables:
            del os.environ[name]
    return found


def measure_alone(num_ranks: int) -> dict[str, float]:
    """Seconds of the steps that a rank computes alone in a world of ``num_ranks``, by name."""
    ranks = tuple(range(num_ranks))
    places = bytearray().join(write_place(f"node-{rank // 8}", rank % 8) for rank in ranks)
    header = bytes(
        message_header.write_header(serialization.encode(("ignite_dist.outcome", 1, 1.0, "", "", None)))
    )
    headers = memoryview(header * num_ranks)
    width = message_header.HEADER_BYTES

    def read_objects() -> list[Any]:
        parts = (headers[width * row : width * (row + 1)] for row in ranks)
        return [
            serialization.unpack(message_header.read_header(part, row)[1] or b"", row)
            for row, part in enumerate(parts)
        ]

    group = current_model().groups.world._replace(ranks=ranks)
    steps: dict[str, Callable[[], Any]] = {
        "the tuple of all ranks": lambda: tuple(range(num_ranks)),
        "topology from all places": lambda: Topology.from_places(0, read_places(places)),
        "unpacking a gathered object of each rank": read_objects,
        "the name of a group of all": lambda: repr(ranks),
        "position of a rank in a group": lambda: group.position(num_ranks - 1),
    }
    return {name: _fastest(step) for name, step in steps.items()}


def _fastest(step: Callable[[], Any], rounds: int = 5) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# --- what the model needs ------------------------------------------------------------------------------

_NUM_CLIENTS, _MANY_KEYS, _LARGE = 4, 1000, 1 << 20


def _ask(local_rank: int, port: int, call: str, times: int) -> None:
    """Repeat the same request to an otherwise idle store."""
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    calls: dict[str, Callable[[], Any]] = {
        "one key": lambda: store.check(["key"]),
        "many keys": lambda: store.check(["key"] * _MANY_KEYS),
        "large": lambda: store.get("large"),
    }
    for _ in range(times):
        calls[call]()


def _served(call: str, times: int) -> float:
    """CPU time of all other threads of this process while its store answers."""
    store, port = stores.serve_store("127.0.0.1", 0)
    store.set("key", "")
    store.set("large", "x" * _LARGE)
    start = time.process_time() - time.thread_time()
    idist.spawn("gloo", _ask, args=(port, call, times), nproc_per_node=_NUM_CLIENTS)
    return time.process_time() - time.thread_time() - start


def measure_store_costs() -> dict[str, float]:
    """The store's computing seconds for a request, for each further key in it, and for a byte."""

    def per_call(call: str, times: int) -> float:
        rounds = [_served(call, times) - _served(call, 0) for _ in range(3)]
        return statistics.median(rounds) / (times * _NUM_CLIENTS)

    request = per_call("one key", 3_000)
    return {
        "request": request,
        "key": (per_call("many keys", 100) - request) / (_MANY_KEYS - 1),
        "byte": (per_call("large", 50) - 2 * request) / _LARGE,  # a get is two requests
    }


def predict(worlds: dict[int, Any], store: dict[str, float]) -> dict[str, Any]:
    """The model's results next to the measurement and beyond it, by variant and number of ranks.

    The ranks' computing time is fitted to the small worlds only, so that the large worlds test the model.
    """
    import machine
    import scale_report as report
    import store_model

    predicted: dict[str, Any] = {}
    for variant in VARIANTS:
        small = [num_ranks for num_ranks in worlds if num_ranks <= 16]
        peers = [len(store_model.peers_of(0, one)) if variant == "lazy" else one for one in small]
        computing = [worlds[one]["starts"][variant]["computing, per rank"] for one in small]
        fitted = report.fit_line(peers, computing)
        costs = store_model.Costs(**store, rank=max(0.0, fitted.start), peer=fitted.slope)
        here = {one: store_model.simulate(one, variant, costs, machine.cores()) for one in worlds}
        beyond = {one: store_model.add_up(one, variant, costs) for one in (64, 256, *_MANY)}
        simulated = {one: store_model.simulate(one, variant, costs) for one in (64, 256)}
        predicted[variant] = {"costs": costs, "here": here, "beyond": beyond, "simulated": simulated}
    return predicted


def measure_world(num_ranks: int, repeats: int) -> dict[str, Any]:
    """All measurements and counts in a world of ``num_ranks``."""
    print(f"{num_ranks} ranks", flush=True)
    launch = fresh.run("launches", "ignite_dist", 2, num_ranks)[1]
    steps = {"spawn to first barrier": launch["seconds"]}
    steps.update({f"{field} (MB)": launch[field] / 1e6 for field in ("PSS", "USS")})
    return {
        "steps": {**steps, **measure_ranks(num_ranks, repeats)},
        "starts": {variant: measure_start(num_ranks, variant, repeats) for variant in VARIANTS},
        "counted": {
            **{variant: count_requests(num_ranks, variant) for variant in VARIANTS},
            "at once, and a group": count_requests(num_ranks, "at once", uses_group=True),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(_RANKS))
    parser.add_argument("--repeats", type=int, default=5, help="contexts in each world")
    arguments = parser.parse_args()

    # Imported here because workers import this module too, but need none of these modules.
    import machine
    import scale_report as report

    about = machine.describe("cpu")
    ranks = sorted(arguments.ranks)
    store_costs = measure_store_costs()
    worlds = {num_ranks: measure_world(num_ranks, arguments.repeats) for num_ranks in ranks}
    alone = {num_ranks: measure_alone(num_ranks) for num_ranks in _MANY}
    document = {
        "machine": about,
        "load at end": os.getloadavg()[0],
        "worlds": worlds,
        "alone": alone,
        "predicted": predict(worlds, store_costs),
    }
    text = report.markdown(document)
    print(text)
    if tuple(ranks) == _RANKS:
        for path in report.write(document, text, Path(__file__).parent):
            print(os.path.relpath(path))


if __name__ == "__main__":
    main()
