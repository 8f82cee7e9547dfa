"""``compare_calls``, ``barrier(timeout=)`` and ``raise_together``, on every model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError, MissingRanksError, RankFailedError
from ignite_dist.testing.conformance.cases import on_every_rank, raises


def here(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=idist.device())


# What the last rank calls, what the others call, and words of the table.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "operation": (lambda: idist.barrier(), lambda: idist.all_reduce(here(3)), ["barrier", "all_reduce"]),
    "op": (
        lambda: idist.all_reduce(here(3), op="AVERAGE"),
        lambda: idist.all_reduce(here(3), op="SUM"),
        ["AVERAGE", "SUM"],
    ),
    "dtype": (
        lambda: idist.all_reduce(here(3, dtype=torch.float64)),
        lambda: idist.all_reduce(here(3)),
        ["torch.float64 (3,)", "torch.float32 (3,)"],
    ),
    "shape": (
        lambda: idist.all_gather(here(3, 2)),
        lambda: idist.all_gather(here(2, 3)),
        ["(3, 2)", "(2, 3)"],
    ),
    "tensor and object": (
        lambda: idist.all_gather({"a": 1}),
        lambda: idist.all_gather(here(1)),
        ["an object", "torch.float32 (1,)"],
    ),
    "tree": (
        lambda: idist.all_reduce({"a": 1, "b": here(2)}),
        lambda: idist.all_reduce({"a": 1, "b": here(3)}),
        ["number, torch.float32 (2,)", "number, torch.float32 (3,)"],
    ),
    "source": (
        lambda: idist.broadcast("x", src=0),
        lambda: idist.broadcast("x", src=1),
        ["from 0", "from 1"],
    ),
    "asynchronous": (
        lambda: idist.all_reduce(here(3), async_op=True).wait(),
        lambda: idist.all_reduce(here(3)),
        ["async_op=True"],
    ),
    "end of the context": (lambda: idist.finalize(), lambda: idist.all_reduce(1), ["the end of the context"]),
    "agreement": (
        lambda: idist.one_rank_only(with_barrier=True)(lambda: None)(),
        lambda: idist.all_gather("x"),
        ["one_rank_only", "an object"],
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
@on_every_rank
def test_calls_that_do_not_go_together_are_named_on_every_rank(kind: str) -> None:
    odd_call, usual_call, words = MISMATCHES[kind]
    last = idist.get_world_size() - 1
    call = odd_call if idist.get_rank() == last else usual_call
    if last == 0:
        return
    with idist.compare_calls():
        assert idist.all_reduce(1) == last + 1
        with raises(CollectiveMismatchError, "test_verification.py:") as info:
            call()
        for word in words:
            assert word in str(info.value)
        if last > 1:
            assert f"Rank {last} made a different call from the others" in str(info.value)
        assert idist.all_reduce(1) == last + 1  # nothing is out of step after it


@on_every_rank
def test_a_rank_that_has_skipped_a_call_that_looks_like_the_next_one() -> None:
    last = idist.get_world_size() - 1
    if last == 0:
        return
    with idist.compare_calls():
        if idist.get_rank() == last:
            with raises(CollectiveMismatchError, "differ only in the line"):
                idist.all_reduce(here(3))
        else:
            with raises(CollectiveMismatchError, "differ only in the line"):
                idist.all_reduce(here(3))
    with idist.compare_calls(call_sites=False):
        if idist.get_rank() == last:
            result = idist.all_reduce(here(3))
        else:
            result = idist.all_reduce(here(3))
    assert result.tolist() == [last + 1.0] * 3


@on_every_rank
def test_what_goes_together_goes_on_as_without() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    with idist.compare_calls():
        assert idist.all_reduce(here(3)).tolist() == [size] * 3
        assert idist.all_reduce({"n": rank, "t": here(2)})["n"] == sum(range(size))
        assert idist.all_gather({"rank": rank} if rank else "another type") is not None
        assert [len(one) for one in idist.all_gather_ragged(here(rank))] == list(range(size))
        shapes = [(one,) for one in range(size)]
        assert len(idist.all_gather_tensors_with_shapes(here(rank), shapes)) == size
        assert idist.broadcast("x" if rank == 0 else None, safe_mode=True) == "x"
        assert idist.broadcast(here(2) * rank).tolist() == [0, 0]
        assert idist.any_true(rank == 0) and not idist.all_true(rank > 0)
        assert idist.shared_seed() >= 0
        idist.barrier()
        for members in ([0], list(range(size)), list(range(max(1, size - 1)))):
            idist.all_reduce(here(1), group=members)
            idist.barrier(group=members)
        with idist.one_rank_first():
            pass
        with idist.raise_together():
            pass
        assert idist.one_rank_only(broadcast=True)(lambda: 5)() == 5
        total = idist.all_reduce(here(2).requires_grad_(), sync_grads=True)
        total.sum().backward()
        model = idist.auto_model(torch.nn.Linear(2, 1))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        mse_loss(model(here(4, 2)), here(4, 1)).backward()
        optimizer.step()


@on_every_rank
def test_calls_in_a_group_that_is_named_by_its_handle() -> None:
    size = idist.get_world_size()
    handle = idist.new_group([0])
    with idist.compare_calls():
        idist.all_reduce(here(2), group=handle)
        assert idist.all_reduce(here(2)).tolist() == [size] * 2


@on_every_rank
def test_a_barrier_with_a_timeout_names_who_has_not_come() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    late = size - 1
    idist.barrier(timeout=timedelta(seconds=20))
    if size > 1 and rank == late:
        idist.all_gather("the others have given up")
        with raises(MissingRanksError, "when the others had given up") as info:
            idist.barrier(timeout=timedelta(seconds=20))
        assert info.value.ranks == []
    elif size > 1:
        words = f"Rank {late} of {size} did not come to the barrier within 0:00:01.5"
        with raises(TimeoutError, words) as info:
            idist.barrier(timeout=timedelta(seconds=1.5))
        assert isinstance(info.value, MissingRanksError) and info.value.ranks == [late]
        assert "waits in all_gather at conformance/test_verification.py:" in info.value.where[late]
        idist.all_gather("the others have given up")
    for _ in range(2):
        idist.barrier(timeout=timedelta(seconds=20))
        idist.barrier(group=[0], timeout=timedelta(seconds=20))
        assert idist.all_reduce(1) == size
    if size > 2:
        idist.barrier(group=[0, size - 1], timeout=timedelta(seconds=20))
    with raises(TypeError, "as a keyword"):
        idist.barrier(timedelta(seconds=5))
    with raises(TypeError, "timeout must be a datetime.timedelta, got 5"):
        idist.barrier(timeout=5)
    with raises(ValueError, "timeout must be positive"):
        idist.barrier(timeout=timedelta(0))


class Broken(Exception):
    """What the failing rank raises."""


@pytest.mark.parametrize("everybody", [False, True], ids=["one", "all"])
@on_every_rank
def test_what_one_rank_raises_all_ranks_raise(everybody: bool) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    fails = everybody or rank == size - 1
    with raises(Broken if fails else RankFailedError, f"on rank {rank if fails else size - 1}") as info:  # noqa: SIM117
        with idist.raise_together():
            if fails:
                raise Broken(f"on rank {rank}")
    if not fails:
        assert (info.value.rank, info.value.error_type) == (size - 1, "Broken")
        assert "test_verification.py" in info.value.traceback
    with idist.raise_together():
        pass
    assert idist.all_reduce(1) == size


@on_every_rank
def test_a_group_raises_together_and_the_others_do_not_hear_of_it() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    members = list(range(max(1, size - 1)))
    expected = Broken if rank == 0 else RankFailedError
    try:
        with idist.raise_together(group=members):
            if rank == 0:
                raise Broken
    except (Broken, RankFailedError) as error:
        assert rank in members and type(error) is expected
    else:
        assert rank not in members
    assert idist.all_reduce(1) == size
