"""Local ranks and the nodes of a job: from variables, host names and exchanges."""

from __future__ import annotations

import io
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import helpers
import ignite_dist as idist
from contexts import SHORT, by_test_rank, messages_of, my_rank, topology
from ignite_dist.comp_models.topology import PLACE_BYTES, Place, Topology, decode_places, encode_place
from ignite_dist.context import live
from ignite_dist.environments import Environment

# --- local rank and topology -------------------------------------------------------------------------


def _local_rank(
    method: str, initialize: bool, before: int | None, after: int | None
) -> tuple[Any, list[str]]:
    if before is not None:
        idist.set_local_rank(before)
    kwargs: dict[str, Any] = {"init_method": method, "rank": my_rank(), "world_size": 2, "timeout": SHORT}
    if initialize:
        idist.initialize("gloo", **kwargs)
    else:
        dist.init_process_group("gloo", **kwargs)
    if after is not None:
        idist.set_local_rank(after)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [idist.get_local_rank(), idist.get_local_rank()]
        found.append(topology())
    idist.finalize()
    return found, messages_of(caught)


@pytest.mark.parametrize("initialize", [True, False], ids=["initialized", "made-by-others"])
class TestLocalRank:
    def test_from_the_host_names_with_a_warning(self, initialize: bool, tmp_path: Path) -> None:
        arguments = (f"file://{tmp_path}/x", initialize, None, None)
        for rank, (found, messages) in enumerate(
            helpers.run_ranks(_local_rank, *arguments, environs=by_test_rank())
        ):
            assert found == [rank, rank, (rank, 2, 1, 0)]
            (message,) = messages
            for text in ("LOCAL_RANK", "set_local_rank", "every rank"):
                assert text in message

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_from_set_local_rank(self, initialize: bool, when: str, tmp_path: Path) -> None:
        before, after = (0, None) if when == "before" else (None, 0)
        arguments = (f"file://{tmp_path}/x", initialize, before, after)
        # both are told 0: two nodes of one process each, which happen to have one host name
        for rank, (found, messages) in enumerate(
            helpers.run_ranks(_local_rank, *arguments, environs=by_test_rank())
        ):
            assert found == [0, 0, (0, 1, 2, rank)]
            assert messages == []

    def test_from_the_environment(self, initialize: bool, tmp_path: Path) -> None:
        """LOCAL_RANK alone, as the warning above recommends."""
        arguments = (f"file://{tmp_path}/x", initialize, None, None)
        environs = by_test_rank(LOCAL_RANK="0")
        for rank, (found, messages) in enumerate(
            helpers.run_ranks(_local_rank, *arguments, environs=environs)
        ):
            assert found == [0, 0, (0, 1, 2, rank)]
            assert messages == []

    def test_the_environment_goes_before_set_local_rank(self, initialize: bool) -> None:
        arguments = ("env://", initialize, 5, 6)
        environs = [
            {**environ, "TEST_RANK": environ["RANK"]}
            for environ in helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
        ]
        for rank, (found, messages) in enumerate(
            helpers.run_ranks(_local_rank, *arguments, environs=environs)
        ):
            assert found == [rank, rank, (rank, 2, 1, 0)]
            assert messages == []


def _topology() -> tuple[Any, dict[int, int], bool, bool]:
    idist.initialize("gloo", timeout=SHORT)
    zeros = idist.is_global_zero(), idist.is_local_zero()
    found = topology(), live.current_model().node_ranks(), *zeros
    idist.finalize()
    return found


@pytest.mark.parametrize("known", [True, False], ids=["torchrun", "local-rank-only"])
def test_two_nodes_on_one_host(known: bool) -> None:
    environs = helpers.torchrun_environs(4, helpers.free_port(), nproc_per_node=2, agent_store=False)
    if not known:
        for environ in environs:
            for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK"):
                del environ[name]
    assert helpers.run_ranks(_topology, world_size=4, environs=environs) == [
        ((0, 2, 2, 0), {0: 0, 1: 1}, True, True),
        ((1, 2, 2, 0), {0: 0, 1: 1}, False, False),
        ((0, 2, 2, 1), {0: 2, 1: 3}, False, True),
        ((1, 2, 2, 1), {0: 2, 1: 3}, False, False),
    ]


def _groups_of_nodes() -> tuple[Any, ...]:
    idist.initialize("gloo", timeout=SHORT)
    file, group = io.StringIO(), idist.node_group()
    idist.print(idist.get_rank(), local=True, file=file)
    found = group, idist.get_rank(group), idist.all_gather(idist.get_rank(), group), file.getvalue()
    idist.finalize()
    return found


@pytest.mark.parametrize("known", [True, False], ids=["torchrun", "local-rank-only"])
def test_the_group_of_a_node_and_what_one_rank_per_node_prints(known: bool) -> None:
    environs = helpers.torchrun_environs(4, helpers.free_port(), nproc_per_node=2, agent_store=False)
    for environ in environs if not known else ():
        for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK"):
            del environ[name]
    assert helpers.run_ranks(_groups_of_nodes, world_size=4, environs=environs) == [
        ([0, 1], 0, [0, 1], "0\n"),
        ([0, 1], 1, [0, 1], ""),
        ([2, 3], 0, [2, 3], "2\n"),
        ([2, 3], 1, [2, 3], ""),
    ]


