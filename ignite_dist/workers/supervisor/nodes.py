"""How the launchers of several nodes start one job together, and end it together.

The launcher of node 0 listens at the main address. Every other launcher connects to node 0 and sends its
number of processes. Node 0 answers with the list of all nodes, so nodes may differ in size. The connections
stay open. Each launcher reports failures to the others through node 0, and all launchers raise the error of
the rank that failed first. A connection that closes before the job's end means that a launcher was killed, or
that a machine was lost. With ``max_restarts``, the connections stay open after a failure, and node 0 decides
on a restart. Messages are lines of JSON; received data never run as code.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from ignite_dist.environments.rendezvous import connections, network_interfaces
from ignite_dist.errors import LaunchError, RankFailedError
from ignite_dist.workers.failures import FailedRank, Failure, error_of, is_cause_known, lines_after
from ignite_dist.workers.supervisor.node_links import Hello, Link, Node

_logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
# Time limit for a new peer to send its Hello. A port scanner never sends one.
_HELLO_SECONDS = 5.0
# Time limit for the launchers of the other nodes to end their workers before a new attempt.
_END_SECONDS = 60.0


# --- meeting -------------------------------------------------------------------------------------------


def meet(
    own: Hello, address: str, port: int, timeout: timedelta, serve: Callable[[str], tuple[object, int]]
) -> Nodes:
    """Wait until the launchers of all nodes are connected.

    Args:
        own: the first message of this launcher.
        address: address of node 0.
        port: port of node 0.
        timeout: how long to wait.
        serve: starts the store of all ranks at an address. Called on node 0; returns the store and its port.

    Raises:
        LaunchError: a node is missing at the timeout, or two launchers disagree about the job.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if own.node_rank > 0:
        message = f"Node {own.node_rank} ({own.host}) is still waiting for node 0 at {address}:{port}."
        with connections.log_long_wait(lambda: message):
            return _join(own, address, port, deadline)
    # /etc/hosts often maps the host's own name to a loopback address, so listen on all interfaces for it.
    try:
        listener = connections.listen("" if network_interfaces.is_own_name(address) else address, port)
    except OSError as error:
        raise LaunchError(
            f"Node 0 cannot wait for the others at {address}:{port}: {error.strerror or error}. master_addr "
            "must be an address of the machine with node_rank=0, and master_port a free port there. Every "
            "other machine needs a node_rank of its own."
        ) from None
    peers: dict[int, tuple[Hello, Link]] = {}
    try:
        with connections.log_long_wait(lambda: _waiting_message(own, peers, address, port)):
            _accept_peers(own, listener, peers, deadline)
        return _welcome(own, listener, peers, serve)
    except BaseException as error:
        for _, link in peers.values():
            link.send(refused=str(error) if isinstance(error, LaunchError) else f"Node 0 raised {error!r}.")
            link.sock.close()
        listener.close()
        raise


def _accept_peers(
    own: Hello, listener: socket.socket, peers: dict[int, tuple[Hello, Link]], deadline: float
) -> None:
    """Wait for the launchers of the other nodes, and add them to ``peers``."""
    while len(peers) < own.nnodes - 1:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            link = Link(listener.accept()[0])
        except TimeoutError:
            raise LaunchError(_missing_message(own, peers)) from None
        hello = _hello_from(link)
        if hello is None:
            link.sock.close()
            continue
        _remove_disconnected(peers)  # the new peer may be a restarted launcher
        taken = {0: own.host, **{rank: peer.host for rank, (peer, _) in peers.items()}}
        objection = own.objection(hello, taken)
        if objection is not None:
            message = f"The launchers do not agree: {objection}."
            link.send(refused=message)
            link.sock.close()
            raise LaunchError(message)
        peers[hello.node_rank] = hello, link
        _remove_disconnected(peers)


def _remove_disconnected(peers: dict[int, tuple[Hello, Link]]) -> None:
    """Remove the ``peers`` whose connections are closed."""
    for rank, (_, link) in list(peers.items()):
        if connection.wait([link.sock], 0):  # peers send no data yet: a readable socket is closed
            peers.pop(rank)[1].sock.close()


def _hello_from(link: Link) -> Hello | None:
    """The Hello of a new peer; None if the peer is not an ignite_dist launcher."""
    try:
        (message,) = link.receive(_HELLO_SECONDS)
        hello = Hello(**message)
    except (OSError, ValueError, TypeError):
        return None
    numbers = (hello.node_rank, hello.nnodes, hello.nproc_per_node)
    return hello if all(isinstance(number, int) for number in numbers) else None


def _waiting_message(own: Hello, peers: Mapping[int, tuple[Hello, Link]], address: str, port: int) -> str:
    missing = ", ".join(str(rank) for rank in range(1, own.nnodes) if rank not in peers)
    return f"Node 0 ({own.host}) is still waiting at {address}:{port} for node {missing} of {own.nnodes}."


