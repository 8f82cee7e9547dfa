"""``async_op=True`` on every model: the same results as the blocking call, when somebody waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import ignite_dist as idist
from ignite_dist.comp_models.work import Completed
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import on_every_rank, raises

LONG = timedelta(seconds=60)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return bool(torch.equal(found, expected)) and found.dtype is expected.dtype
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], one) for key, one in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected) and type(found) is type(expected)


def goes_on_in_a_thread() -> bool:
    """True if a collective of several steps may go on after its call. An accelerator completes it there."""
    return not current_model().transport.is_synchronous and idist.device().type == "cpu"


def calls(group: list[int] | None) -> list[Callable[..., Any]]:
    """Each collective of each kind of value, with arguments of its own at each call."""
    rank, device = idist.get_rank(), idist.device()
    src = 0 if group is None else group[-1]

    def tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(numel) % 5 + rank).to(dtype).to(device)

    found: list[Callable[..., Any]] = []
    for dtype in (torch.float32, torch.float16, torch.int16, torch.bool, torch.float64):
        for numel in (1, 7, 3000):
            op = "OR" if dtype is torch.bool else "SUM"
            found.append(lambda n=numel, d=dtype, op=op, **k: idist.all_reduce(tensor(n, d), op, group, **k))
    found += [
        lambda **k: idist.all_reduce(tensor(5, torch.float32), "AVERAGE", group, inplace=False, **k),
        lambda **k: idist.all_reduce(tensor(600_000, torch.float16), "AVERAGE", group, **k),
        lambda **k: idist.all_reduce(tensor(6, torch.float32).view(2, 3).t(), "MAX", group, **k),
        lambda **k: idist.all_reduce(rank + 0.5, "SUM", group, **k),
        lambda **k: idist.all_reduce({"n": rank, "t": tensor(4, torch.float32)}, "SUM", group, **k),
        lambda **k: idist.all_reduce([tensor(4000, torch.float32), True], "MAX", group, **k),
        lambda **k: idist.all_gather(tensor(3, torch.float32), group, **k),
        lambda **k: idist.all_gather(torch.tensor(rank, device=device), group, **k),
        lambda **k: idist.all_gather({"rank": rank}, group, **k),
        lambda **k: idist.all_gather("x" * 1000 * rank, group, **k),
        lambda **k: idist.all_gather_ragged(tensor(rank, torch.float32), group, **k),
        lambda **k: idist.broadcast(tensor(9, torch.float32), src, group=group, **k),
        lambda **k: idist.broadcast(f"from {rank}", src, group=group, **k),
        lambda **k: idist.broadcast(tensor(2, torch.int16), src, True, group, **k),
        lambda **k: idist.barrier(group, **k),
    ]
    return found


def check_all(group: list[int] | None) -> None:
    expected = [call() for call in calls(group)]
    one_by_one = [call(async_op=True).wait() for call in calls(group)]
    assert same(one_by_one, expected)
    works = [call(async_op=True) for call in calls(group)]
    assert all(isinstance(work, idist.Work) for work in works)
    # The ranks wait in different orders.
    order = list(range(len(works)))
    shift = 7 * idist.get_rank() % len(works)
    found: dict[int, Any] = {number: works[number].wait(LONG) for number in order[shift:] + order[:shift]}
    assert same([found[number] for number in order], expected)
    assert all(work.is_completed() for work in works)
    assert same([work.wait() for work in works], expected)


@on_every_rank
def test_every_collective_gives_what_the_blocking_call_gives() -> None:
    check_all(None)


@on_every_rank
def test_in_groups_too_and_outside_of_them() -> None:
    last = idist.get_world_size() - 1
    for group in ([0], [last], sorted({0, last})):
        check_all(group)


@on_every_rank
def test_a_tensor_that_is_reduced_in_place_holds_the_result_afterwards() -> None:
    world_size = idist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(1000, device=idist.device(), dtype=dtype)
        version = tensor._version
        assert idist.all_reduce(tensor, async_op=True).wait() is tensor
        assert tensor.tolist() == [world_size] * 1000
        assert tensor._version > version


@on_every_rank
def test_blocking_calls_come_between() -> None:
    """The order of the calls is that of the collectives, whoever waits when."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    works = []
    for number in range(10):
        works.append(idist.all_reduce({"n": number}, async_op=True))
        works.append(idist.all_gather("y" * 700 * (rank + number), async_op=True))
        assert idist.all_reduce(number) == number * world_size
        if number % 3 == rank % 3:
            works[-2].wait()
    totals = [work.wait() for work in works[::2]]
    assert totals == [{"n": number * world_size} for number in range(10)]
    assert [len(one) for one in works[-1].wait()] == [700 * (r + 9) for r in range(world_size)]


