"""How the ranks of torch.distributed find each other: a place in the job for each, and a store for all."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import default_pg_timeout

from ignite_dist import environments
from ignite_dist.environments import Environment
from ignite_dist.environments.base import read_port
from ignite_dist.errors import EnvironmentVariablesError, LaunchError

__all__ = ["find_place", "join_store", "loopback_only", "note_meeting", "serve_store", "set_missing"]

# How many contexts of this process have met in each place. All ranks that met there have the same number.
_num_contexts: Counter[tuple[str, str | None, int | None]] = Counter()

_ALONE = Environment("nobody", rank=0, world_size=1, local_rank=0)


def find_place(init_method: str | None, rank: int | None, world_size: int | None) -> Environment:
    """The place of this process: what the arguments say, else the environment, else a world of one.

    Raises:
        ValueError: the two contradict each other, or an ``init_method`` comes without ranks.
        EnvironmentVariablesError: the environment is half set, or Horovod's.
    """
    environment = environments.detect(os.environ)
    if rank is None or world_size is None:
        if environment is None and os.environ.get("LOCAL_RANK"):
            raise EnvironmentVariablesError(
                f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set, but RANK and WORLD_SIZE are not. Set them "
                "for every process, start the script with torchrun, or unset LOCAL_RANK to run alone."
            )
        if environment is None and init_method not in (None, "env://"):
            raise ValueError(
                f"init_method={init_method!r} needs rank= and world_size=, or RANK and WORLD_SIZE in the "
                "environment."
            )
        size = os.environ.get("HOROVOD_SIZE", "1")
        if environment is None and size != "1":
            raise EnvironmentVariablesError(
                f"HOROVOD_SIZE={size}, so horovodrun has started {size} processes, but torch.distributed "
                "does not know it, and each would be a world of one. Use backend 'horovod', or torchrun."
            )
        return environment or _ALONE
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank={rank} and world_size={world_size}.")
    if environment is None:
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), read_port(os.environ, "MASTER_PORT")
        return Environment("arguments", rank, world_size, main_address=address, main_port=port or 15000)
    if (environment.rank, environment.world_size) != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size} contradict the environment ({environment.launcher}): "
            f"rank {environment.rank}, world size {environment.world_size}. Leave the arguments out, or "
            "unset RANK, WORLD_SIZE and LOCAL_RANK."
        )
    return environment


def set_missing(place: Environment) -> Callable[[], None]:
    """Set the variables that scripts read and that are not there; call what is returned to take that back."""
    wanted = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "MASTER_ADDR": place.main_address,
        "MASTER_PORT": place.main_port,
    }
    missing = {
        key: str(value) for key, value in wanted.items() if value is not None and not os.environ.get(key)
    }
    empty = {key for key in missing if key in os.environ}
    os.environ.update(missing)

    def restore() -> None:
        for key, value in missing.items():
            if os.environ.get(key) == value:  # else somebody has changed it since
                if key in empty:
                    os.environ[key] = ""
                else:
                    del os.environ[key]

    return restore


def join_store(place: Environment, init_method: str | None, timeout: timedelta | None) -> Store:
    """The store of all ranks, for ``init_process_group``.

    Its keys carry the number of contexts that met in the same place before, because a store may outlive a
    context: an agent's, a file's, or that of rank 0 while the others are on their way into the next one.

    Raises:
        LaunchError: the port where rank 0 serves the store is in use.
    """
    if place.world_size == 1 and init_method in (None, "env://"):
        return HashStore()  # nobody else to find, so no port is needed
    timeout = timeout or default_pg_timeout
    init_method = init_method or "env://"
    num_contexts = _num_contexts[_meeting_place(place, init_method)]
    prefix = f"ignite_dist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{num_contexts}"
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            served = _connect(place, init_method, timeout)
            served.set_timeout(timeout)
            store = PrefixStore(prefix, served)
            if place.rank == 0:
                store.set("open", "")
            else:
                store.get("open")
        except DistNetworkError:
            if place.rank == 0 or time.monotonic() > deadline:
                raise
            # It may have been the store of the context before, which rank 0 has closed meanwhile.
        else:
            return store


def note_meeting(place: Environment, init_method: str | None) -> None:
    """Note that all ranks have met in this place. The next context there uses other keys of the store."""
    _num_contexts[_meeting_place(place, init_method or "env://")] += 1


def _meeting_place(place: Environment, init_method: str) -> tuple[str, str | None, int | None]:
    return init_method, place.main_address, place.main_port


def _connect(place: Environment, init_method: str, timeout: timedelta) -> Store:
    try:
        store: Store = next(dist.rendezvous(init_method, place.rank, place.world_size, timeout=timeout))[0]
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        by_variables = init_method == "env://"
        where = f"{place.main_address}:{place.main_port}" if by_variables else init_method
        raise LaunchError(
            f"Rank 0 cannot serve the rendezvous at {where}: the port is in use. Another job may still be "
            f"running there; {'set MASTER_PORT to' if by_variables else 'name'} a free port."
        ) from error
    return store


def serve_store(address: str, port: int) -> tuple[Store, int]:
    """A store served by this process, and its port; port 0 stands for a free one.

    Raises:
        LaunchError: the port is in use, or the address is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"Cannot serve the rendezvous on {address}:{port}: {error.strerror}. Leave master_addr and "
            "master_port out: on one machine spawn takes a free port by itself."
        ) from error
    listener.listen()
    port = listener.getsockname()[1]
    # The store takes the listening socket over, so nobody else can get the port between bind and use.
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,  # the other server looks at its sockets every 200 ms
    )
    return store, port


def loopback_interface() -> str | None:
    """The name of the loopback interface, if it has one of the usual ones."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def loopback_only() -> dict[str, str]:
    """The variables that keep gloo and NCCL on the loopback interface."""
    loopback = loopback_interface()
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