def _missing_message(own: Hello, peers: Mapping[int, tuple[Hello, Link]]) -> str:
    connected = [f"node {rank} ({hello.host})" for rank, (hello, _) in sorted(peers.items())]
    missing = [str(rank) for rank in range(1, own.nnodes) if rank not in peers]
    return (
        f"{'Nodes' if len(missing) > 1 else 'Node'} {', '.join(missing)} of {own.nnodes} did not connect in "
        f"time. Connected: {', '.join([f'node 0 ({own.host})', *connected])}. Every machine must make the "
        "call with the same nnodes, master_addr and master_port, and with its own node_rank."
    )


def _welcome(
    own: Hello,
    listener: socket.socket,
    peers: Mapping[int, tuple[Hello, Link]],
    serve: Callable[[str], tuple[object, int]],
) -> Nodes:
    """Start the store, and send all launchers the list of nodes and the store's port."""
    ends = [link.sock.getsockname()[0] for _, link in peers.values()]
    # A launcher on this machine may have connected to a loopback address, useless to other machines.
    address = next((end for end in ends if not network_interfaces.is_loopback(end)), ends[0])
    store, port = serve(address)
    nodes = [Node(0, own.host, address, own.nproc_per_node, own.job_id)]
    for rank, (hello, link) in sorted(peers.items()):
        nodes.append(Node(rank, hello.host, link.sock.getpeername()[0], hello.nproc_per_node))
    for _, link in peers.values():
        link.send(nodes=nodes, port=port)
    links = {rank: link for rank, (_, link) in peers.items()}
    return Nodes(nodes, 0, port, links, listener, store, own.max_restarts)


def _join(own: Hello, address: str, port: int, deadline: float) -> Nodes:
    """Connect to node 0. Retry until node 0 answers."""
    reason: object = "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((address, port), left))
        except OSError as error:
            reason = error  # node 0 does not listen yet
            time.sleep(min(_RETRY_SECONDS, left))
            continue
        link.send(**asdict(own))
        try:
            answer, *later_messages = link.receive_some(deadline)
            if not answer.keys() & {"refused", "nodes"}:
                raise ValueError("the peer is not an ignite_dist launcher")
        except (OSError, ValueError) as error:
            link.sock.close()
            # TimeoutError: node 0 waits for other nodes. Other errors: the peer may be of an earlier job.
            reason = "node 0 waits for other nodes" if isinstance(error, TimeoutError) else error
            time.sleep(_RETRY_SECONDS)
            continue
        if "refused" in answer:
            link.sock.close()
            raise LaunchError(answer["refused"])
        nodes = [Node(*node) for node in answer["nodes"]]
        job = Nodes(nodes, own.node_rank, answer["port"], {0: link}, restarts_left=own.max_restarts)
        for message in later_messages:
            job._record(message, 0)
        return job
    raise LaunchError(
        f"Node 0 did not answer node {own.node_rank} ({own.host}) at {address}:{port} in time: {reason}. "
        "The machine with node_rank=0 must make the call too. Node 0 listens at master_addr and master_port."
    )


# --- while the job runs -------------------------------------------------------------------------------


