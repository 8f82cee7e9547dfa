"""The rendezvous of torch.distributed: each process's place in the job, and the store of all ranks."""

from __future__ import annotations

import glob
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import default_pg_timeout

from ignite_dist import environments
from ignite_dist.environments import Environment, own_variables
from ignite_dist.environments.base import read_int, read_port
from ignite_dist.environments.rendezvous import connections, network_interfaces, roll_call
from ignite_dist.errors import EnvironmentVariablesError, LaunchError, MissingRanksError
from ignite_dist.internals import limits

# Number of contexts made at each rendezvous address or file, equal on all ranks of the rendezvous.
_num_contexts: Counter[tuple[str, str | None, int | None]] = Counter()

# How long a rank waits until rank 0 closes its connection to the store of the last context.
_END_SECONDS = 60.0
# The same after a failed attempt to begin a context: rank 0 may wait for this rank in that attempt.
_FAILED_SECONDS = 5.0


class _Joined(NamedTuple):
    """A store that rank 0 serves and this rank has joined."""

    store: Store
    prefix: str
    fds: list[int]  # the connections to rank 0, which are open while this object lives


# The store of the last context of each rendezvous, if rank 0 serves it: on rank 0, and on the other ranks.
_served: dict[tuple[str, str | None, int | None], connections.Connections] = {}
_joined: dict[tuple[str, str | None, int | None], _Joined] = {}

_SECOND = timedelta(seconds=1)


def find_place(init_method: str | None, rank: int | None, world_size: int | None) -> Environment:
    """Rank, world size and address from the arguments, else from the environment, else a world of one.

    Raises:
        ValueError: arguments and environment contradict each other, or ``init_method`` needs a rank.
        EnvironmentVariablesError: a variable is missing, for example the address of rank 0.
    """
    environ = own_variables.given()
    environment = environments.detect(environ)
    if rank is None or world_size is None:
        if environment is None and environ.get("LOCAL_RANK"):
            raise EnvironmentVariablesError(
                f"LOCAL_RANK={environ['LOCAL_RANK']} is set, but RANK and WORLD_SIZE are not. Set them "
                "for every process, start the script with torchrun, or unset LOCAL_RANK to run alone."
            )
        if environment is None and init_method not in (None, "env://"):
            raise ValueError(
                f"init_method={init_method!r} needs rank= and world_size=, or RANK and WORLD_SIZE in the "
                "environment."
            )
        place = environment or environments.ALONE
        if place.world_size > 1 and place.main_address is None and init_method in (None, "env://"):
            raise EnvironmentVariablesError(
                f"{place.launcher} has started {place.world_size} processes, but no variable has the "
                "address of rank 0's node, nor says that all of them are on one node. Set MASTER_ADDR to "
                "this address for every process (for example: mpirun -x MASTER_ADDR=...). MASTER_PORT is "
                "optional."
            )
        return place
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank={rank} and world_size={world_size}.")
    if environment is None:
        return Environment(
            "arguments",
            rank,
            world_size,
            local_rank=read_int(environ, "LOCAL_RANK"),
            main_address=environ.get("MASTER_ADDR") or "127.0.0.1",
            main_port=read_port(environ, "MASTER_PORT") or 15000,
        )
    if (environment.rank, environment.world_size) != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size} contradict the environment ({environment.launcher}): "
            f"rank {environment.rank}, world size {environment.world_size}. Leave the arguments out, or "
            "unset RANK, WORLD_SIZE and LOCAL_RANK."
        )
    return environment


def set_missing(place: Environment, more: Mapping[str, str]) -> None:
    """Set the variables that scripts read, and ``more``. Existing values stay."""
    own_variables.set_missing(
        {
            "RANK": place.rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_RANK": place.local_rank,
            "MASTER_ADDR": place.main_address,
            "MASTER_PORT": place.main_port,
            **more,
        }
    )


