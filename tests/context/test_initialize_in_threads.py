"""``initialize`` in one thread while another asks for the rank: the context has one model."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

import helpers
import ignite_dist as idist
from ignite_dist.comp_models import NativeModel
from ignite_dist.context.live import current_model

SECONDS = 60


def asks_meanwhile() -> int:
    """The other thread asks when torch's context is there and ``initialize`` has not returned."""
    seen: list[Any] = []
    may_ask, has_asked = threading.Event(), threading.Event()
    create = NativeModel.open

    def slowly(*args: Any, **kwargs: Any) -> NativeModel:
        made = create(*args, **kwargs)
        assert dist.is_initialized()
        may_ask.set()
        assert has_asked.wait(SECONDS)
        return made

    def ask() -> None:
        assert may_ask.wait(SECONDS)
        seen.append((idist.get_rank(), idist.get_world_size()))
        seen.append(current_model())
        has_asked.set()

    asking = threading.Thread(target=ask)
    asking.start()
    NativeModel.open = slowly  # type: ignore[assignment, method-assign]
    try:
        idist.initialize("gloo")
    finally:
        asking.join()
    model = current_model()
    assert model.get_world_size() == 2
    (rank_and_size, other) = seen
    assert rank_and_size == (0, 1), "there is no context before initialize() returns"
    assert other is model or not isinstance(other, NativeModel), "its groups would be lost"
    total: int = idist.all_reduce(1, group=[0, 1])
    idist.finalize()
    return total


def test_who_asks_while_a_context_is_made_makes_no_model_of_it() -> None:
    assert helpers.run_ranks(asks_meanwhile) == [2, 2]
