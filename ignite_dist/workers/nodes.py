"""How the launchers of several nodes start one job together, and end it together.

The launcher of node 0 listens at the main address. Every other launcher connects to node 0 and sends its
number of processes. Node 0 answers with the list of all nodes, so nodes may differ in size. The connections
stay open. Each launcher reports failures to the others through node 0, and all launchers raise the error of
the rank that failed first. A connection that closes before the job's end means that a launcher was killed, or
that a machine was lost. Messages are lines of JSON; received data never run as code.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from ignite_dist.errors import LaunchError, RankFailedError
from ignite_dist.rendezvous import connections, network_interfaces
from ignite_dist.workers.failures import Failed, Failure, error_of, in_a_line, is_cause_known
from ignite_dist.workers.node_links import Link, Node

__all__ = [
    "ALONE",
    "Hello",
    "Nodes",
    "assumed",
    "meet",
]

_SECONDS_BETWEEN_TRIES = 0.1
# Time limit for a new peer to send its Hello. A port scanner never sends one.
_SECONDS_TO_GREET = 5.0


# --- meeting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First message of a launcher. ``nnodes`` and ``backend`` must be equal on all nodes."""

    node_rank: int
    nnodes: int
    nproc_per_node: int
    backend: str
    host: str

    def objection(self, other: Hello, taken: Mapping[int, str]) -> str | None:
        """Why the launcher that sent ``other`` cannot join this launcher's job; None if it can."""
        for name in ("nnodes", "backend"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name} is {here!r} on {self.host} (node {self.node_rank}), {there!r} on {other.host}"
        if not 0 <= other.node_rank < self.nnodes:
            return f"node_rank={other.node_rank} on {other.host} is not in [0, {self.nnodes})"
        if other.node_rank in taken:
            return f"node_rank={other.node_rank} on both {taken[other.node_rank]} and {other.host}"
        return None


def meet(
    mine: Hello, address: str, port: int, timeout: timedelta, serve: Callable[[str], tuple[object, int]]
) -> Nodes:
    """Wait until the launchers of all nodes are connected.

    Args:
        mine: the first message of this launcher.
        address: address of node 0.
        port: port of node 0.
        timeout: how long to wait.
        serve: starts the store of all ranks at an address. Called on node 0; returns the store and its port.

    Raises:
        LaunchError: a node is missing at the timeout, or two launchers disagree about the job.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if mine.node_rank > 0:
        still = f"Node {mine.node_rank} ({mine.host}) is still waiting for node 0 at {address}:{port}."
        with connections.wait_told(lambda: still):
            return _join(mine, address, port, deadline)
    # /etc/hosts often maps the host's own name to a loopback address. Then listen on all interfaces.
    try:
        listener = connections.listen("" if network_interfaces.is_own_name(address) else address, port)
    except OSError as error:
        raise LaunchError(
            f"Node 0 cannot wait for the others at {address}:{port}: {error.strerror or error}. master_addr "
            "must be an address of the machine with node_rank=0, and master_port a free port there. Every "
            "other machine needs a node_rank of its own."
        ) from error
    guests: dict[int, tuple[Hello, Link]] = {}
    try:
        with connections.wait_told(lambda: _who_waits_for_whom(mine, guests, address, port)):
            _receive_all(mine, listener, guests, deadline)
        return _welcome(mine, listener, guests, serve)
    except BaseException as error:
        for _, link in guests.values():
            link.send(refused=str(error) if isinstance(error, LaunchError) else f"Node 0 raised {error!r}.")
            link.sock.close()
        listener.close()
        raise


def _receive_all(
    mine: Hello, listener: socket.socket, guests: dict[int, tuple[Hello, Link]], deadline: float
) -> None:
    """Wait for the launchers of the other nodes, and add them to ``guests``."""
    while len(guests) < mine.nnodes - 1:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            link = Link(listener.accept()[0])
        except TimeoutError:
            raise LaunchError(_who_is_missing(mine, guests)) from None
        hello = _hello_from(link)
        if hello is None:
            link.sock.close()
            continue
        _forget_gone(guests)  # the new peer may be a restarted guest
        taken = {0: mine.host, **{rank: guest.host for rank, (guest, _) in guests.items()}}
        objection = mine.objection(hello, taken)
        if objection is not None:
            message = f"The launchers do not agree: {objection}."
            link.send(refused=message)
            link.sock.close()
            raise LaunchError(message)
        guests[hello.node_rank] = hello, link
        _forget_gone(guests)


def _forget_gone(guests: dict[int, tuple[Hello, Link]]) -> None:
    """Remove the ``guests`` whose connection is closed."""
    for rank, (_, link) in list(guests.items()):
        if connection.wait([link.sock], 0):  # guests send nothing yet: a readable socket is a closed one
            guests.pop(rank)[1].sock.close()


def _hello_from(link: Link) -> Hello | None:
    """The Hello of a new peer; None if the peer is not an ignite_dist launcher."""
    try:
        (message,) = link.receive(_SECONDS_TO_GREET)
        hello = Hello(**message)
    except (OSError, ValueError, TypeError):
        return None
    numbers = (hello.node_rank, hello.nnodes, hello.nproc_per_node)
    return hello if all(isinstance(number, int) for number in numbers) else None


def _who_waits_for_whom(
    mine: Hello, guests: Mapping[int, tuple[Hello, Link]], address: str, port: int
) -> str:
    missing = ", ".join(str(rank) for rank in range(1, mine.nnodes) if rank not in guests)
    return f"Node 0 ({mine.host}) is still waiting at {address}:{port} for node {missing} of {mine.nnodes}."


def _who_is_missing(mine: Hello, guests: Mapping[int, tuple[Hello, Link]]) -> str:
    come = [f"node {rank} ({hello.host})" for rank, (hello, _) in sorted(guests.items())]
    missing = [str(rank) for rank in range(1, mine.nnodes) if rank not in guests]
    return (
        f"{'Nodes' if len(missing) > 1 else 'Node'} {', '.join(missing)} of {mine.nnodes} did not connect in "
        f"time; {', '.join([f'node 0 ({mine.host})', *come])} did. Every machine must make the call "
        "with the same nnodes, master_addr and master_port, and a node_rank of its own."
    )


def _welcome(
    mine: Hello,
    listener: socket.socket,
    guests: Mapping[int, tuple[Hello, Link]],
    serve: Callable[[str], tuple[object, int]],
) -> Nodes:
    """Start the store, and send all launchers the list of nodes and the store's port."""
    ends = [link.sock.getsockname()[0] for _, link in guests.values()]
    # A launcher on this machine may have connected to a loopback address, useless to other machines.
    address = next((end for end in ends if not network_interfaces.is_loopback(end)), ends[0])
    serving, port = serve(address)
    nodes = [Node(0, mine.host, address, mine.nproc_per_node)]
    for rank, (hello, link) in sorted(guests.items()):
        nodes.append(Node(rank, hello.host, link.sock.getpeername()[0], hello.nproc_per_node))
    for _, link in guests.values():
        link.send(nodes=nodes, port=port)
    return Nodes(nodes, 0, port, {rank: link for rank, (_, link) in guests.items()}, listener, serving)


