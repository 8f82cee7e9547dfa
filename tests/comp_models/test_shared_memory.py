"""Collectives over shared memory: gloo's results, and what a group takes and gives back."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from ignite_dist.comp_models.shared_memory.segment import part_bytes
from ignite_dist.values.reduce_ops import NARROW_FLOATS
from on_ranks import on_ranks

MAX_BYTES_PER_GROUP = 8 << 20


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


def new_group(*, shares: bool = True, **kwargs: Any) -> Any:
    """A group of all ranks that has decided between shared memory and gloo."""
    group = idist.new_group(range(idist.get_world_size()), **kwargs)
    before = len(mapped())
    with switched(on=shares):
        idist.barrier(group)
    assert len(mapped()) - before == shares
    return group


@contextmanager
def switched(*, on: bool) -> Iterator[None]:
    """Shared memory is on or off for groups that are used first in this block."""
    if not on:
        os.environ[VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def used() -> list[int]:
    """For each group of this process: how many bytes of its shared memory are in use."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    found = [re.search(r"Rss: +(\d+) kB", block) for block in blocks if "/memfd:ignite_dist" in block]
    return [int(one[1]) * 1024 for one in found if one is not None]


def mapped() -> list[int]:
    """The sizes of the shared memory of this process's groups."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [re.match("([0-9a-f]+)-([0-9a-f]+)", line) for line in lines if "/memfd:ignite_dist" in line]
    return [int(found[2], 16) - int(found[1], 16) for found in ranges if found is not None]


# --- results -------------------------------------------------------------------------------------------

INTS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
OPS = {
    **dict.fromkeys(INTS, ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR")),
    **dict.fromkeys(FLOATS, ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX")),
    "bool": ("AND", "OR", "XOR"),
}
KINDS = (
    "all_reduce",
    "all_gather",
    "all_gather into out",
    "all_gather in place",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter in place",
    "all_gather of objects",
    "broadcast of an object",
    "barrier",
)


class Example(NamedTuple):
    """A collective with its values, which follow from the seed and the rank."""

    kind: str
    op: str
    dtype: str
    numel: int
    is_exact: bool
    src: int
    seed: int

    def tensor(self, rank: int, num_rows: int = 1) -> Tensor:
        dtype, shape = getattr(torch, self.dtype), (num_rows * self.numel,)
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        if dtype == torch.bool:
            return torch.randint(2, shape, generator=generator).bool()
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)
        if self.is_exact:
            return torch.randint(-8, 9, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    def object(self, rank: int) -> dict[str, Any]:
        """An object of another size on each rank."""
        generator = random.Random(100 * self.seed + rank)
        return {"rank": rank, "data": generator.randbytes(self.numel // (rank % 2 + 1))}

    @property
    def has_order(self) -> bool:
        """True if gloo's bits do not depend on its order of reduction."""
        is_rounded = self.op in ("SUM", "AVERAGE", "PRODUCT") and self.dtype in ("float32", "float64")
        return self.kind != "all_reduce" or self.is_exact or not is_rounded


@st.composite
def examples(draw: st.DrawFn, group_size: int) -> Example:
    dtype = draw(st.sampled_from(list(OPS)))
    part = part_bytes(group_size) // getattr(torch, dtype).itemsize
    chunk = (1 << 16) // getattr(torch, dtype).itemsize
    near = st.builds(
        lambda edge, more: edge + more, st.sampled_from([chunk, part, 2 * part]), st.integers(-2, 2)
    )
    return Example(
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(OPS[dtype])),
        dtype,
        draw(st.one_of(st.integers(0, 9), st.integers(10, 3 * chunk), near, st.just(3 * part + 1))),
        draw(st.booleans()),
        draw(st.integers(0, group_size - 1)),
        draw(st.integers(0, 1000)),
    )


