"""``one_rank_only`` and ``one_rank_first``, on every model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import ignite_dist as idist
from ignite_dist import RankFailedError
from ignite_dist.testing.conformance.cases import on_every_rank, raises


class Broken(Exception):
    """What the failing rank raises."""


@on_every_rank
def test_one_rank_only() -> None:
    rank = idist.get_rank()

    @idist.one_rank_only()
    def first(a: int, b: int = 1) -> int:
        """Documented."""
        return a + b

    assert first(1, b=2) == (3 if rank == 0 else None)
    assert first.__name__ == "first" and first.__doc__ == "Documented."
    last = idist.get_world_size() - 1
    assert idist.one_rank_only(rank=last, with_barrier=True)(lambda: "x")() == ("x" if rank == last else None)
    assert idist.one_rank_only(rank=99)(lambda: "x")() is None
    with raises(ValueError, "rank must be an int in"):
        idist.one_rank_only(rank=99, with_barrier=True)(lambda: "x")()
    with raises(TypeError, "@one_rank_only()"):
        idist.one_rank_only(lambda: "x")
    for later in (_asynchronous, _generator):
        with raises(TypeError, "runs after the call"):
            idist.one_rank_only(broadcast=True)(later)
        idist.one_rank_only()(later)  # as Ignite's does: the caller runs the body


async def _asynchronous() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("value", [None, 3, "é", {"a": [1]}, "tensor"])
@on_every_rank
def test_the_result_for_everybody(value: object) -> None:
    last = idist.get_world_size() - 1
    result = idist.one_rank_only(rank=last, broadcast=True)(
        lambda: torch.arange(4, device=idist.device()) if value == "tensor" else value
    )()
    if value == "tensor":
        assert result.tolist() == [0, 1, 2, 3] and result.device == idist.device()
    else:
        assert result == value


def _fail() -> None:
    raise Broken("on purpose")


@on_every_rank
def test_when_the_one_rank_fails_the_others_hear_of_it() -> None:
    last = idist.get_world_size() - 1
    for options in ({"with_barrier": True}, {"broadcast": True}):
        failing = idist.one_rank_only(rank=last, **options)(_fail)
        if idist.get_rank() == last:
            with raises(Broken, "on purpose"):
                failing()
        else:
            with raises(RankFailedError, "Broken: on purpose") as info:
                failing()
            assert (info.value.rank, info.value.error_type) == (last, "Broken")
            assert "in _fail" in info.value.traceback
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_a_result_that_cannot_be_sent() -> None:
    make = idist.one_rank_only(broadcast=True)(threading.Lock)
    with raises(TypeError if idist.get_rank() == 0 else RankFailedError, "cannot be sent"):
        make()
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_one_rank_first(tmp_path: Path) -> None:
    """The others find what the first has made."""
    for local in (False, True):
        last = idist.get_world_size() - 1
        path = tmp_path / f"made-{local}"
        with idist.one_rank_first(rank=last, local=local):
            if idist.get_rank() == last:
                assert not path.exists()
                path.write_text("data")
            assert path.read_text() == "data"
        for wrong in (-1, last + 1):
            with raises(ValueError, "rank must be an int in"), idist.one_rank_first(rank=wrong, local=local):
                raise AssertionError("not reached")


@on_every_rank
def test_when_the_first_rank_fails_the_others_do_not_start() -> None:
    for local in (False, True):
        first = idist.get_world_size() - 1
        started = False
        with raises(Broken if idist.get_rank() == first else RankFailedError, "on purpose") as info:  # noqa: SIM117
            with idist.one_rank_first(rank=first, local=local):
                started = True
                _fail()
        assert started == (idist.get_rank() == first)
        if not started:
            assert info.value.rank == first
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_what_the_others_raise_is_theirs_alone() -> None:
    last = idist.get_world_size() - 1
    if last == 0:
        return
    is_failing = idist.get_rank() == last
    with raises(Broken, "on purpose") if is_failing else nullcontext(), idist.one_rank_first():
        if is_failing:
            _fail()
    assert idist.all_reduce(1) == idist.get_world_size()