def join_store(place: Environment, init_method: str | None, timeout: timedelta | None) -> Store:
    """The store of all ranks, for ``init_process_group``. Returns when all ranks have reached the store.

    Each key starts with the number of earlier contexts at this address, because some stores outlive a
    context: torchrun's store, a file, and rank 0's store while peers start the next context.

    Raises:
        LaunchError: the port of rank 0's store is in use.
        MissingRanksError: a rank is missing at the timeout.
        DistStoreError: a rank is missing at the timeout, under torchrun on several nodes.
    """
    if place.world_size == 1 and init_method in (None, "env://"):
        return HashStore()  # one rank needs no port
    timeout = timeout or default_pg_timeout
    init_method = init_method or "env://"
    key = _rendezvous_key(place, init_method)
    num_contexts = _num_contexts[key]
    init_method = _with_own_file(init_method, num_contexts)
    has_agents = place.launcher == "torchrun" and (place.nnodes or 1) > 1
    start = "agents" if has_agents else os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    prefix, where = f"ignite_dist/{start}/{num_contexts}", _address_text(place, init_method)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            opened = connections.Connections()
            with roll_call.logging_wait(place, f"{_store_server(place)} at {where}"), opened.recording():
                if (joined := _joined.pop(key, None)) is not None:
                    _wait_for_end(joined, prefix, deadline)
                root = _connect(place, init_method, deadline)
            if (served := _served.pop(key, None)) is not None:
                served.shut_down()
            root.set_timeout(timeout)
            store: Store = PrefixStore(prefix, root)
            if has_agents:
                with roll_call.logging_wait(place, f"all others at {where}"):
                    return _store_of_this_start(store, place, deadline)
            port = _port_of_rank_0(place, init_method)
            own_ends = opened.to_port(port)
            if port is not None:
                store.set(f"connected from/{place.rank}", json.dumps(list(own_ends.values())))
            roll_call.call(store, place, where, deadline, _loopback_hint(place, init_method))
            if port is not None and place.rank == 0:
                _served[key] = _connections_of_peers(store, place, port)
            elif own_ends:
                _joined[key] = _Joined(root, prefix, list(own_ends))
            return store
        except DistNetworkError as error:
            if place.rank > 0 and time.monotonic() < deadline:
                continue  # perhaps this was the previous context's store, which rank 0 has closed
            if place.rank == 0 or _is_served_by_agent():
                raise
            host = socket.gethostname()
            raise MissingRanksError(
                f"Rank 0 of {place.world_size} did not reach {where} in time, or {host} cannot connect to "
                f"rank 0.{_loopback_hint(place, init_method)}",
                [0],
            ) from error


def _connections_of_peers(store: Store, place: Environment, port: int) -> connections.Connections:
    """The connections of the other ranks to the store that this process serves at ``port``."""
    ends = store.multi_get([f"connected from/{rank}" for rank in range(1, place.world_size)])
    peers = {(address, its_port) for end in ends for address, its_port in json.loads(end)}
    return connections.Connections.from_peers(port, peers)


def _wait_for_end(joined: _Joined, prefix: str, deadline: float) -> None:
    """Wait until rank 0 closes this rank's connection to the store of the last context.

    Rank 0 closes it when nothing holds the store any more, or when it begins the next context. If an object
    of its process, for example a model, still holds the store, the store serves the next context too. A rank
    that joins a store just before rank 0 closes it prints a warning of torch, and so does a request at that
    moment. At half of the time this rank joins the store, so that errors do not name it as missing.
    """
    limit = _FAILED_SECONDS if joined.prefix == prefix else _END_SECONDS
    connections.wait_for_end(joined.fds, min(limit, (deadline - time.monotonic()) / 2))


def forget_failures(store: Store) -> None:
    """Delete the key ``exception_dump``, which NCCL writes outside of any prefix when a rank has failed.

    A store may outlive an attempt. The ranks of the next one would read the key, and be ended by NCCL's
    watchdog after some minutes. Rank 0 calls this before any rank starts NCCL.
    """
    root_of(store).delete_key("exception_dump")


