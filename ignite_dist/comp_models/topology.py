"""Finds the ranks of each node, from the launcher's variables or else from the host names of all ranks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ignite_dist.environments import Environment
from ignite_dist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self


class Place(NamedTuple):
    """The place of one rank: an identifier of its node, and its local rank, or None if it is not known."""

    node: Hashable
    local_rank: int | None


class Topology(NamedTuple):
    """The place of this rank in the job. Nodes may have different numbers of processes."""

    local_rank: int
    nproc_per_node: int
    nnodes: int
    node_rank: int

    @classmethod
    def from_environment(cls, environment: Environment) -> Self | None:
        """The topology; None if the launcher's variables do not determine it."""
        world_size, nnodes = environment.world_size, environment.nnodes
        local_rank, nproc_per_node = environment.local_rank, environment.nproc_per_node
        node_rank = environment.node_rank
        if nproc_per_node == world_size and nnodes is None:
            nnodes = 1
        if nnodes == 1:
            nproc_per_node = world_size if nproc_per_node is None else nproc_per_node
            node_rank = 0 if node_rank is None else node_rank
        if nnodes == world_size:  # one process on each node: without a node rank, nodes are numbered by rank
            nproc_per_node = 1 if nproc_per_node is None else nproc_per_node
            local_rank = 0 if local_rank is None else local_rank
            node_rank = environment.rank if node_rank is None else node_rank
        if local_rank is None or nproc_per_node is None or nnodes is None or node_rank is None:
            return None
        return cls(local_rank, nproc_per_node, nnodes, node_rank)

    @classmethod
    def from_places(cls, rank: int, places: Sequence[Place]) -> tuple[Self, dict[int, int]]:
        """Determine the topology from the places of all ranks, in rank order. Takes linear time.

        If a host has the same local rank twice, two launches share the host. They count as two nodes.

        Returns:
            The topology of ``rank``, and the global ranks on its node by local rank.
        """
        nodes: list[list[int]] = []
        current: dict[Hashable, int] = {}
        taken: set[tuple[int, int]] = set()
        node_of_rank = 0
        for other, (name, local_rank) in enumerate(places):
            node = current.get(name)
            if node is None or (local_rank is not None and (node, local_rank) in taken):
                node = current[name] = len(nodes)
                nodes.append([])
            if local_rank is not None:
                taken.add((node, local_rank))
            nodes[node].append(other)
            if other == rank:
                node_of_rank = node
        by_rank = {}
        for position, other in enumerate(nodes[node_of_rank]):
            known = places[other].local_rank
            by_rank[other] = position if known is None else known
        topology = cls(by_rank[rank], len(by_rank), len(nodes), node_of_rank)
        return topology, {local_rank: other for other, local_rank in by_rank.items()}


# --- places as bytes -----------------------------------------------------------------------------------

# A place has three fields: a magic number with the format's version, the local rank, and a digest of the
# node's name. The size is fixed, so one collective is enough. It is small: every rank receives all places.
# With 100,000 nodes, two names have the same digest in fewer than one of 10^9 jobs.
_PLACE = struct.Struct("<4sq8s")
_MAGIC = b"idp1"
_UNKNOWN = -1
PLACE_BYTES = _PLACE.size


def encode_place(node: str, local_rank: int | None) -> bytearray:
    """Encode the place of this rank, for the other ranks."""
    digest = hashlib.blake2b(node.encode(), digest_size=8).digest()
    return bytearray(_PLACE.pack(_MAGIC, _UNKNOWN if local_rank is None else local_rank, digest))


def decode_places(gathered: bytearray) -> list[Place]:
    """Decode the places of all ranks, in rank order.

    Raises:
        CollectiveMismatchError: a rank sent bytes that are not a place.
    """
    places = []
    for rank, (magic, local_rank, digest) in enumerate(_PLACE.iter_unpack(gathered)):
        if magic != _MAGIC:
            raise CollectiveMismatchError(
                f"Rank {rank} made a different call while this rank gathered the places of all ranks. The "
                "first call of a topology getter (get_nnodes(), ...) is a collective of all ranks."
            )
        places.append(Place(digest, None if local_rank == _UNKNOWN else local_rank))
    return places
