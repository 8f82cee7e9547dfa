"""Collectives of different groups in different threads at once, and in the middle of each other."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import SECONDS_PER_CASE, on_every_rank, raises

SEEDS = (1, 2, 3)


def threads_are_ranks() -> bool:
    """XLA's ranks are threads: one that a rank starts belongs to none of them."""
    return idist.model_name() == "xla-dist"


def run_in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What the functions returned, each in a thread of its own; the first error of any of them."""
    if threads_are_ranks():
        return [function() for function in functions]
    together = threading.Barrier(len(functions))
    futures: list[Future[Any]] = [Future() for _ in functions]

    def run(function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            together.wait()
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    for function, future in zip(functions, futures, strict=True):
        threading.Thread(target=run, args=(function, future), daemon=True).start()
    done, waiting = wait(futures, SECONDS_PER_CASE - 60, FIRST_EXCEPTION)
    for future in done:
        future.result()
    assert not waiting, f"{len(waiting)} of {len(functions)} threads have not ended"
    return [future.result() for future in futures]


def here(*values: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=idist.device())


# --- the smallest case ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("SUM", torch.float32), ("AVERAGE", torch.bfloat16), ("MAX", torch.float64)],
    ids=lambda one: str(one),
)
@on_every_rank
def test_two_threads_each_in_a_group_of_its_own(op: str, dtype: torch.dtype) -> None:
    """The groups have the same ranks, the tensors one shape and dtype."""
    rank, size = idist.get_rank(), idist.get_world_size()
    num_calls = 1000 if idist.backend() in (None, "gloo") else 50
    groups = [idist.new_group(range(size)) for _ in range(2)]

    def reduce(number: int) -> int:
        wrong = 0
        for step in range(num_calls):
            value = 1 + (number * 50 + step) % 100  # exact in bfloat16, and never that of the other thread
            tensor = torch.full((64,), value * (rank + 1 if op == "MAX" else 1), dtype=dtype)
            reduced = idist.all_reduce(tensor.to(idist.device()), op, groups[number])
            expected = value * {"SUM": size, "AVERAGE": 1, "MAX": size}[op]
            wrong += reduced.tolist() != [expected] * 64
        return wrong

    assert run_in_threads(lambda: reduce(0), lambda: reduce(1)) == [0, 0]


# --- all operations, in any order ------------------------------------------------------------------------

OPS_BY_DTYPE: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"),
    torch.float64: ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"),
    torch.float16: ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"),
    torch.bfloat16: ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"),
    torch.complex64: ("SUM", "AVERAGE", "PRODUCT"),
    torch.uint8: ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR"),
    torch.int8: ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR"),
    torch.int16: ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR"),
    torch.int32: ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR"),
    torch.int64: ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR"),
    torch.bool: ("MIN", "MAX", "AND", "OR"),
}
REFERENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVERAGE": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.bitwise_and,
    "OR": torch.bitwise_or,
}
SIZES = (0, 1, 2, 3, 7, 64, 64, 64, 1000, 5000)
LARGE = 150_000  # more than what gloo sends in one step


class Caller:
    """One thread's calls: what it sends, and what it has to get back.

    What decides about calls comes from ``choices``, the same on every rank; ``delays`` are the rank's own.
    """

    def __init__(self, seed: int, number: int, groups: Sequence[tuple[list[int], Any]]) -> None:
        self.rank = idist.get_rank()
        self.choices = random.Random(f"{seed} {number}")
        self.delays = random.Random(f"{seed} {number} {self.rank}")
        self.groups = groups
        self.pause = threading.Event()  # which nobody sets

    def run(self, num_calls: int) -> None:
        calls = (
            self.tensor,
            self.tensor,
            self.tensor,
            self.number,
            self.tree,
            self.gathered,
            self.gathered_object,
            self.ragged,
            self.sent,
            self.sent_object,
            self.barrier,
            self.gradient,
        )
        for step in range(num_calls):
            if self.delays.random() < 0.2:
                self.pause.wait(self.delays.random() * 3e-3)
            ranks, group = self.choices.choice(self.groups)
            call = self.choices.choice(calls)
            salt = self.choices.getrandbits(40)
            try:
                call(ranks, group, salt)
            except BaseException as error:
                raise AssertionError(f"call {step}, {call.__name__} in {ranks} (salt {salt})") from error

    def values(self, rank: int, size: int, salt: int, top: int = 5, factor: int = 1) -> Tensor:
        """What ``rank`` sends in the call of that ``salt``: small whole numbers, exact in every dtype."""
        made = torch.randint(0, top, (size,), generator=torch.Generator().manual_seed(salt + rank))
        return made * factor

    def layout(self) -> tuple[torch.dtype, int]:
        size = LARGE if self.choices.random() < 0.02 else self.choices.choice(SIZES)
        return self.choices.choice(list(OPS_BY_DTYPE)), size

    def tensor(self, ranks: list[int], group: Any, salt: int) -> None:
        dtype, size = self.layout()
        op = self.choices.choice(OPS_BY_DTYPE[dtype])
        inplace = self.choices.random() < 0.5
        factor = len(ranks) if op == "AVERAGE" else 1
        rows = [self.values(rank, size, salt, factor=factor).to(dtype) for rank in range(max(ranks) + 1)]
        own = self.values(self.rank, size, salt, factor=factor).to(dtype).to(idist.device())
        total = rows[ranks[0]]
        for rank in ranks[1:]:
            total = REFERENCE[op](total, rows[rank])
        if op == "AVERAGE":
            total = total / len(ranks)
        expected = total if self.rank in ranks else own.cpu().clone()
        reduced = idist.all_reduce(own, op, group, inplace=inplace)
        assert (reduced is own) is (inplace or self.rank not in ranks)
        assert reduced.dtype is dtype and torch.equal(reduced.cpu(), expected), f"{op} of {size} {dtype}"

    def number(self, ranks: list[int], group: Any, salt: int) -> None:
        reduced = idist.all_reduce(salt + self.rank, group=group)
        assert reduced == (sum(salt + r for r in ranks) if self.rank in ranks else salt + self.rank)

    def tree(self, ranks: list[int], group: Any, salt: int) -> None:
        sent = {
            "n": self.rank,
            "t": [torch.full((3,), self.rank), torch.full((64,), float(salt % 9))],
            "s": 0.5,
        }
        sent["t"] = [one.to(idist.device()) for one in sent["t"]]
        reduced = idist.all_reduce(sent, group=group)
        if self.rank in ranks:
            assert (reduced["n"], reduced["s"]) == (sum(ranks), 0.5 * len(ranks))
            assert reduced["t"][0].tolist() == [sum(ranks)] * 3
            assert reduced["t"][1].tolist() == [float(salt % 9) * len(ranks)] * 64
        else:
            assert reduced is sent

    def gathered(self, ranks: list[int], group: Any, salt: int) -> None:
        dtype, size = self.layout()
        gives_out = self.choices.random() < 0.3
        own = self.values(self.rank, size, salt).to(dtype).to(idist.device())
        expected = torch.cat([self.values(rank, size, salt).to(dtype) for rank in ranks])
        out = torch.zeros_like(expected, device=idist.device()) if gives_out and self.rank in ranks else None
        rows = idist.all_gather(own, group, out=out)
        assert torch.equal(rows.cpu(), expected if self.rank in ranks else own.cpu()), f"{size} {dtype}"

    def gathered_object(self, ranks: list[int], group: Any, salt: int) -> None:
        length = self.choices.choice((1, 20, 3000))
        found = idist.all_gather({"salt": salt, "rank": self.rank, "x": "x" * length}, group)
        if self.rank in ranks:
            assert [(one["salt"], one["rank"], len(one["x"])) for one in found] == [
                (salt, rank, length) for rank in ranks
            ]

    def ragged(self, ranks: list[int], group: Any, salt: int) -> None:
        found = idist.all_gather_ragged(self.values(self.rank, self.rank * 3, salt).to(idist.device()), group)
        expected = [self.values(rank, rank * 3, salt).tolist() for rank in ranks]
        assert self.rank not in ranks or [one.tolist() for one in found] == expected

    def sent(self, ranks: list[int], group: Any, salt: int) -> None:
        dtype, size = self.layout()
        src = self.choices.choice(ranks)
        own = self.values(self.rank, size, salt).to(dtype).to(idist.device())
        expected = self.values(src if self.rank in ranks else self.rank, size, salt).to(dtype)
        assert torch.equal(idist.broadcast(own, src=src, group=group).cpu(), expected), f"{size} {dtype}"

    def sent_object(self, ranks: list[int], group: Any, salt: int) -> None:
        src, length = self.choices.choice(ranks), self.choices.choice((1, 3000))
        safe_mode = self.choices.random() < 0.5
        value = [salt, self.rank, "x" * length]
        found = idist.broadcast(value, src=src, safe_mode=safe_mode, group=group)
        assert found == ([salt, src, "x" * length] if self.rank in ranks else value)

    def barrier(self, ranks: list[int], group: Any, salt: int) -> None:
        idist.barrier(group=group)

    def gradient(self, ranks: list[int], group: Any, salt: int) -> None:
        if idist.model_name() == "xla-dist" and len(ranks) < idist.get_world_size():
            return  # refused there
        if idist.device().type == "cuda":
            return  # torch has one thread for the backward passes of a GPU: they would wait for each other
        own = torch.full((64,), float(salt % 7), device=idist.device(), requires_grad=True)
        reduced = idist.all_reduce(own, group=group, sync_grads=True)
        if self.rank in ranks:
            assert reduced.tolist() == [float(salt % 7) * len(ranks)] * 64
            (reduced.sum() * (self.rank + 1)).backward()
            assert own.grad is not None and own.grad.tolist() == [float(sum(r + 1 for r in ranks))] * 64


@pytest.mark.parametrize("seed", SEEDS)
@on_every_rank
def test_any_calls_in_any_threads_give_what_they_would_alone(seed: int) -> None:
    """Threads x groups x operations, with sizes and delays that are drawn; each thread has its own groups."""
    size = idist.get_world_size()
    choices = random.Random(seed)
    num_threads = choices.randint(2, 4)
    num_calls = 150 if idist.backend() in (None, "gloo") else 40
    everyone = list(range(size))
    some = [everyone, [0, size - 1] if size > 2 else everyone, everyone[: size - 1] or everyone]
    callers = []
    for number in range(num_threads):
        drawn = [choices.choice(some) for _ in range(choices.randint(1, 3))]
        callers.append(Caller(seed, number, [(ranks, idist.new_group(ranks)) for ranks in drawn]))
    try:
        run_in_threads(*(lambda caller=caller: caller.run(num_calls) for caller in callers))
    except BaseException as error:
        raise AssertionError(f"rank {idist.get_rank()}, seed {seed}, {num_threads} threads") from error
    assert idist.all_reduce(1) == size


# --- a call in the middle of another -----------------------------------------------------------------------


class Interrupted(Tensor):
    """A tensor at each use of which something else is done, as a hook or a signal handler would."""

    interruption: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        interruption, Interrupted.interruption = Interrupted.interruption, None
        if interruption is not None:
            try:
                interruption()
            finally:
                Interrupted.interruption = interruption
        return result


@pytest.mark.parametrize("op", ["SUM", "AVERAGE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_every_rank
def test_a_collective_in_the_middle_of_another(dtype: torch.dtype, op: str) -> None:
    """At every place where the outer one looks at its tensor; in another group of the same ranks."""
    size = idist.get_world_size()
    if threads_are_ranks():
        return  # they share the class above
    inner = idist.new_group(range(size))
    seen: list[list[float]] = []

    def interrupt() -> None:
        seen.append(idist.all_reduce(torch.full((64,), 3, dtype=dtype), op, inner).unique().tolist())

    factor = size if op == "SUM" else 1
    for value in range(1, 6):
        tensor = torch.full((64,), value, dtype=dtype).as_subclass(Interrupted)
        Interrupted.interruption = interrupt
        try:
            reduced = idist.all_reduce(tensor, op)
        finally:
            Interrupted.interruption = None
        assert reduced.as_subclass(Tensor).tolist() == [value * factor] * 64
    assert len(seen) > 5 and seen == [[3 * factor]] * len(seen)


def _interrupted_on_rank_0(start: Callable[[Callable[[], None]], Callable[[], None]], num: int) -> None:
    """``num`` calls in one group interrupt those in another, on rank 0; the others make them in a thread.

    Args:
        start: gets what the interruption does, and returns what is done before each call of the other group.
        num: how many interruptions there are.
    """
    rank, size = idist.get_rank(), idist.get_world_size()
    group, done = idist.new_group(range(size)), []

    def reduce() -> None:
        done.append(idist.all_reduce(torch.full((64,), 5.0), group=group).unique().tolist())

    def reduce_all() -> None:
        for _ in range(num):
            reduce()

    before_each = start(reduce) if rank == 0 else lambda: None
    thread = None
    if rank > 0:
        thread = threading.Thread(target=reduce_all, daemon=True)
        thread.start()
    is_last, step = False, 0
    while not is_last:  # rank 0 says when it has had its interruptions
        before_each()
        step += 1
        reduced = idist.all_reduce(torch.full((64,), float(step % 100)))
        assert reduced.unique().tolist() == [float(step % 100) * size]
        is_last = idist.broadcast(len(done) >= num)
    if thread is not None:
        thread.join(SECONDS_PER_CASE / 2)
    assert done == [[5.0 * size]] * num


@on_every_rank
def test_a_collective_in_a_signal_handler() -> None:
    num = 100 if idist.backend() in (None, "gloo") else 20
    if threads_are_ranks():
        return
    before, remaining = signal.getsignal(signal.SIGALRM), [num]

    def start(reduce: Callable[[], None]) -> Callable[[], None]:
        def handle(*_: Any) -> None:
            if remaining[0]:
                remaining[0] -= 1
                reduce()

        signal.signal(signal.SIGALRM, handle)
        return lambda: signal.setitimer(signal.ITIMER_REAL, 1e-4 * random.random() + 1e-6)  # type: ignore[return-value]

    try:
        _interrupted_on_rank_0(start, num)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Cycle:
    """Garbage that only the collector finds, whenever it comes."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self.me, self.last_words = self, last_words

    def __del__(self) -> None:
        self.last_words()


