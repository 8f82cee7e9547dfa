"""The events of a trace and the alignment of clocks, from times that the tests choose."""

from __future__ import annotations

from typing import Any

from ignite_dist.diagnostics.profiler.clocks import compare_clocks
from ignite_dist.diagnostics.profiler.trace_events import RankCalls, Row, events_of

WORLD = (0, 1)


def row(begin: int, end: int, *wait: int, key: str = "", thread: int = 7, ranks: Any = WORLD) -> Row:
    """A call; with ``wait``, the begin and the end of the wait for its Work, it is asynchronous."""
    return Row("barrier", {}, ranks, key, bool(wait), thread, begin, end, *(wait or (0, 0)))


def slices(*ranks: list[Row], end: int = 100_000) -> list[list[tuple[Any, ...]]]:
    """The slices of each rank: name, begin and end in microseconds, and the rank that a call waits for."""
    calls = [RankCalls(rank, "host", rows, end) for rank, rows in enumerate(ranks)]
    found: list[list[tuple[Any, ...]]] = [[] for _ in ranks]
    for event in events_of(calls):
        if event["ph"] == "X":
            waits_for = (event["args"].get("waits for"),) if event["cat"] == "call" else ()
            found[event["pid"]].append((event["name"], event["ts"], event["ts"] + event["dur"], *waits_for))
    return found


def test_a_call_waits_until_the_last_rank_has_begun_it() -> None:
    first, last = slices([row(1000, 9000)], [row(6000, 9500)])
    assert first == [("barrier", 0, 8, 1), ("waiting for rank 1", 0, 5), ("working", 5, 8)]
    assert last == [("barrier", 5, 8.5, None)]


def test_a_call_that_ended_before_another_rank_began_did_not_wait_for_that_rank() -> None:
    source, receiver, late = slices(
        [row(1000, 2000, ranks=(0, 1, 2))],
        [row(0, 2500, ranks=(0, 1, 2))],
        [row(9000, 9500, ranks=(0, 1, 2))],
    )
    assert source == [("barrier", 1, 2, None)]
    assert receiver[0] == ("barrier", 0, 2.5, 0)
    assert late == [("barrier", 9, 9.5, None)]


def test_calls_are_matched_by_their_group_and_their_number_in_it() -> None:
    mine = [row(0, 100, key="a", ranks=(0,)), row(1000, 9000), row(10_000, 12_000)]
    theirs = [row(8000, 9000), row(11_000, 12_000)]
    first, _ = slices(mine, theirs)
    assert [one[3] for one in first if one[0] == "barrier"] == [None, 1, 1]
    assert [one[1:] for one in first if one[0] == "waiting for rank 1"] == [(1, 8), (10, 11)]


def test_no_wait_is_claimed_for_a_call_that_a_rank_has_not_made() -> None:
    everyone = (0, 1, 2)
    first, _, _ = slices([row(0, 0, ranks=everyone)], [row(5000, 0, ranks=everyone)], [])
    assert first == [("barrier", 0, 100, None)]


def test_a_call_that_raised_ends_when_its_thread_makes_the_next_call() -> None:
    (mine,) = slices([row(0, 0), row(2000, 3000, thread=8), row(4000, 5000)])
    assert [one[:3] for one in mine] == [("barrier", 0, 4), ("barrier", 2, 3), ("barrier", 4, 5)]


def test_an_asynchronous_call_waits_in_wait_only() -> None:
    first, last = slices([row(0, 8000, 4000, 8000)], [row(6000, 8000, 9000, 9100)])
    assert first == [("wait() of barrier", 4, 8, 1), ("waiting for rank 1", 4, 6), ("working", 6, 8)]
    assert last == [("wait() of barrier", 9, 9.1, None)]


def test_an_asynchronous_call_spans_from_its_begin_to_its_end() -> None:
    events = list(events_of([RankCalls(0, "host", [row(0, 8000, 4000, 8000)], 9000)]))
    spans = [(one["ph"], one["ts"]) for one in events if one.get("cat") == "async"]
    assert spans == [("b", 0), ("e", 8)]
    assert len({one["id"] for one in events if one.get("cat") == "async"}) == 1


def test_each_thread_has_its_own_row() -> None:
    rows = [row(0, 5, thread=70), row(1, 4, thread=3), row(6, 7, thread=70)]
    events = events_of([RankCalls(0, "host", rows, 9)])
    assert [one["tid"] for one in events if one["ph"] == "X"] == [0, 1, 0]


def _barriers(begin: int, offset: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The barriers of rank 0, and those of a rank whose clock is ``offset`` behind."""
    of_rank_0 = [(begin, begin + 900), (begin + 1000, begin + 1040), (begin + 2000, begin + 2500)]
    of_rank = [(begin, begin + 900), (begin + 1010, begin + 1035), (begin + 2000, begin + 2500)]
    return of_rank_0, [(entered - offset, left - offset) for entered, left in of_rank]


def test_ranks_of_one_machine_share_a_clock() -> None:
    (first_0, first), (last_0, last) = _barriers(0, 0), _barriers(10**9, 0)
    clock = compare_clocks((first_0, last_0), (first, last), is_same_host=True)
    assert clock.error == 0 and clock.translate(12_345) == 12_345


def test_the_clock_of_another_machine_is_found_within_its_error_also_if_it_drifts() -> None:
    (first_0, first), (last_0, last) = _barriers(0, 10**12), _barriers(10**9, 10**12 + 10_000)
    clock = compare_clocks((first_0, last_0), (first, last), is_same_host=False)
    assert 0 < clock.error <= 50  # the shortest barrier took 40 ns
    for time, offset in ((0, 10**12), (5 * 10**8, 10**12 + 5000), (10**9, 10**12 + 10_000)):
        assert abs(clock.translate(time - offset) - time) <= clock.error + 1