def _print_per_node(method: str) -> str:
    dist.init_process_group("gloo", init_method=method, rank=my_rank(), world_size=2, timeout=SHORT)
    file = io.StringIO()
    with pytest.raises(RuntimeError, match="local rank is not known yet"):
        idist.print("too early", local=True, file=file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exchange of host names
        idist.get_local_rank()
    idist.print("é", local=True, file=file)
    idist.finalize()
    return file.getvalue()


def test_to_print_per_node_never_asks_the_other_ranks(tmp_path: Path) -> None:
    found = helpers.run_ranks(_print_per_node, f"file://{tmp_path}/x", environs=by_test_rank())
    assert found == ["é\n", ""]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([("a", None)], [(0, 1, 1, 0)]),
        ([("a", None), ("b", None), ("a", None)], [(0, 2, 2, 0), (0, 1, 2, 1), (1, 2, 2, 0)]),
        ([("a", 0), ("a", 1), ("b", 0)], [(0, 2, 2, 0), (1, 2, 2, 0), (0, 1, 2, 1)]),
        ([("a", 1), ("a", 0)], [(1, 2, 1, 0), (0, 2, 1, 0)]),
        ([("a", 0), ("a", 1), ("a", 0)], [(0, 2, 2, 0), (1, 2, 2, 0), (0, 1, 2, 1)]),
        ([("a", 0), ("a", 0), ("a", 0)], [(0, 1, 3, 0), (0, 1, 3, 1), (0, 1, 3, 2)]),
    ],
)
def test_topology_from_host_names(
    hosts: list[tuple[str, int | None]], expected: list[tuple[int, ...]]
) -> None:
    places = decode_places(bytearray().join(encode_place(*host) for host in hosts))
    found = [Topology.from_places(rank, places) for rank in range(len(hosts))]
    assert [tuple(place) for place, _ in found] == expected
    for rank, (place, node_ranks) in enumerate(found):
        assert node_ranks[place.local_rank] == rank
        assert len(node_ranks) == place.nproc_per_node


def test_places_are_told_from_what_other_calls_send() -> None:
    with pytest.raises(idist.errors.CollectiveMismatchError, match="Rank 1"):
        decode_places(encode_place("a", 0) + bytearray(PLACE_BYTES))


def test_topology_of_many_ranks_takes_linear_time() -> None:
    """Ten times the ranks take ten times as long, with room for noise; not a hundred times."""

    def seconds(world_size: int) -> float:
        places = [Place(rank // 8, None) for rank in range(world_size)]
        start = time.process_time()
        topology, _ = Topology.from_places(world_size - 1, places)
        assert topology == (7, 8, world_size // 8, world_size // 8 - 1)
        return time.process_time() - start

    assert min(seconds(40_000) for _ in range(3)) < 40 * min(seconds(4_000) for _ in range(3))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # launcher's rank, world size, local rank, processes on the node, nodes, node rank
        ((5, 8, 1, 4, 2, 1), (1, 4, 2, 1)),
        ((1, 4, 1, 4, None, None), (1, 4, 1, 0)),
        ((1, 4, 1, None, 1, None), (1, 4, 1, 0)),
        ((2, 4, None, None, 4, None), (0, 1, 4, 2)),
        ((2, 4, None, None, 4, 3), (0, 1, 4, 3)),
        ((1, 4, None, 4, 1, 0), None),  # nothing says that local ranks are in the order of the ranks
        ((1, 4, 1, 2, None, None), None),  # nodes of 2 + 2 processes, or of 2 + 1 + 1
        ((1, 4, 0, 1, None, None), None),
        ((1, 4, 1, None, 2, 0), None),
        ((3, 4, 1, 2, 2, None), None),
        ((1, 4, 1, None, None, None), None),
    ],
)
def test_topology_from_what_the_launcher_says(
    facts: tuple[int, int, int | None, int | None, int | None, int | None], expected: tuple[int, ...] | None
) -> None:
    assert Topology.from_environment(Environment("a launcher", *facts)) == expected


def _collectives_of_topology() -> list[tuple[Any, int]]:
    """What each getter says, and how many collectives it has taken."""
    idist.initialize("gloo", timeout=SHORT)
    idist.barrier()  # the first collective also opens the ranks' shared memory
    model = live.current_model()
    found = []
    for getter in (idist.get_local_rank, topology, model.node_ranks, topology, model.node_ranks):
        before = model.transport.num_collectives()
        found.append((getter(), model.transport.num_collectives() - before))
    idist.finalize()
    return found


@pytest.mark.parametrize(
    ("left_out", "exchanges"),
    [
        ((), (0, 1)),
        (("GROUP_WORLD_SIZE", "GROUP_RANK"), (0, 1)),
        (("LOCAL_WORLD_SIZE", "GROUP_RANK"), (0, 1)),
        (("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK"), (1, 0)),
    ],
    ids=["all", "one-node-by-processes", "one-node-by-nodes", "local-rank-only"],
)
def test_topology_takes_an_exchange_only_where_nobody_says_it(
    left_out: tuple[str, ...], exchanges: tuple[int, int]
) -> None:
    environs = helpers.torchrun_environs(2, helpers.free_port(), agent_store=False)
    for environ in environs:
        for name in left_out:
            del environ[name]
    for rank, found in enumerate(helpers.run_ranks(_collectives_of_topology, environs=environs)):
        where, on_node = (rank, 2, 1, 0), {0: 0, 1: 1}
        counts = [0, exchanges[0], exchanges[1], 0, 0]
        assert found == list(zip([rank, where, on_node, where, on_node], counts, strict=True))
