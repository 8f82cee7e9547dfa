"""A call that is interrupted at any moment: later calls of the ranks go together, or raise."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ignite_dist as idist
from waiting import when_waiting

PACKAGE = str(Path(idist.__file__).parent)


def _averaged(k: int) -> float:
    net = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(k)
    idist.average_parameters(net)
    return 2 * net.weight.item()


CALLS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda k: idist.all_reduce(torch.full((3,), float(k)))[0].item(),
    "number": lambda k: idist.all_reduce(k),
    "tree of two steps": lambda k: idist.all_reduce({"a": torch.full((400,), float(k))})["a"][0].item(),
    "several pieces": lambda k: idist.all_reduce(torch.full((300_000,), float(k)))[0].item(),
    "halves": lambda k: idist.all_reduce(torch.full((3,), float(k), dtype=torch.float16))[0].item(),
    "reduce_scatter": lambda k: idist.reduce_scatter(torch.full((2,), float(k)))[0].item(),
    "all_gather": lambda k: idist.all_gather(torch.full((1,), float(k))).sum().item(),
    "object": lambda k: sum(idist.all_gather(k)),
    "large object": lambda k: sum(one[0] for one in idist.all_gather([k, "x" * 5000])),
    "broadcast": lambda k: 2 * idist.broadcast(torch.full((3,), float(k)))[0].item(),
    "all_to_all": lambda k: idist.all_to_all(torch.full((2,), float(k))).sum().item(),
    "average_parameters": _averaged,
    "asynchronous": lambda k: idist.all_reduce(torch.full((3,), float(k)), async_op=True).wait()[0].item(),
    "asynchronous object": lambda k: sum(idist.all_gather(k, async_op=True).wait()),
}


# They wait for other ranks: how often they look depends on the machine.
WAITS = {"wait_for", "_sleep", "_places"}


def _interrupted_at(moment: int, call: Callable[[], float]) -> tuple[bool, Any]:
    """``call()``, interrupted at this moment; False if it has fewer moments.

    Python runs the handlers of signals where a function begins, and after a call of a function in C.
    """
    left = moment

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if (
            event in ("call", "c_return")
            and code.co_filename.startswith(PACKAGE)
            and code.co_name not in WAITS
        ):
            left -= 1
            if left < -1:  # the first moment is the beginning of the public function
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        value = call()
        return left < -1, value  # Python ignores what is raised in __del__
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.setprofile(None)


def _wrong_values(call: Callable[[int], Any], k: int, numbers: tuple[int, ...]) -> list[tuple[int, Any]]:
    """``(k, call(number))`` of each number, if it is neither a mismatch nor right."""
    wrong = []
    for number in numbers:
        with suppress(idist.CollectiveMismatchError):
            if (value := call(number)) != 2 * number:
                wrong.append((k, value))
    return wrong


def _calls(rank: int, name: str) -> tuple[int, list[tuple[int, Any]]]:
    """Call ``k`` of rank 1 is interrupted at moment ``k``. The number of calls, and wrong results."""
    call, wrong, k, goes_on = CALLS[name], [], 1, True
    control = idist.new_group(range(2))
    idist.barrier()
    while goes_on:
        if rank == 1:
            goes_on, _ = _interrupted_at(k - 1, lambda: call(k))  # noqa: B023
        wrong += _wrong_values(call, k, (k, k + 1000) if rank == 0 else (k + 1000,))
        goes_on = idist.broadcast(goes_on, src=1, group=control)
        k += 1
    return k, wrong


ON_HOROVOD = ("all_reduce", "number", "large object", "broadcast", "asynchronous")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("gloo", name) for name in CALLS),
        *(pytest.param("horovod", name, marks=pytest.mark.horovod) for name in ON_HOROVOD),
    ],
)
def test_calls_go_together_after_an_interrupt_at_any_moment(backend: str, name: str) -> None:
    (num_calls, wrong), (_, others) = idist.spawn(backend, _calls, (name,), nproc_per_node=2)
    assert (wrong, others) == ([], [])
    assert num_calls > 20


def _first_calls(rank: int, before: str) -> tuple[int, list[tuple[int, Any]]]:
    """The first call of group ``k`` is interrupted at moment ``k``, on rank 1."""
    wrong, k, goes_on = [], 1, True
    control = idist.new_group(range(2))
    while goes_on:
        group = idist.new_group(range(2))
        if before == "a barrier":  # the group has its shared memory
            idist.barrier(group)

        def call(number: int) -> Any:
            tensor = torch.full((3,), float(number))
            return idist.all_reduce(tensor, group=group, async_op=True).wait()[0].item()  # noqa: B023

        if rank == 1:
            first = partial(idist.barrier, group) if before == "an interrupted barrier" else partial(call, k)
            goes_on, _ = _interrupted_at(k - 1, first)
        elif before == "an interrupted barrier":
            with suppress(idist.CollectiveMismatchError):
                idist.barrier(group)
        numbers = (k + 1000,) if rank == 1 or before == "an interrupted barrier" else (k, k + 1000)
        wrong += _wrong_values(call, k, numbers)
        goes_on = idist.broadcast(goes_on, src=1, group=control)
        k += 1
    return k, wrong


@pytest.mark.parametrize(
    "before", [pytest.param("nothing", marks=pytest.mark.long), "a barrier", "an interrupted barrier"]
)
def test_the_first_calls_of_a_group_count_too(before: str) -> None:
    (num_calls, wrong), (_, others) = idist.spawn("gloo", _first_calls, (before,), nproc_per_node=2)
    assert (wrong, others) == ([], [])
    assert num_calls > 20


def _alarmed(rank: int) -> list[float]:
    """A handler's exception ends a wait(), not the call."""

    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    control = idist.new_group(range(2))
    idist.barrier()
    if rank == 1:
        idist.barrier(control)  # returns after the alarm of rank 0
    work = idist.all_reduce(torch.ones(1), async_op=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, ring)
        place = "pending_calls.py", "wait_until_done"
        when_waiting(partial(os.kill, os.getpid(), signal.SIGALRM), place)
        with pytest.raises(Alarm):
            work.wait()
        idist.barrier(control)
    return work.wait().tolist()  # type: ignore[no-any-return]