@on_every_rank
def test_a_collective_where_an_object_is_deleted() -> None:
    if threads_are_ranks():
        return
    num = 50 if idist.backend() in (None, "gloo") else 20
    remaining, threshold = [num], gc.get_threshold()

    def start(reduce: Callable[[], None]) -> Callable[[], None]:
        def before_each() -> None:
            if remaining[0]:
                remaining[0] -= 1
                Cycle(reduce)
            else:
                gc.collect()

        gc.set_threshold(7)
        return before_each

    try:
        _interrupted_on_rank_0(start, num)
    finally:
        gc.set_threshold(*threshold)


# --- compare_calls ----------------------------------------------------------------------------------------


@on_every_rank
def test_debug_counts_each_handle_for_itself() -> None:
    """Two threads, each with its own group of the same ranks, have made different numbers of calls."""
    size = idist.get_world_size()
    groups = [idist.new_group(range(size)) for _ in range(2)]
    delays = random.Random(idist.get_rank())
    pause = threading.Event()

    def reduce(number: int) -> list[float]:
        seen = set()
        for _ in range(30):
            pause.wait(delays.random() * 2e-3)
            seen.update(
                idist.all_reduce(
                    torch.full((9,), number + 1.0, device=idist.device()), group=groups[number]
                ).tolist()
            )
        return sorted(seen)

    with idist.compare_calls():
        found = run_in_threads(lambda: reduce(0), lambda: reduce(1))
    assert found == [[float(size)], [2.0 * size]]


@on_every_rank
def test_debug_names_the_ranks_of_a_group() -> None:
    size = idist.get_world_size()
    if size == 1:
        return
    group = idist.new_group(range(size))
    with idist.compare_calls(), pytest.raises(idist.CollectiveMismatchError) as info:
        idist.all_reduce(torch.ones(2 + (idist.get_rank() == 0), device=idist.device()), group=group)
    assert f"of the group {list(range(size))}" in str(info.value)
    assert idist.all_reduce(1, group=group) == size


# --- barrier(timeout=) -------------------------------------------------------------------------------------


@on_every_rank
def test_barriers_of_two_handles_are_two() -> None:
    """Rank 0 waits in one, the others in the other: nobody has come to either of them."""
    rank, size = idist.get_rank(), idist.get_world_size()
    if size == 1 or threads_are_ranks():
        return
    groups = [idist.new_group(range(size)) for _ in range(2)]
    for group in groups:
        idist.barrier(group=group, timeout=timedelta(seconds=60))
    with raises(idist.MissingRanksError):
        idist.barrier(group=groups[rank > 0], timeout=timedelta(seconds=1))
    idist.barrier(timeout=timedelta(seconds=60))
    assert idist.all_reduce(1) == size
