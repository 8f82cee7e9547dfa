"""Works of ``async_op=True`` whose ``wait()`` nobody has called when the context ends."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model


def leaves_a_work(local_rank: int) -> tuple[list[str], Any]:
    work = idist.all_reduce({"n": local_rank}, async_op=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idist.finalize()
    return [str(one.message) for one in caught], work.wait()


def test_the_end_of_the_context_waits_for_a_work_and_warns() -> None:
    for messages, result in idist.spawn("gloo", leaves_a_work, nproc_per_node=2):
        assert len(messages) == 1
        assert (
            "No wait() was called for the all_reduce begun at collectives/test_pending_works" in messages[0]
        )
        assert result == {"n": 1}


def fails_with_a_work(local_rank: int) -> bool:
    model = weakref.ref(current_model())
    work = idist.all_reduce(torch.ones(1000), async_op=True)
    try:
        raise ValueError
    except ValueError:
        idist.finalize()
    del work
    gc.collect()
    return model() is None


def test_a_context_that_has_failed_is_not_kept_by_a_work() -> None:
    """Its connections would stay open, and the other ranks would wait."""
    assert idist.spawn("gloo", fails_with_a_work, nproc_per_node=2) == [True, True]