def _join(mine: Hello, address: str, port: int, deadline: float) -> Nodes:
    """Connect to node 0, and retry until it answers."""
    why: object = "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((address, port), left))
        except OSError as error:
            why = error  # node 0 does not listen yet
            time.sleep(min(_SECONDS_BETWEEN_TRIES, left))
            continue
        link.send(**asdict(mine))
        try:
            answer, *news = link.receive_some(deadline)
            if not answer.keys() & {"refused", "nodes"}:
                raise ValueError("the peer is not an ignite_dist launcher")
        except (OSError, ValueError) as error:
            link.sock.close()
            # TimeoutError: node 0 waits for other nodes. Other errors: perhaps an earlier job's launcher.
            why = "node 0 waits for other nodes" if isinstance(error, TimeoutError) else error
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        if "refused" in answer:
            link.sock.close()
            raise LaunchError(answer["refused"])
        job = Nodes([Node(*node) for node in answer["nodes"]], mine.node_rank, answer["port"], {0: link})
        for message in news:
            job._note(message, 0)
        return job
    raise LaunchError(
        f"Node 0 did not answer node {mine.node_rank} ({mine.host}) at {address}:{port} in time: {why}. "
        "The machine with node_rank=0 must make the call too; it listens at master_addr and master_port."
    )


# --- while the job goes on -------------------------------------------------------------------------------