def _perform(one: Example, group: Any) -> Any:
    rank, size = idist.get_rank(), idist.get_world_size()
    if one.kind == "all_reduce":
        return idist.all_reduce(one.tensor(rank), one.op, group)
    if one.kind == "all_gather":
        return idist.all_gather(one.tensor(rank), group)
    if one.kind == "all_gather into out":
        out = one.tensor(rank).new_empty(size * one.numel)
        return idist.all_gather(one.tensor(rank), group, out=out)
    if one.kind == "all_gather in place":  # from a part of the result, which is overwritten
        out = one.tensor(rank, size)
        start = one.seed * 997 % (one.numel * (size - 1) + 1)
        return idist.all_gather(out[start : start + one.numel], group, out=out)
    if one.kind == "broadcast":
        return idist.broadcast(one.tensor(rank), one.src, group=group)
    if one.kind == "all_to_all":
        return idist.all_to_all(one.tensor(rank, size), group)
    if one.kind == "reduce_scatter":
        return idist.reduce_scatter(one.tensor(rank, size), one.op, group)
    if one.kind == "reduce_scatter in place":
        rows = one.tensor(rank, size)
        return idist.reduce_scatter(rows, one.op, group, out=rows[: one.numel])
    if one.kind == "all_gather of objects":
        return idist.all_gather(one.object(rank), group)
    if one.kind == "broadcast of an object":
        return idist.broadcast(one.object(rank), one.src, group=group)
    return idist.barrier(group)


def _bits(result: Any) -> Any:
    """Something that is equal for equal bits."""
    if not isinstance(result, Tensor):
        return result
    digest = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return result.dtype, result.shape, digest


def _in_rank_order(one: Example) -> Any:
    rows = [one.tensor(rank) for rank in range(idist.get_world_size())]
    total = reduce(torch.mul if one.op == "PRODUCT" else torch.add, rows)
    return _bits(total / len(rows) if one.op == "AVERAGE" else total)


def _errors(one: Example, shared: Any, gloo: Any) -> str:
    """What is wrong on any rank with the results of an example."""
    found, error = _bits(_perform(one, shared)), ""
    expected = _bits(_perform(one, gloo)) if one.has_order else _in_rank_order(one)
    if found != expected:
        error += f"rank {idist.get_rank()}: {found} instead of {expected}"
    if (
        one.kind not in ("all_to_all", "reduce_scatter", "reduce_scatter in place")
        and len(set(map(str, idist.all_gather(found, gloo)))) != 1
    ):
        error += "; not the same on every rank"
    return "; ".join(filter(None, idist.all_gather(error, gloo)))


def _compare(_: int, num_examples: int) -> int:
    """Rank 0 makes the examples, and all ranks run each of them. The number of examples."""
    shared, gloo = new_group(), new_group(shares=False)
    rank, size = idist.get_rank(), idist.get_world_size()
    count = 0
    if rank > 0:
        while sent := idist.broadcast("", group=gloo):
            _errors(Example(*json.loads(sent)), shared, gloo)
            count += 1
        return count
    quiet = settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    @quiet
    @given(examples(size))
    @example(Example("all_reduce", "SUM", "float16", 100_001, False, 0, 1))
    @example(Example("all_reduce", "AVERAGE", "float16", 700_001, False, 0, 1))
    @example(Example("all_reduce", "SUM", "float32", 300_001, False, 0, 1))
    @example(Example("all_gather in place", "SUM", "float32", 600_001, False, 0, 1))
    def compare(one: Example) -> None:
        nonlocal count
        count += 1
        idist.broadcast(json.dumps(one), group=gloo)
        errors = _errors(one, shared, gloo)
        assert not errors

    try:
        compare()
    finally:
        idist.broadcast("", group=gloo)
    return count


@pytest.mark.stress
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_the_results_are_gloos(world_size: int, repetitions: Callable[[int, int], int]) -> None:
    """Bit for bit where the order of reduction does not matter; else those of the order of the ranks."""
    num = repetitions(60, 1000)
    found = on_ranks(_compare, num, world_size=world_size)
    assert len(set(found)) == 1
    assert found[0] >= num // 2


