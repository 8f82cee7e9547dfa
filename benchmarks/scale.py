"""Measure the costs of start-up, topology, groups and objects by the number of ranks: docs/scale.md.

    python benchmarks/scale.py                     # 10 minutes on two idle cores
    python benchmarks/scale.py --ranks 2 4 8       # fewer ranks, nothing is written

The script measures real ranks on this machine, over gloo. A proxy in front of the store counts the ranks'
requests. The script also measures the work that one rank does alone in worlds of up to 100,000 ranks. Then it
runs the model of `store_model.py`: with the measured numbers of ranks, to test the model, and with more.
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
from ignite_dist.comp_models.shared_memory import opening as shared_memory
from ignite_dist.comp_models.topology import Topology, decode_places, encode_place
from ignite_dist.context.live import current_model
from ignite_dist.environments.rendezvous import stores
from ignite_dist.values import message_header, serialization

_RANKS = (2, 4, 8, 16, 32, 64)
_FITTED = 16  # the model is fitted to worlds of up to this many ranks
_MANY = (1_000, 10_000, 100_000)
# The topology's variables, except the local rank.
_TOPOLOGY_VARIABLES = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK")
# How gloo reads the addresses of all ranks. "one by one": one request for each address (gloo's default).
# "at once": one request for all addresses (the setting of initialize()). "fixed size": the size of an address
# does not grow with the world. "lazy": an address is read when two ranks exchange their first message.
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
    """Spans of a rank's steps in several contexts, and the numbers of keys and sockets at the end."""
    spans: dict[str, list[Span]] = {}
    variables = {name: os.environ[name] for name in _TOPOLOGY_VARIABLES}
    for _ in range(repeats):
        _measure_context(spans, "topology, from the environment")
        for name in _TOPOLOGY_VARIABLES:
            del os.environ[name]
        _measure_context(spans, "topology, by an exchange")
        os.environ.update(variables)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    counts = {
        "keys in the store": store.num_keys() / (2 * repeats + 1),
        "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files()),
    }
    idist.barrier()  # all ranks must still run while the sockets are counted
    return {"spans": spans, "counts": counts}


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def _measure_context(spans: dict[str, list[Span]], topology: str) -> None:
    """Time the steps of a new context. The steps whose first call is slow come first."""
    idist.finalize()
    _timed(spans, "initialize", lambda: idist.initialize("gloo"))
    _timed(spans, "first barrier", idist.barrier)
    _timed(spans, topology, idist.get_nnodes)
    every_second = list(range(0, idist.get_world_size(), 2))
    idist.barrier()
    _timed(spans, "a group of every second rank: first use", lambda: idist.all_reduce(1, group=every_second))
    idist.barrier()
    _timed(spans, "a group of every second rank: later", lambda: idist.all_reduce(1, group=every_second))
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


def _initialize_at(local_rank: int, port: int, contexts: int, uses_group: bool) -> list[Span]:
    """Spans of ``initialize`` in contexts at a store that the caller can observe."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    address = f"tcp://127.0.0.1:{port}"
    spans: dict[str, list[Span]] = {}
    for _ in range(contexts):
        idist.finalize()
        _timed(
            spans,
            "initialize",
            lambda: idist.initialize("gloo", init_method=address, rank=rank, world_size=world_size),
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
    for name in ranks[0]["counts"]:
        found[name] = statistics.median(rank["counts"][name] for rank in ranks)
    return found


def count_requests(num_ranks: int, variant: str, uses_group: bool = False) -> dict[str, float]:
    """All requests of a context's ranks to the store, counted by a proxy."""
    from store_proxy import StoreProxy

    store, port = stores.serve_store("127.0.0.1", 0)
    proxy = StoreProxy(port)
    _launch(num_ranks, variant, proxy.port, 1, uses_group=uses_group)
    requests = [request for client in proxy.clients for request in client]
    return {
        "connections": len(proxy.clients),
        "requests": len(requests),
        "requests of the busiest rank": max(map(len, proxy.clients)),
        "bytes": proxy.reply_bytes + sum(request.nbytes for request in requests),
        "keys": store.num_keys(),  # type: ignore[attr-defined]  # a TCPStore
        **Counter(request.name for request in requests),
    }