@on_every_rank
def test_what_is_sent_is_what_was_given() -> None:
    """The caller may change an object or a tree after the call."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    others = idist.new_group(range(world_size))  # whose calls do not wait for those of the world
    tree = {"n": rank, "t": torch.ones(3, device=idist.device())}
    sent = [rank]
    if rank > 0 and goes_on_in_a_thread():
        idist.barrier(group=others)  # until rank 0 has changed what it gave
    before = idist.all_reduce({"n": 1}, async_op=True)
    reduced, gathered = idist.all_reduce(tree, async_op=True), idist.all_gather(sent, async_op=True)
    tree["t"].zero_()
    tree["n"] = 100
    if idist.model_name() != "serial":  # where nothing is serialised, and the result is the object itself
        sent.append(100)
    if rank == 0 and goes_on_in_a_thread():
        idist.barrier(group=others)
    assert before.wait() == {"n": world_size}
    assert same(reduced.wait()["n"], world_size * (world_size - 1) // 2)
    assert reduced.wait()["t"].tolist() == [world_size] * 3
    assert gathered.wait() == [[rank] for rank in range(world_size)]


@on_every_rank
def test_wait_with_a_timeout_says_which_call_and_may_be_called_again() -> None:
    if not goes_on_in_a_thread() or idist.get_world_size() == 1:
        assert idist.barrier(async_op=True).wait(LONG) is None
        return
    others = idist.new_group(range(idist.get_world_size()))  # whose calls the one that waits does not hold up
    if idist.get_rank() == 0:
        work = idist.all_reduce({"n": 1}, async_op=True)
        assert not work.is_completed()
        with raises(idist.MissingRanksError, "The all_reduce begun at conformance/test_async.py:"):
            work.wait(timedelta(milliseconds=50))
        idist.barrier(group=others)
    else:
        idist.barrier(group=others)
        work = idist.all_reduce({"n": 1}, async_op=True)
    assert work.wait(LONG) == {"n": idist.get_world_size()}


@on_every_rank
def test_an_error_comes_out_of_wait_on_every_rank() -> None:
    if idist.get_world_size() == 1:
        return
    value = {"a": 1} if idist.get_rank() == 0 else {"b": 1}
    if current_model().transport.is_synchronous:
        with raises(idist.CollectiveMismatchError):
            idist.all_reduce(value, async_op=True).wait()
    else:
        work = idist.all_reduce(value, async_op=True)
        for _ in range(2):
            with raises(idist.CollectiveMismatchError, "different operations"):
                work.wait()
    assert idist.all_reduce(1) == idist.get_world_size()


class Exits:
    """Loading this object raises SystemExit."""

    def __reduce__(self) -> Any:
        return sys.exit, ("loaded",)


@on_every_rank
def test_an_object_that_exits_when_it_is_loaded_raises_in_wait() -> None:
    if idist.get_world_size() == 1:
        return
    for async_op in (False, True):
        with raises(SystemExit, "loaded"):
            work = idist.all_gather(Exits(), async_op=async_op)
            work.wait()
        assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_collectives_of_other_libraries_come_between() -> None:
    """A thread runs collectives while the backward pass of DDP, or the script itself, begins others."""
    if not torch.distributed.is_initialized() or idist.get_world_size() == 1:
        return
    rank, world_size = idist.get_rank(), idist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30, bias=False).to(idist.device()))
    tensor = torch.empty(1, device=idist.device())
    for number in range(20):
        lengths = idist.all_gather("z" * 700 * (rank + 1), async_op=True)
        total = idist.all_reduce({"n": number, "t": torch.ones(200)}, async_op=True)
        model(torch.ones(2, 30, device=idist.device())).sum().backward()
        torch.distributed.all_reduce(tensor.fill_(rank))
        own = idist.all_reduce(torch.full((50,), float(rank)), async_op=True)
        assert tensor.item() == sum(range(world_size))
        assert model.module.weight.grad is not None
        assert abs(model.module.weight.grad[0, 0].item() - 2 * (number + 1)) < 1e-3  # divided by 3
        assert own.wait().tolist() == [sum(range(world_size))] * 50
        assert [len(one) for one in lengths.wait()] == [700 * (r + 1) for r in range(world_size)]
        assert total.wait()["n"] == number * world_size


@on_every_rank
def test_wrong_arguments_raise_at_once() -> None:
    tensor = torch.ones(2, device=idist.device())
    with raises(ValueError, "do not pass async_op"):
        idist.all_reduce(tensor, sync_grads=True, async_op=True)
    with raises(ValueError, "do not pass async_op"):
        idist.all_gather(tensor, sync_grads=True, async_op=True)
    with raises(ValueError, "wait(timeout)"):
        idist.barrier(timeout=LONG, async_op=True)
    with raises(TypeError):
        idist.all_reduce("no number", async_op=True)
    if idist.model_name() != "serial":
        with raises(TypeError, "cannot be sent"):
            idist.all_gather(threading.Lock(), async_op=True)
    with raises(ValueError):
        idist.all_reduce(tensor, group=[-1], async_op=True)
    work = idist.barrier(async_op=True)
    if not isinstance(work, Completed):
        with raises(TypeError, "timedelta"):
            work.wait(3)  # type: ignore[arg-type]
    work.wait()


@on_every_rank
def test_threads_wait_for_one_work() -> None:
    if current_model().ranks_in_process() > 1:  # whose ranks are threads
        return
    work = idist.all_reduce(torch.ones(300_000, device=idist.device()), async_op=True)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work.wait()[0].item())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [idist.get_world_size()] * 4


@on_every_rank
def test_it_goes_on_while_the_caller_computes() -> None:
    work = idist.all_gather("z" * 5000 * (idist.get_rank() + 1), async_op=True)  # two collectives
    deadline = time.monotonic() + LONG.total_seconds()
    while not work.is_completed():
        assert time.monotonic() < deadline
        torch.ones(100).sum()
    assert len(work.wait()) == idist.get_world_size()


@on_every_rank
def test_transports_support_no_unknown_kind() -> None:
    for kind in ("send", "", "ALL_REDUCE"):
        assert not current_model().transport.supports(kind, None, torch.float32, idist.device())  # type: ignore[arg-type]
    assert not current_model().transport.supports("all_reduce", None, torch.int16, idist.device()) or (
        idist.get_world_size() == 1
    )
