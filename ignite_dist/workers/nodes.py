"""How the launchers of several machines start one job together, and end it together.

The launcher of node 0 listens at the main address. Each of the others connects to it and says how many
processes it starts; all are told who is there, so nodes may differ in size. The connections stay: what a
launcher hears of a failure it tells the others, through node 0, so that each of them raises the error of the
rank that failed first. A launcher that goes without a word was ended, or has lost its machine. Messages are
lines of JSON; nothing that is received can run code.
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
# How long a launcher that has connected may take to say who it is: a port scanner never does.
_SECONDS_TO_GREET = 5.0


# --- meeting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """What a launcher says of itself. All have to want a job of the same size and backend."""

    node_rank: int
    nnodes: int
    nproc_per_node: int
    backend: str
    host: str

    def objection(self, other: Hello, taken: Mapping[int, str]) -> str | None:
        """Why the launcher that said ``other`` cannot belong to the job of this one."""
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
    """Wait until the launchers of all nodes are at ``address`` and ``port``.

    Args:
        mine: what this launcher says of itself.
        address: of node 0.
        port: likewise.
        timeout: how long to wait.
        serve: gives node 0 the store where all ranks meet at an address, and its port.

    Raises:
        LaunchError: not all have come in time, or they do not want the same job. Says who, and what.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if mine.node_rank > 0:
        still = f"Node {mine.node_rank} ({mine.host}) is still waiting for node 0 at {address}:{port}."
        with connections.wait_told(lambda: still):
            return _join(mine, address, port, deadline)
    # A host's own name is a loopback address in many an /etc/hosts; nobody knows then how the others see it.
    try:
        listener = connections.listen("" if network_interfaces.is_own_name(address) else address, port)
    except OSError as error:
        raise LaunchError(
            f"Node 0 cannot wait for the others at {address}:{port}: {error.strerror or error}. master_addr "
            "is an address of the machine with node_rank=0, and master_port a free port there; the other "
            "machines have other node_ranks."
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
    """Wait for the launchers of the other nodes, and add them to the ``guests``."""
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
        _forget_gone(guests)  # it may be one of them, started again
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
    """Keep those of the ``guests`` that are still there."""
    for rank, (_, link) in list(guests.items()):
        if connection.wait([link.sock], 0):  # they have nothing to say: it is the end of the connection
            guests.pop(rank)[1].sock.close()


def _hello_from(link: Link) -> Hello | None:
    """What the launcher at the other end says of itself; None if it is none."""
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
        f"{'Nodes' if len(missing) > 1 else 'Node'} {', '.join(missing)} of {mine.nnodes} did not come in "
        f"time; {', '.join([f'node 0 ({mine.host})', *come])} did. Each machine makes the call, with the "
        "same nnodes, master_addr and master_port, and with a node_rank of its own."
    )


def _welcome(
    mine: Hello,
    listener: socket.socket,
    guests: Mapping[int, tuple[Hello, Link]],
    serve: Callable[[str], tuple[object, int]],
) -> Nodes:
    """Tell all who is there, and where their ranks meet."""
    ends = [link.sock.getsockname()[0] for _, link in guests.values()]
    # A launcher on this very machine may have come by an address that is of no use to the others.
    address = next((end for end in ends if not network_interfaces.is_loopback(end)), ends[0])
    serving, port = serve(address)
    nodes = [Node(0, mine.host, address, mine.nproc_per_node)]
    for rank, (hello, link) in sorted(guests.items()):
        nodes.append(Node(rank, hello.host, link.sock.getpeername()[0], hello.nproc_per_node))
    for _, link in guests.values():
        link.send(nodes=nodes, port=port)
    return Nodes(nodes, 0, port, {rank: link for rank, (_, link) in guests.items()}, listener, serving)


def _join(mine: Hello, address: str, port: int, deadline: float) -> Nodes:
    """Go to node 0 until it answers."""
    why: object = "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((address, port), left))
        except OSError as error:
            why = error  # it has not begun to listen
            time.sleep(min(_SECONDS_BETWEEN_TRIES, left))
            continue
        link.send(**asdict(mine))
        try:
            answer, *news = link.receive_some(deadline)
            if not answer.keys() & {"refused", "nodes"}:
                raise ValueError("the peer is not an ignite_dist launcher")
        except (OSError, ValueError) as error:
            link.sock.close()
            # Unless it waits for others, it was the launcher of the job before, on its way out.
            why = "it waits for others" if isinstance(error, TimeoutError) else error
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
        "The machine with node_rank=0 makes the call too, and listens at master_addr and master_port."
    )


# --- while the job goes on -------------------------------------------------------------------------------


@dataclass
class Nodes:
    """The machines of a job, as the launcher of one of them sees them.

    Attributes:
        nodes: all of them, by their ranks.
        rank: this one's.
        port: where node 0 serves the store for the ranks, at its address.
    """

    nodes: list[Node]
    rank: int
    port: int
    _links: dict[int, Link]  # node 0's to all others, those of the others to node 0
    _listener: socket.socket | None = None
    _serving: object = None
    _told: set[int] = field(default_factory=set)  # ranks whose failures the others know
    _done: set[int] = field(default_factory=set)  # nodes that have no more to say
    _failed: list[Failed] = field(default_factory=list)
    _lost: list[tuple[Node, str]] = field(default_factory=list)

    def environs(self) -> list[dict[str, str]]:
        """The variables of the ranks on this node that say which they are."""
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
        """What becomes ready for :func:`multiprocessing.connection.wait` when another launcher has news."""
        return [*self._links.values(), *([self._listener] if self._listener else [])]

    def are_awaited(self) -> bool:
        """Whether another launcher may still have something to say of its workers."""
        return any(node.rank not in self._done for node in self.nodes if node.rank != self.rank)

    def read(self, ready: Collection[Any]) -> None:
        """Take the news of those that are ready."""
        for rank, link in list(self._links.items()):
            if link not in ready:
                continue
            try:
                messages = link.receive()
            except (OSError, ValueError) as error:
                link.sock.close()
                del self._links[rank]
                # Through node 0 goes what others have to say, too.
                is_cut_off = rank == 0 and self.are_awaited() and not self.have_failed()
                if rank not in self._done or is_cut_off:
                    self._note({"node": rank, "lost": error.args[-1]}, rank)
                continue
            for message in messages:
                self._note(message, rank)
        if self._listener in ready:
            self._refuse_latecomer()

    def tell(self, failed: Sequence[Failed], *, is_done: bool) -> None:
        """Tell the others what has failed here, and at the end that there is no more to come."""
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
        """Whether the job cannot succeed any more, by what is known of the other nodes."""
        return bool(self._lost) or any(not one.failure.is_exit_0 for one in self._failed)

    def is_one_lost(self) -> bool:
        """Whether a machine, or its launcher, has gone without a word."""
        return bool(self._lost)

    def error_of(self, failed: Sequence[Failed], about_sigkill: str) -> RankFailedError:
        """The error of the job: about the rank that failed first, or the machine that was lost before it."""
        # Who left by sys.exit(0) has neither failed nor brought a machine down.
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
        """End the connections."""
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
            link.send(refused=f"The job has all its nodes, and goes on without this one: {hosts}.")
            link.sock.close()


def assumed(node_rank: int, nnodes: int, nproc_per_node: int) -> Nodes:
    """The machines of a job whose launchers do not meet: all of one size, and nobody says anything."""
    everybody = [Node(rank, "", "", nproc_per_node) for rank in range(nnodes)]
    return Nodes(everybody, node_rank, 0, {}, _done=set(range(nnodes)))


ALONE = assumed(0, 1, 1)