def test_a_wait_that_a_handler_has_ended_may_be_called_again() -> None:
    assert idist.spawn("gloo", _alarmed, nproc_per_node=2) == [[2.0], [2.0]]


class _Handler:
    def __call__(self, number: int, frame: Any) -> None:
        raise TimeoutError


def _rings(tag: str, *_: object) -> None:
    raise TimeoutError(tag)


def _resets(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TimeoutError


HANDLERS = {"partial": partial(_rings, "text"), "object": _Handler(), "once": _resets}


def _alarmed_in_first_call(rank: int, name: str) -> list[float]:
    """Rank 0 is interrupted while it waits for rank 1 in the first call of a group."""
    group, control = idist.new_group(range(2)), idist.new_group(range(2))
    idist.barrier(control)
    if rank == 0:
        signal.signal(signal.SIGALRM, HANDLERS[name])
        when_waiting(partial(os.kill, os.getpid(), signal.SIGALRM), ("transport.py", "memory_of"))
        with pytest.raises(TimeoutError):
            idist.all_reduce(torch.ones(1), group=group)
        idist.barrier(control)
    else:
        idist.barrier(control)
        with suppress(idist.CollectiveMismatchError):
            idist.all_reduce(torch.ones(1), group=group)
    return idist.all_reduce(torch.full((1,), 10.0), group=group).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", HANDLERS)
def test_what_raises_may_be_any_handler(name: str) -> None:
    assert idist.spawn("gloo", _alarmed_in_first_call, (name,), nproc_per_node=2) == [[20.0], [20.0]]


def _interrupted_finish(rank: int) -> list[Any]:
    """Each rank is interrupted after the division of an AVERAGE, before wait() has returned."""
    idist.barrier()
    work, divide = idist.all_reduce(torch.ones(3), "AVERAGE", async_op=True), torch.Tensor.div_

    def interrupt(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and getattr(function, "__name__", "") == divide.__name__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    sys.setprofile(None)
    with pytest.raises(RuntimeError, match="was interrupted while it made the result"):
        work.wait()
    return idist.all_reduce(torch.ones(3), "AVERAGE").tolist()  # type: ignore[no-any-return]


def test_an_average_is_not_divided_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")
    assert idist.spawn("gloo", _interrupted_finish, nproc_per_node=2) == [[1.0] * 3] * 2


def _waits_in_handler(rank: int) -> str:
    """The handler of rank 0 waits for the work that the rank waits for, as the end of a context does."""
    control = idist.new_group(range(2))
    idist.barrier(control)
    if rank == 1:
        idist.barrier(control)  # returns after the signal
    work = idist.all_reduce(torch.ones(1), async_op=True)
    if rank == 1:
        return str(work.wait().tolist())
    signal.signal(signal.SIGALRM, lambda *_: work.wait())
    when_waiting(partial(os.kill, os.getpid(), signal.SIGALRM), ("pending_calls.py", "wait_until_done"))
    with pytest.raises(RuntimeError, match="A signal handler or a finalizer waits") as info:
        work.wait()
    idist.barrier(control)
    assert work.wait().tolist() == [2.0]
    return str(info.value)


def test_a_handler_does_not_wait_for_its_own_thread() -> None:
    refused, result = idist.spawn("gloo", _waits_in_handler, nproc_per_node=2)
    assert "all_reduce begun at" in refused and result == "[2.0]"


def _without_memory(rank: int) -> list[str]:
    """Rank 1 has no memory for the copy of the second tensor."""
    tensor, seen = torch.zeros(50_000_000)[::2], []
    idist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for k in range(3):
        tensor.fill_(k)
        if rank == k == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, hard))
        try:
            seen.append(str(idist.all_reduce(tensor, async_op=True).wait()[0].item()))
        except (RuntimeError, MemoryError) as error:
            seen.append(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return seen


def test_a_lack_of_memory_counts_in_an_asynchronous_call_too() -> None:
    first, second = idist.spawn("gloo", _without_memory, nproc_per_node=2)
    assert first == ["0.0", "CollectiveMismatchError", "4.0"]
    assert second == ["0.0", "RuntimeError", "4.0"]
