"""Every pair of public calls with different arguments is an error on every rank, over shared memory."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from itertools import combinations, islice
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import ignite_dist as idist


def _values(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (4,), dtype=dtype)


def _of_lengths(lengths: range) -> list[torch.Tensor]:
    return [_values(torch.float32, length) for length in lengths[: idist.get_world_size()]]


def _entries() -> list[Any]:
    return ["text"] * idist.get_world_size()


_model: Any = None  # of auto_model


def _enter(block: Any) -> None:
    with block:
        pass


CALLS: dict[str, Callable[[], Any]] = {
    **{f"all_reduce {op}": lambda op=op: idist.all_reduce(_values(), op) for op in ("SUM", "AVERAGE", "MAX")},
    **{
        f"all_reduce {dtype}": lambda dtype=dtype: idist.all_reduce(_values(dtype), "MIN")
        for dtype in (torch.float32, torch.int32, torch.uint32, torch.bfloat16, torch.int16, torch.float64)
    },
    "all_reduce of a matrix": lambda: idist.all_reduce(_values(torch.float32, 2, 2)),
    "all_reduce of nothing": lambda: idist.all_reduce(_values(torch.float32, 0)),
    "all_reduce exact=False": lambda: idist.all_reduce(_values(torch.float16), exact=False),
    "all_reduce of halves": lambda: idist.all_reduce(_values(torch.float16)),
    "all_reduce of an array": lambda: idist.all_reduce(_values(torch.uint8).numpy()),
    "all_reduce sync_grads": lambda: idist.all_reduce(_values(), sync_grads=True),
    "all_reduce of a number": lambda: idist.all_reduce(1.5),
    "all_reduce of a number, MAX": lambda: idist.all_reduce(1.5, "MAX"),
    "all_reduce of a tree": lambda: idist.all_reduce({"a": 1, "b": _values()}),
    "all_reduce of a large tree": lambda: idist.all_reduce([_values(torch.float32, 5000)]),
    "all_reduce of a tree in place": lambda: idist.all_reduce([_values()], inplace=True),
    "any_true": lambda: idist.any_true(False),
    "all_true": lambda: idist.all_true(False),
    "any_interrupted": idist.any_interrupted,
    "reduce of a number": lambda: idist.reduce(1.5),
    "reduce to 0": lambda: idist.reduce(_values(), dst=0),
    "reduce to 1": lambda: idist.reduce(_values(), dst=1),
    "reduce of a number to 1": lambda: idist.reduce(1.5, dst=1),
    "reduce_scatter": lambda: idist.reduce_scatter(_values(torch.float32, 6)),
    "reduce_scatter MAX": lambda: idist.reduce_scatter(_values(torch.float32, 6), "MAX"),
    "reduce_scatter of a list": lambda: idist.reduce_scatter([_values()] * idist.get_world_size()),
    "reduce_scatter of rows": lambda: idist.reduce_scatter(_values(torch.float32, idist.get_world_size(), 4)),
    "reduce_scatter of short and long": lambda: idist.reduce_scatter(_of_lengths(range(1, 9))),
    "reduce_scatter of long and short": lambda: idist.reduce_scatter(_of_lengths(range(8, 0, -1))),
    "all_gather": lambda: idist.all_gather(_values()),
    "all_gather of doubles": lambda: idist.all_gather(_values(torch.float64, 2)),
    "all_gather of an object": lambda: idist.all_gather("text"),
    "all_gather of a large object": lambda: idist.all_gather("text" * 1000),
    "all_gather_ragged": lambda: idist.all_gather_ragged(_values()),
    "all_gather_ragged of ints": lambda: idist.all_gather_ragged(_values(torch.int32)),
    "with shapes": lambda: idist.all_gather_tensors_with_shapes(_values(), [(4,)] * idist.get_world_size()),
    "broadcast from 0": lambda: idist.broadcast(_values(), src=0),
    "broadcast from 1": lambda: idist.broadcast(_values(), src=1),
    "broadcast of bytes": lambda: idist.broadcast(_values(torch.uint8, 16)),
    "broadcast of an object from 0": lambda: idist.broadcast("text", src=0),
    "broadcast of an object from 1": lambda: idist.broadcast("text", src=1),
    "broadcast safe_mode": lambda: idist.broadcast("text", safe_mode=True),
    "gather to 0": lambda: idist.gather(_values(), dst=0),
    "gather to 1": lambda: idist.gather(_values(), dst=1),
    "gather of an object": lambda: idist.gather("text"),
    "scatter from 0": lambda: idist.scatter(_entries() if idist.get_rank() == 0 else None, src=0),
    "scatter from 1": lambda: idist.scatter(_entries() if idist.get_rank() == 1 else None, src=1),
    "all_to_all": lambda: idist.all_to_all(_values(torch.float32, 6)),
    "all_to_all of a list": lambda: idist.all_to_all(_entries()),
    "barrier": idist.barrier,
    "shared_seed": idist.shared_seed,
    "one_rank_only": lambda: idist.one_rank_only(with_barrier=True)(lambda: 1)(),
    "one_rank_only on 1": lambda: idist.one_rank_only(1, with_barrier=True)(lambda: 1)(),
    "one_rank_only, broadcast": lambda: idist.one_rank_only(broadcast=True)(lambda: 1)(),
    "one_rank_only of another function": lambda: idist.one_rank_only(broadcast=True)(_values)(),
    "one_rank_first": lambda: _enter(idist.one_rank_first()),
    "one_rank_first on 1": lambda: _enter(idist.one_rank_first(1)),
    "one_rank_first on the node": lambda: _enter(idist.one_rank_first(local=True)),
    "raise_together": lambda: _enter(idist.raise_together()),
    "average_parameters": lambda: idist.average_parameters(torch.nn.Linear(2, 2)),
    "save_checkpoint": lambda: idist.save_checkpoint(f"{tempfile.mkdtemp()}/a.pt", epoch=1),
    "accumulate_gradients": lambda: next(idist.accumulate_gradients([1], _model, 2)),
    "auto_dataloader": lambda: idist.auto_dataloader(list(range(8)), batch_size=2, shuffle=True),
}

MEAN_THE_SAME = [("all_gather of an object", "all_gather of a large object")]


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except idist.CollectiveMismatchError as error:
        return str(error)
    return ""


def _silent_pairs(rank: int, every: int) -> list[tuple[str, ...]]:
    """Every ``every``-th pair, if it is no error on all ranks, or one that names a function of our own.

    The last rank makes the second call.
    """
    global _model
    _model = idist.auto_model(torch.nn.Linear(2, 2))
    control, silent = idist.new_group(range(idist.get_world_size())), []
    last = idist.get_world_size() - 1
    names = [name for name in CALLS if name != "accumulate_gradients" or isinstance(_model, DDP)]
    for pair in islice(combinations(names, 2), 0, None, every):
        message = _raised(CALLS[pair[rank == last]])
        raised = idist.all_gather(bool(message), control)
        is_named = not re.search(r"rank \d+: _", message)
        if not (all(raised) and is_named) and pair not in MEAN_THE_SAME:
            silent.append((*pair, str(raised), message))
        assert idist.all_gather(rank) == list(range(last + 1)), pair  # the group is still in step
    return silent


@pytest.mark.parametrize(
    ("backend", "num_ranks", "every"),
    [
        ("gloo", 2, 11),
        pytest.param("gloo", 2, 1, marks=pytest.mark.long),
        ("gloo", 3, 23),
        pytest.param("horovod", 2, 5, marks=pytest.mark.horovod),
    ],
)
def test_no_pair_of_different_calls_is_silent(backend: str, num_ranks: int, every: int) -> None:
    found = idist.spawn(backend, _silent_pairs, (every,), nproc_per_node=num_ranks)
    assert found == [[]] * num_ranks, found[0]


def _long_trees(rank: int) -> list[str]:
    """Trees that differ behind a long part that is equal."""
    metrics = {f"metric {number:02d}": 1.0 for number in range(40)} | {f"only on rank {rank}": 1.0}
    tensors = [_values()] * 30 + [_values(torch.float32, 4 + rank)]
    said = [_raised(lambda tree=tree: idist.all_reduce(tree)) for tree in (metrics, tensors)]  # type: ignore[misc]
    return [*said, _raised(lambda: idist.reduce({"a": 1}, dst=rank))]


def test_the_first_difference_of_long_trees_is_shown_with_both_places() -> None:
    first, second = idist.spawn("gloo", _long_trees, nproc_per_node=2)
    assert first == second
    keys, shapes, roots = first
    place = "(at collectives/test_different_calls.py:"
    for text, of_0, of_1 in (
        (keys, "'only on rank 0' . }", "'only on rank 1' . }"),
        (shapes, "(torch.float32, (4,), 'cpu')]", "(torch.float32, (5,), 'cpu')]"),
        (roots, "SUM to 0 of { 'a' . }", "SUM to 1 of { 'a' . }"),
    ):
        before, after = text.split("; rank 1: ")
        assert "rank 0: " in before and f"{of_0} {place}" in before
        assert f"{of_1} {place}" in after
    assert "The ranks called reduce with different" in roots and "metric 01" not in keys