def measure_start(num_ranks: int, variant: str, repeats: int) -> dict[str, float]:
    """``initialize``: seconds from the last rank's start until all ranks end, and a rank's computing time."""
    store, port = stores.serve_store("127.0.0.1", 0)
    ranks = _launch(num_ranks, variant, port, repeats, uses_group=False)
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
            "gloo", _initialize_at, args=(port, contexts, uses_group), nproc_per_node=num_ranks
        )
    finally:
        for name in variables:
            del os.environ[name]
    return found


def measure_alone(num_ranks: int) -> dict[str, float]:
    """Seconds of the steps that a rank computes alone in a world of ``num_ranks``, by name."""
    ranks = tuple(range(num_ranks))
    places = bytearray().join(encode_place(f"node-{rank // 8}", rank % 8) for rank in ranks)
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
        "topology from all places": lambda: Topology.from_places(0, decode_places(places)),
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


# --- input of the model --------------------------------------------------------------------------------

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


def _store_seconds(call: str, times: int) -> float:
    """CPU time of this process's other threads while its store answers ``times`` calls of each client."""
    store, port = stores.serve_store("127.0.0.1", 0)
    store.set("key", "")
    store.set("large", "x" * _LARGE)
    start = time.process_time() - time.thread_time()
    idist.spawn("gloo", _ask, args=(port, call, times), nproc_per_node=_NUM_CLIENTS)
    return time.process_time() - time.thread_time() - start


def measure_store_costs() -> dict[str, float]:
    """The store's computing seconds for a request, for each further key in it, and for a byte."""

    def per_call(call: str, times: int) -> float:
        rounds = [_store_seconds(call, times) - _store_seconds(call, 0) for _ in range(3)]
        return statistics.median(rounds) / (times * _NUM_CLIENTS)

    request = per_call("one key", 3_000)
    return {
        "request": request,
        "key": (per_call("many keys", 100) - request) / (_MANY_KEYS - 1),
        "byte": (per_call("large", 50) - 2 * request) / _LARGE,  # a get is two requests
    }


def predict(worlds: dict[int, Any], store: dict[str, float]) -> dict[str, Any]:
    """The model's results for the measured numbers of ranks and for more ranks, by variant.

    The ranks' computing time is fitted to the small worlds only, so that the large worlds test the model.
    """
    import machine
    import scale_report as report
    import store_model

    predicted: dict[str, Any] = {}
    for variant in VARIANTS:
        small = [num_ranks for num_ranks in worlds if num_ranks <= _FITTED]
        peers = [len(store_model.peers_of(0, n)) if variant == "lazy" else n for n in small]
        computing = [worlds[n]["starts"][variant]["computing, per rank"] for n in small]
        fitted = report.fit_line(peers, computing)
        costs = store_model.Costs(**store, rank=max(0.0, fitted.start), peer=fitted.slope)
        measured = {n: store_model.simulate(n, variant, costs, machine.cores()) for n in worlds}
        beyond = {n: store_model.add_up(n, variant, costs) for n in (64, 256, *_MANY)}
        simulated = {n: store_model.simulate(n, variant, costs) for n in (64, 256)}
        predicted[variant] = {"costs": costs, "here": measured, "beyond": beyond, "simulated": simulated}
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
    if sum(num_ranks <= _FITTED for num_ranks in set(arguments.ranks)) < 2:
        parser.error(f"--ranks needs two numbers up to {_FITTED}: the model is fitted to them")
    os.environ[shared_memory.VARIABLE] = "0"  # a job of many ranks has many machines

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