def root_of(store: Store) -> Store:
    """The store without prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _store_of_this_start(store: Store, place: Environment, deadline: float) -> Store:
    """The part of ``store`` for the ranks that torchrun's agents have started together.

    Restart counts may differ between nodes, because each agent counts only the failures on its own node. The
    store still has the addresses of ranks that are gone. So rank 0 chooses a random name for each start. Each
    other rank writes its own random name under the name of the start, and rank 0 confirms these names.
    """
    own_name = uuid.uuid4().hex
    if place.rank == 0:
        store.set("start", own_name)
        others = store.multi_get([f"{own_name}/{rank}" for rank in range(1, place.world_size)])
        store.set(f"{own_name}/met", b" ".join(others).decode())
        return PrefixStore(own_name, store)
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/{place.rank}", own_name)
        try:
            store.wait([f"{start}/met"], _SECOND)
        except DistStoreError:  # rank 0 of this start is gone, or waits for others
            if time.monotonic() > deadline:
                raise
        else:
            if own_name.encode() in store.get(f"{start}/met").split():
                return PrefixStore(start, store)
            time.sleep(0.05)  # this is an earlier start: the new rank 0 has not set its name yet


def _address_text(place: Environment, init_method: str) -> str:
    """The address or file of the rendezvous, for messages."""
    address, port = _main_address(place, init_method)
    if address is None:
        return init_method
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _store_server(place: Environment) -> str:
    """The process whose store a rank waits for, for messages."""
    if _is_served_by_agent():
        return "the launcher's store"
    return "rank 0" if place.rank > 0 else "its own store (is this an address of this machine?)"


def _loopback_hint(place: Environment, init_method: str) -> str:
    """A hint for errors about missing ranks, if the rendezvous has a loopback address."""
    address, _ = _main_address(place, init_method)
    if address is None or _is_served_by_agent() or not network_interfaces.is_loopback(address):
        return ""
    return (
        f" Only processes on rank 0's machine reach {address}. If ranks run on other machines, give every "
        "rank, rank 0 too, the network address of that machine."
    )


def count_context(place: Environment, init_method: str | None) -> None:
    """Count a context at this address or file. The next context there uses other keys of the store."""
    _num_contexts[_rendezvous_key(place, init_method or "env://")] += 1


def _rendezvous_key(place: Environment, init_method: str) -> tuple[str, str | None, int | None]:
    return init_method, place.main_address, place.main_port


def _with_own_file(init_method: str, num_contexts: int) -> str:
    """``init_method`` with a file of its own for each context after the first.

    The last rank to close a ``FileStore`` releases the file's lock and then deletes the file. If a peer
    writes data of the next context in between, the deletion loses these data, and the other ranks hang.
    """
    parts = urlsplit(init_method)
    if parts.scheme != "file" or num_contexts == 0:
        return init_method
    return parts._replace(path=f"{parts.path}.{num_contexts}").geturl()


def remove_files(init_method: str | None) -> None:
    """Remove the files that ranks have left at a ``file://``. No rank may run."""
    parts = urlsplit(init_method or "")
    if parts.scheme == "file":
        file = Path(parts.path)
        for path in (file, *file.parent.glob(f"{glob.escape(file.name)}.*")):
            if path == file or path.suffix[1:].isdecimal():  # of a later context
                path.unlink(missing_ok=True)


def _connect(place: Environment, init_method: str, deadline: float) -> Store:
    address, port = _main_address(place, init_method)
    try:
        # If init_method has options after a question mark, torch parses them.
        if address is None or port is None or "?" in init_method or _is_served_by_agent():
            timeout = _time_left(deadline)
            candidates = dist.rendezvous(init_method, place.rank, place.world_size, timeout=timeout)
            store: Store = next(candidates)[0]
            return store
        return _store_of_rank_0(place, address, port, deadline)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        remedy = "Set MASTER_PORT to" if init_method == "env://" else "Choose"
        raise LaunchError(
            f"Rank 0 cannot serve the rendezvous at {_address_text(place, init_method)}: the port is in use. "
            f"Another job may still be running there. {remedy} a free port."
        ) from error


# --- serving -------------------------------------------------------------------------------------------