@dataclass
class Nodes:
    """The nodes of a job, and this launcher's connections to their launchers.

    Attributes:
        nodes: all nodes, by node rank.
        rank: node rank of this launcher.
        port: port of the store that node 0 serves for all ranks.
        restarts_left: number of further attempts. The connections stay open after a failure unless it is 0.
    """

    nodes: list[Node]
    rank: int
    port: int
    _links: dict[int, Link]  # by node rank; a node other than 0 has one link, to node 0
    _listener: socket.socket | None = None
    _store: object = None
    restarts_left: int = 0
    _reported: set[int] = field(default_factory=set)  # ranks whose failure was sent to the other nodes
    _done: set[int] = field(default_factory=set)  # nodes that send no more messages
    _failed: list[FailedRank] = field(default_factory=list)
    _lost: list[tuple[Node, str]] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)  # nodes that wait for the decision on a new attempt
    _next: Nodes | None = None  # of the new attempt

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

    def has_unfinished_peers(self) -> bool:
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
                is_cut_off = rank == 0 and self.has_unfinished_peers() and not self.has_failure()
                if rank not in self._done or is_cut_off:
                    self._record({"node": rank, "lost": error.args[-1]}, rank)
                continue
            for message in messages:
                self._record(message, rank)
        if self._listener in ready:
            self._refuse_latecomer()

    def report(self, failed: Sequence[FailedRank], *, is_done: bool) -> None:
        """Report new failures to the other nodes, and with ``is_done`` the end of this node's workers."""
        for failed_rank in failed:
            if failed_rank.rank not in self._reported:
                self._reported.add(failed_rank.rank)
                values = {
                    **failed_rank._asdict(),
                    "failure": asdict(replace(failed_rank.failure, exception=None)),
                }
                self._send({"node": self.rank, "failed": values})
        if is_done and self.rank not in self._done:
            self._done.add(self.rank)
            self._send({"node": self.rank, "done": True})

    def failed_ranks(self) -> list[FailedRank]:
        """The failed ranks of the other nodes."""
        return self._failed

    def has_failure(self) -> bool:
        """True if a rank on another node has failed, or a node is lost."""
        return bool(self._lost) or any(not rank.failure.is_exit_0 for rank in self._failed)

    def has_lost_node(self) -> bool:
        """True if a node's connection closed before the node reported its end."""
        return bool(self._lost)

    def error_of(self, failed: Sequence[FailedRank]) -> RankFailedError:
        """The error of the job: about the root cause if it was reported, else about a lost node."""
        # A rank that called sys.exit(0) has not failed.
        errors = [rank for rank in failed if not rank.failure.is_exit_0]
        if not self._lost or is_cause_known(errors):
            return error_of(failed)
        node, reason = self._lost[0]
        first = sum(other.nproc_per_node for other in self.nodes[: node.rank])
        last = first + node.nproc_per_node - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        message = f"N{str(node)[1:]} with {ranks} cannot be reached: {reason}.{lines_after(errors)}"
        error = RankFailedError(first, "HostLostError", "", message, node.host)
        error.is_permanent = True  # nobody starts the workers on that node again
        return error

    def next_attempt(self, is_wanted: bool, serve: Callable[[str], tuple[object, int]]) -> Nodes | None:
        """The nodes of a new attempt after a failure; None if there is none, and the connections are closed.

        Each launcher calls this method after the end of its workers. Node 0 decides by its own ``is_wanted``,
        after the workers of all nodes have ended, so ranks of two attempts never meet. ``serve``: see `meet`.
        """
        peers = set(range(1, len(self.nodes))) if self.rank == 0 else {0}
        try:
            if self.rank > 0:
                self._send({"node": self.rank, "ended": True})
                self._read_until(lambda: self._next is not None, peers, 2 * _END_SECONDS)
            elif is_wanted and self._read_until(lambda: self._ended == peers, peers, _END_SECONDS):
                store, port = serve(self.nodes[0].address)
                self._send({"node": 0, "next": port})
                self._start_next(port, store)
            if is_wanted and self._next is None:
                missing = [self.nodes[rank] for rank in peers - self._links.keys() or peers - self._ended]
                _logger.warning("No restart: %s did not agree or is lost.", ", ".join(map(str, missing)))
        finally:
            if self._next is None:
                self.close()
        return self._next

    def _read_until(self, is_done: Callable[[], bool], peers: set[int], seconds: float) -> bool:
        """Read messages of ``peers``. Returns False at the time limit, or if a connection is closed."""
        deadline = time.monotonic() + seconds
        while self._links.keys() == peers and not is_done():
            ready = connection.wait(self.waited_for(), max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self.read(ready)
        return self._links.keys() == peers

    def _start_next(self, port: int, store: object = None) -> None:
        """Hand the connections over to the nodes of the next attempt."""
        links, listener, left = self._links, self._listener, self.restarts_left - 1
        self._links, self._listener, self._store = {}, None, None
        self._next = Nodes(self.nodes, self.rank, port, links, listener, store, left)

    def close(self) -> None:
        """Close the connections."""
        if self._next is not None:
            self._next.close()
        while self._links:
            self._links.popitem()[1].sock.close()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None

    def _record(self, message: Mapping[str, Any], source: int) -> None:
        if self._next is not None:
            self._next._record(message, source)
            return
        node = message["node"]
        if "failed" in message:
            values = message["failed"]
            self._failed.append(FailedRank(**{**values, "failure": Failure(**values["failure"])}))
        elif "ended" in message:
            self._ended.add(node)
        elif "next" in message:
            self._start_next(message["next"])
        else:
            self._done.add(node)
            if "lost" in message:
                self._lost.append((self.nodes[node], message["lost"]))
        if self.rank == 0:
            self._send(message, exclude=source)

    def _send(self, message: Mapping[str, Any], exclude: int | None = None) -> None:
        for rank in self._links.keys() - {exclude}:
            self._links[rank].send(**message)

    def _refuse_latecomer(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            self._listener.settimeout(0)
            link = Link(self._listener.accept()[0])
            hosts = ", ".join(map(str, self.nodes))
            link.send(refused=f"The job has all its nodes already, so this node cannot join: {hosts}.")
            link.sock.close()


def assumed_nodes(node_rank: int, nnodes: int, nproc_per_node: int) -> Nodes:
    """The nodes of a job whose launchers do not communicate. All nodes have the same size."""
    nodes = [Node(rank, "", "", nproc_per_node) for rank in range(nnodes)]
    return Nodes(nodes, node_rank, 0, {}, _done=set(range(nnodes)))


ALONE = assumed_nodes(0, 1, 1)
