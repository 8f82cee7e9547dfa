"""Makes the process groups and meshes of a context, each with the members' own connection to the store."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    DeviceMesh,
    DistError,
    DistStoreError,
    GroupMember,
    PrefixStore,
    ProcessGroup,
    Store,
    init_device_mesh,
)

from ignite_dist.comp_models.transport import Group
from ignite_dist.environments.rendezvous import connections
from ignite_dist.errors import MissingRanksError
from ignite_dist.internals import _torch
from ignite_dist.internals.ranks import describe_ranks


class GroupFactory:
    """The groups of one context.

    Args:
        world: the default process group.
        rank: this rank.
        device: returns the device of this rank.
        connecting: makes a context manager for code that opens connections between the ranks.

    Attributes:
        connections: gloo's connections in the groups; recorded only if ``open()`` has made the context.
    """

    def __init__(
        self,
        world: ProcessGroup,
        rank: int,
        device: Callable[[], torch.device],
        connecting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.connections = connections.Connections()
        self._world = world
        self._rank = rank
        self._device = device
        self._connecting = connecting
        # A counter of the groups made of each tuple of ranks, and the connections to the store that no thread
        # is using. No lock is needed, because next(), pop() and append() are atomic.
        self._generations: dict[tuple[int, ...], Iterator[int]] = {}
        self._free_connections: list[Store] = []

    def make(self, ranks: tuple[int, ...], **options: Any) -> Any:
        """See :meth:`Transport.make_group`."""
        if not ranks:  # torch treats an empty list as all ranks
            inspect.signature(dist.new_group).bind([], **options)
            return GroupMember.NON_GROUP_MEMBER
        try:
            if options:
                with self._connecting(), self.connections.recording():
                    return dist.new_group(list(ranks), **options)
            # torch names a group by the number of groups that this rank has made, so ranks with different
            # numbers would wait for each other forever. With a name made of the ranks, only members call.
            generation = next(self._generations.setdefault(ranks, count(1)))
            digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
            return self._make_named(f"ignite_dist:{digest}:{generation}", ranks)
        except DistStoreError as error:
            if "timeout" not in str(error):
                raise
            timeout = _torch.timeout_of(self._world, self._device())
            raise MissingRanksError(
                f"The group of {describe_ranks(ranks)} is not complete: some of them have not made it within "
                f"{timeout}, the context's timeout=. Each of them calls new_group, or the first collective "
                "with this list of ranks. With options of torch, every rank of the world calls new_group."
            ) from error

    def make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """See :meth:`Transport.make_mesh`."""
        with self._connecting(), self.connections.recording():
            return init_device_mesh(self._device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def connect_again(self, group: Group, handle: ProcessGroup, key: str) -> Group:
        """``group`` with another handle than ``handle``, which torch's tables of groups do not have.

        The tables differ between the ranks while threads make groups, and torch derives names from them.
        """
        from torch.distributed import ProcessGroupGloo  # missing in builds without gloo

        position = group.position(self._rank)
        assert position is not None
        store = self._take_connection(_torch.backend_and_store(self._world)[1])
        with self._connecting(), self.connections.recording():
            again = ProcessGroupGloo(
                PrefixStore(f"ignite_dist:asynchronous:{key}/", store),
                position,
                len(group.ranks),
                _torch.timeout_of(handle, self._device()),
            )
        self._free_connections.append(store)
        return group._replace(handle=again)

    def forget(self) -> None:
        """Drop the connections to the store, because the context has ended."""
        self._free_connections.clear()

    def _make_named(self, name: str, ranks: tuple[int, ...]) -> Any:
        backend, world_store = _torch.backend_and_store(self._world)
        store = self._take_connection(world_store) if self._rank in ranks else world_store
        with self._connecting(), self.connections.recording():
            handle = _torch.new_group_by_name(
                name,
                ranks,
                self._rank,
                backend,
                store,
                # torch would not pass the world's timeout on to the group.
                timeout=_torch.timeout_of(self._world, self._device()),
                description=f"ignite_dist:{describe_ranks(ranks)}",
            )
        if handle is not GroupMember.NON_GROUP_MEMBER:
            self._free_connections.append(store)  # not after an error: a reply may still be unread
        return handle

    def _take_connection(self, world_store: Any) -> Any:
        """Take or make a connection to the store that no other thread is using.

        A thread keeps its connection while it waits for the other members. Two threads with one connection
        would deadlock if two ranks made their groups in opposite orders.
        """
        try:
            return self._free_connections.pop()
        except IndexError:
            with self._connecting():
                return _new_connection(world_store)


def _new_connection(store: Any) -> Any:
    """A new connection to ``store``, or ``store`` if it cannot be cloned; None without a store (MPI)."""
    if store is None:
        return None
    try:
        return store.clone()
    except DistError:  # the store's server is gone
        raise
    except RuntimeError:  # a user's store, written in Python, has no clone()
        return store