def _is_served_by_agent() -> bool:
    """True if torchrun's agent or the launcher of ``spawn`` serves the store; False if rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _port_of_rank_0(place: Environment, init_method: str) -> int | None:
    """The port at which rank 0 serves the store; None if another process serves it."""
    return None if _is_served_by_agent() else _main_address(place, init_method)[1]


def _time_left(deadline: float) -> timedelta:
    """The time until ``deadline``, but at least a second for one try."""
    return timedelta(seconds=max(deadline - time.monotonic(), 1.0))


def _store_of_rank_0(place: Environment, address: str, port: int, deadline: float) -> Store:
    """The store of rank 0. It is compatible with torch's own: other libraries may use the same address.

    torch's rendezvous is not used, for two reasons: it listens on all interfaces even for a loopback address,
    and it counts the ranks without naming them.
    """
    listen_fd = None
    if place.rank > 0:
        until_last_try = deadline - time.monotonic() - 1.0
        connections.wait_for_listener(address, port, min(until_last_try, connections.LONG_WAIT_SECONDS))
    elif network_interfaces.is_loopback(address):
        # If the port is in use, TCPStore shares this process's store at the port (multi_tenant), or raises.
        with suppress(OSError):
            listener = connections.listen(address, port)
            port, listen_fd = listener.getsockname()[1], listener.detach()
    return TCPStore(
        address,
        port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=_time_left(deadline),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen_fd,
        use_libuv=True,
    )


def _main_address(place: Environment, init_method: str | None) -> tuple[str | None, int | None]:
    """Address and port of rank 0's store; ``(None, None)`` if ``init_method`` has no address."""
    if init_method in (None, "env://"):
        return place.main_address, place.main_port
    parts = urlsplit(init_method)
    return (parts.hostname, parts.port) if parts.scheme == "tcp" else (None, None)


def join_variables(address: str, port: int) -> dict[str, str]:
    """The environment variables with which a worker's ``env://`` joins a store and does not serve one."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def serve_store(address: str, port: int = 0) -> tuple[Store, int]:
    """A store served by this process, and its port. Port 0 stands for a free port.

    Raises:
        LaunchError: the port is in use, the address is not one of this machine, or a limit of this process
            does not allow the store's thread.
    """
    try:
        listener = connections.listen(address, port)
    except OSError as error:
        raise LaunchError(
            f"Cannot serve the rendezvous on {address}:{port}: {error.strerror}. Omit master_addr and "
            "master_port: on one machine spawn chooses a free port."
        ) from None
    port = listener.getsockname()[1]
    # The store takes over the listening socket, so no other process can take the port.
    try:
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,  # the server without libuv polls its sockets every 200 ms
        )
    except RuntimeError as error:
        about = limits.sentences_about(str(error))
        raise LaunchError(f"The store of the job cannot be started: {error}. {about}".strip()) from None
    return store, port


# "address:port" of the launcher's store, for workers whose backend has no store.
_LAUNCHERS_STORE = "IGNITE_DIST_STORE"


def serve_launchers_store() -> tuple[Store, dict[str, str]]:
    """A store for the workers of one launch on this machine, and the variable with the store's address."""
    store, port = serve_store("127.0.0.1", 0)
    return store, {_LAUNCHERS_STORE: f"127.0.0.1:{port}"}


def launchers_store() -> Store | None:
    """A connection to the store of this process's launcher; None if the launcher serves no store.

    Only the first context gets the store: the next context would use the same keys.
    """
    address, _, port = os.environ.pop(_LAUNCHERS_STORE, "").rpartition(":")
    return TCPStore(address, int(port), wait_for_workers=False) if address else None


# Without this variable each rank sends three requests to the store for every other rank: 3 million requests
# for 1,000 ranks. https://github.com/pytorch/gloo, gloo/rendezvous/context.cc
GLOO_VARIABLES = {"GLOO_ENABLE_STORE_V2_API": "1"}


# --- network interfaces --------------------------------------------------------------------------------


def is_on_one_machine(place: Environment, init_method: str | None) -> bool:
    """True if the launcher or the address implies that all ranks run on this machine."""
    if place.nnodes is not None:
        return place.nnodes == 1
    if place.nproc_per_node is not None:
        return place.nproc_per_node == place.world_size
    address, _ = _main_address(place, init_method)
    return place.world_size == 1 or (address is not None and network_interfaces.is_loopback(address))


def interface_variables(place: Environment, init_method: str | None) -> dict[str, str]:
    """The variables that set the network interface of gloo, and of NCCL if all ranks run on this machine.

    Between machines NCCL chooses an interface itself: not loopback or Docker, and perhaps a faster one.
    """
    if is_on_one_machine(place, init_method):
        return loopback_variables()
    address, _ = _main_address(place, init_method)
    interface = None if address is None else network_interfaces.interface_towards(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def loopback_variables() -> dict[str, str]:
    """The variables that keep gloo and NCCL on the loopback interface."""
    loopback = network_interfaces.loopback_interface()
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