def _parts_of_any_sizes(rank: int, num: int) -> list[str]:
    """What differs from gloo, in exchanges of parts that are empty, small, or take several steps."""
    shared, gloo = new_group(), new_group(shares=False)
    size, draw, faults = idist.get_world_size(), random.Random(5), []
    largest = part_bytes(size)
    for number in range(num):
        numels = [
            [draw.choice((0, 0, 1, 7, 1000, largest // 8, largest // 4 + 1, largest)) for _ in range(size)]
            for _ in range(size)
        ]
        x = [torch.arange(numel, dtype=torch.float32) + 1000 * rank for numel in numels[rank]]
        moved, expected = (idist.all_to_all(x, group) for group in (shared, gloo))
        if [len(one) for one in moved] != [row[rank] for row in numels]:
            faults.append(f"sizes, {number}")
        if not all(map(torch.equal, moved, expected)):
            faults.append(f"values, {number}")
        dst, numel = draw.randrange(size), numels[0][0]
        gathered = [idist.gather(torch.full((numel,), float(rank)), dst, group) for group in (shared, gloo)]
        if rank == dst and not torch.equal(*gathered):
            faults.append(f"gather, {number}")
    return faults


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_any_sizes_arrive_as_over_gloo(
    world_size: int, repetitions: Callable[[int, int], int]
) -> None:
    found = on_ranks(_parts_of_any_sizes, repetitions(12, 200), world_size=world_size)
    assert found == [[]] * world_size


def _narrow_dtypes(_: int) -> set[tuple[str, bool]]:
    shared, gloo = new_group(), new_group(shares=False)
    found = set()
    for dtype in NARROW_FLOATS:
        for op in ("SUM", "AVERAGE", "PRODUCT"):
            values = torch.randn(40_000, generator=torch.Generator().manual_seed(idist.get_rank())).to(dtype)
            results = [idist.all_reduce(values.clone(), op, group) for group in (shared, gloo)]
            found.add((op, bool(_bits(results[0]) == _bits(results[1]))))
    return found


@pytest.mark.long
def test_narrow_floats_are_rounded_once_over_shared_memory_too() -> None:
    expected = {("SUM", True), ("AVERAGE", True), ("PRODUCT", True)}
    assert on_ranks(_narrow_dtypes, world_size=3) == [expected] * 3


# --- memory, files and time ----------------------------------------------------------------------------


def _sizes(_: int) -> list[int]:
    new_group()
    idist.all_reduce(torch.ones(5_000_000))
    idist.all_gather(torch.ones(5_000_000))
    without_async_calls = used()
    idist.all_reduce(torch.ones(5_000_000), async_op=True).wait()
    assert max(mapped()) <= 2 * MAX_BYTES_PER_GROUP  # half of it for asynchronous calls
    return without_async_calls


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_group_takes_at_most_8_mb(world_size: int) -> None:
    for sizes in on_ranks(_sizes, world_size=world_size):
        assert len(sizes) == 2
        assert max(sizes) <= MAX_BYTES_PER_GROUP


def _many_groups(_: int, num: int) -> tuple[int, int]:
    process, ranks = psutil.Process(), range(2)
    idist.barrier()

    def use(number: int) -> None:
        group = idist.new_group(ranks)
        assert idist.all_reduce(number, group=group) == 2 * number
        assert idist.all_reduce(torch.full((3,), number), group=group).tolist() == [2 * number] * 3
        dist.destroy_process_group(group)

    for number in range(10):
        use(number)
    before = len(mapped()), process.num_fds()
    for number in range(num):
        use(number)
    return len(mapped()) - before[0], process.num_fds() - before[1]


@pytest.mark.stress
def test_groups_give_back_their_memory_and_files(repetitions: Callable[[int, int], int]) -> None:
    for more_memory, more_files in on_ranks(_many_groups, repetitions(100, 1000)):
        assert more_memory == 0
        assert more_files <= 0


def _after_the_context(_: int) -> tuple[int, int]:
    idist.barrier()
    within = len(mapped())
    idist.finalize()
    return within, len(mapped())


def test_a_context_gives_back_its_memory() -> None:
    assert on_ranks(_after_the_context) == [(1, 0)] * 2


def _late(_: int) -> str:
    short, control = new_group(timeout=timedelta(seconds=1)), new_group(shares=False)
    if idist.get_rank() == 0:
        try:
            idist.all_reduce(torch.ones(3), group=short)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            idist.barrier(control)
    else:
        idist.barrier(control)  # rank 1 comes to no other collective before rank 0 has given up
    return ""


def test_a_rank_that_never_comes_is_waited_for_until_the_timeout() -> None:
    late, _ = on_ranks(_late)
    assert late.startswith("MissingRanksError: Rank 1 did not come to all_reduce at ")
