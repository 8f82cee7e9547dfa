"""Where else a rank may wait for one that has ended, and where it only seems to; the watchdog itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import helpers
import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.environments.rendezvous import connections

# Longer than a watchdog takes to be sure that a wait cannot end.
A_WHILE = 8.0
LONG = timedelta(minutes=4)


def failure(backend: str, function: Callable[..., Any], *args: Any, size: int) -> idist.RankFailedError:
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn(backend, function, args, nproc_per_node=size)
    return info.value


# --- false alarms ----------------------------------------------------------------------------------------


def needs_rank_1_alone(local_rank: int, what: str) -> int:
    """Rank 2 has done its part and ended. Rank 0 waits for rank 1, which takes long."""
    rank, group = idist.get_rank(), None
    idist.barrier()
    if what == "a destroyed group":
        group = dist.new_group([0, 1, 2])
    elif rank < 2:  # gloo counts messages as calls of the group
        for _ in range(3):
            (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)
    if rank == 1:
        threading.Event().wait(A_WHILE)
    rows = [torch.zeros(1) for _ in range(3)] if rank == 0 else None
    dist.gather(torch.full((1,), float(rank)), rows, dst=0, group=group)
    if group is not None:
        dist.destroy_process_group(group)
    return 0 if rows is None else int(torch.stack(rows).sum())


@pytest.mark.long
@pytest.mark.parametrize("what", ["messages", "a destroyed group"])
def test_a_rank_that_has_done_its_part_is_not_missed(what: str) -> None:
    assert idist.spawn("gloo", needs_rank_1_alone, (what,), nproc_per_node=3) == [3, 0, 0]


LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def goes_on_in_a_second_context(local_rank: int) -> str:
    """What is made of a connection that is lost in a second context, after a rank had left the first one."""
    kept = None  # an exception that is kept keeps what watched the first context
    try:
        if idist.get_rank() == 0:
            idist.barrier()
        else:
            idist.finalize()
    except (idist.MissingRanksError, idist.RankFailedError) as error:
        kept = error
    if idist.backend() is not None:
        idist.finalize()
    idist.initialize("gloo")
    idist.barrier()
    assert kept is not None
    return str(connections.with_cause(RuntimeError(LOST)))


def test_a_later_context_has_nothing_to_do_with_who_left_the_first() -> None:
    assert idist.spawn("gloo", goes_on_in_a_second_context, nproc_per_node=2) == [LOST, LOST]


# --- waits that nobody has announced -----------------------------------------------------------------------


def _waits_in_another_thread() -> None:
    """The thread has the rank's own group; the rank's main thread goes on with others."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            dist.all_reduce(torch.ones(2))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG.total_seconds())
    raise raised[0]


WAITS: dict[str, Callable[[], Any]] = {
    "a functional collective": lambda: functional.wait_tensor(
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    ),
    "a message from it": lambda: dist.recv(torch.ones(1), 1),
    "a message to it": lambda: dist.send(torch.ones(1), 1),
    "barrier with a timeout": lambda: idist.barrier(timeout=LONG),
    "a gather": lambda: dist.gather(
        torch.ones(1), [torch.ones(1) for _ in range(idist.get_world_size())], dst=0
    ),
    "in another thread": _waits_in_another_thread,
}


def waits_for_rank_1(local_rank: int, wait: str) -> None:
    idist.barrier()
    if idist.get_rank() == 0:
        WAITS[wait]()


@pytest.mark.long
@pytest.mark.parametrize("wait", WAITS)
def test_nothing_waits_for_a_rank_that_has_ended(wait: str) -> None:
    error = failure("gloo", waits_for_rank_1, wait, size=2)
    assert "Rank 1 did not come" in str(error), error
    assert "it has come to the end of its context" in str(error)


def by_hand(wait: str) -> None:
    """A context whose calls are not kept."""
    idist.initialize("gloo")
    waits_for_rank_1(0, wait)
    idist.finalize()


@pytest.mark.parametrize("wait", ["in another thread", "barrier with a timeout"])
def test_nothing_waits_where_no_calls_are_kept(wait: str) -> None:
    ended = helpers.end_of_ranks(by_hand, wait)
    assert ended[0].error, "torch's own calls raise torch's own error"
    assert wait != "barrier with a timeout" or "MissingRanksError: Rank 1 did not come" in ended[0].error
    assert "Rank 1 did not come to " in ended[1].error and "where rank 0 waits" in ended[1].error
    assert "So rank 1 has ended its context without the others" in ended[1].error, ended


def unannounced(local_rank: int, what: str) -> None:
    rank = idist.get_rank()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        if what == "a new group":
            idist.new_group([0, 1])
        elif what == "a state":
            current_model().objects.broadcast_bytes(b"", 1, current_model().groups.world)
        else:
            idist.auto_optim(optimizer)


@pytest.mark.horovod
@pytest.mark.parametrize("what", ["a new group", "a state", "an optimizer"])
def test_nothing_of_horovod_waits_for_a_rank_that_has_ended(what: str) -> None:
    error = failure("horovod", unannounced, what, size=3 if what == "a new group" else 2)
    assert "Rank 1 " in str(error) or "Ranks 1-2 " in str(error), error
    assert error.error_type == "MissingRanksError"


# --- the watchdog ------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("ignite_dist.diagnostics.watchdog").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def has_a_bug(local_rank: int) -> None:
    """``find_wait`` raises, as that of a third-party backend may."""
    model, heard, num_raised = current_model(), Heard(), 0
    find_wait = model.transport.find_wait

    def raises_at_first(frame: Any) -> Any:
        nonlocal num_raised
        num_raised += 1
        if num_raised < 3:
            raise LookupError("not yet known")
        return find_wait(frame)

    idist.barrier()
    if idist.get_rank() == 0:
        model.transport.find_wait = raises_at_first  # type: ignore[method-assign]
        with pytest.raises(idist.MissingRanksError) as info:
            idist.barrier()
        assert num_raised >= 3
        assert len([one for one in heard.messages if "has failed; it goes on" in one]) == 1
        raise info.value


def test_a_watchdog_outlives_an_error_and_says_it_once() -> None:
    assert "Rank 1 did not come to barrier" in str(failure("gloo", has_a_bug, size=2))