@dataclass
class Nodes:
    """The nodes of a job, and this launcher's connections to their launchers.

    Attributes:
        nodes: all nodes, by node rank.
        rank: node rank of this launcher.
        port: port of the store that node 0 serves for all ranks.
    """

    nodes: list[Node]
    rank: int
    port: int
    _links: dict[int, Link]  # by node rank; a node other than 0 has one link, to node 0
    _listener: socket.socket | None = None
    _serving: object = None
    _told: set[int] = field(default_factory=set)  # ranks whose failure was sent to the other nodes
    _done: set[int] = field(default_factory=set)  # nodes that send no more messages
    _failed: list[Failed] = field(default_factory=list)
    _lost: list[tuple[Node, str]] = field(default_factory=list)

    def environs(self) -> list[dict[str, str]]:
        """The environment variables of each rank on this node, by local rank."""
        sizes = [node.nproc_per_node for node in self.nodes]
        first = sum(sizes[: self.rank])
        return [
            {
                "RANK": str(first + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(sum(sizes)),
                "LOCAL_WORLD_SIZE": str(sizes[self.rank]),
                "GROUP_WORLD_SIZE": str(len(sizes)),
                "GROUP_RANK": str(self.rank),
            }
            for local_rank in range(sizes[self.rank])
        ]

    def waited_for(self) -> list[Any]:
        """Objects that become ready (see ``multiprocessing.connection.wait``) when a launcher sends data."""
        return [*self._links.values(), *([self._listener] if self._listener else [])]

    def are_awaited(self) -> bool:
        """True if another launcher may still report failures of its workers."""
        return any(node.rank not in self._done for node in self.nodes if node.rank != self.rank)

    def read(self, ready: Collection[Any]) -> None:
        """Read the messages of the connections in ``ready``."""
        for rank, link in list(self._links.items()):
            if link not in ready:
                continue
            try:
                messages = link.receive()
            except (OSError, ValueError) as error:
                link.sock.close()
                del self._links[rank]
                # The reports of all other nodes pass through node 0.
                is_cut_off = rank == 0 and self.are_awaited() and not self.have_failed()
                if rank not in self._done or is_cut_off:
                    self._note({"node": rank, "lost": error.args[-1]}, rank)
                continue
            for message in messages:
                self._note(message, rank)
        if self._listener in ready:
            self._refuse_latecomer()

    def tell(self, failed: Sequence[Failed], *, is_done: bool) -> None:
        """Report new failures to the other nodes, and with ``is_done`` the end of this node's workers."""
        for one in failed:
            if one.rank not in self._told:
                self._told.add(one.rank)
                told = {**one._asdict(), "failure": asdict(one.failure)}
                self._send({"node": self.rank, "failed": told})
        if is_done and self.rank not in self._done:
            self._done.add(self.rank)
            self._send({"node": self.rank, "done": True})

    def failed(self) -> list[Failed]:
        """The failures on the other nodes."""
        return self._failed

    def have_failed(self) -> bool:
        """True if a rank on another node has failed, or a node is lost."""
        return bool(self._lost) or any(not one.failure.is_exit_0 for one in self._failed)

    def is_one_lost(self) -> bool:
        """True if a node's connection closed before the node reported its end."""
        return bool(self._lost)

    def error_of(self, failed: Sequence[Failed], about_sigkill: str) -> RankFailedError:
        """The error of the job: about the root cause if it was reported, else about the lost node."""
        # A rank that called sys.exit(0) has not failed.
        real = [one for one in failed if not one.failure.is_exit_0]
        if not self._lost or is_cause_known(real):
            return error_of(failed, about_sigkill)
        node, why = self._lost[0]
        first = sum(other.nproc_per_node for other in self.nodes[: node.rank])
        last = first + node.nproc_per_node - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        after = "".join(f"\nRank {one.rank} failed after it: {in_a_line(one.failure)}" for one in real)
        message = f"N{str(node)[1:]} with {ranks} cannot be reached: {why}.{after}"
        return RankFailedError(first, "HostLostError", "", message, node.host)

    def leave(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.sock.close()
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._serving = None

    def _note(self, message: Mapping[str, Any], source: int) -> None:
        node = message["node"]
        if "failed" in message:
            told = message["failed"]
            self._failed.append(Failed(**{**told, "failure": Failure(**told["failure"])}))
        elif "lost" in message:
            self._lost.append((self.nodes[node], message["lost"]))
            self._done.add(node)
        else:
            self._done.add(node)
        if self.rank == 0:
            self._send(message, but=source)

    def _send(self, message: Mapping[str, Any], but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but:
                link.send(**message)

    def _refuse_latecomer(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            self._listener.settimeout(0)
            link = Link(self._listener.accept()[0])
            hosts = ", ".join(map(str, self.nodes))
            link.send(refused=f"The job has all its nodes already, so this node cannot join: {hosts}.")
            link.sock.close()


def assumed(node_rank: int, nnodes: int, nproc_per_node: int) -> Nodes:
    """The nodes of a job whose launchers do not communicate. All nodes have the same size."""
    everybody = [Node(rank, "", "", nproc_per_node) for rank in range(nnodes)]
    return Nodes(everybody, node_rank, 0, {}, _done=set(range(nnodes)))


ALONE = assumed(0, 1, 1)
